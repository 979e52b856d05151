"""Write a Keras model to a LiteRT file: every class of layers has one writer, found by the class.

The model's graph is walked from its output. A writer reads the inputs of its layer, which calls the writers of the
layers in front of it. To add a layer, declare with `honours` which of its fields are taken into account, and below it
write a function with the decorator `writes`; no other module changes. A layer or a field that nobody has declared is an
error, so that no file computes less than its model.

Tokens of the residual stream are written centered and scaled (`folding.Stream`) where only norms read them: a LayerNorm
subtracts their mean anyhow, so the weights that write to the stream do it once, and no operator of the file has to.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import keras
import numpy as np

from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Affine, Array, DenseWeights, Stream
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.plan import FilePlan

# A writer takes the `FileWriter`, the layer and the Keras tensors that the layer reads, and returns a `PendingTensor`.
Function = TypeVar("Function", bound=Callable[..., "PendingTensor"])

_WRITERS: dict[type, Callable[..., "PendingTensor"]] = {}
# Class of layers, also of those inside others, or of a config -> fields that the writers take into account -> values
# that they know; None is any.
HONOURED: dict[type, dict[str, tuple[Any, ...] | None]] = {}
BASE_FIELDS = {"name", "trainable", "dtype"}  # of every Keras layer; files compute in float32
TRAINING_FIELDS = ("_initializer", "_regularizer", "_constraint")  # ends of names of fields that no output depends on
CONVERT = (
    "For another model write a SavedModel, convert it with TensorFlow and verify the file: model.export('saved'); "
    "pathlib.Path('model.tflite').write_bytes(tf.lite.TFLiteConverter.from_saved_model('saved').convert()); "
    "keras_vit.export.verify(model, 'model.tflite')"
)
_STREAM_STARTS: set[type] = set()  # classes whose results are tokens of the residual stream
STREAM_READERS: set[type] = set()  # classes that take such tokens; all but norms then return tokens of the stream


@dataclass(frozen=True)
class PendingTensor:
    """Result of a layer, with the operations that the layers which read it still have to apply.

    Args:
        tensor: in the file.
        affine: gain and shift that are still to be applied.
        norm: name of the norm that `affine` belongs to.
        stream: the form of tokens of the residual stream; None if they are as Keras computes them.
    """

    tensor: Tensor
    affine: Affine | None = None
    norm: str = ""
    stream: Stream | None = None


def writes(*classes: type, starts_stream: bool = False, reads_stream: bool = False) -> Callable[[Function], Function]:
    """Register a function as the writer of these classes of layers.

    `reads_stream` is whether it takes tokens of the residual stream that are centered and scaled, `starts_stream`
    whether it returns tokens of the stream from any input.
    """

    def register(function: Function) -> Function:
        assert HONOURED.keys() >= set(classes), "call `honours` before"
        _WRITERS.update(dict.fromkeys(classes, function))
        STREAM_READERS.update(classes if reads_stream else ())
        _STREAM_STARTS.update(classes if starts_stream else ())
        return function

    return register


def honours(kind: type, /, *fields: str, **accepted: tuple[Any, ...]) -> None:
    """Declare the fields of a class of layers, or of a config dataclass in them, that the writers take into account.

    Of a field with `accepted` values they know these alone. Fields that change nothing in inference, such as dropout
    rates, are declared too. Those that Keras' own classes define need no declaration where they have their default.
    """
    HONOURED[kind] = dict.fromkeys(fields) | accepted


def unknown_fields(owner: Any) -> dict[str, Any]:
    """Find the fields of a layer or a config that no writer takes into account, with their values.

    A field is known if its class declares it (`honours`), if it has the default of Keras' own class and no writer
    declares it, or if no output depends on it.
    """
    honoured, defaults = _declared(type(owner)) or {}, _keras_defaults(owner)

    def is_known(name: str, value: Any) -> bool:
        if name in honoured:
            accepted = honoured[name]
            return accepted is None or value in accepted
        return name in defaults and value in (None, defaults[name])

    fields = {name: value for name, value in _fields(owner).items() if not name.endswith(TRAINING_FIELDS)}
    found = {name: value for name, value in fields.items() if not is_known(name, value)}
    for name, config in vars(owner).items():
        if dataclasses.is_dataclass(config):
            found |= {name: config} if _declared(type(config)) is None else unknown_fields(config)
    return found


def _fields(owner: Any) -> dict[str, Any]:
    """Fields of a config, or those that a layer is saved with."""
    if dataclasses.is_dataclass(owner):
        return {row.name: getattr(owner, row.name) for row in dataclasses.fields(owner)}
    return {name: value for name, value in owner.get_config().items() if name not in BASE_FIELDS}


def _keras_defaults(owner: Any) -> dict[str, Any]:
    """Defaults of Keras' own class of a layer; None for other fields of a layer that is of that class itself."""
    if dataclasses.is_dataclass(owner):
        return {}
    base = next(parent for parent in type(owner).__mro__ if parent.__module__.startswith("keras."))
    defaults = {name: parameter.default for name, parameter in inspect.signature(base).parameters.items()}
    return dict.fromkeys(_fields(owner)) | defaults if type(owner) is base else defaults


