"""Plan the memory and the accumulation of a training step.

Parameters are exact. Arithmetic is that of matrix products and convolutions. Memory is an estimate: every layer says
which tensors TensorFlow's gradients keep of it for the backward pass (XLA keeps fewer). Time follows from the
arithmetic and an assumed utilization.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2, prod
from pathlib import Path
from typing import Any

from keras_vit._util.checks import check_counts, given
from keras_vit._util.text import byte_size, warn
from keras_vit.model.config import ViTConfig, canonical_name
from keras_vit.model.cost import Cost, count, layer_costs, symbolic_model
from keras_vit.model.layers import EncoderBlock
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
        weights, gradients, optimizer, ema, casts: bytes; casts are the weights in bfloat16.
        activations: bytes saved from the forward to the backward pass of one micro-batch.
        working: bytes of temporary tensors in the backward pass of one block.
        images: bytes of the device's batch.
        teacher: bytes of a teacher's weights, and of the tensors of one of its blocks; 0 without a teacher.
        step_seconds: None without a device's peak.
        rate: assumption behind `step_seconds`, in words.

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
    step_seconds: float | None
    rate: str

    @property
    def total(self) -> int:
        """Bytes that a device needs, as if all parts were needed at the same time."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def images_per_second(self) -> float | None:
        """Images per second on all devices together; None without a device's peak."""
        return None if self.step_seconds is None else self.batch_size / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Convert the attributes, `total` and `images_per_second` to a dictionary that JSON can hold."""
        derived = {"total": self.total, "images_per_second": self.images_per_second}
        return {**dataclasses.asdict(self), **derived}

    def __str__(self) -> str:
        height, width = self.image_size
        title = f"{self.name} at {height}x{width}, batch {self.batch_size:,} on {self.setting}"
        rows = (f"{label:24}{value:>20}  {note}".rstrip() for label, value, note in self._rows())
        return "\n".join([title, *rows])

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield (label, value, note)."""
        yield "parameters", f"{self.parameters:,}", "exact"
        yield "one image, forward", f"{self.forward_flops / 1e9:,.2f} GFLOP", "matrix products only"
        yield "one step", f"{self.step_flops / 1e12:,.2f} TFLOP", "all devices"
        yield f"memory of one device, {self.micro_batch:,} images at once (estimate):", "", ""
        for part, label in PARTS.items():
            if getattr(self, part):
                yield f"  {label}", byte_size(getattr(self, part)), ""
        yield "  total", byte_size(self.total), "without the program itself"
        if self.step_seconds is None:
            yield "time: not estimated without the peak of a device (peak_tflops)", "", ""
        else:
            yield "one step", f"{self.step_seconds:,.3f} s", f"estimate: {self.rate}"
            yield "speed", f"{self.images_per_second:,.0f} images/s", "estimate, if the data keep up"


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
    peak_tflops: float | None = None,
    utilization: float = 0.4,
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
        peak_tflops: peak of one device at this precision, as its maker states it; a multiply-add counts as two.
        utilization: share of the peak that training reaches, in (0, 1]. 0.4 is usual on a large accelerator.

    Returns:
        The estimate; `print` shows it as a table.

    Raises:
        ValueError: unknown name or option, or a batch size that is not a multiple of devices x accumulation.

    Example:
        >>> estimate = keras_vit.train.plan("ViT-L/16", batch_size=512, devices=8, peak_tflops=197)
        >>> estimate.parameters, f"{estimate.total / 2**30:.0f} GiB"
        (304326632, '45 GiB')
    """
    config = model if isinstance(model, ViTConfig) else ViTConfig.from_name(model)
    config = config.replace(**given(image_size=image_size, num_classes=num_classes))
    check_counts(devices=devices, accumulation=accumulation)
    if not 0 < utilization <= 1 or (peak_tflops is not None and not peak_tflops > 0):
        raise ValueError(
            f"utilization must be in (0, 1] and peak_tflops above 0. Received: {utilization} and {peak_tflops}"
        )
    if (rest := batch_size % (parts := devices * accumulation)) and batch_size > 0:
        multiples = [size for size in (batch_size - rest, batch_size - rest + parts) if size]
        raise ValueError(
            f"batch_size is a multiple of devices x accumulation = {parts}; the nearest are {multiples}."
            f" Received: {batch_size}"
        )
    fields: dict[str, Any] = {"momentum_dtype": momentum_dtype, "precision": precision, "remat": remat}
    fields |= {"train_only": tuple(train_only), "lora_rank": int("lora" in train_only)}
    fields |= {"ema_decay": 0.5 if ema else None, "optimizer": optimizer, "learning_rate": 1.0}
    recipe = Recipe(name="plan", steps=1, batch_size=batch_size, accumulation=accumulation, **fields)
    if unused := [word for word, paths in _matches(recipe, config).items() if not paths and word != "lora"]:
        raise ValueError(f"train_only matches no variable with {unused}. Received: {list(train_only)}")
    if teacher is not None and not isinstance(teacher, ViTConfig):
        teacher = ViTConfig.from_name(teacher)
    planned = plan_step(recipe, config, teacher, replicas=devices)
    return dataclasses.replace(
        planned,
        name=canonical_name(model) if isinstance(model, str) else "ViT",
        step_seconds=planned.step_flops / (devices * peak_tflops * 1e12 * utilization) if peak_tflops else None,
        rate=f"{utilization:.0%} of {peak_tflops} TFLOP/s",
    )


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
    saved, working = _activations(config, value_bytes, remat=remat, keeps_inputs=trains_kernels or "lora" in words)
    cast_bytes = 0 if recipe.precision == "float32" else value_bytes
    size, teacher_bytes = config.size, 0
    if teacher is not None:
        size = max(size[0], teacher.size[0]), max(size[1], teacher.size[1])
        teacher_bytes = count(teacher).parameters * (FLOAT32 + cast_bytes)
        teacher_bytes += micro_batch * _activations(teacher, value_bytes, remat=True, keeps_inputs=True)[1]
        step_flops += recipe.batch_size * count(teacher).flops
    setting = {  # words, and whether they apply
        f"{replicas} device{'s' * (replicas > 1)}": True,
        f"{number} micro-batches": number > 1,
        recipe.optimizer: True,
        recipe.precision: True,
        "a teacher": teacher is not None,
        f"{trained:,} trained": trained < counted.parameters,
        "blocks recomputed": remat,
        "moving average": recipe.ema_decay is not None,
    }
    return Plan(
        name="ViT",
        image_size=config.size,
        batch_size=recipe.batch_size,
        devices=replicas,
        micro_batch=micro_batch,
        setting=", ".join(word for word, applies in setting.items() if applies),
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
        step_seconds=None,
        rate="",
    )


@functools.lru_cache(maxsize=64)
def _sizes(config: ViTConfig) -> dict[str, int]:
    """Number of values of every variable of a config's model."""
    return {weight.path: prod(weight.shape) for weight in symbolic_model(config).weights}


