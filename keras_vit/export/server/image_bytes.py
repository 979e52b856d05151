"""Decode and prepare JPEG and PNG files inside a TensorFlow graph, where Python cannot check them first."""

from typing import Any

import tensorflow as tf

from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig
from keras_vit.model.images import jpeg_png

PARALLEL_IMAGES = 4  # decoded at the same time, so that memory is bounded


def strict(files: Any, config: ViTConfig) -> Any:
    """Decode and prepare JPEG and PNG files, strings (batch,): float32 (batch, height, width, channels).

    The pixels are those of `preprocess.decode`. If a file is damaged, too large, of another format, or CMYK without
    Adobe's mark, the call fails. All headers are checked before anything is decoded.
    """
    headers = tf.map_fn(jpeg_png.read_header, files, fn_output_signature=jpeg_png.HEADER_SPEC)
    checks = []
    for holds, message, values in jpeg_png.requirements(headers):
        numbers = tf.where(~holds)[:, 0]
        values = [] if isinstance(values, str) else [tf.gather(values, numbers)]
        words = [message, *values, "- number of the file in the batch, counted from 0:", numbers]
        checks.append(_require(tf.reduce_all(holds), *words))
    with tf.control_dependencies(checks):
        files = tf.identity(files)
    return tf.map_fn(
        lambda row: _decode_and_prepare(row[0], row[1], config),
        (files, headers.orientation),
        fn_output_signature=_spec(config),
        parallel_iterations=PARALLEL_IMAGES,
    )


def tolerant(files: Any, config: ViTConfig) -> tuple[Any, Any]:
    """Decode and prepare files like `strict`, with zeros for a bad file; return also bool (batch,): True if good."""
    count = tf.size(files, tf.int64)

    def decode(number: Any) -> tuple[Any, Any]:
        header = jpeg_png.read_header(files[number])
        checks = [_require(holds, message) for holds, message, _ in jpeg_png.requirements(header)]
        with tf.control_dependencies(checks):
            file = tf.identity(files[number])
        return number, _decode_and_prepare(file, header.orientation, config)

    stream = tf.data.Dataset.range(count).map(decode, num_parallel_calls=PARALLEL_IMAGES)
    spec = _spec(config)
    images = tf.TensorArray(tf.float32, size=tf.size(files), element_shape=spec.shape)
    for number in tf.range(tf.size(files)):
        images = images.write(number, tf.zeros(spec.shape))
    valid = tf.zeros((count,), tf.bool)
    for number, image in stream.ignore_errors().with_options(_stream_options()):
        images = images.write(tf.cast(number, tf.int32), image)
        valid = tf.tensor_scatter_nd_update(valid, [[number]], [True])
    return images.stack(), valid


def _stream_options() -> Any:
    """Return options without tuning, which TensorFlow would start again at each call."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.threading.max_intra_op_parallelism = 1
    return options


def _spec(config: ViTConfig) -> Any:
    return tf.TensorSpec((*config.size, config.num_channels), tf.float32)


def _decode_and_prepare(file: Any, orientation: Any, config: ViTConfig) -> Any:
    """Decode and prepare one file with a good header."""
    prepare = preprocess.preprocessing_function(
        image_size=config.size, num_channels=config.num_channels, preprocessing=config.preprocessing
    )
    pixels = jpeg_png.decode_pixels(file, orientation)
    return prepare(jpeg_png.to_grey(pixels) if config.num_channels == 1 else pixels)


def _require(condition: Any, *words: Any) -> Any:
    """Return an operation that fails with this message if the condition is false, without tf.debugging's branch."""
    return tf.raw_ops.Assert(condition=condition, data=[tf.convert_to_tensor(word) for word in words])
