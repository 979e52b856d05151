"""A checkpoint that is open and understood: which files, which format, which architecture."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_vit.converters import bound, config_json, layout, record
from keras_vit.converters.containers import Container, open_container
from keras_vit.converters.infer import Told, infer
from keras_vit.converters.table import Match, Table
from keras_vit.converters.tables import formats, load_table
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig

# The files a folder may hold its weights in, the first found is read.
_WEIGHTS = (
    "model.safetensors",
    "*.safetensors",
    "checkpoint.npz",
    "*.npz",
    "model.weights.h5",
    "pytorch_model.bin",
    "*.pth",
)


@dataclass(frozen=True)
class Checkpoint:
    """An open file that is known to be a Vision Transformer.

    Attributes:
        container: the file.
        table: of its format.
        match: which tensor is which variable.
        config: its architecture, at the size it was trained at.
        empty_rows: whether the position embedding's rows for prefix tokens were added when it was written.
    """

    container: Container
    table: Table
    match: Match
    config: ViTConfig
    empty_rows: bool = False

    @property
    def written(self) -> ViTConfig:
        """The config of the model that was written: of `config`, if need be, without the empty rows."""
        return self.config.replace(position_prefix=False) if self.empty_rows else self.config


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str],
    *,
    facts: Mapping[str, Any] | None = None,
    format: str | os.PathLike[str] | None = None,
    num_heads: int | None = None,
    wanted_size: Any = None,
) -> Iterator[Checkpoint]:
    """Opens a checkpoint for the time of a `with` block.

    Args:
        path: of the file, or of a folder with the weights and a config.json.
        facts: fields of ViTConfig that the file cannot tell.
        format: one of `formats()` or a path to a .toml table; None detects it.
        num_heads: of the architecture that the caller takes it for, where nothing else says.
        wanted_size: the image size that the caller wants, for files that no grid can be told of.

    Raises:
        CheckpointError: where the file is damaged, hostile, or no Vision Transformer.
        FileNotFoundError: where there is none.
    """
    file = weights_file(Path(path))
    with open_container(file) as container:
        table = load_table(format) if format else detected(container)
        for name in table.beside:
            if (file.parent / name).is_file():
                container.join(open_container(file.parent / name))
        match = table.match(container.headers)
        shapes = {
            variable: layout.variable_shape(container.headers[source.tensor].shape, source, table.layout)
            for variable, source in match.sources.items()
        }
        try:
            told = Told(
                presence=match.told,
                json={} if table.json is None else config_json.beside(file, table.json),
                record=record.noted(container.metadata),
                caller=facts or {},
                num_heads=num_heads,
                wanted_size=wanted_size,
            )
            config = infer(shapes, table, told)
            size_is_told = wanted_size is not None or "image_size" in told.caller
            bound.refuse_larger(container, config, size_is_told=size_is_told)
        except CheckpointError as error:
            raise CheckpointError(f"{file} {error}") from error
        empty_rows = config.position_prefix and record.EMPTY_ROWS in container.metadata
        yield Checkpoint(container, table, match, config, empty_rows)


def detected(container: Container) -> Table:
    """The table of an open file, by its marks.

    Raises:
        CheckpointError: that says what was seen, where no format or more than one has its marks.
    """
    tables = [load_table(name) for name in formats()]
    found = [table for table in tables if table.prefix_of(container.headers) is not None]
    if len(found) == 1:
        return found[0]
    seen = sorted(container.headers)
    marks = {table.format: list(table.detect) for table in found or tables}
    raise CheckpointError(
        f"{container.path}: {'more than one' if found else 'no'} format is known by its tensors. "
        f"Received {len(seen)} tensors: {str(seen[:5])[:500]}. Looked for {marks}; "
        "format= takes a name or a table of your own. (What model.save_weights wrote, model.load_weights reads.)"
    )


def weights_file(path: Path) -> Path:
    """The file of weights that a path means: itself, or the one in a folder.

    Raises:
        CheckpointError: where a folder holds none, or more than one.
    """
    if not path.is_dir():
        return path
    for pattern in _WEIGHTS:
        files = sorted(path.glob(pattern))
        if len(files) > 1:
            names = [file.name for file in files]
            raise CheckpointError(f"{path} holds more than one file of weights: name one of {names}")
        if files:
            return files[0]
    seen = sorted(file.name for file in path.iterdir())[:10]
    raise CheckpointError(f"{path} holds none of {list(_WEIGHTS)}. It holds {seen}")
