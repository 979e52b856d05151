"""Check the options of `export.tflite` against the model, all in one call."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import keras

from keras_vit.export import _converter
from keras_vit.export.check.inputs import image_shape
from keras_vit.export.litert.options import Options, image_config
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.modes import Mode
from keras_vit.model import task as tasks
from keras_vit.model.config import ViTConfig, check_resizable

Result = TypeVar("Result")


def check_options(options: Options, model: keras.Model, *, has_calibration: bool) -> tuple[Mode, Options]:
    """Return the mode, and the options with what follows from the mode and the model.

    One ValueError has everything that is wrong with the options, does not go together or is impossible for the model. A
    FileNotFoundError names a missing .toml file.
    """
    is_ours = isinstance(getattr(model, "config", None), ViTConfig)
    problems = list(options.problems())
    mode = _attempt(lambda: modes.load_mode(options.quantize), problems)
    names = None
    if mode is not None and mode.needs_calibration and not has_calibration:
        problems.append(
            f"quantize={mode.name!r} needs calibration images: a hundred or more as the model will meet them, "
            "calibration=model.preprocess(...) (--images FOLDER). Received: None"
        )
    if options.route == "converter":
        problems += [*_direct_only(options), *_converter.problems(model, mode)]
    else:
        problems += _attempt(lambda: list(_model_problems(options, model)), problems) or []
        names = _attempt(lambda: tasks.of_model(model).class_names(options.labels), problems)
    if options.sizes and is_ours:
        _attempt(lambda: check_resizable(model.config, model.config.replace(**options.sizes)), problems)
    elif options.sizes:
        problems.append(f"{' and '.join(options.sizes)} is for VisionTransformers. Received: {type(model).__name__}")
    if problems or mode is None:
        raise ValueError("tflite: " + "; ".join(problems))
    named = dataclasses.replace(options, class_names=names, patches=options.patches or mode.patches)
    return mode, dataclasses.replace(named, storage=mode, norms=mode.norms)


def _model_problems(options: Options, model: keras.Model) -> Iterator[str]:
    """Yield a sentence for each reason why no file of this model can be written directly."""
    image_shape(model)
    if not isinstance(model, keras.Function):
        yield (
            'route="direct" writes functional Keras models, layer by layer; use route="converter". '
            f"Received: {type(model).__name__}"
        )
    if len(model.outputs) != 1:
        yield f"the model must have one output. Received: {len(model.outputs)} outputs"
    if options.attention and not hasattr(model, "attention_maps"):
        yield f"attention=True is for VisionTransformers. Received: {type(model).__name__}"
    yield from options.model_problems(image_config(model), tasks.of_model(model))


def _direct_only(options: Options) -> Iterator[str]:
    """Yield a sentence with the options that TensorFlow's converter does not take."""
    direct_only = {
        f"input_dtype={options.input_dtype!r:.200}": options.input_dtype != "float32",
        "source_size": options.source_size is not None,
        f"output={options.output!r:.200}": options.output != "logits",
        "attention": options.attention,
        f"patches={options.patches!r:.200}": options.patches is not None,
        "labels": options.labels is not None,
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
