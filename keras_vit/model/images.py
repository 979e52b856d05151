"""Decode JPEG and PNG files in TensorFlow's graph; `pillow` reads all formats without TensorFlow.

The EXIF orientation tag is read from the APP1 segment of a JPEG. That of a PNG (eXIf) is not read.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_vit._util.text import error_reason
from keras_vit.model import values
from keras_vit.model.config import Preprocessing
from keras_vit.model.pillow import (
    BLOCK,
    BYTES,
    GREY,
    JPEG,
    LONG,
    MAX_EXIF,
    MAX_PIXELS,
    MAX_SIDE,
    NO_ADOBE,
    ORIENTATION_TAG,
    PIXEL_LIMITS,
    PNG,
    SHORT,
)

MAX_SEGMENTS = 20_000  # of a JPEG, in which EXIF is looked for

_PNG_START = len(PNG) + 25  # with the chunk IHDR
_DEPTH_AND_TYPE, _PALETTE = 24, 3  # place of a PNG's bits and colour type; from 3 on, pixels may be transparent
_DEEP = 16  # bits
_EXIF, _ADOBE = (0xFFE1, b"Exif\0\0"), (0xFFEE, b"Adobe")  # marks and names of segments
_PIXELS = 0xFFDA  # mark of the segment after which the pixels follow
_CMYK_COMPONENTS = 4


class Header(NamedTuple):
    """Header of an image file: tensors, each of which may have a batch axis."""

    is_known: Any  # bool: whether it is a JPEG or PNG file
    sides: Any  # int64 (..., 2): height and width, as stored
    orientation: Any  # int32: 1 to 8 as in EXIF, 1 if nothing is to be turned
    has_colours: Any  # bool: False for CMYK without the mark of Adobe


HEADER_SPEC = Header(
    tf.TensorSpec((), tf.bool), tf.TensorSpec((2,), tf.int64), tf.TensorSpec((), tf.int32), tf.TensorSpec((), tf.bool)
)


def read_header(file: Any) -> Header:
    """Read the header of a file, without decoding it. A JPEG with an unreadable frame raises InvalidArgumentError."""

    def jpeg_header() -> Header:
        shape = tf.io.extract_jpeg_shape(file)
        is_cmyk = shape[2] == _CMYK_COMPONENTS
        has_colours = tf.cond(is_cmyk, lambda: _find_segment(file, *_ADOBE)[0], lambda: tf.constant(True))
        return Header(tf.constant(True), tf.cast(shape[:2], tf.int64), read_orientation(file), has_colours)

    def png_header() -> Header:
        sides = tf.cast(_numbers(file, 16, tf.int32)[::-1], tf.int64)
        return Header(tf.constant(True), sides, tf.constant(1), tf.constant(True))

    def unknown_header() -> Header:
        return Header(tf.constant(False), tf.constant([1, 1], tf.int64), tf.constant(1), tf.constant(True))

    is_png = _starts_with(file, PNG) & (tf.strings.length(file) >= _PNG_START)
    return tf.cond(_starts_with(file, JPEG), jpeg_header, lambda: tf.cond(is_png, png_header, unknown_header))


_compiled_header = tf.function(read_header, input_signature=[tf.TensorSpec((), tf.string)], autograph=False)


def requirements(header: Header) -> Iterator[tuple[Any, str, Any]]:
    """List conditions of decoding: a bool tensor, the error's message where it is False, and the value at its end."""
    yield header.is_known, "Not a JPEG or PNG file", ""
    pixels = tf.reduce_prod(header.sides, axis=-1)
    fits = (pixels <= MAX_PIXELS) & tf.reduce_all((header.sides > 0) & (header.sides <= MAX_SIDE), axis=-1)
    yield fits, f"{PIXEL_LIMITS} Received: height and width", header.sides
    yield header.has_colours, NO_ADOBE, ""


def declares_opacity(start: bytes) -> bool:
    """Check the first bytes of a file: whether it is a PNG with a fourth channel, or a palette with opacity."""
    kind = start[_DEPTH_AND_TYPE + 1 : _DEPTH_AND_TYPE + 2]
    return start.startswith(PNG) and (kind in (b"\4", b"\6") or (kind == b"\3" and b"tRNS" in start))


