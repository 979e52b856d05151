"""Make class folders of photos as people have them: JPEG files of several sizes, some turned by an EXIF tag."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

# Class: the photo that it is cut from (0: a temple, 1: a flower), and the region: left, top, right, bottom as shares.
CLASSES = {
    "leaves": (1, (0.00, 0.00, 0.32, 0.60)),
    "petals": (1, (0.42, 0.25, 0.80, 0.80)),
    "roof": (0, (0.00, 0.32, 0.52, 0.72)),
    "sky": (0, (0.45, 0.00, 1.00, 0.30)),
    "trees": (0, (0.40, 0.72, 1.00, 1.00)),
}
SIZES = ((160, 120), (120, 160), (144, 144))
TURNED = 6  # EXIF: a viewer turns the stored picture clockwise by a quarter
ORIENTATION = 0x0112  # EXIF's number of the tag


def make(folder: Path, *, per_class: int = 20, seed: int = 0) -> Path:
    """Write `per_class` photos of each class to folder/class/*.jpg, one in four turned by an EXIF tag."""
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    draw = np.random.default_rng(seed)
    for name, (number, region) in CLASSES.items():
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            photo = _crop(photos[number], region, SIZES[index % len(SIZES)], draw)
            exif = Image.Exif()
            if index % 4 == 3:
                photo = photo.transpose(Image.Transpose.ROTATE_90)
                exif[ORIENTATION] = TURNED
            photo.save(folder / name / f"{name}-{index:02}.jpg", quality=90, exif=exif)
    return folder


def _crop(
    photo: Image.Image, region: tuple[float, float, float, float], size: tuple[int, int], draw: np.random.Generator
) -> Image.Image:
    """Return a random part of a region, at a random scale and brightness."""
    left, top, right, bottom = (share * side for share, side in zip(region, (*photo.size, *photo.size), strict=True))
    largest = min((right - left) / size[0], (bottom - top) / size[1])
    scale = largest * draw.uniform(0.6, 1.0)
    x, y = (
        draw.uniform(start, end - side * scale) for start, end, side in ((left, right, size[0]), (top, bottom, size[1]))
    )
    part = photo.resize(size, Image.Resampling.BICUBIC, box=(x, y, x + size[0] * scale, y + size[1] * scale))
    return Image.fromarray(np.clip(np.asarray(part) * draw.uniform(0.8, 1.2), 0, 255).astype(np.uint8))
