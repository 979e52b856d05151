"""Open a checkpoint: find its files, recognise its format, infer and check its architecture."""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from keras_vit._util.checks import as_path
from keras_vit._util.text import abbreviated
from keras_vit.converters import config_json, layout
from keras_vit.converters.containers import Container, open_container, quoted, read_keras_config
from keras_vit.converters.infer import Hints, infer
from keras_vit.converters.table import MAX_LAYERS, Match, Table, fields_of_rows, formats, load_table
from keras_vit.errors import CheckpointError as CheckpointError
from keras_vit.model.config import ViTConfig

# The files of weights in a folder; the first one found is read. A training run's folder has a model.keras.
_WEIGHTS = (
    "model.keras",
    "model.safetensors",
    "*.safetensors",
    "checkpoint.npz",
    "*.npz",
    "model.weights.h5",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
    "*.pth",
)
_CHECKPOINTS, _BEST = "checkpoints", "best.keras"  # of a training run's folder, which it has before model.keras
# A model may have this many times the weights of its file, because formats leave out biases that are zero, and this
# many values in a fixed position embedding besides.
_WEIGHTS_RATIO = 2
_SPARE_POSITIONS = 1 << 22
# No model has more patches, unless the caller asks for them: attention to so many takes 16 GiB for each head.
_MAX_PATCHES = 1 << 16


class Checkpoint(NamedTuple):
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
    file = find_weights(path)
    with open_files(file) as container:
        table = load_table(format) if format else recognise(container)
        for name in table.names.beside:
            if (file.parent / name).is_file():
                container.join(open_container(file.parent / name))
        match = table.match(container.headers)
        shapes = layout.variable_shapes(container.headers, match, table.layout)
        try:
            hints = Hints(
                row_fields=fields_of_rows(source.row for source in match.sources.values()),
                json_fields={} if table.json is None else config_json.read_beside(file, table.json),
                recorded_fields=config_json.from_metadata(container.metadata),
                caller_fields=facts or {},
                num_heads=num_heads,
                image_size=wanted_size,
            )
            config = infer(shapes, table, hints)
            is_size_given = wanted_size is not None or "image_size" in hints.caller_fields
            check_size(container, config, is_size_given=is_size_given)
        except CheckpointError as error:
            raise CheckpointError(f"{file} {error}") from error
        has_zero_rows = config.position_prefix and config_json.ZERO_ROWS_KEY in container.metadata
        yield Checkpoint(container, table, match, config, has_zero_rows)


