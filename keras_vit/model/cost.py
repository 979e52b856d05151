"""Count parameters, operations, activation memory and file sizes of a model from its config, without building it.

Parameters and matrix products are exact; memory is an estimate.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from keras_vit.model.config import ViTConfig

FLOAT = 4  # bytes of a float32
SCALE = 12  # bytes for each output of an int8 kernel: a float32 scale, and the int64 zero point that LiteRT stores
# Bits of a number in a kernel of a dense layer or convolution; all other numbers are float32.
PRECISIONS = {"float32": 32, "float16": 16, "int8": 8}
# Number of tensors of the MLP's width, its input included, that exist at once while an activation is computed. Results
# with a single reader are overwritten in place; most activations read their input twice, for a product at the end.
ACTIVATION_TENSORS = {"gelu_tanh": 2, "gelu_erf": 2, "gelu_quick": 2, "silu": 2, "relu": 1, "tanh": 1, "linear": 1}


class Kernel(NamedTuple):
    """Kernel of a dense layer or convolution."""

    inputs: int  # input values of one output
    outputs: int  # output channels
    positions: int  # positions in one image where it is applied


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a model, or several equal parts in a row."""

    name: str
    output: tuple[int, ...]  # shape for one image: (height, width, channels), (tokens, width) or (width,)
    kernels: tuple[Kernel, ...] = ()  # kernels of one copy
    others: int = 0  # parameters of one copy outside of kernels: biases, norms, tokens, position embeddings
    products: int = 0  # multiply-adds of one copy between two activations
    copies: int = 1

    @property
    def kernel_numbers(self) -> int:
        """Number of parameters in the kernels of all copies."""
        return self.copies * sum(kernel.inputs * kernel.outputs for kernel in self.kernels)

    @property
    def parameters(self) -> int:
        """Number of parameters of all copies."""
        return self.kernel_numbers + self.copies * self.others

    @property
    def flops(self) -> int:
        """Operations of all copies for one image: matrix products and convolutions, a multiply-add counts as two."""
        return 2 * self.copies * (sum(prod(kernel) for kernel in self.kernels) + self.products)


class Convolution(NamedTuple):
    """A convolution of a hybrid's ResNet, and the norm after it."""

    name: str  # of its part
    kernel: int  # side of the square
    inputs: int  # channels
    outputs: int  # channels
    size: tuple[int, int]  # (height, width) of its result
    input_values: int  # numbers in its input
    shortcut_values: int = 0  # numbers of another feature map that is kept for a later sum
    relu: bool = True  # whether a ReLU follows directly

    @property
    def positions(self) -> int:
        """Number of positions of the kernel."""
        return prod(self.size)

    @property
    def output_values(self) -> int:
        """Number of values in its result."""
        return self.outputs * self.positions


def count_parameters(config: ViTConfig) -> int:
    """Return the number of parameters, trained or frozen, as `model.count_params()` does."""
    return sum(part.parameters for part in parts(config))


def forward_flops(config: ViTConfig) -> int:
    """Return the operations for one image, twice the multiply-adds (GFLOPs or GMACs) that papers and timm print."""
    return sum(part.flops for part in parts(config))


def block_flops(config: ViTConfig) -> int:
    """Return the operations of the encoder blocks for one image, counted as in `forward_flops`."""
    return sum(part.flops for part in _blocks(config))


def file_bytes(config: ViTConfig, precision: str) -> int:
    """Return the approximate size of a LiteRT file, without its graph (20 to 50 kB).

    `precision` is that of the kernels, a key of `PRECISIONS`: "float32" for `quantize="none"` (and for checkpoints in
    float32), "float16" for "float16", "int8" for "dynamic".
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {list(PRECISIONS)}. Received: {precision!r}")
    kernels = sum(part.kernel_numbers for part in parts(config))
    size = PRECISIONS[precision] * kernels // 8 + FLOAT * (count_parameters(config) - kernels)
    scales = sum(part.copies * kernel.outputs for part in parts(config) for kernel in part.kernels)
    return size + (SCALE * scales if precision == "int8" else 0)


def inference_memory(config: ViTConfig) -> int:
    """Return the approximate bytes of activations for one float32 image, without the weights.

    This is the image and the largest set of tensors that exist at once. For 192 channels or more it differs from
    TensorFlow's CPU allocator (frozen graph) by at most 1 % plus one tensor of tokens. A result is freed after its
    last reader; an elementwise result overwrites an input without other readers. Workspace and caches are not counted.
    """
    image = config.num_channels * prod(config.size)
    head = prod(_output_tokens(config)) * (config.hidden_size + config.num_classes)
    block = _block_peak(config) if config.num_layers else 0
    return FLOAT * (image + max([block, head, *map(_convolution_peak, convolutions(config))]))


def parts(config: ViTConfig) -> list[Part]:
    """Return the parts of a model in the order of computation."""
    return [*_stem(config), *_tokens(config), *_blocks(config), *_pooling(config), *_heads(config)]


def convolutions(config: ViTConfig) -> Iterator[Convolution]:
    """Yield the convolutions of a hybrid's ResNet (`model.layers.resnet`) in order; none for a pure ViT."""
    if config.resnet is None:
        return
    sides = config.size
    size, width = _halved(sides), config.resnet.width
    yield Convolution("root", 7, config.num_channels, width, size, config.num_channels * prod(sides))
    size, inputs = _halved(size), width
    for stage, (units, narrow) in enumerate(zip(config.resnet.num_layers, config.resnet.widths, strict=True)):
        for unit in range(units):
            yield from _unit(f"stage {stage + 1}", size, inputs, narrow, 2 if stage and not unit else 1)
            size = _halved(size) if stage and not unit else size
            inputs = 4 * narrow