def _matches(recipe: Recipe, config: ViTConfig) -> dict[str, set[str]]:
    """Paths of a config's variables that each word of train_only stands for."""
    sizes, words = _sizes(config), recipe.trained_patterns.items()
    return {word: {path for one in patterns for path in fnmatch.filter(sizes, one)} for word, patterns in words}


@functools.lru_cache(maxsize=64)
def _activations(config: ViTConfig, value_bytes: int, *, remat: bool, keeps_inputs: bool) -> tuple[int, int]:
    """Count the bytes per image saved for the backward pass, and those that a block's backward pass adds.

    A value of the compute dtype has `value_bytes`. With remat a block saves its input only, and everything else while
    it is recomputed. `keeps_inputs`: whether the inputs of kernels are saved for their gradients.
    """
    model = symbolic_model(config)
    # With dropout the last block computes all tokens, so that the masks of a seed do not depend on the head.
    has_masks = config.dropout_rate or config.attention_dropout_rate
    block_input = value_bytes * config.num_tokens * config.hidden_size
    blocks = [cost for layer, cost in layer_costs(model) if isinstance(layer, EncoderBlock)]
    kept_bytes = functools.partial(Cost.kept_bytes, value_bytes=value_bytes, trains_kernels=keeps_inputs)
    saved = max((kept_bytes(cost) for cost in blocks), default=0) if remat else 0
    for layer, cost in layer_costs(model, only_final_tokens=not has_masks):
        is_recomputed = remat and isinstance(layer, EncoderBlock)
        saved += block_input if is_recomputed else kept_bytes(cost)
    if value_bytes != FLOAT32:
        saved += value_bytes * config.num_channels * prod(config.size)  # the image in the compute dtype
    # Incoming gradient, outgoing gradient and one between, of the widest tensor of a block, or of a BiT's units.
    widest = max(cost.widest for cost in blocks or [cost for _, cost in layer_costs(model)])
    return saved, 3 * value_bytes * widest


MEMORY_VARIABLE = "KERAS_VIT_MEMORY"  # GiB of one device that training may use, in place of the measured memory
# Plans are estimates, so a number that is chosen leaves room, and one that is stated may be somewhat too large.
CHOSEN_SHARE = 0.75  # of the memory, for a number that is chosen here
WAITING_BATCHES = 4  # that the input pipeline prepares meanwhile
UNPLANNED_BYTES = 2**30  # of a CPU's memory, for compilers and a second copy of the weights in the first step
REFUSED_SHARE = 1.35  # a stated number is refused above it
EVALUATION_BATCH = 64
CPU_STEP_FLOPS, LEAST_BATCH = 1e12, 16  # of a step of distillation that is chosen for a CPU: up to ten seconds
_LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # cgroup 2 and 1


