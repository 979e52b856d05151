"""Several workers: one that is killed ends the others with TensorFlow's error, and the run continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import train
from keras_vit.train.step import strategies
from killed_runs import logged, weights
from test_train_parity import free_ports

ROOT = Path(__file__).parents[1]
OPTIONS = {"steps": 30, "batch_size": 16, "ema_decay": 0.9, "xla": "false"} | {
    "checkpoint_steps": 5,
    "log_steps": 1,
    "eval_steps": 20,
    "momentum_dtype": "float32",
    "mixup": 0,
}


def addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def test_workers_are_connected_before_tensorflow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = addresses(1)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": [own]}, "task": {"type": "worker", "index": 0}}))
    tf.constant(0) + 1
    with pytest.raises(ValueError, match=r"before it runs anything else: call train.strategy\('workers'\) first"):
        train.strategy("workers")
    assert own not in strategies._CONNECTED


def started(folder: Path, workers: list[str], index: int) -> subprocess.Popen[str]:
    """Start or continue the run on one of the workers."""
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CONFIG": json.dumps(config)}
    arguments = ["train", "digits", "--model", "ViT-digits", "--data", "digits", "--out", str(folder)]
    arguments += [each for name, value in OPTIONS.items() for each in ("--set", f"{name}={value}")]
    return subprocess.Popen(
        [sys.executable, "-m", "keras_vit", *arguments],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(folder: Path) -> dict[str, np.ndarray]:
    """Run or continue the run to its end on two workers; return the weights of its model."""
    at = addresses(2)
    for process in [started(folder, at, index) for index in range(2)]:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]
    return weights(folder)


def killed(folder: Path, line: int) -> str:
    """Start the run, kill its second worker after lines of the log; return what the first wrote to standard error."""
    at = addresses(2)
    processes = [started(folder, at, index) for index in range(2)]
    try:
        while len(logged(folder)) < line:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.01)
        processes[-1].kill()
        _, errors = processes[0].communicate(timeout=120)
        assert processes[0].returncode != 0
        return errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.full
def test_workers_of_which_one_was_killed_end_the_same_bit_for_bit(tmp_path: Path) -> None:
    expected = finished(tmp_path / "alone")
    assert "TensorFlow failed (" in killed(tmp_path / "killed", 12)
    found = finished(tmp_path / "killed")
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    alone, again = ([json.loads(line)["step"] for line in logged(tmp_path / name)] for name in ("alone", "killed"))
    assert alone == again
