"""Draw pictures of all kinds that people have: modes, formats, sizes, orientations, opacity, 16 bits, CMYK."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from image_kinds import encoded, photo, png

ORIENTATION = 0x0112


def drawn(random: np.random.Generator) -> tuple[str, bytes]:
    """Return the name of a random kind, and a file of a random size that everything reads."""
    sides = [int(side) for side in np.exp(random.uniform(0, np.log(300), 2))]
    image = photo(*sides, seed=int(random.integers(50)))
    kind = KINDS[int(random.integers(len(KINDS)))]
    format, _, mode = kind.partition(" ")
    options: dict[str, Any] = {}
    if mode == "16":
        values = (np.asarray(image.convert("L")).astype(np.uint16) * 257 - int(random.integers(2))).clip(0, 65_535)
        picture = Image.fromarray(values.astype(np.uint16))
    elif mode == "RGB16":
        rows = (np.asarray(image).astype(">u2") * 256 + 200).astype(">u2")
        return kind, png(*sides, 16, 2, b"".join(b"\0" + row.tobytes() for row in rows))
    elif mode in ("P", "P+"):
        picture = image.quantize(int(random.integers(2, 256)))
        options = {"transparency": 0} if mode == "P+" else {}
    elif mode in ("RGBA", "LA"):
        picture = image.copy()
        picture.putalpha(Image.fromarray(random.integers(0, 256, sides[::-1], dtype=np.uint8)))
        picture = picture.convert(mode)
    else:
        picture = image.convert(mode)
    if format in ("JPEG", "WEBP") and random.integers(2):
        tags = Image.Exif()
        tags[ORIENTATION] = int(random.integers(1, 9))
        options["exif"] = tags.tobytes()
    if format == "JPEG":
        options |= {"quality": int(random.integers(20, 100)), "progressive": bool(random.integers(2))}
    return kind, encoded(picture, format, **options)


KINDS = (
    *("JPEG RGB", "JPEG L", "JPEG CMYK", "PNG RGB", "PNG L", "PNG 1", "PNG P", "PNG P+", "PNG RGBA", "PNG LA"),
    *("PNG 16", "PNG RGB16", "WEBP RGB", "WEBP RGBA", "BMP RGB", "BMP P", "GIF P", "TIFF RGB", "TIFF CMYK", "TIFF 16"),
)


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))
