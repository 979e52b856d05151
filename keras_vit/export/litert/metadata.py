"""Write TFLite Metadata, which MediaPipe and Android's tools read: how to prepare the image, and the class names.

The format (tensorflow/tflite-support, metadata_schema.fbs) is a second flatbuffer inside of the file, and a zip archive
with the labels behind it. Its ten small tables are written here by the numbers of their fields. They have no field for
the resize: the archive also holds `preprocessing.json`, which the examples for Android and browsers read, and
`model.json` with the whole config, which `export.load` reads. The keys of the first are `image_size` and the fields of
`Preprocessing`; `bits` and `range` are null for models of bytes.
"""

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from keras_vit._util.text import warn
from keras_vit.model.config import Preprocessing, ViTConfig
from keras_vit.model.labels import single_lines

BUFFER_NAME = "TFLITE_METADATA"
IDENTIFIER = b"M001"
PARSER = "1.0.0"  # lowest version of the parser that reads all of this
LABELS = "labels.txt"
PREPROCESSING = "preprocessing.json"
MODEL = "model.json"
# Members of the schema's unions and enums.
FEATURE_PROPERTIES, IMAGE_PROPERTIES = 1, 2
NORMALIZATION_OPTIONS = 1
UNKNOWN, RGB, GRAYSCALE = 0, 1, 2  # ColorSpaceType
TENSOR_AXIS_LABELS = 2  # AssociatedFileType

Table = dict[int, Any]  # field number -> string, table, list of tables, list of floats, or an int of one byte


def pack_metadata(
    *,
    dtype: str,
    preprocessing: Preprocessing,
    num_channels: int,
    outputs: Sequence[str],
    has_labels: bool,
    name: str = "",
    description: str = "",
) -> bytes:
    """Build the content of the buffer TFLITE_METADATA; the classes are those of the first output."""
    import flatbuffers

    differs = any(len(set(values)) > 1 for values in (preprocessing.mean, preprocessing.std))
    if dtype == "float32" and differs:
        warn(
            "keras_vit: MediaPipe refuses files of prepared images whose mean or std differ by channel; other runtimes "
            'take them. For MediaPipe, export with input_dtype="uint8" (--input uint8): then the file normalizes the '
            "pixels. MediaPipe resizes images in its own way: examples/android has a class that does it as the model."
        )
    if dtype == "uint8":
        mean, std, smallest, largest = [0.0], [1.0], [0.0], [255.0]
    else:
        pairs = list(zip(preprocessing.mean, preprocessing.std, strict=True))
        mean = [255 * mean for mean, _ in pairs]
        std = [255 * std for _, std in pairs]
        largest = [(1 - mean) / std for mean, std in pairs]
        smallest = [-mean / std for mean, std in pairs]
    # TensorMetadata: 0 name, 3 content, 4 process_units, 5 stats, 6 associated_files
    image: Table = {
        0: "image",
        3: {0: IMAGE_PROPERTIES, 1: {0: {3: RGB, 1: GRAYSCALE}.get(num_channels, UNKNOWN)}},
        4: [{0: NORMALIZATION_OPTIONS, 1: {0: mean, 1: std}}],
        5: {0: largest, 1: smallest},
    }
    results: list[Table] = [{0: output, 3: {0: FEATURE_PROPERTIES, 1: {}}} for output in outputs]
    if has_labels:
        results[0][6] = [{0: LABELS, 1: "One class a line.", 2: TENSOR_AXIS_LABELS}]
    graph = {0: "main", 2: [image], 3: results}  # SubGraphMetadata: 0 name, 2 input, 3 output
    # ModelMetadata: 0 name, 1 description, 3 subgraph_metadata, 7 min_parser_version
    root = {0: name, 1: description, 3: [graph], 7: PARSER}
    builder = flatbuffers.Builder(1024)
    builder.Finish(_write_value(builder, root), file_identifier=IDENTIFIER)
    return bytes(builder.Output())


def archive_files(config: ViTConfig, dtype: str, source_size: Any, labels: Sequence[str] | None) -> dict[str, str]:
    """Make the texts that go into the archive, by name: labels in the order of the logits, and how to prepare images.

    A file with a source size takes pixels of that size only, and prepares them itself: callers are told nothing.
    """
    files = {}
    if labels:
        files[LABELS] = "".join(f"{label}\n" for label in single_lines(labels))
    if source_size is None:
        preprocessing = config.preprocessing
        if dtype == "uint8":  # pixels 0..255
            preprocessing = dataclasses.replace(preprocessing, mean=(0.0,), std=(1 / 255,))
        fields = {"image_size": config.size, **dataclasses.asdict(preprocessing)}
        files[PREPROCESSING] = json.dumps(fields, indent=1) + "\n"
    return files


def describe_model(config: ViTConfig, head: Any, labels: Any) -> str:
    """Describe a model as JSON: its config, that of its head for maps, and its labels if they are a list of zoo/labels.

    Other names of classes are in the file LABELS.
    """
    facts = {
        "config": config.to_dict() | {"labels": None},
        "head": None if head is None else head.to_dict() | {"labels": None},
        "labels": labels if isinstance(labels, str) else None,
    }
    return json.dumps(facts, indent=1) + "\n"


def read_files(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Read the files that `append_files` has appended, by name; {} if there are none."""
    if not zipfile.is_zipfile(path):
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in (LABELS, PREPROCESSING, MODEL) if name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path} has a damaged archive of facts at its end: {error}") from None


def append_files(path: str | os.PathLike[str], files: Mapping[str, str]) -> None:
    """Append texts, by name, to a written file, as the zip archive that its metadata expect."""
    if not files:
        return
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text.encode())  # a fixed date: equal bytes every time


def _write_value(builder: Any, value: Any) -> int:
    """Write a string, a table, a list of tables or a list of floats, and return its offset."""
    if isinstance(value, str):
        return int(builder.CreateString(value))
    if isinstance(value, dict):
        return _write_table(builder, value)
    is_floats = isinstance(value[0], float)
    items = value if is_floats else [_write_value(builder, item) for item in value]
    builder.StartVector(4, len(items), 4)
    for item in reversed(items):  # flatbuffers are written from the back to the front
        (builder.PrependFloat32 if is_floats else builder.PrependUOffsetTRelative)(item)
    return int(builder.EndVector())


def _write_table(builder: Any, table: Table) -> int:
    # A flatbuffer's tables do not nest: the values of a table are written before it.
    values = {
        field: value if isinstance(value, int) else _write_value(builder, value) for field, value in table.items()
    }
    builder.StartObject(max(table, default=-1) + 1)
    for field, value in values.items():
        if isinstance(table[field], int):
            builder.PrependUint8Slot(field, value, 0)
        else:
            builder.PrependUOffsetTRelativeSlot(field, value, 0)
    return int(builder.EndObject())
