"""Run exported files: SavedModels, and .tflite files in LiteRT's interpreter, which needs no Keras.

LiteRT does not check all that a file states. A cut-off file is refused here; other damage can end the process.
"""

import contextlib
import functools
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.checks import as_path, check_counts
from keras_vit._util.text import needs_extra
from keras_vit.export.litert.builder import IDENTIFIER, MAX_RANK, schema
from keras_vit.model.task import MAIN_OUTPUTS

MAX_REASON = 300  # characters of what LiteRT says about a file
VARIABLE_OPERATORS = {"VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"}  # read weights that are not in the file

FLOATS = ("float16", "float32", "float64", "bfloat16")
BATCH = 8  # images in a call where a file takes any number
OUTPUTS = (*MAIN_OUTPUTS, "attention")
IMAGE_SIGNATURES = ("float_images", "serving_default")  # of a SavedModel, that may take images
FILE_SIGNATURES = ("serving_default",)  # that may take image files

Outputs = dict[str, np.ndarray]  # by name
Runner = Callable[[np.ndarray], np.ndarray]


# ---- structure


@dataclass(frozen=True)
class Structure:
    """Operators and stored number formats of a LiteRT file.

    Args:
        operators: kinds of operators, "CUSTOM Name" if not builtin.
        max_rank: most dimensions of a tensor.
        num_operators: number of operators.
        storage: name of the mode in converters/exports whose files store weights and activations as this one does.
    """

    operators: frozenset[str]
    max_rank: int
    num_operators: int
    storage: str = "none"


def read_structure(path: str | os.PathLike[str]) -> Structure:
    """Read a .tflite file without its weights; raise a ValueError if it is another kind of file, or cut off."""
    size = Path(path).stat().st_size
    if size < 8:
        raise ValueError(f"{path} is not a LiteRT file: it has {size} bytes")
    litert_schema = schema()
    with Path(path).open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if content[4:8] != IDENTIFIER:
        raise ValueError(f"{path} is not a LiteRT file: it lacks the identifier {IDENTIFIER.decode()}")
    try:
        return _parse(litert_schema, content)
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
    tensors = [graph.Tensors(index) for graph in graphs for index in range(graph.TensorsLength())]
    sizes = [_buffer_bytes(model.Buffers(index), len(content)) for index in range(model.BuffersLength())]
    return Structure(
        frozenset(operators),
        max((tensor.ShapeLength() for tensor in tensors), default=0),
        sum(graph.OperatorsLength() for graph in graphs),
        _storage(litert_schema.TensorType, tensors, sizes),
    )


def _buffer_bytes(buffer: Any, file_bytes: int) -> int:
    """Size of a buffer in bytes; raise a ValueError if the file ends before the buffer."""
    field = buffer._tab.Offset(4)  # of `data` in the schema's table Buffer
    size = buffer.DataLength() if field else buffer.Size()
    start = buffer._tab.Vector(field) if field else buffer.Offset()
    if start + size > file_bytes:
        raise ValueError
    return int(size)


def _storage(types: Any, tensors: list[Any], buffer_bytes: list[int]) -> str:
    """Find the mode of a file by its tensors: those with content are weights, the others activations."""
    floats: set[int] = set()
    weights: set[int] = set()
    activations: set[int] = set()
    for tensor in tensors:
        quantization = tensor.Quantization()
        # Kernels in blocks have their scales in another tensor, which `details` name.
        if quantization is None or not (quantization.ScaleLength() or quantization.DetailsType()):
            floats.add(tensor.Type())
        else:
            (weights if buffer_bytes[tensor.Buffer()] else activations).add(tensor.Type())
    if weights & {types.INT4, types.INT2}:
        return "int4"
    if activations:
        return "int16x8" if types.INT16 in activations else "int8"
    if weights:
        return "dynamic"
    return "float16" if types.FLOAT16 in floats else "none"


def find_problems(structure: Structure) -> list[str]:
    """List reasons why a .tflite file does not run on every device."""
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


# ---- running


