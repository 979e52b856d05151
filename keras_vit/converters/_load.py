"""Checkpoints in and out: from every known format to a VisionTransformer, and to every one that can hold it."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.converters import _keras_file, assign, config_json, prefix_rows, record
from keras_vit.converters.containers import open_container, write_npz, write_safetensors
from keras_vit.converters.infer import Told, from_tensors, infer
from keras_vit.converters.source import Checkpoint, detected, opened, weights_file
from keras_vit.converters.table import OWN, Table, lookup
from keras_vit.converters.tables import formats, load_table
from keras_vit.errors import CheckpointError
from keras_vit.model import layers
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer

__all__ = ["CheckpointError", "build", "convert", "detect", "formats", "load", "read_config", "save"]

# Names by which everybody would take a file for the other container.
_OTHER_SUFFIXES = {"npz": (".safetensors",), "safetensors": (".npz",)}
# What no file holds: how it is trained, and what is done before and after it.
_NOT_IN_FILES = {
    "image_size",
    "num_heads",
    "dropout_rate",
    "attention_dropout_rate",
    "stochastic_depth",
    "head_bias_init",
    "position_method",
    "preprocessing",
    "labels",
}
# What changes the last digits only: such a model is written with a warning, where other readers will differ by them.
_NUMERICS = {"activation": ("gelu_tanh", "gelu_erf", "gelu_quick"), "norm_epsilon": None, "resnet": None}
# Files do not say whether their head is applied to every token: both readings are right.
_SAME_IN_FILES = {"unpooled": "gap", "token_unpooled": "token"}


def load(
    path: str | os.PathLike[str],
    *,
    config: ViTConfig | Mapping[str, Any] | None = None,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    format: str | None = None,
    dtype: Any = None,
    allow_nonfinite: bool = False,
) -> VisionTransformer:
    """Opens a checkpoint as a model. The architecture is read from its tensors and a config.json beside them.

    Args:
        path: of the file, of a folder with the weights and a config.json, or of a model saved as .keras.
        config: facts about the *file* that it cannot tell itself: `num_heads` where the format folds the heads
            (timm and Hugging Face without config.json), `classifier` "unpooled" or "token_unpooled", the `image_size`
            it was trained at where its grid is not square, `representation_size` None to leave the file's pre_logits
            (and its head) out. A dict states what it names; a ViTConfig states every field, its defaults included.
        image_size: *wanted*, int or (height, width); position embeddings are interpolated once.
        num_classes: *wanted*; where it differs from the file's, the head is new and zero; 0 is no head.
        format: one of `formats()` or a path to a .toml table of one's own; None detects it.
        dtype: Keras dtype policy of the model; None is the global one.
        allow_nonfinite: accept NaN and infinities among the weights.

    Returns:
        the model; nothing of it is random.

    Raises:
        CheckpointError: where the file is damaged, hostile or no such model; nothing is left half built.
        FileNotFoundError: where there is no file.
        ValueError: where an argument is wrong.
    """
    wanted: dict[str, Any] = {"image_size": image_size, "num_classes": num_classes}
    if Path(path).suffix == _keras_file.SUFFIX:
        if config is not None or format is not None:
            raise ValueError(f"A .keras file says all of itself. Received: config={config!r}, format={format!r}")
        return _keras_file.load(Path(path), dtype=dtype, **wanted)
    changes = {name: value for name, value in wanted.items() if value is not None}
    with opened(path, facts=_facts(config), format=format, wanted_size=image_size) as checkpoint:
        return build(checkpoint, changes, dtype=dtype, allow_nonfinite=allow_nonfinite)


def build(
    checkpoint: Checkpoint, changes: Mapping[str, Any], *, dtype: Any = None, allow_nonfinite: bool = False
) -> VisionTransformer:
    """The model of an open checkpoint with some fields of its config changed. Raises as `load`.

    Args:
        checkpoint: as `keras_vit.checkpoints.source.opened` gives it.
        changes: fields of its config and their new values.
        dtype: Keras dtype policy of the model; None is the global one.
        allow_nonfinite: accept NaN and infinities among the weights.
    """
    wanted = checkpoint.written.replace(**changes)
    with layers.uninitialized():
        model = VisionTransformer(wanted, dtype=dtype)
    fresh = _fresh_layers(checkpoint, wanted)
    variables = {path: variable for path, variable in assign.weights(model).items() if not path.startswith(fresh)}
    assign.check(checkpoint, variables, skip=fresh)
    assign.assign(checkpoint, model, variables, allow_nonfinite=allow_nonfinite)
    if "head/kernel" in variables and not np.any(variables["head/kernel"]):
        warnings.warn(
            f"keras_vit: the head of {checkpoint.container.path.name} is all zeros, as Google published its "
            "imagenet21k files: the logits say nothing. Use the features, or num_classes= for a head to train.",
            stacklevel=3,
        )
    return model


def read_config(
    path: str | os.PathLike[str], *, config: ViTConfig | Mapping[str, Any] | None = None, format: str | None = None
) -> ViTConfig:
    """The architecture of a checkpoint, from its headers: no weight is read. Raises as `load`.

    Args:
        path: of the file or folder.
        config: facts about the file that it cannot tell itself, as for `load`.
        format: one of `formats()` or a path to a .toml table of one's own; None detects it.
    """
    with opened(path, facts=_facts(config), format=format) as checkpoint:
        return checkpoint.written


def detect(path: str | os.PathLike[str]) -> str:
    """The name of the format of a file or folder.

    Args:
        path: of the file, or of a folder with the weights in it.

    Raises:
        CheckpointError: that says what was seen, where no format is known by its marks.
    """
    with open_container(weights_file(Path(path))) as container:
        return detected(container).format


def save(model: VisionTransformer, path: str | os.PathLike[str], *, format: str) -> Path:
    """Writes a model as a checkpoint of a format; it appears under its name only complete.

    Args:
        model: whose weights are written, as float32.
        path: of the file; or, for a format with a config.json, of a folder (a name without suffix) for both.
        format: one of `formats()` or a path to a .toml table of one's own.

    Returns:
        the path of the file.

    Raises:
        CheckpointError: naming what the format cannot express; nothing is written.
        TypeError: where it is no VisionTransformer.
    """
    if not isinstance(model, VisionTransformer):
        raise TypeError(f"save writes a keras_vit.VisionTransformer. Received: {type(model).__name__}")
    table = load_table(format)
    if not table.writable:
        raise CheckpointError(f"The {table.format} format is only read. Those written: {_written_formats()}")
    variables, config = assign.weights(model), model.config
    moved = prefix_rows.moved(variables, config, table.config.get("position_prefix", config.position_prefix))
    if moved:
        config = config.replace(position_prefix=not config.position_prefix)
    tensors = assign.collect(variables | moved, config, table)
    understood, unsaid = _understood(variables | moved, config, table)
    described = None if table.json is None else config_json.write(config, table.json)
    said = {} if described is None or table.json is None else config_json.facts(described, table.json)
    _refuse_other_meanings(config, understood, said, table)
    if table.layout == "keras":  # readers of the torch formats would not take tensors they do not know
        config = model.config
        tensors = itertools.chain(tensors, ((OWN + path, _array(variables[path])) for path in moved))
    note = record.note(config, understood, unsaid)
    if config.position_prefix and not model.config.position_prefix:
        note[record.EMPTY_ROWS] = "true"
    return _write(Path(path), table, tensors, note, described)


def _write(
    path: Path,
    table: Table,
    tensors: Iterable[tuple[str, Any]],
    note: dict[str, str],
    described: Mapping[str, Any] | None,
) -> Path:
    """Writes the file of tensors, and the config.json beside it where the format has one."""
    if described is not None and (path.is_dir() or not path.suffix):
        path.mkdir(parents=True, exist_ok=True)
        path = path / f"model.{table.container}"
    if path.is_dir() or not path.parent.is_dir():
        raise CheckpointError(f"A {table.format} file is written into a folder that exists. Received: {str(path)!r}")
    if path.suffix in _OTHER_SUFFIXES[table.container]:
        warnings.warn(
            f"keras_vit: {path.name} will hold a .{table.container}, which is what {table.format} files are: others "
            "will take it for what its name says.",
            stacklevel=4,
        )
    if described is not None and table.json is not None:
        config_json.refuse_anothers(path, described, table.json)
    if table.container == "npz":
        write_npz(path, tensors, metadata=note)
    else:
        write_safetensors(path, tensors, metadata={"format": "pt", **note})
    if described is not None and table.json is not None:
        config_json.save(path, described, table.json)
    return path


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    config: ViTConfig | Mapping[str, Any] | None = None,
    source_format: str | None = None,
) -> Path:
    """`load` and `save` in one: a checkpoint to another format, resolution or number of classes. Raises as they do.

    Args:
        source: the checkpoint to read, a file or a folder.
        path: of the file to write, or of a folder, as for `save`.
        format: to write: one of `formats()` or a path to a .toml table of one's own.
        image_size: wanted, int or (height, width); None is the file's.
        num_classes: wanted; where it differs from the file's, the head is new and zero; 0 is no head.
        config: facts about the source that it cannot tell itself, as for `load`.
        source_format: of the source; None detects it.

    Returns:
        the path of the file written.
    """
    model = load(source, config=config, image_size=image_size, num_classes=num_classes, format=source_format)
    return save(model, path, format=format)


def _array(variable: Any) -> np.ndarray:
    return keras.ops.convert_to_numpy(variable).astype(np.float32)


def _facts(config: ViTConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    return config.to_dict() if isinstance(config, ViTConfig) else dict(config or {})


def _written_formats() -> list[str]:
    return [name for name in formats() if load_table(name).writable]


def _fresh_layers(checkpoint: Checkpoint, wanted: ViTConfig) -> tuple[str, ...]:
    """The layers that do not come from the file: a head of another width, or behind a pre_logits that is left out."""
    heads = ("head/", "head_distillation/")
    if wanted.representation_size is None and "pre_logits/kernel" in checkpoint.match.sources:
        return (*heads, "pre_logits/")
    return heads if wanted.num_classes != checkpoint.config.num_classes else ()


def _understood(variables: Mapping[str, Any], config: ViTConfig, table: Table) -> tuple[ViTConfig, tuple[str, ...]]:
    """What a reader understands of a model's file from its tensors and the format alone, and what it had to be told."""
    shapes = {path: tuple(variable.shape) for path, variable in variables.items()}
    fields = config.to_dict()
    rows = [source.row for path in shapes if (source := table.tensor_of(path, fields))]
    presence = dict(row.only_if for row in rows if row.only_if and "." not in row.only_if[0])
    needed = _stated(table) & {"position_prefix", "classifier"} | {"num_heads"}
    caller = {name: fields[name] for name in sorted(needed - set(table.config))}
    # So that the file can be read without its config.json, or beside another's.
    stated = {name.partition(".")[0] for name in _stated(table)} - set(from_tensors(shapes))
    unsaid = tuple(stated | set(caller)) if table.layout == "torch" else ()
    try:
        return infer(shapes, table, Told(presence=presence, caller=caller)), unsaid
    except CheckpointError:  # no grid, or none that is square
        told = Told(presence=presence, caller={**caller, "image_size": config.image_size})
        return infer(shapes, table, told), (*unsaid, "image_size")