def _declared(kind: type) -> dict[str, tuple[Any, ...] | None] | None:
    """Fields that the writers take into account of a class, or of the nearest of its bases that has any."""
    return next((HONOURED[base] for base in inspect.getmro(kind) if base in HONOURED), None)


def check_layers(layers: Any) -> None:
    """Raise a ValueError that names a layer without a writer, or the fields of a layer that its writer ignores."""
    for layer in layers:
        if type(layer) not in HONOURED:
            raise unsupported(layer)
        for part in layer._flatten_layers():
            if type(part) not in HONOURED:
                raise unsupported(layer, f" with a {type(part).__name__} in it, {part.name!r}")
            if fields := unknown_fields(part):
                told = ", ".join(f"{name}={value!r:.100}" for name, value in fields.items())
                path = layer.name if part is layer else f"{layer.name}/{part.name}"
                raise ValueError(
                    f"The LiteRT writer of {type(part).__name__} does not know these fields or values of the layer "
                    f"{path!r}, and would write another model: {told}. Write them in keras_vit.export.litert and add "
                    f"them to its `honours`; fields of Keras' own layers may have their defaults. {CONVERT}"
                )


def source(tensor: Any) -> tuple[Any, list[Any]]:
    """Find the layer that computes a Keras tensor, and the Keras tensors that the layer reads."""
    layer, node, _ = tensor._keras_history
    return layer, layer._inbound_nodes[node].input_tensors


def unsupported(layer: Any, reason: str = "") -> ValueError:
    """Build the error for a layer that cannot be written."""
    known = sorted(kind.__name__ for kind in _WRITERS)
    return ValueError(
        f"There is no LiteRT writer for the layer {layer.name!r}{reason}. Received: {type(layer).__name__}. "
        f"Layers with a writer: {', '.join(known)}. {CONVERT}"
    )


@dataclass
class FileWriter:
    """Write the layers of a model; each writer gets this object. Names of layers become the names of tensors."""

    model: keras.Model
    ops: Operators
    plan: FilePlan
    inputs: dict[str, Tensor] = field(default_factory=dict)  # of the file's signature
    norms: dict[str, Any] = field(default_factory=dict)  # name -> layer, of the norms written so far
    # Name of a norm -> largest |weight| of the dense layers that apply its gain, for each channel.
    largest_weights: dict[str, Array] = field(default_factory=dict)
    attention: Tensor | None = None  # weights of the last block's attention
    _written: dict[int, PendingTensor] = field(default_factory=dict)  # by the id of the Keras tensor
    _shared_constants: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_layers(self.model.operations)
        scales = np.ones(1) if self.plan.scales is None else np.asarray(self.plan.scales, np.float64)
        self.stream: Stream | None = None  # None: tokens of the residual stream stay as Keras computes them
        kinds = {layer.is_rms for layer in self.model._flatten_layers() if _is_norm(layer)}
        if _only_norms_read_stream(self.model) and len(kinds) == 1:
            self.stream = Stream(scales, is_centered=kinds == {False})

    def tensor_of(self, tensor: Any) -> PendingTensor:
        """Look up a Keras tensor in the file; the first time, its layer is written."""
        if id(tensor) not in self._written:
            layer, inputs = source(tensor)
            if type(layer) not in _WRITERS:
                raise unsupported(layer)
            self._written[id(tensor)] = _WRITERS[type(layer)](self, layer, *inputs)
        return self._written[id(tensor)]

    def fold(self, weights: DenseWeights, x: PendingTensor) -> DenseWeights:
        """Fold the affine of x into the weights of a dense layer that reads x."""
        if x.norm:
            width = self.norms[x.norm].gamma.shape[0]
            largest = np.abs(weights.kernel).reshape(-1, width).max(axis=0)
            self.largest_weights[x.norm] = np.maximum(self.largest_weights.get(x.norm, 0), largest)
        return weights.fold_affine(x.affine)

    def dense(self, x: PendingTensor, weights: DenseWeights, name: str) -> Tensor:
        """Apply a dense layer to the last axis."""
        return self.ops.dense(x.tensor, *self.fold(weights, x), name)

    def shared_constant(self, array: np.ndarray, name: str, *, is_table: bool = False) -> Tensor:
        """Add a constant that several layers may use; it is stored once, a table as the mode's `tables` says."""
        if name not in self._shared_constants:
            self._shared_constants[name] = (self.ops.table if is_table else self.ops.constant)(array, name)
        return self._shared_constants[name]


def _only_norms_read_stream(model: keras.Model) -> bool:
    """True if all layers that read the residual stream are norms, or let norms read it first.

    Then its tokens need no mean: a LayerNorm would subtract it, and the weights that write to it can do so before.
    """
    others = [layer for layer in model.operations if type(layer) not in STREAM_READERS]
    read = [tensor for layer in others for node in layer._inbound_nodes for tensor in node.input_tensors]
    return not any(map(_is_stream, [*read, *model.outputs]))


def _is_stream(tensor: Any) -> bool:
    """True if a Keras tensor holds tokens of the residual stream, or some of them, or means of them."""
    layer, inputs = source(tensor)
    if type(layer) in _STREAM_STARTS:
        return True
    return type(layer) in STREAM_READERS and not _is_norm(layer) and any(map(_is_stream, inputs))


def _is_norm(layer: Any) -> bool:
    return isinstance(layer, keras.layers.LayerNormalization)
