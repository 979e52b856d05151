"""Validate the zip archive that Keras' `model.save("vit.keras")` writes, before anything is built from it."""

import io
import zipfile
from pathlib import Path
from typing import Any

from keras_vit._util.untrusted import MAX_JSON_BYTES, parse_object
from keras_vit.converters.containers.archive import data_start, open_archive
from keras_vit.converters.containers.base import quoted, reading
from keras_vit.converters.containers.hdf5 import Hdf5Container
from keras_vit.errors import CheckpointError

_METADATA, _CONFIG, _WEIGHTS = "metadata.json", "config.json", "model.weights.h5"


def open_keras_archive(path: Path) -> tuple[dict[str, Any], Hdf5Container]:
    """Return the object in the config.json of a .keras file, and its model.weights.h5 as an open container."""
    with reading(path), io.FileIO(path) as file:
        archive = open_archive(file, path.stat().st_size)
        _check_names([info.orig_filename for info in archive.infolist()])
        weights = archive.getinfo(_WEIGHTS)
        if weights.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError("has compressed weights, which Keras does not write. Save the model again.")
        start = data_start(archive, file, weights)
        config = _read_config(archive)
    return config, Hdf5Container(path, start=start, size=weights.file_size)


def _check_names(names: list[str]) -> None:
    missing = [name for name in (_CONFIG, _WEIGHTS) if name not in names]
    unknown = [name for name in names if name not in (_METADATA, _CONFIG, _WEIGHTS)]
    if missing or unknown:
        wrong = f"has no member {missing[0]!r}" if missing else f"has a member {quoted(unknown[0])}"
        raise CheckpointError(f"{wrong}; a .keras file of keras_vit has {[_METADATA, _CONFIG, _WEIGHTS]}.")


def _read_config(archive: zipfile.ZipFile) -> dict[str, Any]:
    size = archive.getinfo(_CONFIG).file_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"has a config.json of {size:,} bytes; the limit is {MAX_JSON_BYTES:,}.")
    try:
        return parse_object(archive.read(_CONFIG))
    except ValueError as error:
        raise CheckpointError(f"has a config.json that {error}") from error
