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
from typing import Any

from keras_vit._util import html_table
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import block_flops, convolutions, count_parameters, forward_flops
from keras_vit.model.sizes import canonical_name

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
        return "\n".join(
            [self._title(), *(f"{what:24}{value:>20}  {note}".rstrip() for what, value, note in self._rows())]
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_table.table((self._title(), "", ""), self._rows())

    def _title(self) -> str:
        height, width = self.image_size
        return f"{self.name} at {height}x{width}, batch {self.batch_size:,} on {self.setting}"

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """What, how much, and a remark."""
        yield "parameters", f"{self.parameters:,}", "exact"
        yield "one image, forward", f"{self.forward_flops / 1e9:,.2f} GFLOP", "matrix products alone"
        yield "one step", f"{self.step_flops / 1e12:,.2f} TFLOP", "all devices"
        yield f"memory of one device, {self.micro_batch:,} images at once (estimate):", "", ""
        for part, what in PARTS.items():
            if getattr(self, part):
                yield f"  {what}", _readable(getattr(self, part)), ""
        yield "  together", _readable(self.total), "without the program itself"
        if self.step_seconds is None:
            yield "time: not estimated without a device's peak (peak_tflops)", "", ""
        else:
            yield "one step", f"{self.step_seconds:,.3f} s", f"estimate: {self.rate}"
            yield "speed", f"{self.images_per_second:,.0f} images/s", "estimate, if the data keep up"


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
    flops = forward_flops(config)
    step_flops = batch_size * (3 * flops + (block_flops(config) if remat else 0))
    kept, working = _activations(config, BYTES[precision], remat=remat)
    seconds = None if peak_tflops is None else step_flops / (devices * peak_tflops * 1e12 * utilization)
    words = [f"{devices} device{'s' * (devices > 1)}", f"{accumulation} micro-batches" if accumulation > 1 else ""]
    words += [optimizer, precision, "blocks computed again" if remat else "", "moving average" if ema else ""]
    height, width = config.size
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
    if config.has_map_head:  # what enters keys and values, and what leaves
        kept += 3 * tokens * size
    return kept + (tokens * size if config.is_unpooled else 0)


def _kept_by_stem(config: ViTConfig, size: int) -> int:
    """Bytes an image: behind every convolution the centred map, in float32, and what leaves the ReLU."""
    kept = sum(conv.output_values * (WIDE + size * conv.relu) for conv in convolutions(config))
    if config.resnet:  # what leaves the maximum
        kept += config.resnet.width * prod(-(-side // 4) for side in config.size) * size
    return kept + (0 if size == WIDE else size * config.num_channels * prod(config.size))


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


def _readable(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
