"""Write the table of image files into docs/numerics-and-traps.md: what each gives as a path, an object and as bytes.

python tests/support/image_table.py
"""

from __future__ import annotations

import functools
import io
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps

import image_kinds
from image_kinds import encoded, photo
from keras_vit.export import server
from keras_vit.model import pillow, preprocess
from keras_vit.model.config import Preprocessing, ViTConfig
from places import ROOT

PAGE = ROOT / "docs" / "numerics-and-traps.md"
START = "<!-- image files: written by tests/support/image_table.py, checked by make test -->\n"
END = "<!-- /image files -->"
READ = "yes"
# A model whose input is the photo itself, so that prepared images are its pixels.
PIXELS = ViTConfig(image_size=(45, 60), patch_size=15, preprocessing=Preprocessing(mean=(0,), std=(1 / 255,)))
TURNED = Image.Transpose.ROTATE_180  # how a camera stores a photo in orientation 3


class Kind(NamedTuple):
    """One row of the table."""

    file: bytes
    pixels: str = ""  # what is read, in words
    expected: Any = None  # the same as uint8 (height, width, 3), from Pillow or NumPy; None: Pillow's conversion to RGB


def stored(kind: str) -> bytes:
    """Return a file of the photo as a camera in orientation 3 stores it."""
    tags = Image.Exif()
    tags[0x0112] = 3
    return encoded(photo().transpose(TURNED), kind, exif=tags.tobytes())


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values.astype(np.uint8)[..., None], 3, axis=-1)


@functools.cache
def kinds() -> dict[str, Kind]:
    """Return the files; all hold the same photo."""
    image = photo()
    coloured, pale = np.asarray(image), np.asarray(image.convert("L"))
    deep = pale.astype(np.uint16) * 257 + 100  # the high byte is that of `pale`, or one more
    transparent = image.copy()
    transparent.putalpha(Image.fromarray(np.tile(np.arange(60, dtype=np.uint8) * 4, (45, 1))))
    cmyk = image.convert("CMYK")
    frames: dict[str, Any] = {"save_all": True, "append_images": [photo(seed=1)]}
    high, turned = "the high byte of each value", "the photo upright"
    opaque = "on white"
    sixteen = Image.fromarray(deep)
    return {
        "JPEG": Kind(encoded(image, "JPEG")),
        "JPEG, grey": Kind(encoded(image.convert("L"), "JPEG")),
        "JPEG, progressive": Kind(encoded(image, "JPEG", progressive=True)),
        "JPEG, CMYK": Kind(encoded(cmyk, "JPEG"), "RGB, as libjpeg computes it"),
        "JPEG, CMYK without Adobe's mark": Kind(encoded(cmyk, "JPEG").replace(b"Adobe", b"Other")),
        "JPEG, EXIF orientation 3": Kind(stored("JPEG"), turned),
        "JPEG, truncated": Kind(encoded(image, "JPEG")[:-300]),
        "PNG": Kind(encoded(image, "PNG"), "", coloured),
        "PNG, grey": Kind(encoded(image.convert("L"), "PNG"), "", grey(pale)),
        "PNG, 1 bit": Kind(encoded(image.convert("1"), "PNG"), "0 or 255"),
        "PNG, 16 bits, grey": Kind(encoded(sixteen, "PNG"), high, grey(deep >> 8)),
        "PNG, 16 bits, RGB": Kind(image_kinds.sixteen_bits(), high, coloured),
        "PNG, 16 bits of which 12 are used": Kind(encoded(Image.fromarray(deep >> 4), "PNG")),
        "PNG, RGBA": Kind(encoded(transparent, "PNG"), opaque),
        "PNG, grey with alpha": Kind(encoded(transparent.convert("LA"), "PNG"), opaque),
        "PNG, palette": Kind(encoded(image.quantize(64), "PNG")),
        "PNG, palette with a transparent colour": Kind(encoded(image.quantize(64), "PNG", transparency=3), opaque),
        "PNG, EXIF orientation 3": Kind(stored("PNG"), "the photo as stored", np.asarray(image.transpose(TURNED))),
        "PNG, truncated": Kind(encoded(image, "PNG")[:-900]),
        "PNG of 20,000 x 20,000 pixels": Kind(image_kinds.png(20_000, 20_000, 8, 0, b"")),
        "GIF": Kind(encoded(image, "GIF")),
        "GIF, animated": Kind(encoded(image, "GIF", **frames), "the first frame"),
        "WebP": Kind(encoded(image, "WEBP")),
        "WebP, EXIF orientation 3": Kind(stored("WEBP"), turned),
        "BMP": Kind(encoded(image, "BMP"), "", coloured),
        "TIFF": Kind(encoded(image, "TIFF"), "", coloured),
        "TIFF, 16 bits, grey": Kind(encoded(sixteen, "TIFF"), high, grey(deep >> 8)),
        "HEIC": Kind(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64)),
        "HTML": Kind(b"<!doctype html><title>404</title>"),
        "an empty file": Kind(b""),
    }


