"""Image files of every kind that a server may receive: valid ones, which Pillow reads, and invalid ones."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

PNG = b"\x89PNG\r\n\x1a\n"


@functools.cache
def photo(width: int = 60, height: int = 45, seed: int = 0) -> Image.Image:
    """Return a smooth random picture in colour."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """Build a PNG file that Pillow does not write, or one with false values in its header."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return PNG + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def sixteen_bits() -> bytes:
    values = (np.asarray(photo()).astype(np.uint16) * 256 + 3).astype(">u2")  # big-endian
    return png(60, 45, 16, 2, b"".join(b"\0" + row.tobytes() for row in values))


def jpeg_that_claims(width: int, height: int) -> bytes:
    file = bytearray(encoded(photo(), "JPEG"))
    frame = file.index(b"\xff\xc0") + 5
    file[frame : frame + 4] = struct.pack(">HH", height, width)
    return bytes(file)


def on_white(image: Image.Image) -> np.ndarray:
    """Return the pixels of an image in front of white, as Pillow puts them there."""
    if image.mode in ("La", "RGBa"):
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    if image.mode not in ("LA", "PA", "RGBA") and not (image.mode == "P" and "transparency" in image.info):
        return np.asarray(image.convert("RGB"))
    page = Image.new("RGBA", image.size, "white")
    page.alpha_composite(image.convert("RGBA"))
    return np.asarray(page.convert("RGB"))


def good() -> dict[str, bytes]:
    """Return files that Pillow reads correctly."""
    image = photo()
    alpha = image.copy()
    alpha.putalpha(Image.fromarray(np.tile(np.arange(60, dtype=np.uint8) * 4, (45, 1))))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    return {
        "JPEG": encoded(image, "JPEG"),
        "JPEG without chroma subsampling": encoded(image, "JPEG", subsampling=0, quality=98),
        "progressive JPEG": encoded(image, "JPEG", progressive=True),
        "grey JPEG": encoded(image.convert("L"), "JPEG"),
        "CMYK JPEG": encoded(image.convert("CMYK"), "JPEG"),
        "JPEG in RGB": encoded(image, "JPEG", keep_rgb=True),
        "JPEG with an orientation": encoded(image, "JPEG", exif=exif),
        "JPEG with something behind it": encoded(image, "JPEG") + b"something",
        "PNG": encoded(image, "PNG"),
        "grey PNG": encoded(image.convert("L"), "PNG"),
        "PNG of one bit": encoded(image.convert("1"), "PNG"),
        "PNG of 16 bits": sixteen_bits(),
        "PNG with a palette": encoded(image.quantize(64), "PNG"),
        "PNG with a palette and a clear colour": encoded(image.quantize(64), "PNG", transparency=3),
        "PNG with alpha": encoded(alpha, "PNG"),
        "grey PNG with alpha": encoded(alpha.convert("LA"), "PNG"),
        "animated PNG": encoded(image, "PNG", save_all=True, append_images=[photo(seed=1)]),
        "one pixel": encoded(photo(1, 1), "PNG"),
        "one pixel, JPEG": encoded(photo(1, 1), "JPEG"),
        "wide": encoded(photo(60_000, 2), "PNG"),
        "high": encoded(photo(2, 9_000), "JPEG"),
    }


def bad() -> dict[str, tuple[bytes, str]]:
    """Return files that must be rejected, and a part of the error message."""
    jpeg, image = encoded(photo(), "JPEG"), encoded(photo(), "PNG")
    unknown, large, broken = "Not a JPEG or PNG file", "50,000,000 pixels", "Invalid"
    return {
        "empty": (b"", unknown),
        "text": (b"<html>404</html>" * 20, unknown),
        "the start of a JPEG's mark": (jpeg[:3], broken),
        "GIF": (encoded(photo(), "GIF"), unknown),
        "animated GIF": (encoded(photo(), "GIF", save_all=True, append_images=[photo(seed=1)]), unknown),
        "BMP": (encoded(photo(), "BMP"), unknown),
        "TIFF": (encoded(photo(), "TIFF"), unknown),
        "WebP": (encoded(photo(), "WEBP"), unknown),
        "half of a JPEG": (jpeg[: len(jpeg) // 2], broken),
        "a JPEG's head alone": (jpeg[:300], broken),
        "a JPEG without its end": (jpeg[:-2], broken),
        "a JPEG of noise": (jpeg[:3] + bytes(range(256)), broken),
        "half of a PNG": (image[: len(image) // 2], broken),
        "a PNG with a changed byte": (image[:200] + bytes([image[200] ^ 1]) + image[201:], broken),
        "a CMYK JPEG that does not say which": (
            encoded(photo().convert("CMYK"), "JPEG").replace(b"Adobe", b"Other"),
            "A CMYK JPEG without the mark of Adobe",
        ),
        "a PNG without sides": (png(0, 0, 8, 0, b""), large),
        "a PNG that claims 20,000 x 20,000": (png(20_000, 20_000, 8, 0, b""), large),
        "a PNG that claims 2^31 x 2^31": (png(2**31 - 1, 2**31 - 1, 8, 0, b""), large),
        "a JPEG that claims 60,000 x 60,000": (jpeg_that_claims(60_000, 60_000), large),
    }


def drawn(random: np.random.Generator) -> tuple[str, bytes]:
    """Return the name of a random kind, and a file of random size and quality; a third of them are damaged."""
    sides = [int(side) for side in np.exp(random.uniform(0, np.log(400), 2))]
    image = photo(*sides, seed=int(random.integers(50)))
    number = random.integers(10)
    if number < 5:
        mode = ("RGB", "L", "CMYK", "RGB")[random.integers(4)]
        options = {"quality": int(random.integers(5, 100)), "progressive": bool(random.integers(2))}
        kind, file = f"JPEG {mode}", encoded(image.convert(mode), "JPEG", **options)
    elif number < 9:
        mode = ("RGB", "L", "1", "P", "RGBA", "LA")[random.integers(6)]
        picture = image.quantize(int(random.integers(2, 256))) if mode == "P" else image.convert(mode)
        kind, file = f"PNG {mode}", encoded(picture, "PNG")
    else:
        kind = ("GIF", "BMP", "TIFF", "WEBP")[random.integers(4)]
        file = encoded(image, kind)
    damage = random.integers(6)
    if damage == 0:
        return f"{kind} damaged", file[: int(random.integers(len(file)))]
    if damage == 1:
        content = bytearray(file)
        for _ in range(int(random.integers(1, 4))):
            content[int(random.integers(len(content)))] ^= 1 << int(random.integers(8))
        return f"{kind} damaged", bytes(content)
    return kind, file
