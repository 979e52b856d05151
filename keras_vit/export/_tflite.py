"""LiteRT (.tflite) files for phones, browsers and small boards: written, quantized, run and compared in one call."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit._util.checks import is_count, pair
from keras_vit.export import _converter
from keras_vit.export.check import inputs
from keras_vit.export.check.report import Report, Watch
from keras_vit.export.check.running import running
from keras_vit.export.check.verify import called
from keras_vit.export.check.verify import verify as verify_file
from keras_vit.export.litert import images as images_part
from keras_vit.export.litert import metadata
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.emit import emit
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import DTYPES, OUTPUTS, RESIZES, Options
from keras_vit.export.litert.storage import FLOAT32, Float16, Int8
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.modes import Mode
from keras_vit.export.quantization.quantize import quantize as quantize_file
from keras_vit.export.quantization.quantize import smooth
from keras_vit.model import class_names
from keras_vit.model.vision_transformer import VisionTransformer

ROUTES = ("direct", "converter")
NAMED = 32  # letters of a name that its temporary folder has too: the longest names have no room for more
WORK = "model.tflite"  # what a file is called until it is complete
STORAGES = {"float32": FLOAT32, "float16": Float16(), "int8": Int8()}


def tflite(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    quantize: str = "dynamic",
    calibration: Any = None,
    verify: Any = None,
    batch: int | None = 1,
    image_size: int | tuple[int, int] | None = None,
    input_dtype: str = "float32",
    source_size: int | tuple[int, int] | None = None,
    resize: str = "exact",
    output: str = "logits",
    attention: bool = False,
    labels: str | Sequence[str] | None = None,
    route: str = "direct",
    least_cosine: float | None = None,
    least_agreement: float | None = None,
    threads: int = 2,
    progress: bool = False,
) -> Report:
    """Writes a LiteRT file with the signature `image` -> `logits`, runs it, and compares it with the model.

    Args:
        model: a VisionTransformer; by the converter's route any Keras model of one image input and one output.
        path: of the file; it appears complete and verified, or not at all.
        quantize: name of a mode (converters/exports) or a path to a .toml of your own.
        calibration: images as the model will meet them, for modes that need some or, as "dynamic", gain from them where
            activations have outliers: prepared ones, float32 (batch, height, width, channels), or what
            `model.preprocess` takes.
        verify: likewise, to compare the file with the model on; None means a built-in set, or the calibration images in
            a mode that needs them, which flatters: better others.
        batch: images a call; None for any number.
        image_size: int or (height, width), where it is not the model's: position embeddings are interpolated.
        input_dtype: "float32" for prepared images, "uint8" for pixels, which the file scales itself.
        source_size: int or (height, width) of pixels that the file resizes itself.
        resize: "exact": as `preprocess` does; "builtin": the runtime's own bilinear, without antialias.
        output: "logits" or "probabilities".
        attention: adds the output `attention` (batch, heads, patches), the class token's in the last block.
        labels: name of a list in zoo/labels or the classes' names, for apps that read them out of the file; None is
            the model's own list.
        route: "direct", written from the weights, or "converter", through TensorFlow's converter.
        least_cosine: below which the file is refused; None is the mode's.
        least_agreement: likewise, of the best class.
        threads: on which the file is timed.
        progress: whether to show bars.

    Returns:
        how the file compares with the model, how fast it runs, and what the export took.

    Raises:
        ValueError: for options that are wrong or do not go together, all of them in one message.
        VerificationError: where the file does not compute what the model does.
        FileNotFoundError, IsADirectoryError: where no file can be put at `path`.
        ImportError: without the packages of `pip install '.[litert]'` in a clone of keras_vit.
        ConverterError: where TensorFlow's converter fails.
    """
    path = _checked(Path(path))
    mode = modes.mode(quantize)
    options = Options(
        batch=batch,
        storage=STORAGES[mode.storage],
        dtype=input_dtype,
        source_size=None if source_size is None else pair(source_size, "source_size"),
        resize=resize,
        output=output,
        attention=attention,
    )
    misfits = [*_wrong(options, route, threads), *_unsupported(model, options, mode, route, labels)]
    if image_size is not None and not isinstance(model, VisionTransformer):
        misfits.append(f"image_size is for VisionTransformers. Received: {type(model).__name__}")
    if misfits:
        raise ValueError("tflite: " + "; ".join(misfits))
    if image_size is not None:
        model = model.resized(image_size)
    names = class_names.names(model.config, labels) if isinstance(model, VisionTransformer) else None
    job = _Job(model, mode, options, route, names=names, progress=progress)
    job.calibrate(calibration)
    known = mode.calibrated and verify is None
    if known:
        verify = calibration  # ranges that were measured on other images cut off what the built-in ones hold
    if verify is not None and input_dtype == "float32":
        verify = inputs.prepared_images(model, verify, "verify")
    with _beside(path) as work, called(work, path):
        with Watch() as watch:
            job.write(work)
        report = verify_file(
            model,
            work,
            verify,
            mode=mode,
            least_cosine=least_cosine,
            least_agreement=least_agreement,
            threads=threads,
            progress=progress,
        )
        error = job.preprocess_error(verify, work.with_name("resize"))
        work.replace(path)
    peak = watch.peak_bytes if route == "direct" else None  # the converter is another process
    return dataclasses.replace(
        report, path=path, calibrated_on=known, preprocess_error=error, seconds=watch.seconds, peak_bytes=peak
    )


@dataclasses.dataclass
class _Job:
    """What is written, how."""

    model: keras.Model
    mode: Mode
    options: Options
    route: str
    names: list[str] | None
    progress: bool
    calibration: np.ndarray | None = None

    def calibrate(self, images: Any) -> None:
        """Takes the images that the mode needs, or can use."""
        if self.mode.calibrated or (self.mode.smoothing and images is not None):
            size = self.options.source_size or tuple(self.model.input_shape[1:3])
            pixels_of = size if self.options.dtype == "uint8" else None
            self.calibration = inputs.calibration(self.model, images, self.mode.name, pixels_of)

    def write(self, path: Path) -> None:
        """Writes the file with its metadata and labels."""
        if self.route == "converter":
            _converter.convert(self.model, path, mode=self.mode.name, batch=self.options.batch)
            return
        smoothing = self._smoothing(path.with_name("plain"))
        whole = path.with_name("float32") if self.mode.quantizer else path
        builder = emit(self.model, dataclasses.replace(self.options, smoothing=smoothing))
        builder.metadata(metadata.NAME, self._metadata())
        builder.write(whole)
        if self.mode.quantizer:
            quantize_file(whole, path, self.mode, calibration=self.calibration, progress=self.progress)
            whole.unlink()
        if self.names:
            metadata.append_labels(path, self.names)

    def _smoothing(self, work: Path) -> dict[str, np.ndarray]:
        """The factors that a mode's smoothing finds on the calibration images, measured on the float32 file."""
        if self.mode.smoothing is None or self.calibration is None:
            return {}
        emit(self.model, dataclasses.replace(self.options, storage=FLOAT32)).write(work)
        factors = smooth(work, self.calibration, self.mode.smoothing, progress=self.progress)
        work.unlink()
        return factors

    def _metadata(self) -> bytes:
        config = self.model.config
        return metadata.metadata(
            dtype=self.options.dtype,
            preprocessing=config.preprocessing,
            num_channels=config.num_channels,
            outputs=[
                self.options.output if config.num_classes else "features",
                *(["attention"] if self.options.attention else []),
            ],
            labelled=bool(self.names),
            name=self.model.name,
            description=f"Vision Transformer, {self.mode.name}",
        )

    def preprocess_error(self, images: Any, work: Path) -> float | None:
        """How far the images that the file prepares are from `preprocess`, in units of 0..255; None without a resize.

        The part of the file that prepares images is written and run by itself.
        """
        if self.options.source_size is None:
            return None
        ops = Operators(Builder())
        made = images_part.input(ops, self.model.config, dataclasses.replace(self.options, batch=1))
        ops.builder.signature({"image": made.image}, {"prepared": made.tensor})
        ops.builder.write(work)
        file = running(work)
        pixels, expected = inputs.pairs(self.model, file, images)
        received = np.concatenate([file.call(part)["prepared"] for part, _ in file.parts(pixels)])
        if made.scale is not None:
            received = received * made.scale
        return float(np.abs((received - expected) * inputs.mean_and_std(self.model)[1]).max() * 255)


