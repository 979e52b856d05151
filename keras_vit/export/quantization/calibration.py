"""What a written file computes: its graph, and the activations that images give rise to in it."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from keras_vit.export.litert.builder import schema

Item = TypeVar("Item")


@dataclass(frozen=True)
class Operator:
    """A node of the graph: its kind as the schema calls it, and its tensors' places; -1 is none."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """What a file computes, as far as it matters here.

    Attributes:
        operators: in the order in which they run.
        tensors: name, shape, and the constant's float32 values or None, by place.
        image: the place of the input.
        floats: places of the activations that are float32.
    """

    operators: tuple[Operator, ...]
    tensors: tuple[tuple[str, tuple[int, ...], np.ndarray | None], ...]
    image: int
    floats: frozenset[int]

    @classmethod
    def read(cls, content: np.ndarray) -> Graph:
        """Reads a file's bytes; constants are views of them."""
        s = schema()
        model = s.Model.GetRootAs(content)
        graph = model.Subgraphs(0)
        kinds = {number: name for name, number in vars(s.BuiltinOperator).items() if isinstance(number, int)}
        operators = []
        for place in range(graph.OperatorsLength()):
            row = graph.Operators(place)
            kind = kinds[model.OperatorCodes(row.OpcodeIndex()).BuiltinCode()]
            inputs, outputs = row.InputsAsNumpy(), row.OutputsAsNumpy()
            operators.append(Operator(kind, tuple(map(int, inputs)), tuple(map(int, outputs))))
        rows = [graph.Tensors(place) for place in range(graph.TensorsLength())]
        floats = {place for place, row in enumerate(rows) if row.Type() == s.TensorType.FLOAT32}
        image = graph.Inputs(0)
        made = {image}.union(*(operator.outputs for operator in operators))
        tensors = []
        for place, row in enumerate(rows):
            shape = tuple(map(int, row.ShapeAsNumpy())) if row.ShapeLength() else ()
            constant = place in floats - made
            values = _values(content, model.Buffers(row.Buffer())).reshape(shape) if constant else None
            tensors.append((row.Name().decode(), shape, values))
        return cls(tuple(operators), tuple(tensors), image, frozenset(floats & made))

    def name(self, operator: Operator) -> str:
        """An operator's name: that of what it gives."""
        return self.tensors[operator.outputs[0]][0]

    def kernel(self, operator: Operator) -> np.ndarray:
        """A dense layer's kernel, float32 (outputs, inputs)."""
        name, shape, values = self.tensors[operator.inputs[1]]
        if values is None:
            raise ValueError(f"The kernel {name!r} {shape} is no float32 constant; quantize a float32 file")
        return values


def _values(content: np.ndarray, buffer: Any) -> np.ndarray:
    data = content[buffer.Offset() :][: buffer.Size()] if buffer.Offset() else buffer.DataAsNumpy()
    return np.asarray(data).view(np.float32)


def checked(graph: Graph, images: Any, what: str) -> np.ndarray:
    """Images that the file takes.

    Args:
        graph: of the file.
        images: (count, height, width, channels) of the file's size and dtype.
        what: they are for, as errors call it.

    Raises:
        ValueError: for none, another shape or dtype, NaN or infinity.
    """
    _, shape, _ = graph.tensors[graph.image]
    dtype = "float32" if graph.image in graph.floats else "uint8"
    wanted = f"{what}: calibration images are {dtype} (count, {', '.join(map(str, shape[1:]))}), one or more"
    if images is None:
        raise ValueError(f"{wanted}. Received: None")
    images = np.asarray(images)
    if images.shape[1:] != shape[1:] or not len(images) or images.dtype != dtype:
        raise ValueError(f"{wanted}. Received: {images.dtype} {images.shape}")
    if not np.isfinite(images).all():
        broken = int((~np.isfinite(images)).any(axis=(1, 2, 3)).sum())
        raise ValueError(f"{wanted}, and finite. Received: NaN or infinity in {broken} of {len(images)}")
    return images


def run(
    source: str | os.PathLike[str],
    graph: Graph,
    images: np.ndarray,
    see: Callable[[str, np.ndarray], None],
    *,
    names: set[str] | None = None,
    progress: bool,
) -> None:
    """Runs a file and shows what it computes.

    Args:
        source: the file.
        graph: of it.
        images: that it takes.
        see: is called with the name and the values of every float activation of every call.
        names: of the activations to show; None for all.
        progress: whether to show a bar.
    """
    from ai_edge_litert.interpreter import Interpreter

    with no_memory_warning():
        interpreter = Interpreter(model_path=os.fspath(source), num_threads=2, experimental_preserve_all_tensors=True)
    interpreter.allocate_tensors()
    _, shape, _ = graph.tensors[graph.image]
    places = [(place, graph.tensors[place][0]) for place in sorted(graph.floats)]
    shown = [(place, name) for place, name in places if names is None or name in names]
    parts = [np.resize(images[start : start + shape[0]], shape) for start in range(0, len(images), shape[0])]
    for part in track(parts, "Calibrating", progress):
        interpreter.set_tensor(graph.image, part)
        interpreter.invoke()
        for place, name in shown:
            see(name, interpreter.get_tensor(place))


@contextlib.contextmanager
def no_memory_warning() -> Iterator[None]:
    """LiteRT's interpreter warns of the memory that keeping every activation takes; here it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Enabling `experimental_preserve_all_tensors`", UserWarning)
        yield


def track(items: Iterable[Item], what: str, progress: bool) -> Iterable[Item]:
    """The items, with a bar on standard error where `progress`."""
    from rich import progress as bars
    from rich.console import Console

    listed = list(items)
    return bars.track(listed, description=what, console=Console(stderr=True), disable=not progress, transient=True)
