"""Workers that wait for each other, that are killed or stopped, and that share a bucket."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import train
from keras_vit.errors import WorkerLostError
from keras_vit.train.loop import locks, storage
from keras_vit.train.loop.checkpoints import Checkpoints
from keras_vit.train.loop.locks import exclusive
from keras_vit.train.step import strategies, workers
from keras_vit.train.step.workers import name_lost_worker, wait_for_workers
from killed_runs import logged, weights
from marks import full_except
from test_train_parity import WITHOUT_EFFECT, free_ports
from tiny_models import tiny

ROOT = Path(__file__).parents[1]


def addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


# Waiting


def test_workers_that_start_at_different_times_find_each_other() -> None:
    both, found = addresses(2), []

    def second() -> None:
        wait_for_workers(both, both[1], timeout=60)
        found.append(both[1])
        with socket.create_server(("127.0.0.1", int(both[1].split(":")[1]))):  # as TensorFlow's server does
            done.wait(60)

    done = threading.Event()
    thread = threading.Thread(target=second)
    thread.start()
    wait_for_workers(both, both[0], timeout=60)
    with socket.create_server(("127.0.0.1", int(both[0].split(":")[1]))):
        while not found:
            time.sleep(0.01)
    done.set()
    thread.join()


def test_the_missing_workers_are_named_after_a_while_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "FIRST_REPORT", 0.0)
    own, there, missing = addresses(3)
    said: list[str] = []
    with (
        socket.create_server(("127.0.0.1", int(there.split(":")[1]))),
        pytest.raises(
            WorkerLostError, match=rf"Not all 3 workers .* Missing: {missing} \(Connection refused\)\. .*every machine"
        ),
    ):
        wait_for_workers([own, there, missing], own, timeout=0.3, say=said.append)
    assert re.fullmatch(rf"{own} has waited 0 s for 1 of 3 workers: {missing} \(Connection refused\)", said[0])
    assert workers.TIMEOUT == 1800


def test_a_port_that_is_used_is_named() -> None:
    (own,) = addresses(1)
    with (
        socket.create_server(("127.0.0.1", int(own.split(":")[1]))),
        pytest.raises(OSError, match=rf"{own} in TF_CONFIG, and its port .* in use.*end the program"),
    ):
        wait_for_workers([own, "127.0.0.1:1"], own, timeout=0)


def test_workers_are_connected_before_tensorflow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = addresses(1)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": [own]}, "task": {"type": "worker", "index": 0}}))
    tf.constant(0) + 1
    with pytest.raises(ValueError, match=r"before it runs anything else: call train.strategy\('workers'\) first"):
        train.strategy("workers")
    assert own not in strategies._CONNECTED


class Cluster:
    """Two workers of which this is the first, as far as `name_lost_worker` looks."""

    task_type, task_id = "worker", 0

    def __init__(self) -> None:
        self.cluster_resolver, self.addresses = self, addresses(2)

    def cluster_spec(self) -> tf.train.ClusterSpec:
        return tf.train.ClusterSpec({"worker": self.addresses})


@pytest.mark.parametrize(
    ("error", "is_worker"),
    [
        (tf.errors.UnavailableError(None, None, "Collective ops is aborted by: Socket closed"), True),
        (tf.errors.DeadlineExceededError(None, None, "RPC: /tensorflow.CoordinationService/Heartbeat"), True),
        (tf.errors.UnavailableError(None, None, "gs://bucket/run: could not resolve host"), False),
        (tf.errors.InvalidArgumentError(None, None, "Unknown image file format"), False),
    ],
)
def test_only_an_error_of_another_worker_is_one(error: tf.errors.OpError, is_worker: bool) -> None:
    cluster = Cluster()
    expected = WorkerLostError if is_worker else type(error)
    with pytest.raises(expected) as caught, name_lost_worker(cluster, lambda: "Step 7 is kept."):
        raise error
    if is_worker:
        assert f"Lost a worker: {cluster.addresses[1]} was killed" in str(caught.value)
        assert "Step 7 is kept. To go on, start the same command" in str(caught.value)
    with pytest.raises(type(error)), name_lost_worker(tf.distribute.get_strategy(), str):
        raise error


# Leases in a bucket


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return a folder of TensorFlow's in-memory file system; leases are renewed at once."""
    for name, value in {"RENEWAL": 0.001, "POLL": 0.001, "SETTLING": 0.0}.items():
        monkeypatch.setattr(locks, name, value)
    folder = f"ram://leases/{re.sub(r'[^a-z]', '-', request.node.name)}"
    yield folder
    storage.remove(folder)


def leave(folder: str, owner: str = "host7, process 12") -> None:
    """Write the lease of a process that renews it no more."""
    storage.make_folder(folder)
    storage.replace(f"{folder}/.lease", json.dumps([owner, "its-id", 3]).encode() + b"\n")


