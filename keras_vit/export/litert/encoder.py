"""Encoder as LiteRT operators: from the image to the tokens of the last block (paper, equations 1 to 3)."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_vit.export.litert import folding, stem
from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Affine, DenseWeights
from keras_vit.export.litert.images import ImageInput
from keras_vit.export.litert.layers import Layers
from keras_vit.export.litert.operators import static_dim


@dataclass
class Encoder:
    """Add the encoder of a VisionTransformer to the file of `layers`."""

    layers: Layers
    model: Any
    patches: str | None = "dense"  # how patches are embedded, see `Options`
    _shared_constants: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ops, self.config = self.layers.ops, self.model.config
        # See `folding.to_stream`. Tokens are left as they are where attention pooling reads them before any norm.
        is_read_plain = self.config.has_map_head and self.config.final_norm == "pooled"
        self.scales = None if is_read_plain else self.layers.scales

    def encode(self, image: ImageInput) -> tuple[Tensor, Tensor | None]:
        """Return the tokens for the head, (batch, num_final_tokens, hidden_size), and the attention weights of the last
        block, (batch, heads, final tokens, tokens) or (batch, heads * final tokens, tokens); None without attention.
        """
        x, attention, config = self._embed(image), None, self.config
        for i in range(config.num_layers):
            queries = config.num_final_tokens if i == config.num_layers - 1 else config.num_tokens
            x, attention = self._block(x, i, queries)
        return x, attention

    def _embed(self, image: ImageInput) -> Tensor:
        """Return the first block's input: patches, tokens in front of them, positions, pre_norm."""
        ops, c = self.ops, self.config
        x, scale = image.tensor, image.scale
        if c.resnet is not None:
            x, scale = stem.stem(ops, self.model, image), None
        if not c.num_layers:
            return ops.reshape(x, (x.shape[0], c.num_tokens, c.hidden_size), "tokens")
        kernel, bias = folding.patch_weights(self.model.get_layer("embedding"), scale)
        kernel, bias = folding.to_stream(kernel.T, self.scales).T, folding.to_stream(bias, self.scales)
        x = self._patches(x, kernel, bias)
        if c.num_prefix_tokens:
            x = ops.pad(x, (0, c.num_prefix_tokens, 0), "prefix/places")
        table = self._stem_table()
        if table.any():
            name = "position" if c.position_place == "stem" else "prefix"
            x = ops.add(x, ops.constant(table[None], f"{name}/embedding"), name)
        if c.pre_norm:
            x, affine = self.layers.norm(x, self.model.get_layer("pre_norm"), "pre_norm", self.scales)
            x = self._to_stream(self.layers.apply_affine(x, affine, "pre_norm"), "tokens")
        return x

    def _patches(self, x: Tensor, kernel: np.ndarray, bias: np.ndarray) -> Tensor:
        """Return one token for each patch, (batch, rows * columns, hidden_size).

        Square patches that cover the image can go to a dense layer: it is faster than a convolution, and the runtime
        quantizes each patch by itself. Some NPUs have CONV_2D, but not the SPACE_TO_DEPTH before it.
        """
        ops, (rows, columns) = self.ops, self.config.grid
        _, height, width, _ = kernel.shape
        covers_image = x.shape[1:3] == (rows * height, columns * width)
        if self.patches == "convolution" or height != width or not covers_image:
            x = ops.convolution(x, kernel, bias, "embedding", strides=(height, width), same=False)
            return ops.reshape(x, (x.shape[0], rows * columns, len(kernel)), "embedding/tokens")
        if height > 1:
            x = ops.space_to_depth(x, height, "embedding/cells")
        x = ops.reshape(x, (x.shape[0], rows * columns, x.shape[3]), "embedding/patches")
        return ops.dense(x, kernel.reshape(len(kernel), -1), bias, "embedding")

    def _stem_table(self) -> np.ndarray:
        """Return prefix tokens plus position embedding, (tokens, hidden_size), to be added to padded patches."""
        c = self.config
        table = np.zeros((c.num_tokens, c.hidden_size))
        if c.num_prefix_tokens:
            table[: c.num_prefix_tokens] += folding.prefix_tokens(self.model.get_layer("prefix"))
        if c.position != "none" and c.position_place == "stem":
            first = c.num_prefix_tokens - c.position_prefix_tokens
            table[first:] += folding.float64(self.model.get_layer("position").table())[0]
        return folding.to_stream(table, self.scales)

    def _block(self, x: Tensor, i: int, queries: int) -> tuple[Tensor, Tensor | None]:
        """Return the block's first `queries` tokens, (batch, queries, hidden_size), and its attention weights."""
        ops, layers, name = self.ops, self.layers, f"block_{i}"
        block, relative, weights = self.model.get_layer(name), None, None
        if self.config.position_place != "stem":
            position = self.model.get_layer("position" if self.config.position_place == "shared" else f"position_{i}")
            if self.config.position == "relative":
                relative = position
            else:
                table = folding.to_stream(folding.float64(position.table()), self.scales)
                x = ops.add(x, self._shared_constant(table, f"{position.name}/embedding"), f"{name}/position")
        normalized, affine = layers.norm(x, block.norm1, f"{name}/norm1", self.scales)
        if block.attention is None:
            branch = self._mix_tokens(normalized, affine, block, f"{name}/token_mlp", queries)
        else:
            mixed, weights = self._attention(
                normalized, affine, block.attention, relative, f"{name}/attention", queries
            )
            constant = folding.dense_weights(block.attention.value).kernel @ affine.constant
            rest = Affine(np.ones_like(constant), np.zeros_like(constant), constant)
            out = folding.residual_weights(block.attention.out, block.scale1, self.scales, rest)
            branch = layers.dense(mixed, out, f"{name}/attention/out")
        x = self._first_tokens(x, queries, name)
        x = ops.add(x, branch, f"{name}/{'token_mixing' if weights is None else 'attention'}")
        normalized, affine = layers.norm(x, block.norm2, f"{name}/norm2", self.scales)
        branch = layers.mlp(normalized, affine, block.mlp, f"{name}/mlp", block.scale2, self.scales)
        return ops.add(x, branch, name), weights

    def _mix_tokens(self, x: Tensor, affine: Affine, block: Any, name: str, queries: int) -> Tensor:
        """Return the result of a block's token MLP for the residual stream, (batch, queries, hidden_size).

        Its dense layers run along the tokens: gains and factors of channels cannot be folded into them.
        """
        ops, layers = self.ops, self.layers
        x = layers.token_mlp(layers.apply_affine(x, affine, f"{name}/input"), block.token_mlp, queries, name)
        if block.scale1 is not None:
            gamma = ops.constant(folding.float64(block.scale1.gamma), f"{name}/scale1/gamma")
            x = ops.multiply(x, gamma, f"{name}/scale1")
        return self._to_stream(x, f"{name}/stream")

    def _to_stream(self, x: Tensor, name: str) -> Tensor:
        """Compute `folding.to_stream` where there are no weights into which it could be folded."""
        if self.scales is None:
            return x
        x = self.layers.center(x, name)
        if (self.scales == 1).all():
            return x
        return self.ops.multiply(x, self._shared_constant(self.scales, "stream/scales"), f"{name}/scaled")

    def _shared_constant(self, table: np.ndarray, name: str) -> Tensor:
        """Return a constant that several blocks may use; it is stored once."""
        if name not in self._shared_constants:
            self._shared_constants[name] = self.ops.constant(table, name)
        return self._shared_constants[name]

    def _first_tokens(self, x: Tensor, count: int, name: str) -> Tensor:
        return x if x.shape[1] == count else self.ops.slice(x, 1, 0, count, f"{name}/first")

    def _attention(
        self, x: Tensor, affine: Affine, attention: Any, relative: Any, name: str, queries: int
    ) -> tuple[Tensor, Tensor]:
        """Return attention of the first `queries` tokens before its output projection, (batch, queries, hidden_size),
        and its weights. `affine`: the norm's gain and shift, not applied yet.

        Keys and values lack the norm's constant. Softmax ignores it in the keys: it is equal in all scores of a query,
        unless keys are turned by their positions.
        The weights add up to 1, so it passes through the values to the projection, whose bias has it.
        """
        ops, layers, heads = self.ops, self.layers, attention.num_heads
        own = affine._replace(constant=np.zeros_like(affine.constant))
        keys = folding.key_weights(attention).fold_affine(own if attention.rotary is None else affine)
        values = folding.dense_weights(attention.value).fold_affine(own)
        query_weights = folding.query_weights(attention).fold_affine(affine)
        query = layers.dense(self._first_tokens(x, queries, name), query_weights, f"{name}/query")
        if relative is None and attention.rotary is None and heads * queries < self.config.num_tokens:
            return self._attention_of_few(query, x, keys, values, heads, name)
        query = layers.split_heads(query, heads, f"{name}/query")
        key = layers.split_heads(layers.dense(x, keys, f"{name}/key"), heads, f"{name}/key")
        value = layers.split_heads(layers.dense(x, values, f"{name}/value"), heads, f"{name}/value")
        if attention.rotary is not None:
            query = self._turn(query, attention.rotary, f"{name}/query")
            key = self._turn(key, attention.rotary, f"{name}/key")
        scores = ops.matmul(query, key, f"{name}/scores", transpose_b=True)
        if relative is not None:
            scores = ops.add(scores, self._relative_scores(query, relative, name), f"{name}/all_scores")
        weights = ops.softmax(scores, f"{name}/weights")
        return layers.merge_heads(ops.matmul(weights, value, f"{name}/mixed"), name), weights

    def _turn(self, x: Tensor, rotary: Any, name: str) -> Tensor:
        """Return queries or keys, (batch, heads, tokens, size), turned by rotary positions.

        x * cosines + quarter_turn(x) * sines; the signs of the quarter turn are those of the sines. In a dynamic file
        of B/16 this takes 0.2 ms of a block's 4.2; a second dense layer for the quarter turn takes 0.6 ms.
        """
        ops, (_, _, count, size) = self.ops, x.shape
        tokens, half = static_dim(count), static_dim(size) // 2
        cosines, sines = folding.rotary_tables(rotary, tokens, 2 * half)
        if not sines.any():  # tokens in front of the patches
            return x
        halves = [ops.slice(x, 3, start, start + half, f"{name}/half_{start}") for start in (half, 0)]
        quarter = ops.concatenate(halves, 3, f"{name}/quarter")
        along, across = (
            self._shared_constant(table[None, None], f"rotary_{tokens}/{part}")
            for part, table in (("cosines", cosines), ("sines", sines))
        )
        along, across = ops.multiply(x, along, f"{name}/along"), ops.multiply(quarter, across, f"{name}/across")
        return ops.add(along, across, f"{name}/turned")

    def _attention_of_few(
        self, query: Tensor, x: Tensor, keys: DenseWeights, values: DenseWeights, heads: int, name: str
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of few queries without the keys and values of every token, which would cost more.

        With the kernels K and V of a head, q (x K)' = (q K') x' and w (x V) = (w x) V: K is applied to the queries, and
        V to the weighted sums of tokens. All heads are one product: each has its own rows, in which the channels of
        other heads are zero before K and after V. Softmax ignores the bias of the keys, which is equal in all scores of
        a query.
        """
        ops, (batch, queries, width) = self.ops, query.shape
        by_head = (batch, heads, queries, width)
        rows = (batch, heads * static_dim(queries), width)
        own_channels = np.eye(heads).repeat(static_dim(width) // heads, axis=1)[None, :, None]
        mask = ops.constant(own_channels, f"{name}/own")
        query = ops.reshape(query, (batch, 1, queries, width), f"{name}/query/apart")
        query = ops.reshape(ops.multiply(query, mask, f"{name}/query/own"), rows, f"{name}/query/rows")
        query = ops.dense(query, keys.kernel.T, None, f"{name}/key")
        weights = ops.softmax(ops.matmul(query, x, f"{name}/scores", transpose_b=True), f"{name}/weights")
        mixed = self.layers.dense(ops.matmul(weights, x, f"{name}/mixed"), values, f"{name}/value")
        mixed = ops.multiply(ops.reshape(mixed, by_head, f"{name}/value/apart"), mask, f"{name}/value/own")
        return ops.sum(mixed, [1], f"{name}/joined", keepdims=False), weights

    def _relative_scores(self, query: Tensor, layer: Any, name: str) -> Tensor:
        """Return the scores of relative positions, (batch, heads, queries, tokens).

        Every query is multiplied by the embeddings of all offsets. Reshaping the flat result to rows one column shorter
        moves each offset to the column of its key, as `relative_scores` of the layer does.
        """
        ops, (batch, heads, query_dim, _) = self.ops, query.shape
        queries, tokens = static_dim(query_dim), self.config.num_tokens
        table = self._shared_constant(folding.relative_table(layer, queries)[None], f"{layer.name}/table_{queries}")
        x = ops.matmul(query, table, f"{name}/offsets", transpose_b=True)
        width = tokens + queries - 1
        x = ops.reshape(x, (batch, heads, queries * (width + 1)), f"{name}/flat")
        x = ops.slice(x, 2, queries - 1, queries - 1 + queries * width, f"{name}/skewed")
        x = ops.reshape(x, (batch, heads, queries, width), f"{name}/rows")
        return ops.slice(x, 3, 0, tokens, f"{name}/relative")
