"""Options of `export.tflite`, all checked in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from keras_vit._util.checks import is_count
from keras_vit.export.litert.options import Options
from keras_vit.export.litert.storage import FLOAT32, Float16, Int8
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.modes import Mode
from keras_vit.model.config import ViTConfig
from keras_vit.model.labels import class_names

if TYPE_CHECKING:
    import keras

ROUTES = ("direct", "converter")
STORAGES = {"float32": FLOAT32, "float16": Float16(), "int8": Int8()}
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options as a caller of `export.tflite` gave them; its docstring says what they mean."""

    quantize: str
    has_calibration: bool
    file: Options
    image_size: int | tuple[int, int] | None
    labels: str | Sequence[str] | None
    route: str
    thresholds: Mapping[str, float | None]
    threads: int

    def check(self, model: keras.Model) -> tuple[Mode, Options]:
        """Return the mode, and the file's options with storage and class names.

        One ValueError has everything that is wrong with the options, does not go together or is impossible for the
        model. A FileNotFoundError names a missing .toml file.
        """
        from keras_vit.export import _converter
        from keras_vit.model.vision_transformer import VisionTransformer

        if isinstance(model, VisionTransformer) and self.route != "converter":
            return self.check_config(model.config)
        misfits: list[str] = []
        name = type(model).__name__
        if self.route == "converter":
            misfits += _converter.misfits(model, _attempt(lambda: modes.load_mode(self.quantize), []))
        else:
            misfits.append(f'route="direct" writes VisionTransformers; use route="converter". Received: {name}')
        if self.image_size is not None and not isinstance(model, VisionTransformer):
            misfits.append(f"image_size is for VisionTransformers. Received: {name}")
        return self.check_config(getattr(model, "config", None), misfits)

    def check_config(self, config: ViTConfig | None, others: Sequence[str] = ()) -> tuple[Mode, Options]:
        """Return and raise the same for a VisionTransformer of this config; Keras is not imported.

        None is another model. `others` are found to be wrong already.
        """
        misfits = [*self.file.misfits(), *self._misfits()]
        mode = _attempt(lambda: modes.load_mode(self.quantize), misfits)
        names = None
        if mode is not None and mode.needs_calibration and not self.has_calibration:
            misfits.append(
                f"quantize={mode.name!r} needs calibration images: a hundred or more as the model will meet them, "
                "calibration=model.preprocess(...). Received: None"
            )
        if self.route == "converter":
            misfits += self._direct_only()
        elif isinstance(config, ViTConfig):
            misfits += self.file.model_misfits(config)
            names = _attempt(lambda: class_names(config, self.labels), misfits)
        if self.image_size is not None and isinstance(config, ViTConfig):
            _attempt(lambda: config.replace(image_size=self.image_size), misfits)
        misfits += others
        if misfits or mode is None:
            raise ValueError("tflite: " + "; ".join(misfits))
        return mode, dataclasses.replace(self.file, storage=STORAGES[mode.storage], labels=names)

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
