"""What a model is made of, counted from its config: parameters, arithmetic, memory, sizes of files. Nothing is built.

One list of parts (`parts`) says it all; the totals are its sums. Parameters and matrix products are exact, memory is
an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from keras_vit.model.config import ViTConfig

FLOAT = 4  # bytes of a float32
SCALE = 12  # bytes for each output of an int8 kernel: its float32 scale, and the int64 zero that LiteRT keeps beside it
# Bits of a number in a kernel of a dense layer or convolution, by the way a file keeps them; all else stays float32.
PRECISIONS = {"float32": 32, "float16": 16, "int8": 8}
# Tensors as wide as the MLP that are there at once while an activation is computed, its input among them, where every
# result that nobody else reads is written over: what an activation multiplies at its end is read twice.
ALIVE_IN_ACTIVATION = {"gelu_tanh": 2, "gelu_erf": 2, "gelu_quick": 2, "silu": 2, "relu": 1, "tanh": 1, "linear": 1}


class Kernel(NamedTuple):
    """The kernel of a dense layer or convolution.

    Attributes:
        inputs: numbers that an output is a weighted sum of.
        outputs: channels.
        positions: of an image at which it is applied.
    """

    inputs: int
    outputs: int
    positions: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a model, or several that are alike.

    Attributes:
        name: in words.
        output: what leaves it, of one image: (height, width, channels), (tokens, width) or (width,).
        kernels: of one copy.
        others: numbers of one copy that are in no kernel: biases, norms, tokens, position embeddings.
        products: multiply-adds of one copy between activations.
        copies: how many there are, one behind the other.
    """

    name: str
    output: tuple[int, ...]
    kernels: tuple[Kernel, ...] = ()
    others: int = 0
    products: int = 0
    copies: int = 1

    @property
    def kernel_numbers(self) -> int:
        """In the kernels of all copies."""
        return self.copies * sum(kernel.inputs * kernel.outputs for kernel in self.kernels)

    @property
    def kernel_rows(self) -> int:
        """Outputs of the kernels of all copies: an int8 kernel has a scale for each."""
        return self.copies * sum(kernel.outputs for kernel in self.kernels)

    @property
    def parameters(self) -> int:
        """Of all copies."""
        return self.kernel_numbers + self.copies * self.others

    @property
    def flops(self) -> int:
        """Of all copies for one image: matrix products and convolutions, a multiply-add counted as two."""
        applied = sum(prod(kernel) for kernel in self.kernels)
        return 2 * self.copies * (applied + self.products)


class Convolution(NamedTuple):
    """A convolution of a hybrid's ResNet, and the norm behind it.

    Attributes:
        name: in words.
        kernel: side of the square.
        inputs: channels.
        outputs: channels.
        size: (height, width) of what leaves it.
        entering: values of the map that enters it.
        waiting: values of another map that a later sum needs.
        relu: whether it is followed by one at once.
    """

    name: str
    kernel: int
    inputs: int
    outputs: int
    size: tuple[int, int]
    entering: int
    waiting: int = 0
    relu: bool = True

    @property
    def positions(self) -> int:
        """At which it is applied."""
        return prod(self.size)

    @property
    def leaving(self) -> int:
        """Values of the map that leaves it."""
        return self.outputs * self.positions


def count_parameters(config: ViTConfig) -> int:
    """How many numbers are trained or, if frozen, loaded: what `model.count_params()` says of the built model."""
    return sum(part.parameters for part in parts(config))


def forward_flops(config: ViTConfig) -> int:
    """Of one image: matrix products and convolutions, a multiply-add counted as two.

    Papers and timm mostly print multiply-adds, half of it, under the name of GFLOPs or GMACs.
    """
    return sum(part.flops for part in parts(config))


def block_flops(config: ViTConfig) -> int:
    """Likewise, of the encoder blocks alone."""
    return sum(part.flops for part in _blocks(config))


