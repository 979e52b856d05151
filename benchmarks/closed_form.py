#!/usr/bin/env python3
"""Seconds and memory of a head in closed form: 10,000 photos, 1,000 classes, eight blocks of ViT-S.

The features are random, in as many clusters as there are classes; their computation is not measured. scikit-learn's
RidgeClassifier solves the same problem, for one strength that it is given, in a process of its own.
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import time

import numpy as np

PHOTOS, CLASSES, WIDTH = 10_000, 1_000, 8 * 2 * 384


def batches(count: int, width: int, classes: int, size: int = 1024):
    """Yield features (images, width), float32, and labels; the same in each process."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(classes, width)).astype(np.float32)
    for first in range(0, count, size):
        labels = random.integers(0, classes, min(size, count - first))
        noise = random.normal(scale=9.0, size=(len(labels), width)).astype(np.float32)
        yield centres[labels] + noise, labels


def peak() -> float:
    """Largest memory of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def ours(count: int, width: int, classes: int) -> tuple[float, float]:
    """Add the features up, hold a fifth out, choose and solve; return strength and accuracy on the held-out fifth."""
    from keras_vit.train.least_squares import MOST_HELD_OUT, Summed, cross_validate

    summed, held_out, number = Summed.empty(width, classes), [], min(count // 5, MOST_HELD_OUT)
    for features, labels in batches(count, width, classes):
        if sum(len(kept) for _, kept in held_out) < number:
            held_out.append((features, labels))
        else:
            summed.add(features, labels)
    x, y = (np.concatenate(parts) for parts in zip(*held_out, strict=True))
    summed = Summed(summed.products, summed.sums, held_out=(x, y))
    blocks = {n: np.flatnonzero(np.arange(width) // 384 % 8 >= 8 - n) for n in (1, 8)}
    best = min(cross_validate(summed, blocks), key=lambda candidate: candidate.loss)
    summed.head(blocks[best.blocks], best.strength * summed.count)
    return best.strength, best.accuracy


def theirs(count: int, width: int, classes: int) -> tuple[float, float]:
    """Fit scikit-learn's RidgeClassifier on all features but those of a fifth; return strength and accuracy there."""
    from sklearn.linear_model import RidgeClassifier

    x, y = (np.concatenate(parts) for parts in zip(*batches(count, width, classes), strict=True))
    held_out = slice(0, count // 5)
    fitted = RidgeClassifier(alpha=82.0 * count).fit(x[count // 5 :], y[count // 5 :])
    return 1.0, fitted.score(x[held_out], y[held_out])


def main() -> None:
    """Measure each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=int, default=PHOTOS)
    parser.add_argument("--only", choices=("ours", "theirs"))
    args = parser.parse_args()
    if args.only:
        import keras_vit.train.least_squares  # noqa: F401 - its memory is not that of the solution

        before, start = peak(), time.monotonic()
        strength, accuracy = {"ours": ours, "theirs": theirs}[args.only](args.photos, WIDTH, CLASSES)
        seconds = time.monotonic() - start
        print(
            f"{args.only:8}{seconds:8.1f} s{peak():8.2f} GB, {before:.2f} before"
            f"    strength {strength:g}, {accuracy:.4f} of a held-out fifth right"
        )
        return
    print(
        f"{args.photos:,} photos, {CLASSES:,} classes, {WIDTH:,} features; {os.cpu_count()} cores, {platform.machine()}"
    )
    for name in ("ours", "theirs"):
        subprocess.run([sys.executable, __file__, "--photos", str(args.photos), "--only", name], check=True)


if __name__ == "__main__":
    main()
