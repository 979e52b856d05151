"""What training a model will take, before anything is built: parameters, arithmetic, memory, time.

Parameters are counted exactly. Arithmetic is that of the matrix products and convolutions. Memory is an estimate of
what a training step keeps: TensorFlow's gradients were read for the tensors that each layer holds until its backward
pass (`_kept_by_block` and its neighbours name them). XLA fuses and keeps less. Time follows from the arithmetic and
an assumed utilisation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

from keras_vit.config import ViTConfig, canonical_name, pair

OPTIMIZERS = {"sgd": 0, "adamw": 1}  # float32 values a parameter, beside the momentum
BYTES = {"float32": 4, "bfloat16": 2, "mixed_bfloat16": 2}
PRECISIONS = ("float32", "mixed_bfloat16")
MOMENTA = ("float32", "bfloat16")
WIDE = 4  # bytes of weights, gradients and statistics, whatever the precision

# Tensors as wide as the MLP that are kept for the gradient: what enters the activation, what leaves it, and between.
KEPT_BY_ACTIVATION = {"gelu_tanh": 5, "gelu_erf": 5, "gelu_quick": 3, "silu": 2, "relu": 1, "tanh": 1, "linear": 1}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training run's needs. All bytes are of one device.

    Attributes:
        name: of the model.
        image_size: (height, width).
        batch_size: images a step, on all devices together.
        devices: how many.
        micro_batch: images that a device has in work at once.
        setting: what was asked, in words.
        parameters: exact.
        forward_flops: of one image, a multiply-add counted as two.
        step_flops: of a whole training step: the backward pass is twice the forward pass.
        weights, gradients, optimizer, ema, casts: bytes; casts are the weights in bfloat16.
        activations: bytes kept from the forward to the backward pass of one micro-batch.
        working: bytes that come and go in the backward pass of one block.
        images: bytes of the device's batch.
        step_seconds: None where no peak was given.
        rate: in words, what `step_seconds` assumes.
    """

    name: str
    image_size: tuple[int, int]
    batch_size: int
    devices: int
    micro_batch: int
    setting: str
    parameters: int
    forward_flops: int
    step_flops: int
    weights: int
    gradients: int
    optimizer: int
    ema: int
    casts: int
    activations: int
    working: int
    images: int
    step_seconds: float | None
    rate: str

    @property
    def total(self) -> int:
        """Bytes a device needs, as if everything were needed at once."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def images_per_second(self) -> float | None:
        """On all devices together, where a peak was given."""
        return None if self.step_seconds is None else self.batch_size / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, the derived ones too."""
        derived = {"total": self.total, "images_per_second": self.images_per_second}
        return {**dataclasses.asdict(self), **derived}

    def __str__(self) -> str:
        height, width = self.image_size
        lines = [f"{self.name} at {height}x{width}, batch {self.batch_size:,} on {self.setting}"]
        lines.append(_line("parameters", f"{self.parameters:,}", "exact"))
        lines.append(_line("one image, forward", f"{self.forward_flops / 1e9:,.2f} GFLOP", "matrix products alone"))
        lines.append(_line("one step", f"{self.step_flops / 1e12:,.2f} TFLOP", "all devices"))
        lines.append(f"memory of one device, {self.micro_batch:,} images at once (estimate):")
        needed = {what: getattr(self, part) for part, what in PARTS.items()}
        lines += [_line(f"  {what}", _readable(size), "") for what, size in needed.items() if size]
        lines.append(_line("  together", _readable(self.total), "without the program itself"))
        if self.step_seconds is None:
            lines.append("time: not estimated without a device's peak (peak_tflops)")
        else:
            lines.append(_line("one step", f"{self.step_seconds:,.3f} s", f"estimate: {self.rate}"))
            lines.append(_line("speed", f"{self.images_per_second:,.0f} images/s", "estimate, if the data keep up"))
        return "\n".join(lines)


PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "ema": "moving average",
    "casts": "weights in bfloat16",
    "activations": "activations",
    "working": "one block's gradient",
    "images": "images",
}


def plan(
    model: str | ViTConfig,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    batch_size: int,
    devices: int = 1,
    accumulation: int = 1,
    optimizer: str = "adamw",
    momentum_dtype: str = "float32",
    precision: str = "float32",
    remat: bool = False,
    ema: bool = False,
    peak_tflops: float | None = None,
    utilization: float = 0.4,
) -> Plan:
    """Estimates what a training run takes. Nothing is built, and neither TensorFlow nor Keras is imported.

    Args:
        model: an architecture's name, such as "ViT-L/16" or "R50+ViT-B/16", or a config.
        image_size: int or (height, width); None is the config's, 224 for a name.
        num_classes: None is the config's, 1000 for a name.
        batch_size: images a step, on all devices together.
        devices: replicas, each with all weights.
        accumulation: micro-batches a step.
        optimizer: "adamw" or "sgd" (with momentum).
        momentum_dtype: of the momentum, "float32" or "bfloat16".
        precision: "float32" or "mixed_bfloat16".
        remat: whether blocks are computed again for their gradient.
        ema: whether a moving average of the weights is kept.
        peak_tflops: of one device at this precision, in 1e12 multiply-adds times two a second, as its maker says it.
        utilization: share of the peak that training reaches, in (0, 1]. 0.4 is ordinary on a large accelerator.

    Raises:
        ValueError: for an unknown name or choice, or a batch that devices and micro-batches do not divide.
    """
    config = model if isinstance(model, ViTConfig) else ViTConfig.from_name(model)
    changes = {"image_size": image_size, "num_classes": num_classes}
    config = config.replace(**{field: value for field, value in changes.items() if value is not None})
    _check(locals())
    parameters, micro_batch = count_parameters(config), batch_size // (devices * accumulation)
    flops, block_flops = _flops(config)
    step_flops = batch_size * (3 * flops + (block_flops if remat else 0))
    kept, working = _activations(config, BYTES[precision], remat=remat)
    seconds = None if peak_tflops is None else step_flops / (devices * peak_tflops * 1e12 * utilization)
    words = [f"{devices} device{'s' * (devices > 1)}", f"{accumulation} micro-batches" if accumulation > 1 else ""]
    words += [optimizer, precision, "blocks computed again" if remat else "", "moving average" if ema else ""]
    height, width = pair(config.image_size, "image_size")
    return Plan(
        name=canonical_name(model) if isinstance(model, str) else "ViT",
        image_size=(height, width),
        batch_size=batch_size,
        devices=devices,
        micro_batch=micro_batch,
        setting=", ".join(filter(None, words)),
        parameters=parameters,
        forward_flops=flops,
        step_flops=step_flops,
        weights=WIDE * parameters,
        # Those of the micro-batch are added to their sum, so both are there.
        gradients=WIDE * parameters * (2 if accumulation > 1 else 1),
        optimizer=parameters * (BYTES[momentum_dtype] + WIDE * OPTIMIZERS[optimizer]),
        ema=WIDE * parameters if ema else 0,
        casts=0 if precision == "float32" else BYTES[precision] * parameters,
        activations=micro_batch * kept,
        working=micro_batch * working,
        images=batch_size // devices * height * width * config.num_channels * WIDE,
        step_seconds=seconds,
        rate=f"{utilization:.0%} of {peak_tflops} TFLOP/s",
    )


class _Convolution(NamedTuple):
    """A convolution of the stem and the norm behind it."""

    kernel: int
    inputs: int
    outputs: int
    positions: int
    relu: bool = True