def decode_image(file: Any, preprocessing: Preprocessing = BYTES) -> Any:
    """Decode one JPEG or PNG file upright, outside of a graph: as `decode_pixels`, or a ValueError."""
    orientation = check_image(file)
    try:
        return decode_pixels(file, orientation, preprocessing)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(f"is a damaged image: {error_reason(error.message)}") from None


def check_image(file: Any) -> Any:
    """Read the orientation of one JPEG or PNG file, outside of a graph; raise a ValueError if its header is bad."""
    try:
        header = _compiled_header(file)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(f"is a damaged image: {error_reason(error.message)}") from None
    for holds, message, value in requirements(header):
        if not holds:
            received = value if isinstance(value, str) else " x ".join(map(str, value.numpy()))
            raise ValueError(f"cannot be decoded. {message} {received}".rstrip())
    return header.orientation


def decode_pixels(file: Any, orientation: Any, preprocessing: Preprocessing = BYTES) -> Any:
    """Decode a JPEG or PNG file and turn it upright: uint8 (height, width, 3), equal to Pillow's, on white.

    Where the preprocessing states `bits` or `range`, the result is float32, from 0 to 255. A PNG of 16 bits that does
    not fit it fails: with a ValueError, or in a graph with an InvalidArgumentError. A single colour that a PNG without
    a palette declares as transparent (tRNS) stays.
    """
    dtype = tf.uint8 if preprocessing.limits is None else tf.float32

    def opaque() -> Any:
        pixels = tf.io.decode_jpeg(file, channels=3, dct_method="INTEGER_ACCURATE")  # decodes PNG as well
        return tf.cast(pixels, dtype)

    def png() -> Any:
        depth, kind = tf.unstack(tf.io.decode_raw(tf.strings.substr(file, _DEPTH_AND_TYPE, 2), tf.uint8), num=2)
        # Without opacity in the file, decode_png gives the largest value of that many bits.
        whole = tf.bitwise.left_shift(1, tf.minimum(tf.cast(depth, tf.int32), 8)) - 1

        def read(channels: int) -> Any:
            return tf.cond(
                depth == _DEEP,
                lambda: _deep_pixels(tf.io.decode_png(file, channels=channels, dtype=tf.uint16), preprocessing),
                lambda: tf.cast(tf.io.decode_png(file, channels=channels), dtype),
            )

        return tf.cond(kind >= _PALETTE, lambda: on_white(read(4), whole), lambda: read(3))

    pixels = tf.cond(_starts_with(file, PNG), png, opaque)
    return turn_upright(tf.ensure_shape(pixels, (None, None, 3)), orientation)


def _deep_pixels(pixels: Any, preprocessing: Preprocessing) -> Any:
    """Do in a graph what `values.deep_pixels` does, for uint16 (height, width, 3) or, with opacity, 4 channels."""
    colours = pixels[..., :3]
    least, most = (tf.cast(extreme(colours), tf.float32) for extreme in (tf.reduce_min, tf.reduce_max))
    checks = [_require(*condition) for condition in values.requirements(least, most, preprocessing)]
    with tf.control_dependencies([check for check in checks if check is not None]):
        pixels = tf.identity(pixels)
    if preprocessing.limits is None:
        return tf.cast(tf.bitwise.right_shift(pixels, tf.constant(8, tf.uint16)), tf.uint8)
    scaled = values.scale(tf.cast(pixels[..., :3], tf.float32), preprocessing, tf.clip_by_value)
    return tf.concat([scaled, tf.cast(pixels[..., 3:], tf.float32) / 257], axis=-1)  # 65,535 is opaque


def _require(holds: Any, message: str, value: Any) -> Any:
    """Fail with a message and a value if a condition is false, in a graph or outside."""
    if not tf.executing_eagerly():
        return tf.raw_ops.Assert(condition=holds, data=[tf.constant(message), value])
    if not holds:
        raise ValueError(f"{message} {int(value)}")
    return None


def check_deep(file: bytes, preprocessing: Preprocessing) -> None:
    """Raise a ValueError if a file is a PNG of 16 bits that does not fit the preprocessing."""
    if file.startswith(PNG) and file[_DEPTH_AND_TYPE : _DEPTH_AND_TYPE + 1] == bytes([_DEEP]):
        values.check_values(tf.io.decode_png(file, channels=3, dtype=tf.uint16).numpy(), preprocessing)


