"""Decode and prepare JPEG and PNG files inside a TensorFlow graph, where Python cannot check them first."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig

MAX_PIXELS = 50_000_000  # of one image: 150 MB when decoded. A file of 0.4 MB can claim 400 million
CHANNELS = (1, 3)  # grey and colour: image files have no others
PARALLEL_IMAGES = 4  # decoded at the same time, so that memory is bounded

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_EMPTY_PNG = _PNG + bytes(25)  # as long as a PNG's signature and first chunk
_SMALL_JPEG = bytes.fromhex("ffd8ffc0000b080001000101011100ffda0008010100003f0000ffd9")  # header of one grey pixel
_CMYK_COMPONENTS = 4
_ADOBE = "Adobe"  # marks inverted inks; without it libjpeg reads them as they are, and Pillow inverts them
_TOO_LARGE = f"An image has 1 to {MAX_PIXELS:,} pixels; these sides or numbers in the batch do not fit:"


def strict(files: Any, config: ViTConfig) -> Any:
    """Decode and prepare JPEG and PNG files, strings (batch,): float32 (batch, height, width, channels).

    The pixels are those of `preprocess.decode` and Pillow (CMYK within one level). If a file is damaged, too large, of
    another format, or CMYK without Adobe's mark, the call fails. Headers are checked before anything is decoded.
    """
    is_jpeg, is_png, fits = _read_headers(files)
    is_known = is_jpeg | is_png
    unknown, too_large = (tf.where(~passed)[:, 0] for passed in (is_known, fits))
    checks = [
        _require(tf.reduce_all(is_known), "Not a JPEG or PNG file: number", unknown, "of the batch, counted from 0"),
        _require(tf.reduce_all(fits), _TOO_LARGE, too_large),
    ]
    with tf.control_dependencies(checks):
        files = tf.identity(files)
    return tf.map_fn(
        lambda row: _decode_and_prepare(row[0], row[1], config),
        (files, is_jpeg),
        fn_output_signature=_spec(config),
        parallel_iterations=PARALLEL_IMAGES,
    )


def tolerant(files: Any, config: ViTConfig) -> tuple[Any, Any]:
    """Decode and prepare files like `strict`, with zeros for a bad file; return also bool (batch,): True if good."""
    is_jpeg, is_png, fits = _read_headers(files)
    numbers = tf.where((is_jpeg | is_png) & fits)[:, 0]
    stream = tf.data.Dataset.from_tensor_slices(numbers).map(
        lambda number: (number, _decode_and_prepare(files[number], is_jpeg[number], config)),
        num_parallel_calls=PARALLEL_IMAGES,
    )
    spec = _spec(config)
    count = tf.size(files)
    images = tf.TensorArray(tf.float32, size=count, element_shape=spec.shape)
    for number in tf.range(count):
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


def _decode_and_prepare(file: Any, is_jpeg: Any, config: ViTConfig) -> Any:
    """Decode and prepare one file with a good header."""
    prepare = preprocess.preprocessing_function(
        image_size=config.size, num_channels=config.num_channels, preprocessing=config.preprocessing
    )
    shape = tf.io.extract_jpeg_shape(tf.where(is_jpeg, file, _SMALL_JPEG))
    sides = tf.cast(shape[:2], tf.int64)
    is_readable = tf.strings.regex_full_match(tf.where(shape[2] == _CMYK_COMPONENTS, file, _ADOBE), rf"\C*{_ADOBE}\C*")
    checks = [
        _require(_fits(sides), _TOO_LARGE, sides),
        _require(
            is_readable, "A CMYK JPEG without the mark of Adobe: save it as RGB, because readers differ in its colours"
        ),
    ]
    with tf.control_dependencies(checks):
        pixels = tf.io.decode_jpeg(file, channels=3, dct_method="INTEGER_ACCURATE")  # decodes PNG as well
    pixels = tf.ensure_shape(pixels, (None, None, 3))
    return prepare(tf.image.rgb_to_grayscale(pixels) if config.num_channels == 1 else pixels)


def _read_headers(files: Any) -> tuple[Any, Any, Any]:
    """Return three bool tensors (batch,): whether a file is a JPEG, is a PNG, and does not claim too many pixels.

    The size of a JPEG is checked later, when it is decoded.
    """
    headers = tf.where(tf.strings.length(files) >= len(_EMPTY_PNG), files, _EMPTY_PNG)
    is_jpeg, is_png = (tf.strings.substr(headers, 0, len(magic)) == magic for magic in (_JPEG, _PNG))
    digits = tf.cast(tf.io.decode_raw(tf.strings.substr(headers, 16, 8), tf.uint8), tf.int64)
    sides = tf.reduce_sum(tf.reshape(digits, (-1, 2, 4)) * [1 << 24, 1 << 16, 1 << 8, 1], axis=-1)
    return is_jpeg, is_png & (headers != _EMPTY_PNG), is_jpeg | _fits(sides)


def _fits(sides: Any) -> Any:
    pixels = tf.reduce_prod(sides, axis=-1)
    return (pixels > 0) & (pixels <= MAX_PIXELS)


def _require(condition: Any, *words: Any) -> Any:
    """Return an operation that fails with this message if the condition is false, without tf.debugging's branch."""
    return tf.raw_ops.Assert(condition=condition, data=[tf.convert_to_tensor(word) for word in words])
