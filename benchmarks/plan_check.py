"""Compare the memory that `keras_vit.train.plan` predicts for a training step with the memory that CPU steps used.

    python benchmarks/plan_check.py

Each measurement is the peak of a new process with one whole training step. Linux only (it reads /proc).
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
sys.path.insert(0, str(SCRIPT.parents[1]))  # this checkout
# model, fields of the recipe, batch sizes
SETTINGS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    *((name, {"remat": remat}, (8, 16, 32)) for name in ("Ti/16", "S/16") for remat in (False, True)),
    *(("Ti/16", {"remat": remat, "precision": "mixed_bfloat16"}, (8, 32)) for remat in (False, True)),
    *(("Ti/16", {"remat": remat, "xla": True}, (8, 32)) for remat in (False, True)),
]
TARGET = 0.4


def measure(name: str, batch_size: int, changes: dict[str, Any]) -> None:
    """Run a step of AdamW in this process alone, and print the peak of its memory."""
    import tensorflow as tf

    from keras_vit.model.config import ViTConfig
    from keras_vit.model.vision_transformer import VisionTransformer
    from keras_vit.train._recipe import Recipe
    from keras_vit.train.objective import supervised
    from keras_vit.train.prepare import adapt_model
    from keras_vit.train.step import TrainState, make_train_step

    changes = {"xla": False} | changes
    recipe = Recipe(
        name="check", steps=1, batch_size=batch_size, optimizer="adamw", learning_rate=1e-3, clip_norm=1.0, **changes
    )
    config = ViTConfig.from_name(name)
    source = VisionTransformer(config)
    model = adapt_model(recipe, source, num_classes=1000)
    state = TrainState(recipe, model, supervised(recipe, model), total_steps=1)
    batch = {"image": tf.random.uniform((batch_size, 224, 224, 3)), "label": tf.eye(batch_size, 1000)}
    train_step = make_train_step(state, tf.distribute.get_strategy())
    train_step(iter(tf.data.Dataset.from_tensors(batch).repeat()), tf.constant(1), tf.constant(0.0)).numpy()
    status = Path("/proc/self/status").read_text()
    print(json.dumps(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024))


def measured(name: str, batch_size: int, changes: dict[str, Any]) -> int:
    """Return the peak bytes of a new process."""
    given = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    command = [sys.executable, SCRIPT, "--child", json.dumps([name, batch_size, changes])]
    ended = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{name} at batch {batch_size} failed:\n{ended.stderr}")
    return int(ended.stdout.splitlines()[-1])


def planned(name: str, batch_size: int, changes: dict[str, Any]) -> int:
    """Return the bytes of the plan of the same step."""
    from keras_vit.train.planner import plan

    return plan(name, batch_size=batch_size, **{"xla": False} | changes).total


def report(rows: list[tuple[str, dict[str, Any], dict[int, int]]]) -> None:
    """Print the machine, and for each setting the memory of more images, measured and planned."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("tensorflow", "keras"))
    print("A training step (AdamW, clipped) at 224 pixels, 1000 classes: peak resident memory against the plan, MB")
    print(f"{datetime.date.today()}, {cpu[1] if cpu else 'CPU unknown'}, {os.cpu_count()} CPUs, ", end="")
    print(f"Python {platform.python_version()}, {versions}\n")
    print(f"{'':30}{'batches':>10}{'first peak':>12}{'last peak':>11}{'more':>7}{'planned':>9}{'off':>7}{'rest':>7}")
    errors = []
    for name, changes, peaks in rows:
        words = (name, "remat" * changes["remat"], "XLA" * changes.get("xla", False), changes.get("precision", ""))
        for batch in list(peaks)[1:]:
            first = min(peaks)
            more = peaks[batch] - peaks[first]
            said = planned(name, batch, changes) - planned(name, first, changes)
            errors.append(abs(said / more - 1))
            rest = peaks[batch] - planned(name, batch, changes)
            print(
                f"{', '.join(filter(None, words)):30}{f'{first}, {batch}':>10}{peaks[first] / 1e6:12.0f}"
                f"{peaks[batch] / 1e6:11.0f}{more / 1e6:7.0f}{said / 1e6:9.0f}{said / more - 1:+7.0%}{rest / 1e6:7.0f}"
            )
    print("\nmore: what the additional images took; planned: what the plan says they take; off: the plan's error")
    print("rest: the last peak less its whole plan: Python, TensorFlow and its compiler, a second copy of the weights")
    print(f"largest error: {max(errors):.0%} (target: at most {TARGET:.0%})")


def main() -> None:
    """Measure all settings, or one of them as a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(*json.loads(options.child))
        return
    rows = []
    for name, changes, batches in SETTINGS:
        peaks = {batch: measured(name, batch, changes) for batch in batches}
        print(f"{name} {changes}: {peaks}", file=sys.stderr)
        rows.append((name, changes, peaks))
    report(rows)


if __name__ == "__main__":
    main()
