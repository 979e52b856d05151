"""Reference checkpoints that lost a file beside them, or a key of one, in square and rectangular form.

`cases` yields them, and `outcome` tells what loading one gives. Headers alone are read: no model is built.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_vit.converters.containers import find_weights
from keras_vit.converters.source import open_checkpoint
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig

DATA = Path(__file__).parent / "data"
ASKED = re.compile(r"'(\w+)': ")
# Fields that change no output: how a model is trained, and what its outputs are called.
UNCOMPARED = {"attention_dropout_rate", "dropout_rate", "head_bias_init", "labels", "layer_scale", "stochastic_depth"}
# What the programs take where a key is missing: they read such a file, and so do we. Key = {part of the name of the
# class or the entry point: fields}; of several the last counts.
PROGRAMS: dict[str, dict[str, dict[str, Any]]] = {
    "hidden_act": {
        "": {"activation": "gelu_erf"},
        "clip": {"activation": "gelu_quick"},
        "siglip": {"activation": "gelu_tanh"},
        "aimv2": {"activation": "silu"},
    },
    "layer_norm_eps": {
        "": {"norm_epsilon": 1e-12},
        **dict.fromkeys(("clip", "dinov3"), {"norm_epsilon": 1e-5}),
        **dict.fromkeys(("siglip", "dinov2", "pixio", "msn"), {"norm_epsilon": 1e-6}),
    },
    "num_attention_heads": {
        "": {"num_heads": 12},
        "pixio": {"num_heads": 16},
        "dinov3": {"num_heads": 6},
        "aimv2": {"num_heads": 8},
    },
    "act_layer": {"": {"activation": "gelu_erf"}},
    "crop_mode": {"": {"preprocessing.resize": "crop"}},
    **dict.fromkeys(
        ("num_heads", "model_args"),
        {"_base": {"num_heads": 12}, "vit_tiny": {"num_heads": 3}, "aimv2_large": {"num_heads": 8}},
    ),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint that lost something."""

    name: str
    weights: Path
    files: Mapping[str, Any]  # the objects of the files beside it that are left
    right: ViTConfig  # of the whole checkpoint
    lost: str = ""  # the key that is lost
    wanted: tuple[int, int] | None = None  # image_size= of the caller


def folders() -> list[Path]:
    """List the reference checkpoints that a file describes."""
    found = {
        path.parent for pattern in ("config.json", "open_clip_config.json") for path in DATA.glob(f"*/*/{pattern}")
    }
    return sorted(folder for folder in found if (folder / "model.safetensors").exists() and is_image_model(folder))


def is_image_model(folder: Path) -> bool:
    """Whether converters.load reads a folder: some have a text tower alone, or a head for maps."""
    try:
        with warnings.catch_warnings(action="ignore"), open_checkpoint(folder):
            return True
    except CheckpointError:
        return False


def read(folder: Path) -> dict[str, Any]:
    """Read the files beside the weights."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def lose(files: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is lost, and what is left: nothing, each file, all files, each key of each object."""
    yield "nothing", dict(files)
    yield "everything", {}
    for name, values in files.items():
        yield name, {other: rest for other, rest in files.items() if other != name}
        for place in places(values):
            yield f"{name} {'.'.join(place)}", {**files, name: without(values, place)}


