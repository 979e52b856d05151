"""The samples for Android, browsers and servers prepare images as `preprocess` does, and find the same classes."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

import android_sample
from keras_vit import export
from keras_vit.export.litert import metadata
from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig
from places import SUPPORT
from tiny_models import built, tiny

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
PILLOW = {"round_pixels": True, "antialias": True, "interpolation": "bicubic", "resize": "crop"}
FAMILIES: dict[str, dict[str, Any]] = {
    "Google": {},
    "DINOv2": {**PILLOW, **IMAGENET, "crop_rounding": "down", "crop_fraction": 0.875},
    "CLIP": {**PILLOW, **CLIP, "crop_rounding": "down"},
    "timm": {**PILLOW, "crop_rounding": "half_even", "crop_fraction": 0.9},
    "SigLIP": {**PILLOW, "resize": "squash"},
    "BiT": {"resize": "crop", "antialias": True, "crop_fraction": 0.875},
    "bicubic": {"interpolation": "bicubic"},
}
# Largest accepted difference from `preprocess`, of 255: none where that is Pillow's, else the errors of float32.
# TensorFlow also rounds the places of its bicubic without antialias to 1/1024 of a pixel.
PIXEL_LIMITS = {"Google": 0.01, "BiT": 0.01, "bicubic": 0.3}
EXACT = 0.001  # the same bytes; mean and deviation are float32
SIZE = (40, 32)


def pictures(count: int) -> list[np.ndarray]:
    """Return parts of two photos: in turn portrait, landscape and small, some smaller than a model's images."""
    photos, random = load_sample_images().images, np.random.default_rng(0)
    found = []
    for number in range(count):
        photo = photos[number // 3 % 2]
        longest, shortest = random.integers(300, 427), random.integers(120, 300)
        height, width = ((longest, shortest), (shortest, longest), random.integers(20, 60, 2))[number % 3]
        top, left = (random.integers(side - kept + 1) for side, kept in zip(photo.shape, (height, width), strict=False))
        found.append(np.ascontiguousarray(photo[top : top + height, left : left + width]))
    return found


def config_of(family: str, **changes: Any) -> ViTConfig:
    return tiny(image_size=SIZE, preprocessing=FAMILIES[family], **changes)


def on_android(config: ViTConfig, images: list[np.ndarray], folder: Path) -> np.ndarray:
    del folder
    text = metadata.archive_files(config, "float32", None, ())[metadata.PREPROCESSING]
    return np.stack([android_sample.Preparation(text).prepared(image) for image in images])


def in_browser(config: ViTConfig, images: list[np.ndarray], folder: Path, dtype: str = "float32") -> np.ndarray:
    """Return images as the page's own modules prepare them, in Node.js."""
    if not (node := shutil.which("node")):
        pytest.skip("needs Node.js")
    (folder / "model").write_bytes(b"a file that ends in an archive")
    metadata.append_files(folder / "model", metadata.archive_files(config, dtype, None, ["a name"]))
    with (folder / "pixels").open("wb") as file:
        for image in images:
            file.write(np.concatenate([image, np.full_like(image[..., :1], 255)], axis=-1).tobytes())
    command = (node, SUPPORT / "prepare.mjs", folder, dtype)
    sizes = json.dumps([image.shape[:2] for image in images])
    subprocess.run([*map(str, command), sizes], check=True, capture_output=True)
    return np.fromfile(folder / "prepared", dtype).reshape(len(images), *SIZE, 3)


WAYS = (on_android, in_browser)


def test_the_port_has_the_lines_of_the_readme() -> None:
    lines = [line.strip() for line in android_sample.kotlin().splitlines() if line.strip()]
    assert android_sample.ported_lines() == lines, "Change the README and tests/support/android_sample.py together"


def pixel_error(config: ViTConfig, received: np.ndarray, images: list[np.ndarray]) -> float:
    """Return the largest difference from `preprocess`, in units of 0..255."""
    options = {"image_size": config.size, "num_channels": 3, "preprocessing": config.preprocessing}
    expected = preprocess.prepare(images, **options)
    return float(np.abs((received - expected) * 255 * np.array(config.preprocessing.std)).max())


@pytest.mark.parametrize("way", WAYS)
def test_the_samples_prepare_as_the_model_does(way: Any, tmp_path: Path) -> None:
    config, images = config_of("DINOv2"), pictures(3)
    assert pixel_error(config, way(config, images, tmp_path), images) < EXACT


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_the_samples_find_the_models_classes(way: Any, tmp_path: Path) -> None:
    images, wrong = pictures(12), {}
    for family in FAMILIES:
        model = built(num_layers=1, image_size=SIZE, preprocessing=FAMILIES[family])
        received = way(model.config, images, tmp_path)
        found = model.predict(received, verbose=0).argmax(-1)
        same = np.mean(found == [int(result[0].label_id) for result in model.classify(images)])
        error = pixel_error(model.config, received, images)
        if same < 0.99 or error > PIXEL_LIMITS.get(family, EXACT):
            wrong[family] = (error, same)
    assert not wrong


def test_a_browser_gives_whole_pixels_to_a_file_that_takes_them(tmp_path: Path) -> None:
    config, images = config_of("DINOv2"), pictures(3)
    received = in_browser(config, images, tmp_path, "uint8")
    scaled = preprocess.normalize(received, config.preprocessing)
    assert pixel_error(config, scaled, images) < EXACT


def test_a_file_says_how_to_prepare_unless_it_takes_one_size(tmp_path: Path) -> None:
    model = built(num_layers=1, preprocessing=FAMILIES["DINOv2"])
    imagenet, pixels = [0.485, 0.456, 0.406], [0]
    for dtype, source_size, mean in (("float32", None, imagenet), ("uint8", None, pixels), ("uint8", 50, None)):
        options: dict[str, Any] = {"input_dtype": dtype, "source_size": source_size, "labels": list("abcde")}
        path = tmp_path / f"{dtype}-{source_size}.tflite"
        export.tflite(model, path, quantize="none", least_cosine=0.93, **options)
        with zipfile.ZipFile(path) as archive:
            assert archive.read("labels.txt") == b"a\nb\nc\nd\ne\n"
            assert (metadata.PREPROCESSING in archive.namelist()) == (mean is not None)
            if mean:
                fields = json.loads(archive.read(metadata.PREPROCESSING))
                assert (fields["mean"], fields["image_size"], fields["crop_fraction"]) == (mean, [32, 32], 0.875)