def _unit(name: str, size: tuple[int, int], inputs: int, narrow: int, strides: int) -> Iterator[Convolution]:
    """Yield the convolutions of a bottleneck: the shortcut's projection if it has one, 1x1, 3x3 (strided), 1x1."""
    input_values, output_size = inputs * prod(size), _halved(size) if strides == 2 else size
    has_projection = inputs != 4 * narrow or strides > 1
    shortcut = 4 * narrow * prod(output_size)
    if has_projection:
        yield Convolution(name, 1, inputs, 4 * narrow, output_size, input_values, input_values, relu=False)
    yield Convolution(name, 1, inputs, narrow, size, input_values, shortcut if has_projection else 0)
    yield Convolution(name, 3, narrow, narrow, output_size, narrow * prod(size), shortcut)
    yield Convolution(name, 1, narrow, 4 * narrow, output_size, narrow * prod(output_size), shortcut)


def _halved(size: tuple[int, int]) -> tuple[int, int]:
    return ceil(size[0] / 2), ceil(size[1] / 2)


def _stem(config: ViTConfig) -> Iterator[Part]:
    has_norms_behind = config.resnet is None or config.resnet.version == 1
    for name, group in itertools.groupby(convolutions(config), key=lambda convolution: convolution.name):
        members = list(group)
        last = members[-1]
        in_front = [c.inputs for c in members if c.relu and name != "root"]  # version 2
        normed = [c.outputs for c in members] if has_norms_behind else in_front
        size = _halved(last.size) if name == "root" else last.size  # the root's max pooling has stride 2
        yield Part(
            name=f"ResNet {name}",
            output=(*size, last.outputs),
            kernels=tuple(Kernel(c.kernel**2 * c.inputs, c.outputs, c.positions) for c in members),
            others=2 * sum(normed),
        )
    if not has_norms_behind:
        yield Part(name="norm of the ResNet", output=(*size, last.outputs), others=2 * last.outputs)


def patch_values(config: ViTConfig) -> int:
    """Return the number of values in one patch."""
    channels = [config.num_channels, *(convolution.outputs for convolution in convolutions(config))][-1]
    return prod(config.patch) * channels


def _tokens(config: ViTConfig) -> Iterator[Part]:
    """Yield the parts from the patches to the input of the first block; none for a ResNet without blocks."""
    if not config.num_layers:
        return
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
        "learned2d": (2 * prefix + height + width) / 2,  # two tables, each half as wide
        "relative": 2 * config.num_tokens - 1,
    }
    tables = config.num_layers if config.position_place == "blocks" else 1
    return int(rows.get(config.position, 0) * config.hidden_size * tables)


