"""A VisionTransformer as a LiteRT file, written from its weights: the stem, the blocks, the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_vit.export.litert import folding, images
from keras_vit.export.litert.builder import Builder, Tensor
from keras_vit.export.litert.encoder import Encoder, activation
from keras_vit.export.litert.folding import Affine
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.storage import FLOAT32, Storage

OUTPUTS = ("logits", "probabilities")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a file shall be like.

    Args:
        batch: images a call; None for any number, which the caller sets with `resize_tensor_input`.
        storage: how kernels are kept.
        dtype: of the input: "float32" for prepared images, "uint8" for pixels.
        source_size: (height, width) of pixels that the file resizes.
        resize: "exact" or "builtin", see `images.input`.
        output: "logits" or "probabilities".
        attention: whether there is a second output "attention" (batch, heads, patches): how the class token of the last
            block attends to the patches.
        smoothing: factors (hidden_size,) by the name of a norm, such as "block_3/norm1": the file computes the norm's
            result times these, and the kernel behind it is divided by them. It moves outliers from what is quantized
            while the file runs into the kernel (SmoothQuant, arXiv 2211.10438).
    """

    batch: int | None = 1
    storage: Storage = FLOAT32
    dtype: str = "float32"
    source_size: tuple[int, int] | None = None
    resize: str = "exact"
    output: str = "logits"
    attention: bool = False
    smoothing: Mapping[str, np.ndarray] = field(default_factory=dict)


def emit(model: Any, options: Options | None = None) -> Builder:
    """The file of a model, ready for `Builder.write`; its weights are those of now.

    Args:
        model: a VisionTransformer, on any back end, of any dtype policy. The file computes in float32.
        options: what it shall be like; None: one prepared image, float32 kernels, logits.

    Returns:
        A file with the signature "image" -> "logits" or "probabilities" (without a head: "features"), shaped as the
        model's output, and "attention" where asked for.

    Raises:
        ValueError: for options that are wrong or that the model cannot have.
        ImportError: without ai-edge-litert.
    """
    options = options or Options()
    _check(model.config, options)
    builder = Builder(description=f"{model.name}, a Vision Transformer by keras_vit")
    encoder = Encoder(Operators(builder, options.storage), model, options.smoothing)
    image = images.input(encoder.ops, model.config, options)
    tokens = encoder.tokens(image)
    outputs = _outputs(encoder, tokens, options)
    unused = sorted(set(options.smoothing) - set(encoder.names))
    if unused:
        raise ValueError(f"smoothing is of norms, {encoder.names}. Received: {unused}")
    builder.signature({"image": image.image}, outputs)
    return builder


def _check(config: Any, options: Options) -> None:
    misfits = []
    if options.output not in OUTPUTS:
        misfits.append(f"output is one of {list(OUTPUTS)}. Received: {options.output!r}")
    if options.output == "probabilities" and not config.num_classes:
        misfits.append("output='probabilities' needs a head. Received: a model of num_classes=0")
    if options.batch is not None and options.batch < 1:
        misfits.append(f"batch is a whole number from 1, or None. Received: {options.batch!r}")
    if options.attention and not config.class_token:
        misfits.append("attention=True is of the class token. Received: a model without one")
    wrong = {
        name: np.shape(factors)
        for name, factors in options.smoothing.items()
        if np.shape(factors) != (config.hidden_size,) or not np.all(np.asarray(factors) > 0)
    }
    if wrong:
        misfits.append(f"smoothing has ({config.hidden_size},) factors above 0 for a norm. Received: {wrong}")
    if misfits:
        raise ValueError("emit: " + "; ".join(misfits))


def _outputs(encoder: Encoder, tokens: Tensor, options: Options) -> dict[str, Tensor]:
    """What the signature gives, by name."""
    ops, config = encoder.ops, encoder.config
    attended = _attended(encoder) if options.attention else {}
    if not config.num_classes:
        return {"features": _features(encoder, tokens), **attended}
    logits = _logits(encoder, tokens)
    if options.output == "probabilities":
        return {"probabilities": ops.softmax(logits, "probabilities"), **attended}
    return {"logits": logits, **attended}


def _attended(encoder: Encoder) -> dict[str, Tensor]:
    """The last block's attention of the class token."""
    ops, weights, c = encoder.ops, encoder.maps, encoder.config
    assert weights is not None  # there is a block
    if len(weights.shape) == 3:
        weights = ops.reshape(
            weights, (weights.shape[0], c.num_heads, encoder.queries, c.num_tokens), "attention/heads"
        )
    if weights.shape[2] != 1:
        weights = ops.take(weights, 2, 0, 1, "attention/class_token")
    weights = ops.take(weights, 3, c.num_prefix_tokens, c.num_tokens, "attention/patches")
    return {
        "attention": ops.reshape(
            weights, (weights.shape[0], c.num_heads, c.num_tokens - c.num_prefix_tokens), "attention"
        )
    }


