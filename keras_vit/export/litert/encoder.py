"""From the image to the tokens behind the last block (paper, equations 1 to 3), as LiteRT's operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_vit.export.litert import folding, stem
from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Affine, Dense
from keras_vit.export.litert.images import Input
from keras_vit.export.litert.operators import Operators, known


@dataclass
class Encoder:
    """Writes the encoder of a model.

    Args:
        ops: of the file.
        model: a VisionTransformer.
        smoothing: factors (hidden_size,) by which a norm's result is multiplied in the file, by the norm's name.

    Attributes:
        maps: the last block's attention weights, (batch, heads, queries, tokens) or (batch, heads * queries, tokens).
        centered: whether the tokens' channels have the mean zero; not where attention pooling reads them unnormalised.
        names: of the norms that were written.
    """

    ops: Operators
    model: Any
    smoothing: Mapping[str, np.ndarray] = field(default_factory=dict)
    maps: Tensor | None = None
    names: list[str] = field(default_factory=list)
    _shared: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = self.model.config
        self.centered = (self.config.classifier, self.config.final_norm) != ("map", "pooled")

    @property
    def queries(self) -> int:
        """Tokens behind the last block: where the head reads single tokens only, those in front that it reads."""
        return self.config.num_final_tokens

    def tokens(self, image: Input) -> Tensor:
        """The tokens behind the last block, (batch, queries, hidden_size)."""
        x = self._embedding(image)
        for i in range(self.config.num_layers):
            queries = self.queries if i == self.config.num_layers - 1 else self.config.num_tokens
            x = self._block(x, i, queries)
        return x

    def norm(self, x: Tensor, layer: Any, name: str, *, centered: bool) -> tuple[Tensor, Affine]:
        """A LayerNorm up to its gain and shift, which are the reader's.

        Args:
            x: (..., width).
            layer: the LayerNormalization.
            name: of the result.
            centered: whether the channels of `x` have the mean zero.
        """
        ops, factors = self.ops, self.smoothing.get(name)
        self.names.append(name)
        if not centered:
            x = self._centered(x, name)
        squares = ops.mean(ops.multiply(x, x, f"{name}/squares"), [-1], f"{name}/variance", keep=True)
        variance = ops.add(squares, ops.constant(np.array(layer.epsilon, np.float32), "epsilon"), f"{name}/safe")
        scale = ops.unary("RSQRT", variance, f"{name}/rsqrt")
        made = ops.multiply(x, scale, name if factors is None else f"{name}/normal")
        if factors is not None:
            made = ops.multiply(made, ops.constant(np.asarray(factors, np.float32), f"{name}/factors"), name)
        return made, folding.norm(layer, factors)

    def dense(self, x: Tensor, layer: Dense, name: str) -> Tensor:
        """A folded layer over the last axis of x."""
        return self.ops.dense(x, layer.kernel, layer.bias, name)

    def mlp(
        self, x: Tensor, affine: Affine | None, layer: Any, name: str, scale: Any = None, *, centered: bool
    ) -> Tensor:
        """An MLP behind a norm: what is added to the residual stream.

        Args:
            x: the norm's result, (..., hidden_size).
            affine: what it has left to do.
            layer: the MLP.
            name: of the scope.
            scale: the LayerScale behind it.
            centered: whether its channels shall have the mean zero.
        """
        inner = self.dense(x, folding.dense(layer.dense1).after(affine), f"{name}/dense1")
        inner = activation(self.ops, layer.activation, inner, f"{name}/activation")
        return self.dense(inner, _writer(layer.dense2, scale, centered=centered), f"{name}/dense2")

    def heads_first(self, x: Tensor, heads: int, name: str) -> Tensor:
        """(batch, tokens, heads * size) to (batch, heads, tokens, size)."""
        batch, tokens, width = x.shape
        x = self.ops.reshape(x, (batch, tokens, heads, known(width) // heads), f"{name}/heads")
        return self.ops.transpose(x, (0, 2, 1, 3), f"{name}/heads_first")

    def heads_last(self, x: Tensor, name: str) -> Tensor:
        """(batch, heads, tokens, size) to (batch, tokens, heads * size)."""
        batch, heads, tokens, size = x.shape
        if tokens != 1:
            x = self.ops.transpose(x, (0, 2, 1, 3), f"{name}/heads_last")
        return self.ops.reshape(x, (batch, tokens, known(heads) * known(size)), f"{name}/joined")

    def _centered(self, x: Tensor, name: str) -> Tensor:
        return self.ops.subtract(x, self.ops.mean(x, [-1], f"{name}/mean", keep=True), f"{name}/centered")

    def _embedding(self, image: Input) -> Tensor:
        """Patches, tokens in front, positions, pre_norm: the first block's input."""
        ops, c = self.ops, self.config
        x, scale = image.tensor, image.scale
        if c.resnet is not None:
            x, scale = stem.stem(ops, self.model, image), None
        kernel, bias = folding.patches(self.model.get_layer("embedding"), scale)
        if self.centered:
            kernel, bias = folding.centered(kernel, axis=0), folding.centered(bias)
        x = self._patches(x, kernel, bias)
        if c.num_prefix_tokens:
            x = ops.pad(x, (0, c.num_prefix_tokens, 0), "prefix/places")
        added = self._stem_rows()
        if added.any():
            name = "position" if c.position_place == "stem" else "prefix"
            x = ops.add(x, ops.constant(added[None], f"{name}/embedding"), name)
        if c.pre_norm:
            x, affine = self.norm(x, self.model.get_layer("pre_norm"), "pre_norm", centered=self.centered)
            x = self.applied(x, affine, "pre_norm")
            x = self._centered(x, "tokens") if self.centered else x
        return x

    def _patches(self, x: Tensor, kernel: np.ndarray, bias: np.ndarray) -> Tensor:
        """A token for each patch, (batch, rows * columns, hidden_size).

        A dense layer where patches can be put in rows without one: its product is faster than a convolution's, and each
        patch is quantized by itself.
        """
        ops, (rows, columns) = self.ops, self.config.grid
        _, height, width, _ = kernel.shape
        whole = x.shape[1:3] == (rows * height, columns * width)
        if height != width or not whole:
            x = ops.convolution(x, kernel, bias, "embedding", strides=(height, width), same=False)
            return ops.reshape(x, (x.shape[0], rows * columns, len(kernel)), "embedding/tokens")
        if height > 1:
            x = ops.space_to_depth(x, height, "embedding/cells")
        x = ops.reshape(x, (x.shape[0], rows * columns, x.shape[3]), "embedding/patches")
        return ops.dense(x, kernel.reshape(len(kernel), -1), bias, "embedding")

    def _stem_rows(self) -> np.ndarray:
        """What is added to every token behind the stem, (tokens, hidden_size): a token in front is added to zeros."""
        c = self.config
        rows = np.zeros((c.num_tokens, c.hidden_size))
        if c.num_prefix_tokens:
            rows[: c.num_prefix_tokens] += folding.prefix(self.model.get_layer("prefix"))
        if c.position != "none" and c.position_place == "stem":
            rows[c.num_prefix_tokens - c.position_prefix_tokens :] += folding.positions(
                self.model.get_layer("position")
            )
        return folding.centered(rows) if self.centered else rows

    def applied(self, x: Tensor, affine: Affine | None, name: str) -> Tensor:
        """What a norm has left to do, where no dense layer follows that could."""
        if affine is None:
            return x
        x = self.ops.multiply(x, self.ops.constant(affine.gain, f"{name}/gain"), f"{name}/scaled")
        return self.ops.add(x, self.ops.constant(affine.shift, f"{name}/shift"), f"{name}/shifted")

    def _block(self, x: Tensor, i: int, queries: int) -> Tensor:
        """x + attention(norm1(x)), then x + mlp(norm2(x)), for the first `queries` tokens."""
        ops, name = self.ops, f"block_{i}"
        layer, relative = self.model.get_layer(name), None
        if self.config.position_place != "stem":
            position = self.model.get_layer("position" if self.config.position_place == "shared" else f"position_{i}")
            if self.config.position == "relative":
                relative = position
            else:
                x = self._with_positions(x, position, f"{name}/position")
        normal, affine = self.norm(x, layer.norm1, f"{name}/norm1", centered=self.centered)
        mixed = self._attention(normal, affine, layer.attention, relative, f"{name}/attention", queries)
        out = _writer(layer.attention.out, layer.scale1, centered=self.centered)
        x = ops.add(self._first(x, queries, name), self.dense(mixed, out, f"{name}/attention/out"), f"{name}/attention")
        normal, affine = self.norm(x, layer.norm2, f"{name}/norm2", centered=self.centered)
        branch = self.mlp(normal, affine, layer.mlp, f"{name}/mlp", layer.scale2, centered=self.centered)
        return ops.add(x, branch, name)

    def _with_positions(self, x: Tensor, layer: Any, name: str) -> Tensor:
        rows = folding.positions(layer)[None]
        rows = folding.centered(rows) if self.centered else rows
        return self.ops.add(x, self._once(rows, f"{layer.name}/embedding"), name)

    def _once(self, table: np.ndarray, name: str) -> Tensor:
        """A constant that blocks may share."""
        if name not in self._shared:
            self._shared[name] = self.ops.constant(table, name)
        return self._shared[name]

    def _first(self, x: Tensor, queries: int, name: str) -> Tensor:
        return x if x.shape[1] == queries else self.ops.take(x, 1, 0, queries, f"{name}/first")

    def _attention(self, x: Tensor, affine: Affine, layer: Any, relative: Any, name: str, queries: int) -> Tensor:
        """What the first tokens attend to, before the output projection: (batch, queries, hidden_size)."""
        ops, heads = self.ops, layer.num_heads
        keys, values = (folding.dense(part).after(affine) for part in (layer.key, layer.value))
        query = self.dense(self._first(x, queries, name), folding.query(layer).after(affine), f"{name}/query")
        if relative is None and heads * queries < self.config.num_tokens:
            return self._attention_of_few(query, x, keys, values, heads, name)
        query = self.heads_first(query, heads, f"{name}/query")
        key = self.heads_first(self.dense(x, keys, f"{name}/key"), heads, f"{name}/key")
        value = self.heads_first(self.dense(x, values, f"{name}/value"), heads, f"{name}/value")
        scores = ops.matmul(query, key, f"{name}/scores", transpose_b=True)
        if relative is not None:
            scores = ops.add(scores, self._relative_scores(query, relative, name), f"{name}/all_scores")
        self.maps = ops.softmax(scores, f"{name}/weights")
        return self.heads_last(ops.matmul(self.maps, value, f"{name}/mixed"), name)

    def _attention_of_few(self, query: Tensor, x: Tensor, key: Dense, value: Dense, heads: int, name: str) -> Tensor:
        """Attention without keys and values of every token, which are more work than what few queries do with them.

        With a head's kernels K and V, q (x K)' = (q K') x' and w (x V) = (w x) V: the keys' kernel takes queries, the
        values' kernel weighted sums of tokens. So that one product has all heads, each has rows of its own, whose
        channels of other heads are zero before it and dropped behind it. What the keys' bias adds is the same for all
        scores of a query, and softmax does not see it.
        """
        ops, (batch, queries, width) = self.ops, query.shape
        apart = (batch, heads, queries, width)
        rows = (batch, heads * known(queries), width)
        own = ops.constant(np.eye(heads).repeat(known(width) // heads, axis=1)[None, :, None], f"{name}/own")
        query = ops.reshape(query, (batch, 1, queries, width), f"{name}/query/apart")
        query = ops.reshape(ops.multiply(query, own, f"{name}/query/own"), rows, f"{name}/query/rows")
        query = ops.dense(query, key.kernel.T, None, f"{name}/key")
        self.maps = ops.softmax(ops.matmul(query, x, f"{name}/scores", transpose_b=True), f"{name}/weights")
        mixed = self.dense(ops.matmul(self.maps, x, f"{name}/mixed"), value, f"{name}/value")
        mixed = ops.multiply(ops.reshape(mixed, apart, f"{name}/value/apart"), own, f"{name}/value/own")
        return ops.sum(mixed, [1], f"{name}/joined", keep=False)

    def _relative_scores(self, query: Tensor, layer: Any, name: str) -> Tensor:
        """(batch, heads, queries, tokens): every query against the embeddings of its offsets, skewed."""
        ops, (batch, heads, queries, _) = self.ops, query.shape
        queries, tokens = known(queries), self.config.num_tokens
        table = self._once(folding.relative_table(layer, queries)[None], f"{layer.name}/table_{queries}")
        x = ops.matmul(query, table, f"{name}/offsets", transpose_b=True)
        width = tokens + queries - 1
        x = ops.reshape(x, (batch, heads, queries * (width + 1)), f"{name}/flat")
        x = ops.take(x, 2, queries - 1, queries - 1 + queries * width, f"{name}/skewed")
        x = ops.reshape(x, (batch, heads, queries, width), f"{name}/rows")
        return ops.take(x, 3, 0, tokens, f"{name}/relative")


def activation(ops: Operators, name: str, x: Tensor, scope: str) -> Tensor:
    """One of `config.ACTIVATIONS`."""
    if name == "linear":
        return x
    if name in ("relu", "tanh"):
        return ops.unary(name.upper(), x, scope)
    if name in ("gelu_tanh", "gelu_erf"):
        return ops.gelu(x, scope, approximate=name == "gelu_tanh")
    gate = x
    if name == "gelu_quick":
        gate = ops.multiply(x, ops.constant(np.array(1.702, np.float32), "gelu_quick"), f"{scope}/slope")
    return ops.multiply(x, ops.unary("LOGISTIC", gate, f"{scope}/gate"), scope)


def _writer(layer: Any, scale: Any, *, centered: bool) -> Dense:
    """A layer that writes to the residual stream, its LayerScale included."""
    made = folding.dense(layer)
    if scale is not None:
        made = made.times(folding.array(scale.gamma))
    return made.centered() if centered else made