def _blocks(config: ViTConfig) -> tuple[Part, ...]:
    """Return the attention (or token MLP) and the MLP of all blocks, each with its norm and LayerScale."""
    if not config.num_layers:
        return ()
    width, tokens = config.hidden_size, config.num_tokens
    norm_and_scale = 2 * width + (0 if config.layer_scale is None else width)
    mlp = Part(
        name=f"MLP, {config.mlp_dim:,} wide, {'gated by ' if config.gated_mlp else ''}{config.activation}",
        output=(tokens, width),
        kernels=(*_mlp_kernels(config, tokens), *[Kernel(width, config.mlp_dim, tokens)] * config.gated_mlp),
        others=norm_and_scale + (1 + config.gated_mlp + 2 * config.mlp_norm) * config.mlp_dim + width,
        copies=config.num_layers,
    )
    biases = (3 + config.key_bias) * width if config.qkv_bias else width
    if config.tokens_mlp_dim is not None:
        mixing = Part(
            name=f"MLP over the tokens, {config.tokens_mlp_dim:,} wide, {config.activation}",
            output=(tokens, width),
            kernels=(Kernel(tokens, config.tokens_mlp_dim, width), Kernel(config.tokens_mlp_dim, tokens, width)),
            others=norm_and_scale + config.tokens_mlp_dim + tokens,
            copies=config.num_layers,
        )
        return mixing, mlp
    # For each pair of tokens: a score and a weighted sum; relative positions score 2 * tokens offsets for each query.
    products = 4 if config.position == "relative" else 2
    attention = Part(
        name=f"attention, {config.num_heads} heads of {width // config.num_heads}",
        output=(tokens, width),
        kernels=(Kernel(width, width, tokens),) * 4,
        others=norm_and_scale + biases,
        products=products * tokens**2 * width,
        copies=config.num_layers,
    )
    return attention, mlp


def _mlp_kernels(config: ViTConfig, positions: int) -> tuple[Kernel, Kernel]:
    width, mlp_dim = config.hidden_size, config.mlp_dim
    return Kernel(width, mlp_dim, positions), Kernel(mlp_dim, width, positions)


def _pooling(config: ViTConfig) -> Iterator[Part]:
    width, patches = config.hidden_size, prod(config.grid)
    if config.final_norm == "tokens" and config.num_layers:
        yield Part(name="final norm", output=(config.num_tokens, width), others=2 * width)
    if config.has_map_head:  # keys and values of every patch; query, output and MLP of the probe alone
        yield Part(
            name="attention pooling",
            output=(width,),
            kernels=(*[Kernel(width, width, patches)] * 2, *[Kernel(width, width, 1)] * 2, *_mlp_kernels(config, 1)),
            others=width + 4 * width + 2 * width + config.mlp_dim + width,  # probe, attention, norm, MLP
            products=2 * patches * width,
        )
    elif config.classifier == "gap":
        yield Part(name="mean of the patches", output=(width,))
    elif config.classifier == "token_gap":
        yield Part(name="class token and mean of the patches", output=(2 * width,))
    if config.final_norm == "pooled":
        yield Part(name="final norm", output=(*_output_tokens(config), width), others=2 * width)


def _output_tokens(config: ViTConfig) -> tuple[int, ...]:
    """Return the shape of the output before its channels: (tokens,) where the head is applied to each, else ()."""
    return (config.num_tokens,) if config.is_unpooled else ()


def _heads(config: ViTConfig) -> Iterator[Part]:
    tokens = _output_tokens(config)
    features = config.feature_size
    if config.representation_size:
        kernels = (Kernel(features, config.representation_size, prod(tokens)),)
        features = config.representation_size
        name = f"pre_logits, {config.representation_activation}"
        yield Part(name=name, output=(*tokens, features), kernels=kernels, others=features)
    if config.normalize_features:
        yield Part(name="feature of length 1", output=(features,))
    if config.num_classes:
        yield Part(
            name="heads of both tokens" if config.distilled else "head",
            output=(*tokens, config.num_classes),
            kernels=(Kernel(features, config.num_classes, prod(tokens)),),
            others=config.num_classes,
            copies=2 if config.distilled else 1,
        )


def mixing_values(config: ViTConfig) -> int:
    """Return the number of attention scores in a block, or of values in the hidden layer of its token MLP."""
    if not config.has_attention:
        return (config.tokens_mlp_dim or 0) * config.hidden_size
    return config.num_heads * config.num_tokens**2


def _block_peak(config: ViTConfig) -> int:
    """Return the largest number of values that exist at once in an encoder block."""
    tokens, hidden = config.num_tokens * config.hidden_size, config.num_tokens * config.mlp_dim
    scores = mixing_values(config)
    if config.position == "relative":  # and the scores of 2 * tokens offsets, twice while they are skewed
        scores *= 5
    # The residual stream, and either the scores and three tensors of tokens (query, key and value or their copies with
    # the heads in front), or the tensors of the activation (and, if it is a gate, the tensor that it multiplies).
    mlp = (ACTIVATION_TENSORS[config.activation] + config.gated_mlp) * hidden
    return tokens + max(3 * tokens + scores, mlp)


def _convolution_peak(convolution: Convolution) -> int:
    """Return the values of shortcut and result, and of the input or of the squares of the centred result."""
    values = convolution.output_values
    return convolution.shortcut_values + values + max(convolution.input_values, values)
