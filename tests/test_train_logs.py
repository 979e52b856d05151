"""The log of a run has no duplicates and no gaps, and other programs read it; signals stop a run."""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.train import log_files
from keras_vit.train.checkpoints import remove, replace_file
from keras_vit.train.log_files import Log, plot
from keras_vit.train.loop import Stop


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def events(folder: Path | str) -> dict[tuple[int, str], float]:
    """Return the last value of each step and name in the event files, as TensorBoard draws them."""
    found = {}
    for path in sorted(tf.io.gfile.glob(f"{folder}/tensorboard/*tfevents*")):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                assert value.metadata.plugin_data.plugin_name == "scalars"
                found[event.step, value.tag] = float(tf.make_ndarray(value.tensor))
    return found


def write(log: Log, *steps: int) -> None:
    for step in steps:
        log.write(step, loss=1 / step, accuracy=step)


def is_exactly(folder: Path, *steps: int) -> bool:
    return lines(folder) == [{"step": s, "loss": 1 / s, "accuracy": float(s)} for s in steps]


def test_a_run_that_is_interrupted_again_and_again_has_each_record_once(tmp_path: Path) -> None:
    # The last written step, and the checkpoint (None: none yet) from which the next process continues.
    start = 0
    for end, checkpoint in ((3, None), (7, 5), (12, 10), (12, 12), (20, 20)):
        log = Log(tmp_path, last_step=start or None)  # the previous log is not closed: its process died
        write(log, *range(start + 1, end + 1))
        assert is_exactly(tmp_path, *range(1, end + 1))  # at once
        start = checkpoint or 0
    log.close()
    # Events hold float32.
    expected = {(s, n): float(np.float32(v)) for s in range(1, 21) for n, v in (("loss", 1 / s), ("accuracy", s))}
    assert events(tmp_path) == expected


def test_records_of_other_kinds_at_one_step_stay_side_by_side(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(10, loss=0.5)
    log.write(10, evaluation_accuracy=0.25)
    log.write(11)
    log.close()
    Log(tmp_path, last_step=10)
    assert lines(tmp_path) == [{"step": 10, "loss": 0.5}, {"step": 10, "evaluation_accuracy": 0.25}]
    assert events(tmp_path) == {(10, "evaluation_accuracy"): 0.25, (10, "loss"): 0.5}


def test_numbers_that_json_does_not_know_are_strings(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(1, a=np.float32("nan"), b=tf.constant(float("inf")), c=-np.inf, d=np.float32(0.1), e=3)
    log.close()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(line, parse_constant=refuse)
    assert record == {
        "step": 1,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
        "d": float(np.float32(0.1)),
        "e": 3.0,
    }
    assert [float(record[name]) for name in "bc"] == [np.inf, -np.inf]


@pytest.mark.parametrize("tail", ['{"step": 3, "lo', "[3]", '{"loss": 1.0}', "\0\0\0\0"], ids=ascii)
def test_a_torn_last_line_is_left_out_and_named(tmp_path: Path, tail: str) -> None:
    log = Log(tmp_path)
    write(log, 1, 2)
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(tail)
    with pytest.warns(UserWarning, match=r"log.jsonl: line 3 is incomplete or no record"):
        log = Log(tmp_path, last_step=2)
    write(log, 3)
    log.close()
    assert is_exactly(tmp_path, 1, 2, 3)


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    log = Log(tmp_path)
    write(log, 1, 2)
    log.close()
    path = tmp_path / "log.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    log = Log(tmp_path, last_step=2)
    write(log, 3)
    log.close()
    assert is_exactly(tmp_path, 1, 2, 3)


def test_a_log_that_needs_no_change_is_not_touched(tmp_path: Path) -> None:
    log = Log(tmp_path)
    write(log, 1, 2)
    log.close()
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}
    Log(tmp_path, last_step=2).close()
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")} == before


def test_a_bucket_works_as_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    # TensorFlow's in-memory file system uses the same code as gs://, but appends to a file that is written again.
    monkeypatch.setattr(log_files, "replace_file", lambda path, data: (remove(path), replace_file(path, data)))
    log = Log("ram://bucket/log")
    write(log, 1, 2, 3)
    log.close()
    log = Log("ram://bucket/log", last_step=2)
    write(log, 3, 4)
    log.close()
    with tf.io.gfile.GFile("ram://bucket/log/log.jsonl") as file:
        assert [json.loads(line)["step"] for line in file.read().splitlines()] == [1, 2, 3, 4]
    assert {step for step, _ in events("ram://bucket/log")} == {1, 2, 3, 4}


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path)
    write(log, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log.jsonl").stat().st_size + 5, before[1]))
    try:
        with pytest.raises(OSError, match=f"{tmp_path} cannot be written: "):
            write(log, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.warns(UserWarning, match="line 2 is incomplete"):
        Log(tmp_path, last_step=1)
    assert is_exactly(tmp_path, 1)


# ---- the picture ------------------------------------------------------------------------------------------


def test_the_picture_shows_what_the_log_has(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = Log(tmp_path)
    for step in range(1, 100):
        log.write(step, loss=1 / step if step != 50 else float("nan"), learning_rate=0.1, gradient_norm=step)
    log.write(99, evaluation_loss=0.1, evaluation_accuracy=0.9)
    log.close()
    path = Path(plot(tmp_path))
    assert path == tmp_path / "plot.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_anything_to_draw_there_is_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"Expected log.jsonl with records of loss, accuracy.*Received: "):
        plot(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_picture_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'matplotlib: pip install "keras-vit-zoo\[plots\]"'):
        plot(tmp_path)


# ---- signals ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def handlers_unchanged() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_only_asks(number: signal.Signals) -> None:
    with handlers_unchanged(), Stop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested


def test_the_second_ctrl_c_is_as_usual() -> None:
    with handlers_unchanged(), Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested


def test_handlers_return_after_an_error() -> None:
    with handlers_unchanged(), pytest.raises(ZeroDivisionError), Stop():
        raise ZeroDivisionError


def test_in_another_thread_it_does_nothing() -> None:
    seen = []

    def work() -> None:
        with handlers_unchanged(), Stop() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
