"""Quantize a float32 LiteRT file by the rules of a mode.

ai-edge-quantizer finds scales and integers and rewrites the graph. Two parts of its version 0.10 are replaced here:
- It merges the ranges of images by a moving average, which cuts off rare large values. Here they are true minima and
  maxima.
- Its files store weights behind the flatbuffer, and operators by their new codes alone; OpenVINO reads neither.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.text import install_command, suggestion
from keras_vit.export.litert.builder import fits_flatbuffer, schema
from keras_vit.export.quantization.calibration import FileGraph, check_images, ignore_memory_warning, observe
from keras_vit.export.quantization.modes import FLOAT, Mode, Rule

# Name of an activation -> {"min": ..., "max": ...}, as the quantizer reads it.
Ranges = dict[str, dict[str, np.ndarray]]

# A token with a huge channel has a far larger variance than the others, and a range for all would lose theirs. So the
# range of these tensors of a norm ends at `times` the median, and that token is normalized less.
CUT = {re.compile(r"norm\d?/(square|square/mean|variance|whole|safe)$"): 8.0}  # pattern of a tensor's name -> times
PART = "/large/sum"  # end of the name of a part of ".../whole", which has no more than this
# 16 bits have room for values beyond those of the calibration images. A norm's result needs none, and clips the token
# that is normalized less.
HEADROOM = 2.0
NORMALIZED = re.compile(r"norm\d?(/normal|/shifted)?$")
ALIGNMENT = 16  # bytes, of every weight; the schema requires it


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    mode: Mode,
    *,
    calibration: np.ndarray | None = None,
    progress: bool = False,
) -> None:
    """Write a float32 file again, with its operators quantized by the rules of a mode; not atomic.

    The weights lie inside of the flatbuffer, aligned, unless it would exceed 2 GB: LiteRT and OpenVINO run such files.
    `calibration` is for modes with `needs_calibration`: (count, height, width, channels) of the input's dtype.
    """
    package = _import_quantizer()
    content = np.memmap(source, np.uint8, "c")  # the quantizer takes a buffer that could be written
    graph = FileGraph.read(content)
    recipe = _recipe(package, graph, mode)
    ranges = None
    if mode.needs_calibration:
        ranges = _measure_ranges(source, graph, check_images(graph, calibration, mode.name), progress=progress)
        _add_headroom(ranges, graph, mode)
    quantizer = package.quantizer.Quantizer(content.data, recipe)
    with _status("Quantizing", show=progress), ignore_memory_warning():
        result = quantizer.quantize(ranges, enable_progress_bar=False, enable_progress_report=False)
    Path(target).write_bytes(_store_inline(result.quantized_model))


def _import_quantizer() -> Any:
    try:
        import ai_edge_quantizer
        from ai_edge_quantizer import algorithm_manager, qtyping, quantizer  # noqa: F401
    except ImportError:
        raise ImportError(f"Quantizing with calibration or to 4 bits needs `{install_command('litert')}`") from None
    return ai_edge_quantizer


def _recipe(package: Any, graph: FileGraph, mode: Mode) -> list[dict[str, Any]]:
    """Translate a mode's rules into a recipe of ai-edge-quantizer."""
    manager = package.recipe_manager.RecipeManager()
    check_names(graph, mode)
    for index, rule in enumerate(mode.rules):
        where = f"Mode {mode.name!r}, rules[{index}]"
        # The manager replaces a rule by a later one with the same expression; a comment makes each expression unique.
        expression = f"(?#{index})" + (rule.names or ".*")
        for operator in rule.operators:
            _add_rule(package, manager, rule, operator, expression, where)
    recipe: list[dict[str, Any]] = manager.get_quantization_recipe()
    return recipe


