"""An image that is cut or deleted while a run reads it is named by the error, and the run can continue."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import image_kinds
from keras_vit import train
from keras_vit.train.data import sources
from tiny_models import built, tiny

RECIPE: dict[str, Any] = {"steps": 4, "batch_size": 4, "image_size": 16, "xla": False, "warmup_fraction": 0.0}


def fill(folder: Path) -> Path:
    """Write a folder with a training and an evaluation image folder, five photos each."""
    for name in ("train", "val"):
        for number in range(6):
            path = folder / name / f"class{number % 3}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image_kinds.encoded(image_kinds.photo(30, 20, number), "JPEG"))
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.full
@pytest.mark.parametrize("harm", [cut, Path.unlink], ids=["cut", "deleted"])
def test_an_image_lost_while_training_is_named_and_the_run_goes_on(harm: Any, tmp_path: Path) -> None:
    folder, recipe = fill(tmp_path / "photos"), train.recipe("digits", **RECIPE, checkpoint_steps=1, log_steps=1)
    lost = folder / "train" / "class1" / "4.jpg"
    data = sources.open_data(folder)
    assert data.train is not None and not data.train.bad  # all files are checked now, as at the start of a run
    harm(lost)
    with pytest.raises(
        ValueError, match=r"class1/4\.jpg.*cannot be decoded any more. Restore the file, or put"
    ) as error:
        train.run(recipe, model=tiny(), data=data, out=tmp_path / "run", progress=False)
    assert "function_node" not in str(error.value)
    lost.write_bytes(b"")  # as the message says
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one image is left out
        result = train.run(recipe, model=tiny(), data=folder, out=tmp_path / "run", progress=False)
    assert (result.steps, result.skipped) == (4, 1)


def test_an_image_lost_while_evaluating_is_named(tmp_path: Path) -> None:
    data = sources.open_data(fill(tmp_path))
    assert data.evaluation is not None and not data.evaluation.bad
    (tmp_path / "val" / "class0" / "0.jpg").unlink()
    with pytest.raises(ValueError, match=r"class0/0\.jpg.*cannot be decoded any more"):
        train.evaluate(built(num_classes=3), data)
