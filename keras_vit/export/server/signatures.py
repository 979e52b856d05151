"""Build the signatures of a SavedModel, by which a server calls the model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_vit.export.server import image_bytes as encoded
from keras_vit.export.server import inference
from keras_vit.export.server.inference import Outputs
from keras_vit.model import preprocess
from keras_vit.model.images import jpeg_png
from keras_vit.model.vision_transformer import VisionTransformer

BFLOAT16 = "_bfloat16"  # suffix of the signatures with products in bfloat16


def build(
    model: VisionTransformer, *, labels: Sequence[str] | None, top: int, bfloat16: bool
) -> tuple[Any, dict[str, Any]]:
    """Return a tf.Module with the model's weights, each once, and its functions by the names of their signatures.

    The weights are TensorFlow variables: inside Keras variables the C++ loader does not find them, and `model.export`
    stores each twice (keras issue 23553).
    """
    config = model.config
    files = tf.TensorSpec((None,), tf.string, name="image_bytes")
    floats = tf.TensorSpec((None, *config.size, config.num_channels), tf.float32, name="images")
    pixels = tf.TensorSpec((None, None, None, config.num_channels), tf.uint8, name="images")
    prepare = preprocess.preprocessing_function(
        image_size=config.size, num_channels=config.num_channels, preprocessing=config.preprocessing
    )
    decode = functools.partial(encoded.strict, config=config)
    own_output = model.task.outputs[0]
    answer = functools.partial(model.task.served_outputs, names=labels, top=top)
    run = tf.function(inference.model_function(model), input_signature=[floats])  # once in the file, called by all

    def tolerant(image_bytes: Any) -> Outputs:
        images, valid = encoded.tolerant(image_bytes, config)
        outputs = {name: _mask(value, valid) for name, value in answer(run(images)).items()}
        return {**outputs, "valid": valid}

    def with_output(computed: Outputs) -> Outputs:
        return {**answer(computed), own_output: computed[own_output]}

    # The names of arguments are those of the inputs.
    specified: dict[str, tuple[Callable[..., Outputs], Any]] = {
        "serving_default": (lambda image_bytes: answer(run(decode(image_bytes))), files),
        "tolerant": (tolerant, files),
        "features": (lambda image_bytes: {"features": run(decode(image_bytes))["features"]}, files),
        "float_images": (lambda images: with_output(run(images)), floats),
        "uint8_images": (lambda images: with_output(run(prepare(images))), pixels),
    }
    if not isinstance(model, VisionTransformer):  # a model of maps
        del specified["features"]
    if bfloat16:
        run16 = tf.function(inference.bfloat16_function(model), input_signature=[floats])
        specified["serving" + BFLOAT16] = (lambda image_bytes: answer(run16(decode(image_bytes))), files)
        specified["float_images" + BFLOAT16] = (lambda images: with_output(run16(images)), floats)
    if config.num_channels not in jpeg_png.CHANNELS:
        specified = {name: (function, spec) for name, (function, spec) in specified.items() if spec is not files}
        specified["serving_default"] = specified["float_images"]

    module = tf.Module()
    module.weights = [variable.value for variable in model.variables]
    module.functions = {
        name: tf.function(function, input_signature=[spec]) for name, (function, spec) in specified.items()
    }
    return module, dict(module.functions)


def _mask(value: Any, valid: Any) -> Any:
    """Replace the rows of bad images by zeros or empty strings."""
    rows = tf.reshape(valid, (-1, *[1] * (value.shape.rank - 1)))
    return tf.where(rows, value, tf.constant("" if value.dtype == tf.string else 0, value.dtype))
