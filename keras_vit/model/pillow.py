"""Decode images by Pillow, and convert their channels in NumPy: what `images` does in TensorFlow's graphs.

The EXIF orientation tag is read from the APP1 segment of a JPEG. That of a PNG (eXIf) is not read.
"""

import io
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_vit._util.text import warn
from keras_vit.model import values
from keras_vit.model.config import Preprocessing

BYTES = Preprocessing()  # states neither bits nor range
CHANNELS = (1, 3)  # grey and colour: image files have no others
MAX_PIXELS = 50_000_000  # of one image: 150 MB when decoded. A file of 0.4 MB can claim 400 million
MAX_SIDE = 65_535  # the largest side of a JPEG. Resizing with antialiasing needs memory for each column
PIXEL_LIMITS = f"An image has 1 to {MAX_PIXELS:,} pixels and sides of at most {MAX_SIDE:,}."
NO_ADOBE = "A CMYK JPEG without the mark of Adobe: save it as RGB, because readers differ in its colours"
MAX_EXIF = 65_535  # bytes: the longest segment of a JPEG
ORIENTATION_TAG = 0x0112  # of EXIF
BLOCK = 1 << 20  # pixels converted at a time: in float32 an image has four times its size
SHORT, LONG = 3, 4  # types of values in EXIF
GREY = (0.2989, 0.587, 0.114)  # as tf.image.rgb_to_grayscale

JPEG = b"\xff\xd8\xff"  # first bytes of a file
PNG = b"\x89PNG\r\n\x1a\n"
# Files that people try although no reader is installed, by the bytes at a place of the file.
KINDS = ((0, b"<", "text, such as SVG or HTML"), (4, b"ftyp", "a HEIC photo, an AVIF image or a video"))
_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0  # tag of a TIFF, and its value
_SAMPLES, _EXTRA_SAMPLES, _OPACITY = 277, 338, (1, 2)  # tags of a TIFF, and values of the second
# Photometric interpretation of a TIFF -> its colours; other channels are extra.
_TIFF_COLOURS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
SIXTEEN_BITS = ("PNG", "PPM")  # formats whose images of mode "I" have 16 bits


def is_jpeg_or_png(start: bytes) -> bool:
    """Recognise a file that TensorFlow decodes by its first bytes."""
    return start.startswith((JPEG, PNG))


def decode_with_pillow(file: bytes, preprocessing: Preprocessing = BYTES) -> np.ndarray:
    """Read a file of any format that Pillow knows. See `pillow_pixels`."""
    if not file:
        raise ValueError("is an empty file")
    found = [name for place, mark, name in KINDS if file.startswith(mark, place)]
    kind = f"is {found[0]}, which cannot be read" if found else "is not an image of a known format"
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError(f"{kind}: save it as JPEG or PNG. `pip install pillow` reads more formats") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `pillow_pixels` has a lower one
            image = Image.open(io.BytesIO(file))
    except UnidentifiedImageError:
        raise ValueError(f"{kind}. Save it as JPEG or PNG") from None
    except Image.DecompressionBombError:
        raise ValueError(f"cannot be decoded. {PIXEL_LIMITS} It has more") from None
    except Exception as error:  # Pillow's readers raise errors of any kind for damaged files
        raise ValueError(_damaged(error)) from None
    with image:
        return pillow_pixels(image, preprocessing)


def pillow_pixels(image: Any, preprocessing: Preprocessing = BYTES) -> np.ndarray:
    """Convert a Pillow image to uint8 (height, width, 3), turned upright by its EXIF orientation.

    Colours are those of TensorFlow's decoders: 16 bits give the high byte. Transparent pixels are put on white. Values
    of the modes I and F are pixels from 0 to 255. Where the preprocessing states `bits` or `range`, it holds for
    these modes and 16 bits, and the result is float32, from 0 to 255.
    """
    found = pillow_values(image, preprocessing)
    if found.dtype == np.uint16:
        found = np.repeat(values.deep_pixels(found, preprocessing)[..., None], 3, axis=-1)
    return found if preprocessing.limits is None else found.astype(np.float32)


