"""A Vision Transformer in NumPy and float64, from a model's weights, to check the arrays of `keras_vit.visualize`.

It follows the paper and does not use keras_vit's computation, except for a hybrid's ResNet: the tokens start from the
model's "embedding".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special

from model_weights import values

Array = np.ndarray
ACTIVATIONS = {
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: x / 2 * (1 + scipy.special.erf(x / np.sqrt(2))),
    "gelu_quick": lambda x: x / (1 + np.exp(-1.702 * x)),
    "tanh": np.tanh,
    "linear": lambda x: x,
}


@dataclass(frozen=True)
class Run:
    """Intermediate results, with one entry for every block."""

    tokens: list[Array]  # (batch, tokens, hidden_size), after the block
    attention: list[Array]  # (batch, heads, tokens, tokens)
    probe: Array | None  # (batch, heads, patches), of attention pooling
    logits: list[Array]  # (batch, classes) or (batch, tokens, classes): norm, pooling and head of the block's tokens


class NumpyViT:
    """A model's config and weights, and the equations of the paper."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.weights = {path: value.astype(np.float64) for path, value in values(model).items()}

    def run(self, images: Array) -> Run:
        x = self.first_tokens(images)
        tokens, attention = [], []
        for i in range(self.config.num_layers):
            x = x + self.position(i)
            x, weights = self.block(f"block_{i}", x, self.relative(i))
            tokens.append(x)
            attention.append(weights)
        ends = [self.end(x) for x in tokens]
        return Run(tokens, attention, ends[-1][1], [logits for logits, _ in ends])

    def first_tokens(self, images: Array) -> Array:
        c = self.config
        x = (
            self.patches(images)
            if c.resnet is None
            else np.float64(self.model.features(images, ["embedding"])["embedding"])
        )
        position = self.position("stem")
        if not c.position_prefix:
            x = x + position
        names = ("cls", "distillation", "registers")
        prefix = [self.weights[f"prefix/{name}"] for name in names if f"prefix/{name}" in self.weights]
        x = np.concatenate([*(np.repeat(token, len(x), axis=0) for token in prefix), x], axis=1)
        if c.position_prefix:
            x = x + position
        return self.norm("pre_norm", x) if c.pre_norm else x

    def patches(self, images: Array) -> Array:
        kernel = self.weights["embedding/kernel"]
        height, width = kernel.shape[:2]
        rows, columns = self.config.grid
        cells = [
            images[:, r * height : (r + 1) * height, c * width : (c + 1) * width].reshape(len(images), -1)
            for r in range(rows)
            for c in range(columns)
        ]
        return np.stack(cells, axis=1) @ kernel.reshape(-1, kernel.shape[-1]) + self.weights.get("embedding/bias", 0.0)

    def position(self, place: int | str) -> Array | float:
        """Return the position embeddings that are added at a place: "stem", or a block."""
        c = self.config
        if (c.position_place == "stem") != (place == "stem") or c.position in ("none", "relative"):
            return 0.0
        name = f"position_{place}" if c.position_place == "blocks" else "position"
        if c.position == "sincos2d":
            return self.sincos()
        if c.position == "learned":
            return self.weights[f"{name}/embedding"]
        along_x, along_y = (self.weights[f"{name}/{axis}_embedding"][0] for axis in "xy")
        prefix = c.position_prefix_tokens
        places = [(i, i) for i in range(prefix)]
        places += [(prefix + x, prefix + y) for y in range(c.grid[0]) for x in range(c.grid[1])]
        return np.array([np.concatenate([along_x[x], along_y[y]]) for x, y in places])

    def sincos(self) -> Array:
        quarter = self.config.hidden_size // 4
        omega = [1 / 10_000 ** (k / (quarter - 1)) for k in range(quarter)]
        rows, columns = self.config.grid
        table = np.zeros((self.config.position_prefix_tokens + rows * columns, 4 * quarter))
        for y in range(rows):
            for x in range(columns):
                waves = [f(v * w) for v, f in ((x, np.sin), (x, np.cos), (y, np.sin), (y, np.cos)) for w in omega]
                table[self.config.position_prefix_tokens + y * columns + x] = waves
        return table

    def relative(self, block: int) -> Array | None:
        if self.config.position != "relative":
            return None
        name = f"position_{block}" if self.config.position_place == "blocks" else "position"
        return self.weights[f"{name}/relative_embedding"]

    def block(self, name: str, x: Array, relative: Array | None) -> tuple[Array, Array]:
        scale1, scale2 = (self.weights.get(f"{name}/scale{i}/gamma", 1.0) for i in (1, 2))
        normed = self.norm(f"{name}/norm1", x)
        attended, weights = self.attention(f"{name}/attention", normed, normed, relative)
        x = x + scale1 * attended
        return x + scale2 * self.mlp(f"{name}/mlp", self.norm(f"{name}/norm2", x)), weights

    def attention(self, name: str, x: Array, others: Array, relative: Array | None = None) -> tuple[Array, Array]:
        """Compute attention head by head: (batch, queries, hidden_size), and weights (batch, heads, queries, keys)."""
        w = self.weights
        out, all_weights = w[f"{name}/out/bias"], []
        for head in range(self.config.num_heads):
            q, k, v = (
                tokens @ w[f"{name}/{part}/kernel"][:, head] + w.get(f"{name}/{part}/bias", [0.0] * (head + 1))[head]
                for part, tokens in (("query", x), ("key", others), ("value", others))
            )
            scores = q @ k.swapaxes(1, 2)
            if relative is not None:
                for i in range(q.shape[1]):
                    for j in range(q.shape[1]):
                        scores[:, i, j] += q[:, i] @ relative[i - j + q.shape[1] - 1, head]
            scores = np.exp(scores / np.sqrt(q.shape[-1]))
            weights = scores / scores.sum(axis=-1, keepdims=True)
            out = out + weights @ v @ w[f"{name}/out/kernel"][head]
            all_weights.append(weights)
        return out, np.stack(all_weights, axis=1)

    def end(self, x: Array) -> tuple[Array, Array | None]:
        """Return the logits of one block's tokens (the features without a head), and the attention of the pooling."""
        c, probe = self.config, None
        prefix = c.num_prefix_tokens
        if c.final_norm == "tokens":
            x = self.norm("encoder_norm", x)
        if c.classifier == "map":
            queries = np.repeat(self.weights["pool/probe"], len(x), axis=0)
            pooled, probe = self.attention("pool/attention", queries, x[:, prefix:])
            features = [(pooled + self.mlp("pool/mlp", self.norm("pool/norm", pooled)))[:, 0]]
            probe = probe[:, :, 0]
        else:
            features = {"token": [x[:, 0], x[:, 1]], "gap": [x[:, prefix:].mean(axis=1)]}.get(c.classifier, [x])
        logits = [
            self.classify(feature, head)
            for feature, head in zip(features, ("head", "head_distillation")[: 1 + c.distilled], strict=False)
        ]
        return sum(logits) / len(logits), probe

    def classify(self, feature: Array, head: str) -> Array:
        if self.config.final_norm == "pooled":
            feature = self.norm("encoder_norm", feature)
        if self.config.representation_size is not None:
            feature = ACTIVATIONS[self.config.representation_activation](self.dense("pre_logits", feature))
        return self.dense(head, feature) if self.config.num_classes else feature

    def mlp(self, name: str, x: Array) -> Array:
        return self.dense(f"{name}/dense2", ACTIVATIONS[self.config.activation](self.dense(f"{name}/dense1", x)))

    def dense(self, name: str, x: Array) -> Array:
        return x @ self.weights[f"{name}/kernel"] + self.weights[f"{name}/bias"]

    def norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.config.norm_epsilon)
        return centred / deviation * self.weights[f"{name}/gamma"] + self.weights[f"{name}/beta"]
