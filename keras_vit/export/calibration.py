"""Read the graph of a LiteRT file, and run the file on calibration images to observe its activations."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_vit._util.progress import track
from keras_vit.export.litert.builder import schema

Observer = Callable[[str, np.ndarray], None]  # takes the name and the values of an activation
SMALLEST_CROP = 0.7  # least side of a part of a calibration image that is enlarged, as a share of the image's


class Operator(NamedTuple):
    """A node of the graph: the schema's name of its kind, and the indices of its tensors; -1 is an omitted input."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class TensorInfo(NamedTuple):
    """A tensor of the graph; `values` are those of a float32 constant, None for all others."""

    name: str
    shape: tuple[int, ...]
    values: np.ndarray | None


class FileGraph(NamedTuple):
    """Graph of a LiteRT file, as far as quantization reads it."""

    operators: tuple[Operator, ...]  # in the order in which they run
    tensors: tuple[TensorInfo, ...]  # by index
    image: int  # index of the input
    activations: frozenset[int]  # indices of the tensors that are float32 and computed, the input included

    @classmethod
    def read(cls, content: np.ndarray) -> FileGraph:
        """Read the bytes of a file; the values of constants are views of them."""
        s = schema()
        model = s.Model.GetRootAs(content)
        graph = model.Subgraphs(0)
        kinds = {number: name for name, number in vars(s.BuiltinOperator).items() if isinstance(number, int)}
        operators = []
        for index in range(graph.OperatorsLength()):
            row = graph.Operators(index)
            kind = kinds[model.OperatorCodes(row.OpcodeIndex()).BuiltinCode()]
            inputs, outputs = row.InputsAsNumpy(), row.OutputsAsNumpy()
            operators.append(Operator(kind, tuple(map(int, inputs)), tuple(map(int, outputs))))
        rows = [graph.Tensors(index) for index in range(graph.TensorsLength())]
        floats = {index for index, row in enumerate(rows) if row.Type() == s.TensorType.FLOAT32}
        image = graph.Inputs(0)
        computed = {image}.union(*(operator.outputs for operator in operators))
        tensors = []
        for index, row in enumerate(rows):
            shape = tuple(map(int, row.ShapeAsNumpy())) if row.ShapeLength() else ()
            values = None
            if index in floats - computed:
                buffer = model.Buffers(row.Buffer())
                data = content[buffer.Offset() :][: buffer.Size()] if buffer.Offset() else buffer.DataAsNumpy()
                values = np.asarray(data).view(np.float32).reshape(shape)
            tensors.append(TensorInfo(row.Name().decode(), shape, values))
        return cls(tuple(operators), tuple(tensors), image, frozenset(floats & computed))

    def name(self, operator: Operator) -> str:
        """Name of an operator: that of its first output."""
        return self.tensors[operator.outputs[0]].name

    def input_name(self, operator: Operator) -> str:
        """Name of an operator's first input."""
        return self.tensors[operator.inputs[0]].name

    def kernel(self, operator: Operator) -> np.ndarray:
        """Kernel of a dense layer, float32 (outputs, inputs)."""
        name, shape, values = self.tensors[operator.inputs[1]]
        if values is None:
            raise ValueError(f"The kernel {name!r} {shape} is not a float32 constant; quantize a float32 file")
        return values

    def bias(self, operator: Operator) -> np.ndarray:
        """Bias of a dense layer, float32 (outputs,); zeros without one."""
        index = operator.inputs[2]
        values = None if index < 0 else self.tensors[index].values
        return np.zeros(len(self.kernel(operator)), np.float32) if values is None else values


def check_images(graph: FileGraph, images: Any, purpose: str) -> np.ndarray:
    """Check calibration images for a file; the ValueError for others begins with `purpose`."""
    shape = graph.tensors[graph.image].shape
    dtype = "float32" if graph.image in graph.activations else "uint8"
    expected = f"{purpose}: calibration images are {dtype} (count, {', '.join(map(str, shape[1:]))}), one or more"
    if images is None:
        raise ValueError(f"{expected}. Received: None")
    images = np.asarray(images)
    if images.shape[1:] != shape[1:] or not len(images) or images.dtype != dtype:
        raise ValueError(f"{expected}. Received: {images.dtype} {images.shape}")
    if not np.isfinite(images).all():
        broken = int((~np.isfinite(images)).any(axis=(1, 2, 3)).sum())
        raise ValueError(f"{expected}, and finite. Received: NaN or infinity in {broken} of {len(images)}")
    return images


def add_enlarged_crops(images: np.ndarray) -> np.ndarray:
    """Add to the images a random crop of each, enlarged to the image's size.

    GPTQ fits a few images so closely that it is worse on others. The parts are more images. Nothing is mirrored: a
    mirrored digit is no digit.

    Args:
        images: float32 or uint8 (count, height, width, channels).
    """
    random = np.random.default_rng(0)
    parts = np.empty_like(images)
    for image, part in zip(images, parts, strict=True):
        rows, columns = (_crop_matrix(side, random) for side in image.shape[:2])
        values = np.einsum("rh,hwc,sw->rsc", rows, image, columns, optimize=True)
        part[...] = np.rint(values) if part.dtype == np.uint8 else values
    return np.concatenate([images, parts])


def _crop_matrix(side: int, random: np.random.Generator) -> np.ndarray:
    """Matrix of a linear interpolation that enlarges a random part of a row of pixels, (side, side)."""
    length = side * random.uniform(SMALLEST_CROP, 1)
    centres = random.uniform(0, side - length) + (np.arange(side) + 0.5) * length / side - 0.5
    centres = np.clip(centres, 0, side - 1)
    return np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(side))).astype(np.float32)


def observe(
    source: str | os.PathLike[str],
    graph: FileGraph,
    images: np.ndarray,
    observer: Observer,
    *,
    names: set[str] | None = None,
    progress: bool,
) -> None:
    """Run a file on images and pass its activations (those in `names`, or all float32 ones) to an observer."""
    from ai_edge_litert.interpreter import Interpreter

    with ignore_memory_warning():
        interpreter = Interpreter(model_path=os.fspath(source), num_threads=2, experimental_preserve_all_tensors=True)
    interpreter.allocate_tensors()
    shape = graph.tensors[graph.image].shape
    activations = [(index, graph.tensors[index].name) for index in sorted(graph.activations)]
    observed = [(index, name) for index, name in activations if names is None or name in names]
    # np.resize repeats images to fill the last batch.
    batches = [np.resize(images[start : start + shape[0]], shape) for start in range(0, len(images), shape[0])]
    for batch in track(batches, "Calibrating", show=progress):
        interpreter.set_tensor(graph.image, batch)
        interpreter.invoke()
        for index, name in observed:
            observer(name, interpreter.get_tensor(index))


@contextlib.contextmanager
def ignore_memory_warning() -> Iterator[None]:
    """Ignore the interpreter's warning that keeping every activation takes memory: here they are wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Enabling `experimental_preserve_all_tensors`", UserWarning)
        yield