def file_bytes(config: ViTConfig, precision: str) -> int:
    """About how large a LiteRT file is: its weights, without the graph, which takes 20 to 50 kB.

    Args:
        config: of the model.
        precision: of the kernels of dense layers and convolutions, one of `PRECISIONS`: with "float32" and "float16"
            what `quantize="none"` and "float16" write, with "int8" what "dynamic" writes, with a scale for each output
            of a kernel. All other numbers are float32. A checkpoint in float32 is as large.

    Raises:
        ValueError: for another precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {list(PRECISIONS)}. Received: {precision!r}")
    made = parts(config)
    names = ("parameters", "kernel_numbers", "kernel_rows")
    numbers, kernels, rows = (sum(getattr(part, name) for part in made) for name in names)
    others = numbers - kernels
    return PRECISIONS[precision] * kernels // 8 + FLOAT * others + SCALE * rows * (precision == "int8")


def inference_memory(config: ViTConfig) -> int:
    """About how many bytes of activations are there at once while one image passes forward, in float32.

    The image and the widest moment behind it, weights not included. A result is dropped after its last reader, and an
    elementwise one is written over its input where nobody else reads that: what TensorFlow's CPU allocator records of
    a frozen graph, to 1 % for models of 192 channels and more, give or take one tensor of the tokens. What a matrix
    product or convolution needs for itself is not counted, nor what a runtime keeps for the next call.
    """
    image = config.num_channels * prod(config.size)
    widest = max([_block_peak(config), _head_peak(config), *map(_convolution_peak, convolutions(config))])
    return FLOAT * (image + widest)


def parts(config: ViTConfig) -> list[Part]:
    """What an image passes, in order."""
    return [*_stem(config), *_tokens(config), *_blocks(config), *_pooling(config), *_heads(config)]


def convolutions(config: ViTConfig) -> Iterator[Convolution]:
    """The convolutions of a hybrid's ResNet, in order (keras_vit/layers/resnet.py); none for a pure ViT."""
    if config.resnet is None:
        return
    sides = config.size
    size, width = _halved(sides), config.resnet.width
    yield Convolution("root", 7, config.num_channels, width, size, config.num_channels * prod(sides))
    size, inputs = _halved(size), width
    for stage, units in enumerate(config.resnet.num_layers):
        for unit in range(units):
            yield from _unit(f"stage {stage + 1}", size, inputs, width * 2**stage, 2 if stage and not unit else 1)
            size = _halved(size) if stage and not unit else size
            inputs = 4 * width * 2**stage


def _unit(name: str, size: tuple[int, int], inputs: int, narrow: int, strides: int) -> Iterator[Convolution]:
    """A bottleneck: the shortcut's projection where it has one, 1x1, 3x3 with the stride, 1x1."""
    entering, after = inputs * prod(size), _halved(size) if strides == 2 else size
    projected = inputs != 4 * narrow or strides > 1
    shortcut = 4 * narrow * prod(after)
    if projected:
        yield Convolution(name, 1, inputs, 4 * narrow, after, entering, waiting=entering, relu=False)
    yield Convolution(name, 1, inputs, narrow, size, entering, waiting=shortcut if projected else 0)
    yield Convolution(name, 3, narrow, narrow, after, narrow * prod(size), waiting=shortcut)
    # Its ReLU follows the sum.
    yield Convolution(name, 1, narrow, 4 * narrow, after, narrow * prod(after), waiting=shortcut)


def _halved(size: tuple[int, int]) -> tuple[int, int]:
    return ceil(size[0] / 2), ceil(size[1] / 2)


def _stem(config: ViTConfig) -> Iterator[Part]:
    grouped: dict[str, list[Convolution]] = {}
    for convolution in convolutions(config):
        grouped.setdefault(convolution.name, []).append(convolution)
    for name, members in grouped.items():
        last = members[-1]
        size = _halved(last.size) if name == "root" else last.size  # its maximum has stride 2
        yield Part(
            name=f"ResNet {name}",
            output=(*size, last.outputs),
            kernels=tuple(Kernel(c.kernel**2 * c.inputs, c.outputs, c.positions) for c in members),
            others=sum(2 * c.outputs for c in members),
        )


def patch_values(config: ViTConfig) -> int:
    """Numbers in one patch."""
    channels = [config.num_channels, *(convolution.outputs for convolution in convolutions(config))][-1]
    return prod(config.patch) * channels


def _tokens(config: ViTConfig) -> Iterator[Part]:
    """From patches to what the first block takes."""
    width, sequence = config.hidden_size, (config.num_tokens, config.hidden_size)
    height, across = config.patch
    yield Part(
        name=f"patches, {height} x {across}",
        output=(*config.grid, width),
        kernels=(Kernel(patch_values(config), width, prod(config.grid)),),
        others=width if config.patch_bias else 0,
    )
    if config.num_prefix_tokens:
        yield Part(name="tokens in front", output=sequence, others=config.num_prefix_tokens * width)
    if config.position != "none":
        place = {"stem": "", "blocks": ", of every block", "shared": ", shared by the blocks"}[config.position_place]
        name = f"positions, {config.position}{place}"
        yield Part(name=name, output=sequence, others=_position_numbers(config))
    if config.pre_norm:
        yield Part(name="norm before the blocks", output=sequence, others=2 * width)


