"""Write the encoder: patches, prefix tokens and positions, blocks, and their attention."""

import dataclasses
from typing import Any

import numpy as np

from keras_vit.export.litert import folding
from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Affine, DenseWeights
from keras_vit.export.litert.layers import apply_affine, center, mlp, norm, residual_dense, token_mlp
from keras_vit.export.litert.operators import FLOAT16, INT8, Integers, Operators, Storage, static_dim
from keras_vit.export.litert.plan import image_config
from keras_vit.export.litert.writer import HONOURED, STREAM_READERS, FileWriter, PendingTensor, honours, source, writes
from keras_vit.model import layers as vit
from keras_vit.model.config import BlockConfig
from keras_vit.model.layers.attention import MASKED, MergeHeads, SplitHeads
from keras_vit.model.layers.position_variants import RelativeBias, RelativePosition, Rotary, RotaryFrequencies
from keras_vit.model.layers.tokens import TokenEmbedding
from keras_vit.model.vision_transformer import VisionTransformer

honours(vit.PatchEmbedding, "hidden_size", "patch_size", "use_bias")


@writes(vit.PatchEmbedding, starts_stream=True)
def write_patches(file: FileWriter, layer: Any, images: Any) -> PendingTensor:
    """Write one token for each patch, (batch, rows * columns, hidden_size).

    Square patches that cover the image can go to a dense layer: it is faster than a convolution, and the runtime
    quantizes each patch by itself. Some NPUs have CONV_2D, but not the SPACE_TO_DEPTH before it.
    """
    ops = file.ops
    stream = file.stream
    image = file.tensor_of(images)
    x = image.tensor
    kernel, bias = folding.patch_weights(layer, image.affine and image.affine.gain)
    kernel, bias = folding.to_stream(kernel.T, stream).T, folding.to_stream(bias, stream)
    _, height, width, _ = kernel.shape
    rows, columns = static_dim(x.shape[1]) // height, static_dim(x.shape[2]) // width
    covers_image = x.shape[1:3] == (rows * height, columns * width)
    name = layer.name
    if file.plan.patches == "convolution" or height != width or not covers_image:
        x = ops.convolution(x, kernel, bias, name, strides=(height, width), same=False)
        x = ops.reshape(x, (x.shape[0], rows * columns, len(kernel)), f"{name}/tokens")
    else:
        if height > 1:
            x = ops.space_to_depth(x, height, f"{name}/cells")
        x = ops.reshape(x, (x.shape[0], rows * columns, x.shape[3]), f"{name}/patches")
        x = ops.dense(x, kernel.reshape(len(kernel), -1), bias, name)
    return PendingTensor(x, stream=stream)


honours(vit.PrefixTokens, "class_token", "num_class_tokens", "distilled", "num_registers")
honours(vit.PositionEmbedding, "grid", "prefix_tokens", "method", kind=("learned", "learned2d", "sincos2d"))


@writes(vit.PrefixTokens, vit.PositionEmbedding, reads_stream=True)
def write_stem_table(file: FileWriter, layer: Any, tokens: Any) -> PendingTensor:
    """Write prefix tokens, and positions in front of the first block: one addition to the padded tokens."""
    layers = [layer]
    while isinstance(source(tokens)[0], vit.PrefixTokens | vit.PositionEmbedding):
        front, [tokens] = source(tokens)
        layers.insert(0, front)
    x = file.tensor_of(tokens)
    table = np.zeros([static_dim(size) for size in x.tensor.shape[1:]])
    for stem_layer in layers:
        if isinstance(stem_layer, vit.PrefixTokens):
            table = np.concatenate([folding.prefix_tokens(stem_layer), table])
        else:
            table = table + folding.float64(stem_layer.table())[0]
    tensor = apply_affine(file.ops, x, f"{layer.name}/input")
    name = layer.name if isinstance(source(tokens)[0], vit.EncoderBlock) else "prefix"  # an EoMT's queries
    tensor = file.ops.pad(tensor, (0, len(table) - static_dim(tensor.shape[1]), 0), f"{name}/places")
    if table.any():
        table = folding.to_stream(table, x.stream)
        positions = (vit.PositionEmbedding, RelativePosition)
        has_others = any(isinstance(x, positions) and x not in layers for x in file.model.layers)
        if name == "prefix" and not has_others:
            name = "position"  # blocks with positions use it
        tensor = file.ops.add_table(tensor, table[None], name)
    return PendingTensor(tensor, stream=x.stream)


