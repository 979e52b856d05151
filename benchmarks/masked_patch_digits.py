"""Does masked patch prediction help where labels are few? Pre-training then fine-tuning, against training from scratch.

    python benchmarks/masked_patch_digits.py

The 1,437 training digits without their labels are what is pre-trained on; 10 or 50 labelled ones of each class are then
fine-tuned on, by the same recipe, as many steps and from the same seeds, from the pre-trained encoder and from random
weights. The models, these budgets, the recipe and three seeds were fixed before the first run. After its first results
a third contender joined: from random weights as many steps as pre-training and fine-tuning have together, to tell a
better start from mere practice.
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
from keras_vit.train.step.masked_patch import colour_classes

# The size of the model that comes with the package.
CONFIG = ViTConfig(image_size=32, patch_size=4, hidden_size=64, mlp_dim=128, num_heads=4, num_layers=4, num_classes=0)
SEEDS = (0, 1, 2)  # of the weights, the order, the shifts, the corruption and the choice of labelled images
LABELS_PER_CLASS = (10, 50)
EPOCHS = 40  # of pre-training
STEPS = 200  # of fine-tuning, 64 images each
# The digits' own recipe: AdamW, 2e-3 at most, random shifts. So few steps take less time than compiling them.
CHANGES: dict[str, Any] = {"steps_per_call": 20, "log_steps": 100, "xla": False}


SCRATCH, LONGER, PRETRAINED = "from scratch", "from scratch, as long in all", "masked patches first"


class Outcome(NamedTuple):
    """What one seed came to.

    Attributes:
        accuracy: (labels per class, contender) -> share of the held-out images.
        colours: share of the corrupted patches that was right at the end of pre-training.
    """

    accuracy: dict[tuple[int, str], float]
    colours: float


def few(labels: np.ndarray, per_class: int, seed: int) -> np.ndarray:
    """Indices of as many images of every class, drawn from the seed."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.choice(np.flatnonzero(labels == k), per_class, replace=False) for k in range(10)])


def of_seed(data: digits.Digits, seed: int, *, epochs: int, steps: int) -> Outcome:
    """Pre-trains once, then trains every contender with every number of labels."""
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
    """The held-out accuracy after training a model, or a config's random weights, on a few labelled images."""
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
    """The share of the patches that have the commonest colour: what an answer without looking would get."""
    images = VisionTransformer(CONFIG).preprocess(data.train_images)
    return float(np.bincount(np.ravel(colour_classes(images, CONFIG))).max() / (len(images) * 64))


def report(outcomes: list[Outcome], guess: float, *, epochs: int, steps: int) -> None:
    """Prints the accuracies, of each seed and on average, and by how much the two starts differ."""
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
    """Reads the command line, runs everything and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of pre-training ({EPOCHS})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of fine-tuning ({STEPS})")
    options = parser.parse_args()
    data = digits.load()
    outcomes = [of_seed(data, seed, epochs=options.epochs, steps=options.steps) for seed in SEEDS]
    report(outcomes, commonest_colour(data), epochs=options.epochs, steps=options.steps)


if __name__ == "__main__":
    main()
