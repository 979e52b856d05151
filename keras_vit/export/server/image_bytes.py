"""JPEG and PNG files to a model's input inside of a TensorFlow graph, in which no Python can look at them first."""

from __future__ import annotations

from typing import Any

from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig

MOST_PIXELS = 50_000_000  # of one image: 150 MB decoded. A file of 0.4 MB can claim 400 million
CHANNELS = (1, 3)  # grey and colour: of other numbers there are no files
AT_ONCE = 4  # images that are decoded at the same time, so that memory has a bound

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_EMPTY_PNG = _PNG + bytes(25)  # as long as a PNG's signature and first chunk
_SMALL_JPEG = bytes.fromhex("ffd8ffc0000b080001000101011100ffda0008010100003f0000ffd9")  # the head of one grey pixel
_INKS = 4  # components of a CMYK file
_MARK = "Adobe"  # which says that inks are inverted; without it libjpeg takes them as they are, and Pillow inverted
_TOO_LARGE = f"An image has 1 to {MOST_PIXELS:,} pixels; these sides or numbers in the batch do not fit:"


def strict(files: Any, config: ViTConfig) -> Any:
    """The prepared images of JPEG and PNG files; one bad file fails the call.

    Decoded as `keras_vit.preprocess.decode` does, which equals Pillow to the bit (CMYK to one level): the accurate DCT,
    palettes in colour, alpha dropped, 16 bits by their upper 8, the orientation in EXIF ignored; then prepared.

    Args:
        files: strings (batch,); the batch may be empty.
        config: of the model.

    Returns:
        float32 (batch, height, width, channels).

    Raises:
        tf.errors.InvalidArgumentError: when run, for what is neither JPEG nor PNG, is damaged, has more than
            MOST_PIXELS, or is CMYK without Adobe's mark, on which libjpeg and Pillow disagree; the header is looked at
            before anything is decoded.
    """
    import tensorflow as tf

    is_jpeg, is_png, fits = _looked_at(files)
    known = is_jpeg | is_png
    bad = tf.where(~known)[:, 0], tf.where(~fits)[:, 0]
    checks = [
        _require(tf.reduce_all(known), "Not a JPEG or PNG file: number", bad[0], "of the batch, counted from 0"),
        _require(tf.reduce_all(fits), _TOO_LARGE, bad[1]),
    ]
    with tf.control_dependencies(checks):
        files = tf.identity(files)
    return tf.map_fn(
        lambda row: _prepared(row[0], row[1], config),
        (files, is_jpeg),
        fn_output_signature=_spec(config),
        parallel_iterations=AT_ONCE,
    )


def tolerant(files: Any, config: ViTConfig) -> tuple[Any, Any]:
    """The same, but a bad file is a black image and marked.

    Returns:
        the images as `strict` gives them, and bool (batch,): which files were good.
    """
    import tensorflow as tf

    is_jpeg, is_png, fits = _looked_at(files)
    numbers = tf.where((is_jpeg | is_png) & fits)[:, 0]
    stream = tf.data.Dataset.from_tensor_slices(numbers).map(
        lambda number: (number, _prepared(files[number], is_jpeg[number], config)), num_parallel_calls=AT_ONCE
    )
    spec = _spec(config)
    count = tf.size(files)
    images = tf.TensorArray(tf.float32, size=count, element_shape=spec.shape)
    for number in tf.range(count):
        images = images.write(number, tf.zeros(spec.shape))
    valid = tf.zeros((count,), tf.bool)
    for number, image in stream.ignore_errors().with_options(_plain_options()):
        images = images.write(tf.cast(number, tf.int32), image)
        valid = tf.tensor_scatter_nd_update(valid, [[number]], [True])
    return images.stack(), valid


def _plain_options() -> Any:
    """Without the searches for a better pipeline that TensorFlow starts for each new one, here every call."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.threading.max_intra_op_parallelism = 1
    return options


def _spec(config: ViTConfig) -> Any:
    import tensorflow as tf

    return tf.TensorSpec((*config.size, config.num_channels), tf.float32)


def _prepared(file: Any, is_jpeg: Any, config: ViTConfig) -> Any:
    """One file, whose head `_looked_at` found good."""
    import tensorflow as tf

    prepare = preprocess.in_graph(
        image_size=config.size,
        num_channels=config.num_channels,
        preprocessing=config.preprocessing,
    )
    shape = tf.io.extract_jpeg_shape(tf.where(is_jpeg, file, _SMALL_JPEG))
    sides = tf.cast(shape[:2], tf.int64)
    marked = tf.strings.regex_full_match(tf.where(shape[2] == _INKS, file, _MARK), rf"\C*{_MARK}\C*")
    checks = [
        _require(_fits(sides), _TOO_LARGE, sides),
        _require(marked, "A CMYK JPEG without the mark of Adobe: save it as RGB, for readers disagree on its colours"),
    ]
    with tf.control_dependencies(checks):
        pixels = tf.io.decode_jpeg(file, channels=3, dct_method="INTEGER_ACCURATE")  # decodes PNG as well
    pixels = tf.ensure_shape(pixels, (None, None, 3))
    return prepare(tf.image.rgb_to_grayscale(pixels) if config.num_channels == 1 else pixels)


def _looked_at(files: Any) -> tuple[Any, Any, Any]:
    """Of every file, by its first bytes: whether it is a JPEG, whether it is a PNG, whether a PNG's sides fit."""
    import tensorflow as tf

    heads = tf.where(tf.strings.length(files) >= len(_EMPTY_PNG), files, _EMPTY_PNG)
    is_jpeg, is_png = (tf.strings.substr(heads, 0, len(magic)) == magic for magic in (_JPEG, _PNG))
    digits = tf.cast(tf.io.decode_raw(tf.strings.substr(heads, 16, 8), tf.uint8), tf.int64)
    sides = tf.reduce_sum(tf.reshape(digits, (-1, 2, 4)) * [1 << 24, 1 << 16, 1 << 8, 1], axis=-1)
    return is_jpeg, is_png & (heads != _EMPTY_PNG), is_jpeg | _fits(sides)


def _fits(sides: Any) -> Any:
    import tensorflow as tf

    pixels = tf.reduce_prod(sides, axis=-1)
    return (pixels > 0) & (pixels <= MOST_PIXELS)


def _require(condition: Any, *words: Any) -> Any:
    """An operation that fails with words where something does not hold; without the branch of tf.debugging.Assert."""
    import tensorflow as tf

    return tf.raw_ops.Assert(condition=condition, data=[tf.convert_to_tensor(word) for word in words])