def _stem(config: ViTConfig) -> Iterator[_Convolution]:
    """The convolutions of a hybrid's ResNet, in order (keras_vit/layers/resnet.py); none for a pure ViT."""
    if config.resnet is None:
        return
    height, width = (ceil(side / 2) for side in pair(config.image_size, "image_size"))
    yield _Convolution(7, config.num_channels, config.resnet.width, height * width)
    height, width, inputs = ceil(height / 2), ceil(width / 2), config.resnet.width
    for stage, units in enumerate(config.resnet.num_layers):
        narrow = config.resnet.width * 2**stage
        for unit in range(units):
            before, strides = height * width, 2 if stage and not unit else 1
            height, width = ceil(height / strides), ceil(width / strides)
            yield _Convolution(1, inputs, narrow, before)
            yield _Convolution(3, narrow, narrow, height * width)
            yield _Convolution(1, narrow, 4 * narrow, height * width)  # its ReLU follows the sum
            if inputs != 4 * narrow or strides > 1:
                yield _Convolution(1, inputs, 4 * narrow, height * width, relu=False)
            inputs = 4 * narrow


def _patch_inputs(config: ViTConfig) -> int:
    """Values in one patch."""
    channels = list(_stem(config))[-1].outputs if config.resnet else config.num_channels
    return prod(pair(config.patch_size, "patch_size")) * channels


def count_parameters(config: ViTConfig) -> int:
    """How many numbers are trained or, if frozen, loaded: what `model.count_params()` says of the built model."""
    width, mlp = config.hidden_size, config.mlp_dim
    attention, perceptron, norm = 4 * width * (width + 1), 2 * width * mlp + mlp + width, 2 * width
    block = attention + perceptron + 2 * norm
    block -= 0 if config.qkv_bias else 3 * width
    block += 0 if config.layer_scale is None else 2 * width
    total = sum(conv.kernel**2 * conv.inputs * conv.outputs + 2 * conv.outputs for conv in _stem(config))
    total += (_patch_inputs(config) + config.patch_bias) * width + config.num_prefix_tokens * width
    total += _position_parameters(config)
    total += norm * config.pre_norm + config.num_layers * block + norm  # the last is the final norm
    if config.classifier == "map":
        total += width + attention + norm + perceptron  # its probe first
    features = config.representation_size or width
    total += (width + 1) * features if config.representation_size else 0
    return total + (features + 1) * config.num_classes * (2 if config.distilled else 1)


def _position_parameters(config: ViTConfig) -> int:
    prefix, (height, width) = config.position_prefix_tokens, config.grid
    rows = {
        "learned": prefix + height * width,
        "learned2d": (2 * prefix + height + width) / 2,  # two tables of half the width
        "relative": 2 * config.num_tokens - 1,
    }
    tables = config.num_layers if config.position_place == "blocks" else 1
    return int(rows.get(config.position, 0) * config.hidden_size * tables)


def _flops(config: ViTConfig) -> tuple[int, int]:
    """Of one image forward: in all, and in the blocks, a multiply-add counted as two."""
    width, mlp, tokens, patches = config.hidden_size, config.mlp_dim, config.num_tokens, prod(config.grid)
    # The four projections and the MLP at every token; scores and weighted sums of every pair.
    pairs = 4 if config.position == "relative" else 2  # a query meets 2 * tokens embeddings of offsets
    blocks = config.num_layers * (tokens * (4 * width**2 + 2 * width * mlp) + pairs * tokens**2 * width)
    total = blocks + patches * _patch_inputs(config) * width
    total += sum(conv.kernel**2 * conv.inputs * conv.outputs * conv.positions for conv in _stem(config))
    if config.classifier == "map":  # keys and values of every patch, the rest at the probe
        total += 2 * patches * width**2 + 2 * width**2 + 2 * patches * width + 2 * width * mlp
    heads = tokens if config.classifier.endswith("unpooled") else 2 if config.distilled else 1
    features = config.representation_size or width
    total += heads * ((width * features if config.representation_size else 0) + features * config.num_classes)
    return 2 * total, 2 * blocks


