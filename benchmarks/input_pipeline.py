"""Measure images per second of the training input: keras_vit's pipeline and Keras' own augmentation layers.

    python benchmarks/input_pipeline.py [--rounds 3]

From JPEGs of 375x500 pixels to prepared batches of 224x224 with RandAugment (2 operations, magnitude 15) and mixup. All
rows run alternately in one process, with the same decoding, crops and flips. The photos are parts of scikit-learn's two
sample images, in a temporary folder.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf

from keras_vit.model.config import Preprocessing
from keras_vit.model.task import Classification
from keras_vit.train import recipe
from keras_vit.train.data import pipeline
from keras_vit.train.data.sources import Order, Split, open_data

SIZE = (224, 224)
CLASSES = 10
BATCH = 64
MAGNITUDE, MIXUP = 15, 0.2
WITHOUT = {"crop": "inception", "flip": True, "shift": 0.0, "randaugment_layers": 0, "mixup": 0.0}
RANDAUGMENT = {"randaugment_layers": 2, "randaugment_magnitude": MAGNITUDE}
MAIN = "keras_vit: RandAugment + mixup"


def write_photos(folder: Path, count: int) -> None:
    """Write JPEGs of quality 90 in folders of classes: random parts of two photographs, half of them mirrored."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    photos = load_sample_images().images
    for number in range(count):
        photo = photos[number % 2]
        top, left = (int(rng.integers(0, room + 1)) for room in (photo.shape[0] - 375, photo.shape[1] - 500))
        part = photo[top : top + 375, left : left + 500][:, :: rng.choice([-1, 1])]
        path = folder / "train" / f"class{number % CLASSES}" / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(part).save(path, quality=90)


def ours(split: Split, **changes: Any) -> tf.data.Dataset:
    """Return keras_vit's pipeline with some augmentations."""
    return pipeline.training_batches(
        split,
        recipe("augreg", **(WITHOUT | changes)),
        model_input=pipeline.ModelInput(SIZE, 3, Preprocessing()),
        task=Classification(num_classes=CLASSES),
        order=Order(batch=BATCH, seed=0),
    )


def with_layers(split: Split, layers: list[Callable[[], keras.layers.Layer]]) -> tf.data.Dataset:
    """Return keras_vit's crops and flips, followed by Keras' layers on whole batches."""
    made = [layer() for layer in layers]

    def augmented(batch: dict[str, Any]) -> dict[str, Any]:
        # The layers expect 0..255 and another key for the labels.
        data = {"images": batch["image"] * 127.5 + 127.5, "labels": batch["label"]}
        for layer in made:
            data = layer(data, training=True)
        return {"image": (data["images"] - 127.5) / 127.5, "label": data["labels"]}

    # Keras does not fix the order of its random numbers here.
    return ours(split).map(augmented, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def contenders(split: Split) -> dict[str, tuple[Callable[[], tf.data.Dataset], int]]:
    """Return, by row, the function that makes batches, and the number of batches of one measurement."""
    rand = lambda: keras.layers.RandAugment(value_range=(0, 255), num_ops=2, factor=min(MAGNITUDE / 10, 1.0))  # noqa: E731
    mix = lambda: keras.layers.MixUp(alpha=MIXUP)  # noqa: E731
    return {
        "keras_vit: crop, flip": (lambda: ours(split), 8),
        "keras_vit: mixup": (lambda: ours(split, mixup=MIXUP), 8),
        "keras_vit: RandAugment": (lambda: ours(split, **RANDAUGMENT), 8),
        MAIN: (lambda: ours(split, mixup=MIXUP, **RANDAUGMENT), 8),
        "keras.layers: MixUp": (lambda: with_layers(split, [mix]), 8),
        "keras.layers: RandAugment": (lambda: with_layers(split, [rand]), 1),
        "keras.layers: RandAugment + MixUp": (lambda: with_layers(split, [rand, mix]), 1),
    }


def measure(made: tf.data.Dataset, batches: int) -> tuple[float, float]:
    """Return wall-clock and processor seconds per image, after two batches that fill the buffers."""
    stream = iter(made)
    for _ in range(2):
        next(stream)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(batches):
        next(stream)
    images = batches * BATCH
    return (time.perf_counter() - wall) / images, (time.process_time() - cpu) / images


def report(results: dict[str, list[tuple[float, float]]], rounds: int) -> None:
    """Print the medians, the machine and the versions."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras", "numpy"))
    print(f"JPEG 375x500 to {SIZE[0]}x{SIZE[1]}, batches of {BATCH}: medians of {rounds} turns each")
    print(
        f"{datetime.date.today()}, {cpu[1] if cpu else platform.machine()}, {os.cpu_count()} CPUs, shared with others"
    )
    print(f"other work on the machine: a load of {os.getloadavg()[1]:.1f} over five minutes, this included")
    print(f"Python {platform.python_version()}, {versions}\n")
    print(f"{'':36}{'images/s':>10}{'images/CPU s':>14}{'CPU ms/image':>14}{'CPU of ours':>13}")
    ours_cpu = statistics.median(cpu for _, cpu in results[MAIN])
    for name, rows in results.items():
        wall, cpu_seconds = (statistics.median(column) for column in zip(*rows, strict=True))
        figures = f"{1 / wall:10.0f}{1 / cpu_seconds:14.0f}{cpu_seconds * 1e3:14.2f}{cpu_seconds / ours_cpu:12.2f}x"
        print(f"{name:36}{figures}")


def main() -> None:
    """Read the command line, measure all rows alternately and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photos", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        write_photos(Path(directory), options.photos)
        split = open_data(directory).train
        results: dict[str, list[tuple[float, float]]] = {}
        for turn in range(options.rounds):
            for name, (make, batches) in contenders(split).items():
                results.setdefault(name, []).append(measure(make(), batches))
                print(f"turn {turn}: {name}: {1 / results[name][-1][0]:.0f} images/s", file=sys.stderr)
    report(results, options.rounds)


if __name__ == "__main__":
    main()