def pillow_values(image: Any, preprocessing: Preprocessing = BYTES) -> np.ndarray:
    """Convert a Pillow image as `pillow_pixels` does, but leave grey of 16 bits as it is: uint16 (height, width)."""
    width, height = image.size
    if not (0 < height * width <= MAX_PIXELS and max(height, width) <= MAX_SIDE):
        raise ValueError(f"cannot be decoded. {PIXEL_LIMITS} Received: height and width {height} x {width}")
    modes = str([tile[-1] for tile in getattr(image, "tile", ())])  # of the file, before it is loaded
    if image.format == "TIFF":
        _check_tiff(image)
    try:
        image.load()
    except Exception as error:
        raise ValueError(_damaged(error)) from None
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN_BITS):
        found = np.asarray(image).astype(np.uint16)
        return _uninverted(found, image, preprocessing)
    if ";16" in modes and image.mode not in ("I", "F"):
        channels = np.asarray(image)
        _check_high_bytes(channels[..., : 1 if channels.shape[-1] == len("LA") else 3], preprocessing)
    colours = _in_colour(image, preprocessing)
    exif = image.info.get("exif")  # read by Pillow from the file; TIFF images are turned when they are loaded
    if not isinstance(exif, bytes) or image.format == "PNG":  # that of a PNG file is not read in graphs either
        return colours
    return turn_upright(colours, exif_orientation(exif))


def _check_tiff(image: Any) -> None:
    """Raise a ValueError for channels that Pillow would leave out; warn of opacity, which may be a band, and pages."""
    tags = image.tag_v2
    samples, extra = tags.get(_SAMPLES, 1), tags.get(_EXTRA_SAMPLES, ())
    colours = _TIFF_COLOURS.get(tags.get(_PHOTOMETRIC), samples)
    if samples > colours and (samples > colours + 1 or not {*extra}.intersection(_OPACITY)):
        raise ValueError(
            f"has {samples} channels, of which Pillow reads {colours}: read it with tifffile or rasterio, and pass an "
            "array. Received: a TIFF whose other channels are not opacity"
        )
    if samples > colours:
        warn("keras_vit: a TIFF says that its last channel is opacity: pixels are put on white. Pass bands as arrays")
    if getattr(image, "n_frames", 1) > 1:
        warn("keras_vit: a TIFF has several pages: the first is read. Pass bands, or a volume, as arrays")


def _check_high_bytes(colours: np.ndarray, preprocessing: Preprocessing) -> None:
    """Raise a ValueError for colours of 16 bits, of which Pillow keeps the high bytes, if the others are needed."""
    most = int(colours.max())
    is_clear = most == 0 or most >= values.CLEAR >> 8
    if not (is_clear if preprocessing.limits is None else preprocessing.bits == 16):
        raise ValueError(
            "has colours of 16 bits, of which Pillow reads the high bytes only: pass an array, or a PNG where "
            f"TensorFlow reads it. Received: high bytes up to {most}"
        )


def _uninverted(found: np.ndarray, image: Any, preprocessing: Preprocessing) -> np.ndarray:
    """Invert 16 bits of a TIFF in which 0 is white, as Pillow does for 8 bits."""
    is_inverted = image.format == "TIFF" and image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    if not is_inverted or preprocessing.range is not None:  # a range is of the values as the file has them
        return found
    values.check_values(found, preprocessing)
    return np.uint16((preprocessing.limits or (0, 0xFFFF))[1]) - found


def _damaged(error: Exception) -> str:
    return f"is a damaged image: {str(error) or type(error).__name__}"


def _in_colour(image: Any, preprocessing: Preprocessing) -> np.ndarray:
    if image.mode == "CMYK":
        if image.format == "JPEG" and "adobe" not in image.info:
            raise ValueError(f"cannot be decoded. {NO_ADOBE}")
        inks = 255 - np.asarray(image, np.uint16)
        return (inks[..., :3] * inks[..., 3:] // 255).astype(np.uint8)  # libjpeg's rounding
    if image.mode in ("I", "F"):
        grey = _checked(np.asarray(image), image.mode, preprocessing)
        return np.repeat(grey[..., None], 3, axis=-1)
    with_alpha = {"La": "LA", "RGBa": "RGBA"}.get(image.mode)  # colours multiplied by their opacity
    is_transparent = image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or (
        image.mode == "P" and "transparency" in image.info
    )
    try:
        image = image.convert(with_alpha) if with_alpha else image
        if is_transparent:
            return on_white(np.asarray(image.convert("RGBA")))
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))  # converting would copy
    except (ValueError, KeyError) as error:
        raise ValueError(f"has mode {image.mode}, which Pillow does not convert to RGB: {error}") from None


