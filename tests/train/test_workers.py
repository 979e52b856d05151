"""Two workers of which one is killed: the other ends with one line, and the run continues on two or on one machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_resume import steps_of, weights
from test_train_parity import WITHOUT_EFFECT, free_ports

from places import ROOT
from tiny_models import built

# Everything that depends on the number of replicas is off: mixup and dropout.
OPTIONS = "image_size=16 batch_size=16 ema_decay=0.9 xla=false checkpoint_steps=5 log_steps=1 eval_steps=20 mixup=0"
ELASTIC = 2e-6  # replicas add in another order; 3.6e-7 was measured after 60 steps of AdamW, of which each moves 1e-3


def started(folder: Path, count: int) -> list[subprocess.Popen[str]]:
    """Start or continue the run on this number of workers; 1 is a process that knows of no others."""
    settings = [word for option in OPTIONS.split() for word in ("--set", option)]
    model = str(folder.parent / "model.keras")
    run = ["train", "digits", "--model", model, "--data", "digits", "--out", str(folder), "--steps", "24", *settings]
    workers = [f"127.0.0.1:{port}" for port in free_ports(count)]
    processes = []
    for index in range(count):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} if count > 1 else {}
        given = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CONFIG": json.dumps(config)}
        command = [sys.executable, "-m", "keras_vit", *run]
        errors = subprocess.PIPE if index == 0 else subprocess.DEVNULL
        null = subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=os.environ | given, stdout=null, stderr=errors, text=True))
    return processes


def finished(folder: Path, count: int) -> dict[str, np.ndarray]:
    processes = started(folder, count)
    try:
        _, errors = processes[0].communicate(timeout=600)
        assert [process.wait(timeout=120) for process in processes] == [0] * count, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    return weights(folder)


@pytest.mark.full
def test_a_killed_worker_ends_the_other_and_the_run_continues_on_two_machines_or_one(tmp_path: Path) -> None:
    built(image_size=16, num_classes=10).save(tmp_path / "model.keras")
    first, second = started(tmp_path / "run", 2)
    try:
        while len(steps_of(tmp_path / "run")) < 12:
            assert first.poll() is None and second.poll() is None
            time.sleep(0.01)
        second.kill()
        _, errors = first.communicate(timeout=300)
    finally:
        first.kill()
        second.kill()
    assert first.returncode != 0 and "TensorFlow failed (" in errors
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    expected = finished(tmp_path / "undisturbed", 2)
    found = finished(tmp_path / "run", 2)
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "undisturbed")
    alone = finished(tmp_path / "elsewhere", 1)
    # A key's bias has no effect: its gradient is rounding, which AdamW divides by its own size.
    differences = {path: float(np.abs(alone[path] - expected[path]).max()) for path in expected}
    assert max(value for path, value in differences.items() if not path.endswith(WITHOUT_EFFECT)) < ELASTIC, differences