def _checked(path: Path) -> Path:
    """A path where a file can be put."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "A .tflite file cannot be written over a folder", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no folder for the .tflite file", str(path.parent))
    return path


def _wrong(options: Options, route: str, threads: int) -> Iterator[str]:
    """What is wrong with single options."""
    choices = {
        "input_dtype": (options.dtype, DTYPES),
        "resize": (options.resize, RESIZES),
        "output": (options.output, OUTPUTS),
        "route": (route, ROUTES),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            yield f"{name} is one of {list(known)}. Received: {value!r}"
    if options.batch is not None and not is_count(options.batch, least=1):
        yield f"batch is a whole number from 1, or None for any. Received: {options.batch!r}"
    if not is_count(threads, least=1):
        yield f"threads is a whole number from 1. Received: {threads!r}"


def _unsupported(model: keras.Model, options: Options, mode: Mode, route: str, labels: Any) -> Iterator[str]:
    """What does not go together."""
    if route == "converter":
        asked = {
            f"input_dtype={options.dtype!r}": options.dtype != "float32",
            "source_size": options.source_size is not None,
            f"output={options.output!r}": options.output != "logits",
            "attention": options.attention,
            "labels": labels is not None,
        }
        if names := [name for name, given in asked.items() if given]:
            yield f'route="converter" writes plain files; use route="direct" for {", ".join(names)}'
        if mode.name not in _converter.MODES:
            yield f'route="converter" knows the modes {list(_converter.MODES)}. Received: {mode.name!r}'
        yield from _converter.misfits(model)
        return
    if not isinstance(model, VisionTransformer):
        yield f'route="direct" writes VisionTransformers; use route="converter". Received: {type(model).__name__}'
        return
    if options.source_size is not None and options.dtype != "uint8":
        yield f'source_size is of pixels and needs input_dtype="uint8". Received: {options.dtype!r}'
    if not model.config.num_classes and (options.output == "probabilities" or labels is not None):
        yield "a model without a head has neither probabilities nor labels"
    if options.attention and not model.config.class_token:
        yield "attention is the class token's, which this model does not have"


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file in a temporary folder beside `path`, which is gone afterwards, whatever happens."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name[:NAMED]}.", dir=path.parent) as folder:
            yield Path(folder) / WORK
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, "The disk is full; nothing was written to", str(path)) from error
