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
@pytest.mark.parametrize("kind", ["mirrored", "workers"])
def test_two_replicas_train_what_one_does(runs: dict[str, Runs], kind: str, name: str) -> None:
    one, two = runs["one"][name], runs[kind][name]
    assert one.keys() == two.keys()
    for variable in one:
        noise = variable.endswith(WITHOUT_EFFECT) and name.startswith("adamw")
        if variable.startswith(("weights/", "average/")) and not noise:
            np.testing.assert_allclose(
                two[variable], one[variable], rtol=0, atol=TOLERANCES[name.partition(",")[0]], err_msg=variable
            )
    np.testing.assert_allclose(two["figures"], one["figures"], rtol=1e-4)  # loss, accuracy and norm of the whole batch


@pytest.mark.parametrize("name", parity_runs.RUNS)
def test_every_weight_but_the_keys_biases_was_trained(runs: dict[str, Runs], name: str) -> None:
    # Weights that agree must also have changed.
    start = parity_runs.initial()
    moved = {v: np.abs(array - start[v]).max() for v, array in runs["one"][name].items() if v in start}
    assert len(moved) == len(start)
    assert all(distance > 1e-5 for v, distance in moved.items() if not v.endswith(WITHOUT_EFFECT)), moved


def test_the_gradients_were_clipped(runs: dict[str, Runs]) -> None:
    norm = runs["one"]["adamw, clip"]["figures"][2]
    assert norm > 2 * parity_runs.RUNS["adamw, clip"]["clip_norm"]


@pytest.mark.parametrize("kind", ["mirrored", "workers", "workers.second"])
def test_two_replicas_count_what_one_does(runs: dict[str, Runs], kind: str) -> None:
    one, two = runs["one"][parity_runs.MEASURED], runs[kind][parity_runs.MEASURED]
    assert one.keys() == two.keys()
    for name, expected in one.items():
        # Counts are equal. The last figure of an evaluation is its loss: the same losses, added up in another order.
        np.testing.assert_allclose(two[name], expected, rtol=1e-6 if name in LOSSES else 0, err_msg=name)
        np.testing.assert_array_equal(two[name][:4], expected[:4], err_msg=name)


def test_one_replica_counts_every_image(runs: dict[str, Runs]) -> None:
    found, prime = runs["one"][parity_runs.MEASURED], parity_runs.PRIME
    assert found["digits"][:4].tolist() == [360, 0, 357, 360]
    assert found["prime"][0] == prime and 0 < found["prime"][2] < found["prime"][3] < prime
    assert found["real"][:2].sum() == prime and found["real"][1] > 0
    assert found["plain"][0] == prime and (found["few-shot"] > 0.5 * prime).all()
    assert 0 < found["while training"][0] < prime