def _checked(numbers: np.ndarray, mode: str, preprocessing: Preprocessing) -> np.ndarray:
    if preprocessing.limits is not None:
        values.check_values(numbers, preprocessing)
        scaled: np.ndarray = values.scale(numbers.astype(np.float32), preprocessing)
        return scaled
    low, high = float(numbers.min()), float(numbers.max())
    if not (low >= 0 and high <= 255) or (mode == "F" and 0 < high <= 1):
        raise ValueError(
            f"has mode {mode}, whose values must be pixels from 0 to 255: scale them, or state {values.HOW}. "
            f"Received: {low:g}..{high:g}"
        )
    return numbers.astype(np.uint8)


def to_grey(image: np.ndarray) -> np.ndarray:
    """Convert uint8 or float32 (..., 3) to (..., 1), to the same bytes as `tf.image.rgb_to_grayscale`.

    The weights of floats have the sum 1: TensorFlow's give .9999 of white, which bytes do not show.
    """

    def weigh(pixels: np.ndarray) -> np.ndarray:
        red, green, blue = (pixels[:, i] * np.float32(1 / 255) * np.float32(share) for i, share in enumerate(GREY))
        grey: np.ndarray = (red + green + blue) * np.float32(255.5)
        return grey[:, None]

    def weigh_floats(pixels: np.ndarray) -> np.ndarray:
        shares = np.array(GREY) / sum(GREY)
        return (pixels * shares.astype(np.float32)).sum(axis=-1, keepdims=True)

    return _by_blocks(weigh if image.dtype == np.uint8 else weigh_floats, image, 1)


def on_white(image: np.ndarray) -> np.ndarray:
    """Put uint8 or float pixels (..., 4), the last their opacity, 0 to 255, on white: (..., 3), as Pillow does."""

    def blend(pixels: np.ndarray) -> np.ndarray:
        opacity = pixels[..., 3:].astype(np.float32)
        mixed = (pixels[..., :3] * opacity + 255 * (255 - opacity)) / 255
        return np.round(mixed) if pixels.dtype == np.uint8 else mixed

    return image[..., :3] if (image[..., 3] == 255).all() else _by_blocks(blend, image, 3)


def _by_blocks(function: Callable[[np.ndarray], np.ndarray], image: np.ndarray, channels: int) -> np.ndarray:
    """Apply a function of pixels, (pixels, channels), that gives so many channels, with little memory."""
    pixels = image.reshape(-1, image.shape[-1])
    changed = np.empty((len(pixels), channels), image.dtype)
    for start in range(0, len(pixels), BLOCK):
        changed[start : start + BLOCK] = function(pixels[start : start + BLOCK])
    return changed.reshape(*image.shape[:-1], channels)


def turn_upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Turn a stored image (height, width, channels) upright."""
    across = image.transpose(1, 0, 2) if orientation > 4 else image
    rows, columns = (-1 if orientation in numbers else 1 for numbers in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return across[::rows, ::columns]


def exif_orientation(exif: bytes) -> int:
    """Read the orientation, 1 to 8, in the first directory (IFD 0) of EXIF; 1 if there is none or it is damaged."""
    block = exif.removeprefix(b"Exif\0\0")[:MAX_EXIF]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    if order is None or len(exif) < 14:
        return 1
    (offset,) = struct.unpack_from(f"{order}I", block, 4)
    if offset > len(block) - 2:
        return 1
    (count,) = struct.unpack_from(f"{order}H", block, offset)
    for place in range(offset + 2, min(offset + 2 + 12 * count, len(block) - 11), 12):
        tag, kind, values, long = struct.unpack_from(f"{order}HHII", block, place)
        if tag == ORIENTATION_TAG and values == 1 and kind in (SHORT, LONG):
            found = long if kind == LONG else struct.unpack_from(f"{order}H", block, place + 8)[0]
            return int(found) if 1 <= found <= 8 else 1
    return 1
