"""One replica, two replicas and two worker processes train the same weights, and count the same in evaluations."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import parity_runs

pytestmark = pytest.mark.full

TESTS = Path(__file__).parent
# Replicas add in another order, which differs between processors too: SGD adds up float32 noise (measured 1.5e-8),
# AdamW divides small gradients by their own size (1.5e-6). One step of AdamW moves a weight by 1e-3.
TOLERANCES = {"sgd": 2e-7, "adamw": 5e-6}
# It cancels out of the softmax: its gradient is only rounding, which AdamW divides by its own size.
WITHOUT_EFFECT = "attention/key/bias"
LOSSES = ("digits", "prime", "real", "plain")
Runs = dict[str, dict[str, np.ndarray]]


def started(kind: str, out: Path, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return subprocess.Popen(
        [sys.executable, str(TESTS / "parity_runs.py"), kind, str(out)],
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """Return the results of all runs."""
    folder = tmp_path_factory.mktemp("parity")
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    configs = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in (0, 1)]
    processes = [started(kind, folder / f"{kind}.npz") for kind in ("one", "mirrored")]
    processes += [started("workers", folder / "workers.npz", TF_CONFIG=json.dumps(config)) for config in configs]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    return {kind: loaded(folder / f"{kind}.npz") for kind in ("one", "mirrored", "workers", "workers.second")}


def loaded(path: Path) -> Runs:
    arrays: Runs = {}
    with np.load(path) as file:
        for key in file:
            run, variable = json.loads(key)
            arrays.setdefault(run, {})[variable] = file[key]
    return arrays


@pytest.mark.parametrize("name", parity_runs.RUNS)
def test_two_replicas_train_what_one_does(runs: dict[str, Runs], name: str) -> None:
    one, start = runs["one"][name], parity_runs.initial()
    trained = [variable for variable in one if variable.startswith(("weights/", "average/"))]
    noise = {variable for variable in trained if variable.endswith(WITHOUT_EFFECT)}
    # Weights that agree must also have changed, and their gradients were clipped.
    moved = {variable: np.abs(one[variable] - start[variable]).max() for variable in start}
    assert all(distance > 1e-5 for variable, distance in moved.items() if variable not in noise), moved
    assert one["figures"][2] > 2 * parity_runs.RUNS[name]["clip_norm"]
    for kind in ("mirrored", "workers"):
        two = runs[kind][name]
        assert one.keys() == two.keys()
        for variable in trained:
            if variable not in noise or name.startswith("sgd"):
                np.testing.assert_allclose(
                    two[variable], one[variable], rtol=0, atol=TOLERANCES[name.partition(",")[0]], err_msg=variable
                )
        np.testing.assert_allclose(two["figures"], one["figures"], rtol=1e-4)  # loss, accuracy, norm of the batch


def test_two_replicas_count_what_one_does_and_one_counts_every_image(runs: dict[str, Runs]) -> None:
    one, prime = runs["one"][parity_runs.MEASURED], parity_runs.PRIME
    assert one["digits"][:4].tolist() == [360, 0, 357, 360]
    assert one["prime"][0] == prime and 0 < one["prime"][2] < one["prime"][3] < prime
    assert one["real"][:2].sum() == prime and one["real"][1] > 0
    assert one["plain"][0] == prime and (one["few-shot"] > 0.5 * prime).all()
    assert 0 < one["while training"][0] < prime
    for kind in ("mirrored", "workers", "workers.second"):
        two = runs[kind][parity_runs.MEASURED]
        assert one.keys() == two.keys()
        for name, expected in one.items():
            # Counts are equal. The last figure of an evaluation is its loss: the same, added up in another order.
            np.testing.assert_allclose(two[name], expected, rtol=1e-6 if name in LOSSES else 0, err_msg=name)
            np.testing.assert_array_equal(two[name][:4], expected[:4], err_msg=name)
