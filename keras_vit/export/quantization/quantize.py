"""Quantizes a written float32 file by the rules of a mode, and measures what such a file computes on the way.

ai-edge-quantizer finds scales and integers and rewrites the graph. What its version 0.10 does differently is done here:
it merges the ranges of images by a moving average, which cuts off rare large values (true minima and maxima were 13 dB
better in static int8); its GPTQ leaves out the Cholesky factor and the order of columns (with them, 7 dB better); and
its files have the weights behind the flatbuffer and operators by new codes alone, which OpenVINO does not read.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.text import install_command
from keras_vit.export.litert.builder import LARGEST, schema
from keras_vit.export.quantization.calibration import Graph, Operator, checked, no_memory_warning, run, track
from keras_vit.export.quantization.gptq import gptq
from keras_vit.export.quantization.modes import FLOAT, Mode, Rule, Smoothing

Statistics = dict[str, dict[str, np.ndarray]]  # name of a tensor -> what the quantizer wants to know of it

# What the quantizer is told; of "gptq" it sees kernels that are whole multiples of their scales already.
METHODS = {"min_max": "MIN_MAX_UNIFORM_QUANT", "octav": "OCTAV", "gptq": "MIN_MAX_UNIFORM_QUANT"}
VIEWS = {"RESHAPE", "SLICE", "STRIDED_SLICE", "TRANSPOSE"}  # between a norm and the dense layers that take it
ALIGNMENT = 16  # of every weight, as the schema asks
NORM = re.compile(r"block_\d+/norm[12]")


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    mode: Mode,
    *,
    calibration: np.ndarray | None = None,
    progress: bool = False,
) -> None:
    """Writes a float32 file once more, its operators quantized as a mode's rules say.

    The weights lie inside of the flatbuffer, aligned, unless it would exceed 2 GB. Every mode of the package runs in
    LiteRT and in OpenVINO.

    Args:
        source: a .tflite file of `emit`, float32.
        target: of the quantized file; the caller sees to it that an interrupted one is not taken for a whole one.
        mode: with rules.
        calibration: images as the file takes them, (count, height, width, channels) of its dtype; for a mode that
            is `calibrated`, otherwise not looked at.
        progress: whether to show bars.

    Raises:
        ValueError: for calibration images that are missing, of another shape or dtype, or not finite; for rules that
            fit no operator of the file or that the quantizer does not know.
        ImportError: without ai-edge-quantizer.
    """
    package = _package()
    content = np.memmap(source, np.uint8, "c")  # what is changed stays in memory
    graph = Graph.read(content)
    recipe = _recipe(package, graph, mode)
    compensated = dict(_compensated(graph, mode))
    ranges: Statistics | None = None
    if mode.calibrated:
        images = checked(graph, calibration, mode.name)
        wanted = {graph.tensors[operator.inputs[0]][0] for operator in compensated}
        ranges, squares = _statistics(source, graph, images, wanted, progress=progress)
        for operator, bits in track(compensated.items(), "Rounding", progress):
            kernel = graph.kernel(operator)
            kernel[:] = gptq(kernel, squares[graph.tensors[operator.inputs[0]][0]], bits)
        if all(rule.activations == FLOAT for rule in mode.rules):
            ranges = None
    quantizer = package.quantizer.Quantizer(content.data, recipe)
    # The package draws a bar of its own, asked or not.
    with _waiting(progress, "Quantizing"), contextlib.redirect_stderr(io.StringIO()), no_memory_warning():
        result = quantizer.quantize(ranges, enable_progress_bar=False, enable_progress_report=False)
    Path(target).write_bytes(_inline(result.quantized_model))


def smooth(
    source: str | os.PathLike[str], images: np.ndarray, smoothing: Smoothing, *, progress: bool = False
) -> dict[str, np.ndarray]:
    """Factors by which activations between LayerNorm and Dense are made easier to quantize (arXiv 2211.10438).

    A row of activations shares one scale, and so does a column of the kernel: a channel that is much larger than the
    others costs all of them digits. Both sides meet in between, x * f and kernel / f with
    f = max |kernel|**(1 - alpha) / max |x|**alpha in each channel, which changes nothing in exact numbers.

    Args:
        source: a float32 file of `emit`, without smoothing.
        images: as for `quantize`; what is large in them is taken for large.
        smoothing: where and how far.
        progress: whether to show a bar.

    Returns:
        "block_3/norm1" -> float64 factors (hidden_size,) of the normalised token, for the norms where the largest
        channel of the activations or of the kernel exceeds the median one `smoothing.threshold` times.

    Raises:
        ValueError: for images that do not fit.
        ImportError: without ai-edge-litert.
    """
    graph = Graph.read(np.memmap(source, np.uint8, "r"))
    kernels = dict(_kernels_after_norms(graph))
    largest: dict[str, np.ndarray] = {}

    def see(name: str, values: np.ndarray) -> None:
        largest[name] = np.maximum(largest.get(name, 0.0), np.abs(values).reshape(-1, values.shape[-1]).max(axis=0))

    run(source, graph, checked(graph, images, "smoothing"), see, names=set(kernels), progress=progress)
    factors = {}
    for name, kernel in kernels.items():
        activations, weights = (_not_zero(side) for side in (largest[name], np.abs(kernel).max(axis=0)))
        if max(side.max() / np.median(side) for side in (activations, weights)) > smoothing.threshold:
            factors[name] = weights ** (1 - smoothing.alpha) / activations**smoothing.alpha
    return factors


def _package() -> Any:
    try:
        import ai_edge_quantizer
        from ai_edge_quantizer import algorithm_manager, qtyping, quantizer  # noqa: F401
    except ImportError:
        raise ImportError(f"Quantizing with calibration or to 4 bits needs `{install_command('litert')}`") from None
    return ai_edge_quantizer


def _recipe(package: Any, graph: Graph, mode: Mode) -> list[dict[str, Any]]:
    """A mode's rules as ai-edge-quantizer writes them."""
    known = [kind.value for kind in package.qtyping.TFLOperationName]
    manager = package.recipe_manager.RecipeManager()
    for index, rule in enumerate(mode.rules):
        where = f"Mode {mode.name!r}, rules[{index}]"
        if rule.names and not any(_fits(rule, graph, operator) for operator in graph.operators):
            raise ValueError(f"{where}: no operator of the file fits names = {rule.names!r} and {list(rule.operators)}")
        # The number makes the expression a new one: rules with equal ones would not keep their order.
        expression = f"(?#{index})" + (rule.names or ".*")
        for operator in rule.operators:
            if operator not in known:
                nearest = difflib.get_close_matches(operator, known, n=1)
                offer = f"the nearest is {nearest[0]!r}" if nearest else f"it knows {known}"
                raise ValueError(f"{where}: the quantizer knows no operator {operator!r}; {offer}")
            if rule.method == "gptq" and operator != "FULLY_CONNECTED":
                raise ValueError(f"{where}: method 'gptq' is for FULLY_CONNECTED. Received: {operator!r}")
            try:
                _add(package, manager, rule, expression, package.qtyping.TFLOperationName(operator))
            except ValueError as error:
                raise ValueError(f"{where}: the quantizer cannot do this to {operator}: {error}") from None
    recipe: list[dict[str, Any]] = manager.get_quantization_recipe()
    return recipe


