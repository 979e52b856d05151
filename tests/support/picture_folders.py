"""Write folders of small pictures, and of digits that the embedded model knows."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from keras_vit import VisionTransformer, digits, zoo

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@functools.cache
def digits_model() -> VisionTransformer:
    return zoo.load("digits")


@functools.cache
def picture(kind: str = "PNG", seed: int = 0, **options: Any) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def fill(folder: Path, **classes: int) -> Path:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (folder / name / f"{number}.png").write_bytes(picture())
    return folder


def write_digits(folder: Path, names: Mapping[int, str], count: int = 4) -> Path:
    """Write the first held-out images of some digits, in a class folder of the given name each."""
    data = digits.load()
    for digit, name in names.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in np.flatnonzero(data.test_labels == digit)[:count]:
            Image.fromarray(data.test_images[number]).save(folder / name / f"{number}.png")
    return folder


def accuracy(names: Mapping[int, str], count: int = 4) -> float:
    """Return the share of the images of `write_digits` that the digits model is right about."""
    data = digits.load()
    chosen = np.concatenate([np.flatnonzero(data.test_labels == digit)[:count] for digit in names])
    logits = digits_model().predict_on_batch(digits_model().preprocess(data.test_images[chosen]))
    return float(np.mean(logits.argmax(axis=1) == data.test_labels[chosen]))
