"""A training that begins with the head of a linear probe: its step 0, its folder, and what has no such head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import digits, train, zoo
from keras_vit.train import steps
from keras_vit.train.probe import Probe
from model_weights import assert_same_bits, values
from refusals import unrefused
from tiny_models import built

FIELDS: dict[str, Any] = {
    **{"steps": 2, "batch_size": 8, "image_size": 16, "xla": False, "accumulation": 1, "layers": 2},
    **{"eval_steps": 1, "crop": "none", "flip": False, "config": {}},
}


def arrays(labels: Any = None) -> dict[str, Any]:
    data = digits.load()
    if labels is not None:
        return dict.fromkeys(("train", "evaluation"), (data.train_images[:40], labels))
    return {
        "train": (data.train_images[:40], data.train_labels[:40]),
        "evaluation": (data.test_images[:20], data.test_labels[:20]),
    }


def run(out: Path | None = None, *, labels: Any = None, head_start: str = "probe", **model: Any) -> train.Result:
    recipe = train.recipe("finetune-photos", head_start=head_start, **FIELDS)
    return train.run(recipe, model=built(image_size=16, **model), data=arrays(labels), out=out)


def test_step_0_is_the_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(tmp_path)
    first, second = zoo.load(tmp_path / "probe"), whole.model
    assert first.config.feature_parts == second.config.feature_parts
    begun = [line for line in whole.history if line["step"] == 0]
    right = (
        np.argmax(first.predict_on_batch(first.preprocess(arrays()["evaluation"][0])), -1) == arrays()["evaluation"][1]
    )
    assert begun[0]["evaluation_accuracy"] == pytest.approx(right.mean())
    assert whole.best and whole.best.metrics == whole.metrics and whole.metrics["accuracy"] >= right.mean()
    assert_same_bits(values(zoo.load(tmp_path / "best.keras")), values(whole.model))
    assert "step 0 of 2: held-out accuracy" in capsys.readouterr().err
    # After each step, and once more with the last head.
    assert [line["step"] for line in whole.history if "evaluation_accuracy" in line] == [0, 1, 2, 2]


@pytest.mark.full
def test_the_last_head_is_the_mean_of_two_solved_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, changes = {"train": arrays()["train"]}, FIELDS | {"steps": 1, "learning_rate": 1e-2}
    recipe, model = train.recipe("finetune-photos", **changes), built(image_size=16)
    with monkeypatch.context() as patch:  # a signal while the head is solved again
        compute, calls = Probe.compute, iter((True, False))
        patch.setattr(Probe, "compute", lambda *a, **k: compute(*a, **k) if next(calls) else None)
        assert train.run(recipe, model=model, data=data, out=tmp_path).stopped
    assert not (tmp_path / "model.keras").exists()
    trained = train.run(recipe, model=model, data=data, out=tmp_path).model
    again = train.run("linear-probe", model=trained, data=data, changes={"layers": 1, "image_size": 16}).model
    heads = [one.get_layer("head").get_weights() for one in (zoo.load(tmp_path / "probe"), again, trained)]
    for first, second, last in zip(*heads, strict=True):
        assert np.abs(first - second).max() > 1e-3  # training moved the features
        np.testing.assert_allclose(last, (first + second) / 2, atol=1e-6)  # beside float32's rounding
    capsys.readouterr()
    train.run(recipe.replace(freeze=[]), model=model, data=data)  # this head is trained
    assert "the head becomes" not in capsys.readouterr().err


@pytest.mark.full
def test_the_log_of_a_run_stopped_in_its_last_solve_ends_with_the_last_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        compute, calls = Probe.compute, iter((True, False))
        patch.setattr(Probe, "compute", lambda *a, **k: compute(*a, **k) if next(calls) else None)
        assert run(tmp_path).stopped
    kept = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    result = run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[:-1] == kept and lines[-1] == result.history[-1]


@pytest.mark.full
def test_a_killed_run_goes_on_from_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*arguments: Any, **options: Any) -> Any:
        raise SystemExit

    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(steps, "train", killed)
        with pytest.raises(SystemExit):
            run(tmp_path / "killed")
    assert_same_bits(values(run(tmp_path / "killed").model), values(whole.model))
    assert "Computing features" not in capsys.readouterr().err.rpartition("continues after")[2]
    again = run(tmp_path / "whole")  # finished
    assert_same_bits(values(again.model), values(whole.model))
    assert again.metrics == whole.metrics
    assert again.history == []  # its log has them


def test_a_training_is_checked_before_its_probe(tmp_path: Path) -> None:
    recipe = train.recipe("finetune-photos", **FIELDS, freeze=["block_7"])
    with pytest.raises(ValueError, match="block_7"):
        train.run(recipe, model=built(image_size=16), data=arrays(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_has_no_probe_is_refused() -> None:
    several = np.eye(10, dtype=np.uint8)[np.arange(40) % 10]
    cases = [
        ({"labels": several}, "one class for each image. Without one: optimizer='sgd'"),
        ({"distilled": True}, "two heads has no single linear probe. Without one: optimizer='sgd'"),
        ({"head_start": "zeros"}, "The head begins with zeros and is not trained"),  # freeze has it
    ]
    assert not unrefused(run, cases)
