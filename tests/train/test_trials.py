"""`train.try_values` and `--try`: a run for each value in its own folder, a table, the best by held-out accuracy."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import command_line
from keras_vit import train
from keras_vit.errors import DivergedError
from keras_vit.train import held_out, trials
from keras_vit.train._run import Request
from tiny_models import tiny

FIELDS: dict[str, Any] = {
    "steps": 2,
    "batch_size": 8,
    "image_size": 16,
    "xla": False,
    "eval_steps": 1,
    "accumulation": 1,
}
RATES = {"learning_rate": [0.00001, 0.02]}
NAMES = ["learning_rate=1e-05", "learning_rate=0.02"]
DRAW = np.random.default_rng(0)
IMAGES, LABELS = DRAW.integers(0, 256, (24, 16, 16, 3), dtype=np.uint8), np.arange(24) % 3
DATA = {"train": (IMAGES, LABELS), "evaluation": (IMAGES, LABELS)}


def try_values(out: Path, values: Any = RATES, data: Any = DATA, **changes: Any) -> train.Trials:
    recipe = train.recipe("digits", **FIELDS | changes)
    return train.try_values(recipe, values, model=tiny(image_size=16, num_layers=1), data=data, out=out)


def interrupt(evaluation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in this evaluation of the process."""
    evaluate, done = held_out.HeldOut.evaluate, []

    def evaluate_and_stop(self: Any, *arguments: Any, **options: Any) -> Any:
        done.append(1)
        if len(done) == evaluation:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, *arguments, **options)

    monkeypatch.setattr(held_out.HeldOut, "evaluate", evaluate_and_stop)


@pytest.mark.full
def test_each_value_has_its_folder_and_the_same_call_continues_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [f"{tmp_path}/{name}" for name in NAMES]
    with monkeypatch.context() as patch:
        interrupt(3, patch)  # after the first step of the second run
        first = try_values(tmp_path)
    assert (list(first.finished), first.count) == (folders[:1], 2)
    assert str(first).endswith("Stopped: 1 of 2 runs are finished. The same command does the others.")
    written = capsys.readouterr().err
    assert written.startswith(f"runs: 2, each in a folder of {tmp_path}\n")
    assert "\nrun 1 of 2: learning_rate=1e-05\n" in written and "\nrun 2 of 2: learning_rate=0.02\n" in written
    kept = {path: path.read_bytes() for path in Path(folders[0]).rglob("*.jsonl")}

    both = try_values(tmp_path)
    said = capsys.readouterr().err
    assert f"{folders[0]} is finished" in said and f"{folders[1]} continues after step 1 of 2." in said
    assert kept and {path: path.read_bytes() for path in kept} == kept
    assert list(both.finished) == folders and both.finished[folders[0]] == first.finished[folders[0]]
    for folder, best in both.finished.items():
        assert best and best.path == f"{folder}/best.keras" and Path(best.path).exists()
        record = json.loads(Path(folder, "best.json").read_text())
        assert record == {"step": best.step, **best.metrics}
    best = max(both.finished.values(), key=lambda found: held_out.rank(found.metrics))  # type: ignore[union-attr]
    assert both.best == best and best
    assert (
        str(both).splitlines()[0].endswith(f"accuracy {best.metrics['accuracy']:.4f}, loss {best.metrics['loss']:.4f}")
    )
    assert str(both).splitlines()[2:] == [f"best: {best.path}"]


def fake_runs(monkeypatch: pytest.MonkeyPatch, accuracies: list[float | None]) -> list[tuple[train.Recipe, str]]:
    """Replace the training by these accuracies, None for one that diverges; return the list of runs."""
    runs: list[tuple[train.Recipe, str]] = []

    def fake(request: Request) -> Any:
        runs.append((request.recipe, str(request.out)))
        accuracy = accuracies[len(runs) - 1]
        if accuracy is None:
            raise DivergedError("the loss is nan")
        best = train.Best(1, {"accuracy": accuracy, "loss": 1.0}, f"{request.out}/best.keras")
        return SimpleNamespace(best=best, stopped=False)

    monkeypatch.setattr(trials, "carry_out", fake)
    return runs


