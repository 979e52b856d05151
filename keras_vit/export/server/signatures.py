"""Build the signatures of a SavedModel, by which a server calls the model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.export.server import image_bytes as encoded
from keras_vit.export.server import inference
from keras_vit.export.server.inference import Outputs
from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig
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
    answer = _answer_function(config, labels, top)
    run = tf.function(inference.model_function(model), input_signature=[floats])  # once in the file, called by all

    def tolerant(image_bytes: Any) -> Outputs:
        images, valid = encoded.tolerant(image_bytes, config)
        outputs = {name: _mask(value, valid) for name, value in answer(run(images)).items()}
        return {**outputs, "valid": valid}

    # The names of arguments are those of the inputs.
    specified: dict[str, tuple[Callable[..., Outputs], Any]] = {
        "serving_default": (lambda image_bytes: answer(run(decode(image_bytes))), files),
        "tolerant": (tolerant, files),
        "features": (lambda image_bytes: _features(run(decode(image_bytes))), files),
        "float_images": (lambda images: answer(run(images), logits=True), floats),
        "uint8_images": (lambda images: answer(run(prepare(images)), logits=True), pixels),
    }
    if bfloat16:
        run16 = tf.function(inference.bfloat16_function(model), input_signature=[floats])
        specified["serving" + BFLOAT16] = (lambda image_bytes: answer(run16(decode(image_bytes))), files)
        specified["float_images" + BFLOAT16] = (lambda images: answer(run16(images), logits=True), floats)
    if config.num_channels not in jpeg_png.CHANNELS:
        specified = {name: (function, spec) for name, (function, spec) in specified.items() if spec is not files}
        specified["serving_default"] = specified["float_images"]

    module = tf.Module()
    module.weights = [variable.value for variable in model.variables]
    module.functions = {
        name: tf.function(function, input_signature=[spec]) for name, (function, spec) in specified.items()
    }
    return module, dict(module.functions)


def _answer_function(config: ViTConfig, labels: Sequence[str] | None, top: int) -> Callable[..., Outputs]:
    """Return a function from the model's outputs to the signature's outputs."""
    names = np.array(labels if labels is not None else [str(number) for number in range(config.num_classes)], object)

    def answer(computed: Outputs, *, logits: bool = False) -> Outputs:
        if not config.num_classes:
            return _features(computed)
        probabilities = tf.nn.softmax(computed["logits"])
        scores, numbers = tf.math.top_k(probabilities, min(top, config.num_classes))
        # No output's name may end in _bytes: servers send those as base64.
        outputs = {"classes": tf.gather(tf.constant(names), numbers), "scores": scores, "probabilities": probabilities}
        return {**outputs, "logits": computed["logits"]} if logits else outputs

    return answer


def _features(computed: Outputs) -> Outputs:
    return {"features": computed["features"]}


def _mask(value: Any, valid: Any) -> Any:
    """Replace the rows of bad images by zeros or empty strings."""
    rows = tf.reshape(valid, (-1, *[1] * (value.shape.rank - 1)))
    return tf.where(rows, value, tf.constant("" if value.dtype == tf.string else 0, value.dtype))
