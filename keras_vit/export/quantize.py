"""Quantize LiteRT files: ranges at run time or fixed, and weights rounded by their effect on the outputs (GPTQ).

litert-quantizer finds scales and integers and rewrites the graph. Three parts of its version 0.11 are replaced here:
- It merges the ranges of images by a moving average, which cuts off rare large values. Here they are true minima and
  maxima.
- It cuts off a bias that exceeds 32 bits, as of an output whose kernel is nearly zero. Here that output's scale grows.
- Its files store weights behind the flatbuffer, and operators by their new codes alone; OpenVINO reads neither.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from keras_vit._util.progress import track
from keras_vit._util.text import needs_extra, suggestion
from keras_vit.export.calibration import FileGraph, add_enlarged_crops, check_images, ignore_memory_warning, observe
from keras_vit.export.litert.builder import fits_flatbuffer, schema
from keras_vit.export.litert.operators import INT8, Integers, RoundedDense, Storage
from keras_vit.export.litert.plan import image_config
from keras_vit.export.modes import FLOAT_BITS, KERNEL_OPERATORS, Mode, Rule
from keras_vit.model.vision_transformer import VisionTransformer

# ---- GPTQ (arXiv 2210.17323)

DAMPING = 0.01  # share of the mean diagonal; section 3.3
BLOCK_COLUMNS = 64  # columns of a block, whose errors later blocks take at once; section 3.3, which uses 128
SWEEPS = 2  # over all columns, after which few integers change
SCALE_SHARES = np.linspace(1, 0.6, 9)  # of the largest weight, at which scales may end


def gptq(kernel: np.ndarray, hessian: np.ndarray, storage: Storage, damping: float = DAMPING) -> Integers:
    """Round a kernel; the columns that are not rounded yet compensate the error of each column (Algorithm 1).

    Columns with the largest inputs come first. Then kernels of few bits are rounded again column by column, each
    to make up for all others (QuantEase, arXiv 2309.01885).

    Args:
        kernel: float (outputs, inputs).
        hessian: x.T @ x of the layer's inputs, summed over many rows x, (inputs, inputs); the paper's H is twice that.
        storage: of the integers.
        damping: share of the mean diagonal that is added to the diagonal.
    """
    scales = _least_error_scales(kernel, np.diag(hessian), storage) if storage.bits < 8 else storage.scales(kernel)
    order = np.argsort(-np.diag(hessian), kind="stable")
    weights = kernel.T[order]  # (inputs, outputs): a column of the paper is a contiguous row here
    damped = _damped(hessian, damping)[np.ix_(order, order)]
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    integers = np.empty(kernel.shape, np.int8)
    for start in range(0, len(order), BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, len(order))
        errors = np.empty((stop - start, len(kernel)), np.float32)
        for i in range(start, stop):
            rounded = np.rint(weights[i] / scales).clip(-storage.largest, storage.largest)
            integers[:, order[i]] = rounded
            error = errors[i - start] = (weights[i] - rounded * scales) / factor[i, i]
            weights[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], error)
        weights[stop:] -= factor[start:stop, stop:].T @ errors
    if storage.bits < 8:
        _refine_rounding(integers, kernel, scales, _damped(hessian, damping), storage)
    return Integers(integers, scales)


def _refine_rounding(
    integers: np.ndarray, kernel: np.ndarray, scales: np.ndarray, hessian: np.ndarray, storage: Storage
) -> None:
    """Move each integer, in place, to where the squared error of the layer's outputs is least, the others fixed."""
    diagonal, hessian = np.diag(hessian), hessian.astype(np.float32)
    current = integers.T.astype(np.float32)
    pull = hessian @ (kernel.T - current * scales)
    for start in [*range(0, len(current), BLOCK_COLUMNS)] * SWEEPS:
        stop = min(start + BLOCK_COLUMNS, len(current))
        moved = np.zeros((stop - start, len(kernel)), np.float32)
        for i in range(start, stop):
            left = pull[i] - hessian[i, start:i] @ moved[: i - start]
            rounded = np.rint(current[i] + left / (diagonal[i] * scales)).clip(-storage.largest, storage.largest)
            moved[i - start] = (rounded - current[i]) * scales
            current[i] = rounded
        pull -= hessian[:, start:stop] @ moved
    integers[...] = current.T


