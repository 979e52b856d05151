"""What a LiteRT file tells MediaPipe and Android's tools: how to prepare its image, and what its classes are called.

The format is TFLite Metadata (tensorflow/tflite-support, metadata_schema.fbs): a second flatbuffer inside of the file,
and the list of labels as a zip archive behind it. No package that writes it is needed: it is ten small tables, written
here by the numbers of their fields.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from typing import Any

from keras_vit.model.config import Preprocessing
from keras_vit.model.labels import single_lines

NAME = "TFLITE_METADATA"  # of the buffer that holds it
IDENTIFIER = b"M001"
PARSER = "1.0.0"  # the first that reads all of this
LABELS = "labels.txt"
# The schema's numbers: members of unions, and values of enumerations.
IMAGE, FEATURE = 2, 1
NORMALIZATION = 1
UNKNOWN, RGB, GRAYSCALE = 0, 1, 2
AXIS_LABELS = 2

Table = dict[int, Any]  # number of a field -> what it holds; an int is one byte


def metadata(
    *,
    dtype: str,
    preprocessing: Preprocessing,
    num_channels: int,
    outputs: Sequence[str],
    labelled: bool,
    name: str = "",
    description: str = "",
) -> bytes:
    """The content of the buffer TFLITE_METADATA.

    Args:
        dtype: of the file's input: "float32" for prepared images, "uint8" for pixels.
        preprocessing: of the model, which a float32 file leaves to its caller.
        num_channels: 3 for colour, 1 for grey; readers are told nothing of other numbers.
        outputs: names, the classes' first.
        labelled: whether `append_labels` follows.
        name: of the model.
        description: of the model.
    """
    mean, std = preprocessing.mean, preprocessing.std
    if dtype == "uint8":
        normalization = {0: [0.0], 1: [1.0]}
    else:
        normalization = {0: [255 * value for value in mean], 1: [255 * value for value in std]}
    colour = {0: {3: RGB, 1: GRAYSCALE}.get(num_channels, UNKNOWN)}
    image = {0: "image", 3: _content(IMAGE, colour), 4: [{0: NORMALIZATION, 1: normalization}]}
    image[5] = _range(dtype, preprocessing)
    results: list[Table] = [{0: output, 3: _content(FEATURE, {})} for output in outputs]
    if labelled:
        results[0][6] = [{0: LABELS, 1: "One class a line.", 2: AXIS_LABELS}]
    graph = {0: "main", 2: [image], 3: results}
    return _packed({0: name, 1: description, 3: [graph], 7: PARSER})


def append_labels(path: str | os.PathLike[str], labels: Sequence[str]) -> None:
    """Puts the labels behind a written file, as a zip archive that the metadata refer to.

    Args:
        path: of the .tflite file.
        labels: one for each class, in the order of the logits.
    """
    lines = "".join(f"{label}\n" for label in single_lines(labels))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(LABELS), lines.encode())  # ZipInfo's own date: the same file every time


def read_labels(path: str | os.PathLike[str]) -> list[str]:
    """The labels in a file, an empty list where it has none."""
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        return archive.read(LABELS).decode().splitlines() if LABELS in archive.namelist() else []


def _content(kind: int, properties: Table) -> Table:
    return {0: kind, 1: properties}


def _range(dtype: str, preprocessing: Preprocessing) -> Table:
    """The largest and smallest values of the input."""
    if dtype == "uint8":
        return {0: [255.0], 1: [0.0]}
    pairs = list(zip(preprocessing.mean, preprocessing.std, strict=True))
    return {0: [(1 - mean) / std for mean, std in pairs], 1: [-mean / std for mean, std in pairs]}


def _packed(root: Table) -> bytes:
    import flatbuffers

    builder = flatbuffers.Builder(1024)
    builder.Finish(_offset(builder, root), file_identifier=IDENTIFIER)
    return bytes(builder.Output())


def _offset(builder: Any, value: Any) -> int:
    """Writes a string, a table, a list of tables or a list of floats, and says where."""
    if isinstance(value, str):
        return int(builder.CreateString(value))
    if isinstance(value, dict):
        return _table(builder, value)
    floats = isinstance(value[0], float)
    rows = value if floats else [_offset(builder, row) for row in value]
    builder.StartVector(4, len(rows), 4)
    for row in reversed(rows):  # flatbuffers grow towards the front
        (builder.PrependFloat32 if floats else builder.PrependUOffsetTRelative)(row)
    return int(builder.EndVector())


def _table(builder: Any, table: Table) -> int:
    ready = {field: value if isinstance(value, int) else _offset(builder, value) for field, value in table.items()}
    builder.StartObject(max(table, default=-1) + 1)
    for field, value in ready.items():
        if isinstance(table[field], int):
            builder.PrependUint8Slot(field, value, 0)
        else:
            builder.PrependUOffsetTRelativeSlot(field, value, 0)
    return int(builder.EndObject())
