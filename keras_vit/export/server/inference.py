"""A model's computation as it is served: nothing that its answer does not need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_vit.model import layers as vit
from keras_vit.model.vision_transformer import VisionTransformer

Outputs = dict[str, Any]  # "logits" where there is a head, and "features": what the head sees


def function(model: VisionTransformer) -> Callable[[Any], Outputs]:
    """The model as a function of prepared images, in which the last block computes the pooled token only.

    Args:
        model: any VisionTransformer; what other classifiers need of the last block is all of it.

    Returns:
        images (batch, height, width, channels) to "features" (batch, width) and, with a head, "logits"; float32.
    """
    config = model.config
    if config.classifier != "token" or config.position == "relative":
        names = ["pre_logits", *(["logits"] if config.num_classes else [])]

        def whole(images: Any) -> Outputs:
            found = model.features(images, names)
            found["features"] = keras.ops.cast(found.pop("pre_logits"), "float32")
            return found

        return whole
    block = model.get_layer(f"block_{config.num_layers - 1}")
    front = keras.Model(model.inputs[0], block.input, name=model.name)  # a name in front of every operator: short

    def pooled(images: Any) -> Outputs:
        tokens = _last_block(block, front(images, training=False), count=config.num_final_tokens)
        tokens = model.get_layer("encoder_norm")(tokens)  # of each token by itself: before or after pooling
        return _heads(model, [tokens[:, place] for place in range(config.num_final_tokens)])

    return pooled


def bfloat16(model: VisionTransformer) -> Callable[[Any], Outputs]:
    """The same, with products in bfloat16: the model's own float32 weights, cast in every call."""
    with vit.uninitialized():
        other = VisionTransformer(model.config, dtype="mixed_bfloat16", name=model.name)
    if len(other.variables) != len(model.variables):
        raise ValueError(
            "bfloat16=True is for models as their config has them: merge what was added first. "
            "Received: one with further weights, such as LoRA's"
        )
    run = function(other)
    pairs = list(zip(other.variables, model.variables, strict=True))

    def cast(images: Any) -> Outputs:
        with keras.StatelessScope(state_mapping=[(mine, theirs.value) for mine, theirs in pairs]):
            return run(images)

    return cast


def _last_block(block: vit.EncoderBlock, x: Any, *, count: int) -> Any:
    """What the block makes of the first `count` tokens, which attend to all."""
    normed, kept = block.norm1(x), x[:, :count]
    for scale, branch in (
        (block.scale1, lambda _: block.attention(normed[:, :count], normed)),
        (block.scale2, lambda tokens: block.mlp(block.norm2(tokens))),
    ):
        update = branch(kept)
        kept = kept + (update if scale is None else scale(update))
    return kept


def _heads(model: VisionTransformer, tokens: list[Any]) -> Outputs:
    """As `graph.Graph` has them: of one token, or the mean of both heads of a distilled model."""
    config = model.config
    if config.representation_size is not None:
        tokens = [model.get_layer("pre_logits")(token) for token in tokens]
    mean = sum(tokens[1:], tokens[0]) / len(tokens)
    outputs = {"features": keras.ops.cast(mean, "float32")}
    if config.num_classes:
        names = ("head", "head_distillation")[: len(tokens)]
        logits = [model.get_layer(name)(token) for name, token in zip(names, tokens, strict=True)]
        outputs["logits"] = sum(logits[1:], logits[0]) / len(logits)
    return outputs
