"""An image that is lost while a run reads it is named, and the run can continue; a damaged one is left out."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import image_kinds
from keras_vit import train
from keras_vit.train.data import sources
from keras_vit.train.probe import Probe
from keras_vit.train.stop import Stop
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
def test_an_image_lost_while_training_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    folder, recipe = fill(tmp_path / "photos"), train.recipe("digits", **RECIPE, checkpoint_steps=1, log_steps=1)
    lost = folder / "train" / "class1" / "4.jpg"
    data = sources.open_data(folder)
    assert all(map(data.training_split().is_readable, range(6)))  # all files are checked now, as in a first epoch
    cut(lost)
    with pytest.raises(ValueError, match=r"class1/4\.jpg.*cannot be read any more. Restore the file, or put") as error:
        train.run(recipe, model=tiny(), data=data, out=tmp_path / "run", progress=False)
    assert "function_node" not in str(error.value)
    lost.write_bytes(b"")  # as the message says
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one image is left out
        result = train.run(recipe, model=tiny(), data=folder, out=tmp_path / "run", progress=False)
    assert (result.steps, result.skipped) == (4, 1)


def test_an_image_lost_while_evaluating_is_named(tmp_path: Path) -> None:
    data = sources.open_data(fill(tmp_path))
    (tmp_path / "val" / "class0" / "0.jpg").unlink()
    with pytest.raises(ValueError, match=r"class0/0\.jpg.*cannot be read any more"):
        train.evaluate(built(num_classes=3), data)


def cut_one(folder: Path, kept: Path) -> tuple[Path, Path]:
    """Cut one image of each part of a folder; write the same folder without these images, too."""
    for each in (fill(folder), fill(kept)):
        for name in ("train/class1/4.jpg", "val/class0/0.jpg"):
            cut(each / name) if each == folder else (each / name).unlink()
    return folder, kept


@pytest.mark.full
def test_every_measure_leaves_a_damaged_image_out_or_refuses_it_if_asked(tmp_path: Path) -> None:
    damaged, kept = cut_one(tmp_path / "damaged", tmp_path / "kept")
    model = built(num_classes=3)
    with pytest.warns(UserWarning, match=r"val/class0/0.jpg is a damaged image: .*. Left out: 1 of 6."):
        found = train.evaluate(model, damaged, batch_size=2)
    expected = train.evaluate(model, kept, batch_size=2)
    assert (found.metrics, found.count, found.skipped, expected.skipped) == (expected.metrics, 5, 1, 0)
    with pytest.warns(UserWarning, match="Left out: 1 of 6"):
        examined = train.examine(model, damaged, batch_size=4)
    assert [Path(name).name for name in examined.images] == ["3.jpg", "1.jpg", "4.jpg", "2.jpg", "5.jpg"]
    np.testing.assert_array_equal(examined.labels, train.examine(model, kept).labels)
    with pytest.warns(UserWarning, match="Left out"):
        shots = train.few_shot(model, damaged, shots=(2,))
    with pytest.warns(UserWarning, match="classes have fewer than 2 images"):
        assert shots == train.few_shot(model, kept, shots=(2,))
    measures: tuple[Any, ...] = (train.evaluate, train.examine, train.few_shot)
    for measure in measures:
        with pytest.raises(ValueError, match=r"[40].jpg is a damaged image"):
            measure(model, damaged, on_bad_image="fail")


@pytest.mark.filterwarnings("ignore:Images of .* Left out")
@pytest.mark.full
@pytest.mark.parametrize("done", [None, 6])
def test_rows_and_labels_of_a_probe_stay_aligned(done: int | None, tmp_path: Path) -> None:
    damaged, kept = cut_one(tmp_path / "damaged", tmp_path / "kept")
    heads = []
    for folder in (damaged, kept):
        recipe = train.recipe("linear-probe", batch_size=4, checkpoint_minutes=None)
        devices, model = tf.distribute.get_strategy(), built(num_classes=3)
        probe = Probe(recipe, model, sources.open_data(folder), devices, lambda line: None)
        if done is not None and folder == damaged:  # as a run that continues after its first batch or split
            whole = Probe(recipe, model, sources.open_data(folder), devices, lambda line: None)
            whole.compute(None, Stop(), show=False)
            probe.variables["features"].assign(whole.variables["features"])
            probe.variables["done"].assign(done)
        found = probe.run(None, Stop(), show=False)
        heads.append((found.metrics, *probe.model.get_layer("head").get_weights()))
    for one, other in zip(*heads, strict=True):
        np.testing.assert_equal(one, other)


@pytest.mark.full
def test_a_folder_of_damage_is_an_error_of_every_measure(tmp_path: Path) -> None:
    folder, model = fill(tmp_path), built(num_classes=3)
    for path in folder.glob("*/*/*.jpg"):
        cut(path)
    measures: tuple[Any, ...] = (train.evaluate, train.examine, train.few_shot)
    for measure in measures:
        with pytest.raises(ValueError, match=r"None of the \d+ images .*The first: .*class0/\d.jpg is a damaged image"):
            measure(model, folder)


@pytest.mark.full
def test_a_process_ends_after_an_error_that_nobody_catches(tmp_path: Path) -> None:
    code = (
        "from keras_vit.train.data import sources\nfrom keras_vit.train.data.split import Order\n"
        "def fail():\n"
        f"    split = sources.open_data({str(fill(tmp_path))!r}).training_split()\n"
        "    stream = iter(split.examples(Order(batch=4)))\n"
        "    raise ValueError(next(stream)['position'])\n"
        "fail()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "ValueError: tf.Tensor(0" in done.stderr