def _add(package: Any, manager: Any, rule: Rule, expression: str, operator: Any) -> None:
    names = package.algorithm_manager.AlgorithmName
    method = names[METHODS[rule.method]]
    if not rule.quantizes:
        manager.add_quantization_config(expression, operator, algorithm_key=names.NO_QUANTIZE)
    elif rule.activations == FLOAT:
        manager.add_dynamic_config(expression, operator, rule.weights, algorithm_key=method)
    else:
        manager.add_static_config(expression, operator, rule.activations, rule.weights, algorithm_key=method)


def _fits(rule: Rule, graph: Graph, operator: Operator) -> bool:
    kinds = {"*", operator.kind}
    return bool(kinds.intersection(rule.operators) and re.search(rule.names or "", graph.name(operator)))


def _compensated(graph: Graph, mode: Mode) -> Iterator[tuple[Operator, int]]:
    """The dense layers whose kernels GPTQ rounds, and to how many bits."""
    for operator in graph.operators:
        fitting = [rule for rule in mode.rules if _fits(rule, graph, operator)]
        if operator.kind == "FULLY_CONNECTED" and fitting and fitting[-1].method == "gptq":
            yield operator, fitting[-1].weights


def _statistics(
    source: str | os.PathLike[str], graph: Graph, images: np.ndarray, squared: set[str], *, progress: bool
) -> tuple[Statistics, dict[str, np.ndarray]]:
    """Of every activation the true range, and of some x' x over all their rows."""
    ranges: Statistics = {}
    squares: dict[str, np.ndarray] = {}

    def see(name: str, values: np.ndarray) -> None:
        least, most = (reduce(values, keepdims=True) for reduce in (np.min, np.max))
        known = ranges.setdefault(name, {"min": least, "max": most})
        known["min"], known["max"] = np.minimum(known["min"], least), np.maximum(known["max"], most)
        if name in squared:
            rows = values.reshape(-1, values.shape[-1])
            squares[name] = squares.get(name, 0) + rows.T @ rows

    run(source, graph, images, see, progress=progress)
    return ranges, squares


@contextlib.contextmanager
def _waiting(progress: bool, what: str) -> Iterator[None]:
    from rich.console import Console

    # A console that holds on to today's stderr, whatever is put in its place meanwhile.
    with Console(file=sys.stderr).status(what) if progress else contextlib.nullcontext():
        yield


def _kernels_after_norms(graph: Graph) -> Iterator[tuple[str, np.ndarray]]:
    """Of every block's norms the name, and the kernels (outputs, inputs) of the dense layers that take it, joined."""
    for norm in graph.operators:
        if not NORM.fullmatch(graph.name(norm)):
            continue
        reached = set(norm.outputs)
        kernels = []
        for operator in graph.operators:
            if operator.inputs[0] in reached and operator.kind in VIEWS:
                reached.update(operator.outputs)
            elif operator.inputs[0] in reached and operator.kind == "FULLY_CONNECTED":
                kernels.append(graph.kernel(operator))
        yield graph.name(norm), np.concatenate(kernels)


def _not_zero(values: np.ndarray) -> np.ndarray:
    """Float64; a channel that is never used counts as a very small one."""
    values = values.astype(np.float64)
    return np.maximum(values, 1e-5 * max(values.max(), 1e-30))


def _inline(content: Any) -> bytes:
    """A file with its weights inside of the flatbuffer, aligned; unchanged where that would be too large."""
    from ai_edge_litert.tools import flatbuffer_utils

    if len(content) + 2**24 > LARGEST:
        return bytes(content)

    class Aligned(schema().BufferT):  # type: ignore[misc]
        data: Any

        def Pack(self, builder: Any) -> Any:  # noqa: N802
            if self.data is not None:
                self.data = np.frombuffer(self.data, np.uint8)  # anything else is packed byte by byte
                builder.Prep(ALIGNMENT, len(self.data))
            return super().Pack(builder)

    model = flatbuffer_utils.read_model_from_bytearray(content)
    for buffer in model.buffers:
        buffer.__class__ = Aligned
    for code in model.operatorCodes:
        # The package leaves the old field 0, which is ADD to readers that look there first, such as OpenVINO.
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))
