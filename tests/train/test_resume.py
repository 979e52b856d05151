"""A run that is stopped, killed and damaged continues and ends with the weights of an undisturbed run.

The test starts this file in new processes: python tests/train/test_resume.py FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from places import ROOT, SUPPORT

# Everything that uses random numbers or state is on. XLA is off because it only makes the start slower.
FIELDS = {
    "steps": 36,
    "batch_size": 16,
    "accumulation": 2,
    "image_size": 16,
    "config": {"dropout_rate": 0.1, "stochastic_depth": 0.1},
    "ema_decay": 0.9,
    "lora_rank": 2,
    "train_only": ["lora", "*"],
    "randaugment_layers": 2,
    "randaugment_magnitude": 10,
    "mixup": 0.2,
    "xla": False,
    "checkpoint_steps": 5,
    "checkpoint_minutes": None,
    "log_steps": 1,
    "eval_steps": 20,
}


def train_in(folder: str | Path) -> None:
    """Run or continue the run to its end, in this process."""
    from keras_vit import train
    from tiny_models import tiny

    train.run(train.recipe("digits", **FIELDS), model=tiny(), data="digits", out=folder, progress=False)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights of the finished model, by path."""
    from keras_vit import converters

    return {v.path: v.numpy() for v in converters.load(folder / "model.keras").weights}


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the lines of the log so far."""
    log = folder / "log.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def interrupted(folder: Path, line: int, number: signal.Signals) -> int:
    """Start the run in a new process, send a signal once its log has this many lines; return the exit status."""
    path = os.pathsep.join([str(SUPPORT), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen([sys.executable, __file__, str(folder)], env=environment)
    while len(steps_of(folder)) < line:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    status = process.wait(timeout=120)
    assert not (folder / "model.keras").exists()
    return status


@pytest.mark.full
def test_stopped_killed_and_damaged_it_ends_the_same_bit_for_bit(tmp_path: Path) -> None:
    # One folder: each start continues from the previous one's checkpoint.
    folder, alone = tmp_path / "run", tmp_path / "alone"
    train_in(alone)
    assert interrupted(folder, 7, signal.SIGTERM) == 0
    assert (folder / "checkpoints" / f"step-{steps_of(folder)[-1]:08d}").is_dir()  # saved before it ended
    assert interrupted(folder, 22, signal.SIGKILL) != 0
    newest = max((folder / "checkpoints").glob("step-????????"))
    data = newest / "variables.data-00000-of-00001"
    broken = bytearray(data.read_bytes())
    broken[len(broken) // 2] ^= 1
    data.write_bytes(broken)
    with pytest.warns(UserWarning, match=f"{newest} is damaged"):
        train_in(folder)
    expected, found = weights(alone), weights(folder)
    assert expected.keys() == found.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    assert steps_of(folder) == steps_of(alone)


if __name__ == "__main__":
    train_in(sys.argv[1])


@pytest.mark.full
def test_gradients_have_the_same_bits_each_time() -> None:
    # Without XLA most gradients differ in some of so many calls, on two processors.
    import tensorflow as tf

    from keras_vit import digits, zoo
    from keras_vit.model.layers.runtime import fuse_with, random_scope
    from keras_vit.train.step import piece_compiler

    model, images = zoo.load("digits", image_size=48), digits.load().train_images[:64]
    compiler, pixels = piece_compiler(), tf.constant(model.preprocess(images))

    @tf.function(autograph=False)
    def gradients(pixels: tf.Tensor) -> list[tf.Tensor]:
        with fuse_with(compiler), random_scope(tf.constant([1, 2])), tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(pixels, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    calls = [[gradient.numpy().tobytes() for gradient in gradients(pixels)] for _ in range(60)]
    assert [len(set(values)) for values in zip(*calls, strict=True)] == [1] * len(calls[0])