honours(TokenEmbedding, "vocab_size", "max_length", "hidden_size")


@writes(TokenEmbedding, starts_stream=True)
def write_token_embedding(file: FileWriter, layer: Any, ids: Any) -> PendingTensor:
    """Write the embeddings of ids (batch, max_length), which are the file's input, and of their positions.

    With int8 kernels the table has a scale for each token. The runtime reads only the rows of a text, and a GPU has no
    table of float16: 16 bits are the sum of two tables of 8.
    """
    del ids
    ops, name, stream = file.ops, layer.name, file.stream
    tables = (folding.float64(weights) for weights in (layer.embedding, layer.positions))
    words, positions = (folding.to_stream(table, stream) for table in tables)
    file.inputs["ids"] = ids = ops.builder.input("ids", (file.plan.batch, layer.max_length), "int32")
    storage = ops.storage.storage_of("EMBEDDING_LOOKUP", name)

    def rows_of(table: np.ndarray | Integers, name: str, storage: Storage = storage) -> Tensor:
        return ops.embedding_lookup(storage.add_kernel(ops.builder, table, f"{name}/embedding"), ids, name)

    if storage == FLOAT16:
        coarse, fine = _in_two_tables(words)
        x = ops.add(rows_of(coarse, f"{name}/coarse", INT8), rows_of(fine, f"{name}/fine", INT8), f"{name}/words")
    else:
        x = rows_of(words, f"{name}/words")
    return PendingTensor(ops.add(x, ops.constant(positions[None], f"{name}/positions"), name), stream=stream)


def _in_two_tables(table: np.ndarray) -> tuple[Integers, Integers]:
    """Split a table, (rows, width), into two of int8 whose sum is within 1/64770 of a row's largest value."""
    scales = (np.abs(table).max(axis=-1) / (255 * INT8.largest)).astype(np.float32)
    scales = np.where(scales > 0, scales, np.float32(1))
    integers = np.rint(table / scales[:, None]).clip(-255 * INT8.largest, 255 * INT8.largest)
    coarse = np.rint(integers / 255)
    fine = integers - 255 * coarse  # -127 to 127
    return Integers(coarse.astype(np.int8), 255 * scales), Integers(fine.astype(np.int8), scales)


honours(
    BlockConfig,
    "num_heads",
    "mlp_dim",
    "tokens_mlp_dim",
    "qkv_bias",
    "key_bias",
    "dense_bias",
    "gated_mlp",
    "attention_norm",
    "mlp_norm",
    "activation",
    "norm_epsilon",
    "layer_scale",
    "dropout_rate",
    "attention_dropout_rate",
    norm=("layer", "rms"),
)
honours(vit.EncoderBlock, *HONOURED[BlockConfig], "rotary", "causal", "stochastic_depth", "final_tokens")


@writes(vit.EncoderBlock, starts_stream=True, reads_stream=True)
def write_block(file: FileWriter, block: Any, tokens: Any, relative: Any = None) -> PendingTensor:
    """Write an encoder block, for the tokens that later layers read.

    Positions that are added to the input of every block are written here: blocks may share their layer.
    """
    ops = file.ops
    name = block.name
    stream = file.stream
    position, inputs = source(tokens)
    if isinstance(position, vit.PositionEmbedding):
        x = _stream_tokens(file, *inputs)
        table = folding.to_stream(folding.float64(position.table()), stream)
        x = ops.add(x, file.shared_constant(table, f"{position.name}/embedding"), f"{name}/position")
    else:
        x = _stream_tokens(file, tokens)
    is_whole = isinstance(file.model, VisionTransformer)  # other layers of other models may read any token
    queries = (block.final_tokens if is_whole else None) or static_dim(x.shape[1])
    normalized = norm(file, block.norm1, PendingTensor(x, stream=stream), f"{name}/norm1")
    if block.attention is None:
        branch = _write_token_mlp(file, block, normalized, f"{name}/token_mlp", queries=queries)
    else:
        layer = relative if relative is None else source(relative)[0]
        mixed = attention(file, block.attention, normalized, f"{name}/attention", queries=queries, relative=layer)
        if block.attention.norm_epsilon is not None:
            mixed = norm(file, block.attention.norm, mixed, f"{name}/attention/norm")
        out = block.attention.out
        options: dict[str, Any] = {"layer_scale": block.scale1, "stream": stream}
        few_rows = queries * block.attention.num_heads < static_dim(x.shape[1])
        branch = residual_dense(file, out, mixed, f"{name}/attention/out", few_rows=few_rows, **options)
    x = first_tokens(ops, x, queries, name)
    x = ops.add(x, branch, f"{name}/{'token_mixing' if block.attention is None else 'attention'}")
    normalized = norm(file, block.norm2, PendingTensor(x, stream=stream), f"{name}/norm2")
    branch = mlp(file, block.mlp, normalized, f"{name}/mlp", layer_scale=block.scale2, stream=stream)
    return PendingTensor(ops.add(x, branch, name), stream=stream)


