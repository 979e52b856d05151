"""RandAugment (arXiv 1909.13719) as big_vision trains with it: sixteen operations, stateless, uint8 in and uint8 out.

The operations, their order, and what a magnitude means to each are those of google's `autoaugment.py`
(`distort_image_with_randaugment` in big_vision's `pp/autoaugment.py`), its quirks included, for the AugReg models saw
them: Contrast blends with a grey that is no mean, and thresholds wrap at 256.

An image is worked on as (height, width * channels) where it can be: broadcasting a last axis of three, tf.where and
slices of step -1 take TensorFlow up to ten times as long as the arithmetic around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

MAX_LEVEL = 10  # the magnitude at which an operation has its full published strength; AugReg goes up to 20
FILL = 128  # what comes in from outside of the image
CUTOUT = 40  # half of the side that is cut out at MAX_LEVEL, in pixels
TRANSLATE = 100  # pixels at MAX_LEVEL
DRAWS = 4  # random numbers an operation is given: which, sign, y, x


class Draws(NamedTuple):
    """What chance says to one operation: three numbers in [0, 1).

    Args:
        sign: below a half the direction is the positive one.
        y: a place, as a share of the height.
        x: likewise of the width.
    """

    sign: Any = 0.0
    y: Any = 0.5
    x: Any = 0.5


def randaugment(image: Any, *, layers: int, magnitude: float, seed: Any) -> Any:
    """Applies operations drawn with equal chances, one after the other.

    Args:
        image: uint8 (height, width, channels), a static shape; 3 channels or 1.
        layers: how many operations; the same may come twice.
        magnitude: 0 or more, shared by all operations. 0 is not "no change": it is the darkest Brightness.
        seed: integers (2,). The same seed gives the same image, whatever else runs.

    Returns:
        uint8 of the same shape.

    Raises:
        ValueError: for another dtype, a shape that is not known, other channels, or a magnitude below 0.
    """
    _check(image, magnitude)
    shape = image.shape
    operations = _compiled(shape, magnitude)
    draws = tf.random.stateless_uniform((layers, DRAWS), seed)
    for layer in range(layers):
        which, *drawn = tf.unstack(draws[layer])
        number = tf.cast(which * len(operations), tf.int32)
        # tf.switch_case becomes a Switch for each input of each of some 300 operations, and all of them are visited:
        # that takes longer than the one branch's work. This runs the branch and nothing else.
        (image,) = tf.raw_ops.StatelessCase(
            branch_index=number, input=[image, *drawn], Tout=[tf.uint8], branches=operations, output_shapes=[shape]
        )
    return tf.ensure_shape(image, shape)


def _compiled(shape: Any, magnitude: float) -> list[Any]:
    """The operations as functions of (image, sign, y, x) for images of a shape."""

    def compiled(operation: Callable[[Any, float, Draws], Any]) -> Any:
        def branch(image: Any, sign: Any, y: Any, x: Any) -> Any:
            return operation(image, magnitude, Draws(sign=sign, y=y, x=x))

        number = tf.TensorSpec((), tf.float32)
        return tf.function(branch, autograph=False).get_concrete_function(
            tf.TensorSpec(shape, tf.uint8), number, number, number
        )

    return [compiled(operation) for operation in OPERATIONS.values()]


def _check(image: Any, magnitude: float) -> None:
    if image.dtype != tf.uint8 or not image.shape.is_fully_defined() or image.shape[2:] not in ((1,), (3,)):
        raise ValueError(
            "RandAugment wants uint8 (height, width, 3 or 1) of a known shape. "
            f"Received: {image.dtype.name} {image.shape}"
        )
    if not magnitude >= 0:
        raise ValueError(f"RandAugment's magnitude is 0 or more. Received: {magnitude}")


def _share(magnitude: float, full: float) -> float:
    return magnitude / MAX_LEVEL * full


def _rows(image: Any) -> Any:
    """The image as (height, width * channels)."""
    height, width, channels = image.shape
    return tf.reshape(image, (height, width * channels))


def _every_pixel(values: Any, image: Any) -> Any:
    """Values a channel, as a row (width * channels) of the image."""
    return tf.tile(values, (image.shape[1],))


def _blend(start: Any, image: Any, magnitude: float) -> Any:
    """From `start` (factor 0) over the image (1) and beyond, clipped, rounded down; both (height, width * channels)."""
    factor = _share(magnitude, 1.8) + 0.1
    rows = tf.cast(_rows(image), tf.float32)
    return tf.reshape(_bytes(start + factor * (rows - start)), image.shape)


def _bytes(values: Any) -> Any:
    """Floats clipped to 0..255 and rounded down."""
    return tf.cast(tf.clip_by_value(values, 0.0, 255.0), tf.uint8)


# The operations: (image, magnitude, draws) -> image. Values are changed first, then places.


def _autocontrast(image: Any, magnitude: float, draws: Draws) -> Any:
    low, high = (tf.cast(reduce(image, (0, 1)), tf.float32) for reduce in (tf.reduce_min, tf.reduce_max))
    flat = tf.equal(low, high)
    scale = tf.where(flat, 1.0, 255.0 / tf.where(flat, 1.0, high - low))
    offset = tf.where(flat, 0.0, -low * scale)
    rows = tf.cast(_rows(image), tf.float32) * _every_pixel(scale, image) + _every_pixel(offset, image)
    return tf.reshape(_bytes(rows), image.shape)


def _equalize(image: Any, magnitude: float, draws: Draws) -> Any:
    channels = image.shape[2]
    # Channel c counts in bins 256 c .. 256 c + 255: one histogram and one look-up for all.
    bins = tf.cast(_rows(image), tf.int32) + _every_pixel(tf.range(channels) * 256, image)
    size = 256 * channels
    counts = tf.reshape(tf.math.bincount(tf.reshape(bins, (-1,)), minlength=size, maxlength=size), (channels, 256))
    occupied = tf.where(counts > 0, tf.range(256), -1)
    last = tf.gather(counts, tf.reduce_max(occupied, axis=1), axis=1, batch_dims=1)
    step = (tf.reduce_sum(counts, axis=1) - last)[:, None] // 255
    below = tf.cumsum(counts, axis=1, exclusive=True)
    table = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
    table = tf.where(step == 0, tf.range(256), table)
    return tf.reshape(tf.gather(tf.reshape(tf.cast(table, tf.uint8), (-1,)), bins), image.shape)


def _invert(image: Any, magnitude: float, draws: Draws) -> Any:
    return 255 - image


def _posterize(image: Any, magnitude: float, draws: Draws) -> Any:
    # Magnitude 0 leaves no bits, and TensorFlow shifts a byte by 7 at most; above 20 the shift, a negative number
    # in a byte, is far above 7 again.
    shift = min((8 - int(_share(magnitude, 4))) % 256, 7)
    return tf.bitwise.bitwise_and(image, np.uint8(255 >> shift << shift))


def _solarize(image: Any, magnitude: float, draws: Draws) -> Any:
    # The official code holds it in a byte, where 256 (magnitude 10) and 512 (20) are 0, which inverts all, and 384
    # (15) is 128.
    threshold = np.uint8(int(_share(magnitude, 256)) % 256)
    return tf.bitwise.bitwise_xor(image, tf.cast(image >= threshold, tf.uint8) * 255)  # 255 - v is v ^ 255


def _solarize_add(image: Any, magnitude: float, draws: Draws) -> Any:
    addition = np.uint8(min(int(_share(magnitude, 110)), 255))
    return image + tf.minimum(255 - image, addition) * tf.cast(image < 128, tf.uint8)


def _color(image: Any, magnitude: float, draws: Draws) -> Any:
    if image.shape[2] == 1:
        return image
    # tf.image.rgb_to_grayscale, which scales by 255.5 / 255 and rounds down, once for each channel it is blended with.
    weights = np.repeat(np.array([[0.2989], [0.587], [0.114]], np.float32) * np.float32(255.5 / 255), 3, axis=1)
    grey = tf.floor(tf.linalg.matmul(tf.reshape(tf.cast(image, tf.float32), (-1, 3)), weights))
    return _blend(tf.reshape(grey, (image.shape[0], -1)), image, magnitude)


def _contrast(image: Any, magnitude: float, draws: Draws) -> Any:
    # The official code sums a histogram's counts without their values, so that its "mean" is the number of pixels
    # over 256: 196 at 224 pixels, white from 256 on.
    return _blend(min(float(image.shape[0] * image.shape[1] // 256), 255.0), image, magnitude)


def _brightness(image: Any, magnitude: float, draws: Draws) -> Any:
    return _blend(0.0, image, magnitude)


def _sharpness(image: Any, magnitude: float, draws: Draws) -> Any:
    height, width, channels = image.shape
    if min(height, width) < 3:
        return image
    pixels = tf.cast(_rows(image), tf.float32)
    sums = pixels[:-2] + pixels[1:-1] + pixels[2:]
    sums = sums[:, : -2 * channels] + sums[:, channels:-channels] + sums[:, 2 * channels :]
    inner = pixels[1:-1]
    smooth = tf.floor((sums + 4 * inner[:, channels:-channels]) / 13)  # Pillow's SMOOTH: 5 in the middle, 1 around
    smooth = tf.concat([inner[:, :channels], smooth, inner[:, -channels:]], axis=1)  # the border stays
    return _blend(tf.concat([pixels[:1], smooth, pixels[-1:]], axis=0), image, magnitude)


def _cutout(image: Any, magnitude: float, draws: Draws) -> Any:
    height, width, channels = image.shape
    half = int(_share(magnitude, CUTOUT))

    def inside(size: int, place: Any) -> Any:
        distance = tf.range(size) - tf.cast(place * size, tf.int32)
        return tf.cast((distance >= -half) & (distance < half), tf.uint8)

    hole = inside(height, draws.y)[:, None] * tf.repeat(inside(width, draws.x), channels)
    rows = _rows(image)
    return tf.reshape(rows + hole * (FILL - rows), image.shape)  # bytes wrap around, and back


def _affine(image: Any, draws: Draws, matrix: Callable[[int], tuple[float, ...]]) -> Any:
    """Pixel (x, y) becomes the pixel nearest to (ax + by + c, dx + ey + f), halves away from zero, or FILL outside.

    `matrix` gives (a, b, c, d, e, f) for a sign. Where every pixel comes from is known before there is an image: two
    tables of places, float32 as in TensorFlow's ImageProjectiveTransformV3.
    """
    height, width, channels = image.shape
    x, y = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]

    def nearest(of_x: float, of_y: float, offset: float, size: int) -> np.ndarray:
        place = np.float32(of_x) * x + np.float32(of_y) * y + np.float32(offset)
        rounded = np.trunc(place + np.copysign(np.float32(0.5), place))
        return rounded.clip(-1, size).astype(np.int32) + 1  # 1 for the border

    def places(sign: int) -> np.ndarray:
        a, b, c, d, e, f = matrix(sign)
        return nearest(d, e, f, height) * (width + 2) + nearest(a, b, c, width)

    bordered = tf.pad(image, ((1, 1), (1, 1), (0, 0)), constant_values=FILL)
    both = np.stack([places(1), places(-1)])
    return tf.gather(tf.reshape(bordered, (-1, channels)), tf.gather(both, tf.cast(draws.sign >= 0.5, tf.int32)))


def _rotate(image: Any, magnitude: float, draws: Draws) -> Any:
    bottom, right = image.shape[0] - 1, image.shape[1] - 1

    def matrix(sign: int) -> tuple[float, ...]:
        angle = math.radians(sign * _share(magnitude, 30))
        sin, cos = math.sin(angle), math.cos(angle)
        around_x = (right - (cos * right - sin * bottom)) / 2
        around_y = (bottom - (sin * right + cos * bottom)) / 2
        return cos, -sin, around_x, sin, cos, around_y

    return _affine(image, draws, matrix)


def _shear_x(image: Any, magnitude: float, draws: Draws) -> Any:
    return _affine(image, draws, lambda sign: (1, sign * _share(magnitude, 0.3), 0, 0, 1, 0))


def _shear_y(image: Any, magnitude: float, draws: Draws) -> Any:
    return _affine(image, draws, lambda sign: (1, 0, 0, sign * _share(magnitude, 0.3), 1, 0))


def _translate_x(image: Any, magnitude: float, draws: Draws) -> Any:
    return tf.reshape(_translate(_rows(image), magnitude, draws, axis=1, unit=image.shape[2]), image.shape)


def _translate_y(image: Any, magnitude: float, draws: Draws) -> Any:
    return tf.reshape(_translate(_rows(image), magnitude, draws, axis=0, unit=1), image.shape)


def _translate(rows: Any, magnitude: float, draws: Draws, *, axis: int, unit: int) -> Any:
    """Rows moved along an axis by pixels of `unit` elements."""
    most = round(_share(magnitude, TRANSLATE)) * unit
    along = np.eye(2, dtype=np.int32)[axis]
    padded = tf.pad(rows, most * np.stack([along, along], axis=1), constant_values=FILL)
    return tf.slice(padded, along * tf.where(draws.sign < 0.5, 2 * most, 0), rows.shape)


OPERATIONS: dict[str, Callable[[Any, float, Draws], Any]] = {
    "AutoContrast": _autocontrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _color,
    "Contrast": _contrast,
    "Brightness": _brightness,
    "Sharpness": _sharpness,
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Cutout": _cutout,
    "SolarizeAdd": _solarize_add,
}
