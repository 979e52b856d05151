"""Running what was exported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.checks import is_count
from keras_vit._util.text import install_command

Runner = Callable[[np.ndarray], np.ndarray]

BATCH = 8  # images a call where a file takes any number
CLASSES = ("logits", "probabilities", "features")  # what a file's main output may be called, the best first
OUTPUTS = (*CLASSES, "attention")
IMAGES = ("float_images", "serving_default")  # signatures of a SavedModel that may take images
FILES = "serving_default"  # the signature that may take image files


@dataclass(frozen=True)
class Running:
    """An exported file that is ready to be run.

    Attributes:
        call: images (batch, height, width, channels) -> its outputs by name.
        shape: (height, width, channels) of an image, None where any is taken.
        batch: images a call, None where any number is taken.
        dtype: "float32" for prepared images (a file that takes their integers is given those), "uint8" for pixels.
        threads: None where the runtime chooses.
        files: JPEG and PNG files, strings (batch,) -> its outputs by name; None where it takes none.
    """

    call: Callable[[np.ndarray], dict[str, np.ndarray]]
    shape: tuple[int | None, ...]
    batch: int | None
    dtype: str
    threads: int | None
    files: Callable[[Any], dict[str, np.ndarray]] | None = None

    def parts(self, images: np.ndarray, size: int = BATCH) -> Iterator[tuple[np.ndarray, int]]:
        """The images in calls of the file's batch, or of `size`: an array, and how many of it count."""
        size = self.batch or size
        for start in range(0, len(images), size):
            part = images[start : start + size]
            missing = size - len(part) if self.batch else 0
            yield np.concatenate([part, part[-1:].repeat(missing, axis=0)]) if missing else part, len(part)


def running(path: str | os.PathLike[str], threads: int = 2) -> Running:
    """Loads a SavedModel's folder or a .tflite file.

    Args:
        path: of the file or folder.
        threads: for a .tflite file.

    Raises:
        FileNotFoundError: where nothing is.
        ValueError: where it cannot be loaded.
        ImportError: for a .tflite file without ai-edge-litert.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no exported file {path}")
    return _saved_model(path) if path.is_dir() else _litert(path, threads)


def runner(path: str | os.PathLike[str], threads: int = 2) -> Runner:
    """A function that runs an exported file: prepared images (or pixels, for a file of uint8) in, logits out.

    Args:
        path: of a SavedModel's folder or a .tflite file.
        threads: for a .tflite file.

    Raises:
        FileNotFoundError, ValueError, ImportError: as `running`.
    """
    file = running(path, threads)

    def run(images: np.ndarray) -> np.ndarray:
        if not len(images):
            raise ValueError(f"{path} is run on one image or more. Received: an array of shape {images.shape}")
        return np.concatenate([classes(file.call(part))[:count] for part, count in file.parts(images, len(images))])

    return run


def classes(outputs: dict[str, np.ndarray]) -> np.ndarray:
    """The main output: the logits where they are there, else the only one."""
    named = [name for name in CLASSES if name in outputs] or list(outputs)
    return outputs[named[0]]


def _saved_model(path: Path) -> Running:
    loaded = _loaded(path)
    takes = {name: taken for name, signature in loaded.signatures.items() if (taken := _input(signature))}
    images = next((name for name in IMAGES if name in takes and _is_of_images(takes[name])), None)
    if images is None:
        raise ValueError(
            f"{path} has no signature {' or '.join(map(repr, IMAGES))} that takes one batch of images. "
            f"Received: {sorted(loaded.signatures)}"
        )
    _, spec = takes[images]
    return Running(
        call=_caller(loaded, images, *takes[images]),
        shape=tuple(spec.shape[1:]),
        batch=spec.shape[0],
        dtype=spec.dtype.name,
        threads=None,
        files=_caller(loaded, FILES, *takes[FILES]) if FILES in takes and _is_of_files(takes[FILES]) else None,
    )


def _loaded(path: Path) -> Any:
    import tensorflow as tf

    try:
        return tf.saved_model.load(str(path))
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise ValueError(f"{path} is no SavedModel that can be loaded: {str(error).splitlines()[0]}") from None


def _input(signature: Any) -> tuple[str, Any] | None:
    """Name and tf.TensorSpec of what a signature takes; None where it is not one thing."""
    specs: dict[str, Any] = (signature.structured_input_signature or ((), {}))[1]
    return next(iter(specs.items())) if len(specs) == 1 else None


def _is_of_images(taken: tuple[str, Any]) -> bool:
    return taken[1].shape.rank == 4 and taken[1].dtype.name != "string"


def _is_of_files(taken: tuple[str, Any]) -> bool:
    return taken[1].shape.rank == 1 and taken[1].dtype.name == "string"


def _caller(loaded: Any, signature: str, argument: str, spec: Any) -> Callable[[Any], dict[str, np.ndarray]]:
    """A signature as a function; it holds all that was loaded, as a signature alone does not keep its variables."""
    import tensorflow as tf

    def call(batch: Any) -> dict[str, np.ndarray]:
        found = loaded.signatures[signature](**{argument: tf.constant(batch, spec.dtype)})
        known = [key for key in OUTPUTS if key in found] or list(found)  # another exporter's have names of its own
        return {key: found[key].numpy() for key in known}

    return call


def _litert(path: Path, threads: int) -> Running:
    if not is_count(threads, least=1):
        raise ValueError(f"threads is a whole number from 1. Received: {threads!r}")
    interpreter = _interpreter(path, threads)
    try:
        interpreter.allocate_tensors()
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be run: {error}") from None
    signatures = list(interpreter.get_signature_list())
    if not signatures:
        raise ValueError(f"{path} has no signature, by which inputs and outputs are found")
    signature = interpreter.get_signature_runner(signatures[0])
    details = signature.get_input_details()
    if len(details) != 1:
        raise ValueError(f"{path} has inputs {list(details)}; expected one, the image")
    [(name, detail)] = details.items()
    batch, *shape = (int(side) if side > 0 else None for side in detail["shape_signature"])

    results = signature.get_output_details()

    def call(images: np.ndarray) -> dict[str, np.ndarray]:
        found = signature(**{name: _whole(images, detail)})
        return {key: _value(values, results[key]) for key, values in found.items()}

    dtype = "float32" if detail["quantization"][0] else np.dtype(detail["dtype"]).name
    return Running(call, tuple(shape), batch, dtype, threads)


def _whole(values: np.ndarray, detail: Any) -> np.ndarray:
    """Floats as the integers of a quantized tensor; values of another as they are."""
    (scale, zero), dtype = detail["quantization"], detail["dtype"]
    if not scale:
        return values.astype(dtype, copy=False)
    range_ = np.iinfo(dtype)
    return np.rint(values / scale + zero).clip(range_.min, range_.max).astype(dtype)


def _value(values: np.ndarray, detail: Any) -> np.ndarray:
    """What the integers of a quantized tensor mean."""
    scale, zero = detail["quantization"]
    return ((values.astype(np.float32) - zero) * scale).astype(np.float32) if scale else values


def _interpreter(path: Path, threads: int) -> Any:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        raise ImportError(f"Writing and running .tflite files needs `{install_command('litert')}`") from None
    try:
        return Interpreter(model_path=str(path), num_threads=threads)
    except ValueError as error:
        raise ValueError(f"{path} is no LiteRT file that can be run: {error}") from None
