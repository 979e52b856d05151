"""Limits and first checks for files from the internet, shared by downloads and by readers of checkpoints."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from keras_vit._util.schema import check_depth

# The most bytes a file may use to name its tensors: enough for 100,000. Parsed, they take twenty times that in memory.
MAX_DIRECTORY_BYTES = 16 << 20
MAX_JSON_BYTES = 10 << 20  # of a config.json; an id2label of 21,843 classes takes 1.5 MB
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise a ValueError if it is not valid or nested too deeply."""
    try:
        return check_depth(json.loads(text), "it")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {str(error)[:200]}") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; raise a ValueError if it is something else."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"is a {type(value).__name__}, not an object")
    return value


def open_safetensors(path: Path) -> safe_open:
    """Open a .safetensors file for a `with` statement; raise a ValueError if its header is not valid."""
    try:
        # The default back end maps the file into memory: the process crashes if another one cuts the file short.
        return safe_open(path, "numpy", backend="pread")
    except SafetensorError as error:
        raise ValueError(f"has no valid safetensors header: {str(error)[:200]}") from error


def hdf5_end(start: bytes) -> int:
    """Return the length that an HDF5 file states in its first 48 bytes (superblocks of versions 0 to 3)."""
    if not start.startswith(HDF5_MAGIC) or len(start) < 48:
        raise ValueError("is not an HDF5 file")
    place = 40 if start[8] in (0, 1) else 28
    return int.from_bytes(start[place : place + 8], "little")
