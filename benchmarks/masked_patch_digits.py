"""Measure whether masked patch prediction helps with few labels: pre-training and fine-tuning against random weights.

    python benchmarks/masked_patch_digits.py

The encoder is pre-trained on the 1,437 training digits without labels. Then 10 or 50 labelled images of each class are
used for fine-tuning: from the pre-trained encoder and from random weights, with the same recipe, steps and seeds. The
models, these budgets, the recipe and three seeds were fixed before the first run. After its results a third row was
added: random weights, with as many steps as pre-training and fine-tuning together. It shows whether pre-training gives
a better start or only more steps.
"""

import argparse
import datetime
import os
import platform
import re
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_vit import ViTConfig, digits, train
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train.masked_patch import colour_classes

# The architecture of the embedded model.
CONFIG = ViTConfig(image_size=32, patch_size=4, hidden_size=64, mlp_dim=128, num_heads=4, num_layers=4, num_classes=0)
SEEDS = (0, 1, 2)  # for the weights, the order, the shifts, the corruption and the choice of labelled images
LABELS_PER_CLASS = (10, 50)
EPOCHS = 40  # steps of pre-training
STEPS = 200  # steps of fine-tuning, with 64 images each
# The recipe `digits`: AdamW, peak rate 2e-3, random shifts. Compiling takes longer than these few steps.
CHANGES: dict[str, Any] = {"steps_per_call": 20, "log_steps": 100, "xla": False}


SCRATCH, LONGER, PRETRAINED = "from scratch", "from scratch, as long in all", "masked patches first"


class Outcome(NamedTuple):
    """The results of one seed.

    Attributes:
        accuracy: (labels per class, row) -> share of the held-out images.
        colours: share of the corrupted patches predicted correctly at the end of pre-training.
    """

    accuracy: dict[tuple[int, str], float]
    colours: float


def few(labels: np.ndarray, per_class: int, seed: int) -> np.ndarray:
    """Return the indices of `count` images of every class, drawn from the seed."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.choice(np.flatnonzero(labels == k), per_class, replace=False) for k in range(10)])


def of_seed(data: digits.Digits, seed: int, *, epochs: int, steps: int) -> Outcome:
    """Pre-train once, then train every row with every number of labels."""
    unlabelled = {"train": (data.train_images, np.zeros_like(data.train_labels))}
    self_supervised = train.recipe("digits", objective="masked_patch", epochs=epochs, seed=seed, **CHANGES)
    first = train.run(self_supervised, model=CONFIG, data=unlabelled, strategy="one", progress=False)
    contenders = {SCRATCH: (CONFIG, steps), LONGER: (CONFIG, first.steps + steps), PRETRAINED: (first.model, steps)}
    found = {
        (per_class, name): fine_tuned(data, per_class, seed, start=start, steps=length)
        for per_class in LABELS_PER_CLASS
        for name, (start, length) in contenders.items()
    }
    return Outcome(found, first.history[-1]["accuracy"])


def fine_tuned(data: digits.Digits, per_class: int, seed: int, *, start: Any, steps: int) -> float:
    """Return the held-out accuracy after training a model, or random weights of a config, on a few labelled images."""
    chosen = few(data.train_labels, per_class, seed)
    labelled = {
        "train": (data.train_images[chosen], data.train_labels[chosen]),
        "evaluation": (data.test_images, data.test_labels),
    }
    supervised = train.recipe("digits", epochs=None, steps=steps, seed=seed, **CHANGES)
    accuracy = train.run(supervised, model=start, data=labelled, strategy="one", progress=False).metrics["accuracy"]
    print(f"seed {seed}, {per_class} labels, {steps} steps: {accuracy:.4f}", file=sys.stderr)
    return accuracy


def commonest_colour(data: digits.Digits) -> float:
    """Return the share of patches that have the most frequent colour: the accuracy of a constant prediction."""
    images = VisionTransformer(CONFIG).preprocess(data.train_images)
    return float(np.bincount(np.ravel(colour_classes(images, CONFIG))).max() / (len(images) * 64))


def report(outcomes: list[Outcome], guess: float, *, epochs: int, steps: int) -> None:
    """Print the accuracies of each seed, their means, and the differences between the rows."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(f"Masked patch prediction on 1,437 digits, {epochs} epochs, then {steps} steps of 64 images with few labels")
    print(f"{datetime.date.today()}, {cpu[1] if cpu else 'CPU unknown'}, {os.cpu_count()} CPUs")
    print(f"Python {platform.python_version()}, keras {keras.__version__}, tensorflow {tf.__version__}")
    colours = [f"{outcome.colours:.1%}" for outcome in outcomes]
    print(f"pre-training, colours of corrupted patches right at the end: {', '.join(colours)} (seeds")
    print(f"{', '.join(map(str, SEEDS))}); always the commonest of the 512 colours: {guess:.1%}, unshifted")
    print("\naccuracy on 360 held-out images, of which one is .0028\n")
    columns = [*(f"seed {seed}" for seed in SEEDS), "mean"]
    print(f"{'labels per class, start':34}" + "".join(f"{column:>9}" for column in columns))
    for per_class in LABELS_PER_CLASS:
        for name in (SCRATCH, LONGER, PRETRAINED):
            row = [outcome.accuracy[per_class, name] for outcome in outcomes]
            figures = "".join(f"{figure:9.4f}" for figure in [*row, statistics.mean(row)])
            print(f"{f'{per_class:3d}, {name}':34}{figures}")


def main() -> None:
    """Read the command line, run everything and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of pre-training ({EPOCHS})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of fine-tuning ({STEPS})")
    options = parser.parse_args()
    data = digits.load()
    outcomes = [of_seed(data, seed, epochs=options.epochs, steps=options.steps) for seed in SEEDS]
    report(outcomes, commonest_colour(data), epochs=options.epochs, steps=options.steps)


if __name__ == "__main__":
    main()