def _stated(table: Table) -> set[str]:
    """The fields that a format's config.json states."""
    return set() if table.json is None else {rule.split("|")[0].strip() for rule in table.json.fields.values()}


def _refuse_other_meanings(config: ViTConfig, understood: ViTConfig, said: Mapping[str, Any], table: Table) -> None:
    """Raise where a reader of the format would take the file for another model; warn where only digits differ."""
    stated = _stated(table)
    told = {"resnet", *(name for facts in table.without.values() for name in facts)}  # by which tensors there are
    ours, theirs = config.to_dict(), understood.to_dict()
    combinations = [facts for facts in table.refused if all(lookup(ours, name) == facts[name] for name in facts)]
    wrong = [" with ".join(f"{name}={value!r}" for name, value in facts.items()) for facts in combinations]
    close: list[str] = []
    for name, value in ours.items():
        meant = said.get(name, theirs[name] if name in told else table.config.get(name, theirs[name]))
        if name in _NOT_IN_FILES | stated or _same(name, value, meant, config):
            continue
        text = f"{name}={value!r} (it means {meant!r})"
        near = name in _NUMERICS and (_NUMERICS[name] is None or {value, meant} <= set(_NUMERICS[name] or ()))
        (close if near else wrong).append(text)
    if wrong:
        raise CheckpointError(f"The {table.format} format cannot express " + ", ".join(wrong))
    if close:
        warnings.warn(
            f"keras_vit: {table.format} files do not say {', '.join(close)}. keras_vit notes it in the file and reads "
            "it back; other readers' logits will differ in the fourth digit or so.",
            stacklevel=3,
        )


def _same(name: str, value: Any, meant: Any, config: ViTConfig) -> bool:
    if name == "classifier":
        return _SAME_IN_FILES.get(value, value) == meant
    if name == "layer_scale":
        return (value is None) == (meant is None)
    if name == "position_prefix" and (not config.num_prefix_tokens or config.position != "learned"):
        return True
    if name == "representation_activation" and config.representation_size is None:
        return True
    return bool(value == meant)
