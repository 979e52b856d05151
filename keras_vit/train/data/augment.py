"""Augment training images: crops, flip, shift and mixup as stateless functions of tensors.

Pixels are 0..255; normalisation comes last. Sources: vit_jax/input_pipeline.py, and big_vision's `pp/ops_image.py`
(crops, flip), `utils.py` (mixup) and `pp/autoaugment.py` (RandAugment, in `randaugment.py`).
"""

from typing import Any

import tensorflow as tf

from keras_vit.model.images import jpeg_png

ASPECT_RATIOS = (3 / 4, 1.33)  # of an inception crop, width / height
RANDOM_CROP = 448 / 384  # size before a random crop / size after it, as in big_vision's configs/transfer.py


def inception_crop(image: Any, seed: Any, *, min_area: float) -> Any:
    """Cut out a part of random area, aspect ratio, position. `min_area` is its smallest share of the image, in (0, 1].

    The image may be a JPEG or PNG file: the part is then in colour and upright, and of a JPEG only the part is decoded.
    """
    if image.dtype != tf.string:
        return _cut_out(image, _sample_window(tf.shape(image), seed, min_area))
    orientation = jpeg_png.read_orientation(image)

    def from_jpeg() -> Any:
        shape = tf.io.extract_jpeg_shape(image)
        sides = jpeg_png.upright_sides(shape[:2], orientation)
        window = _sample_window(tf.concat([sides, shape[2:]], axis=0), seed, min_area)
        stored = jpeg_png.stored_window(window, sides, orientation)
        part = tf.io.decode_and_crop_jpeg(image, stored, channels=3, dct_method="INTEGER_ACCURATE")
        return jpeg_png.turn_upright(tf.ensure_shape(part, (None, None, 3)), orientation)

    def from_png() -> Any:
        pixels = jpeg_png.decode_pixels(image, orientation)
        return _cut_out(pixels, _sample_window(tf.shape(pixels), seed, min_area))

    return tf.ensure_shape(tf.cond(tf.io.is_jpeg(image), from_jpeg, from_png), (None, None, 3))


def _sample_window(shape: Any, seed: Any, min_area: float) -> Any:
    """Sample an inception crop: (top, left, height, width)."""
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        tf.zeros((0, 0, 4)),
        seed=seed,
        min_object_covered=0.0,
        aspect_ratio_range=ASPECT_RATIOS,
        area_range=(min_area, 1.0),
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], size[:2]], axis=0)


def _cut_out(image: Any, window: Any) -> Any:
    top, left, height, width = tf.unstack(window)
    return image[top : top + height, left : left + width]


def random_crop(image: Any, draws: Any, size: tuple[int, int]) -> Any:
    """Cut out a part of `size`, (height, width), at a random position: two `draws` in [0, 1) give top and left."""
    places = tf.shape(image)[:2] - tf.constant(size) + 1
    top, left = tf.unstack(tf.cast(draws * tf.cast(places, tf.float32), tf.int32))
    return tf.ensure_shape(image[top : top + size[0], left : left + size[1]], (*size, image.shape[-1]))


def random_shift(image: Any, draws: Any, *, max_share: float) -> Any:
    """Shift an image of static shape by up to `max_share` of its sides, by two `draws` in [0, 1); fill with black."""
    height, width, _ = image.shape
    margins = [(margin, margin) for margin in (round(max_share * height), round(max_share * width))]
    return random_crop(tf.pad(image, [*margins, (0, 0)]), draws, (height, width))


def random_flip(image: Any, draw: Any) -> Any:
    """Mirror the image horizontally where `draw`, a uniform random number in [0, 1), is below 0.5."""
    return tf.cond(draw < 0.5, lambda: tf.reverse(image, (1,)), lambda: image)


def nearest(values: Any, size: tuple[int, int]) -> Any:
    """Resize a map (height, width, 1) to `size`, each pixel the value of the nearest one."""
    return tf.ensure_shape(tf.image.resize(values, size, "nearest"), (*size, values.shape[-1]))


def sample_mixup_weight(seed: Any, *, parameter: float) -> Any:
    """Sample an image's own weight in mixup: max(a, 1 - a) with a from Beta(p, p), p > 0; float32 in [0.5, 1]."""
    # With X and Y from Gamma(p), X / (X + Y) is from Beta(p, p). A sample of Gamma(p) is one of Gamma(p + 1) times
    # u^(1/p) with uniform u, which underflows for a small p: hence logarithms, whose difference is log(a / (1 - a)).
    gamma_seed, uniform_seed = tf.unstack(tf.random.experimental.stateless_split(seed, 2))
    gammas = tf.random.stateless_gamma((2,), gamma_seed, alpha=tf.constant(parameter + 1, tf.float64), dtype=tf.float64)
    uniforms = 1 - tf.random.stateless_uniform((2,), uniform_seed, dtype=tf.float64)
    log_x, log_y = tf.unstack(tf.math.log(gammas) + tf.math.log(uniforms) / parameter)
    return tf.cast(tf.sigmoid(tf.abs(log_x - log_y)), tf.float32)


def mixup(values: Any, weight: Any) -> Any:
    """Mix each row of a batch by its `weight` with the row before it, the first with the last (arXiv 1710.09412)."""
    return weight * values + (1.0 - weight) * tf.roll(values, shift=1, axis=0)
