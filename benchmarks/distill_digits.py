"""Measure whether a teacher helps a small model of digits: trained on labels, and distilled without labels.

    python benchmarks/distill_digits.py

The teacher is the model that comes with the package. Student, steps, recipe and three seeds were fixed before the first
run. Every student takes the same number of steps with the same augmentation and mixup. Rows: all labels; ten labels of
each class; the teacher's classes on all images, without labels. Each is tested on the held-out digits, and on the same
with noise and a grey bar.
"""

import argparse
import datetime
import os
import platform
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit import ViTConfig, digits, train, zoo
from keras_vit.model.cost import count

STUDENT = ViTConfig(image_size=16, patch_size=4, hidden_size=32, mlp_dim=64, num_heads=2, num_layers=2, num_classes=10)
SEEDS = (0, 1, 2)
STEPS = 1500  # of 64 images
COMMON: dict[str, Any] = {
    "mixup": 0.5,
    "shift": 0.125,
    "crop": "none",
    "flip": False,
    "optimizer": "adamw",
    "learning_rate": 2e-3,
    "weight_decay": 0.05,
    "batch_size": 64,
    "accumulation": 1,
    "warmup_fraction": 0.1,
    "epochs": None,
    "steps_per_call": 20,
    "log_steps": 100,
    "checkpoint_minutes": None,
    "xla": False,
}
LABELS, FEW, TAUGHT, TAUGHT_FEW = "all labels", "10 labels a class", "teacher, no labels", "teacher, 100 photos"
TESTS = ("clean", "noise", "bar")


def tests(data: digits.Digits) -> dict[str, np.ndarray]:
    """Return the held-out digits as they are, with noise, and with a bar over a quarter of the picture."""
    random = np.random.default_rng(0)
    noise = random.normal(scale=64, size=data.test_images.shape)
    barred = data.test_images.copy()
    height = barred.shape[1]
    for image, top in zip(barred, random.integers(0, height * 3 // 4, len(barred)), strict=True):
        image[top : top + height // 4] = 128
    noisy = np.clip(data.test_images + noise, 0, 255).astype(np.uint8)
    return dict(zip(TESTS, (data.test_images, noisy, barred), strict=True))


def few(labels: np.ndarray, seed: int) -> np.ndarray:
    """Return the indices of ten images of every class, drawn from the seed."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.choice(np.flatnonzero(labels == k), 10, replace=False) for k in range(10)])


def trained(row: str, data: digits.Digits, teacher: Any, seed: int, steps: int) -> Any:
    """Return a student that was trained as a row of the table says."""
    chosen = few(data.train_labels, seed) if row in (FEW, TAUGHT_FEW) else np.arange(len(data.train_labels))
    images, labels = data.train_images[chosen], data.train_labels[chosen]
    is_taught = row in (TAUGHT, TAUGHT_FEW)
    recipe = train.recipe("distill" if is_taught else "digits", **COMMON, steps=steps, seed=seed)
    pairs = {"train": (images, None if is_taught else labels)}
    return train.run(recipe, model=STUDENT, teacher=teacher if is_taught else None, data=pairs, progress=False).model


def accuracy(model: Any, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of images that a model classifies correctly."""
    logits = model.predict(model.preprocess(images), batch_size=120, verbose=0)
    return float((logits.argmax(-1) == labels).mean())


def main() -> None:
    """Train every row with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each student ({STEPS})")
    steps = parser.parse_args().steps
    data, teacher = digits.load(), zoo.load("digits")
    cases = tests(data)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    own, other = count(STUDENT), count(teacher.config)
    print(f"Distilling the digits, {steps} steps of 64 images, seeds {SEEDS}")
    print(f"{datetime.date.today()}, {cpu[1] if cpu else 'CPU unknown'}, {os.cpu_count()} CPUs")
    print(f"Python {platform.python_version()}, keras {keras.__version__}, tensorflow {tf.__version__}")
    print(
        f"teacher {other.parameters:,} parameters, {other.flops / 1e6:.1f} MFLOP; student {own.parameters:,}, "
        f"{own.flops / 1e6:.2f} MFLOP ({own.flops / other.flops:.1%})"
    )
    print("\naccuracy on 360 held-out images, of which one is .0028; mean, and least to most of the seeds\n")
    print(f"{'student trained on':22}" + "".join(f"{name:>24}" for name in TESTS))
    scores = [accuracy(teacher, cases[name], data.test_labels) for name in TESTS]
    print(f"{'(the teacher)':22}" + "".join(f"{score:24.4f}" for score in scores))
    for row in (LABELS, TAUGHT, FEW, TAUGHT_FEW):
        found: dict[str, list[float]] = {name: [] for name in TESTS}
        for seed in SEEDS:
            model = trained(row, data, teacher, seed, steps)
            for name in TESTS:
                found[name].append(accuracy(model, cases[name], data.test_labels))
            print(f"{row}, seed {seed}: {[f'{found[name][-1]:.4f}' for name in TESTS]}", file=sys.stderr)
        figures = (f"{statistics.mean(each):.4f} ({min(each):.4f}-{max(each):.4f})" for each in found.values())
        print(f"{row:22}" + "".join(f"{figure:>24}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