def _activations(config: ViTConfig, size: int, *, remat: bool) -> tuple[int, int]:
    """Bytes an image that wait for the backward pass, and bytes that one block's backward pass takes on top.

    Args:
        config: of the model.
        size: bytes of a value.
        remat: with it a block keeps its input, and has the rest while it is computed again.
    """
    tokens = config.num_tokens * config.hidden_size
    block = _kept_by_block(config, size)
    # The gradient that comes, the one that goes, and one between, of the block's widest tensor.
    working = 3 * size * max(config.num_tokens * config.mlp_dim, config.num_heads * config.num_tokens**2)
    around = _kept_by_stem(config, size) + _kept_by_pool(config, size)
    around += 2 * tokens * WIDE if config.pre_norm else 0  # what leaves it is the first block's input
    around += tokens if config.dropout_rate else 0
    if remat:
        return around + config.num_layers * tokens * size + block, working
    return around + config.num_layers * block, working


def _kept_by_block(config: ViTConfig, size: int) -> int:
    """Bytes an image that an encoder block keeps for its gradient."""
    tokens = config.num_tokens * config.hidden_size
    mlp = config.num_tokens * config.mlp_dim
    pairs = config.num_heads * config.num_tokens**2
    # Each norm: its input and that times 1 / deviation, in float32; what leaves it enters the projections.
    kept = 2 * tokens * (2 * WIDE + size)
    kept += 4 * tokens * size  # query, key, value, and what the heads give
    kept += pairs * size + KEPT_BY_ACTIVATION[config.activation] * mlp * size
    if config.layer_scale is not None:
        kept += 2 * tokens * size
    if config.dropout_rate:  # which were kept, a byte each
        kept += 2 * tokens + mlp
    if config.attention_dropout_rate:
        kept += pairs * (1 + size)
    return kept


def _kept_by_pool(config: ViTConfig, size: int) -> int:
    """Bytes an image, of what is as long as the sequence, that the final norm and the pooling keep."""
    tokens = config.num_tokens * config.hidden_size
    kept = 2 * tokens * WIDE if config.final_norm == "tokens" else 0
    if config.classifier == "map":  # what enters keys and values, and what leaves
        kept += 3 * tokens * size
    return kept + (tokens * size if config.classifier.endswith("unpooled") else 0)


def _kept_by_stem(config: ViTConfig, size: int) -> int:
    """Bytes an image: behind every convolution the centred map, in float32, and what leaves the ReLU."""
    kept = sum(conv.outputs * conv.positions * (WIDE + size * conv.relu) for conv in _stem(config))
    if config.resnet:  # what leaves the maximum
        kept += config.resnet.width * prod(-(-side // 4) for side in pair(config.image_size, "image_size")) * size
    return kept + (0 if size == WIDE else size * config.num_channels * prod(pair(config.image_size, "image_size")))


def _check(asked: dict[str, Any]) -> None:
    choices = {"optimizer": tuple(OPTIMIZERS), "precision": PRECISIONS, "momentum_dtype": MOMENTA}
    for name, known in choices.items():
        if asked[name] not in known:
            raise ValueError(f"{name} is one of {list(known)}. Received: {asked[name]!r}")
    for name in ("batch_size", "devices", "accumulation"):
        value = asked[name]
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ValueError(f"{name} is a whole number from 1. Received: {value!r}")
    batch, parts = asked["batch_size"], asked["devices"] * asked["accumulation"]
    if batch % parts:
        near = [size for size in (batch // parts * parts, ceil(batch / parts) * parts) if size]
        raise ValueError(
            f"batch_size is a multiple of devices x accumulation = {parts}; the nearest are {near}. Received: {batch}"
        )
    if not 0 < asked["utilization"] <= 1 or (asked["peak_tflops"] is not None and not asked["peak_tflops"] > 0):
        received = f"{asked['utilization']} and {asked['peak_tflops']}"
        raise ValueError(f"utilization lies in (0, 1] and peak_tflops above 0. Received: {received}")


def _line(what: str, value: str, remark: str) -> str:
    return f"{what:24}{value:>20}  {remark}".rstrip()


def _readable(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