def read_config(
    path: str | os.PathLike[str],
    *,
    config: ViTConfig | Mapping[str, Any] | None = None,
    format: str | None = None,
    num_heads: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> ViTConfig:
    """Return the architecture of a checkpoint. Only headers are read, no weights.

    Args:
        path: the file or folder.
        config: facts about the file that it cannot state itself, as for `load`.
        format: one of `formats()` or a path to a .toml table of your own; None recognises it.
        num_heads: number of attention heads that is expected, where nothing else states it.
        image_size: size in pixels that is wanted, where the file does not state its own.

    Raises:
        CheckpointError: the file is damaged, malicious or not a Vision Transformer.
        FileNotFoundError: there is no such file.

    Example:

    >>> path = keras_vit.converters.save(keras_vit.zoo.load("digits"), "digits.npz", format="google")
    >>> keras_vit.converters.read_config(path).num_layers
    4
    """
    file = find_weights(path)
    if not is_keras_file(file):
        hints: dict[str, Any] = {"num_heads": num_heads, "wanted_size": image_size}
        with open_checkpoint(file, facts=to_facts(config), format=format, **hints) as checkpoint:
            return checkpoint.written
    check_keras_facts(config=config, format=format)
    with keras_errors(file):
        return ViTConfig(**saved_arguments(read_keras_config(file))["config"])


def detect(path: str | os.PathLike[str]) -> str:
    """Return the name of the format of a file or folder.

    Args:
        path: the file, or a folder with the weights.

    Raises:
        CheckpointError: no known format has these tensor names; the message shows some of them.
        FileNotFoundError: there is no such file.

    Example:

    >>> path = keras_vit.converters.save(keras_vit.zoo.load("digits"), "digits.npz", format="big_vision")
    >>> keras_vit.converters.detect(path)
    'big_vision'
    """
    with open_files(find_weights(path)) as container:
        return recognise(container).format


def open_files(file: Path) -> Container:
    """Open a file of weights, with all others if it is one of a checkpoint in several files."""
    first, *others = _files_of(file)
    container = open_container(first)
    for other in others:
        container.join(open_container(other))
    return container


def _files_of(file: Path) -> list[Path]:
    """Return the files of a checkpoint: as many as the name of one says, and those that an index beside it names."""
    names = {file.name}
    if match := re.fullmatch(r"(.*-)\d{5}-of-(\d{5})(\..*)", file.name):
        start, count, end = match.groups()
        names |= {f"{start}{number:05}-of-{count}{end}" for number in range(1, int(count) + 1)}
    for index in file.parent.glob("*.index.json"):
        weight_map = config_json.read_object(index).get("weight_map")
        if isinstance(weight_map, dict) and file.name in (indexed := {str(name) for name in weight_map.values()}):
            names |= indexed
    if missing := sorted(names.difference(other.name for other in file.parent.iterdir())):
        raise CheckpointError(
            f"{file.parent} lacks {len(missing)} of the {len(names)} files of this checkpoint: {quoted(missing[0])}"
            f"{', ...' if missing[1:] else ''}. Download all of them again into one folder."
        )
    return [file.parent / name for name in sorted(names)]


def to_facts(config: ViTConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the facts about a file as a dict."""
    if not isinstance(config, ViTConfig | Mapping | None):
        raise ValueError(f"config must be a ViTConfig or a dict of its fields. Received: {config!r:.200}")
    return config.to_dict() if isinstance(config, ViTConfig) else dict(config or {})


def is_keras_file(path: Path) -> bool:
    """Return whether a file is one that `model.save("vit.keras")` writes, by its name."""
    return path.suffix.casefold() == ".keras"


def check_keras_facts(**facts: Any) -> None:
    """Raise a ValueError if facts about a .keras file are given."""
    if stated := [f"{name}={value!r:.200}" for name, value in facts.items() if value is not None]:
        raise ValueError(f"A .keras file states everything itself. Received: {', '.join(stated)}")


def saved_arguments(values: Mapping[str, Any], kind: str = "VisionTransformer") -> dict[str, Any]:
    """Return the arguments of `from_config` in a .keras file's config.json; of a dtype policy only the name is used."""
    if values.get("registered_name") != f"keras_vit>{kind}":
        raise CheckpointError(
            f"does not contain a {kind}. Received: {values.get('class_name')!r:.100}; keras.saving.load_model opens it"
        )
    return plain_arguments(values.get("config"), kind)


def plain_arguments(stored: Any, kind: str) -> dict[str, Any]:
    """Return what `get_config` of a class returned, with the name of the dtype policy instead of the policy."""
    match stored:
        case {"config": dict(), "dtype": {"config": {"name": str(policy)}}, "name": str()}:
            return {**stored, "dtype": policy}
    raise CheckpointError(f"has a config.json that is not a {kind}'s")


@contextlib.contextmanager
def keras_errors(path: Path) -> Iterator[None]:
    """Replace errors of what a .keras file describes by a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: does not describe a valid model: {str(error)[:500]}") from error


def check_size(container: Container, config: ViTConfig, *, is_size_given: bool = False) -> None:
    """Raise a CheckpointError if a model is much larger than its file: a few bytes can describe one of any size."""
    held = sum(math.prod(header.shape) for header in container.headers.values() if header.bytes)
    most = _WEIGHTS_RATIO * held
    patches = math.prod(config.grid)
    fixed = patches * config.hidden_size if config.position == "sincos2d" else 0
    if not is_size_given and (patches > _MAX_PATCHES or fixed > most + _SPARE_POSITIONS):
        raise CheckpointError(
            f"describes an image of {min(patches, 10**18)} patches, but holds {held} numbers; "
            f"at most {_MAX_PATCHES} patches are read"
        )
    num_layers = max(config.num_layers, sum(config.resnet.num_layers) if config.resnet else 0)
    needed = _least_weights(config) if num_layers <= MAX_LAYERS else most + 1
    if needed > most:
        raise CheckpointError(
            f"describes a model of at least {min(needed, 10**18)} weights in {min(num_layers, 10**18)} blocks, "
            f"but holds {held} numbers"
        )


def _least_weights(config: ViTConfig) -> int:
    """Return a number of weights that a model has at least: those of its largest matrices, without starting Keras."""
    width, resnet = config.hidden_size, config.resnet
    learned = math.prod(config.grid) if config.position == "learned" else 0
    block = 2 * width * config.mlp_dim + 2 * config.num_tokens * (config.tokens_mlp_dim or 0)
    if config.has_attention:
        block += 4 * width**2
    around = config.num_prefix_tokens + learned + config.num_classes + (config.representation_size or 0)
    if config.num_layers:
        around += math.prod(config.patch) * (resnet.channels if resnet else config.num_channels)
    units = zip(resnet.num_layers, resnet.widths, strict=True) if resnet else ()
    return config.num_layers * block + width * around + sum(9 * number * channels**2 for number, channels in units)


def recognise(container: Container, tower: str = "") -> Table:
    """Return the table of an open file's format, which is recognised by the names of the tensors."""
    tables = [load_table(name, tower) for name in formats(tower)]
    found = [table for table in tables if table.find_prefix(container.headers) is not None]
    if len(found) == 1:
        return found[0]
    names = sorted(container.headers)
    marks = {table.format: list(table.marks.present) for table in found or tables}
    raise CheckpointError(
        f"{container.path}: {'more than one' if found else 'no'} format is known by its tensors. "
        f"Received {len(names)} tensors: {str(names[:5])[:300]}. Looked for {str(marks)[:500]}; format= accepts "
        f"{formats(tower)} or a .toml table of your own. (Files of model.save_weights are read by model.load_weights.)"
    )


def find_weights(path: str | os.PathLike[str]) -> Path:
    """Return the file of weights at a path: the path itself, or the one such file in a folder."""
    path = Path(as_path(path, "path"))
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {str(path)!r}")
    if not path.is_dir():
        return path
    for pattern in _WEIGHTS:
        files = sorted(path.glob(pattern))
        if not set(files[1:]).issubset(_files_of(files[0]) if files else ()):
            names = [file.name for file in files]
            raise CheckpointError(f"{path} holds more than one file of weights: name one of them: {abbreviated(names)}")
        if files:
            return files[0]
    if (path / _CHECKPOINTS).is_dir():
        best = f", or name {path / _BEST}, its best model so far" if (path / _BEST).exists() else ""
        raise CheckpointError(
            f"{path} is a training run that has not finished: it has no {_WEIGHTS[0]} yet. Start the run again with "
            f"the same arguments to finish it{best}."
        )
    names = sorted(file.name for file in path.iterdir())[:10]
    raise CheckpointError(f"{path} holds none of {list(_WEIGHTS)}. It holds {names}")