def places(values: Any, start: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List the places of all keys of nested objects."""
    for key, value in (
        values.items() if isinstance(values, dict) and start[-1:] not in (("id2label",), ("label2id",)) else ()
    ):
        yield (*start, key)
        yield from places(value, (*start, key))


def without(values: Any, place: tuple[str, ...]) -> Any:
    """Copy an object without one key."""
    left = inner = copy.deepcopy(values)
    for key in place[:-1]:
        inner = inner[key]
    del inner[place[-1]]
    return left


def rectangle(config: ViTConfig) -> tuple[int, int] | None:
    """Find the size of another grid with as many patches; None if there is none."""
    (rows, columns), (height, width) = config.grid, config.stride
    count = rows * columns
    found = next((side for side in range(2, rows) if count % side == 0), None)
    return None if found is None or config.position != "learned" else (found * height, count // found * width)


def cases(folder: Path, tmp_path: Path) -> Iterator[Case]:
    """Yield a checkpoint with everything that it can lose, in both forms, without and with a wanted image size."""
    files = read(folder)
    (tmp_path / folder.name).mkdir()
    weights = Path(shutil.copy(folder / "model.safetensors", tmp_path / folder.name))
    with opened(weights, files) as checkpoint:
        square = checkpoint.config
    forms = {"square": (square, files)}
    if (size := rectangle(square)) is not None and (stated := with_size(files, size)) is not None:
        try:
            with opened(weights, stated) as checkpoint:
                forms["rectangular"] = (checkpoint.config, stated)
        except CheckpointError:  # the program has square images alone
            pass
    for form, (right, described) in forms.items():
        for lost, left in lose(described):
            for wanted in (None, right.size):
                name, key = (
                    f"{folder.name} {form} without {lost} for {wanted}",
                    lost.rpartition(" ")[2].rpartition(".")[2],
                )
                yield Case(name, weights, left, right, key, wanted)


def with_size(files: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any] | None:
    """Say another image size in the files of a checkpoint; None if they have no place for it."""
    changed = copy.deepcopy(dict(files))
    config = changed.get("config.json", changed.get("open_clip_config.json", {}))
    for place in (config, config.get("vision_config", {}), config.get("model_cfg", {}).get("vision_cfg", {})):
        if "image_size" in place:
            place["image_size"] = list(size)
            return changed
    if "pretrained_cfg" in config:
        config["pretrained_cfg"]["input_size"] = [config["pretrained_cfg"].get("input_size", [3])[0], *size]
        config.get("model_args", {}).pop("img_size", None)
        return changed
    return None


def opened(weights: Path, files: Mapping[str, Any], **options: Any) -> Any:
    """Open a checkpoint with these files beside it."""
    for path in weights.parent.glob("*.json"):
        path.unlink()
    for name, values in files.items():
        (weights.parent / name).write_text(json.dumps(values), encoding="utf-8")
    return open_checkpoint(find_weights(weights), **options)


def outcome(case: Case) -> str:
    """Load a checkpoint, and answer what is asked: "exact", "asked", "told", "refused", or what is silently wrong."""
    facts: dict[str, Any] = {}
    for _ in range(4):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with opened(case.weights, case.files, facts=facts, wanted_size=case.wanted) as checkpoint:
                    found, said = checkpoint.config, checkpoint.assumed
            said += "\n".join(str(each.message) for each in caught)
            break
        except CheckpointError as error:
            names = ASKED.findall(str(error)) if "pass config=" in str(error) else []
            if not names or facts.keys() >= {*names}:
                return "refused"
            facts |= {name: getattr(case.right, name) for name in names}
    else:
        return "refused"
    wrong = different(case, found)
    if silent := [name for name in wrong if f"{name}=" not in said and f"'{name.partition('.')[2]}': " not in said]:
        return "silent: " + ", ".join(f"{name} {wrong[name]}" for name in silent)
    return "told" if wrong else "asked" if facts else "exact"


def different(case: Case, found: ViTConfig) -> dict[str, Any]:
    """Compare the fields that change outputs with those of the whole checkpoint, or with the program's own defaults."""
    wrong = {name: pair for name, pair in compared(found, case.right) if pair[0] != pair[1]}
    config = case.files.get("config.json", {})
    said = [
        str(value)
        for inner in (config, config.get("vision_config", {}))
        for key, value in inner.items()
        if key in ("model_type", "architecture")
    ]
    programs: dict[str, Any] = {}
    for part, fields in PROGRAMS.get(case.lost, {}).items():
        programs |= fields if any(part in kind for kind in said) else {}
    if case.wanted and found.position == found.relative_bias == "none":  # no table to resize
        programs["image_size"] = found.image_size
    return {name: pair for name, pair in wrong.items() if programs.get(name) != pair[0]}


def compared(found: ViTConfig, right: ViTConfig) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the fields of two configs that change outputs, those of preprocessing as "preprocessing.mean"."""
    for name, value in vars(right).items():
        if name == "preprocessing":
            for part in dataclasses.fields(value):
                yield f"{name}.{part.name}", (getattr(found.preprocessing, part.name), getattr(value, part.name))
        elif name not in UNCOMPARED:
            yield name, (getattr(found, name), value)
