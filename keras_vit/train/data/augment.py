"""Augment images: crops, flips, mixup, RandAugment.

Operations, their order and the meaning of a magnitude follow `distort_image_with_randaugment` in big_vision's
`pp/autoaugment.py`, with its bugs, because the AugReg models were trained with them: Contrast blends with a grey that
is not the mean, and thresholds wrap at 256.

Most operations see an image as (height, width * channels): broadcasting along a last axis of three, tf.where and slices
of step -1 take TensorFlow much longer than the arithmetic around them.

Pixels are 0..255; normalisation comes last. Sources: vit_jax/input_pipeline.py, and big_vision's `pp/ops_image.py`
(crops, flip), `utils.py` (mixup) and `pp/autoaugment.py` (RandAugment).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_vit.model import images
from keras_vit.model.config import Preprocessing
from keras_vit.model.pillow import BYTES

MAX_LEVEL = 10  # the magnitude at which an operation has its published strength; AugReg goes up to 20
FILL = 128  # value of pixels from outside of the image
CUTOUT = 40  # half of the side that is cut out at MAX_LEVEL, in pixels
TRANSLATE = 100  # pixels at MAX_LEVEL
NUM_DRAWS = 4  # random numbers per operation: which operation, sign, y, x


class Draws(NamedTuple):
    """Uniform random numbers in [0, 1) for one operation."""

    sign: Any = 0.0  # below 0.5 the direction is positive
    y: Any = 0.5  # a place as a share of the height
    x: Any = 0.5  # a place as a share of the width


def randaugment(image: Any, *, layers: int, magnitude: float, seed: Any) -> Any:
    """Apply `layers` operations in sequence, each drawn from all of them; one may be drawn twice.

    The image is uint8 (height, width, 1 or 3) of static shape. Magnitude 0 changes it too: Brightness makes it dark.
    """
    shape = image.shape

    def trace(operation: Callable[[Any, float, Draws], Any]) -> Any:
        function = tf.function(
            lambda image, sign, y, x: operation(image, magnitude, Draws(sign, y, x)), autograph=False
        )
        return function.get_concrete_function(tf.TensorSpec(shape, tf.uint8), *[tf.TensorSpec((), tf.float32)] * 3)

    branches = [trace(operation) for operation in OPERATIONS.values()]
    draws = tf.random.stateless_uniform((layers, NUM_DRAWS), seed)
    for layer in range(layers):
        choice, *inputs = tf.unstack(draws[layer])
        index = tf.cast(choice * len(branches), tf.int32)
        # tf.switch_case would add a Switch for each input of all branches and visit them, which takes longer than the
        # chosen branch. This runs only that branch.
        (image,) = tf.raw_ops.StatelessCase(
            branch_index=index, input=[image, *inputs], Tout=[tf.uint8], branches=branches, output_shapes=[shape]
        )
    return tf.ensure_shape(image, shape)


def _scale(magnitude: float, maximum: float) -> float:
    return magnitude / MAX_LEVEL * maximum


def _flatten(image: Any) -> Any:
    """Reshape an image to (height, width * channels)."""
    height, width, channels = image.shape
    return tf.reshape(image, (height, width * channels))


def _repeat_for_pixels(values: Any, image: Any) -> Any:
    """Repeat one value per channel to a row (width * channels) of the image."""
    return tf.tile(values, (image.shape[1],))


def _blend(start: Any, image: Any, magnitude: float) -> Any:
    """Interpolate from `start`, (height, width * channels), to the image (factor 1) and beyond; clip and round down."""
    factor = _scale(magnitude, 1.8) + 0.1
    rows = tf.cast(_flatten(image), tf.float32)
    return tf.reshape(_to_uint8(start + factor * (rows - start)), image.shape)


def _to_uint8(values: Any) -> Any:
    """Clip floats to 0..255 and round down."""
    return tf.cast(tf.clip_by_value(values, 0.0, 255.0), tf.uint8)


# The operations: (image, magnitude, draws) -> image. First those that change values, then those that move pixels.


def _autocontrast(image: Any, magnitude: float, draws: Draws) -> Any:
    low, high = (tf.cast(reduce(image, (0, 1)), tf.float32) for reduce in (tf.reduce_min, tf.reduce_max))
    flat = tf.equal(low, high)
    scale = tf.where(flat, 1.0, 255.0 / tf.where(flat, 1.0, high - low))
    offset = tf.where(flat, 0.0, -low * scale)
    rows = tf.cast(_flatten(image), tf.float32) * _repeat_for_pixels(scale, image) + _repeat_for_pixels(offset, image)
    return tf.reshape(_to_uint8(rows), image.shape)


def _equalize(image: Any, magnitude: float, draws: Draws) -> Any:
    channels = image.shape[2]
    # Channel c has the bins 256 c .. 256 c + 255, so that one histogram and one table serve all channels.
    bins = tf.cast(_flatten(image), tf.int32) + _repeat_for_pixels(tf.range(channels) * 256, image)
    size = 256 * channels
    counts = tf.reshape(tf.math.bincount(tf.reshape(bins, (-1,)), minlength=size, maxlength=size), (channels, 256))
    occupied = tf.where(counts > 0, tf.range(256), -1)
    last = tf.gather(counts, tf.reduce_max(occupied, axis=1), axis=1, batch_dims=1)
    step = (tf.reduce_sum(counts, axis=1) - last)[:, None] // 255
    below = tf.cumsum(counts, axis=1, exclusive=True)
    table = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
    table = tf.where(step == 0, tf.range(256), table)
    return tf.reshape(tf.gather(tf.reshape(tf.cast(table, tf.uint8), (-1,)), bins), image.shape)


def _posterize(image: Any, magnitude: float, draws: Draws) -> Any:
    # Magnitude 0 keeps no bits, but TensorFlow shifts a byte by 7 at most. Above 20 the shift is negative, and as an
    # unsigned byte it is above 7 again.
    shift = min((8 - int(_scale(magnitude, 4))) % 256, 7)
    return tf.bitwise.bitwise_and(image, np.uint8(255 >> shift << shift))


def _solarize(image: Any, magnitude: float, draws: Draws) -> Any:
    # The official code stores the threshold in a byte: 256 (magnitude 10) and 512 (20) wrap to 0, which inverts every
    # pixel, and 384 (15) wraps to 128.
    threshold = np.uint8(int(_scale(magnitude, 256)) % 256)
    return tf.bitwise.bitwise_xor(image, tf.cast(image >= threshold, tf.uint8) * 255)  # 255 - v is v ^ 255


def _solarize_add(image: Any, magnitude: float, draws: Draws) -> Any:
    addition = np.uint8(min(int(_scale(magnitude, 110)), 255))
    return image + tf.minimum(255 - image, addition) * tf.cast(image < 128, tf.uint8)


def _color(image: Any, magnitude: float, draws: Draws) -> Any:
    if image.shape[2] == 1:
        return image
    # As tf.image.rgb_to_grayscale, which scales by 255.5 / 255 and rounds down; one column per channel to blend with.
    weights = np.repeat(np.array([[0.2989], [0.587], [0.114]], np.float32) * np.float32(255.5 / 255), 3, axis=1)
    grey = tf.floor(tf.linalg.matmul(tf.reshape(tf.cast(image, tf.float32), (-1, 3)), weights))
    return _blend(tf.reshape(grey, (image.shape[0], -1)), image, magnitude)


def _contrast(image: Any, magnitude: float, draws: Draws) -> Any:
    # The official code sums a histogram's counts without their values: its "mean" is the number of pixels / 256, which
    # is 196 for 224x224 and white from 256x256 on.
    return _blend(min(float(image.shape[0] * image.shape[1] // 256), 255.0), image, magnitude)


def _sharpness(image: Any, magnitude: float, draws: Draws) -> Any:
    height, width, channels = image.shape
    if min(height, width) < 3:
        return image
    pixels = tf.cast(_flatten(image), tf.float32)
    sums = pixels[:-2] + pixels[1:-1] + pixels[2:]
    sums = sums[:, : -2 * channels] + sums[:, channels:-channels] + sums[:, 2 * channels :]
    inner = pixels[1:-1]
    # Pillow's SMOOTH kernel: 5 in the centre, 1 around.
    smooth = tf.floor((sums + 4 * inner[:, channels:-channels]) / 13)
    smooth = tf.concat([inner[:, :channels], smooth, inner[:, -channels:]], axis=1)  # the border is unchanged
    return _blend(tf.concat([pixels[:1], smooth, pixels[-1:]], axis=0), image, magnitude)


def _cutout(image: Any, magnitude: float, draws: Draws) -> Any:
    height, width, channels = image.shape
    half = int(_scale(magnitude, CUTOUT))

    def inside(size: int, place: Any) -> Any:
        distance = tf.range(size) - tf.cast(place * size, tf.int32)
        return tf.cast((distance >= -half) & (distance < half), tf.uint8)

    hole = inside(height, draws.y)[:, None] * tf.repeat(inside(width, draws.x), channels)
    rows = _flatten(image)
    return tf.reshape(rows + hole * (FILL - rows), image.shape)  # in uint8 the difference and the sum wrap modulo 256


def _affine(image: Any, draws: Draws, matrix: Callable[[int], tuple[float, ...]]) -> Any:
    """Apply an affine map: pixel (x, y) becomes the one nearest to (ax + by + c, dx + ey + f), or FILL outside.

    `matrix` returns (a, b, c, d, e, f) for a sign. Halves are rounded away from zero. Each sign has a table of indices,
    computed in float32 as in TensorFlow's ImageProjectiveTransformV3.
    """
    height, width, channels = image.shape
    x, y = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]

    def nearest(x_factor: float, y_factor: float, offset: float, size: int) -> np.ndarray:
        place = np.float32(x_factor) * x + np.float32(y_factor) * y + np.float32(offset)
        rounded = np.trunc(place + np.copysign(np.float32(0.5), place))
        return rounded.clip(-1, size).astype(np.int32) + 1  # 1 for the border

    def indices(sign: int) -> np.ndarray:
        a, b, c, d, e, f = matrix(sign)
        return nearest(d, e, f, height) * (width + 2) + nearest(a, b, c, width)

    bordered = tf.pad(image, ((1, 1), (1, 1), (0, 0)), constant_values=FILL)
    tables = np.stack([indices(1), indices(-1)])
    return tf.gather(tf.reshape(bordered, (-1, channels)), tf.gather(tables, tf.cast(draws.sign >= 0.5, tf.int32)))


def _rotate(image: Any, magnitude: float, draws: Draws) -> Any:
    bottom, right = image.shape[0] - 1, image.shape[1] - 1

    def matrix(sign: int) -> tuple[float, ...]:
        angle = math.radians(sign * _scale(magnitude, 30))
        sin, cos = math.sin(angle), math.cos(angle)
        x_offset = (right - (cos * right - sin * bottom)) / 2
        y_offset = (bottom - (sin * right + cos * bottom)) / 2
        return cos, -sin, x_offset, sin, cos, y_offset

    return _affine(image, draws, matrix)


def _shear(image: Any, magnitude: float, draws: Draws, *, axis: int) -> Any:
    level = _scale(magnitude, 0.3)
    if axis == 1:
        return _affine(image, draws, lambda sign: (1, sign * level, 0, 0, 1, 0))
    return _affine(image, draws, lambda sign: (1, 0, 0, sign * level, 1, 0))


def _translate(image: Any, magnitude: float, draws: Draws, *, axis: int) -> Any:
    rows = _flatten(image)
    margin = round(_scale(magnitude, TRANSLATE)) * (image.shape[2] if axis == 1 else 1)
    along = np.eye(2, dtype=np.int32)[axis]
    padded = tf.pad(rows, margin * np.stack([along, along], axis=1), constant_values=FILL)
    moved = tf.slice(padded, along * tf.where(draws.sign < 0.5, 2 * margin, 0), rows.shape)
    return tf.reshape(moved, image.shape)


OPERATIONS: dict[str, Callable[[Any, float, Draws], Any]] = {
    "AutoContrast": _autocontrast,
    "Equalize": _equalize,
    "Invert": lambda image, magnitude, draws: 255 - image,
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _color,
    "Contrast": _contrast,
    "Brightness": lambda image, magnitude, draws: _blend(0.0, image, magnitude),
    "Sharpness": _sharpness,
    "ShearX": partial(_shear, axis=1),
    "ShearY": partial(_shear, axis=0),
    "TranslateX": partial(_translate, axis=1),
    "TranslateY": partial(_translate, axis=0),
    "Cutout": _cutout,
    "SolarizeAdd": _solarize_add,
}


ASPECT_RATIOS = (3 / 4, 1.33)  # of an inception crop, width / height
RANDOM_CROP = 448 / 384  # size before a random crop / size after it, as in big_vision's configs/transfer.py


def inception_crop(image: Any, seed: Any, *, min_area: float, preprocessing: Preprocessing = BYTES) -> Any:
    """Cut out a part of random area, aspect ratio, position. `min_area` is its smallest share of the image, in (0, 1].

    The image may be a JPEG or PNG file: the part is then in colour and upright, and of a JPEG only the part is decoded.
    `preprocessing` states the values of a PNG of 16 bits.
    """
    if image.dtype != tf.string:
        return _cut_out(image, _sample_window(tf.shape(image), seed, min_area))
    orientation = images.read_orientation(image)

    def from_jpeg() -> Any:
        shape = tf.io.extract_jpeg_shape(image)
        sides = images.upright_sides(shape[:2], orientation)
        window = _sample_window(tf.concat([sides, shape[2:]], axis=0), seed, min_area)
        stored = images.stored_window(window, sides, orientation)
        part = tf.io.decode_and_crop_jpeg(image, stored, channels=3, dct_method="INTEGER_ACCURATE")
        part = part if preprocessing.limits is None else tf.cast(part, tf.float32)
        return images.turn_upright(tf.ensure_shape(part, (None, None, 3)), orientation)

    def from_png() -> Any:
        pixels = images.decode_pixels(image, orientation, preprocessing)
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
