"""The official training augmentations, each a stateless function of tensors: crops, flip, shift, mixup.

Pixels are 0..255 throughout; normalisation comes last. Sources: vit_jax/input_pipeline.py and big_vision's
`pp/ops_image.py` (crops, flip), `utils.py` (mixup), `pp/autoaugment.py` (RandAugment, in `randaugment.py`).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

ASPECTS = (3 / 4, 1.33)  # an inception crop's width over its height
RANDOM_CROP = 448 / 384  # what is cut from over what is cut out, as in big_vision's configs/transfer.py


def decode(image: Any) -> Any:
    """An encoded image's pixels, in colour: JPEG, with the accurate DCT as `keras_vit.preprocess`, or PNG.

    Args:
        image: string scalar.

    Returns:
        uint8 (height, width, 3).
    """
    return tf.io.decode_jpeg(image, channels=3, dct_method="INTEGER_ACCURATE")  # TensorFlow's takes PNG as well


def inception_crop(image: Any, seed: Any, *, min_area: float) -> Any:
    """A random part of the image: its area, its aspect ratio and its place are drawn.

    Args:
        image: string scalar, of which a JPEG is decoded only where it is needed; or (height, width, channels).
        seed: integers (2,).
        min_area: least share of the image's area, above 0; the largest is 1.

    Returns:
        the part, of unknown height and width; uint8 in colour for an encoded image.
    """
    if image.dtype != tf.string:
        return _slice(image, _window(tf.shape(image), seed, min_area))

    def jpeg() -> Any:
        window = _window(tf.io.extract_jpeg_shape(image), seed, min_area)
        return tf.io.decode_and_crop_jpeg(image, window, channels=3, dct_method="INTEGER_ACCURATE")

    def other() -> Any:
        pixels = decode(image)
        return _slice(pixels, _window(tf.shape(pixels), seed, min_area))

    return tf.ensure_shape(tf.cond(tf.io.is_jpeg(image), jpeg, other), (None, None, 3))


def _window(shape: Any, seed: Any, min_area: float) -> Any:
    """The drawn part as (top, left, height, width)."""
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        tf.zeros((0, 0, 4)),
        seed=seed,
        min_object_covered=0.0,
        aspect_ratio_range=ASPECTS,
        area_range=(min_area, 1.0),
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], size[:2]], axis=0)


def _slice(image: Any, window: Any) -> Any:
    top, left, height, width = tf.unstack(window)
    return image[top : top + height, left : left + width]


def place(image: Any, draws: Any, size: tuple[int, int]) -> Any:
    """The part of a size at a random place, each place as likely as the others.

    Args:
        image: (height, width, channels), not smaller than the part.
        draws: floats (2,) in [0, 1): how far down and how far to the right.
        size: (height, width) of the part.
    """
    room = tf.shape(image)[:2] - tf.constant(size) + 1
    top, left = tf.unstack(tf.cast(draws * tf.cast(room, tf.float32), tf.int32))
    return tf.ensure_shape(image[top : top + size[0], left : left + size[1]], (*size, image.shape[-1]))


def shift(image: Any, draws: Any, *, share: float) -> Any:
    """Moves the image by a random number of whole pixels; what comes in is black.

    Args:
        image: (height, width, channels), a static shape.
        draws: floats (2,) in [0, 1).
        share: the most it moves, of either side; rounded to pixels.
    """
    height, width, _ = image.shape
    margin = [(most, most) for most in (round(share * height), round(share * width))]
    return place(tf.pad(image, [*margin, (0, 0)]), draws, (height, width))


def flip(image: Any, draw: Any) -> Any:
    """Mirrors the image, left for right, where `draw`, a float in [0, 1), is below a half."""
    return tf.cond(draw < 0.5, lambda: tf.reverse(image, (1,)), lambda: image)


def mixup_share(seed: Any, *, parameter: float) -> Any:
    """What an image keeps of itself: a of Beta(p, p), the larger of a and 1 - a; float32 in [0.5, 1].

    Args:
        seed: integers (2,).
        parameter: p, above 0.
    """
    # Beta(p, p) is Gamma(p) over the sum of two, and Gamma(p) is Gamma(p + 1) u^(1/p), which for a small p no float can
    # hold: hence the logarithms, whose difference is that of a and 1 - a.
    of_gammas, of_powers = tf.unstack(tf.random.experimental.stateless_split(seed, 2))
    gammas = tf.random.stateless_gamma((2,), of_gammas, alpha=tf.constant(parameter + 1, tf.float64), dtype=tf.float64)
    powers = 1 - tf.random.stateless_uniform((2,), of_powers, dtype=tf.float64)
    one, other = tf.unstack(tf.math.log(gammas) + tf.math.log(powers) / parameter)
    return tf.cast(tf.sigmoid(tf.abs(one - other)), tf.float32)


def mixup(values: Any, share: Any) -> Any:
    """Mixes each row of a batch with the row before it (arXiv 1710.09412); the first with the last.

    Args:
        values: floats (batch, ...): prepared images, or labels.
        share: of itself that a row keeps, a scalar.
    """
    return share * values + (1.0 - share) * tf.roll(values, shift=1, axis=0)