def _may_need_less(recipe: Recipe) -> bool:
    """Whether a recipe freezes more than heads, which the plan does not count."""
    return any(pattern.split("/")[0] not in HEADS for pattern in recipe.freeze)


def fewest_micro_batches(
    recipe: Recipe, config: ViTConfig, teacher: ViTConfig | None = None, *, replicas: int, memory: int | None
) -> int:
    """Find the fewest micro-batches that fit into `memory` bytes of a device (None: no limit), or raise."""
    images = recipe.batch_size // replicas
    numbers = [n for n in range(1, images + 1) if images % n == 0]
    for waiting in (WAITING_BATCHES, 0):  # if there is little memory, few batches will wait
        for number in numbers:
            planned = plan_step(recipe.replace(accumulation=number), config, teacher, replicas=replicas)
            if memory is None or planned.total + waiting * planned.images <= CHOSEN_SHARE * memory:
                return number
    if _may_need_less(recipe):
        return images
    raise ValueError(_too_large(planned, memory or 0, "Even one image at once"))


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


def check_memory(recipe: Recipe, planned: Plan, *, memory: int | None) -> None:
    """Raise a ValueError if a step certainly needs more memory than there is; warn if it may."""
    if memory is not None and planned.total > memory:
        batch = f"A batch of {planned.batch_size:,} with accumulation={recipe.accumulation}"
        message = _too_large(planned, memory, batch)
        if planned.total > REFUSED_SHARE * memory and not _may_need_less(recipe):
            raise ValueError(message)
        warn(f"keras_vit: {message}")


def evaluation_batch(recipe: Recipe, config: ViTConfig, *, replicas: int) -> int:
    """Number of images per call of an evaluation, which then needs no more memory than the training step."""
    planned = plan_step(recipe, config, replicas=replicas)
    images = planned.micro_batch * (planned.activations + planned.working) // planned.working
    return max(1, min(EVALUATION_BATCH, images))


def device_memory(replicas_here: int) -> int | None:
    """Memory in bytes of one device: the smallest GPU, or this machine divided by its replicas.

    The environment variable KERAS_VIT_MEMORY states them in GiB. None if they cannot be read (a TPU, Windows).
    """
    if stated := os.environ.get(MEMORY_VARIABLE):
        if not re.fullmatch(r"\d+(\.\d+)?", stated) or not float(stated):
            raise ValueError(f"{MEMORY_VARIABLE} is a number of GiB above 0, such as 12. Received: {stated!r:.200}")
        return int(float(stated) * 2**30)
    import tensorflow as tf

    if tf.config.list_logical_devices("TPU"):
        return None
    if tf.config.list_logical_devices("GPU"):
        from tensorflow.python.client import device_lib  # no public function returns the size of the pool

        return min(device.memory_limit for device in device_lib.list_local_devices() if device.device_type == "GPU")
    free = free_memory()
    return None if free is None else max(0, free - UNPLANNED_BYTES) // replicas_here


def free_memory(root: Path = Path("/")) -> int | None:
    """Memory in bytes that this process can still use on its machine and in its container, or None."""
    try:
        available = re.search(r"^MemAvailable:\s*(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        groups = [line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    free = [int(available[1]) * 1024] if available else []
    for top, path in ((root / "sys/fs/cgroup" / kind, path) for kind, path in groups if kind in ("", "memory")):
        folder = top / path.lstrip("/")
        free += [
            memory
            for group in (folder, *folder.parents)
            if group.is_relative_to(top) and (memory := _free_in_group(group)) is not None
        ]
    return min(free, default=None)


def _free_in_group(group: Path) -> int | None:
    """Memory that a control group leaves, if it has a limit; the page cache can be taken back and does not count."""
    for limit, usage in _LIMIT_FILES:
        with contextlib.suppress(OSError):
            most, used, stat = ((group / name).read_text() for name in (limit, usage, "memory.stat"))
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
            if most.strip() != "max":
                return max(0, int(most) - int(used) + int(cache[1] if cache else 0))
    return None


def _too_large(planned: Plan, memory: int, batch: str) -> str:
    height, width = planned.image_size
    return (
        f"{batch} of {height}x{width} pixels needs about {byte_size(planned.total)} of memory by plan, and there are "
        f"{byte_size(memory)}. Set accumulation='auto', remat=true, precision=mixed_bfloat16, a smaller batch_size, "
        f"image_size or model; or set {MEMORY_VARIABLE} to the GiB that training may use"
    )
