"""Choose micro-batches that fit into the memory of a device, by the plan of a step."""

import contextlib
import os
import re
from pathlib import Path

from keras_vit._util.text import byte_size, warn
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import HEADS
from keras_vit.train._recipe import Recipe
from keras_vit.train.planner import Plan, plan_step

MEMORY_VARIABLE = "KERAS_VIT_MEMORY"  # GiB of one device that training may use, in place of the measured memory
UNPLANNED_BYTES = 2**30  # of a CPU's memory, for compilers and a second copy of the weights in the first step
_LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # cgroup 2 and 1
# Plans are estimates, so a number that is chosen leaves room, and one that is stated may be somewhat too large.
CHOSEN_SHARE = 0.75  # of the memory, for a number that is chosen here
WAITING_BATCHES = 4  # that the input pipeline prepares meanwhile
REFUSED_SHARE = 1.35  # a stated number is refused above it
EVALUATION_BATCH = 64


def fewest_micro_batches(
    recipe: Recipe, config: ViTConfig, teacher: ViTConfig | None = None, *, replicas: int, memory: int | None
) -> int:
    """Find the fewest micro-batches that fit into `memory` bytes of a device (None: no limit), or raise."""
    images = recipe.batch_size // replicas
    numbers = [n for n in range(1, images + 1) if images % n == 0]
    # If there is little memory, few batches will wait.
    for waiting, tried in ((WAITING_BATCHES, numbers[:-1]), (0, numbers)):
        for number in tried:
            planned = plan_step(recipe.replace(accumulation=number), config, teacher, replicas=replicas)
            if memory is None or planned.total + waiting * planned.images <= CHOSEN_SHARE * memory:
                return number
    if _may_need_less(recipe):
        return images
    raise ValueError(_too_large(planned, memory or 0, "Even one image at once"))


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


def _may_need_less(recipe: Recipe) -> bool:
    """Whether a recipe freezes more than heads, which the plan does not count."""
    return any(pattern.split("/")[0] not in HEADS for pattern in recipe.freeze)


def _too_large(planned: Plan, memory: int, batch: str) -> str:
    height, width = planned.image_size
    return (
        f"{batch} of {height}x{width} pixels needs about {byte_size(planned.total)} of memory by plan, and there are "
        f"{byte_size(memory)}. Set accumulation='auto', remat=true, precision=mixed_bfloat16, a smaller batch_size, "
        f"image_size or model; or set {MEMORY_VARIABLE} to the GiB that training may use"
    )
