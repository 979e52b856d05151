"""The log of a run has no duplicates and no gaps, and other programs read it; a pipe shows no bar."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_vit._util import progress
from keras_vit.train import log_files
from keras_vit.train.checkpoints import remove, replace_file
from keras_vit.train.log_files import Log, MetricLogger, plot


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
    tenth = float(np.float32(0.1))
    assert json.loads(line) == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": tenth, "e": 3.0}


def test_a_torn_last_line_is_left_out_and_named_and_one_without_its_end_kept(tmp_path: Path) -> None:
    for number, tail in enumerate(('{"step": 3, "lo', "[3]", '{"loss": 1.0}', "\0\0\0\0", "")):
        folder = tmp_path / str(number)
        log = Log(folder)
        write(log, 1, 2)
        log.close()
        path = folder / "log.jsonl"
        if tail:
            path.write_text(path.read_text() + tail)
            with pytest.warns(UserWarning, match=r"log.jsonl: line 3 is incomplete or no record"):
                log = Log(folder, last_step=2)
        else:
            path.write_bytes(path.read_bytes().removesuffix(b"\n"))
            log = Log(folder, last_step=2)
        write(log, 3)
        log.close()
        assert is_exactly(folder, 1, 2, 3), tail


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


def test_the_picture_shows_what_the_log_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="Expected log.jsonl with records of loss, accuracy"):
        plot(tmp_path)
    assert not list(tmp_path.iterdir())
    log = Log(tmp_path)
    for step in range(1, 100):
        log.write(step, loss=1 / step if step != 50 else float("nan"), learning_rate=0.1, gradient_norm=step)
    log.write(99, evaluation_loss=0.1, evaluation_accuracy=0.9)
    log.close()
    path = Path(plot(tmp_path))
    assert path == tmp_path / "plot.png" and path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "keras-vit-zoo\[plots\]"'):
        plot(tmp_path)


# ---- the bar


def test_a_pipe_has_nothing_of_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    for show in (True, False):
        assert list(progress.track([1, 2], "Working", show=show)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_a_pipe_gets_a_line_of_long_work_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.counter("Working", total=2000, done=10) as advance:
        for second in range(1000):
            now[0] = second
            advance(1, f"loss {second}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Working: 42 of 2,000  loss 31", "Working: 73 of 2,000  loss 62"]
    assert 10 < len(lines) < 25  # ever more rarely
    with progress.counter("Loading", total=5 * 2**20, in_bytes=True) as advance:
        now[0] += 31
        advance(2**20)
    assert capsys.readouterr().err == "Loading: 1.00 MiB of 5.00 MiB\n"


def test_the_first_steps_say_how_long_the_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now: list[float] = [0.0]
    said: list[str] = []
    monkeypatch.setattr(log_files.time, "monotonic", lambda: now[0])
    logger = MetricLogger(None, lambda *_: None, metrics=(), batch_size=32, steps=1000, print_line=said.append)
    for seconds in (30.0, 2.0, 2.0):
        now[0] += seconds
        logger.add(1, np.zeros(3).view(Computed))
    assert said == [
        "a step takes 30 seconds (the first, which compiles), 1.07 images/s: at most 8.3 hours for 999 more",
        "a step takes 2.0 seconds, 16 images/s: 33 minutes for 998 more",
    ]


class Computed(np.ndarray):
    """A tensor of metrics."""

    def numpy(self) -> np.ndarray:
        return np.asarray(self)
