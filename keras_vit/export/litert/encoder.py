"""Writers of the encoder's layers: patches or words, prefix tokens, positions, blocks (paper, equations 1 to 3)."""

from typing import Any

import numpy as np

from keras_vit.export.litert import folding
from keras_vit.export.litert.attention import attention, first_tokens
from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.layers import apply_affine, center, mlp, norm, residual_dense, token_mlp
from keras_vit.export.litert.operators import static_dim
from keras_vit.export.litert.storage import INT8
from keras_vit.export.litert.writer import HONOURED, FileWriter, Value, honours, source, writes
from keras_vit.model import layers as vit
from keras_vit.model.config import BlockConfig
from keras_vit.model.layers.position_variants import RelativePosition
from keras_vit.model.layers.tokens import TokenEmbedding
from keras_vit.model.vision_transformer import VisionTransformer

honours(vit.PatchEmbedding, "hidden_size", "patch_size", "use_bias")


@writes(vit.PatchEmbedding, starts_stream=True)
def write_patches(file: FileWriter, layer: Any, images: Any) -> Value:
    """Write one token for each patch, (batch, rows * columns, hidden_size).

    Square patches that cover the image can go to a dense layer: it is faster than a convolution, and the runtime
    quantizes each patch by itself. Some NPUs have CONV_2D, but not the SPACE_TO_DEPTH before it.
    """
    ops = file.ops
    scales = file.stream_scales
    image = file.read(images)
    x = image.tensor
    kernel, bias = folding.patch_weights(layer, image.affine and image.affine.gain)
    kernel, bias = folding.center_and_scale(kernel.T, scales).T, folding.center_and_scale(bias, scales)
    _, height, width, _ = kernel.shape
    rows, columns = static_dim(x.shape[1]) // height, static_dim(x.shape[2]) // width
    covers_image = x.shape[1:3] == (rows * height, columns * width)
    name = layer.name
    if file.options.patches == "convolution" or height != width or not covers_image:
        x = ops.convolution(x, kernel, bias, name, strides=(height, width), same=False)
        x = ops.reshape(x, (x.shape[0], rows * columns, len(kernel)), f"{name}/tokens")
    else:
        if height > 1:
            x = ops.space_to_depth(x, height, f"{name}/cells")
        x = ops.reshape(x, (x.shape[0], rows * columns, x.shape[3]), f"{name}/patches")
        x = ops.dense(x, kernel.reshape(len(kernel), -1), bias, name)
    return Value(x, scales=scales)


honours(vit.PrefixTokens, "class_token", "distilled", "num_registers")
honours(vit.PositionEmbedding, "grid", "prefix_tokens", "kind", "method")


@writes(vit.PrefixTokens, vit.PositionEmbedding, reads_stream=True)
def write_stem_table(file: FileWriter, layer: Any, tokens: Any) -> Value:
    """Write prefix tokens and positions in front of the first block: one addition to the padded patches."""
    layers = [layer]
    while isinstance(source(tokens)[0], vit.PrefixTokens | vit.PositionEmbedding):
        front, [tokens] = source(tokens)
        layers.insert(0, front)
    x = file.read(tokens)
    table = np.zeros([static_dim(size) for size in x.tensor.shape[1:]])
    for one in layers:
        if isinstance(one, vit.PrefixTokens):
            table = np.concatenate([folding.prefix_tokens(one), table])
        else:
            table = table + folding.float64(one.table())[0]
    tensor = apply_affine(file.ops, x, f"{layer.name}/input")
    tensor = file.ops.pad(tensor, (0, len(table) - static_dim(tensor.shape[1]), 0), "prefix/places")
    if table.any():
        table = folding.center_and_scale(table, x.scales)
        positions = (vit.PositionEmbedding, RelativePosition)
        has_others = any(isinstance(one, positions) and one not in layers for one in file.model.layers)
        name = "prefix" if has_others else "position"  # blocks with positions use the second name
        tensor = file.ops.add_table(tensor, table[None], name)
    return Value(tensor, scales=x.scales)


honours(TokenEmbedding, "vocab_size", "max_length", "hidden_size")


