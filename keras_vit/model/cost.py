"""Count the parameters, arithmetic and memory of a model from its layers, built without values.

An unknown class of layers, an unknown field of the config and weights that belong to no part are errors: a number is
never too small because something was left out.
"""

import contextlib
import dataclasses
import functools
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import keras

from keras_vit._util.progress import print_line
from keras_vit._util.text import duration
from keras_vit.model import layers as vit
from keras_vit.model.config import ResNetConfig, ViTConfig, check_resizable
from keras_vit.model.layers.attention import MergeHeads, SplitHeads
from keras_vit.model.layers.block import Dense
from keras_vit.model.layers.position_variants import RelativeBias, RelativePosition, RotaryFrequencies
from keras_vit.model.vision_transformer import VisionTransformer


def symbolic_model(config: ViTConfig) -> VisionTransformer:
    """Build a float32 model without values, in a fraction of a second; only its structure can be read."""
    drawn = random.getstate()  # from which initializers take their seeds
    try:
        # Keras keeps a list of variables without values for each thread, and gives them values when another scope ends.
        # A thread of its own has a list of its own, which ends with it.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_without_values, config).result()
    finally:
        random.setstate(drawn)


CORE_FLOPS = 5e10  # of one core of a CPU in a second, about
LONG = 60.0  # seconds from which on a command says how long it takes
USUAL_SIDE = 224  # pixels that are offered in place of more


def cpu_seconds(flops: float) -> float:
    """Seconds that this machine's CPU perhaps takes, in which nothing else runs."""
    return flops / (CORE_FLOPS * (os.cpu_count() or 1))


