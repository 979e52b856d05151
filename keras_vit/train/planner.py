"""Plan the memory and the accumulation of a training step.

Parameters are exact. Arithmetic is that of matrix products and convolutions. Memory is an estimate by a formula, within
40 % of what steps used (benchmarks/results/plan_check.txt).
"""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import Any, Literal

from keras_vit._util.checks import check_counts, given
from keras_vit._util.text import byte_size
from keras_vit.model.architectures import canonical_name
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import activation_tensors, count, symbolic_model
from keras_vit.model.layers import ResNetRoot, ResNetUnit
from keras_vit.model.vision_transformer import HEADS
from keras_vit.train._recipe import SLOTS, Recipe

BYTES = {"float32": 4, "bfloat16": 2, "mixed_bfloat16": 2}
FLOAT32 = 4  # bytes per value of weights, gradients and statistics, at every precision

# Attribute of Plan: its name in the printed table.
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "ema": "moving average",
    "casts": "weights in bfloat16",
    "activations": "activations",
    "working": "gradient of one block",
    "images": "images",
    "teacher": "teacher",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The requirements of a training run, as `plan` estimates them. Bytes are those of one device.

    Attributes:
        name: name of the model.
        image_size: (height, width) in pixels.
        batch_size: images per step on all devices together.
        devices: number of devices.
        micro_batch: images that one device processes at once.
        setting: devices, optimizer, precision and options, in words.
        parameters: exact number.
        forward_flops: operations for one image; a multiply-add counts as two.
        step_flops: operations of a training step; the backward pass costs twice the forward pass.
        weights, gradients, optimizer, ema, casts, images: bytes; casts are the weights in bfloat16.
        activations: bytes saved from the forward to the backward pass of one micro-batch.
        working: bytes of temporary tensors in the backward pass of one block.
        teacher: bytes of a teacher's weights, and of the tensors of one of its blocks; 0 without a teacher.

    Example:
        >>> keras_vit.train.plan("B/16", batch_size=256, devices=4).to_dict()["micro_batch"]
        64
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
    teacher: int

    @property
    def total(self) -> int:
        """Bytes that a device needs, as if all parts were needed at the same time."""
        return sum(getattr(self, part) for part in PARTS)

    def to_dict(self) -> dict[str, Any]:
        """Convert the attributes and `total` to a dictionary that JSON can hold."""
        return dataclasses.asdict(self) | {"total": self.total}

    def __str__(self) -> str:
        parts = {label: getattr(self, part) for part, label in PARTS.items()}
        rows = [
            ("parameters", f"{self.parameters:,}", "exact"),
            ("one image, forward", f"{self.forward_flops / 1e9:,.2f} GFLOP", "matrix products only"),
            ("one step", f"{self.step_flops / 1e12:,.2f} TFLOP", "all devices"),
            (f"memory of one device, {self.micro_batch:,} images at once (estimate):", "", ""),
            *((f"  {label}", byte_size(size), "") for label, size in parts.items() if size),
            ("  total", byte_size(self.total), "without the program itself"),
        ]
        height, width = self.image_size
        title = f"{self.name} at {height}x{width}, batch {self.batch_size:,} on {self.setting}"
        return "\n".join([title, *(f"{label:24}{value:>20}  {note}".rstrip() for label, value, note in rows)])


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
    teacher: str | ViTConfig | None = None,
    train_only: Sequence[str] = (),
    xla: bool | Literal["auto"] = "auto",
) -> Plan:
    """Estimate the requirements of a training run. The model is built without values; no memory is taken for weights.

    Args:
        model: name of an architecture, such as "ViT-L/16" or "R50+ViT-B/16", or a config.
        image_size: int or (height, width) in pixels; None takes the config's, 224 for a name.
        num_classes: None takes the config's, 1000 for a name.
        batch_size: images per step on all devices together.
        devices: number of replicas, each with all weights.
        accumulation: number of micro-batches per step.
        optimizer: one that a recipe may name, but not "least_squares".
        momentum_dtype: "float32" or "bfloat16".
        precision: "float32" or "mixed_bfloat16".
        remat: whether the backward pass recomputes the blocks instead of storing their activations.
        ema: whether a moving average of the weights is stored.
        teacher: name or config of a model that this one learns from. It computes every image, without a gradient.
        train_only: as a recipe's: what is trained beside the head; empty for everything. LoRA's own matrices, with
            rank 8 less than a hundredth of the weights, are not counted.
        xla: as a recipe's. False needs more memory: XLA computes parts of the MLP again for the gradient.

    Returns:
        The estimate; `print` shows it as a table.

    Raises:
        ValueError: unknown name or option, or a batch size that is not a multiple of devices x accumulation.

    Example:
        >>> estimate = keras_vit.train.plan("ViT-L/16", batch_size=512, devices=8)
        >>> estimate.parameters, f"{estimate.total / 2**30:.0f} GiB"
        (304326632, '29 GiB')
    """
    config = model if isinstance(model, ViTConfig) else ViTConfig.from_name(model)
    config = config.replace(**given(image_size=image_size, num_classes=num_classes))
    check_counts(devices=devices, accumulation=accumulation)
    if (rest := batch_size % (parts := devices * accumulation)) and batch_size > 0:
        multiples = [size for size in (batch_size - rest, batch_size - rest + parts) if size]
        raise ValueError(
            f"batch_size is a multiple of devices x accumulation = {parts}; the nearest are {multiples}."
            f" Received: {batch_size}"
        )
    fields: dict[str, Any] = {"momentum_dtype": momentum_dtype, "precision": precision, "remat": remat, "xla": xla}
    fields |= {"train_only": tuple(train_only), "lora_rank": int("lora" in train_only)}
    fields |= {"ema_decay": 0.5 if ema else None, "optimizer": optimizer, "learning_rate": 1.0}
    recipe = Recipe(name="plan", steps=1, batch_size=batch_size, accumulation=accumulation, **fields)
    if unused := [word for word, paths in _matches(recipe, config).items() if not paths and word != "lora"]:
        raise ValueError(f"train_only matches no variable with {unused}. Received: {list(train_only)}")
    if teacher is not None and not isinstance(teacher, ViTConfig):
        teacher = ViTConfig.from_name(teacher)
    planned = plan_step(recipe, config, teacher, replicas=devices)
    return dataclasses.replace(planned, name=canonical_name(model) if isinstance(model, str) else "ViT")