@writes(TokenEmbedding, starts_stream=True)
def write_token_embedding(file: FileWriter, layer: Any, ids: Any) -> Value:
    """Write the embeddings of ids (batch, max_length), which are the file's input, and of their positions.

    With int8 kernels the table has a scale for each token. The runtime reads only the rows of a text.
    """
    del ids
    ops, name, scales = file.ops, layer.name, file.stream_scales
    tables = (folding.float64(weights) for weights in (layer.embedding, layer.positions))
    words, positions = (folding.center_and_scale(table, scales) for table in tables)
    file.inputs["ids"] = ids = ops.builder.input("ids", (file.options.batch, layer.max_length), "int32")
    storage = ops.storage.storage_of("GATHER", name)
    if storage == INT8:
        integers, factors = storage.rounded(words)
        rows = ops.gather(ops.constant(integers, f"{name}/embedding"), ids, f"{name}/rows")
        factor = ops.gather(ops.constant(factors, f"{name}/factors"), ids, f"{name}/factor")
        x = ops.multiply(ops.cast(rows, "float32", f"{name}/floats"), factor, f"{name}/words")
    else:
        x = ops.gather(storage.add_kernel(ops.builder, words, f"{name}/embedding"), ids, f"{name}/words")
    return Value(ops.add(x, ops.constant(positions[None], f"{name}/positions"), name), scales=scales)


honours(
    BlockConfig,
    "num_heads",
    "mlp_dim",
    "tokens_mlp_dim",
    "qkv_bias",
    "key_bias",
    "gated_mlp",
    "mlp_norm",
    "activation",
    "norm_epsilon",
    "layer_scale",
    "dropout_rate",
    "attention_dropout_rate",
)
honours(vit.EncoderBlock, *HONOURED[BlockConfig], "rotary", "causal", "stochastic_depth", "final_tokens")


@writes(vit.EncoderBlock, starts_stream=True, reads_stream=True)
def write_block(file: FileWriter, block: Any, tokens: Any, relative: Any = None) -> Value:
    """Write an encoder block, for the tokens that later layers read.

    Positions that are added to the input of every block are written here: blocks may share their layer.
    """
    ops = file.ops
    name = block.name
    scales = file.stream_scales
    position, inputs = source(tokens)
    if isinstance(position, vit.PositionEmbedding):
        x = _stream_tokens(file, *inputs)
        table = folding.center_and_scale(folding.float64(position.table()), scales)
        x = ops.add(x, file.shared_constant(table, f"{position.name}/embedding"), f"{name}/position")
    else:
        x = _stream_tokens(file, tokens)
    is_whole = isinstance(file.model, VisionTransformer)  # other layers of other models may read any token
    queries = (block.final_tokens if is_whole else None) or static_dim(x.shape[1])
    normalized = norm(file, block.norm1, Value(x, scales=scales), f"{name}/norm1")
    if block.attention is None:
        branch = _mix_tokens(file, block, normalized, f"{name}/token_mlp", queries=queries)
    else:
        layer = relative if relative is None else source(relative)[0]
        mixed = attention(file, block.attention, normalized, f"{name}/attention", queries=queries, relative=layer)
        out = block.attention.out
        options: dict[str, Any] = {"layer_scale": block.scale1, "scales": scales}
        few_rows = queries * block.attention.num_heads < static_dim(x.shape[1])
        branch = residual_dense(file, out, mixed, f"{name}/attention/out", few_rows=few_rows, **options)
    x = first_tokens(ops, x, queries, name)
    x = ops.add(x, branch, f"{name}/{'token_mixing' if block.attention is None else 'attention'}")
    normalized = norm(file, block.norm2, Value(x, scales=scales), f"{name}/norm2")
    branch = mlp(file, block.mlp, normalized, f"{name}/mlp", layer_scale=block.scale2, scales=scales)
    return Value(ops.add(x, branch, name), scales=scales)


def _mix_tokens(file: FileWriter, block: Any, x: Value, name: str, *, queries: int) -> Tensor:
    """Return the result of a block's token MLP for the residual stream, (batch, queries, hidden_size).

    Its dense layers run along the tokens: gains and factors of channels cannot be folded into them.
    """
    ops = file.ops
    mixed = token_mlp(file, block.token_mlp, apply_affine(ops, x, f"{name}/input"), name, queries=queries)
    if block.scale1 is not None:
        gamma = ops.constant(folding.float64(block.scale1.gamma), f"{name}/scale1/gamma")
        mixed = ops.multiply(mixed, gamma, f"{name}/scale1")
    return _center_and_scale(file, mixed, f"{name}/stream")


def _stream_tokens(file: FileWriter, tokens: Any) -> Tensor:
    """Return tokens as the residual stream has them; those of a norm in front of the first block are not yet so."""
    x = file.read(tokens)
    tensor = apply_affine(file.ops, x, x.norm)
    return tensor if x.scales is not None else _center_and_scale(file, tensor, "tokens")


def _center_and_scale(file: FileWriter, x: Tensor, name: str) -> Tensor:
    """Compute `folding.center_and_scale` where there are no weights into which it could be folded."""
    scales = file.stream_scales
    if scales is None:
        return x
    x = center(file.ops, x, name)
    if (scales == 1).all():
        return x
    return file.ops.multiply(x, file.shared_constant(scales, "stream/scales"), f"{name}/scaled")