def _least_error_scales(kernel: np.ndarray, squares: np.ndarray, storage: Storage) -> np.ndarray:
    """Choose for each output the scale with the least error, as if inputs were independent."""
    best, least = storage.scales(kernel), np.inf
    for share in SCALE_SHARES:
        scales = storage.scales(kernel, share)
        steps = scales[:, None]
        rounded = np.rint(kernel / steps).clip(-storage.largest, storage.largest) * steps
        errors = np.square(rounded - kernel) @ squares
        best, least = np.where(errors < least, scales, best), np.minimum(errors, least)
    return best


def _damped(hessian: np.ndarray, damping: float) -> np.ndarray:
    diagonal = np.diag(hessian)
    return hessian + np.diag(np.where(diagonal > 0, 0.0, 1.0) + damping * max(diagonal.mean(), 1e-30))


# ---- dense layers of a file

NUM_REPORTED = 5  # layers
# Least weight of all tokens that the head reads, together, as a share of the number of all tokens. An error in one of
# the others reaches the head through attention alone.
FINAL_TOKENS_WEIGHT = 0.25


class Tokens(NamedTuple):
    """The tokens of a model; the first `final` ones are all that the last block computes, as a class token."""

    total: int
    final: int

    @classmethod
    def from_model(cls, model: Any) -> Self:
        """Count the tokens of a model; other models than a VisionTransformer may read all tokens."""
        config = image_config(model)
        is_whole = isinstance(model, VisionTransformer)
        return cls(config.num_tokens, config.num_final_tokens if is_whole else config.num_tokens)

    def weights(self, shape: tuple[int, ...]) -> np.ndarray:
        """Weights of a layer's input rows in sums of squares, (rows, 1)."""
        weights = np.ones(shape[:-1], np.float32)
        if len(shape) == 3 and shape[1] == self.total:
            weights[:, : self.final] = max(1, FINAL_TOKENS_WEIGHT * self.total / self.final)
        return weights.reshape(-1, 1)


class _Sums(NamedTuple):
    """Sums over all rows x of a layer's inputs, with their weights."""

    rows: float
    sum: np.ndarray  # (inputs,)
    products: np.ndarray  # x.T @ x, (inputs, inputs)


def round_dense(
    source: str | os.PathLike[str], mode: Mode, images: Any, tokens: Tokens, *, progress: bool = False
) -> dict[str, RoundedDense]:
    """Round the kernels of dense layers and correct their biases; results by the layer's name.

    Kernels are rounded by GPTQ. The error that is left of the mean input goes to the bias.

    Args:
        source: a float32 file.
        mode: with rules for dense layers.
        images: calibration images, as the file takes them.
        tokens: of the model.
        progress: whether to show progress bars.
    """
    graph = FileGraph.read(np.memmap(source, np.uint8, "r"))
    images = check_images(graph, images, mode.name)
    dense = [operator for operator in graph.operators if operator.kind == "FULLY_CONNECTED"]
    layers = {
        layer: mode.storage_of(layer.kind, graph.name(layer)) for layer in dense if mode.rounds(graph.name(layer))
    }
    if any(storage.bits == 4 for storage in layers.values()):
        images = add_enlarged_crops(images)
    inputs = {graph.input_name(layer) for layer in layers}
    sums: dict[str, _Sums] = {}

    def update(name: str, values: np.ndarray) -> None:
        rows, weights = values.reshape(-1, values.shape[-1]), tokens.weights(values.shape)
        known, weighted = sums.get(name, _Sums(0, *np.zeros((2, 1), np.float32))), weights * rows
        count = known.rows + float(weights.sum())
        sums[name] = _Sums(count, known.sum + weighted.sum(axis=0), known.products + rows.T @ weighted)

    observe(source, graph, images, update, names=inputs, progress=progress)
    result = {}
    for layer, storage in track(layers.items(), "Rounding", show=progress):
        rows, total, products = sums[graph.input_name(layer)]
        mean = total / rows
        kernel, bias = graph.kernel(layer), graph.bias(layer)
        # Of fewer rows than inputs, as in a last block of one token, the products are known for these images alone: the
        # rounding would fit them, and no others.
        rounded = gptq(kernel, products, storage, damping=max(DAMPING, len(mean) / rows))
        error = kernel - rounded.floats()
        power, lost = (float(np.sum(weights @ products * weights)) for weights in (kernel, error))
        noise = lost / power if power > 0 and rows >= len(mean) else 0.0
        result[graph.name(layer)] = RoundedDense(rounded, bias + error @ mean, noise)
    return result


