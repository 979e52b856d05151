"""Options of `export.tflite`, all checked in one call."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

from keras_vit._util.checks import is_count
from keras_vit.export import _converter
from keras_vit.export.litert.options import Options
from keras_vit.export.litert.storage import FLOAT16, FLOAT32, INT8
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.modes import Mode
from keras_vit.model.labels import class_names
from keras_vit.model.layers.quantized import quantization_misfit
from keras_vit.model.limits import check_resizable
from keras_vit.model.vision_transformer import VisionTransformer

ROUTES = ("direct", "converter")
STORAGES = {"float32": FLOAT32, "float16": FLOAT16, "int8": INT8}
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options as a caller of `export.tflite` gave them; its docstring says what they mean."""

    quantize: str
    has_calibration: bool
    file: Options
    sizes: Mapping[str, Any]  # image_size and patch_size, if given
    labels: str | Sequence[str] | None
    route: str
    thresholds: Mapping[str, float | None]
    threads: int

    def check(self, model: keras.Model) -> tuple[Mode, Options]:
        """Return the mode, and the file's options with storage and class names.

        One ValueError has everything that is wrong with the options, does not go together or is impossible for the
        model. A FileNotFoundError names a missing .toml file.
        """
        is_ours = isinstance(model, VisionTransformer)
        misfits = [*self.file.misfits(), *self._misfits()]
        mode = _attempt(lambda: modes.load_mode(self.quantize), misfits)
        names = None
        if mode is not None and mode.needs_calibration and not self.has_calibration:
            misfits.append(
                f"quantize={mode.name!r} needs calibration images: a hundred or more as the model will meet them, "
                "calibration=model.preprocess(...). Received: None"
            )
        if self.route == "converter":
            misfits += [*self._direct_only(), *_converter.misfits(model, mode)]
        elif is_ours and (misfit := quantization_misfit(model)):
            misfits.append(f"quantize={self.quantize!r} starts from floating-point weights. {misfit}")
        elif is_ours:
            misfits += self.file.model_misfits(model.config)
            names = _attempt(lambda: class_names(model.config, self.labels), misfits)
        else:
            name = type(model).__name__
            misfits.append(f'route="direct" writes VisionTransformers; use route="converter". Received: {name}')
        if self.sizes and is_ours:
            _attempt(lambda: check_resizable(model.config, model.config.replace(**self.sizes)), misfits)
        elif self.sizes:
            misfits.append(f"{' and '.join(self.sizes)} is for VisionTransformers. Received: {type(model).__name__}")
        if misfits or mode is None:
            raise ValueError("tflite: " + "; ".join(misfits))
        return mode, dataclasses.replace(
            self.file, storage=STORAGES[mode.storage], labels=names, patches=self.file.patches or mode.patches
        )

    def _misfits(self) -> Iterator[str]:
        """Yield one sentence for each option beside the file's that is wrong for every model."""
        if self.route not in ROUTES:
            yield f"route is one of {list(ROUTES)}. Received: {self.route!r}"
        if not is_count(self.threads, least=1):
            yield f"threads is a whole number from 1. Received: {self.threads!r}"
        for name, value in self.thresholds.items():
            if value is not None:
                yield from modes.range_misfits(name, value)

    def _direct_only(self) -> Iterator[str]:
        """Yield a sentence with the options that TensorFlow's converter does not take."""
        direct_only = {
            f"input_dtype={self.file.dtype!r}": self.file.dtype != "float32",
            "source_size": self.file.source_size is not None,
            f"output={self.file.output!r}": self.file.output != "logits",
            "attention": self.file.attention,
            f"patches={self.file.patches!r}": self.file.patches is not None,
            "labels": self.labels is not None,
        }
        if received := [name for name, is_set in direct_only.items() if is_set]:
            yield f'route="converter" writes plain files; use route="direct" for {", ".join(received)}'


def _attempt(function: Callable[[], Result], misfits: list[str]) -> Result | None:
    """Return a function's result, or None with the message of its ValueError in `misfits`."""
    try:
        return function()
    except ValueError as error:
        misfits.append(str(error))
        return None
