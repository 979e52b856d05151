"""Choose the number of micro-batches of a step by its plan and the memory of the devices, or refuse the step."""

import os
import re
import warnings
from pathlib import Path

from keras_vit._util.text import byte_size
from keras_vit.model.config import ViTConfig
from keras_vit.train._recipe import Recipe
from keras_vit.train.measure.planner import Plan, plan

VARIABLE = "KERAS_VIT_MEMORY"  # GiB of one device that training may use, in place of the measured memory
# Plans were up to 17 % below the memory that steps used, and up to 34 % above it (benchmarks/results/plan_check.txt).
CHOSEN_SHARE = 0.75  # of the memory, for a number that is chosen here
WAITING_BATCHES = 4  # that the input pipeline prepares meanwhile
OUTSIDE = 2**30  # bytes of a CPU's memory that a first step takes beside its plan: compilers, a second copy of weights
REFUSED_SHARE = 1.35  # a stated number is refused above it
EVALUATION_BATCH = 64
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # cgroup 2 and 1


def plan_step(recipe: Recipe, config: ViTConfig, teacher: ViTConfig | None = None, *, replicas: int) -> Plan:
    """Return the plan of a recipe's training step; an upper bound if the recipe freezes variables."""
    return plan(
        config,
        batch_size=recipe.batch_size,
        devices=replicas,
        accumulation=int(recipe.accumulation),
        optimizer=recipe.optimizer,
        momentum_dtype=recipe.momentum_dtype,
        precision=recipe.precision,
        remat=recipe.remat or recipe.linear_probe,  # the gradient of the head needs no activations of blocks
        ema=recipe.ema_decay is not None,
        teacher=teacher,
    )


def fewest_micro_batches(
    recipe: Recipe, config: ViTConfig, teacher: ViTConfig | None = None, *, replicas: int, memory: int | None
) -> int:
    """Return the fewest micro-batches that fit into `memory` bytes of a device (None: no limit), or raise."""
    images = recipe.batch_size // replicas
    numbers = [n for n in range(1, images + 1) if images % n == 0]
    for waiting in (WAITING_BATCHES, 0):  # if there is little memory, few batches will wait
        for number in numbers:
            planned = plan_step(recipe.replace(accumulation=number), config, teacher, replicas=replicas)
            if memory is None or planned.total + waiting * planned.images <= CHOSEN_SHARE * memory:
                return number
    if recipe.freeze:
        return images
    raise ValueError(_too_large(planned, memory or 0, "Even one image at once"))


def check_memory(recipe: Recipe, planned: Plan, *, memory: int | None) -> None:
    """Raise a ValueError if a step certainly needs more memory than there is; warn if it may."""
    if memory is not None and planned.total > memory:
        what = f"A batch of {planned.batch_size:,} with accumulation={recipe.accumulation}"
        message = _too_large(planned, memory, what)
        if planned.total > REFUSED_SHARE * memory and not recipe.freeze:
            raise ValueError(message)
        warnings.warn(f"keras_vit: {message}", stacklevel=5)


def evaluation_batch(recipe: Recipe, config: ViTConfig, *, replicas: int) -> int:
    """Return the images per call of an evaluation, which then needs no more memory than the training step."""
    planned = plan_step(recipe, config, replicas=replicas)
    images = planned.micro_batch * (planned.activations + planned.working) // planned.working
    return max(1, min(EVALUATION_BATCH, images))


def device_memory(replicas_here: int) -> int | None:
    """Return the bytes that one device can use: of the smallest GPU, or of this machine divided by its replicas.

    The environment variable KERAS_VIT_MEMORY states them in GiB. None if they cannot be read (a TPU, Windows).
    """
    if stated := os.environ.get(VARIABLE):
        if not re.fullmatch(r"\d+(\.\d+)?", stated) or not float(stated):
            raise ValueError(f"{VARIABLE} is a number of GiB above 0, such as 12. Received: {stated!r:.200}")
        return int(float(stated) * 2**30)
    import tensorflow as tf

    if tf.config.list_logical_devices("TPU"):
        return None
    if tf.config.list_logical_devices("GPU"):
        from tensorflow.python.client import device_lib  # no public function returns the size of the pool

        return min(device.memory_limit for device in device_lib.list_local_devices() if device.device_type == "GPU")
    free = free_memory()
    return None if free is None else max(0, free - OUTSIDE) // replicas_here


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still use on its machine and in its container, or None."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        found, groups = None, []
    free = [int(found[1]) * 1024] if found else []
    for controllers, path in (line.split(":", 2)[1:] for line in groups):
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            folder = top / path.lstrip("/")
            groups_above = [group for group in folder.parents if group.is_relative_to(top)]
            free += [room for group in (folder, *groups_above) for room in _rooms(group)]
    return min(free, default=None)


def _rooms(group: Path) -> list[int]:
    """Return what a control group leaves, if it has a limit; the page cache can be taken back and does not count."""
    rooms = []
    for limit, usage in _LIMITS:
        try:
            most, used, stat = ((group / name).read_text() for name in (limit, usage, "memory.stat"))
        except OSError:
            continue
        cache = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
        if most.strip() != "max":
            rooms.append(max(0, int(most) - int(used) + int(cache[1] if cache else 0)))
    return rooms


def _too_large(planned: Plan, memory: int, what: str) -> str:
    height, width = planned.image_size
    return (
        f"{what} of {height}x{width} pixels needs about {byte_size(planned.total)} of memory by plan, and there are "
        f"{byte_size(memory)}. Set accumulation='auto', remat=true, precision=mixed_bfloat16, a smaller batch_size, "
        f"image_size or model; or set {VARIABLE} to the GiB that training may use"
    )