def rounding_lines(rounded: Mapping[str, RoundedDense]) -> tuple[str, ...]:
    """Name the layers whose outputs changed most, as lines of the report."""
    worst = sorted(rounded, key=lambda name: rounded[name].noise, reverse=True)[:NUM_REPORTED]
    shown = [f"{name} {-10 * np.log10(rounded[name].noise):.0f} dB" for name in worst if rounded[name].noise > 0]
    return (f"least SQNR of outputs by rounded kernels: {', '.join(shown)}",) if shown else ()


# ---- fixed ranges, by litert-quantizer

# Name of an activation -> {"min": ..., "max": ...}, as the quantizer reads it.
Ranges = dict[str, dict[str, np.ndarray]]

# A token with a huge channel has a far larger variance than the others, which a range for all would round to zero.
# So the range of these tensors of a norm ends at some times their median, and that token is normalized less.
LARGEST_TO_MEDIAN = 8.0
VARIANCES = re.compile(r"norm\d?/(square|square/mean|variance|whole|safe)$")  # names of these tensors
PARTIAL_SUM = "/large/sum"  # end of the name of a part of ".../whole", which is not larger
# 16 bits have room for values beyond those of the calibration images. A norm's result needs none, and clips the token
# that is normalized less.
INT16_RANGE_FACTOR = 2.0
NORM_RESULT = re.compile(r"norm\d?(/normal|/shifted)?$")
ALIGNMENT = 16  # bytes, of every weight; the schema requires it
LARGEST_BIAS = 2.0**30  # integer; half of what an accelerator's 32 bits hold, the other half is for the products


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
    with needs_extra("Quantizing with calibration or to 4 bits", "litert"):
        import litert_quantizer as package
        from litert_quantizer import algorithm_manager, qtyping, quantizer  # noqa: F401
    content = np.memmap(source, np.uint8, "c")  # the quantizer takes a buffer that could be written
    graph = FileGraph.read(content)
    recipe = _recipe(package, graph, mode)
    ranges = None
    if mode.needs_calibration:
        ranges = _measure_ranges(source, graph, check_images(graph, calibration, mode.name), progress=progress)
        _widen_int16_ranges(ranges, graph, mode)
    rewriter = package.quantizer.Quantizer(content.data, recipe)
    # NumPy warns of biases beyond 32 bits, which are replaced afterwards.
    with _status("Quantizing", show=progress), ignore_memory_warning(), np.errstate(invalid="ignore"):
        result = rewriter.quantize(ranges, enable_progress_bar=False, enable_progress_report=False)
    Path(target).write_bytes(_store_inline(result.quantized_model, graph))


def _recipe(package: Any, graph: FileGraph, mode: Mode) -> list[dict[str, Any]]:
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
        if (
            rule.names
            and not rule.last_third
            and not any(rule.fits(operator.kind, graph.name(operator)) for operator in graph.operators)
        ):
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
        elif rule.activations == FLOAT_BITS:
            manager.add_dynamic_config(expression, kind, rule.weights, algorithm_key=method)
        else:
            manager.add_static_config(expression, kind, rule.activations, rule.weights, algorithm_key=method)
    except ValueError as error:
        raise ValueError(f"{where}: the quantizer cannot do this to {operator}: {error}") from None


def _widen_int16_ranges(ranges: Ranges, graph: FileGraph, mode: Mode) -> None:
    """Widen the ranges of the tensors that operators of 16 bits compute."""
    for operator in graph.operators:
        name = graph.name(operator)
        rule = mode.rule(operator.kind, name)
        if rule is not None and rule.activations == 16 and name in ranges and not NORM_RESULT.search(name):
            for bound in ranges[name].values():
                bound *= INT16_RANGE_FACTOR


def _measure_ranges(source: str | os.PathLike[str], graph: FileGraph, images: np.ndarray, *, progress: bool) -> Ranges:
    """Measure the range of every activation of a float32 file, limited by `LARGEST_TO_MEDIAN`."""
    ranges: Ranges = {}

    def update(name: str, values: np.ndarray) -> None:
        least, most = values.min(keepdims=True), values.max(keepdims=True)
        if VARIANCES.search(name):
            most = np.minimum(most, LARGEST_TO_MEDIAN * np.median(values))
        known = ranges.setdefault(name, {"min": least, "max": most})
        known["min"], known["max"] = np.minimum(known["min"], least), np.maximum(known["max"], most)

    observe(source, graph, images, update, progress=progress)
    for name, part in ranges.items():
        if name.endswith(PARTIAL_SUM):
            part["max"] = np.minimum(part["max"], ranges[f"{name.removesuffix(PARTIAL_SUM)}/whole"]["max"])
    return ranges


