"""A training that begins with the head of a linear probe: its step 0, its folder, and what has no such head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import digits, train, zoo
from keras_vit.train import _run
from model_weights import assert_same_bits, values
from tiny_models import built

FIELDS: dict[str, Any] = {
    **{"steps": 2, "batch_size": 8, "image_size": 16, "xla": False, "accumulation": 1, "layers": 2},
    **{"eval_steps": 1, "crop": "none", "flip": False, "config": {}},
}


def run(out: Path | None = None, *, labels: Any = None, **model: Any) -> train.Result:
    data = digits.load()
    own = data.train_labels[:40] if labels is None else labels
    arrays = {"train": (data.train_images[:40], own), "evaluation": (data.test_images[:20], data.test_labels[:20])}
    if labels is not None:
        arrays["evaluation"] = arrays["train"]
    recipe = train.recipe("finetune-photos", **FIELDS)
    return train.run(recipe, model=built(image_size=16, **model), data=arrays, out=out)


def test_step_0_is_the_probe_and_a_killed_run_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*arguments: Any, **options: Any) -> Any:
        raise SystemExit

    whole = run(tmp_path / "whole")
    first, second = zoo.load(tmp_path / "whole" / "probe"), whole.model
    assert first.config.feature_parts == second.config.feature_parts
    begun = [line for line in whole.history if line["step"] == 0]
    held_out = digits.load().test_images[:20], digits.load().test_labels[:20]
    measured = train.evaluate(first, {"evaluation": held_out})
    assert begun[0]["evaluation_accuracy"] == pytest.approx(measured.top1)
    assert whole.best and whole.best.metrics["accuracy"] >= measured.top1
    assert "step 0 of 2: held-out accuracy" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(_run, "train", killed)
        with pytest.raises(SystemExit):
            run(tmp_path / "killed")
    assert_same_bits(values(run(tmp_path / "killed").model), values(whole.model))
    assert "Computing features" not in capsys.readouterr().err.rpartition("continues after")[2]
    again = run(tmp_path / "whole")  # finished
    assert_same_bits(values(again.model), values(whole.model))
    assert again.metrics == whole.metrics


def test_without_a_probe_the_head_begins_with_zeros_and_a_line_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        ({"labels": np.eye(10, dtype=np.uint8)[np.arange(40) % 10]}, "needs one class for each image"),
        ({"distilled": True}, "two heads"),
    ):
        result = run(**options)
        said = capsys.readouterr().err
        assert "The head begins with zeros" in said and words in said
        assert result.steps == 2
