"""Read images with Pillow: uint8 pixels in colour, upright, the same for a file and for the object opened from it."""

import io
import warnings
from typing import Any

import numpy as np

from keras_vit.model.images import jpeg_png

# Files that people try although no reader is installed, by the bytes at a place of the file.
KINDS = ((0, b"<", "text, such as SVG or HTML"), (4, b"ftyp", "a HEIC photo, an AVIF image or a video"))
SIXTEEN_BITS = ("PNG", "PPM")  # formats whose images of mode "I" have 16 bits


def decode_with_pillow(file: bytes) -> np.ndarray:
    """Read a file that is neither JPEG nor PNG. See `pixels`."""
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
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `pixels` has a lower limit
            image = Image.open(io.BytesIO(file))
    except UnidentifiedImageError:
        raise ValueError(f"{kind}. Save it as JPEG or PNG") from None
    except Image.DecompressionBombError:
        raise ValueError(f"cannot be decoded. {jpeg_png.PIXEL_LIMITS} It has more") from None
    except Exception as error:  # Pillow's readers raise errors of any kind for damaged files
        raise ValueError(_damaged(error)) from None
    with image:
        return pillow_pixels(image)


def pillow_pixels(image: Any) -> np.ndarray:
    """Return a Pillow image as uint8 (height, width, 3), turned upright by its EXIF orientation.

    Colours are those of TensorFlow's decoders: 16 bits give the high byte, transparency is dropped. Values of the modes
    I and F are pixels from 0 to 255.
    """
    width, height = image.size
    if not (0 < height * width <= jpeg_png.MAX_PIXELS and max(height, width) <= jpeg_png.MAX_SIDE):
        raise ValueError(f"cannot be decoded. {jpeg_png.PIXEL_LIMITS} Received: height and width {height} x {width}")
    try:
        image.load()
    except Exception as error:
        raise ValueError(_damaged(error)) from None
    colours = _in_colour(image)
    exif = image.info.get("exif")  # read by Pillow from the file; TIFF images are turned when they are loaded
    if not isinstance(exif, bytes) or image.format == "PNG":  # that of a PNG file is not read in graphs either
        return colours
    return np.asarray(jpeg_png.turn_upright(colours, jpeg_png.exif_orientation(exif)))


def _damaged(error: Exception) -> str:
    return f"is a damaged image: {str(error) or type(error).__name__}"


def _in_colour(image: Any) -> np.ndarray:
    if image.mode == "CMYK":
        if image.format == "JPEG" and "adobe" not in image.info:
            raise ValueError(f"cannot be decoded. {jpeg_png.NO_ADOBE}")
        inks = 255 - np.asarray(image, np.uint16)
        return (inks[..., :3] * inks[..., 3:] // 255).astype(np.uint8)  # libjpeg's rounding
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN_BITS):
        return _grey(np.asarray(image) >> 8)
    if image.mode in ("I", "F"):
        return _grey(_checked(np.asarray(image), image.mode))
    with_alpha = {"La": "LA", "RGBa": "RGBA"}.get(image.mode)  # colours multiplied by their opacity
    try:
        return np.asarray((image.convert(with_alpha) if with_alpha else image).convert("RGB"))
    except (ValueError, KeyError) as error:
        raise ValueError(f"has mode {image.mode}, which Pillow does not convert to RGB: {error}") from None


def _grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values.astype(np.uint8)[..., None], 3, axis=-1)


def _checked(values: np.ndarray, mode: str) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255) or (mode == "F" and 0 < high <= 1):
        raise ValueError(
            f"has mode {mode}, whose values must be pixels from 0 to 255: scale them. Received: {low:g}..{high:g}"
        )
    return values
