"""What the fields of a training recipe may hold: kinds, choices, intervals. Names no field that `Recipe` lacks."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from keras_vit._util.checks import pair
from keras_vit._util.schema import NUMBER
from keras_vit.model.config import ViTConfig, check_fields

CHOICES = {
    "start": ("pretrained", "scratch"),
    "objective": ("softmax", "sigmoid", "masked_patch"),
    "optimizer": ("sgd", "adamw"),
    "momentum_dtype": ("float32", "bfloat16"),
    "schedule": ("cosine", "linear", "constant"),
    "crop": ("inception", "random", "resize", "none"),
    "precision": ("float32", "mixed_bfloat16"),
    "xla": (True, False, "auto"),
}
INTERVALS = {
    **dict.fromkeys(("steps", "batch_size", "accumulation", "crop_resize", "steps_per_call"), "[1, inf)"),
    **dict.fromkeys(("checkpoint_steps", "keep", "eval_steps", "log_steps"), "[1, inf)"),
    **dict.fromkeys(("seed", "warmup_steps", "randaugment_layers"), "[0, inf)"),
    **dict.fromkeys(("epsilon", "weight_decay", "linear_end", "randaugment_magnitude", "mixup"), "[0, inf)"),
    **dict.fromkeys(("epochs", "learning_rate", "clip_norm", "checkpoint_minutes"), "(0, inf)"),
    **dict.fromkeys(("momentum", "beta1", "beta2", "label_smoothing", "warmup_fraction", "shift"), "[0, 1)"),
    **dict.fromkeys(("layer_decay", "min_area"), "(0, 1]"),
    "ema_decay": "(0, 1)",
}
# By annotation, in the notation of `schema.misfits`.
KINDS: dict[str, Any] = {
    **{"str": str, "int": int, "float": NUMBER, "bool": bool, "tuple[str, ...]": [str], "Mapping[str, Any]": dict},
    "int | tuple[int, int]": (int, list),
    "bool | str": (bool, str),
}
_CONFIG_OPTIONAL = {f.name for f in dataclasses.fields(ViTConfig) if str(f.type).endswith(" | None")}
# What a recipe's config leaves alone: it has a field of its own, or comes with the data.
_NOT_CONFIG = {
    "image_size": "the recipe's image_size",
    "num_classes": "what the data say",
    "labels": "what the data say",
}


def known(name: str, names: Iterable[str], problem: str) -> None:
    """Raise a ValueError where a name is none of `names`, with the nearest; `problem` has a {} for the name."""
    if name not in (names := list(names)):
        nearest = difflib.get_close_matches(name, names, n=1)
        offer = f"the nearest is {nearest[0]!r}" if nearest else f"there are {sorted(names)}"
        raise ValueError(f"{problem.format(name)}; {offer}.")


def plain(value: Any) -> Any:
    """NumPy's numbers as Python's, lists as tuples, and None where an optional field of a config says "none"."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {
            name: None if name in _CONFIG_OPTIONAL and item == "none" else plain(item) for name, item in value.items()
        }
    return tuple(plain(item) for item in value) if isinstance(value, list | tuple) else value


def lies_in(value: float, interval: str) -> bool:
    """Whether a number lies in an interval such as "(0, 1]"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    return (
        math.isfinite(value)
        and (value >= low if interval[0] == "[" else value > low)
        and (value <= high if interval[-1] == "]" else value < high)
    )


def image_size_misfits(image_size: Any, crop_resize: int | None) -> Iterator[str]:
    """What is wrong with a recipe's image_size, or with the crop from a larger one."""
    try:
        sides = pair(image_size, "image_size") if image_size is not None else (1, 1)
    except ValueError as error:
        yield str(error).rstrip(".")
    else:
        if crop_resize is not None and crop_resize < max(sides):
            yield f"crop_resize is at least image_size={image_size}. Received: {crop_resize}"


def config_misfits(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a recipe's config: its names; values are ViTConfig's matter when a model is built."""
    try:
        check_fields(config)
    except ValueError as error:
        yield f"config: {error}"
    for name in _NOT_CONFIG.keys() & config.keys():
        yield f"config has no {name}: it is {_NOT_CONFIG[name]}. Received: {config[name]!r}"
