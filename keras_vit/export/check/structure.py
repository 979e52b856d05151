"""Check the operators, tensors and size of a LiteRT file before it is run."""

import contextlib
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from keras_vit.export.litert.builder import IDENTIFIER, schema
from keras_vit.export.litert.head import num_folded_weights
from keras_vit.export.quantization.modes import Mode

VARIABLE_OPERATORS = {"VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"}  # read weights that are not in the file
MAX_RANK = 4  # dimensions that GPUs and NPUs accept
WEIGHT_SLACK = 0.2  # a file may be larger by this share of its weights, for scales and lookup tables,
GRAPH_BYTES = 256 * 1024  # and by this much for its graph


@dataclass(frozen=True)
class Structure:
    """Kinds of operators of a file ("CUSTOM Name" if not builtin), most dimensions of a tensor, number of operators."""

    operators: frozenset[str]
    max_rank: int
    num_operators: int


def read_structure(path: str | os.PathLike[str]) -> Structure:
    """Read a .tflite file without its weights; raise a ValueError if it is another kind of file, or damaged."""
    size = Path(path).stat().st_size
    if size < 8:
        raise ValueError(f"{path} is not a LiteRT file: it has {size} bytes")
    litert_schema = schema()
    with Path(path).open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if content[4:8] != IDENTIFIER:
        raise ValueError(f"{path} is not a LiteRT file: it lacks the identifier {IDENTIFIER.decode()}")
    with damage_errors(path):
        return _parse(litert_schema, content)


@contextlib.contextmanager
def damage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Replace the errors of parsing a damaged file by a ValueError that names it."""
    try:
        yield
    except (struct.error, AttributeError, LookupError, OverflowError, TypeError, ValueError):
        raise ValueError(f"{path} is not a LiteRT file that can be read: it is cut off or damaged") from None


def _parse(litert_schema: Any, content: memoryview) -> Structure:
    model = litert_schema.Model.GetRootAs(content)
    builtins = vars(litert_schema.BuiltinOperator).items()
    names = {number: name for name, number in builtins if isinstance(number, int)}
    operators = set()
    for code in map(model.OperatorCodes, range(model.OperatorCodesLength())):
        custom = code.CustomCode()
        number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())  # old files have the second alone
        operators.add(f"CUSTOM {custom.decode()}" if custom else names.get(number, f"number {number}"))
    graphs = [model.Subgraphs(index) for index in range(model.SubgraphsLength())]
    ranks = [graph.Tensors(index).ShapeLength() for graph in graphs for index in range(graph.TensorsLength())]
    num_operators = sum(graph.OperatorsLength() for graph in graphs)
    return Structure(frozenset(operators), max(ranks, default=0), num_operators)


def find_problems(path: Path) -> list[str]:
    """Return one phrase for each reason why a .tflite file does not run on every device; raise as `read_structure`."""
    structure = read_structure(path)
    custom = sorted(name for name in structure.operators if name.startswith("CUSTOM"))
    variables = sorted(structure.operators & VARIABLE_OPERATORS)
    problems = []
    if custom:
        problems.append(f"needs operators that are not LiteRT's own ({', '.join(custom)})")
    if variables:
        problems.append(f"reads variables that are not in it ({', '.join(variables)}): without weights it computes NaN")
    if structure.max_rank > MAX_RANK:
        problems.append(f"has tensors of {structure.max_rank} dimensions, where many devices take up to {MAX_RANK}")
    return problems


def expected_bytes(model: keras.Model, mode: Mode | None, size: tuple[int, int]) -> tuple[int, int]:
    """Return the least and the most bytes that a file of the model may have, without labels.

    Some weights beside kernels are folded into the kernels, so the lower bound counts kernels alone. `size` is (height,
    width) of the file's input.
    """
    least_bits, most_bits = (4, 32) if mode is None else mode.bits
    kernels = sum(math.prod(v.shape) for v in model.variables if v.path.endswith("kernel"))
    others = sum(math.prod(v.shape) for v in model.variables) - kernels
    if size != tuple(model.input_shape[1:3]):  # matrices that resize
        others += sum(math.prod(sides) for sides in zip(size, model.input_shape[1:3], strict=True))
    least = (1 - WEIGHT_SLACK / 2) * (kernels - num_folded_weights(model)) * least_bits / 8
    most = (1 + WEIGHT_SLACK) * (kernels * most_bits / 8 + 4 * others) + GRAPH_BYTES
    return int(least), int(most)


def find_size_problems(path: Path, model: keras.Model, mode: Mode | None, size: tuple[int, int]) -> list[str]:
    """Return one phrase if the file's size is not within `expected_bytes`, else none."""
    least, most = expected_bytes(model, mode, size)
    found = path.stat().st_size - _archive_bytes(path)
    if least <= found <= most:
        return []
    return [f"has {found:,} bytes, expected {least:,} to {most:,} for the model's weights"]


def _archive_bytes(path: Path) -> int:
    """Return the size of the zip archive at the end of a file, which holds labels of any length; 0 without one."""
    if not zipfile.is_zipfile(path):
        return 0
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            return size - min((entry.header_offset for entry in archive.infolist()), default=size)
    except zipfile.BadZipFile:  # weights that look like the end of an archive
        return 0
