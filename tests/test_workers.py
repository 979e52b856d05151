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
from keras_vit.train import strategies
from killed_runs import logged, weights
from test_train_parity import WITHOUT_EFFECT, free_ports

ROOT = Path(__file__).parents[1]
# Everything that depends on the number of replicas is off: mixup and dropout.
STEPS = 60
ELASTIC = 2e-6  # replicas add in another order; measured 3.6e-7 after 60 steps of AdamW, of which each moves up to 1e-3
OPTIONS = {
    "batch_size": 16,
    "ema_decay": 0.9,
    "xla": "false",
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
    """Start or continue the run on one of the workers, or without any if the list is empty."""
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CONFIG": json.dumps(config)}
    arguments = [
        "train",
        "digits",
        "--model",
        "ViT-digits",
        "--data",
        "digits",
        "--out",
        str(folder),
        "--steps",
        str(STEPS),
    ]
    arguments += [each for name, value in OPTIONS.items() for each in ("--set", f"{name}={value}")]
    return subprocess.Popen(
        [sys.executable, "-m", "keras_vit", *arguments],
        env=os.environ | (environment if workers else environment | {"TF_CONFIG": "{}"}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(folder: Path, count: int) -> None:
    """Run or continue the run to its end on this number of workers (0: without TF_CONFIG)."""
    at = addresses(count)
    for process in [started(folder, at, index) for index in range(max(count, 1))]:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]


def killed(folder: Path, line: int, count: int) -> str:
    """Start the run, kill its last process after lines of the log; return what the first wrote to standard error."""
    at = addresses(count)
    processes = [started(folder, at, index) for index in range(max(count, 1))]
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers") / "alone"
    finished(folder, 2)
    return folder


@pytest.mark.full
def test_workers_of_which_one_was_killed_end_the_same_bit_for_bit(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    assert "TensorFlow failed (" in killed(folder, 12, 2)
    finished(folder, 2)
    expected, found = weights(undisturbed), weights(folder)
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    assert [json.loads(line)["step"] for line in logged(folder)] == [
        json.loads(line)["step"] for line in logged(undisturbed)
    ]


@pytest.mark.full
def test_a_run_of_two_workers_goes_on_with_one_and_again_with_two(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    killed(folder, 12, 2)
    killed(folder, 32, 0)
    finished(folder, 2)
    expected, found = weights(undisturbed), weights(folder)
    # A key's bias has no effect: its gradient is rounding, which AdamW divides by its own size.
    differences = {path: float(np.abs(found[path] - expected[path]).max()) for path in expected}
    largest = max(value for path, value in differences.items() if not path.endswith(WITHOUT_EFFECT))
    assert largest < ELASTIC, differences