def say_time(model: VisionTransformer, images: int, option: str | None = None) -> None:
    """Print how long this CPU perhaps computes outputs of images, if that is long, and with fewer pixels.

    `option` is the one that chooses the image size; None offers no other.
    """
    seconds = cpu_seconds(images * count_model(model).flops)
    if seconds < LONG:
        return
    side = max(model.config.size)
    text = f"{images:,} images at {side} pixels: perhaps {duration(seconds)} on this CPU"
    smaller = min(USUAL_SIDE, side // 2) // max(model.config.patch) * max(model.config.patch)
    if option and smaller:
        with contextlib.suppress(ValueError):  # a model of one size
            config = model.config.replace(image_size=smaller)
            check_resizable(model.config, config)
            text += f"; with {option} {smaller} perhaps {duration(cpu_seconds(images * count(config).flops))}"
    print_line(text)


def _without_values(config: ViTConfig) -> VisionTransformer:
    with keras.StatelessScope(initialize_variables=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "keras_vit: ", UserWarning)  # nobody asked for this model
        return VisionTransformer(config, dtype="float32")


Shape: TypeAlias = tuple[int, ...]  # of one image, without the batch
FLOAT = 4  # bytes of a float32
SCALE = 12  # bytes for each output of an int8 kernel: a float32 scale, and the int64 zero point that LiteRT stores


class ActivationTensors(NamedTuple):
    """Numbers of tensors of an activation's width.

    Args:
        at_once: that exist at once in inference, the input included. Results with a single reader are overwritten in
            place; most activations read their input twice, for a product at the end.
        kept: that TensorFlow's graph keeps for the gradient, unless XLA computes them again.
    """

    at_once: int
    kept: int


ACTIVATION_TENSORS = {
    **dict.fromkeys(("gelu_tanh", "gelu_erf", "hard_swish"), ActivationTensors(2, 4)),
    **dict.fromkeys(("gelu_quick", "silu"), ActivationTensors(2, 1)),
    **dict.fromkeys(("leaky_relu", "linear", "relu", "relu6", "sigmoid", "tanh"), ActivationTensors(1, 1)),
}
# The fields of ViTConfig and ResNetConfig that this module honours. A new one that is not `uncounted` is an error.
FIELDS = """
    image_size patch_size num_channels patch_bias resnet class_token num_class_tokens distilled num_registers
    patch_norm pre_norm position position_place position_prefix rotary_theta rotary_learned relative_bias
    relative_bias_mlp_dim hidden_size num_layers stochastic_depth num_heads mlp_dim tokens_mlp_dim qkv_bias key_bias
    dense_bias gated_mlp attention_norm mlp_norm activation norm layer_scale dropout_rate attention_dropout_rate
    num_classes classifier token_blocks mean_blocks pool_heads pool_mlp_dim pool_prefix representation_size
    representation_activation final_norm normalize_features projection_head preprocessing width_factor version
    stage_widths stage_channels groups
"""


@dataclass(frozen=True)
class NetworkPart:
    """One part of a model, or several equal parts in a row.

    Args:
        name: what it is, in words.
        copies: number of equal parts.
        output: shape of its result for one image: (height, width, channels), (tokens, width) or (width,).
        parameters: of all copies.
        flops: operations of all copies for one image, in matrix products and convolutions; a multiply-add is two.
    """

    name: str
    copies: int
    output: tuple[int, ...]
    parameters: int
    flops: int


@dataclass(frozen=True)
class Numbers:
    """The numbers of a model.

    Args:
        parameters: number of parameters, trained or frozen, as `model.count_params()` returns it.
        parts: in the order of computation.
        flops: operations for one image, twice the multiply-adds (GFLOPs or GMACs) that papers and timm print.
        block_flops: those of the encoder blocks.
        activation_bytes: approximate bytes of activations for one float32 image, without the weights.
        file_bytes: approximate size of a LiteRT file without its graph (20 to 50 kB), by the precision of its kernels:
            "float32" for `quantize="none"` (and for checkpoints in float32, which have a table of relative biases in
            place of one number for each pair of tokens), "float16", "int8" for "dynamic".
    """

    parameters: int
    parts: tuple[NetworkPart, ...]
    flops: int
    block_flops: int
    activation_bytes: int
    file_bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Arithmetic and memory of a layer for one image. `+` gives the cost of two layers in a row.

    Args:
        multiply_adds: in matrix products and convolutions.
        peak: the most values that exist at once in inference.
    """

    multiply_adds: int = 0
    peak: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(multiply_adds=self.multiply_adds + other.multiply_adds, peak=max(self.peak, other.peak))

    def with_peak(self, values: int) -> "Cost":
        """Add values that exist at the same time as those of the layer."""
        return dataclasses.replace(self, peak=self.peak + values)


@functools.lru_cache(maxsize=64)
def count(config: ViTConfig) -> Numbers:
    """Count parameters, operations and bytes of a config's model; a TypeError names an unknown layer or field.

    The activations are the image and the largest set of tensors that exist at once. For 192 channels or more they
    differ from TensorFlow's CPU allocator (frozen graph) by at most 1 % plus one tensor of tokens. A result is freed
    after its last reader; an elementwise result overwrites an input without other readers. Workspace and caches are not
    counted.
    """
    kinds = (ViTConfig, ResNetConfig)
    counted = [
        (kind, one) for kind in kinds for one in dataclasses.fields(kind) if one.metadata.get("is_counted", True)
    ]
    if unknown := [f"{kind.__name__}.{one.name}" for kind, one in counted if one.name not in FIELDS.split()]:
        raise TypeError(
            f"The cost of {unknown} is unknown. Add them to FIELDS in {__name__} and to the costs they change, or "
            "declare them as `uncounted`"
        )
    for activation in (config.activation, config.representation_activation):
        activation_tensors(activation)
    return count_model(symbolic_model(config))


def count_model(model: keras.Model) -> Numbers:
    """Count parameters, operations and bytes of a model with the layers of a VisionTransformer."""
    costs = list(layer_costs(model))
    parts = tuple(_merge_parts(part for layer in model.layers for part in _parts(layer)))
    total = sum((cost for _, cost in costs), Cost())
    parameters, flops = model.count_params(), 2 * total.multiply_adds
    if (parameters, flops) != (sum(part.parameters for part in parts), sum(part.flops for part in parts)):
        raise TypeError(f"Weights or products of the model are in none of its parts: complete {__name__}._parts")
    with_kernel = [layer for layer in _all_layers(model) if hasattr(layer, "kernel")]
    kernels = sum(prod(layer.kernel.shape) for layer in with_kernel)
    others = FLOAT * (parameters - kernels)
    biases = FLOAT * sum(num_bias_constants(layer) for layer in model.layers)
    return Numbers(
        parameters=parameters,
        parts=parts,
        flops=flops,
        block_flops=2 * sum(cost.multiply_adds for layer, cost in costs if isinstance(layer, vit.EncoderBlock)),
        activation_bytes=FLOAT * (prod(model.input.shape[1:]) + total.peak),
        file_bytes={
            "float32": FLOAT * parameters + biases,
            "float16": 2 * kernels + others + biases,
            "int8": kernels + others + biases + SCALE * sum(_outputs(layer) for layer in with_kernel),
        },
    )


def num_bias_constants(layer: keras.layers.Layer) -> int:
    """Count the numbers that a LiteRT file has for relative biases or learned rotary positions, beside the weights."""
    tables = 2 if isinstance(layer, RotaryFrequencies) else 1 if isinstance(layer, RelativeBias) else 0
    return tables and tables * prod(layer.output.shape) - layer.count_params()


def layer_costs(model: keras.Model) -> Iterator[tuple[keras.layers.Layer, Cost]]:
    """Iterate over the layers of a VisionTransformer with their costs, in the order of computation."""
    for layer in _all_layers(model):
        if type(layer) not in (vit.EncoderBlock, *COSTS, *FREE, *INNER):
            raise TypeError(
                f"The cost of the layer {layer.path} ({type(layer).__name__}, {layer.count_params():,} parameters) is "
                f"unknown. Add its class to {__name__}"
            )
    for layer in model.layers:
        shapes = _input_shapes(layer)
        if isinstance(layer, vit.EncoderBlock):
            yield layer, sum(_branches(layer, *shapes).values(), Cost())
        else:
            yield layer, _cost(layer, shapes)


def _all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """List the layers of a model, and those inside of them."""
    found: list[keras.layers.Layer] = model._flatten_layers(include_self=False)
    return found


def _input_shapes(layer: keras.layers.Layer) -> list[Shape]:
    return [_without_batch(tensor) for tensor in keras.tree.flatten(layer.input)]


def _without_batch(tensor: keras.KerasTensor) -> Shape:
    """Shape of a tensor for one image; a table of positions has no axis for the batch."""
    return tuple(side for side in tensor.shape if side is not None)


def _outputs(layer: keras.layers.Layer) -> int:
    """Output channels of a layer's kernel; a file with 8-bit kernels has a scale for each."""
    shape = layer.kernel.shape
    return prod(shape[1:]) if isinstance(layer, SplitHeads) else int(shape[-1])


# ---- parts


def _merge_parts(parts: Iterable[NetworkPart]) -> Iterator[NetworkPart]:
    """Merge equal parts to one with their number, and the units of a ResNet's stage."""
    merged: dict[str, list[NetworkPart]] = {}
    for part in parts:
        merged.setdefault(part.name, []).append(part)
    for name, same in merged.items():
        is_equal = all(part == same[0] for part in same)
        parameters, flops = (sum(getattr(part, name) for part in same) for name in ("parameters", "flops"))
        yield NetworkPart(name, len(same) if is_equal else 1, same[-1].output, parameters, flops)


def _parts(layer: keras.layers.Layer) -> Iterator[NetworkPart]:
    """List the parts of one layer: two of an encoder block, none of a layer without a title."""
    shapes = _input_shapes(layer)
    if isinstance(layer, vit.EncoderBlock):
        mixer = [layer.norm1, layer.scale1, layer.attention, layer.token_mlp]
        mlp = [layer.norm2, layer.scale2, layer.mlp]
        for (name, cost), members in zip(_branches(layer, *shapes).items(), (mixer, mlp), strict=True):
            parameters = sum(member.count_params() for member in members if member is not None)
            yield NetworkPart(name, 1, shapes[0], parameters, 2 * cost.multiply_adds)
    elif (title := _title(layer)) is not None:
        output = _without_batch(layer.output)
        if isinstance(layer, vit.PatchEmbedding):
            rows, columns = (side // patch for side, patch in zip(shapes[0], layer.patch_size, strict=False))
            output = (rows, columns, layer.hidden_size)
        yield NetworkPart(title, 1, output, layer.count_params(), 2 * _cost(layer, shapes).multiply_adds)


def _title(layer: Any) -> str | None:
    """Name a layer in words; None for layers that change no shape and have no weights."""
    norms = {"patch_norm": "norm of the patches", "pre_norm": "norm before the blocks"}
    titles: dict[type, Callable[[], str | None]] = {
        vit.ResNetRoot: lambda: "ResNet root",
        vit.ResNetUnit: lambda: f"ResNet stage {layer.name.split('_')[1]}",
        vit.GroupNormalization: lambda: "norm of the ResNet",
        vit.PatchEmbedding: lambda: "patches, {} x {}".format(*layer.patch_size),
        vit.PrefixTokens: lambda: "tokens in front",
        vit.PositionEmbedding: lambda: f"positions, {layer.kind}",
        RelativePosition: lambda: "positions, relative",
        RelativeBias: lambda: "biases of attention",
        RotaryFrequencies: lambda: "positions, rotary",
        vit.AttentionPooling: lambda: "attention pooling",
        vit.TokenPooling: lambda: None if layer.token is not None else "pooled patches",
        vit.L2Normalization: lambda: "feature of length 1",
        keras.layers.Concatenate: lambda: "class tokens and pooled patches",
        vit.LayerNormalization: lambda: norms.get(layer.name, "final norm"),
        keras.layers.Dense: lambda: (
            f"pre_logits, {layer.activation.__name__}" if layer.name == "pre_logits" else "head"
        ),
    }
    return titles.get(type(layer), lambda: None)()


def _mlp_title(layer: vit.MLP) -> str:
    return f"{layer.mlp_dim:,} wide, {'gated by ' if layer.gated else ''}{layer.activation}"


# ---- the cost of each class of layers, for the shapes of its inputs


def _cost(layer: keras.layers.Layer, shapes: list[Shape]) -> Cost:
    return Cost() if type(layer) in FREE else COSTS[type(layer)](layer, *shapes)


def _dense(layer: Any, shape: Shape) -> Cost:
    positions = prod(shape[:-1])
    inputs, outputs = layer.kernel.shape
    return Cost(multiply_adds=positions * inputs * outputs, peak=positions * (inputs + outputs))


def _patches(layer: vit.PatchEmbedding, shape: Shape) -> Cost:
    tokens = prod(layer.compute_output_shape((None, *shape))[1:-1])  # the image is counted elsewhere
    return Cost(multiply_adds=tokens * prod(layer.kernel.shape))


def _attention(
    layer: vit.MultiHeadAttention, queries: Shape, attended: Shape | None = None, relative: Shape | None = None
) -> Cost:
    num_queries, width = queries
    num_attended = num_queries if attended is None else attended[0]
    scores = layer.num_heads * num_queries * num_attended
    query_weights = sum(prod(part.kernel.shape) for part in (layer.query, layer.out) if part is not None)
    attended_weights = prod(layer.key.kernel.shape) + prod(layer.value.kernel.shape)
    # A product for the scores and one for the weighted sum; relative positions score twice as many offsets.
    learns_rotary = layer.rotary is not None and layer.rotary.block is not None
    relative = None if learns_rotary else relative
    scores_offsets = relative is not None and len(relative) == 3  # and is no bias, (1, heads, tokens, tokens)
    products = (4 if scores_offsets else 2) * scores * layer.key.kernel.shape[-1]
    return Cost(
        multiply_adds=num_queries * query_weights + num_attended * attended_weights + products,
        # The scores, and three tensors of tokens: queries, keys and values, or their copies with the heads in front.
        # Relative scores are five times as many, for offsets are scored too and skewed in two steps; biases are added.
        peak=3 * num_attended * width + scores * (1 if relative is None else 5 if scores_offsets else 2),
    )


def _relative_bias(layer: RelativeBias, shape: Shape) -> Cost:
    rows = (2 * layer.grid[0] - 1) * (2 * layer.grid[1] - 1)
    values = prod(layer.compute_output_shape((None, *shape)))
    return Cost(multiply_adds=rows * (layer.mlp_dim or 0) * (2 + layer.num_heads), peak=values)


def _rotary(layer: RotaryFrequencies, shape: Shape) -> Cost:
    values = prod(layer.compute_output_shape((None, *shape)))
    return Cost(peak=values)


def activation_tensors(name: str) -> ActivationTensors:
    """Look up an activation; one without a row is a TypeError."""
    if name not in ACTIVATION_TENSORS:
        raise TypeError(f"The cost of the activation {name!r} is unknown. Add it to ACTIVATION_TENSORS in {__name__}")
    return ACTIVATION_TENSORS[name]


def _mlp(layer: vit.MLP, shape: Shape) -> Cost:
    positions, width = shape
    hidden = positions * layer.mlp_dim
    denses: list[Any] = [layer.dense1, layer.dense2, *([layer.gate] if layer.gated else [])]
    return Cost(
        multiply_adds=positions * sum(prod(dense.kernel.shape) for dense in denses),
        peak=(activation_tensors(layer.activation).at_once + layer.gated) * hidden,
    )


def _branches(layer: vit.EncoderBlock, shape: Shape, relative: Shape | None = None) -> dict[str, Cost]:
    """Cost of the attention (or token MLP) and of the MLP, by title."""
    residual = prod(shape)
    if layer.token_mlp is None:
        mixer = _attention(layer.attention, shape, shape, relative)
        title = f"attention, {layer.attention.num_heads} heads of {layer.attention.query.kernel.shape[-1]}"
    else:
        mixer, title = _mlp(layer.token_mlp, shape[::-1]), f"MLP over the tokens, {_mlp_title(layer.token_mlp)}"
    mlp = _mlp(layer.mlp, shape)
    return {title: mixer.with_peak(residual), f"MLP, {_mlp_title(layer.mlp)}": mlp.with_peak(residual)}


def _attention_pooling(layer: vit.AttentionPooling, shape: Shape) -> Cost:
    tokens, width = shape
    attention = _attention(layer.attention, (1, width), (tokens - layer.prefix_tokens, width))
    return attention if layer.mlp is None else attention + _mlp(layer.mlp, (1, width))


def _convolution(layer: vit.StandardizedConv2D, shape: Shape) -> Cost:
    """Cost of a convolution with the norm after or before it, which exists at once with its input or the squares."""
    rows, columns, channels = layer.compute_output_shape((None, *shape))[1:]
    values = rows * columns * channels
    return Cost(multiply_adds=rows * columns * prod(layer.kernel.shape), peak=values + max(prod(shape), values))


def _resnet_root(layer: vit.ResNetRoot, shape: Shape) -> Cost:
    return _convolution(layer.conv, shape)


def _resnet_unit(layer: vit.ResNetUnit, shape: Shape) -> Cost:
    shortcut = prod(layer.compute_output_shape((None, *shape))[1:])
    cost = Cost() if layer.conv_proj is None else _convolution(layer.conv_proj, shape).with_peak(prod(shape))
    for conv in (layer.conv1, layer.conv2, layer.conv3):
        # The shortcut waits for the sum; without a projection it is the first convolution's own input.
        waiting = 0 if conv is layer.conv1 and layer.conv_proj is None else shortcut
        cost += _convolution(conv, shape).with_peak(waiting)
        shape = conv.compute_output_shape((None, *shape))[1:]
    return cost


COSTS: dict[type, Callable[..., Cost]] = {
    vit.AttentionPooling: _attention_pooling,
    vit.PatchEmbedding: _patches,
    vit.ResNetRoot: _resnet_root,
    vit.ResNetUnit: _resnet_unit,
    RelativeBias: _relative_bias,
    RotaryFrequencies: _rotary,
    keras.layers.Dense: _dense,
}
# Layers without products.
FREE = (
    vit.Dropout,
    vit.LayerNormalization,
    vit.GroupNormalization,
    vit.L2Normalization,
    vit.PositionEmbedding,
    vit.PrefixTokens,
    vit.TokenPooling,
    RelativePosition,
    keras.layers.Average,
    keras.layers.Concatenate,
    keras.layers.Identity,
    keras.layers.InputLayer,
    keras.layers.ReLU,
    keras.layers.Reshape,
)
# Layers inside of others, whose functions count them.
INNER = (
    vit.LayerScale,
    vit.MLP,
    vit.MultiHeadAttention,
    vit.StandardizedConv2D,
    vit.StochasticDepth,
    Dense,
    MergeHeads,
    SplitHeads,
)
