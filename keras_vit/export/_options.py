"""Options of `export.tflite`, all checked in one call."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

from keras_vit._util.checks import is_count
from keras_vit._util.fields import field_rules
from keras_vit.export import _converter
from keras_vit.export.litert.options import Options
from keras_vit.export.litert.storage import STORAGES
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.modes import Mode
from keras_vit.model.layers.quantized import quantization_problem
from keras_vit.model.limits import check_resizable
from keras_vit.model.vision_transformer import VisionTransformer

ROUTES = ("direct", "converter")
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
        problems = [*self.file.problems(), *self._problems()]
        mode = _attempt(lambda: modes.load_mode(self.quantize), problems)
        names = None
        if mode is not None and mode.needs_calibration and not self.has_calibration:
            problems.append(
                f"quantize={mode.name!r} needs calibration images: a hundred or more as the model will meet them, "
                "calibration=model.preprocess(...) (--images FOLDER). Received: None"
            )
        if self.route == "converter":
            problems += [*self._direct_only(), *_converter.problems(model, mode)]
        elif is_ours and (problem := quantization_problem(model)):
            problems.append(f"quantize={self.quantize!r} starts from floating-point weights. {problem}")
        elif is_ours:
            problems += self.file.model_problems(model.config)
            names = _attempt(lambda: model.task.class_names(self.labels), problems)
        else:
            name = type(model).__name__
            problems.append(f'route="direct" writes VisionTransformers; use route="converter". Received: {name}')
        if self.sizes and is_ours:
            _attempt(lambda: check_resizable(model.config, model.config.replace(**self.sizes)), problems)
        elif self.sizes:
            problems.append(f"{' and '.join(self.sizes)} is for VisionTransformers. Received: {type(model).__name__}")
        if problems or mode is None:
            raise ValueError("tflite: " + "; ".join(problems))
        return mode, dataclasses.replace(
            self.file, storage=STORAGES[mode.storage], labels=names, patches=self.file.patches or mode.patches
        )

    def _problems(self) -> Iterator[str]:
        """Yield one sentence for each option beside the file's that is wrong for every model."""
        if self.route not in ROUTES:
            yield f"route must be one of {list(ROUTES)}. Received: {self.route!r}"
        if not is_count(self.threads, least=1):
            yield f"threads must be an integer >= 1. Received: {self.threads!r}"
        for name, value in self.thresholds.items():
            if value is not None:
                yield from field_rules(Mode)[name].problems(value, name)

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


def _attempt(function: Callable[[], Result], problems: list[str]) -> Result | None:
    """Return a function's result, or None with the message of its ValueError in `problems`."""
    try:
        return function()
    except ValueError as error:
        problems.append(str(error))
        return None
