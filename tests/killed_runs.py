"""A small training run, and a script that kills it at random moments and compares the weights.

python tests/killed_runs.py [TIMES] [SEED] [RECIPE]     kill runs with kill -9 at random moments
python tests/killed_runs.py train FOLDER [RECIPE]       the run itself

RECIPE is "digits", or "distill" or "distill-features": the model of the digits is then the teacher.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parent
STEPS = 48
# Everything that uses random numbers or state is on. XLA is off because it only makes the start slower.
FIELDS = {
    "steps": STEPS,
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


def train(folder: str | Path, recipe: str = "digits") -> None:
    """Run or continue the run to its end, in this process."""
    from keras_vit import train
    from tiny_models import tiny

    teacher = "digits" if recipe != "digits" else None
    chosen = train.recipe(recipe, **FIELDS)
    train.run(chosen, model=tiny(), teacher=teacher, data="digits", out=folder, progress=False)


def started(folder: Path, recipe: str = "digits") -> subprocess.Popen[bytes]:
    """Start the run in a new process."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with (folder.parent / f"{folder.name}.stderr").open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, __file__, "train", str(folder), recipe], env=environment, stderr=errors
        )


def finished(folder: Path, recipe: str = "digits") -> dict[str, np.ndarray]:
    """Run or continue the run to its end in a new process; return the weights of its model."""
    process = started(folder, recipe)
    if process.wait(timeout=600):
        raise RuntimeError((folder.parent / f"{folder.name}.stderr").read_text(errors="replace")[-3000:])
    return weights(folder)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights of the finished model, by path."""
    from keras_vit import converters

    model = converters.load(folder / "model.keras")
    return {v.path: v.numpy() for v in model.weights}


def logged(folder: Path) -> list[str]:
    """Return the lines of the log so far."""
    log = folder / "log.jsonl"
    return log.read_text().splitlines() if log.exists() else []


def killed(folder: Path, line: int, delay: float, recipe: str = "digits") -> None:
    """Start the run, and kill it `delay` seconds after its log has this number of lines."""
    process = started(folder, recipe)
    while len(logged(folder)) < line and process.poll() is None:
        time.sleep(0.01)
    time.sleep(delay)
    process.kill()
    process.wait()


def main(times: int, seed: int, recipe: str) -> None:
    """Kill `times` runs, each at least once, and compare their final weights with those of an undisturbed run."""
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        expected = finished(Path(temporary) / "alone", recipe)
        for number in range(times):
            folder = Path(temporary) / str(number)
            line, delay = moments.randrange(STEPS), moments.uniform(0, 0.5)
            killed(folder, line, delay, recipe)
            reached = len(logged(folder))
            ended = finished(folder, recipe)
            equal = all(np.array_equal(ended[path], expected[path]) for path in expected)
            print(
                f"{number}: killed {delay:.2f} s after line {line}, at {reached}: {'equal' if equal else 'DIFFERENT'}"
            )
            if not equal:
                sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        times, seed, recipe = [*sys.argv[1:], *["20", "0", "digits"][len(sys.argv) - 1 :]]
        main(int(times), int(seed), recipe)