def plan_step(recipe: Recipe, config: ViTConfig, teacher: ViTConfig | None = None, *, replicas: int) -> Plan:
    """Plan a recipe's training step; an upper bound if the recipe freezes variables."""
    counted, sizes, matches = count(config), _sizes(config), _matches(recipe, config)
    # Words that match nothing here may be of a head for maps, which is not part of the config.
    words = {word: paths for word, paths in matches.items() if paths or word == "lora"}
    paths = set().union(*words.values()) if words else set(sizes)
    trained = sum(size for path, size in sizes.items() if path in paths or path.split("/")[0] in HEADS)
    trains_kernels = any(re.match(r"block_\d+/.*kernel", path) for path in paths)
    remat = recipe.remat or recipe.linear_probe  # the gradient of the head needs no activations of blocks
    number, value_bytes = int(recipe.accumulation), BYTES[recipe.precision]
    micro_batch = recipe.batch_size // replicas // number
    # The backward pass of a trained kernel costs two forward passes, that of a frozen one the gradient of its input.
    passes = 3 if trains_kernels else 2
    step_flops = recipe.batch_size * (passes * counted.flops + (counted.block_flops if remat else 0))
    xla = recipe.xla is not False
    trains = {"trains_kernels": trains_kernels, "trains_scales": any("/scale" in path for path in paths)}
    saved, working = _activations(config, value_bytes, remat=remat, xla=xla, **trains)
    cast_bytes = 0 if recipe.precision == "float32" else value_bytes
    size, teacher_bytes = config.size, 0
    if teacher is not None:
        size = max(size[0], teacher.size[0]), max(size[1], teacher.size[1])
        teacher_bytes = count(teacher).parameters * (FLOAT32 + cast_bytes)
        teacher_bytes += micro_batch * _activations(teacher, value_bytes, remat=True, xla=xla)[1]
        step_flops += recipe.batch_size * count(teacher).flops
    setting = [f"{replicas} device{'s' * (replicas > 1)}", *[f"{number} micro-batches"] * (number > 1)]
    setting += [recipe.optimizer, recipe.precision, *["a teacher"] * (teacher is not None)]
    setting += [f"{trained:,} trained"] * (trained < counted.parameters)
    setting += ["blocks recomputed"] * remat + ["moving average"] * (recipe.ema_decay is not None)
    return Plan(
        name="ViT",
        image_size=config.size,
        batch_size=recipe.batch_size,
        devices=replicas,
        micro_batch=micro_batch,
        setting=", ".join(setting),
        parameters=counted.parameters,
        forward_flops=counted.flops,
        step_flops=step_flops,
        weights=FLOAT32 * counted.parameters,
        # With accumulation: those of one micro-batch and their sum.
        gradients=FLOAT32 * trained * (2 if number > 1 else 1),
        optimizer=trained * (BYTES[recipe.momentum_dtype] + FLOAT32 * (len(SLOTS[recipe.optimizer]) - 1)),
        ema=FLOAT32 * trained if recipe.ema_decay is not None else 0,
        casts=cast_bytes * counted.parameters,
        activations=micro_batch * saved,
        working=micro_batch * working,
        images=recipe.batch_size // replicas * prod(size) * config.num_channels * FLOAT32,
        teacher=teacher_bytes,
    )


