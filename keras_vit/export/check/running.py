"""Load and run exported files."""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.checks import as_path, check_counts
from keras_vit._util.text import install_command
from keras_vit._util.timing import timed
from keras_vit.export.check.litert_file import LiteRTFile
from keras_vit.model.task import MAIN_OUTPUTS

Outputs = dict[str, np.ndarray]  # by name
Runner = Callable[[np.ndarray], np.ndarray]

FLOATS = ("float16", "float32", "float64", "bfloat16")
BATCH = 8  # images in a call where a file takes any number
OUTPUTS = (*MAIN_OUTPUTS, "attention")
IMAGE_SIGNATURES = ("float_images", "serving_default")  # of a SavedModel, that may take images
FILE_SIGNATURES = ("serving_default",)  # that may take image files


@dataclass(frozen=True)
class ExportedModel:
    """A loaded exported file."""

    timed_call: Callable[[np.ndarray], tuple[Outputs, float]]  # of images (batch, height, width, channels); and seconds
    shape: tuple[int | None, ...]  # (height, width, channels) of an image; None for any number
    batch: int | None  # images in a call; None for any number
    dtype: str  # "float32" for prepared images, even if the file quantizes them; "uint8" for pixels
    threads: int | None  # None if the runtime chooses
    call_files: Callable[[Any], Outputs] | None = None  # takes JPEG and PNG files as strings (batch,)
    is_bfloat16: bool = False  # whether weights are bfloat16

    def call(self, images: np.ndarray) -> Outputs:
        """Return the outputs for images (batch, height, width, channels)."""
        return self.timed_call(images)[0]

    def check(self, images: np.ndarray) -> None:
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
        """Yield batches of the file's size, else of `size`, each with the number of its images that are not padding."""
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
    """Return a function that runs an exported file.

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
        file.check(images := np.asarray(images))
        batches = file.batches(images, len(images))
        return np.concatenate([main_output(file.call(batch))[:count] for batch, count in batches])

    return run


def main_name(outputs: Outputs) -> str:
    """Return the name of the main output: the first of `MAIN_OUTPUTS` that there is, else the first output's."""
    return next(iter([*(name for name in MAIN_OUTPUTS if name in outputs), *outputs]))


def main_output(outputs: Outputs) -> np.ndarray:
    """Return the logits if there are some, else the probabilities, the features or the first output."""
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
        functools.partial(timed, call),
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
    """Return the first signature with a single input of this rank, as a function, and the input's tf.TensorSpec."""
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
    if importlib.util.find_spec("ai_edge_litert") is None:
        raise ImportError(f"Writing and running .tflite files needs `{install_command('litert')}`")
    file = LiteRTFile(path, threads)
    return ExportedModel(file.call, file.shape, file.batch, file.dtype, threads)
