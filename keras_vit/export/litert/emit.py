"""A VisionTransformer as a LiteRT file, written from its weights: the stem, the blocks, the head."""

from __future__ import annotations

from typing import Any

from keras_vit.export.litert import folding, images
from keras_vit.export.litert.builder import Builder, Tensor
from keras_vit.export.litert.encoder import Encoder, activation
from keras_vit.export.litert.folding import Affine
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import Options


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
    options.check(model.config)
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