@functools.lru_cache(maxsize=64)
def _sizes(config: ViTConfig) -> dict[str, int]:
    return {weight.path: prod(weight.shape) for weight in symbolic_model(config).weights}


def _matches(recipe: Recipe, config: ViTConfig) -> dict[str, set[str]]:
    """Paths of a config's variables that each word of train_only stands for."""
    words = recipe.trained_patterns.items()
    return {word: {path for one in ones for path in fnmatch.filter(_sizes(config), one)} for word, ones in words}


# Values that gradients keep, measured in TensorFlow's graphs (tests/train/test_planner.py) and as memory.
ATTENTION = 3  # for each value of the tokens: queries, keys and values; and the scores
NORM = 2  # for each value of the tokens, in float32
RESNET = 3.3  # for each value of a unit's output, in float32


@functools.lru_cache(maxsize=64)
def _activations(
    config: ViTConfig,
    value_bytes: int,
    *,
    remat: bool,
    xla: bool,
    trains_kernels: bool = True,
    trains_scales: bool = True,
) -> tuple[int, int]:
    """Estimate the bytes per image saved for the backward pass, and those that a block's backward pass adds.

    With remat a block saves its input only, and everything else while it is recomputed.
    """
    tokens, scores = config.num_tokens * config.hidden_size, config.num_heads * config.num_tokens**2
    hidden, mixed = config.num_tokens * config.mlp_dim, config.hidden_size * (config.tokens_mlp_dim or 0)
    mlp = 1 if xla else activation_tensors(config.activation).kept  # for each value of the hidden layer
    kept = (mlp + config.gated_mlp) * hidden + 2 * tokens * (trains_scales and config.layer_scale is not None)
    kept += mlp * mixed if mixed else ATTENTION * tokens + scores * (2 if config.attention_dropout_rate else 1)
    if trains_kernels:  # the input of each product
        kept += hidden + tokens + (mixed + tokens if mixed else 2 * tokens)
    block = value_bytes * kept + 2 * NORM * FLOAT32 * tokens
    layers = symbolic_model(config).layers
    maps = [prod(layer.output.shape[1:]) for layer in layers if isinstance(layer, ResNetRoot | ResNetUnit)]
    saved = config.num_layers * value_bytes * tokens + block if remat else config.num_layers * block
    saved += int(RESNET * FLOAT32 * sum(maps))
    if value_bytes != FLOAT32:
        saved += value_bytes * config.num_channels * prod(config.size)  # the image in the compute dtype
    # Incoming gradient, outgoing gradient and one between, of the widest tensor of a block, or of a BiT's units.
    widest = max(tokens, hidden, 0 if mixed else scores) if config.num_layers else max(maps)
    return saved, 3 * value_bytes * widest


CPU_STEP_FLOPS, LEAST_BATCH = 1e12, 16  # of a step of distillation that is chosen for a CPU: up to ten seconds


def power_of_two(most: float, unit: int) -> int:
    """Largest power of two times `unit` that is at most `most`, or `unit`."""
    return unit * 2 ** int(log2(max(most / unit, 1)))


def fit_work(recipe: Recipe, config: ViTConfig, teacher: ViTConfig, *, keeps_size: bool, unit: int) -> dict[str, Any]:
    """Choose the teacher's size and the batch of a distillation for a CPU; return the fields to change.

    The teacher sees about as many pixels as the model, in place of more, unless it `keeps_size`. The batch is `unit`
    times the largest power of two that is within CPU_STEP_FLOPS.
    """
    changes: dict[str, Any] = {}
    if not (keeps_size or recipe.is_stated("teacher_size")):
        units = [side // cells for side, cells in zip(teacher.size, teacher.grid, strict=True)]
        size = tuple(unit * max(1, round(side / unit)) for unit, side in zip(units, config.size, strict=True))
        if prod(size) < prod(teacher.size):
            changes["teacher_size"] = size[0] if size[0] == size[1] else size
    if not recipe.is_stated("batch_size"):
        teacher = teacher.replace(**given(image_size=changes.get("teacher_size", recipe.teacher_size)))
        one = plan_step(recipe.replace(batch_size=1, accumulation=1), config, teacher, replicas=1)
        batch = power_of_two(max(LEAST_BATCH, CPU_STEP_FLOPS / one.step_flops), unit)
        if batch < recipe.batch_size:
            changes["batch_size"] = batch
    return changes
