"""Running what was exported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Runner = Callable[[np.ndarray], np.ndarray]

BATCH = 8  # images a call where a file takes any number
CLASSES = ("logits", "probabilities", "features")  # what a file's main output may be called, the best first
OUTPUTS = (*CLASSES, "attention")
FLOATS = ("float_images", "serving_default")  # signatures of a SavedModel that may take prepared images


@dataclass(frozen=True)
class Running:
    """An exported file that is ready to be run.

    Attributes:
        call: images (batch, height, width, channels) -> its outputs by name.
        shape: (height, width, channels) of an image, None where any is taken.
        batch: images a call, None where any number is taken.
        dtype: "float32" for prepared images (a file that takes their integers is given those), "uint8" for pixels.
        threads: None where the runtime chooses.
    """

    call: Callable[[np.ndarray], dict[str, np.ndarray]]
    shape: tuple[int | None, ...]
    batch: int | None
    dtype: str
    threads: int | None

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
        return np.concatenate([classes(file.call(part))[:count] for part, count in file.parts(images, len(images))])

    return run


def classes(outputs: dict[str, np.ndarray]) -> np.ndarray:
    """The main output: the logits where they are there, else the only one."""
    named = [name for name in CLASSES if name in outputs] or list(outputs)
    return outputs[named[0]]


def _saved_model(path: Path) -> Running:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))  # held by the closure: the signature alone does not keep its variables
    signature = loaded.signatures[next(name for name in FLOATS if name in loaded.signatures)]
    [(name, spec)] = signature.structured_input_signature[1].items()

    def call(images: np.ndarray) -> dict[str, np.ndarray]:
        found = signature(**{name: tf.constant(images)})
        return {key: value.numpy() for key, value in found.items() if key in OUTPUTS}

    return Running(call, tuple(spec.shape[1:]), None, spec.dtype.name, None)


def _litert(path: Path, threads: int) -> Running:
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
        raise ImportError("Writing and running .tflite files needs `pip install 'keras-vit[litert]'`") from None
    try:
        return Interpreter(model_path=str(path), num_threads=threads)
    except ValueError as error:
        raise ValueError(f"{path} is no LiteRT file that can be run: {error}") from None