def _write_token_mlp(file: FileWriter, block: Any, x: PendingTensor, name: str, *, queries: int) -> Tensor:
    """Write a block's token MLP for the residual stream, (batch, queries, hidden_size).

    Its dense layers run along the tokens: gains and factors of channels cannot be folded into them.
    """
    ops = file.ops
    mixed = token_mlp(file, block.token_mlp, apply_affine(ops, x, f"{name}/input"), name, queries=queries)
    if block.scale1 is not None:
        gamma = ops.constant(folding.float64(block.scale1.gamma), f"{name}/scale1/gamma")
        mixed = ops.multiply(mixed, gamma, f"{name}/scale1")
    return _to_stream(file, mixed, f"{name}/stream")


def _stream_tokens(file: FileWriter, tokens: Any) -> Tensor:
    """Read tokens of the residual stream; those of a norm in front of the first block are brought into its form."""
    x = file.tensor_of(tokens)
    tensor = apply_affine(file.ops, x, x.norm)
    return tensor if x.stream is not None else _to_stream(file, tensor, "tokens")


def _to_stream(file: FileWriter, x: Tensor, name: str) -> Tensor:
    """Compute `folding.to_stream` where there are no weights into which it could be folded."""
    stream = file.stream
    if stream is None:
        return x
    if stream.is_centered:
        x = center(file.ops, x, name)
    if (stream.scales == 1).all():
        return x
    return file.ops.multiply(x, file.shared_constant(stream.scales, "stream/scales"), f"{name}/scaled")


# ---- attention

honours(RelativePosition, "grid", "num_heads", "prefix_tokens")
honours(RelativeBias, "grid", "num_heads", "prefix_tokens", "mlp_dim", "method")
# Of the tokens they read shape and type alone.
STREAM_READERS.update((RelativePosition, RelativeBias, RotaryFrequencies))
honours(
    vit.MultiHeadAttention,
    *("num_heads", "projects_query", "use_bias", "key_bias", "out_bias", "rotary", "norm_epsilon", "causal"),
    "dropout_rate",
)
honours(Rotary, "grid", "prefix_tokens", "theta", "trained_grid", "interleaved", "offset", "block", axes=("yx", "xy"))
honours(RotaryFrequencies, "rotary", "num_layers", "num_heads", "head_size")
honours(SplitHeads, "num_heads", "head_size", "use_bias", "scale")
honours(MergeHeads, "width", "use_bias")


