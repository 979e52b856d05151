"""Classes and images that are added to a finished linear probe, without the images that it was trained on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import Ridge

from command_line import fails, run
from keras_vit import digits, train, zoo
from keras_vit.errors import CheckpointError
from keras_vit.train import least_squares, probe
from keras_vit.train.checkpoints import SOLVED_PROBE
from keras_vit.train.least_squares import BIAS, MIN_DEVIATION
from keras_vit.train.solved_probe import SolvedProbe
from marks import full_except
from refusals import unrefused
from tiny_models import tiny

NAMES = [f"digit {number}" for number in range(10)]
OLD, RECIPE = 8, {"layers": 1}
TRAINED, HELD_OUT = 100, 60


def part(rows: np.ndarray, names: list[str], count: int = TRAINED) -> dict[str, Any]:
    """Arrays of some of the digits' training images, and of the held-out ones of their classes."""
    data = digits.load()
    labels, held = data.train_labels[:count], data.test_labels[:HELD_OUT]
    numbers = np.full(10, -1)
    numbers[[NAMES.index(name) for name in names]] = np.arange(len(names))
    seen = numbers[held] >= 0
    return {
        "train": (data.train_images[:count][rows], numbers[labels[rows]]),
        "evaluation": (data.test_images[:HELD_OUT][seen], numbers[held[seen]]),
        "class_names": names,
    }


def divided(count: int = TRAINED) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """All images; those of the first run, of old classes; those that are added: of new classes, and of an old one."""
    labels = digits.load().train_labels[:count]
    first = np.flatnonzero((labels < OLD) & ((labels != 3) | (np.arange(count) % 2 == 0)))
    others = np.setdiff1d(np.arange(count), first)
    added = part(others, ["digit 9", "digit 3", "digit 8"], count)  # in another order
    return part(np.arange(count), [*NAMES[:OLD], "digit 9", "digit 8"], count), part(first, NAMES[:OLD], count), added


def fit(data: dict[str, Any], out: Path | None = None, model: Any = "digits", **changes: Any) -> train.Result:
    recipe = train.recipe("linear-probe", **RECIPE | changes)
    return train.run(recipe, model=model, data=data, out=out, progress=False)


@pytest.mark.parametrize("keeps_sums", full_except([True], [False, True]))
def test_the_weights_are_those_of_a_probe_of_all_images(
    keeps_sums: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The probe of all images takes the same strength and the same scale.
    monkeypatch.setattr(least_squares, "STRENGTHS", (2.0**-4,))
    monkeypatch.setattr(least_squares, "MIDDLE", 0)
    monkeypatch.setattr(least_squares, "SCALES", (8.0,))
    monkeypatch.setattr(least_squares, "STEPS", 1)
    model: Any = "digits"
    changes: dict[str, Any] = {"start": "scratch"} if keeps_sums else {"layers": 8}
    monkeypatch.setattr(probe, "_numbers_of_blocks", lambda recipe, config: [1])  # of those that are computed
    if keeps_sums:
        model = tiny(image_size=8, num_layers=1)
        monkeypatch.setattr(probe, "MOST_FOLDED", 0)
    whole, first, added = divided()
    result = fit(first, tmp_path / "first", model, **changes)
    assert ("sums" in SolvedProbe.read(str(tmp_path / "first")).equations) == keeps_sums
    found = train.add_classes(tmp_path / "first", added, out=tmp_path / "second", progress=False)
    wanted = fit(whole, None, model, **changes)
    assert found.model.config == wanted.model.config
    for theirs, ours in zip(wanted.model.get_weights(), found.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    assert found.temperature == result.temperature == 1 / 8
    # scikit-learn: the constant feature for the bias is a column of its own
    features = wanted.model.features(wanted.model.preprocess(whole["train"][0]))["pre_logits"].numpy()
    mean, deviation = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64) + MIN_DEVIATION
    columns = np.pad((features - mean) / deviation, ((0, 0), (0, 1)), constant_values=BIAS)
    targets = 2.0 * np.eye(10)[whole["train"][1]] - 1
    ridge = Ridge(alpha=2.0**-4 * len(columns), fit_intercept=False).fit(columns, targets)
    kernel = 8 * ridge.coef_[:, :-1].T / deviation[:, None]
    ours = found.model.get_layer("head").get_weights()
    np.testing.assert_allclose(ours[0], kernel, rtol=1e-5, atol=1e-5 * np.abs(kernel).max())
    bias = 8 * BIAS * ridge.coef_[:, -1] - mean @ kernel
    np.testing.assert_allclose(ours[1], bias, rtol=1e-5, atol=1e-5 * np.abs(bias).max())


@pytest.mark.full
def test_the_comparison_is_that_of_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, first, added = divided()
    before = fit(first, tmp_path / "first").model
    files = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir() if path.is_file()}
    found = train.add_classes(tmp_path / "first", added, out=tmp_path / "second")
    saved = zoo.load(tmp_path / "second")
    old = part(np.arange(TRAINED), NAMES[:OLD])["evaluation"]
    # The held-out images of the old class "digit 3" are in both data.
    twice = part(np.arange(TRAINED), ["digit 3"])["evaluation"]
    old = np.concatenate([old[0], twice[0]]), np.concatenate([old[1], twice[1] + 3])
    new = part(np.arange(TRAINED), ["digit 9", "digit 8"])["evaluation"]
    names = {"class_names": NAMES[:OLD]}
    assert found.metrics == {
        "old_classes_before": pytest.approx(train.evaluate(before, {"evaluation": old, **names}).top1),
        "old_classes": pytest.approx(train.evaluate(saved, {"evaluation": old, **names}).top1),
        "new_classes": pytest.approx(
            train.evaluate(saved, {"evaluation": new, "class_names": ["digit 9", "digit 8"]}).top1
        ),
    }
    assert found.metrics["new_classes"] > 0.5  # about twenty pictures, of chance 0.1
    assert {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir() if path.is_file()} == files
    said = capsys.readouterr().err
    assert f"{len(added['train'][1])} images added, new classes: digit 9, digit 8; 10 classes. Held out: " in said
    assert f"Held out: {len(old[1])} images of old classes, {len(new[1])} of new ones. The temperature is as be" in said