def to_grey(image: Any) -> Any:
    """Convert uint8 or float32 (..., 3) to (..., 1) like `tf.image.rgb_to_grayscale`, with little memory."""
    return _by_blocks(tf.image.rgb_to_grayscale if image.dtype == tf.uint8 else _float_grey, image, 1)


def _float_grey(image: Any) -> Any:
    """Convert floats to grey by weights whose sum is 1: TensorFlow's give .9999 of white, which bytes do not show."""
    weights = np.array(GREY)
    return tf.reduce_sum(image * tf.constant(weights / weights.sum(), image.dtype), axis=-1, keepdims=True)


def on_white(image: Any, whole: Any = 255) -> Any:
    """Put uint8 or float pixels (..., 4), the last their opacity, 0 to 255, on white: (..., 3), as Pillow does.

    An image whose opacity is `whole` everywhere is opaque.
    """

    def blend(pixels: Any) -> Any:
        opacity = tf.cast(pixels[..., 3:], tf.float32)
        mixed = (tf.cast(pixels[..., :3], tf.float32) * opacity + 255 * (255 - opacity)) / 255
        return tf.cast(tf.round(mixed) if pixels.dtype == tf.uint8 else mixed, pixels.dtype)

    image = tf.convert_to_tensor(image)
    is_opaque = tf.reduce_all(image[..., 3] == tf.cast(whole, image.dtype))
    return tf.cond(is_opaque, lambda: image[..., :3], lambda: _by_blocks(blend, image, 3))


def _by_blocks(function: Callable[[Any], Any], image: Any, channels: int) -> Any:
    """Apply a function of pixels, (pixels, channels), that gives so many channels, to an image of any axes."""
    pixels = tf.reshape(image, (-1, image.shape[-1]))
    count = tf.shape(pixels)[0]
    block = tf.clip_by_value(count, 1, BLOCK)
    blocks = tf.reshape(tf.pad(pixels, [(0, -count % block), (0, 0)]), (-1, block, image.shape[-1]))
    spec = tf.TensorSpec((None, channels), image.dtype)
    changed = tf.map_fn(function, blocks, fn_output_signature=spec, parallel_iterations=1)
    changed = tf.reshape(changed, (-1, channels))[:count]
    shape = tf.concat([tf.shape(image)[:-1], [channels]], axis=0)
    return tf.ensure_shape(tf.reshape(changed, shape), (*image.shape[:-1], channels))


def turn_upright(image: Any, orientation: Any) -> Any:
    """Turn a stored image (height, width, channels) upright."""

    def turned() -> Any:
        across = tf.cond(orientation > 4, lambda: tf.transpose(image, (1, 0, 2)), lambda: image)
        return tf.raw_ops.Reverse(tensor=across, dims=[*_mirrored(orientation), False])

    return tf.ensure_shape(tf.cond(orientation == 1, lambda: image, turned), (None, None, image.shape[-1]))


def upright_sides(sides: Any, orientation: Any) -> Any:
    """Height and width after `turn_upright`."""
    return tf.where(orientation > 4, sides[::-1], sides)


def stored_window(window: Any, sides: Any, orientation: Any) -> Any:
    """Find the place of a window of the upright image as stored: int32 (top, left, height, width), as `window`.

    `sides` are the height and width of the upright image.
    """
    begin, size = window[:2], window[2:]
    begin = tf.where(_mirrored(orientation), sides - begin - size, begin)
    return tf.concat([upright_sides(begin, orientation), upright_sides(size, orientation)], axis=0)


def _mirrored(orientation: Any) -> list[Any]:
    """Whether rows and columns are reversed, after the axes are exchanged if the orientation is 5 to 8."""
    return [tf.reduce_any(orientation == numbers) for numbers in ((3, 4, 7, 8), (2, 3, 6, 7))]


def read_orientation(file: Any) -> Any:
    """Read the EXIF orientation of a JPEG, int32 from 1 to 8; 1 for other files, without EXIF or if it is damaged."""
    # Most images of data sets have no EXIF. This search takes a tenth of the time that parsing takes.
    pieces = tf.raw_ops.StringSplitV2(input=[file], sep=_EXIF[1], maxsplit=1).values
    has_exif = (tf.size(pieces) > 1) & _starts_with(file, JPEG)
    return tf.cond(has_exif, lambda: _parse_orientation(file), lambda: tf.constant(1))