def attention(
    file: FileWriter, layer: Any, x: PendingTensor, name: str, *, queries: int, relative: Any = None
) -> PendingTensor:
    """Write attention of the first `queries` tokens in front of its norm and its output projection.

    The result is (batch, queries, hidden_size).

    `relative` is a RelativePosition, a RelativeBias or a RotaryFrequencies. The attention weights, (batch, heads,
    queries, tokens) or (batch, heads * queries, tokens), become `file.attention`.

    Keys and values lack the norm's constant. Softmax ignores it in the keys: it is equal in all scores of a query,
    unless keys are turned by their positions. The weights add up to 1, so it passes through the values to the
    projection, whose bias has it. A norm in front of the projection reads values with it.
    """
    ops = file.ops
    heads = layer.num_heads
    without_constant, removed_offset = x, None
    if layer.norm_epsilon is None:
        without_constant, removed_offset = _remove_constant(x, folding.dense_weights(layer.value))
    keys = file.fold(folding.key_weights(layer), without_constant if layer.rotary is None else x)
    values = file.fold(folding.dense_weights(layer.value), without_constant)
    query_weights = file.fold(folding.query_weights(layer), x)
    query = ops.dense(first_tokens(ops, x.tensor, queries, name), *query_weights, f"{name}/query")
    if relative is None and layer.rotary is None and heads * queries < static_dim(x.tensor.shape[1]):
        mixed, file.attention = _few_query_attention(ops, query, x.tensor, keys, values, heads, name)
        return PendingTensor(mixed, removed_offset)
    query = split_heads(ops, query, heads, f"{name}/query")
    key = split_heads(ops, ops.dense(x.tensor, *keys, f"{name}/key"), heads, f"{name}/key")
    value = split_heads(ops, ops.dense(x.tensor, *values, f"{name}/value"), heads, f"{name}/value")
    if layer.rotary is not None:
        query, key = (
            _apply_rotary(file, x, layer.rotary, f"{name}/{role}", relative)
            for x, role in ((query, "query"), (key, "key"))
        )
    scores = ops.matmul(query, key, f"{name}/scores", transpose_b=True)
    if isinstance(relative, RelativeBias):
        biases = folding.relative_bias(relative, queries)
        added = file.shared_constant(biases, f"{relative.name}/bias_{queries}", is_table=True)
        scores = ops.add(scores, added, f"{name}/all_scores")
    elif isinstance(relative, RelativePosition):
        scores = ops.add(scores, _relative_scores(file, query, relative, name), f"{name}/all_scores")
    if layer.causal:
        mask = np.triu(np.full([static_dim(x.tensor.shape[1])] * 2, MASKED), 1)[None, None]
        scores = ops.add(scores, file.shared_constant(mask, "causal_mask"), f"{name}/masked")
    file.attention = ops.softmax(scores, f"{name}/weights")
    return PendingTensor(merge_heads(ops, ops.matmul(file.attention, value, f"{name}/mixed"), name), removed_offset)


