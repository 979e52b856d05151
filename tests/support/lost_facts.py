"""Reference checkpoints that lost a file beside them, or a key of one; and that have something around them.

`cases` yields the first, in square and rectangular form, and `outcome` tells what loading one gives; `wrapped` and
`wrapped_outcome` likewise. Headers alone are read: no model is built.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from keras_vit.converters.containers import find_weights, open_container
from keras_vit.converters.loading import check_tensors
from keras_vit.converters.source import Checkpoint, open_checkpoint
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig
from places import DATA

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
        with warnings.catch_warnings(action="ignore"), open_checkpoint(find_weights(folder)):
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
                    found, said = checkpoint.config, "\n".join(checkpoint.told)
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


# ---- what programs write around a model

AROUND = (
    *("module.", "_orig_mod.", "model.", "net.", "backbone.", "encoder.", "visual.", "timm_model.", "any.thing."),
    *("_fsdp_wrapped_module.", "module._orig_mod.", "module.model.net.", "base_model.model.", "image_encoder/"),
    *("state_dict/", "model/", "model_state_dict/", "net/", "target_encoder/", "teacher/", "ema/", "a/b/c/d/"),
    *("state_dict/module.", "model/_orig_mod.", "teacher/backbone.", "state_dict/model.base_encoder."),
)
# Two models of one file, `which` of them is meant (None: the one that the file's program takes), and its place.
PAIRS = (
    ("student.backbone.", "teacher.backbone.", None, ""),
    ("student.backbone.", "teacher.backbone.", "teacher", "teacher.backbone."),
    ("student/", "teacher/", None, ""),
    ("encoder/module.", "target_encoder/module.", "target_encoder", "target_encoder/module."),
    ("state_dict/", "state_dict_ema/", None, "state_dict_ema/"),
    ("state_dict/module.", "state_dict_ema/", "raw", "state_dict/module."),
    ("model/", "model_ema/", None, "model_ema/"),
    ("model/", "model_ema/", "ema", "model_ema/"),
    ("state_dict/model.", "current_model_state/model.", None, "state_dict/model."),
    ("state_dict/model.", "current_model_state/model.", "raw", "current_model_state/model."),
    ("state_dict/", "ema_state_dict/module.", "ema", ""),
    ("model/", "ema/module.", None, ""),
)


@dataclass(frozen=True)
class Wrapped:
    """A reference checkpoint with what a program writes around it."""

    name: str
    tensors: Mapping[str, np.ndarray]  # of the whole file
    place: str = ""  # of the right model
    which: str | None = None
    told: str = ""  # what a warning names
    right: str = "refused"  # what loading it gives


def references() -> list[Path]:
    """List the reference checkpoints of image models, of all formats whose files have names of their own."""
    found = [*DATA.glob("*/*/checkpoint.npz"), *DATA.glob("*/*/model.safetensors")]
    return sorted(path for path in found if is_image_model(path.parent) and not has_unknown(path.parent))


def has_unknown(folder: Path) -> bool:
    """Whether converters.load refuses a folder for a tensor that is not known, such as the queries of an EoMT."""
    with warnings.catch_warnings(action="ignore"), open_checkpoint(find_weights(folder)) as checkpoint:
        return bool(checkpoint.tensors.unknown)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a file."""
    with open_container(path) as container:
        return {name: container.read(name) for name in container.headers}


def wrapped(path: Path) -> Iterator[Wrapped]:
    """Yield a checkpoint in each wrapper: alone, beside other parts or another model, and with a tensor too many."""
    own = read_tensors(path)
    source = next(iter(read_right(path)[1].values()))
    one = np.ones(3, np.float32)
    for number, around in enumerate(AROUND):
        inside = {around + name: value for name, value in own.items()}
        told = re.split("[./]", around)[0]
        others = {"criterion.weight": one, "queue": one, **inside}
        yield Wrapped(around, inside, around, told=told, right="told")
        yield Wrapped(f"{around} beside others", others, around, told="queue", right="told")
        if number % 3 == 0:
            yield Wrapped(f"{around} with a tensor too many", {**inside, f"{around}{source}_other": one})
            yield Wrapped(f"{around} with LoRA", {**inside, f"{around}{source}.lora_A.default.weight": one})
    if path.suffix != ".npz":
        inserted = {"._orig_mod.".join(name.rsplit(".", 1)): value for name, value in own.items()}
        yield Wrapped("_orig_mod. in names", inserted, told="_orig_mod.", right="told")
    for first, second, which, place in PAIRS:
        both = {start + name: value for start in (first, second) for name, value in own.items()}
        right = "refused" if not place else "asked" if which else "told"
        yield Wrapped(f"{first} and {second} which={which}", both, place, which, place.split("/")[0], right)


@functools.cache
def read_right(path: Path) -> tuple[ViTConfig, dict[str, str]]:
    """Read the config of a reference checkpoint, and the tensor of every variable."""
    with warnings.catch_warnings(action="ignore"), open_checkpoint(find_weights(path.parent)) as checkpoint:
        return checkpoint.config, names_of(checkpoint)


def names_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Look up the tensor of every variable, by its name in the file."""
    headers = checkpoint.container.headers
    return {variable: headers[source.tensor].name for variable, source in checkpoint.tensors.sources.items()}


def plain(name: str) -> str:
    """Leave out what torch.compile and FSDP insert."""
    return name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "")


def wrapped_outcome(path: Path, case: Wrapped, tmp_path: Path) -> str:
    """Load a wrapped checkpoint: "told", "asked", "refused", or what is silently wrong."""
    for beside in path.parent.glob("*.json"):
        shutil.copy(beside, tmp_path)
    file = tmp_path / path.name
    arrays = dict(case.tensors)
    np.savez(file, **arrays) if path.suffix == ".npz" else save_file(arrays, file)  # type: ignore[arg-type]
    config, names = read_right(path)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            open_checkpoint(find_weights(tmp_path), which=case.which) as found,
        ):
            check_tensors(found, {}, skip=("",))
            said, read = "\n".join(found.told), {key: plain(name) for key, name in names_of(found).items()}
            is_right = found.config == config and read == {
                key: plain(f"{case.place}{name}") for key, name in names.items()
            }
    except CheckpointError:
        return "refused"
    if not is_right or case.told not in said:
        return f"silent: {case.told!r} in {said!r}, {is_right}"
    return "asked" if case.which else "told"
