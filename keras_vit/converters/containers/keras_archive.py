"""Validate the zip archive that Keras' `model.save("vit.keras")` writes, before anything is built from it."""

import json
import zipfile
from pathlib import Path
from typing import Any

from keras_vit._util.schema import check_depth
from keras_vit.converters.containers.archive import open_archive
from keras_vit.converters.containers.base import MAX_JSON_BYTES, quoted, read_exactly, reading
from keras_vit.converters.containers.hdf5 import Hdf5Container
from keras_vit.errors import CheckpointError

_METADATA, _CONFIG, _WEIGHTS = "metadata.json", "config.json", "model.weights.h5"


def open_keras_archive(path: Path) -> tuple[dict[str, Any], Hdf5Container]:
    """Return the object in the config.json of a .keras file, and its model.weights.h5 as an open container."""
    with reading(path), path.open("rb", buffering=0) as file:
        archive, members = open_archive(file, path.stat().st_size, _check_names)
        places = {info.filename: (info, start) for info, start in members}
        weights, start = places[_WEIGHTS]
        if weights.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError("has compressed weights, which Keras does not write. Save the model again.")
        config = _read_config(archive, places[_CONFIG][0])
    return config, Hdf5Container(path, start=start, size=weights.file_size)


def _check_names(names: list[str]) -> None:
    missing = [name for name in (_CONFIG, _WEIGHTS) if name not in names]
    unknown = [name for name in names if name not in (_METADATA, _CONFIG, _WEIGHTS)]
    if missing or unknown:
        wrong = f"has no member {missing[0]!r}" if missing else f"has a member {quoted(unknown[0])}"
        raise CheckpointError(f"{wrong}; a .keras file of keras_vit has {[_METADATA, _CONFIG, _WEIGHTS]}.")


def _read_config(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> dict[str, Any]:
    if info.file_size > MAX_JSON_BYTES:
        raise CheckpointError(f"has a config.json of {info.file_size:,} bytes; the limit is {MAX_JSON_BYTES:,}.")
    with archive.open(info) as stream:
        text = read_exactly(stream, info.file_size)  # type: ignore[arg-type]  # typeshed says IO[bytes]
        values = check_depth(json.loads(text), _CONFIG)
    if not isinstance(values, dict):
        raise CheckpointError(f"has a config.json that holds a {type(values).__name__}, not an object.")
    return values
