"""What a LiteRT file is made of, read before it is run: operators, dimensions, size."""

from __future__ import annotations

import math
import mmap
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from keras_vit.export.litert.builder import IDENTIFIER, schema
from keras_vit.export.quantization.modes import Mode

VARIABLES = {"VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"}  # weights that are not in the file
MOST_RANK = 4  # dimensions: GPUs and NPUs take no more
# A file may be this share of its weights larger, for scales and lookup tables, and this much for its graph.
SLACK, GRAPH_BYTES = 0.2, 256 * 1024


@dataclass(frozen=True)
class Anatomy:
    """What a LiteRT file is made of.

    Attributes:
        operators: names of the operators, "CUSTOM Name" for those that are not builtin.
        rank: most dimensions that a tensor has.
    """

    operators: frozenset[str]
    rank: int


def anatomy(path: str | os.PathLike[str]) -> Anatomy:
    """Reads a .tflite file's operators and tensors; its weights are not touched.

    Raises:
        ValueError: where it is no LiteRT file.
        ImportError: without ai-edge-litert.
    """
    if Path(path).stat().st_size < 8:
        raise ValueError(f"{path} is no LiteRT file: it has {Path(path).stat().st_size} bytes")
    s = schema()
    with Path(path).open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if content[4:8] != IDENTIFIER:
        raise ValueError(f"{path} is no LiteRT file: it lacks the mark {IDENTIFIER.decode()}")
    try:
        return _read(s, content)
    except (struct.error, IndexError, OverflowError, UnicodeDecodeError):
        raise ValueError(f"{path} is no LiteRT file that can be read: it is cut off or damaged") from None


def _read(s: Any, content: memoryview) -> Anatomy:
    model = s.Model.GetRootAs(content)
    names = {number: name for name, number in vars(s.BuiltinOperator).items() if isinstance(number, int)}
    operators = set()
    for code in map(model.OperatorCodes, range(model.OperatorCodesLength())):
        custom = code.CustomCode()
        number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())  # old files have the second alone
        operators.add(f"CUSTOM {custom.decode()}" if custom else names.get(number, f"number {number}"))
    graphs = map(model.Subgraphs, range(model.SubgraphsLength()))
    ranks = [graph.Tensors(place).ShapeLength() for graph in graphs for place in range(graph.TensorsLength())]
    return Anatomy(frozenset(operators), max(ranks, default=0))


def misfits(path: Path) -> list[str]:
    """What would not run on every device, and weights that stayed outside; empty where all is well.

    Raises:
        ValueError, ImportError: as `anatomy`.
    """
    made = anatomy(path)
    foreign = sorted(name for name in made.operators if name.startswith("CUSTOM"))
    variables = sorted(made.operators & VARIABLES)
    found = []
    if foreign:
        found.append(f"needs operators that are not LiteRT's own ({', '.join(foreign)})")
    if variables:
        found.append(f"reads variables that are not in it ({', '.join(variables)}): without weights it computes NaN")
    if made.rank > MOST_RANK:
        found.append(f"has tensors of {made.rank} dimensions, where many devices take up to {MOST_RANK}")
    return found


def expected_bytes(model: keras.Model, mode: Mode | None, size: tuple[int, int]) -> tuple[int, int]:
    """The least and the most bytes that a file of the model should have, without labels.

    Kernels are kept in the mode's bits, all else as float32; some of the latter is folded away, so that the least
    counts kernels alone.

    Args:
        model: of the file.
        mode: of the file; None allows from 4 to 32 bits.
        size: (height, width) that the file takes: where it is not the model's, the file has matrices that resize.
    """
    few, many = (4, 32) if mode is None else mode.bits
    kernels = sum(math.prod(v.shape) for v in model.variables if v.path.endswith("kernel"))
    others = sum(math.prod(v.shape) for v in model.variables) - kernels
    config: Any = getattr(model, "config", None)
    if getattr(config, "classifier", None) == "map":
        kernels -= 2 * config.hidden_size**2  # the probe asks the same of every image: its keys are folded away
    if size != tuple(model.input_shape[1:3]):
        others += sum(math.prod(sides) for sides in zip(size, model.input_shape[1:3], strict=True))
    if getattr(config, "position", None) == "relative":
        others += config.num_layers * config.num_heads * (math.prod(config.grid) + config.num_prefix_tokens) ** 2
    least = (1 - SLACK / 2) * kernels * few / 8
    most = (1 + SLACK) * (kernels * many / 8 + 4 * others) + GRAPH_BYTES
    return int(least), int(most)


def archive_bytes(path: Path) -> int:
    """How many bytes of a file are those of the archive behind it, in which labels lie: names may be of any length."""
    if not zipfile.is_zipfile(path):
        return 0
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            return size - min((entry.header_offset for entry in archive.infolist()), default=size)
    except zipfile.BadZipFile:  # weights that happen to look like its end
        return 0
