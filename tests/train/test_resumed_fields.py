"""A run continues with the settings that it began with, or says which one is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from keras_vit import digits, train, zoo
from keras_vit.errors import CheckpointError
from keras_vit.train.checkpoints import Checkpoints
from keras_vit.train.execute import MAY_DIFFER
from tiny_models import tiny

OTHER = "another value"


@pytest.fixture
def facts() -> dict[str, Any]:
    """Return what a run notes beside its variables."""
    data = {"name": "digits", "count": 9, "num_classes": 5, "fingerprint": ["a"], "arguments": {"data": "digits"}}
    return {"recipe": train.recipe("digits").to_dict(), "model": tiny().to_dict(), "data": data}


def changed(facts: dict[str, Any], group: str, name: str) -> dict[str, Any]:
    return {**facts, group: {**facts[group], name: OTHER}}


def test_each_setting_that_is_not_declared_harmless_is_refused_by_name(facts: dict[str, Any], tmp_path: Path) -> None:
    variables = {"step": tf.Variable(1)}
    saved = Checkpoints(tmp_path / "run", variables, facts=facts, may_differ=MAY_DIFFER)
    saved.save(1)
    named = {(group, name) for group in ("recipe", "model", "data") for name in facts[group]}
    assert {("recipe", "teacher_size"), ("recipe", "max_depth"), ("recipe", "head"), ("model", "labels")} <= named
    accepted = set()
    for group, name in named:
        again = Checkpoints(tmp_path / "run", variables, facts=changed(facts, group, name), may_differ=MAY_DIFFER)
        try:
            again.restore()
        except CheckpointError as error:
            assert f"{group}.{name}" in str(error) and OTHER in str(error), error
        else:
            accepted.add(f"{group}.{name}")
    assert accepted == set(MAY_DIFFER) - {"teacher.source", "start.weights"}


def test_a_setting_that_the_checkpoint_lacks_is_refused(facts: dict[str, Any], tmp_path: Path) -> None:
    variables = {"step": tf.Variable(1)}
    earlier = {**facts, "recipe": {name: value for name, value in facts["recipe"].items() if name != "head"}}
    Checkpoints(tmp_path / "run", variables, facts=earlier).save(1)
    with pytest.raises(CheckpointError, match=r"recipe\.head: \(not there\) then, null now"):
        Checkpoints(tmp_path / "run", variables, facts=facts).restore()


@pytest.mark.full
def test_other_weights_than_those_of_the_start_are_told(tmp_path: Path) -> None:
    data = digits.load()
    recipe = train.recipe("finetune-digits", steps=1, batch_size=8, xla=False)
    options: Any = {"data": {"train": (data.train_images[:40], data.train_labels[:40])}, "progress": False}
    train.run(recipe, model="digits", out=tmp_path, **options)
    with pytest.warns(UserWarning, match=r"a run that began with .*digits.* Not read: .*a model with weights"):
        train.run(recipe, model=zoo.load("digits"), out=tmp_path, **options)