# One node of the graph: all nodes of a branch cost time even where it is not taken.
@tf.function(
    input_signature=[tf.TensorSpec((), tf.string)], autograph=False, experimental_attributes={"_noinline": True}
)
def _parse_orientation(file: Any) -> Any:
    return exif_orientation(_find_segment(file, *_EXIF)[1])


def exif_orientation(exif: Any) -> Any:
    """Read the orientation, int32 from 1 to 8, in the bytes of EXIF; 1 if there is none or they are damaged."""
    found = tf.cond(tf.strings.length(exif) < 14, lambda: tf.constant(1, tf.int64), lambda: _first_directory(exif))
    return tf.cast(tf.where((found >= 1) & (found <= 8), found, 1), tf.int32)


def _first_directory(exif: Any) -> Any:
    """Read the orientation tag in the first directory (IFD 0) of EXIF bytes; 1 without it."""
    start = tf.where(tf.strings.substr(exif, 0, 6) == b"Exif\0\0", 6, 0)
    block = tf.strings.substr(exif, start, MAX_EXIF)
    mark, content = tf.strings.substr(block, 0, 4), tf.cast(tf.io.decode_raw(block, tf.uint8), tf.int64)
    is_little = mark == b"II*\0"

    def number(digits: Any) -> Any:
        # Two constants: at a slice [::-1] of one TensorFlow's layout optimizer logs an error and gives up the graph.
        powers = [256**power for power in range(digits.shape[-1])]
        weights = tf.where(is_little, tf.constant(powers, tf.int64), tf.constant(powers[::-1], tf.int64))
        return tf.reduce_sum(digits * weights, axis=-1)

    length = tf.size(content, tf.int64)
    offset = number(tf.ensure_shape(content[4:8], (4,)))
    is_valid = (is_little | (mark == b"MM\0*")) & (offset <= length - 2)
    offset = tf.where(is_valid, offset, 0)
    count = tf.where(is_valid, number(tf.ensure_shape(content[offset : offset + 2], (2,))), 0)
    count = tf.minimum(count, (length - offset - 2) // 12)  # entries of a damaged directory that are complete
    entries = tf.reshape(content[offset + 2 : offset + 2 + 12 * count], (-1, 12))
    kind, is_long = number(entries[:, 2:4]), number(entries[:, 2:4]) == LONG
    is_tag = (number(entries[:, :2]) == ORIENTATION_TAG) & (number(entries[:, 4:8]) == 1)
    found_values = tf.where(is_long, number(entries[:, 8:12]), number(entries[:, 8:10]))
    found = tf.boolean_mask(found_values, is_tag & (is_long | (kind == SHORT)))
    return tf.concat([found, tf.constant([1], tf.int64)], axis=0)[0]


def _find_segment(file: Any, wanted: int, name: bytes) -> tuple[Any, Any]:
    """Find a JPEG's first segment of this mark and name: whether there is one, and its content."""

    def read_segment(_: Any, place: Any, __: Any) -> tuple[Any, Any, Any]:
        mark, size = tf.unstack(_numbers(file, place, tf.uint16))
        found = (mark == wanted) & (tf.strings.substr(file, place + 4, len(name)) == name)
        step = tf.where((mark < 0xFF00) | (mark == 0xFFFF), 1, 2 + size)  # damage that readers skip, and padding
        return found, tf.where(found, place + 4, tf.where(mark == _PIXELS, -1, place + step)), size - 2

    length = tf.strings.length(file)
    found, place, size = tf.while_loop(
        lambda found, place, _: ~found & (place >= 0) & (place + 8 <= length),
        read_segment,
        (tf.constant(False), tf.constant(2), tf.constant(0)),
        maximum_iterations=MAX_SEGMENTS,
    )
    return found, tf.strings.substr(file, tf.where(found, place, 0), tf.where(found, tf.maximum(size, 0), 0))


def _starts_with(file: Any, mark: bytes) -> Any:
    return tf.strings.substr(file, 0, len(mark)) == mark


def _numbers(file: Any, place: Any, dtype: Any) -> Any:
    """Read two big-endian numbers of a file as int32."""
    numbers = tf.io.decode_raw(tf.strings.substr(file, place, 2 * dtype.size), dtype, little_endian=False)
    return tf.ensure_shape(tf.cast(numbers, tf.int32), (2,))