def _logits(encoder: Encoder, tokens: Tensor) -> Tensor:
    head = folding.dense(encoder.model.get_layer("head"))
    if not encoder.config.distilled:
        x, affine = _feature(encoder, tokens)
        return encoder.dense(x, head.after(affine), "head")
    tokens, affine = _final_norm(encoder, tokens)
    heads = {"head": head, "head_distillation": folding.dense(encoder.model.get_layer("head_distillation"))}
    made = [
        encoder.dense(_token(encoder, tokens, place), layer.after(affine).times(0.5), name)
        for place, (name, layer) in enumerate(heads.items())
    ]
    return encoder.ops.add(made[0], made[1], "logits")


def _features(encoder: Encoder, tokens: Tensor) -> Tensor:
    """The output of a model without a head."""
    x, affine = _feature(encoder, tokens)
    return encoder.applied(x, affine, "features")


def _feature(encoder: Encoder, tokens: Tensor) -> tuple[Tensor, Affine | None]:
    """What one head reads: (batch, width), unpooled (batch, tokens, width), and what a norm before has left to do."""
    c = encoder.config
    affine: Affine | None = None
    if c.final_norm == "tokens":
        tokens, affine = _final_norm(encoder, tokens)
    if c.has_map_head:
        x, affine = _attention_pool(encoder, tokens, affine), None
    elif c.distilled:
        x = encoder.ops.mean(tokens, [1], "pool", keep=False)
    elif c.classifier == "token":
        x = _token(encoder, tokens, 0)
    elif c.classifier == "gap":
        x = encoder.ops.mean(_patches(encoder, tokens), [1], "pool", keep=False)
    else:
        x = tokens
    if c.final_norm == "pooled":
        x, affine = _final_norm(encoder, x, centered=not c.has_map_head)
    if c.representation_size is not None:
        layer = folding.dense(encoder.model.get_layer("pre_logits")).after(affine)
        x, affine = encoder.dense(x, layer, "pre_logits/dense"), None
        x = activation(encoder.ops, c.representation_activation, x, "pre_logits")
    return x, affine


def _final_norm(encoder: Encoder, x: Tensor, *, centered: bool = True) -> tuple[Tensor, Affine]:
    return encoder.norm(x, encoder.model.get_layer("encoder_norm"), "encoder_norm", centered=centered)


def _token(encoder: Encoder, tokens: Tensor, place: int) -> Tensor:
    """One of the tokens, (batch, width)."""
    if tokens.shape[1] != 1:
        tokens = encoder.ops.take(tokens, 1, place, place + 1, f"pool/token_{place}")
    return encoder.ops.reshape(tokens, (tokens.shape[0], tokens.shape[2]), f"pool/{place}")


def _patches(encoder: Encoder, tokens: Tensor) -> Tensor:
    """The tokens behind those in front."""
    start = encoder.config.num_prefix_tokens
    return encoder.ops.take(tokens, 1, start, encoder.config.num_tokens, "pool/patches") if start else tokens


def _attention_pool(encoder: Encoder, tokens: Tensor, affine: Affine | None) -> Tensor:
    """An AttentionPooling, (batch, width). Its probe has no image in it: what it asks is folded into the keys."""
    ops, layer = encoder.ops, encoder.model.get_layer("pool")
    x = _patches(encoder, tokens)
    scores = encoder.dense(x, folding.probe_scores(layer).after(affine), "pool/attention/scores")
    batch, count, heads = scores.shape
    scores = ops.transpose(
        ops.reshape(scores, (batch, 1, count, heads), "pool/attention/rows"), (0, 3, 1, 2), "pool/attention/turned"
    )
    weights = ops.softmax(scores, "pool/attention/weights")
    value = encoder.dense(x, folding.dense(layer.attention.value).after(affine), "pool/attention/value")
    value = encoder.heads_first(value, layer.attention.num_heads, "pool/attention/value")
    x = encoder.heads_last(ops.matmul(weights, value, "pool/attention/mixed"), "pool/attention")
    x = ops.reshape(x, (batch, x.shape[2]), "pool/attention/row")
    x = encoder.dense(x, folding.dense(layer.attention.out), "pool/attention/out")
    normal, rest = encoder.norm(x, layer.norm, "pool/norm", centered=False)
    return ops.add(x, encoder.mlp(normal, rest, layer.mlp, "pool/mlp", centered=False), "pool")
