"""Measure the accuracy on digits: from scratch, at another resolution, and after the official fine-tuning.

    python benchmarks/digits.py [--seeds 3] [--output benchmarks/results/digits.txt]

Each figure is the accuracy on the 360 held-out images after the last step; one image is .0028. No setting was chosen by
it. The seeds are 0, 1, 2 ..., fixed in advance. A seed determines the weights, the order and the shifts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from keras_vit import VisionTransformer, ViTConfig, train

PATCH = 4
FINE_TUNED = 200  # steps


def config(image_size: int) -> ViTConfig:
    """Return the embedded model's architecture."""
    return ViTConfig(
        image_size=image_size, patch_size=PATCH, hidden_size=64, mlp_dim=128, num_heads=4, num_layers=4, num_classes=10
    )


def from_scratch(image_size: int, seed: int) -> train.Result:
    """Train by the recipe `digits`: AdamW."""
    return train.run(train.recipe("digits", seed=seed), model=config(image_size), data="digits", progress=False)


def fresh_positions(model: VisionTransformer) -> VisionTransformer:
    """Return a model with the same weights but new random position embeddings."""
    return model.with_config(model.config, fresh=["position"])


def fine_tuned(model: VisionTransformer | ViTConfig, image_size: int, seed: int) -> train.Result:
    """Fine-tune by the official rule: a new head of zeros, SGD, 200 steps."""
    recipe = train.recipe("finetune-digits", image_size=image_size, steps=FINE_TUNED, seed=seed)
    return train.run(recipe, model=model, data="digits", progress=False)


def measured(seed: int) -> dict[str, float]:
    """Return the accuracies of one seed, by name."""
    found: dict[str, float] = {}
    for side in (24, 32):
        trained = from_scratch(side, seed)
        larger = trained.model.resized(side * 3 // 2)
        found[f"from scratch, {side} px"] = trained.metrics["accuracy"]
        found[f"  then at {side * 3 // 2} px, positions interpolated"] = train.evaluate(larger, "digits").top1
        found[f"  then at {side * 3 // 2} px, positions drawn afresh"] = train.evaluate(
            fresh_positions(larger), "digits"
        ).top1
        tuned = fine_tuned(trained.model, side * 3 // 2, seed)
        found[f"  then fine-tuned at {side * 3 // 2} px, 200 steps"] = tuned.metrics["accuracy"]
        scratch = fine_tuned(config(side), side * 3 // 2, seed)
        found[f"the same 200 steps at {side * 3 // 2} px from scratch"] = scratch.metrics["accuracy"]
    return found


def main() -> None:
    """Train, and print one row for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    start = time.perf_counter()
    runs = [measured(seed) for seed in range(arguments.seeds)]
    minutes = (time.perf_counter() - start) / 60
    head = f"accuracy on 360 held-out digits, seeds 0 to {arguments.seeds - 1}, {time.strftime('%Y-%m-%d')}, "
    lines = [head + f"TensorFlow {tf.__version__}, {os.cpu_count()} cores, {minutes:.0f} minutes in all", ""]
    for name in runs[0]:
        values = [run[name] for run in runs]
        lines.append(f"{name:52}{np.mean(values):7.4f}   {'  '.join(f'{value:.4f}' for value in values)}")
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
