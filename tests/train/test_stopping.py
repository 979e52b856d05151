"""Stopping a run: the first Ctrl-C says what happens and ends between micro-batches, the second ends at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import digits, train
from keras_vit.train import loop, step
from keras_vit.train.stop import Stop
from model_weights import assert_same_bits, values
from places import SUPPORT
from tiny_models import tiny

FIELDS: dict[str, Any] = {
    **{"steps": 3, "batch_size": 8, "accumulation": 4, "image_size": 16, "xla": False},
    **{"checkpoint_minutes": None, "eval_steps": None},
}


def run(out: Path | None = None, **changes: Any) -> train.Result:
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (24, 16, 16, 3), dtype=np.uint8), np.arange(24) % 5
    recipe = train.recipe("digits", **FIELDS | changes)
    return train.run(recipe, model=tiny(image_size=16, num_layers=1), data={"train": (images, labels)}, out=out)


def signal_in_micro_batch(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Send this process Ctrl-C while it computes a micro-batch; return the list of those that it computes."""
    computed: list[int] = []
    gradients = step._gradients

    def send(state: Any) -> None:
        computed.append(len(computed))
        if len(computed) == number:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # to this thread: nothing wakes the main thread
            for _ in range(1000):  # the main thread handles the signal, although TensorFlow computes
                if state.interrupt.numpy():
                    break
                time.sleep(0.01)

    def gradients_and_signal(state: Any, *arguments: Any) -> Any:
        with tf.control_dependencies([tf.py_function(lambda: send(state), [], [])]):
            return tf.nest.map_structure(tf.identity, gradients(state, *arguments))

    monkeypatch.setattr(step, "_gradients", gradients_and_signal)
    return computed


@pytest.mark.full
def test_a_run_stops_between_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    computed = signal_in_micro_batch(7, monkeypatch)
    stopped = run(tmp_path)
    assert len(computed) == 7  # not the other micro-batches of the step
    assert (stopped.stopped, stopped.steps) == (True, 1)
    assert (tmp_path / "checkpoints" / "step-00000001").is_dir()
    said = capsys.readouterr().err
    assert "Stopping after this micro-batch, one of 4" in said
    assert "then saving a checkpoint. Ctrl-C again ends at once, with the last whole step saved." in said


@pytest.mark.full
def test_a_run_that_stopped_between_micro_batches_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_in_micro_batch(7, patch)
        assert run(tmp_path).stopped
    continued = run(tmp_path)
    assert (continued.stopped, continued.steps) == (False, 3)
    assert_same_bits(values(continued.model), values(run().model))


@pytest.mark.full
def test_a_run_that_cannot_evaluate_says_so_before_its_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    run(accumulation=1)
    before, _, _ = capsys.readouterr().err.partition("a step takes")
    assert "Nothing to evaluate on: no images are held out. Add a folder val/ beside train/" in before


# ---- the handlers of signals


@contextlib.contextmanager
def handlers_unchanged() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_the_first_signal_only_asks_and_the_second_ctrl_c_is_as_usual() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with handlers_unchanged(), Stop() as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert stop.requested
    with handlers_unchanged(), Stop() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with handlers_unchanged(), pytest.raises(ZeroDivisionError), Stop():
        raise ZeroDivisionError
    with Stop(), ThreadPoolExecutor() as pool:  # in another thread it does nothing
        assert pool.submit(lambda: Stop().__enter__().requested).result() is False


ENDLESS = """
import pathlib, sys, test_stopping, time, tensorflow as tf
from keras_vit.train import step
gradients, FAST = step._gradients, int(sys.argv[2])
computed = []
def wait():
    computed.append(None)
    if len(computed) > FAST:
        print("computing", flush=True)
        time.sleep(600)
def slow(state, *arguments):
    with tf.control_dependencies([tf.py_function(wait, [], [])]):
        return tf.nest.map_structure(tf.identity, gradients(state, *arguments))
step._gradients = slow
test_stopping.run(pathlib.Path(sys.argv[1]), accumulation=int(sys.argv[3]))
"""


@pytest.mark.full
def test_the_second_ctrl_c_ends_the_process_at_once_and_keeps_the_last_whole_step(
    tmp_path: Path,
) -> None:
    micro_batches, fast = 4, 9  # the third step's second micro-batch does not end
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", ENDLESS, str(tmp_path), str(fast), str(micro_batches)]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout and process.stderr
            while "computing" not in (line := process.stdout.readline()):
                assert line, process.stderr.read()
            process.send_signal(signal.SIGINT)
            while "Stopping after" not in (line := process.stderr.readline()):
                assert line
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=120) != 0  # a micro-batch takes 600 seconds
            said = process.stderr.read()
            assert "Step 2 is saved: the same command resumes the run." in said and "KeyboardInterrupt" in said
        finally:
            process.kill()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    continued = run(tmp_path, accumulation=micro_batches)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert_same_bits(values(continued.model), values(run(accumulation=micro_batches).model))


def test_a_second_ctrl_c_waits_for_a_checkpoint_that_is_being_written_and_a_third_does_not() -> None:
    written = []
    with handlers_unchanged(), Stop() as stop, pytest.raises(KeyboardInterrupt), stop.held():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        written.append("whole")
    with handlers_unchanged(), Stop() as stop, pytest.raises(KeyboardInterrupt), stop.held():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        written.append("another")
    assert written == ["whole"]


def test_a_stop_says_its_message_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Stop():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert capsys.readouterr().err == "Stopping after this step, then saving a checkpoint.\n"


def test_an_error_beside_a_request_to_stop_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_failing_step(state: Any, _: Any) -> Any:
        def take(*_: Any) -> None:
            state.interrupt.assign(1)
            raise tf.errors.InternalError(None, None, "the disk is gone")

        return take

    monkeypatch.setattr(loop, "make_train_step", make_failing_step)
    data = digits.load()
    recipe = train.recipe("finetune-digits", steps=1, batch_size=8, accumulation=2, xla=False)
    with pytest.raises(tf.errors.InternalError, match="the disk is gone"):
        train.run(recipe, model="digits", data={"train": (data.train_images[:40], data.train_labels[:40])})
