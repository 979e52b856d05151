"""Head as LiteRT operators: pooling, final norm, pre_logits and logits (paper, equation 4)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_vit.export.litert import folding
from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Affine, Array
from keras_vit.export.litert.layers import Layers
from keras_vit.export.litert.operators import static_dim


@dataclass
class Head:
    """Add the outputs of a VisionTransformer to the file of `layers`."""

    layers: Layers
    model: Any

    def __post_init__(self) -> None:
        self.ops, self.config = self.layers.ops, self.model.config

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits; those of a distilled model are the mean of its two heads'."""
        head = folding.dense_weights(self.model.get_layer("head"))
        if not self.config.distilled:
            x, affine = self._pooled(tokens)
            return self.layers.dense(x, head.fold_affine(affine), "head")
        tokens, affine = self._final_norm(tokens, self.layers.scales)
        weights = {"head": head, "head_distillation": folding.dense_weights(self.model.get_layer("head_distillation"))}
        halves = [
            self.layers.dense(self._token(tokens, index), layer.fold_affine(affine).scale_outputs(0.5), name)
            for index, (name, layer) in enumerate(weights.items())
        ]
        return self.ops.add(halves[0], halves[1], "logits")

    def features(self, tokens: Tensor) -> Tensor:
        """Return the output of a model without a head."""
        x, affine = self._pooled(tokens)
        return self.layers.apply_affine(x, affine, "features")

    def class_attention(self, weights: Tensor) -> Tensor:
        """Return how the class token attends to the patches, (batch, heads, patches), from the weights of `encode`."""
        ops, c = self.ops, self.config
        batch = weights.shape[0]
        if len(weights.shape) == 3:
            weights = ops.reshape(weights, (batch, c.num_heads, c.num_final_tokens, c.num_tokens), "attention/heads")
        if weights.shape[2] != 1:
            weights = ops.slice(weights, 2, 0, 1, "attention/class_token")
        weights = ops.slice(weights, 3, c.num_prefix_tokens, c.num_tokens, "attention/patches")
        return ops.reshape(weights, (batch, c.num_heads, c.num_tokens - c.num_prefix_tokens), "attention")

    def _pooled(self, tokens: Tensor) -> tuple[Tensor, Affine | None]:
        """Return what one head reads, (batch, width) or unpooled (batch, tokens, width), and the norm to apply."""
        c = self.config
        affine: Affine | None = None
        if c.final_norm == "tokens" and c.num_layers:
            tokens, affine = self._final_norm(tokens, self.layers.scales)
        if c.has_map_head:
            x, affine = self._attention_pooling(tokens, affine), None
        elif c.distilled:
            x = self.ops.mean(tokens, [1], "pool", keepdims=False)
        elif c.classifier == "token":
            x = self._token(tokens, 0)
        elif c.classifier == "gap":
            x = self.ops.mean(self._patches(tokens), [1], "pool", keepdims=False)
        elif c.classifier == "token_gap":
            mean = self.ops.mean(self._patches(tokens), [1], "pool_mean", keepdims=False)
            x = self.ops.concatenate([self._token(tokens, 0), mean], 1, "pools")
            affine = affine and Affine(*(np.tile(part, 2) for part in affine))
        else:
            x = tokens
        if c.final_norm == "pooled":
            x, affine = self._final_norm(x, None if c.has_map_head else self.layers.scales)
        if c.representation_size is not None:
            weights = folding.dense_weights(self.model.get_layer("pre_logits")).fold_affine(affine)
            x, affine = self.layers.dense(x, weights, "pre_logits/dense"), None
            x = self.layers.activation(c.representation_activation, x, "pre_logits")
        return self._normalized(x, affine) if c.normalize_features else (x, affine)

    def _normalized(self, x: Tensor, affine: Affine | None) -> tuple[Tensor, Affine]:
        """Return x / the root of its mean square (a sum overflows half precision), and the rest of the norm."""
        ops, x, width = self.ops, self.layers.apply_affine(x, affine, "features"), static_dim(x.shape[-1])
        square = ops.mean(ops.multiply(x, x, "normalized/squares"), [-1], "normalized/mean", keepdims=True)
        square = ops.add(square, ops.constant(np.array(1e-20, np.float32), "tiny"), "normalized/safe")
        x = ops.multiply(x, ops.unary("RSQRT", square, "normalized/rsqrt"), "normalized")
        return x, Affine(np.full(width, width**-0.5), *np.zeros((2, width)))

    def _final_norm(self, x: Tensor, scales: Array | None) -> tuple[Tensor, Affine]:
        return self.layers.norm(x, self.model.get_layer("encoder_norm"), "encoder_norm", scales)

    def _token(self, tokens: Tensor, index: int) -> Tensor:
        """Return one token, (batch, width)."""
        if tokens.shape[1] != 1:
            tokens = self.ops.slice(tokens, 1, index, index + 1, f"pool/token_{index}")
        return self.ops.reshape(tokens, (tokens.shape[0], tokens.shape[2]), f"pool/{index}")

    def _patches(self, tokens: Tensor) -> Tensor:
        """Return the tokens of patches, which follow the prefix tokens."""
        start = self.config.num_prefix_tokens
        return self.ops.slice(tokens, 1, start, self.config.num_tokens, "pool/patches") if start else tokens

    def _attention_pooling(self, tokens: Tensor, affine: Affine | None) -> Tensor:
        """Return the result of an AttentionPooling, (batch, width)."""
        ops, layers, pooling = self.ops, self.layers, self.model.get_layer("pool")
        attention = pooling.attention
        x = self._patches(tokens)
        scores = layers.dense(x, folding.probe_weights(pooling).fold_affine(affine), "pool/attention/scores")
        batch, count, heads = scores.shape
        scores = ops.reshape(scores, (batch, 1, count, heads), "pool/attention/rows")
        weights = ops.softmax(ops.transpose(scores, (0, 3, 1, 2), "pool/attention/turned"), "pool/attention/weights")
        value = layers.dense(x, folding.dense_weights(attention.value).fold_affine(affine), "pool/attention/value")
        value = layers.split_heads(value, attention.num_heads, "pool/attention/value")
        x = layers.merge_heads(ops.matmul(weights, value, "pool/attention/mixed"), "pool/attention")
        x = ops.reshape(x, (batch, x.shape[2]), "pool/attention/row")
        x = layers.dense(x, folding.dense_weights(attention.out), "pool/attention/out")
        normalized, rest = layers.norm(x, pooling.norm, "pool/norm", None)
        return ops.add(x, layers.mlp(normalized, rest, pooling.mlp, "pool/mlp"), "pool")