def check_names(graph: FileGraph, mode: Mode) -> None:
    """Raise a ValueError if a rule with names fits no operator of a file."""
    for index, rule in enumerate(mode.rules):
        if rule.names and not any(rule.fits(operator.kind, graph.name(operator)) for operator in graph.operators):
            raise ValueError(
                f"Mode {mode.name!r}, rules[{index}]: no operator of the file fits names = {rule.names!r} and "
                f"{list(rule.operators)}"
            )


def _add_rule(package: Any, manager: Any, rule: Rule, operator: str, expression: str, where: str) -> None:
    known = [kind.value for kind in package.qtyping.TFLOperationName]
    if operator not in known:
        raise ValueError(f"{where}: the quantizer has no operator {operator!r}; {suggestion(operator, known)}")
    kind = package.qtyping.TFLOperationName(operator)
    names = package.algorithm_manager.AlgorithmName
    method = names.MIN_MAX_UNIFORM_QUANT
    try:
        if not rule.quantizes:
            manager.add_quantization_config(expression, kind, algorithm_key=names.NO_QUANTIZE)
        elif rule.activations == FLOAT:
            manager.add_dynamic_config(expression, kind, rule.weights, algorithm_key=method)
        else:
            manager.add_static_config(expression, kind, rule.activations, rule.weights, algorithm_key=method)
    except ValueError as error:
        raise ValueError(f"{where}: the quantizer cannot do this to {operator}: {error}") from None


def _add_headroom(ranges: Ranges, graph: FileGraph, mode: Mode) -> None:
    """Widen the ranges of the tensors that operators of 16 bits compute."""
    for operator in graph.operators:
        name = graph.name(operator)
        rule = mode.rule(operator.kind, name)
        if rule is not None and rule.activations == 16 and name in ranges and not NORMALIZED.search(name):
            for bound in ranges[name].values():
                bound *= HEADROOM


def _measure_ranges(source: str | os.PathLike[str], graph: FileGraph, images: np.ndarray, *, progress: bool) -> Ranges:
    """Return the range of every activation of a float32 file, true but for `CUT`."""
    ranges: Ranges = {}

    def update(name: str, values: np.ndarray) -> None:
        least, most = values.min(keepdims=True), values.max(keepdims=True)
        for pattern, times in CUT.items():
            if pattern.search(name):
                most = np.minimum(most, times * np.median(values))
        known = ranges.setdefault(name, {"min": least, "max": most})
        known["min"], known["max"] = np.minimum(known["min"], least), np.maximum(known["max"], most)

    observe(source, graph, images, update, progress=progress)
    for name, part in ranges.items():
        if name.endswith(PART):
            part["max"] = np.minimum(part["max"], ranges[f"{name.removesuffix(PART)}/whole"]["max"])
    return ranges


@contextlib.contextmanager
def _status(text: str, *, show: bool) -> Iterator[None]:
    """Show a line on standard error and hide other output there, because ai-edge-quantizer always draws its own bar."""
    from rich.console import Console

    console = Console(file=sys.stderr)  # keeps the real one while it is redirected
    with console.status(text) if show else contextlib.nullcontext(), contextlib.redirect_stderr(io.StringIO()):
        yield


def _store_inline(content: Any) -> bytes:
    """Return a file with its weights inside of the flatbuffer, aligned; unchanged where that would be too large."""
    from ai_edge_litert.tools import flatbuffer_utils

    if not fits_flatbuffer(len(content)):
        return bytes(content)

    class AlignedBuffer(schema().BufferT):  # type: ignore[misc]
        data: Any

        def Pack(self, builder: Any) -> Any:  # noqa: N802
            if self.data is not None:
                self.data = np.frombuffer(self.data, np.uint8)  # anything else is packed byte by byte
                builder.Prep(ALIGNMENT, len(self.data))
            return super().Pack(builder)

    model = flatbuffer_utils.read_model_from_bytearray(content)
    for buffer in model.buffers:
        buffer.__class__ = AlignedBuffer
    for code in model.operatorCodes:
        # The package leaves the old field 0, which is ADD to readers that look there first, such as OpenVINO.
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))