@pytest.mark.full
def test_several_fields_make_a_grid_and_a_run_that_diverges_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fake_runs(monkeypatch, [0.5, None, 0.75, 0.75])
    found = try_values(tmp_path, {"learning_rate": np.array([0.5, 1]), "freeze": [[], ["embedding/*"]]})
    tried = [(recipe.learning_rate, recipe.freeze) for recipe, _ in runs]
    assert tried == [(rate, freeze) for rate in (0.5, 1.0) for freeze in ((), ("embedding/*",))]
    lines = str(found).splitlines()
    assert [line.split()[-1] for line in lines[:4]] == ["1.0000", "1.0000", "1.0000", "diverged"]
    assert lines[4] == f"best: {runs[2][1]}/best.keras"  # the first of equals
    for _, out in runs:
        assert re.fullmatch(r"learning_rate=[0-9.]+,freeze=[A-Za-z0-9-]+", Path(out).name)
    assert found.to_dict()["best"] == f"{runs[2][1]}/best.keras"


def test_a_run_that_diverged_is_in_the_table_and_is_not_the_best() -> None:
    assert str(train.Trials({"x/seed=1": None}, 1)) == "seed=1  diverged" and train.Trials({}, 1).best is None


@pytest.mark.parametrize(
    ("values", "data", "message"),
    [
        ({"learning_rate": [0.1, -1]}, DATA, "learning_rate must be in"),
        ({"learning_rat": [0.1]}, DATA, "the nearest is 'learning_rate'"),
        ({"learning_rate": 0.1}, DATA, "must be a list of values to try"),
        ({"schedule": "cosine"}, DATA, "must be a list of values to try"),
        ({"seed": []}, DATA, "must be a list of values to try"),
        ({}, DATA, "must be a list of values to try"),
        ({"learning_rate": [1, 1.0]}, DATA, r"must differ. Received: \{'learning_rate': \[1, 1.0\]\}"),
        ({"image_size": [16, 4]}, DATA, "image_size"),
        ({"train_only": [["norms"], ["norm"]]}, DATA, r"train_only matches no variable with \['norm'\]"),
        ({"lora_rank": [2], "lora_targets": [["query"], ["quer"]]}, DATA, "lora_targets are names of layers"),
        ({"freeze": [["embedding/*"], ["embeding/*"]]}, DATA, r"freeze matches no variable with \['embeding/\*'\]"),
        ({"freeze": [[], ["head/*"]]}, DATA, "The head begins with zeros and is not trained"),
        ({"freeze": [[], ["*"]]}, DATA, "no variable is left to train"),
        (RATES, {"train": DATA["train"]}, "no images are held out"),
    ],
)
def test_all_values_are_checked_before_the_first_run(
    values: Any, data: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fake_runs(monkeypatch, [0.5, 0.5])
    with pytest.raises(ValueError, match=message):
        try_values(tmp_path, values, data)
    assert not runs and not list(tmp_path.iterdir())


def test_a_batch_that_the_devices_cannot_share_is_found_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, devices = fake_runs(monkeypatch, [0.5, 0.5]), SimpleNamespace(num_replicas_in_sync=2, cluster_resolver=None)
    recipe = train.recipe("digits", **FIELDS)
    with pytest.raises(ValueError, match=r"multiple of replicas x accumulation = 2 x 1. Received: 9"):
        train.try_values(recipe, {"batch_size": [8, 9]}, model=tiny(), data=DATA, out=tmp_path, strategy=devices)
    assert not runs


COMMAND = ["train", "finetune-digits", "--model", "digits", "--data", "digits", "--steps", 1]


@pytest.mark.full
def test_the_command_reads_values_as_set_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fake_runs(monkeypatch, [0.5] * 8)
    tried = [
        "schedule=cosine,constant",
        'freeze=["embedding/*","*/bias"],[]',
        'config={"dropout_rate": 0.1, "num_registers": 0},{}',
    ]
    options = [word for text in tried for word in ("--try", text)]
    printed = command_line.run(*COMMAND, "--out", tmp_path, *options)
    assert {(recipe.schedule, recipe.freeze) for recipe, _ in runs} == {
        (schedule, freeze) for schedule in ("cosine", "constant") for freeze in (("embedding/*", "*/bias"), ())
    }
    assert [dict(recipe.config) for recipe, _ in runs[:2]] == [{"dropout_rate": 0.1, "num_registers": 0}, {}]
    assert len(runs) == 8 and {recipe.steps for recipe, _ in runs} == {1}
    assert f"best: {runs[0][1]}/best.keras" in printed
    for wrong, message in (
        (["--try", "seed=1,2"], "--out"),
        (["--try", "steps=1,2", "--out", tmp_path], "steps is given twice"),
        (["--try", "seed=1", "--try", "seed=2", "--out", tmp_path], "seed is given twice"),
        (["--try", "seed", "--out", tmp_path], "--try must be FIELD=VALUE"),
        (["--try", "seed=1,,2", "--out", tmp_path], "seed must be"),
    ):
        assert message in command_line.fails(monkeypatch, *COMMAND, *wrong), wrong
