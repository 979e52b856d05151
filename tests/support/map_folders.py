"""Folders of images with maps: a red square at a random place, the class 1 or 4 m away, on dark ground of 1 m."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 18  # of the square
SIZES = ((40, 48), (48, 36), (44, 44))


def scene(draw: np.random.Generator, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return an image, uint8, and its map of classes: 255 in the two upper rows."""
    image, classes = draw.integers(0, 60, (*size, 3)), np.zeros(size, np.uint8)
    top, left = (draw.integers(2, side - SIDE) for side in size)
    image[top : top + SIDE, left : left + SIDE, 0] += 180
    classes[top : top + SIDE, left : left + SIDE] = 1
    classes[:2] = 255
    return image.astype(np.uint8), classes


def arrays(count: int, *, size: tuple[int, int] = (32, 32), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images (count, height, width, 3) and maps of classes (count, height, width)."""
    draw = np.random.default_rng(seed)
    images, classes = zip(*(scene(draw, size) for _ in range(count)), strict=True)
    return np.stack(images), np.stack(classes)


def metres(classes: np.ndarray) -> np.ndarray:
    """Return the distances of a map of classes, 0 where there is none."""
    return np.where(classes == 255, 0, 1 + 3 * classes.astype(float))


def make(folder: Path, *, count: int = 12, kind: str = "masks", parts: tuple[str, ...] = ("train", "val")) -> Path:
    """Write `count` images and maps into each part, and the names of the classes; the masks have a palette."""
    for number, part in enumerate(parts):
        draw = np.random.default_rng(number)
        for name in ("images", kind):
            (folder / part / name).mkdir(parents=True)
        for index in range(count):
            image, classes = scene(draw, SIZES[index % len(SIZES)])
            Image.fromarray(image).save(folder / part / "images" / f"{index:02}.jpg", quality=95)
            if kind == "masks":
                picture = Image.fromarray(classes, "P")
                picture.putpalette([7, 9, 11, 200, 100, 50] + [30] * 762)
            else:
                picture = Image.fromarray((1000 * metres(classes)).astype(np.uint16))
            picture.save(folder / part / kind / f"{index:02}.png")
    if kind == "masks":
        (folder / "classes.txt").write_text("ground\nsquare\n", encoding="utf-8")
    return folder