def test_two_runs_do_not_share_a_bucket(bucket: str) -> None:
    refused = pytest.raises(
        BlockingIOError, match=rf"Another process trains in this folder: {bucket} \(.*process \d+\)"
    )
    with exclusive(bucket) as check, refused, exclusive(bucket):
        pass
    check_fails = pytest.raises(BlockingIOError, match="has taken this folder")
    with check_fails:
        check()  # it is released
    with exclusive(bucket) as check:
        check()
    assert not tf.io.gfile.exists(f"{bucket}/.lease")


def test_the_lease_of_a_killed_run_expires(
    bucket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "EXPIRY", 0.01)
    leave(bucket)
    with exclusive(bucket) as check:
        check()
    assert f"{bucket} was used by host7, process 12: waiting up to" in capsys.readouterr().err


def test_without_its_lease_nothing_is_saved(bucket: str) -> None:
    with exclusive(bucket) as check:
        saves = Checkpoints(f"{bucket}/checkpoints", {"v": tf.Variable(1.0)}, facts={}, check=check)
        saves.save(1)
        leave(bucket)
        with pytest.raises(BlockingIOError, match=r"has taken this folder"):
            saves.save(2)
    assert saves.steps() == [1]


@pytest.mark.full
def test_a_run_that_lost_its_lease_saves_nothing_more(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = train.recipe("digits", steps=2, batch_size=4, image_size=16, checkpoint_steps=1, xla=False)
    images = {"train": (np.zeros((8, 8, 8, 3), np.uint8), np.arange(8) % 2)}
    save = Checkpoints.save

    def save_late(self: Checkpoints, step: int) -> str:
        leave(bucket, "host8, process 1")  # it took the folder meanwhile
        return save(self, step)

    monkeypatch.setattr(Checkpoints, "save", save_late)
    with pytest.raises(BlockingIOError, match=r"Another process has taken this folder: .*\(host8, process 1\)"):
        train.run(recipe, model=tiny(image_size=16, num_layers=1), data=images, out=bucket, progress=False)
    assert not [name for name in tf.io.gfile.listdir(f"{bucket}/checkpoints") if name.startswith("step")]
    assert "host8" in storage.read(f"{bucket}/.lease").decode()  # the lease of the other process stays


def test_of_two_that_start_together_one_gets_the_bucket(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # While the first waits for its lease to count, the second writes its own, having seen none before.
    monkeypatch.setattr(time, "sleep", lambda _: leave(bucket))
    with pytest.raises(BlockingIOError, match=r"has taken this folder: .* \(host7, process 12\)"), exclusive(bucket):
        pass


# Workers that are killed or stopped. Everything that depends on the number of replicas is off: mixup and dropout.

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


def interrupted(folder: Path, line: int, sent: signal.Signals, victim: int, count: int = 2) -> str:
    """Start the run, send a signal to a worker after lines of the log; return what the last worker wrote to stderr."""
    at = addresses(count)
    processes = [started(folder, at, index) for index in range(max(count, 1))]
    try:
        while len(logged(folder)) < line:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.01)
        processes[victim].send_signal(sent)
        other = processes[victim - 1]
        _, errors = other.communicate(timeout=120)
        assert other.returncode == (1 if len(processes) == 2 else -sent)
        return errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.full
@pytest.mark.parametrize(
    ("sent", "victim"),
    full_except(
        [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)],
        itertools.product([signal.SIGKILL, signal.SIGSTOP], [0, 1]),
        marks=pytest.mark.slow,
    ),
)
def test_a_lost_worker_ends_the_other_with_one_message(tmp_path: Path, sent: signal.Signals, victim: int) -> None:
    message = interrupted(tmp_path / "run", 12, sent, victim)
    lines = [line for line in message.splitlines() if line and not line.startswith("step ")]
    assert len(lines) == 2, message
    assert re.match(r"keras-vit: Lost a worker: 127\.0\.0\.1:\d+ was killed or stopped", lines[0])
    assert re.search(r"The checkpoint of step \d+ in .* is kept\. To go on, start the same command", lines[0])
    command = f"__main__.py train digits --model ViT-digits --data digits --out {tmp_path}/run --steps {STEPS}"
    assert lines[1].startswith("TF_CONFIG='{") and command in lines[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers") / "alone"
    finished(folder, 2)
    return folder


@pytest.mark.full
def test_workers_that_were_killed_and_stopped_end_the_same_bit_for_bit(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, 12, signal.SIGKILL, 1)
    interrupted(folder, 30, signal.SIGSTOP, 0)
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
    interrupted(folder, 12, signal.SIGKILL, 1)
    interrupted(folder, 32, signal.SIGKILL, 0, count=0)
    finished(folder, 2)
    expected, found = weights(undisturbed), weights(folder)
    # A key's bias has no effect: its gradient is rounding, which AdamW divides by its own size.
    differences = {path: float(np.abs(found[path] - expected[path]).max()) for path in expected}
    largest = max(value for path, value in differences.items() if not path.endswith(WITHOUT_EFFECT))
    assert largest < ELASTIC, differences
