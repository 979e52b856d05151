"""Whole training runs: results, files and what is shown; the best model; runs that go on; invalid settings."""

from __future__ import annotations

import io
import json
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from command_line import fails
from command_line import run as run_command
from keras_vit import VisionTransformer, train, zoo
from keras_vit.errors import CheckpointError
from keras_vit.train import held_out, prepare
from keras_vit.train.checkpoints import read_run
from keras_vit.train.strategies import strategy
from model_weights import values
from refusals import unrefused
from tiny_models import tiny

# XLA takes longer to compile a step than these runs take.
SHORT: dict[str, Any] = {"steps": 3, "batch_size": 8, "image_size": 16, "xla": False, "warmup_fraction": 0.0}
WATCHED: dict[str, Any] = {"steps": 4, "batch_size": 8, "image_size": 16, "xla": False, "log_steps": 1} | {
    "learning_rate": 0.02,
    "checkpoint_steps": 2,
    "checkpoint_minutes": None,
    "eval_steps": 1,
    "keep": 10,
    "accumulation": "auto",
}
# GiB. By plan 8 images of the watched run's model do not fit, and 4 do.
SMALL_MEMORY = "0.000616"


def short(name: str = "digits", **changes: Any) -> train.Recipe:
    return train.recipe(name, **SHORT | changes)


def run(recipe: train.Recipe, **arguments: Any) -> train.Result:
    return train.run(recipe, **{"model": tiny(num_layers=1), "data": "digits", "progress": False} | arguments)


def pictures(classes: int = 3) -> dict[str, Any]:
    """Return random images; the labels are their numbers, so that a model can learn them by heart."""
    images, labels = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8), np.arange(24) % classes
    return {"train": (images, labels), "evaluation": (images[:12], labels[:12])}


NAMED = pictures() | {"class_names": ["ant", "bee", "cat"]}


def watched(out: Path, **changes: Any) -> train.Result:
    model = tiny(image_size=16, classifier="gap", class_token=True, num_layers=1)
    return train.run(train.recipe("digits", **WATCHED | changes), model=model, data=NAMED, out=out)


