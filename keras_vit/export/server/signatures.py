"""What a server can ask of a model: the signatures of its SavedModel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_vit.export.server import image_bytes, inference
from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer

Outputs = dict[str, Any]
BFLOAT16 = "_bfloat16"  # behind a signature's name: the same with products in bfloat16


def module(
    model: VisionTransformer, *, labels: Sequence[str] | None, top: int, bfloat16: bool
) -> tuple[Any, dict[str, Any]]:
    """A tf.Module with the model's weights, each once, and its signatures.

    It holds the TensorFlow variables themselves: behind Keras's wrappers the C++ loader does not find them, and
    `model.export` stores each of them twice (keras issue 23553).

    Args:
        model: a VisionTransformer.
        labels: names of its classes; None names them by number.
        top: how many classes `classes` and `scores` have.
        bfloat16: whether there are `serving_bfloat16` and `float_images_bfloat16` too.

    Returns:
        the module, and its functions by the name of the signature.
    """
    import tensorflow as tf

    config = model.config
    height, width = config.size
    files = tf.TensorSpec((None,), tf.string, name="image_bytes")
    floats = tf.TensorSpec((None, height, width, config.num_channels), tf.float32, name="images")
    bytes_ = tf.TensorSpec((None, None, None, config.num_channels), tf.uint8, name="images")
    prepare = preprocess.in_graph(
        image_size=(height, width), num_channels=config.num_channels, preprocessing=config.preprocessing
    )
    answer = _answer(config, labels, top)
    run = tf.function(inference.function(model), input_signature=[floats])  # in the file once, called by all

    def tolerant(image_bytes: Any) -> Outputs:
        images, valid = _files.tolerant(image_bytes, config)
        found = {name: _blank(value, valid) for name, value in answer(run(images)).items()}
        return {**found, "valid": valid}

    # Names of arguments are names of inputs.
    made: dict[str, tuple[Callable[..., Outputs], Any]] = {
        "serving_default": (lambda image_bytes: answer(run(_files.strict(image_bytes, config))), files),
        "tolerant": (tolerant, files),
        "features": (lambda image_bytes: _only(run(_files.strict(image_bytes, config)), "features"), files),
        "float_images": (lambda images: answer(run(images), logits=True), floats),
        "uint8_images": (lambda images: answer(run(prepare(images)), logits=True), bytes_),
    }
    if bfloat16:
        half = tf.function(inference.bfloat16(model), input_signature=[floats])
        made["serving" + BFLOAT16] = (lambda image_bytes: answer(half(_files.strict(image_bytes, config))), files)
        made["float_images" + BFLOAT16] = (lambda images: answer(half(images), logits=True), floats)
    if config.num_channels not in image_bytes.CHANNELS:
        made = {name: (function, spec) for name, (function, spec) in made.items() if spec is not files}
        made["serving_default"] = made["float_images"]

    holder = tf.Module()
    holder.weights = [variable.value for variable in model.variables]
    holder.functions = {name: tf.function(function, input_signature=[spec]) for name, (function, spec) in made.items()}
    return holder, dict(holder.functions)


_files = image_bytes  # `image_bytes` is also the name of an input


def _answer(config: ViTConfig, labels: Sequence[str] | None, top: int) -> Callable[..., Outputs]:
    """From what the model computes to what a caller gets."""
    import tensorflow as tf

    names = np.array(labels if labels is not None else [str(number) for number in range(config.num_classes)], object)

    def answer(found: Outputs, *, logits: bool = False) -> Outputs:
        if not config.num_classes:
            return _only(found, "features")
        probabilities = tf.nn.softmax(found["logits"])
        scores, numbers = tf.math.top_k(probabilities, min(top, config.num_classes))
        # Not a name that ends in _bytes: a server sends those as base64.
        outputs = {"classes": tf.gather(tf.constant(names), numbers), "scores": scores, "probabilities": probabilities}
        return {**outputs, "logits": found["logits"]} if logits else outputs

    return answer


def _only(found: Outputs, name: str) -> Outputs:
    return {name: found[name]}


def _blank(value: Any, valid: Any) -> Any:
    """The rows of images that are valid; the others hold zeros and empty strings."""
    import tensorflow as tf

    rows = tf.reshape(valid, (-1, *[1] * (value.shape.rank - 1)))
    return tf.where(rows, value, tf.constant("" if value.dtype == tf.string else 0, value.dtype))
