"""A small training run that a test starts in a new process and kills: python tests/killed_runs.py FOLDER."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parent
# Everything that uses random numbers or state is on. XLA is off because it only makes the start slower.
FIELDS = {
    "steps": 36,
    "batch_size": 16,
    "accumulation": 2,
    "image_size": 16,
    "config": {"dropout_rate": 0.1, "stochastic_depth": 0.1},
    "ema_decay": 0.9,
    "randaugment_layers": 2,
    "randaugment_magnitude": 10,
    "mixup": 0.2,
    "xla": False,
    "checkpoint_steps": 5,
    "checkpoint_minutes": None,
    "log_steps": 1,
    "eval_steps": 20,
}


def train(folder: str | Path) -> None:
    """Run or continue the run to its end, in this process."""
    from keras_vit import train
    from tiny_models import tiny

    train.run(train.recipe("digits", **FIELDS), model=tiny(), data="digits", out=folder, progress=False)


def started(folder: Path) -> subprocess.Popen[bytes]:
    """Start the run in a new process."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen([sys.executable, __file__, str(folder)], env=environment)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights of the finished model, by path."""
    from keras_vit import converters

    model = converters.load(folder / "model.keras")
    return {v.path: v.numpy() for v in model.weights}


def logged(folder: Path) -> list[str]:
    """Return the lines of the log so far."""
    log = folder / "log.jsonl"
    return log.read_text().splitlines() if log.exists() else []


def killed(folder: Path, line: int) -> None:
    """Start the run, and kill it once its log has this number of lines."""
    process = started(folder)
    while len(logged(folder)) < line and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()


if __name__ == "__main__":
    train(sys.argv[1])