def test_a_class_is_taken_out_again(tmp_path: Path) -> None:
    _, first, added = divided()
    fit(first, tmp_path / "first")
    train.add_classes(tmp_path / "first", added, out=tmp_path / "second", progress=False)
    out = ["digit 9", "digit 8", "digit 0"]
    found = train.add_classes(tmp_path / "second", without=out, progress=False)
    threes: dict[str, Any] = {"class_names": ["digit 3"]}
    for split in ("train", "evaluation"):
        images, labels = added[split]
        threes[split] = images[labels == 1], 0 * labels[labels == 1]
    wanted = train.add_classes(tmp_path / "first", threes, without=["digit 0"], progress=False)
    assert found.model.config == wanted.model.config and found.model.config.labels == tuple(NAMES[1:OLD])
    for theirs, ours in zip(wanted.model.get_weights(), found.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert found.metrics["old_classes"] == wanted.metrics["old_classes"] and "new_classes" not in found.metrics


@pytest.mark.full
def test_images_that_the_run_has_already_are_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    _, first, added = divided()
    fit(first, tmp_path / "first")
    train.add_classes(tmp_path / "first", added, progress=False)
    assert not [str(one.message) for one in recwarn if "in the run already" in str(one.message)]
    images, labels = added["train"]
    again = {**added, "train": (np.concatenate([images, first["train"][0][:7]]), np.append(labels, [1] * 7))}
    with pytest.warns(UserWarning, match=f"7 of {len(images) + 7} images to add are in the run already"):
        train.add_classes(tmp_path / "first", again, progress=False)


@pytest.mark.full
def test_many_images_become_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first, added = divided(300)
    fit(first, tmp_path / "first")
    kept = train.add_classes(tmp_path / "first", added, progress=False).model
    monkeypatch.setattr(least_squares, "MOST_FOLDED", 0)
    found = train.add_classes(tmp_path / "first", added, out=tmp_path / "second", progress=False).model
    assert "sums" in SolvedProbe.read(str(tmp_path / "second")).equations
    for theirs, ours in zip(kept.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    with pytest.raises(ValueError, match="kept sums over the images of all classes"):
        train.add_classes(tmp_path / "second", without=["digit 9"], progress=False)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, first, added = divided(60)
    folder, empty = tmp_path / "first", tmp_path / "empty"
    empty.mkdir()
    fit(first, folder)
    model = zoo.load(folder)

    def changed(name: str, other: Any = None) -> Path:
        shutil.copytree(folder, tmp_path / name)
        if other is not None:
            other.save(tmp_path / name / "model.keras")
        return tmp_path / name

    resized = changed("resized", model.resized(image_size=64))
    other_head = model.with_config(model.config)
    other_head.get_layer("head").bias.assign_add(np.ones(OLD))
    weights = changed("weights", other_head)
    damaged = changed("damaged")
    (damaged / "probe.npz").write_bytes((folder / "probe.npz").read_bytes()[:2000])

    def add(place: Path = folder, data: Any = added, **options: Any) -> None:
        train.add_classes(place, data, progress=False, **options)

    no_image = {"train": (added["train"][0][:1], np.zeros(1, int)), "class_names": ["digit 3", "digit 8"]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": None}, "Give data to add, or classes to take out"),
        ({"data": {"train": added["train"]}}, "need class_names"),
        ({"data": no_image}, "these have none: digit 8"),
        (
            {"data": {**added, "class_names": ["digit 9", "Digit 3", "digit 8"]}},
            "has a class 'digit 3'. If 'Digit 3' is",
        ),
        ({"without": ["digit 77"]}, "without must be a list of classes of the run"),
        ({"without": ["digit 3"]}, "that the data do not have"),
        ({"data": None, "without": NAMES[1:OLD]}, "at least two classes"),
    ]
    assert not unrefused(add, cases)
    with pytest.raises(CheckpointError, match=r"image_size: .* then, .* now"):
        add(resized)
    with pytest.raises(CheckpointError, match="is not of the model beside it: weights"):
        add(weights)
    with pytest.raises(CheckpointError, match=r"probe.npz is damaged"):
        add(damaged)
    with pytest.raises(FileExistsError, match="of another run"):
        add(out=folder)
    with pytest.raises(FileNotFoundError, match="start the command of the run again"):
        add(empty)
    assert not any(empty.iterdir())


@pytest.mark.full
def test_a_run_without_the_file_writes_it_when_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first, added = divided(60)
    fit(first, tmp_path)
    (tmp_path / "probe.npz").unlink()
    with pytest.raises(FileNotFoundError, match="which computes no feature again"):
        train.add_classes(tmp_path, added, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(probe, "in_thread", lambda *_: pytest.fail("a feature is computed again"))
        fit(first, tmp_path)
    assert train.add_classes(tmp_path, added, progress=False).metrics["new_classes"] > 0.5


def test_a_probe_of_weighted_classes_keeps_nothing(tmp_path: Path) -> None:
    fit(divided(60)[1], tmp_path, class_weights="balanced")
    with pytest.raises(FileNotFoundError, match="A linear probe without class_weights writes it"):
        train.add_classes(tmp_path, divided(60)[2], progress=False)
    assert not (tmp_path / SOLVED_PROBE).exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.full
def test_the_command_compares_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From folders, of which the new one has a single class."""
    data = digits.load()
    for place, count, skipped in (("old", 60, (8, 9)), ("new", 300, tuple(range(9)))):
        for number in range(count):
            if (label := int(data.train_labels[number])) not in skipped:
                folder = tmp_path / place / ("eight" if label == 8 else f"digit {label}")
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(data.train_images[number]).save(folder / f"{number}.png")
    first, second = tmp_path / "first", tmp_path / "second"
    train.run(train.recipe("linear-probe", **RECIPE), model="digits", data=tmp_path / "old", out=first, progress=False)
    arguments = ["train", "--add-to", str(first), "--data", str(tmp_path / "new")]
    said = run(*arguments, "--out", str(second))
    assert re.search(
        r"second/model.keras after 1 step: old_classes_before [01]\.\d{4}, old_classes [01]\.\d{4}, "
        r"new_classes [01]\.\d{4}, temperature",
        said,
    )
    assert zoo.load(second).config.labels[-1] == "digit 9"
    figures = json.loads(run(*arguments, "--json"))
    assert figures["out"] == f"{first}-added" and 0 <= figures["metrics"]["new_classes"] <= 1
    for wrong in ("--image-size", "--try"):
        value = "64" if wrong == "--image-size" else "layers=1,2"
        assert f"Received: {wrong}" in fails(monkeypatch, *arguments, wrong, value)
    assert "Received: --without" in fails(monkeypatch, "train", "--without", "eight")
