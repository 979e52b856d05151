"""What a run shows and keeps: the best model, micro-batches, progress; a finished run, and one that begins from it."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from command_line import fails
from command_line import run as run_command
from keras_vit import train, zoo
from keras_vit._util import progress
from keras_vit.train import loop
from keras_vit.train.log_files import MetricLogger
from model_weights import values
from tiny_models import tiny

FIELDS: dict[str, Any] = {"steps": 6, "batch_size": 8, "image_size": 16, "xla": False, "log_steps": 1} | {
    "learning_rate": 0.02,
    "checkpoint_steps": 2,
    "checkpoint_minutes": None,
    "eval_steps": 1,
    "keep": 10,
    "accumulation": "auto",
}
# GiB. By plan 8 images of this model do not fit, and 4 do.
SMALL_MEMORY = "0.0009"


def pictures() -> dict[str, Any]:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
    labels = np.arange(24) % 3
    return {
        "train": (images, labels),
        "evaluation": (images[:12], labels[:12]),
        "class_names": ["ant", "bee", "cat"],
    }


def trained(out: Path, **changes: Any) -> train.Result:
    model = tiny(image_size=16, classifier="gap", class_token=True)
    return train.run(train.recipe("digits", **FIELDS | changes), model=model, data=pictures(), out=out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, train.Result, str]]:
    """Train in a small memory; return the folder, the result and what was written to standard error."""
    folder, written = tmp_path_factory.mktemp("runs") / "whole", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_VIT_MEMORY", SMALL_MEMORY)
        patch.setenv("FORCE_COLOR", "1")  # continuous integration sets it, and nobody looks
        patch.setattr(sys, "stderr", written)
        result = trained(folder)
    yield folder, result, written.getvalue()


def evaluations(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if "evaluation_loss" in line]


def test_the_best_model_is_kept_beside_the_last(whole: tuple[Path, train.Result, str]) -> None:
    folder, result, _ = whole
    found = evaluations(folder)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    best = max(found, key=lambda line: (line["evaluation_accuracy"], -line["evaluation_loss"]))
    assert result.best is not None
    assert (result.best.step, result.best.path) == (best["step"], f"{folder}/best.keras")
    assert result.best.metrics["loss"] == best["evaluation_loss"]
    again = train.evaluate(keras.saving.load_model(folder / "best.keras"), pictures(), batch_size=64)
    assert (again.top1, again.loss) == (best["evaluation_accuracy"], pytest.approx(best["evaluation_loss"], rel=1e-6))


def test_a_log_has_plain_lines_and_no_bar(whole: tuple[Path, train.Result, str]) -> None:
    _, result, written = whole
    lines = written.splitlines()
    assert "\x1b" not in written and "\r" not in written
    assert lines[0].startswith("batch 8 is computed as 2 micro-batches of 4: ") and lines[0].endswith(" of 944 KiB"), (
        lines
    )
    steps = [line for line in lines if line.startswith("step ")]  # TensorFlow may warn between them
    assert [line.split(":")[0] for line in steps] == [f"step {step} of 6" for step in range(1, 7)], lines
    assert steps[0].endswith(", the best so far")


@pytest.mark.full
def test_a_stopped_run_ends_with_the_same_best_model_and_micro_batches(
    whole: tuple[Path, train.Result, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected, _ = whole
    out = tmp_path / "stopped"
    shutil.copytree(folder, out)
    for step in (4, 6):  # killed after step 3, with the files that it had written by then, or later ones
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    (out / "model.keras").unlink()
    (out / "best.json").write_text("[" * 3000)
    with pytest.warns(UserWarning, match=r"best.json cannot be used \(.*the best model is chosen anew"):
        result = trained(out)  # with the memory of this machine, in which 8 images fit at once
    assert result.recipe.accumulation == 2
    assert f"{out} continues after step 2 of 6.\n" in capsys.readouterr().err
    for path, value in values(expected.model).items():
        np.testing.assert_array_equal(values(result.model)[path], value)
    later = [line for line in evaluations(out) if line["step"] > 2]
    best = max(later, key=lambda line: (line["evaluation_accuracy"], -line["evaluation_loss"]))
    assert result.best is not None and result.best.step == best["step"]
    shutil.copy(folder / "best.json", out)
    shutil.copy(folder / "best.keras", out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    assert expected.best is not None and trained(out).best == train.Best(
        expected.best.step, expected.best.metrics, f"{out}/best.keras"
    )


def test_a_finished_run_says_so_and_how_to_train_longer(
    whole: tuple[Path, train.Result, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected, _ = whole
    before = {path: path.read_bytes() for path in (folder / "best.keras", folder / "log.jsonl")}
    result = trained(folder)
    said = capsys.readouterr().err
    assert said.startswith(f"{folder} is finished: all 6 steps are done. To train longer, start a new run")
    assert f"keras-vit train --continue-from {folder} --steps N" in said
    assert (result.metrics, result.best) == (expected.metrics, expected.best)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.full
def test_a_new_run_begins_with_the_weights_head_and_class_names_of_another(
    whole: tuple[Path, train.Result, str], tmp_path: Path
) -> None:
    folder, _, _ = whole
    with pytest.raises(ValueError, match=r"does not say where its data are: pass data"):
        train.run(continue_from=folder, out=tmp_path / "new")
    other = pictures() | {"class_names": ["ant", "cat", "dog"]}
    with pytest.raises(ValueError, match=r"has classes that the model does not have: dog"):
        train.run(continue_from=folder, data=other, out=tmp_path / "new")
    with pytest.raises(ValueError, match="out must not be that of continue_from"):
        train.run(continue_from=folder, data=pictures(), out=folder)
    with pytest.raises(ValueError, match="model or continue_from, not both"):
        train.run(continue_from=folder, model="digits", out=tmp_path / "new")
    with pytest.raises(FileNotFoundError, match="no run to continue from. Expected a folder"):
        train.run(continue_from=tmp_path / "nothing", out=tmp_path / "new")
    assert not (tmp_path / "new").exists()

    # A learning rate of nearly 0 keeps the weights; a reset head would be zero.
    unfinished = tmp_path / "unfinished"
    shutil.copytree(folder, unfinished, ignore=shutil.ignore_patterns("model.keras"))
    last = values(keras.saving.load_model(folder / "model.keras"))
    for source in (folder, unfinished):
        changes = {"steps": 1, "learning_rate": 1e-12, "eval_steps": None}
        result = train.run(continue_from=source, data=pictures(), changes=changes, out=tmp_path / "new" / source.name)
        assert (result.steps, result.recipe.name, result.model.config.labels) == (1, "digits", ("ant", "bee", "cat"))
        for path, value in values(result.model).items():
            np.testing.assert_allclose(value, last[path], atol=1e-6, err_msg=path)


def test_the_command_takes_recipe_and_data_from_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}

    def keep(recipe: Any, **arguments: Any) -> train.Result:
        given.update(arguments, recipe=recipe)
        out = str(arguments["out"])
        return train.Result(zoo.load("digits"), recipe, {}, [], 1, 0.0, skipped=0, unread=0, out=out, stopped=False)

    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    monkeypatch.setattr(train, "run", keep)
    monkeypatch.setattr("keras_vit.train.run", keep)
    run_command("train", "--continue-from", "runs/x", "--steps", 2000)
    assert (given["recipe"], given["model"], given["data"]) == (None, None, None)
    assert (str(given["out"]), given["changes"]) == ("runs/x-continued", {"steps": 2000})
    for recipe, number in {"finetune": "auto", "digits": "auto", "finetune-digits": 1}.items():
        run_command("train", recipe, "--model", "digits", "--data", "digits")
        assert given["recipe"].accumulation == number
        assert str(given["out"]) == f"runs/{recipe}-digits-digits"
    run_command("train", "finetune", "--model", "digits", "--data", "digits", "--set", "accumulation=4")
    assert given["recipe"].accumulation == 4


@pytest.mark.full
def test_a_step_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_VIT_MEMORY", "0.0002")
    out = tmp_path / "run"
    message = fails(monkeypatch, "train", "finetune-digits", "--model", "digits", "--data", "digits", "--out", out)
    assert "accumulation=1 of 48x48 pixels needs about" in message and "and there are 210 KiB. Set" in message
    assert not out.exists()


def test_evaluations_are_about_ten_in_a_run_and_cost_a_tenth_of_it() -> None:
    class State:
        total_steps = 20_000
        recipe = train.recipe("finetune")

    def every(images: int, total: int, **changes: Any) -> int | None:
        State.total_steps, State.recipe = total, train.recipe("finetune", **changes)
        evaluation: Any = type("Split", (), {"count": images}) if images else None
        return loop.interval(State(), type("Data", (), {"evaluation": evaluation, "is_labelled": True}))  # type: ignore[arg-type]

    assert every(1_000, 20_000) == 2_000
    assert every(1_000, 200) == 20
    assert every(10, 54) == 10  # at least 10 steps between
    assert every(50_000, 2_000) == 326  # 50,000 images / 3 are a tenth of 326 batches of 512
    assert every(0, 20_000) is None
    assert every(1_000, 20_000, eval_steps="none") is None
    assert every(1_000, 20_000, eval_steps=7) == 7


def test_other_back_ends_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    for command in (
        ["train", "digits", "--model", "digits", "--data", "digits"],
        ["evaluate", "digits", "--data", "digits"],
        ["evaluate", "digits", "--data", "digits", "--few-shot", "1"],
    ):
        message = fails(monkeypatch, *command)
        assert "need KERAS_BACKEND=tensorflow; under other back ends models load, predict" in message
        assert message.endswith("Received: KERAS_BACKEND=jax")


# ---- the bar ------------------------------------------------------------------------------------------------


class Terminal:
    """Pseudo-terminal in the place of standard error."""

    def __enter__(self) -> Terminal:
        self._main, other = pty.openpty()
        os.set_blocking(self._main, False)
        self._file = os.fdopen(other, "w")
        self._before, sys.stderr = sys.stderr, self._file
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr = self._before
        self._file.close()
        os.close(self._main)

    def shown(self) -> str:
        """Return what was drawn since the last call."""
        self._file.flush()
        time.sleep(0.25)  # the bar draws ten times a second
        text = ""
        try:
            while chunk := os.read(self._main, 1 << 16):
                text += chunk.decode(errors="replace")
        except BlockingIOError:
            pass
        return text


def test_the_bar_says_compiling_until_the_first_step_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    metrics = tf.constant([0.5, 0.25, 1.0, 0.0])  # loss, accuracy, gradient norm, stop
    with Terminal() as terminal, progress.counter("Training", total=5) as advance:
        logger = MetricLogger(None, advance, metrics=("accuracy",), batch_size=8)
        shown = terminal.shown()
        assert "Training" in shown and "0/5" in shown and "compiling" in shown
        logger.add(1, metrics)
        logger.add(1, metrics)
        terminal.shown()
        shown = terminal.shown()
        assert "2/5" in shown and "compiling" not in shown
        logger.log_means(2, learning_rate=0.1)
        terminal.shown()
        shown = terminal.shown()
        assert "loss 0.5000  accuracy 0.250" in shown
        logger.show("evaluating")
        assert "evaluating" in terminal.shown()
        logger.log_evaluation(2, {"accuracy": 0.2})  # after it the bar is of training steps again
        terminal.shown()
        shown = terminal.shown()
        assert "loss 0.5000" in shown and "evaluating" not in shown
        progress.print_line("step 2 of 5: held-out accuracy 0.2")
        shown = terminal.shown()
        assert "step 2 of 5: held-out accuracy 0.2\r\n" in shown


@pytest.mark.parametrize("show", [True, False])
def test_a_pipe_has_nothing_of_the_bar(show: bool, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert list(progress.track([1, 2], "Working", show=show)) == [1, 2]
    assert capsys.readouterr().err == ""
