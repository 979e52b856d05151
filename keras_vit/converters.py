"""Checkpoints in and out: any known format to a VisionTransformer, and a VisionTransformer to any that can hold it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit import layers
from keras_vit.checkpoints import assign, layout
from keras_vit.checkpoints.base import Container
from keras_vit.checkpoints.containers import open_container, write_npz, write_safetensors
from keras_vit.checkpoints.errors import CheckpointError
from keras_vit.checkpoints.infer import infer
from keras_vit.checkpoints.table import Match, Table, formats, load_table
from keras_vit.config import ViTConfig
from keras_vit.model import VisionTransformer

__all__ = ["CheckpointError", "convert", "detect", "formats", "load", "read_config", "save"]

# What a file does not hold: how it is trained, and what is done before and after it.
_NOT_IN_FILES = {
    "image_size",
    "dropout_rate",
    "attention_dropout_rate",
    "stochastic_depth",
    "head_bias_init",
    "position_method",
    "preprocessing",
    "labels",
}
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
    """Opens a checkpoint file as a model. The architecture is read from its tensors.

    Args:
        path: of the file.
        config: facts about the *file* that it cannot tell itself: `num_heads` where the format folds the heads,
            `classifier` "unpooled" or "token_unpooled", the `image_size` it was trained at where its grid is not
            square, `representation_size` None to leave the file's pre_logits (and head) out.
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
    facts = _facts(config)
    wanted = {"image_size": image_size, "num_classes": num_classes}
    changes = {name: value for name, value in wanted.items() if value is not None}
    with open_container(path) as container:
        source = open_checkpoint(container, facts, format)
        return source.build(changes, dtype=dtype, allow_nonfinite=allow_nonfinite)


def read_config(
    path: str | os.PathLike[str],
    *,
    config: ViTConfig | Mapping[str, Any] | None = None,
    format: str | None = None,
) -> ViTConfig:
    """The architecture of a checkpoint, from its headers: no weight is read. Arguments and errors as in `load`."""
    with open_container(path) as container:
        return open_checkpoint(container, _facts(config), format).config


def detect(path: str | os.PathLike[str]) -> str:
    """The name of a file's format.

    Raises:
        CheckpointError: that says what was seen, where no format is known by its marks.
    """
    with open_container(path) as container:
        return _detect(container).format


def save(model: VisionTransformer, path: str | os.PathLike[str], *, format: str) -> Path:
    """Writes a model as a checkpoint file of a format; appears under its name only complete.

    Args:
        model: whose weights are written, as float32.
        path: of the file.
        format: one of `formats()` or a path to a .toml table of one's own.

    Returns:
        the path.

    Raises:
        CheckpointError: naming what the format cannot express.
    """
    table = load_table(format)
    variables = assign.weights(model)
    tensors = assign.collect(variables, table)
    _refuse_other_meanings(model.config, variables, table)
    if table.container == "npz":
        return write_npz(path, tensors)
    return write_safetensors(path, tensors, metadata={"format": "pt"})


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    config: ViTConfig | Mapping[str, Any] | None = None,
) -> Path:
    """`load` and `save` in one: a checkpoint file to another format, resolution or number of classes."""
    model = load(source, config=config, image_size=image_size, num_classes=num_classes)
    return save(model, path, format=format)


@dataclass(frozen=True)
class Checkpoint:
    """An open file that is known to be a Vision Transformer: its format, tensors and architecture."""

    container: Container
    table: Table
    match: Match
    config: ViTConfig

    def build(
        self, changes: Mapping[str, Any], *, dtype: Any = None, allow_nonfinite: bool = False
    ) -> VisionTransformer:
        """The model with some fields of its config changed. Raises as `load`."""
        wanted = self.config.replace(**changes)
        with layers.uninitialized():
            model = VisionTransformer(wanted, dtype=dtype)
        fresh = self._fresh(wanted)
        variables = {path: v for path, v in assign.weights(model).items() if not path.startswith(fresh)}
        skip = {path for path in self.match.sources if path.startswith(fresh)}
        assign.check(self.container, self.match, self.table, self.config, variables, skip)
        assign.assign(
            self.container,
            self.match,
            self.table,
            self.config,
            model,
            variables,
            allow_nonfinite=allow_nonfinite,
        )
        if "head/kernel" in variables and not np.any(variables["head/kernel"]):
            warnings.warn(
                f"keras_vit: the head of {self.container.path.name} is all zeros, as Google published its imagenet21k "
                "files: the logits say nothing. Use the features, or num_classes= for a head to train.",
                stacklevel=3,
            )
        return model

    def _fresh(self, wanted: ViTConfig) -> tuple[str, ...]:
        """The layers that do not come from the file: a head of another width, and behind a dropped pre_logits."""
        drops_representation = (
            wanted.representation_size is None and "pre_logits/kernel" in self.match.sources
        )
        heads = ("head/", "head_distillation/")
        if drops_representation:
            return (*heads, "pre_logits/")
        return heads if wanted.num_classes != self.config.num_classes else ()


def _facts(config: ViTConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    return config.to_dict() if isinstance(config, ViTConfig) else dict(config or {})


def open_checkpoint(container: Container, facts: Mapping[str, Any], format: str | None = None) -> Checkpoint:
    """Recognises an open file and its architecture; raises as `load`."""
    table = load_table(format) if format else _detect(container)
    match = table.match(container.headers)
    shapes = {
        variable: layout.variable_shape(container.headers[source.tensor].shape, source.row, table.layout)
        for variable, source in match.sources.items()
    }
    try:
        return Checkpoint(container, table, match, infer(shapes, table, facts))
    except CheckpointError as error:
        raise CheckpointError(f"{container.path} {error}") from error


def _detect(container: Container) -> Table:
    tables = [load_table(name) for name in formats()]
    found = [table for table in tables if table.prefix_of(container.headers) is not None]
    if len(found) == 1:
        return found[0]
    seen = sorted(container.headers)
    marks = {table.format: list(table.detect) for table in tables}
    raise CheckpointError(
        f"{container.path}: {'no' if not found else 'more than one'} format is known by these tensors. "
        f"Received: {len(seen)} tensors: {seen[:5]}. Expected one of {marks}, or format= a table of your own."
    )


def _refuse_other_meanings(config: ViTConfig, variables: Mapping[str, Any], table: Table) -> None:
    """Raise where a reader of the format would take the file for another model than it is."""
    shapes = {path: tuple(variable.shape) for path, variable in variables.items()}
    facts = {"image_size": config.image_size, "num_heads": config.num_heads}
    read = infer(shapes, table, facts)
    wrong = []
    for name, value in config.to_dict().items():
        meant = read.to_dict()[name]
        if name in _NOT_IN_FILES or _same(name, value, meant, config):
            continue
        wrong.append(f"{name}={value!r} (it means {meant!r})")
    if wrong:
        raise CheckpointError(f"The {table.format} format cannot express " + ", ".join(wrong))


def _same(name: str, value: Any, meant: Any, config: ViTConfig) -> bool:
    if name == "classifier":
        return _SAME_IN_FILES.get(value, value) == meant
    if name == "layer_scale":
        return (value is None) == (meant is None)
    if name == "representation_activation" and config.representation_size is None:
        return True
    return bool(value == meant)