class Watched(NamedTuple):
    """The folder of a run, its result, and what it wrote to standard error."""

    folder: Path
    result: train.Result
    written: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Train in a small memory."""
    folder, written = tmp_path_factory.mktemp("runs") / "whole", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_VIT_MEMORY", SMALL_MEMORY)
        patch.setenv("FORCE_COLOR", "1")  # continuous integration sets it, and nobody looks
        patch.setattr(sys, "stderr", written)
        result = watched(folder)
    yield Watched(folder, result, written.getvalue())


def evaluations(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if "evaluation_loss" in line]


def best_of(lines: list[dict[str, float]]) -> dict[str, float]:
    return max(lines, key=lambda line: (line["evaluation_accuracy"], -line["evaluation_loss"]))


# ---- the watched run


def test_a_run_leaves_its_model_its_log_and_its_checkpoints_in_a_folder(whole: Watched) -> None:
    folder, result, written = whole
    loaded = keras.saving.load_model(folder / "model.keras")
    assert isinstance(loaded, VisionTransformer) and loaded.config.labels == ("ant", "bee", "cat")
    for path, value in values(result.model).items():
        np.testing.assert_array_equal(values(loaded)[path], value)
    assert [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] == result.history
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-00000002", "step-00000004"}
    assert list(folder.glob("tensorboard/*tfevents*"))
    assert {"loss", "accuracy", "gradient_norm", "learning_rate", "images_per_second"} < result.history[0].keys()
    # Standard error is no terminal: plain lines, and no bar.
    lines = written.splitlines()
    assert "\x1b" not in written and "\r" not in written
    assert lines.pop(0) == "labels of 24 images: 3 of 3 classes occur, 8 to 8 images of each"
    assert lines[0].startswith("batch 8 is computed as 2 micro-batches of 4: "), lines
    steps = [line for line in lines if line.startswith("step ")]  # TensorFlow may warn between them
    assert [line.split(":")[0] for line in steps] == [f"step {step} of 4" for step in range(1, 5)], lines
    assert steps[0].endswith(", the best so far")


def test_the_best_model_is_kept_beside_the_last(whole: Watched) -> None:
    folder, result, _ = whole
    found = evaluations(folder)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    best = best_of(found)
    assert result.best is not None
    assert (result.best.step, result.best.path) == (best["step"], f"{folder}/best.keras")
    assert result.best.metrics["loss"] == best["evaluation_loss"]
    again = train.evaluate(keras.saving.load_model(folder / "best.keras"), NAMED, batch_size=64)
    assert (again.top1, again.loss) == (best["evaluation_accuracy"], pytest.approx(best["evaluation_loss"], rel=1e-6))


@pytest.mark.full
def test_a_finished_run_says_so_and_how_to_train_longer(whole: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    folder, expected, _ = whole
    before = {path: path.read_bytes() for path in (folder / "best.keras", folder / "log.jsonl")}
    result = watched(folder, accumulation=4)  # other devices may need another number of micro-batches
    said = capsys.readouterr().err
    assert f"\n{folder} is finished: all 4 steps are done." in said
    assert f"keras-vit train --continue-from {folder} --steps N" in said
    assert (result.steps, result.best) == (4, expected.best)
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-6)  # measured again, in other batches
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(CheckpointError, match=r"recipe\.seed") as caught:
        watched(folder, seed=5, log_steps=4)
    assert "log_steps" not in str(caught.value)


def test_a_stopped_run_ends_with_the_same_weights_best_model_and_micro_batches(
    whole: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected, _ = whole
    out = tmp_path / "stopped"
    shutil.copytree(folder, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")  # as if killed after step 3
    (out / "model.keras").unlink()
    (out / "best.json").write_text("[" * 3000)
    with pytest.warns(UserWarning, match=r"best.json cannot be used \(.*the best model is chosen anew"):
        result = watched(out)  # with the memory of this machine, in which 8 images fit at once
    assert result.recipe.accumulation == 2
    assert f"{out} continues after step 2 of 4.\n" in capsys.readouterr().err
    for path, value in values(expected.model).items():
        np.testing.assert_array_equal(values(result.model)[path], value)
    best = best_of([line for line in evaluations(out) if line["step"] > 2])
    assert result.best is not None and result.best.step == best["step"]


@pytest.mark.full
def test_a_new_run_begins_with_the_weights_head_and_class_names_of_another(whole: Watched, tmp_path: Path) -> None:
    folder, new = whole.folder, tmp_path / "new"
    cases = [
        ({"continue_from": folder, "out": new}, "pass data"),
        ({"continue_from": folder, "data": NAMED | {"class_names": "abc"}, "out": new}, "the model does not have"),
        ({"continue_from": folder, "data": NAMED, "out": folder}, "out must not be that of continue_from"),
        ({"continue_from": folder, "model": "digits", "out": new}, "model or continue_from"),
        ({"continue_from": tmp_path / "nothing", "out": new}, "no run to continue from"),
    ]
    assert not unrefused(train.run, cases)
    assert not new.exists()
    # A learning rate of nearly 0 keeps the weights; a reset head would be zero.
    unfinished = tmp_path / "unfinished"
    shutil.copytree(folder, unfinished, ignore=shutil.ignore_patterns("model.keras"))
    changes = {"steps": 1, "learning_rate": 1e-12, "eval_steps": None}
    assert read_run(unfinished, None).recipe.is_stated("steps")  # else it is chosen anew for few images
    result = train.run(continue_from=unfinished, data=NAMED, changes=changes, out=new)
    assert (result.steps, result.recipe.name, result.model.config.labels) == (1, "digits", ("ant", "bee", "cat"))
    for path, value in values(result.model).items():
        np.testing.assert_allclose(value, values(whole.result.model)[path], atol=1e-6, err_msg=path)


def test_the_command_takes_recipe_and_data_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    run_command("train", "finetune", "--model", "digits", "--data", "digits", "--set", "accumulation=4")
    assert (given["recipe"].accumulation, str(given["out"])) == (4, "runs/finetune-digits-digits")


# ---- what is trained


@pytest.mark.full
def test_only_what_is_meant_to_moves_and_not_in_the_model_that_is_given() -> None:
    start = VisionTransformer(tiny(num_classes=10, image_size=16, num_layers=1))
    data, before = {"train": pictures(10)["train"]}, values(start)
    for changes, fixed in (({"linear_probe": True}, None), ({"freeze": ("block_*", "embedding/*")}, ("block_", "emb"))):
        after = values(run(short(learning_rate=0.1, **changes), model=start, data=data).model)
        moved = {path for path in before if not np.array_equal(before[path], after[path])}
        assert moved == {path for path in before if (not path.startswith(fixed) if fixed else path.startswith("head/"))}
        assert all(np.array_equal(before[path], now) for path, now in values(start).items())


@pytest.mark.full
def test_the_seed_decides_the_weights_and_steps_a_call_do_not() -> None:
    start = VisionTransformer(tiny(num_classes=10, image_size=16, num_layers=1))
    runs = [{}, {"steps_per_call": 3, "log_steps": 3}, {"seed": 1}, {"ema_decay": 0.999999}, {"ema_decay": 1e-6}]
    plain, several, other, near, far = (values(run(short(**changes), model=start).model) for changes in runs)
    assert all(np.array_equal(several[path], value) for path, value in plain.items())
    assert not np.array_equal(other["embedding/kernel"], plain["embedding/kernel"])
    # After three steps with decay d the average is d^3 w0 + (1 - d)(d^2 w1 + d w2 + w3); with d near 1 it is w0.
    np.testing.assert_allclose(near["embedding/kernel"], start.get_layer("embedding").kernel, atol=1e-6)
    np.testing.assert_allclose(far["embedding/kernel"], plain["embedding/kernel"], atol=1e-6)


@pytest.mark.full
def test_masked_patches_then_labels(tmp_path: Path) -> None:
    run(short("masked-patch", accumulation=1, batch_size=8, warmup_fraction=0.5), out=tmp_path)
    result = run(short("finetune-digits"), model=tmp_path / "model.keras")
    assert result.model.config.num_classes == 10


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"accumulation": 2, "ema_decay": 0.9, "remat": True, "config": {"dropout_rate": 0.1, "stochastic_depth": 0.1}},
        {"precision": "mixed_bfloat16", "config": {"attention_dropout_rate": 0.1}, "mixup": 0.2, "optimizer": "sgd"}
        | {"momentum_dtype": "bfloat16", "objective": "sigmoid", "label_smoothing": 0.1},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_the_whole_step_compiles_under_xla(changes: dict[str, Any]) -> None:
    # A requirement of TPUs that can be tested without one: XLA has a kernel for every operation.
    # Of two blocks the second has stochastic depth.
    layers = 2 if "accumulation" in changes else 1
    result = run(short(xla=True, **changes), data=pictures(), model=tiny(num_layers=layers))
    assert np.isfinite(result.history[0]["loss"])


@pytest.mark.full
def test_compiled_in_pieces_a_run_is_the_plain_one_and_repeats_bit_for_bit() -> None:
    changes = {"accumulation": 2, "config": {"dropout_rate": 0.1, "stochastic_depth": 0.1}, "log_steps": 1}
    plain, *twice = (run(short(xla=xla, **changes), data=pictures(), model=tiny()) for xla in (False, "auto", "auto"))
    # Masks are drawn outside of the compiled part, so their numbers are the same; XLA's own would differ.
    losses = [[line["loss"] for line in result.history if "loss" in line] for result in (plain, twice[0])]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)  # other masks give 1e-2
    first, second = (values(result.model) for result in twice)
    assert all(np.array_equal(first[path], second[path]) for path in first)


@pytest.mark.full
def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    recipe = short(optimizer="sgd", learning_rate=1e30, clip_norm=None, steps=20, checkpoint_steps=1, log_steps=1)
    with pytest.raises(train.DivergedError, match=r"diverged before step \d+"):
        run(recipe, out=tmp_path, data={"train": pictures(5)["train"]})
    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        reader = tf.train.load_checkpoint(str(checkpoint / "variables"))
        for name in reader.get_variable_to_shape_map():
            if "weights" in name:
                assert np.isfinite(reader.get_tensor(name)).all(), (checkpoint, name)
    assert not (tmp_path / "model.keras").exists()


# ---- what is refused, and what is chosen


def test_settings_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save(tmp_path / "other.keras")
    three: Any = types.SimpleNamespace(num_replicas_in_sync=3)
    cases = [
        ({"recipe": short(freeze=("blocks/*",))}, "freeze matches no variable with ['blocks/*']"),
        ({"recipe": short(), "strategy": three}, "batch_size must be a multiple of replicas x accumulation = 3 x 1"),
        ({"recipe": short(), "data": None}, "data must say what to train on"),
        ({"recipe": short(), "weights": "sam"}, "weights are for a model's name"),
        ({"recipe": short(), "model": f"{tmp_path}/nothing"}, f"{tmp_path}/nothing"),
        ({"recipe": short(), "model": tmp_path / "other.keras"}, "does not contain a VisionTransformer"),
    ]
    assert not unrefused(run, cases)
    assert prepare.choose_model(train.recipe("augreg"), "B/16").source is None
    assert prepare.choose_model(train.recipe("finetune"), "B/16").source is not None
    monkeypatch.setenv("KERAS_VIT_MEMORY", "0.0002")
    out = tmp_path / "run"
    command = f"train finetune-digits --model digits --data digits --out {out}".split()
    assert "accumulation=1 of 48x48 pixels needs about" in fails(monkeypatch, *command)
    assert not out.exists()
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    for refused in (command, ["evaluate", "digits", "--data", "digits"]):
        assert "need KERAS_BACKEND=tensorflow" in fails(monkeypatch, *refused)


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("TPU_NAME", raising=False)
    cases = [
        ({"kind": "workers"}, "TF_CONFIG"),
        ({"kind": "tpu"}, "There is no TPU at 'local'"),
        ({"kind": "tpus"}, "strategy must be one of"),
        ({"kind": "one:x"}, "strategy must be one of"),
    ]
    assert not unrefused(lambda kind: strategy(kind), cases)
    configs = [({"config": "{"}, "must be JSON"), ({"config": "[]"}, "must be JSON"), ({"config": "{}"}, "a cluster")]
    own = {"config": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'}, "must be below 1"
    for arguments, part in [*configs, own]:
        monkeypatch.setenv("TF_CONFIG", arguments["config"])
        with pytest.raises(ValueError, match=part):
            strategy("workers")
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}')
    tf.constant(0) + 1
    with pytest.raises(ValueError, match=r"before it runs anything else: call train.strategy\('workers'\) first"):
        strategy("workers")
    monkeypatch.delenv("TF_CONFIG")
    assert strategy("auto").num_replicas_in_sync == 1
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.warns(UserWarning, match="Slurm started 2 tasks, and each trains alone"):
        strategy("auto")


def test_evaluations_are_about_ten_in_a_run_and_cost_a_tenth_of_it() -> None:
    def every(images: int, total: int, **changes: Any) -> int | None:
        evaluation = types.SimpleNamespace(count=images) if images else None
        data: Any = types.SimpleNamespace(evaluation=evaluation, is_labelled=True)
        return held_out.evaluation_interval(train.recipe("finetune", **changes), data, total)

    assert every(1_000, 20_000) == 2_000
    assert every(1_000, 200) == 20
    assert every(10, 54) == 10  # at least 10 steps between
    assert every(50_000, 2_000) == 326  # 50,000 images / 3 are a tenth of 326 batches of 512
    assert every(0, 20_000) is None
    assert every(1_000, 20_000, eval_steps="none") is None
    assert every(1_000, 20_000, eval_steps=7) == 7