@dataclass(frozen=True)
class ExportedModel:
    """A loaded exported file."""

    call: Callable[[np.ndarray], Outputs]  # of images (batch, height, width, channels)
    shape: tuple[int | None, ...]  # (height, width, channels) of an image; None for any number
    batch: int | None  # images in a call; None for any number
    dtype: str  # "float32" for prepared images, even if the file quantizes them; "uint8" for pixels
    threads: int | None  # None if the runtime chooses
    input_name: str = "image"
    call_files: Callable[[Any], Outputs] | None = None  # takes JPEG and PNG files as strings (batch,)
    is_bfloat16: bool = False  # whether weights are bfloat16
    output_shapes: dict[str, tuple[int | None, ...]] = field(default_factory=dict)  # of a .tflite file, by name
    call_builtin: Callable[[np.ndarray], Outputs] | None = None  # as `call`, by LiteRT's kernels without XNNPACK

    def check_images(self, images: np.ndarray) -> None:
        """Raise a ValueError for images of another type or shape than the file takes, or for none."""
        types = ("uint8",) if self.dtype == "uint8" else FLOATS
        sides, wanted = images.shape[1:], ", ".join(str(side or "any") for side in self.shape)
        if (
            images.dtype.name not in types
            or len(sides) != len(self.shape)
            or any(side not in (None, found) for side, found in zip(self.shape, sides, strict=True))
        ):
            kind = "uint8 pixels" if self.dtype == "uint8" else "prepared images, floats,"
            raise ValueError(
                f"The file takes {kind} of shape (batch, {wanted}). Received: {images.dtype} {images.shape}"
            )
        if not len(images):
            raise ValueError(f"The file needs at least one image. Received: an array of shape {images.shape}")

    def batches(self, images: np.ndarray, size: int = BATCH) -> Iterator[tuple[np.ndarray, int]]:
        """Yield batches of the file's size, else of `size`, each with the number of its images without padding."""
        size = self.batch or size
        for start in range(0, len(images), size):
            part = images[start : start + size]
            missing = size - len(part) if self.batch else 0
            yield np.concatenate([part, part[-1:].repeat(missing, axis=0)]) if missing else part, len(part)


def load_exported(path: str | os.PathLike[str], threads: int = 2) -> ExportedModel:
    """Load a SavedModel's folder or a .tflite file; arguments and errors are those of `runner`."""
    path = Path(as_path(path, "path"))
    if not path.exists():
        raise FileNotFoundError(f"There is no exported file {path}")
    if not path.is_dir() and not path.is_file():  # reading a device or a pipe might never end
        raise ValueError(f"{path} is neither a SavedModel's folder nor a regular file")
    return _load_saved_model(path) if path.is_dir() else _load_litert(path, threads)


def runner(path: str | os.PathLike[str], threads: int = 2) -> Runner:
    """Load an exported file as a function of images.

    Args:
        path: a SavedModel's folder or a .tflite file.
        threads: number of threads for a .tflite file.

    Returns:
        A function from prepared images, float32 (batch, height, width, channels), or uint8 pixels if the file takes
        those, to (batch, ...): logits, else probabilities or features. It raises a ValueError for other images.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: the file cannot be loaded or run. LiteRT does not check all that a .tflite file states: do not run
            files of strangers.
        ImportError: for a .tflite file without ai-edge-litert.

    Example:
        >>> from keras_vit import digits
        >>> model = keras_vit.zoo.load("digits")
        >>> report = keras_vit.export.tflite(model, "digits.tflite")
        >>> run = keras_vit.export.runner("digits.tflite")
        >>> run(model.preprocess(digits.load().test_images[:3])).shape
        (3, 10)
    """
    file = load_exported(path, threads)

    def run(images: np.ndarray) -> np.ndarray:
        file.check_images(images := np.asarray(images))
        batches = file.batches(images, len(images))
        return np.concatenate([main_output(file.call(batch))[:count] for batch, count in batches])

    return run


def main_name(outputs: Mapping[str, Any]) -> str:
    """Name of the main output: the first of `MAIN_OUTPUTS` that exists, else the first output."""
    return next(iter([*(name for name in MAIN_OUTPUTS if name in outputs), *outputs]))


def main_output(outputs: Outputs) -> np.ndarray:
    """Main output: logits, else probabilities, features or the first output."""
    return outputs[main_name(outputs)]


def _load_saved_model(path: Path) -> ExportedModel:
    import tensorflow as tf

    try:
        loaded = tf.saved_model.load(str(path))
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise ValueError(f"{path} is not a SavedModel that can be loaded: {str(error).splitlines()[0]}") from None
    images = _find_signature(loaded, IMAGE_SIGNATURES, rank=4, is_text=False)
    if images is None:
        raise ValueError(
            f"{path} has no signature {' or '.join(map(repr, IMAGE_SIGNATURES))} that takes one batch of images. "
            f"Received: {sorted(loaded.signatures)}"
        )
    files = _find_signature(loaded, FILE_SIGNATURES, rank=1, is_text=True)
    call, spec = images
    batch, *shape = spec.shape
    variables = [variable for signature in loaded.signatures.values() for variable in signature.variables]
    return ExportedModel(
        call,
        tuple(shape),
        batch,
        spec.dtype.name,
        threads=None,
        call_files=files[0] if files else None,
        is_bfloat16=any(variable.dtype == tf.bfloat16 for variable in variables),
    )


