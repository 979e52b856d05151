"""Compare the size of a .tflite file with its model's weights."""

import math
import zipfile
from pathlib import Path

import keras

from keras_vit.export.litert.head import num_folded_weights
from keras_vit.export.modes import Mode
from keras_vit.model.cost import num_bias_constants

WEIGHT_SLACK = 0.2  # a file may be larger by this share of its weights, for scales and lookup tables,
GRAPH_BYTES = 256 * 1024  # and by this much for its graph


def expected_bytes(model: keras.Model, mode: Mode | None, size: tuple[int, int]) -> tuple[int, int]:
    """Compute the least and the most bytes that a file of the model may have, without labels.

    Some weights beside kernels are folded into the kernels, so the lower bound counts kernels alone. `size` is (height,
    width) of the file's input.
    """
    least_bits, most_bits = (4, 32) if mode is None else mode.kernel_bits
    kernels = sum(math.prod(v.shape) for v in model.variables if v.path.endswith("kernel"))
    others = sum(math.prod(v.shape) for v in model.variables) - kernels
    others += sum(num_bias_constants(layer) for layer in model._flatten_layers())
    if size != tuple(model.input_shape[1:3]):  # matrices that resize
        others += sum(math.prod(sides) for sides in zip(size, model.input_shape[1:3], strict=True))
    least = (1 - WEIGHT_SLACK / 2) * (kernels - num_folded_weights(model)) * least_bits / 8
    most = (1 + WEIGHT_SLACK) * (kernels * most_bits / 8 + 4 * others) + GRAPH_BYTES
    return int(least), int(most)


def find_size_problems(path: Path, model: keras.Model, mode: Mode | None, size: tuple[int, int]) -> list[str]:
    """Compare the file's size with `expected_bytes`; one phrase if it is outside, else none."""
    least, most = expected_bytes(model, mode, size)
    found = path.stat().st_size - _archive_bytes(path)
    if least <= found <= most:
        return []
    return [f"has {found:,} bytes, expected {least:,} to {most:,} for the model's weights"]


def _archive_bytes(path: Path) -> int:
    """Size of the zip archive of labels at the end of a file; 0 without one."""
    if not zipfile.is_zipfile(path):
        return 0
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            return size - min((entry.header_offset for entry in archive.infolist()), default=size)
    except zipfile.BadZipFile:  # weights that look like the end of an archive
        return 0