def _position_numbers(config: ViTConfig) -> int:
    prefix, (height, width) = config.position_prefix_tokens, config.grid
    rows = {
        "learned": prefix + height * width,
        "learned2d": (2 * prefix + height + width) / 2,  # two tables of half the width
        "relative": 2 * config.num_tokens - 1,
    }
    tables = config.num_layers if config.position_place == "blocks" else 1
    return int(rows.get(config.position, 0) * config.hidden_size * tables)


def _blocks(config: ViTConfig) -> tuple[Part, Part]:
    """The attention and the MLP of all blocks, each with its norm and LayerScale."""
    width, tokens = config.hidden_size, config.num_tokens
    around = 2 * width + (0 if config.layer_scale is None else width)
    biases = 4 * width if config.qkv_bias else width
    pairs = 4 if config.position == "relative" else 2  # a query meets 2 * tokens embeddings of offsets
    attention = Part(
        name=f"attention, {config.num_heads} heads of {width // config.num_heads}",
        output=(tokens, width),
        kernels=(Kernel(width, width, tokens),) * 4,
        others=around + biases,
        products=pairs * tokens**2 * width,  # scores and weighted sums of every pair
        copies=config.num_layers,
    )
    mlp = Part(
        name=f"MLP, {config.mlp_dim:,} wide, {config.activation}",
        output=(tokens, width),
        kernels=_mlp_kernels(config, tokens),
        others=around + config.mlp_dim + width,
        copies=config.num_layers,
    )
    return attention, mlp


def _mlp_kernels(config: ViTConfig, positions: int) -> tuple[Kernel, Kernel]:
    width, inside = config.hidden_size, config.mlp_dim
    return Kernel(width, inside, positions), Kernel(inside, width, positions)


def _pooling(config: ViTConfig) -> Iterator[Part]:
    width, patches = config.hidden_size, prod(config.grid)
    norm = Part(name="final norm", output=(config.num_tokens, width), others=2 * width)
    if config.final_norm == "tokens":
        yield norm
    if config.has_map_head:  # keys and values of every patch, the rest at the probe
        yield Part(
            name="attention pooling",
            output=(width,),
            kernels=(*[Kernel(width, width, patches)] * 2, *[Kernel(width, width, 1)] * 2, *_mlp_kernels(config, 1)),
            others=width + 4 * width + 2 * width + config.mlp_dim + width,  # its probe first
            products=2 * patches * width,
        )
    elif config.classifier == "gap":
        yield Part(name="mean of the patches", output=(width,))
    if config.final_norm == "pooled":
        yield Part(name="final norm", output=(*_leaving(config), width), others=2 * width)


def _leaving(config: ViTConfig) -> tuple[int, ...]:
    """What stands before the channels of what leaves the head: the tokens where it is applied to each."""
    return (config.num_tokens,) if config.is_unpooled else ()


def _heads(config: ViTConfig) -> Iterator[Part]:
    lead = _leaving(config)
    features = config.hidden_size
    if config.representation_size:
        kernels = (Kernel(features, config.representation_size, prod(lead)),)
        features = config.representation_size
        name = f"pre_logits, {config.representation_activation}"
        yield Part(name=name, output=(*lead, features), kernels=kernels, others=features)
    if config.num_classes:
        yield Part(
            name="heads of both tokens" if config.distilled else "head",
            output=(*lead, config.num_classes),
            kernels=(Kernel(features, config.num_classes, prod(lead)),),
            others=config.num_classes,
            copies=2 if config.distilled else 1,
        )


def _block_peak(config: ViTConfig) -> int:
    """Values that are there at the widest moment of an encoder block."""
    tokens, inside = config.num_tokens * config.hidden_size, config.num_tokens * config.mlp_dim
    pairs = config.num_heads * config.num_tokens**2
    if config.position == "relative":  # beside them those of 2 * tokens offsets, twice while they are skewed
        pairs *= 5
    # The residual stream, and beside it three of query, key, value and their copies with the heads in front, and the
    # scores; or what the activation has.
    return tokens + max(3 * tokens + pairs, ALIVE_IN_ACTIVATION[config.activation] * inside)


def _head_peak(config: ViTConfig) -> int:
    return prod(_leaving(config)) * (config.hidden_size + config.num_classes)


def _convolution_peak(convolution: Convolution) -> int:
    """What waits, and either what enters and leaves, or the centred map and its squares."""
    return convolution.waiting + convolution.leaving + max(convolution.entering, convolution.leaving)