def class_attention(file: FileWriter) -> Tensor:
    """Write the class tokens' mean attention to the patches in the last block, (batch, heads, patches)."""
    ops = file.ops
    layers = file.model.layers
    block = [layer for layer in layers if isinstance(layer, vit.EncoderBlock)][-1]
    start = sum(len(folding.prefix_tokens(layer)) for layer in layers if isinstance(layer, vit.PrefixTokens))
    file.tensor_of(block.output)
    heads = block.attention.num_heads
    weights = file.attention
    assert weights is not None  # the check of the options refuses models without attention
    batch, tokens = weights.shape[0], static_dim(weights.shape[-1])
    if len(weights.shape) == 3:
        weights = ops.reshape(weights, (batch, heads, static_dim(weights.shape[1]) // heads, tokens), "attention/heads")
    class_tokens = image_config(file.model).num_class_tokens
    if weights.shape[2] != class_tokens:
        weights = ops.slice(weights, 2, 0, class_tokens, "attention/class_token")
    if class_tokens > 1:
        weights = ops.mean(weights, [2], "attention/class_tokens", keepdims=True)
    weights = ops.slice(weights, 3, start, tokens, "attention/patches")
    return ops.reshape(weights, (batch, heads, tokens - start), "attention")


def _remove_constant(x: PendingTensor, values: DenseWeights) -> tuple[PendingTensor, Affine | None]:
    """Remove the constant of x's affine; also the affine that adds it to the mixed values instead."""
    if x.affine is None:
        return x, None
    without_constant = x.affine._replace(constant=np.zeros_like(x.affine.constant))
    removed_offset = values.kernel @ x.affine.constant
    restored = Affine(np.ones_like(removed_offset), np.zeros_like(removed_offset), removed_offset)
    return dataclasses.replace(x, affine=without_constant), restored


def _few_query_attention(
    ops: Operators, query: Tensor, x: Tensor, keys: DenseWeights, values: DenseWeights, heads: int, name: str
) -> tuple[Tensor, Tensor]:
    """Compute attention of few queries without the keys and values of every token, which would cost more.

    With the kernels K and V of a head, q (x K)' = (q K') x' and w (x V) = (w x) V: K is applied to the queries, and
    V to the weighted sums of tokens. All heads are one product: each has its own rows, in which the channels of other
    heads are zero before K and after V. Softmax ignores the bias of the keys, which is equal in all scores of a query.
    """
    batch, queries, width = query.shape
    by_head = (batch, heads, queries, width)
    rows = (batch, heads * static_dim(queries), width)
    own_channels = np.eye(heads).repeat(static_dim(width) // heads, axis=1)[None, :, None]
    mask = ops.constant(own_channels, f"{name}/own")
    query = ops.reshape(query, (batch, 1, queries, width), f"{name}/query/apart")
    query = ops.reshape(ops.multiply(query, mask, f"{name}/query/own"), rows, f"{name}/query/rows")
    query = ops.dense(query, keys.kernel.T, None, f"{name}/key")
    weights = ops.softmax(ops.matmul(query, x, f"{name}/scores", transpose_b=True), f"{name}/weights")
    mixed = ops.dense(ops.matmul(weights, x, f"{name}/mixed"), *values, f"{name}/value", few_rows=True)
    mixed = ops.multiply(ops.reshape(mixed, by_head, f"{name}/value/apart"), mask, f"{name}/value/own")
    return ops.sum(mixed, [1], f"{name}/joined", keepdims=False), weights


def _apply_rotary(file: FileWriter, x: Tensor, rotary: Any, name: str, learned: Any) -> Tensor:
    """Rotate queries or keys, (batch, heads, tokens, size), by their rotary positions, which may be learned.

    x * cosines + quarter_turn(x) * sines; the signs of the quarter turn are those of the sines.
    """
    ops = file.ops
    tokens, size = static_dim(x.shape[2]), static_dim(x.shape[3])
    half = size // 2
    cosines, sines = folding.rotary_tables(rotary, tokens, size, learned)
    if not sines.any():  # tokens in front of the patches
        return x
    halves = [ops.slice(x, 3, start, start + half, f"{name}/half_{start}") for start in (half, 0)]
    quarter = ops.concatenate(halves, 3, f"{name}/quarter")
    table = "rotary" if rotary.block is None else name.rpartition("/")[0] + "/rotary"
    cosine_table = file.shared_constant(cosines[None], f"{table}_{tokens}/cosines")
    sine_table = file.shared_constant(sines[None], f"{table}_{tokens}/sines")
    along = ops.multiply(x, cosine_table, f"{name}/along")
    across = ops.multiply(quarter, sine_table, f"{name}/across")
    return ops.add(along, across, f"{name}/turned")


def _relative_scores(file: FileWriter, query: Tensor, layer: Any, name: str) -> Tensor:
    """Compute the scores of relative positions, (batch, heads, queries, tokens).

    Every query is multiplied by the embeddings of all offsets. Reshaping the flat result to rows one column shorter
    moves each offset to the column of its key, as `relative_scores` of the layer does.
    """
    ops, (batch, heads, query_dim, _) = file.ops, query.shape
    queries = static_dim(query_dim)
    table = folding.relative_table(layer, queries)[None]
    table_tensor = file.shared_constant(table, f"{layer.name}/table_{queries}")
    width = table.shape[2] - 1  # tokens + queries - 1
    x = ops.matmul(query, table_tensor, f"{name}/offsets", transpose_b=True)
    x = ops.reshape(x, (batch, heads, queries * (width + 1)), f"{name}/flat")
    x = ops.slice(x, 2, queries - 1, queries - 1 + queries * width, f"{name}/skewed")
    x = ops.reshape(x, (batch, heads, queries, width), f"{name}/rows")
    return ops.slice(x, 3, 0, width - queries + 1, f"{name}/relative")


def first_tokens(ops: Operators, x: Tensor, count: int, name: str) -> Tensor:
    """Take the first tokens of x, (batch, tokens, width)."""
    return x if x.shape[1] == count else ops.slice(x, 1, 0, count, f"{name}/first")


def split_heads(ops: Operators, x: Tensor, heads: int, name: str) -> Tensor:
    """Turn (batch, tokens, heads * size) into (batch, heads, tokens, size)."""
    batch, tokens, width = x.shape
    x = ops.reshape(x, (batch, tokens, heads, static_dim(width) // heads), f"{name}/heads")
    return ops.transpose(x, (0, 2, 1, 3), f"{name}/heads_first")


def merge_heads(ops: Operators, x: Tensor, name: str) -> Tensor:
    """Turn (batch, heads, tokens, size) into (batch, tokens, heads * size)."""
    batch, heads, tokens, size = x.shape
    if tokens != 1:
        x = ops.transpose(x, (0, 2, 1, 3), f"{name}/heads_last")
    return ops.reshape(x, (batch, tokens, static_dim(heads) * static_dim(size)), f"{name}/joined")