@contextlib.contextmanager
def _status(text: str, *, show: bool) -> Iterator[None]:
    """Show a line on standard error and hide other output there, because litert-quantizer always draws its own bar."""
    from rich.console import Console

    console = Console(file=sys.stderr)  # keeps the real one while it is redirected
    with console.status(text) if show else contextlib.nullcontext(), contextlib.redirect_stderr(io.StringIO()):
        yield


def _keep_biases(model: Any, graph: FileGraph) -> None:
    """Enlarge the scales of outputs whose bias would exceed `LARGEST_BIAS`; the bias hides the kernel's error there.

    Args:
        model: the quantized file as objects of the schema, which are changed.
        graph: of the float32 file.
    """
    s, [part] = schema(), model.subgraphs
    kinds = [getattr(s.BuiltinOperator, kind) for kind in KERNEL_OPERATORS]
    rows = [row for row in part.operators if model.operatorCodes[row.opcodeIndex].builtinCode in kinds]
    layers = [layer for layer in graph.operators if layer.kind in KERNEL_OPERATORS]
    for layer, row in zip(layers, rows, strict=True):
        x, kernel, bias = (part.tensors[index] for index in row.inputs)
        if row.inputs[2] < 0 or x.type == s.TensorType.FLOAT32 or kernel.type != s.TensorType.INT8:
            continue
        floats, step, scales = graph.bias(layer), x.quantization.scale[0], np.asarray(kernel.quantization.scale)
        enlarged = np.maximum(scales, np.abs(floats) / (step * LARGEST_BIAS)).astype(np.float32)
        if (enlarged > scales).any():
            weights, biases = model.buffers[kernel.buffer], model.buffers[bias.buffer]
            integers = np.frombuffer(weights.data, np.int8).reshape(len(scales), -1)
            weights.data = np.rint(integers * (scales / enlarged)[:, None]).astype(np.int8).view(np.uint8).reshape(-1)
            kernel.quantization.scale, bias.quantization.scale = enlarged, step * enlarged
            dtype = np.int64 if bias.type == s.TensorType.INT64 else np.int32
            biases.data = np.rint(floats / (step * enlarged)).astype(dtype).view(np.uint8)


def _set_versions(model: Any) -> None:
    """Give operators whose kernels have a scale for each output the version that says so.

    The package keeps those of the float operators. Runtimes that know no such kernels run these files, and use the
    first scale for all outputs or return the biases alone; a version that they do not know they refuse.
    """
    s, [part] = schema(), model.subgraphs
    versions = {s.BuiltinOperator.FULLY_CONNECTED: INT8.dense_version}
    hybrid_versions = {s.BuiltinOperator.CONV_2D: INT8.convolution_version}
    for row in part.operators:
        code = model.operatorCodes[row.opcodeIndex]
        is_hybrid = part.tensors[row.inputs[0]].type == s.TensorType.FLOAT32
        wanted = (versions | (hybrid_versions if is_hybrid else {})).get(code.builtinCode, 0)
        scales = getattr(part.tensors[row.inputs[1]].quantization, "scale", None) if wanted > code.version else None
        if scales is not None and len(scales) > 1:
            codes = [(other.builtinCode, other.version) for other in model.operatorCodes]
            if (code.builtinCode, wanted) not in codes:
                model.operatorCodes.append(s.OperatorCodeT(0, None, wanted, code.builtinCode))
                codes.append((code.builtinCode, wanted))
            row.opcodeIndex = codes.index((code.builtinCode, wanted))


def _store_inline(content: Any, graph: FileGraph) -> bytes:
    """Move weights into the flatbuffer, aligned; leave the file unchanged where that would be too large."""
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
    _keep_biases(model, graph)
    _set_versions(model)
    for buffer in model.buffers:
        buffer.__class__ = AlignedBuffer
    for code in model.operatorCodes:
        # The package leaves the old field 0, which is ADD to readers that look there first, such as OpenVINO.
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))