def _find_signature(
    loaded: Any, names: tuple[str, ...], *, rank: int, is_text: bool
) -> tuple[Callable[[Any], Outputs], Any] | None:
    """Find the first signature with one input of this rank: a function, and the input's tf.TensorSpec."""
    for name in names:
        signature = loaded.signatures.get(name)
        if signature is None or len((signature.structured_input_signature or ((), {}))[1]) != 1:
            continue
        [(argument, spec)] = signature.structured_input_signature[1].items()
        if spec.shape.rank == rank and (spec.dtype.name == "string") == is_text:
            return functools.partial(_call_signature, loaded, name, argument, spec), spec
    return None


def _call_signature(loaded: Any, name: str, argument: str, spec: Any, batch: Any) -> Outputs:
    """Run a signature; `loaded` keeps its variables alive."""
    import tensorflow as tf

    outputs = loaded.signatures[name](**{argument: tf.constant(batch, spec.dtype)})
    values = {key: output for key, output in outputs.items() if output.dtype != tf.string}  # not names of classes
    known = [key for key in OUTPUTS if key in values] or list(outputs)  # other exporters choose other names
    return {key: outputs[key].numpy() for key in known}


def _load_litert(path: Path, threads: int) -> ExportedModel:
    check_counts(threads=threads)
    with needs_extra("Running a .tflite file", "litert"):
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

    @functools.cache
    def start(resolver: OpResolverType) -> Any:
        try:
            interpreter = Interpreter(model_path=str(path), num_threads=threads, experimental_op_resolver_type=resolver)
        except ValueError as error:
            raise ValueError(f"{path} is not a LiteRT file that can be run: {str(error)[:MAX_REASON]}") from None
        with _name_file_in_errors(path):
            interpreter.allocate_tensors()
            signatures = list(interpreter.get_signature_list())
            if not signatures:
                raise ValueError(f"{path} has no signature, which names the inputs and outputs")
            return interpreter.get_signature_runner(signatures[0])

    read_structure(path)
    run = start(OpResolverType.AUTO)
    arguments, results = run.get_input_details(), run.get_output_details()
    if len(arguments) != 1:
        raise ValueError(f"{path} has inputs {list(arguments)!r:.200}; expected one, the image")
    [(name, image)] = arguments.items()
    batch, *shape = _sides(image["shape_signature"])
    dtype = "float32" if image["quantization"][0] else np.dtype(image["dtype"]).name

    def call_with(run: Any, images: np.ndarray) -> Outputs:
        with _name_file_in_errors(path):
            outputs = run(**{name: _quantize_input(images.astype(dtype, copy=False), image)})
        return {key: _dequantize_output(values, results[key]) for key, values in outputs.items()}

    return ExportedModel(
        functools.partial(call_with, run),
        tuple(shape),
        batch,
        dtype,
        threads,
        name,
        output_shapes={key: _sides(values["shape_signature"]) for key, values in results.items()},
        call_builtin=lambda images: call_with(start(OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES), images),
    )


def _sides(signature: Any) -> tuple[int | None, ...]:
    """Convert the shape in a signature: None for any number."""
    return tuple(int(side) if side > 0 else None for side in signature)


@contextlib.contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Replace LiteRT's errors about a file by a ValueError that names the file."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be run: {str(error)[:MAX_REASON]}") from None


def _quantize_input(values: np.ndarray, tensor: Any) -> np.ndarray:
    (scale, zero_point), dtype = tensor["quantization"], tensor["dtype"]
    if not scale:
        return values.astype(dtype, copy=False)
    limits = np.iinfo(dtype)
    return np.rint(values / scale + zero_point).clip(limits.min, limits.max).astype(dtype)


def _dequantize_output(values: np.ndarray, tensor: Any) -> np.ndarray:
    scale, zero_point = tensor["quantization"]
    return ((values.astype(np.float32) - zero_point) * scale).astype(np.float32) if scale else values