def expected(kind: Kind) -> np.ndarray:
    """Return the pixels of a file that can be read, by Pillow or NumPy alone."""
    if kind.expected is not None:
        return np.asarray(kind.expected)
    with Image.open(io.BytesIO(kind.file)) as image:
        return image_kinds.on_white(ImageOps.exif_transpose(image))


def by_path(kind: Kind) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "photo"
        path.write_bytes(kind.file)
        try:
            return preprocess.decode(path)
        except ValueError as error:
            raise ValueError(str(error).replace(f"{str(path)!r} ", "")) from None


def by_object(kind: Kind) -> np.ndarray:
    try:
        image = Image.open(io.BytesIO(kind.file))
    except Exception as error:
        raise ValueError("`Image.open` fails") from error
    with image:
        return pillow.pillow_pixels(image)


@functools.cache
def graph() -> Callable[[Any], Any]:
    return tf.function(lambda files: server.decode(files, PIXELS), input_signature=[tf.TensorSpec((None,), tf.string)])


def by_bytes(kind: Kind) -> np.ndarray:
    """Return what the graph of a SavedModel decodes; an error has a part of the graph's message."""
    try:
        prepared = graph()(tf.constant([kind.file]))[0].numpy()
    except tf.errors.InvalidArgumentError as error:
        reason = re.search(
            r"Not a JPEG or PNG file|has 16 bits[^:]*|A CMYK JPEG[^:]*|An image has[^.]*|Invalid \w+ data",
            error.message,
        )
        raise ValueError(reason[0] if reason else "damaged") from None
    return np.rint(prepared).astype(np.uint8)


WAYS = (by_path, by_object, by_bytes)


def received(kind: Kind) -> list[np.ndarray | str]:
    """Return the pixels of the three ways, or their errors' texts."""
    found: list[np.ndarray | str] = []
    for way in WAYS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found.append(way(kind))
            except ValueError as error:
                found.append(str(error))
    return found


@functools.cache
def rendered() -> str:
    """Return the table in Markdown."""
    lines = [["file", "path", "Pillow object", "bytes in a SavedModel", "what is read"], ["---"] * 5]
    for name, kind in kinds().items():
        cells = [f"error: {_abbreviate(each)}" if isinstance(each, str) else READ for each in received(kind)]
        lines.append([name, *cells, (kind.pixels or "the photo") if READ in cells else "-"])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _abbreviate(message: str) -> str:
    """Return the first sentence of an error, without figures that change with the version of a library."""
    text = re.sub(r"^cannot be decoded\. |^is (?!a damaged)", "", message)
    text = re.sub(r"is a damaged image: .*", "a damaged image", text)
    return re.split(r"[.:] |, which cannot|, size|, whose", text)[0].rstrip(".").replace("|", "/")


def main() -> None:
    """Replace the table."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    PAGE.write_text(before + START + rendered() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
