"""Open a checkpoint: find its files, recognise its format, infer and check its architecture."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_vit.converters import config_json, layout, record
from keras_vit.converters.containers import Container, open_container
from keras_vit.converters.infer import Hints, infer
from keras_vit.converters.table import Match, Table, fields_of_rows, formats, load_table
from keras_vit.converters.tensor_names import MAX_LAYERS
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count_parameters

# The files of weights in a folder; the first one found is read.
_WEIGHTS = (
    "model.safetensors",
    "*.safetensors",
    "checkpoint.npz",
    "*.npz",
    "model.weights.h5",
    "pytorch_model.bin",
    "*.pth",
)
# A model may have this many times the weights of its file, because formats leave out biases that are zero, and this
# many values in a fixed position embedding besides.
_WEIGHTS_RATIO = 2
_SPARE_POSITIONS = 1 << 22
# No model has more patches, unless the caller asks for them: attention to so many takes 16 GiB for each head.
_MAX_PATCHES = 1 << 16


@dataclass(frozen=True)
class Checkpoint:
    """An open file that holds a Vision Transformer."""

    container: Container
    table: Table
    match: Match
    config: ViTConfig  # at the image size it was trained at
    has_zero_rows: bool = False  # whether zero position rows for the prefix tokens were added when it was written

    @property
    def written(self) -> ViTConfig:
        """The config of the model that was written: `config` without position rows that were added."""
        return self.config.replace(position_prefix=False) if self.has_zero_rows else self.config


@contextlib.contextmanager
def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    facts: Mapping[str, Any] | None = None,
    format: str | os.PathLike[str] | None = None,
    num_heads: int | None = None,
    wanted_size: Any = None,
) -> Iterator[Checkpoint]:
    """Open a checkpoint, a file or a folder with the weights and a config.json, for a `with` statement.

    `facts` are fields of ViTConfig that the file cannot state. `num_heads` (of the architecture the caller expects) and
    `wanted_size` (the image size the caller wants) are used only where nothing else states them.
    """
    file = find_weights(Path(path))
    with open_container(file) as container:
        table = load_table(format) if format else recognise(container)
        for name in table.names.beside:
            if (file.parent / name).is_file():
                container.join(open_container(file.parent / name))
        match = table.match(container.headers)
        shapes = {
            variable: layout.variable_shape(container.headers[source.tensor].shape, source, table.layout)
            for variable, source in match.sources.items()
        }
        try:
            hints = Hints(
                row_fields=fields_of_rows(source.row for source in match.sources.values()),
                json_fields={} if table.json is None else config_json.read_beside(file, table.json),
                recorded_fields=record.from_metadata(container.metadata),
                caller_fields=facts or {},
                num_heads=num_heads,
                image_size=wanted_size,
            )
            config = infer(shapes, table, hints)
            is_size_given = wanted_size is not None or "image_size" in hints.caller_fields
            check_size(container, config, is_size_given=is_size_given)
        except CheckpointError as error:
            raise CheckpointError(f"{file} {error}") from error
        has_zero_rows = config.position_prefix and record.ZERO_ROWS_KEY in container.metadata
        yield Checkpoint(container, table, match, config, has_zero_rows)


def check_size(container: Container, config: ViTConfig, *, is_size_given: bool = False) -> None:
    """Raise a CheckpointError if a model is much larger than its file: a few bytes can describe a model of any size.

    Only headers are read, before memory is allocated. `is_size_given` says that the caller stated the image size and
    accepts the memory that it takes.
    """
    held = sum(math.prod(header.shape) for header in container.headers.values() if header.bytes)
    most = _WEIGHTS_RATIO * held
    # Layers are checked first, because counting parameters takes time for each unit of a hybrid.
    num_layers = max(config.num_layers, sum(config.resnet.num_layers) if config.resnet else 0)
    try:
        needed = count_parameters(config) if num_layers <= MAX_LAYERS else most + 1
    except OverflowError:
        needed = most + 1
    if needed > most:
        raise CheckpointError(
            f"describes a model of at least {min(needed, 10**18)} weights in {min(num_layers, 10**18)} blocks, "
            f"but holds {held} numbers"
        )
    patches = math.prod(config.grid)
    fixed = patches * config.hidden_size if config.position == "sincos2d" else 0
    if not is_size_given and (patches > _MAX_PATCHES or fixed > most + _SPARE_POSITIONS):
        raise CheckpointError(
            f"describes an image of {min(patches, 10**18)} patches, but holds {held} numbers; "
            f"at most {_MAX_PATCHES} patches are read"
        )


def recognise(container: Container) -> Table:
    """Return the table of an open file's format, which is recognised by the names of the tensors."""
    tables = [load_table(name) for name in formats()]
    found = [table for table in tables if table.find_prefix(container.headers) is not None]
    if len(found) == 1:
        return found[0]
    names = sorted(container.headers)
    marks = {table.format: list(table.marks.present) for table in found or tables}
    raise CheckpointError(
        f"{container.path}: {'more than one' if found else 'no'} format is known by its tensors. "
        f"Received {len(names)} tensors: {str(names[:5])[:500]}. Looked for {marks}; format= accepts one of these or "
        "a .toml table of your own. (Files of model.save_weights are read by model.load_weights.)"
    )


def find_weights(path: Path) -> Path:
    """Return the file of weights at a path: the path itself, or the one such file in a folder."""
    if not path.is_dir():
        return path
    for pattern in _WEIGHTS:
        files = sorted(path.glob(pattern))
        if len(files) > 1:
            names = [file.name for file in files]
            raise CheckpointError(f"{path} holds more than one file of weights: name one of {names}")
        if files:
            return files[0]
    names = sorted(file.name for file in path.iterdir())[:10]
    raise CheckpointError(f"{path} holds none of {list(_WEIGHTS)}. It holds {names}")
