"""Count the numbers of a model, built without values, of which every layer says what it costs."""

import functools
from collections.abc import Iterator
from math import prod
from typing import Any

import keras

from keras_vit.model import layers as vit
from keras_vit.model.config import ViTConfig
from keras_vit.model.layers.cost import Cost, Shape, dense_cost
from keras_vit.model.layers.position_variants import RelativePosition
from keras_vit.model.parts import FLOAT, Numbers, Part
from keras_vit.model.symbolic import symbolic_model

# Layers without products, whose gradients keep nothing large.
_FREE = (
    vit.PositionEmbedding,
    vit.PrefixTokens,
    vit.TokenPooling,
    vit.L2Normalization,
    vit.GroupNormalization,
    RelativePosition,
    keras.layers.Average,
    keras.layers.Concatenate,
    keras.layers.Identity,
    keras.layers.InputLayer,
    keras.layers.ReLU,
    keras.layers.Reshape,
)


@functools.lru_cache(maxsize=64)
def count(config: ViTConfig) -> Numbers:
    """Return the numbers of the config's model.

    The activations are the image and the largest set of tensors that exist at once. For 192 channels or more they
    differ from TensorFlow's CPU allocator (frozen graph) by at most 1 % plus one tensor of tokens. A result is freed
    after its last reader; an elementwise result overwrites an input without other readers. Workspace and caches are not
    counted.
    """
    model = symbolic_model(config)
    costs = list(layer_costs(model))
    total = sum((cost for _, cost in costs), Cost())
    blocks = (cost for layer, cost in costs if isinstance(layer, vit.EncoderBlock))
    return Numbers(
        parts=tuple(_merge_parts(model)),
        block_flops=2 * sum(cost.multiply_adds for cost in blocks),
        kernel_numbers=sum(prod(v.shape) for v in model.variables if v.path.endswith("kernel")),
        kernel_outputs=total.kernel_outputs,
        activation_bytes=FLOAT * (prod(model.input.shape[1:]) + total.peak),
    )


def layer_costs(model: keras.Model, *, only_final_tokens: bool = False) -> Iterator[tuple[keras.layers.Layer, Cost]]:
    """Yield the layers of a VisionTransformer with their costs, in the order of computation.

    With `only_final_tokens`, the last block and the layers after it compute only the tokens that the head reads.
    """
    tokens: int | None = None
    for layer in model.layers:
        shapes = _input_shapes(layer)
        if tokens is not None and len(shapes[0]) == 2:
            shapes = [(tokens, shapes[0][1])]
        if isinstance(layer, vit.EncoderBlock):
            tokens = layer.final_tokens if only_final_tokens else None
            yield layer, sum(layer.part_costs(*shapes, tokens=tokens).values(), Cost())
        else:
            yield layer, _cost(layer, shapes)


def _input_shapes(layer: keras.layers.Layer) -> list[Shape]:
    return [_without_batch(tensor) for tensor in keras.tree.flatten(layer.input)]


def _without_batch(tensor: keras.KerasTensor) -> Shape:
    """Return a tensor's shape for one image; a table of positions has no axis for the batch."""
    return tuple(side for side in tensor.shape if side is not None)


def _cost(layer: keras.layers.Layer, shapes: list[Shape]) -> Cost:
    if isinstance(layer, keras.layers.Dense):
        *positions, inputs = shapes[0]
        return dense_cost(prod(positions), inputs, layer.units)
    if isinstance(layer, _FREE):
        return Cost()
    if not hasattr(layer, "cost"):
        raise TypeError(f"The layer {layer.name!r} ({type(layer).__name__}) needs a method `cost`")
    cost: Cost = layer.cost(*shapes)
    return cost


def _merge_parts(model: keras.Model) -> Iterator[Part]:
    """Yield the parts of a model: equal ones once with their number, the units of a ResNet's stage as one."""
    merged: dict[str, list[Part]] = {}
    for layer in model.layers:
        for part in _parts(layer):
            merged.setdefault(part.name, []).append(part)
    for name, parts in merged.items():
        is_equal = all(part == parts[0] for part in parts)
        parameters, flops = (sum(getattr(part, name) for part in parts) for name in ("parameters", "flops"))
        yield Part(name, len(parts) if is_equal else 1, parts[-1].output, parameters, flops)


def _parts(layer: keras.layers.Layer) -> Iterator[Part]:
    """Yield the parts of one layer: two of an encoder block, none of a layer that is not worth a name."""
    shapes = _input_shapes(layer)
    if isinstance(layer, vit.EncoderBlock):
        mixer = [layer.norm1, layer.scale1, layer.attention, layer.token_mlp]
        mlp = [layer.norm2, layer.scale2, layer.mlp]
        for (name, cost), members in zip(layer.part_costs(*shapes).items(), (mixer, mlp), strict=True):
            parameters = sum(member.count_params() for member in members if member is not None)
            yield Part(name, 1, shapes[0], parameters, 2 * cost.multiply_adds)
    elif (title := _name(layer)) is not None:
        cost, output = _cost(layer, shapes), _without_batch(layer.output)
        if isinstance(layer, vit.PatchEmbedding):
            rows, columns = (side // patch for side, patch in zip(shapes[0], layer.patch_size, strict=False))
            output = (rows, columns, layer.hidden_size)
        yield Part(title, 1, output, layer.count_params(), 2 * cost.multiply_adds)


def _name(layer: keras.layers.Layer) -> str | None:
    """Return what a layer is, in words; None for layers that change no shape and have no weights."""
    names: dict[type, Any] = {
        vit.ResNetRoot: lambda layer: "ResNet root",
        vit.ResNetUnit: lambda layer: f"ResNet stage {layer.name.split('_')[1]}",
        vit.GroupNormalization: lambda layer: "norm of the ResNet",
        vit.PatchEmbedding: lambda layer: "patches, {} x {}".format(*layer.patch_size),
        vit.PrefixTokens: lambda layer: "tokens in front",
        vit.PositionEmbedding: lambda layer: f"positions, {layer.kind}",
        RelativePosition: lambda layer: "positions, relative",
        vit.AttentionPooling: lambda layer: "attention pooling",
        vit.TokenPooling: lambda layer: None if layer.token is not None else "mean of the patches",
        vit.L2Normalization: lambda layer: "feature of length 1",
        keras.layers.Concatenate: lambda layer: "class token and mean of the patches",
        keras.layers.LayerNormalization: lambda layer: (
            "norm before the blocks" if layer.name == "pre_norm" else "final norm"
        ),
        keras.layers.Dense: lambda layer: (
            f"pre_logits, {layer.activation.__name__}" if layer.name == "pre_logits" else "head"
        ),
    }
    return next((name(layer) for kind, name in names.items() if isinstance(layer, kind)), None)
