"""What decides whether a file computes what its model does: cosines, differences between images, near ties."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import outlier_models
from keras_vit import digits, export, train
from keras_vit.export import verification as measures
from keras_vit.export.modes import Mode, load_mode, mode_names
from keras_vit.export.verification import check_thresholds
from keras_vit.model.task import Classification
from test_outliers import LEAST
from test_verify import compared

TASK = Classification(num_classes=5)


def logits(images: int = 80, classes: int = 5, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(images, classes)).astype(np.float32)


def errors(like: np.ndarray) -> np.ndarray:
    """Return errors of the same size, -1 or 1."""
    return np.random.default_rng(9).choice([-1, 1], size=like.shape)


# ---- the cosine of differences


@pytest.mark.parametrize("shape", [(2, 5), (12, 10), (30, 4, 7)])
def test_the_cosine_of_differences_is_the_mean_over_pairs(shape: tuple[int, ...]) -> None:
    want, noise = np.random.default_rng(0).normal(size=(2, *shape))
    got = want + 0.3 * noise
    expected = outlier_models.score(want.reshape(len(want), -1), got.reshape(len(want), -1))
    # No pair of these is below a tenth of the root mean square difference.
    assert measures.difference_cosine(want, got) == pytest.approx(expected, abs=1e-12)


def test_what_all_images_share_does_not_flatter() -> None:
    want, got = logits(), logits(seed=1)
    assert measures.image_cosines(want + 1000, got + 1000).min() > 0.9999
    assert measures.difference_cosine(want + 1000, got + 1000) == pytest.approx(
        measures.difference_cosine(want, got), abs=1e-4
    )
    assert abs(measures.difference_cosine(want, got)) < 0.1


def test_equal_outputs_have_a_cosine_of_one() -> None:
    want = logits()
    assert measures.difference_cosine(want, want) == 1
    twice = np.concatenate([want, want])  # every image is there a second time
    assert measures.difference_cosine(twice, twice) == 1
    assert measures.difference_cosine(twice, twice + 1e-3 * logits(160, seed=1)) > 0.999


@pytest.mark.parametrize("want", [logits(1), np.zeros((8, 5)), np.full((8, 5), 3.3), np.repeat(logits(1), 8, axis=0)])
def test_images_that_the_model_does_not_distinguish_have_no_cosine(want: np.ndarray) -> None:
    assert measures.difference_cosine(want, want + 1e-7 * logits(len(want), seed=1)) is None


def test_a_file_that_gives_the_same_for_all_images_is_wrong() -> None:
    assert measures.difference_cosine(logits() + 30, np.full((80, 5), 30.3)) == pytest.approx(0, abs=1e-6)


def test_pairs_that_the_model_hardly_distinguishes_do_not_count() -> None:
    want = np.concatenate(
        [logits(10), np.repeat(logits(1), 10, axis=0) + 1e-3 * logits(10, seed=1)]
    )  # ten photos of one sky
    got = want + 0.02 * errors(want)
    assert outlier_models.score(want, got) < 0.8
    assert measures.difference_cosine(want, got) > 0.998


def test_thousands_of_images_take_little_memory() -> None:
    want = logits(20_001, 10)
    got = want + 0.1 * errors(want)
    # The cosine of two normal vectors with a tenth of noise.
    assert measures.difference_cosine(want, got) == pytest.approx(1 / np.sqrt(1.01), abs=1e-3)


# ---- near ties


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.6, 5.0])
@pytest.mark.parametrize(("margin", "decided"), [(0.05, 1.0), (0.2, 79 / 80), (1.5, 79 / 80)])
def test_a_changed_class_counts_where_the_models_margin_is_large(margin: float, decided: float, noise: float) -> None:
    want = logits()
    want[1:, 0] += 20  # no other image changes its class
    want -= want.mean(axis=1, keepdims=True)
    want /= want.std()
    want[0] = [2, 2 - margin, 0, 0, 0]
    got = want + 0.1 * noise * errors(want)  # however large the file's errors on other images are
    got[0] = [2 - margin, 2, 0, 0, 0]
    report = compared({"logits": want}, {"logits": got})
    assert (report.agreement, report.decided_agreement) == (79 / 80, decided)
    assert (", 100.00% with near ties" in str(report)) == (decided == 1)
    # The same model and file with probabilities: only their ratios are known.
    both = [np.exp(values) / np.exp(values).sum(axis=-1, keepdims=True) for values in (want, got)]
    assert compared(*({"probabilities": values} for values in both)).decided_agreement == decided


def test_the_margin_is_that_of_the_class_which_the_file_chooses() -> None:
    want = np.tile([2.0, 1.99, 0, 0, 0], (80, 1))
    got = want + 0.01 * errors(want)
    got[0] = [2, 1.99, 3, 0, 0]  # a third class, although the first two are close
    assert not TASK.agreement("logits", want, got)[1][0]


@pytest.mark.parametrize("count", [1, 2, 80])
def test_a_file_that_is_wrong_everywhere_does_not_excuse_itself(count: int) -> None:
    want = logits(count)
    assert TASK.agreement("logits", want, -want)[1].mean() <= 0.1
    shuffled = want[:, ::-1] + 5 * logits(count, seed=1)
    assert TASK.agreement("logits", want, shuffled)[1].mean() < 0.5 or count < 80


# ---- thresholds


def report(**values: float) -> export.Report:
    given = {"cosine": 1.0, "difference_cosine": 1.0, "agreement": 1.0, "decided_agreement": 1.0, **values}
    return export.Report(path=Path("f"), bytes=1, images=80, max_error=0, sqnr=40, milliseconds=1, **given)


def refused(mode: Mode, **values: float) -> str:
    with pytest.raises(export.VerificationError) as caught:
        check_thresholds(report(**values), mode, has_classes=True)
    return str(caught.value)


ACCEPT = "; or accept it with "
AGAIN = "export it again with quantize='float16'"
CALIBRATED = (
    "export it again with a hundred typical images, calibration=model.preprocess(...) (--images FOLDER), or "
    "quantize='float16'"
)


@pytest.mark.parametrize(
    ("mode", "values", "wanted", "steps"),
    [
        ("dynamic", {"decided_agreement": 0.975}, "agreement >= 0.9875", f"{CALIBRATED}{ACCEPT}least_agreement=0.975"),
        ("int8", {"difference_cosine": 0.941}, "difference_cosine >= 0.95", f"{CALIBRATED}{ACCEPT}least_cosine=0.941"),
        ("dynamic", {"cosine": 0.2}, "cosine >= 0.995", CALIBRATED),
        (
            "int4",
            {"cosine": 0.97, "difference_cosine": 0.9, "decided_agreement": 0.91},
            "cosine >= 0.98 and difference_cosine >= 0.92 and agreement >= 0.9125",
            f"{CALIBRATED}{ACCEPT}least_cosine=0.9 and least_agreement=0.91",
        ),
        ("none", {"cosine": 0.99}, "cosine >= 0.99999", "accept it with least_cosine=0.99"),
        ("float16", {"difference_cosine": 0.1}, "difference_cosine >= 0.999", "write the damaged file again"),
    ],
)
def test_a_refusal_names_the_next_step(mode: str, values: dict[str, float], wanted: str, steps: str) -> None:
    message = refused(load_mode(mode), **values)
    assert re.search(r"wanted (.*?)\. on 80 images", message)[1] == wanted
    assert message.partition("What to do: ")[2] == steps


def test_a_mode_without_calibration_does_not_name_it() -> None:
    mine = Mode(name="mine", summary="", devices="", least_cosine=1.0, least_agreement=0.0, storage="int8")
    assert refused(mine, cosine=0.9999).endswith(f"{AGAIN}{ACCEPT}least_cosine=0.9999")


def test_a_given_cosine_holds_for_differences_too() -> None:
    with pytest.raises(export.VerificationError):
        check_thresholds(report(difference_cosine=0.6), load_mode("dynamic"), has_classes=True)
    check_thresholds(report(difference_cosine=0.6), load_mode("dynamic"), has_classes=True, cosine=0.5)


def test_a_single_bad_image_is_no_refusal() -> None:
    check_thresholds(report(cosine=0.3, mean_cosine=0.9999), load_mode("dynamic"), has_classes=True)
    assert "cosine >= 0.995" in refused(load_mode("dynamic"), cosine=0.3, mean_cosine=0.99)


def test_a_file_of_a_mode_that_was_not_given_may_be_of_another_model() -> None:
    with pytest.raises(export.VerificationError, match="do: check that the file is of this model, with these weights$"):
        check_thresholds(report(cosine=-1), load_mode("none"), has_classes=True, is_detected=True)


def test_agreement_on_few_classes_excuses_a_quantized_file_down_to_a_cosine_of_09() -> None:
    def check(
        mode: str, *, num_classes: int = 4, images: int = 80, given: dict[str, float] | None = None, **changes: float
    ):
        values = {"cosine": 0.3, "mean_cosine": 0.91, **changes}
        case = dataclasses.replace(report(**values), images=images)
        check_thresholds(case, load_mode(mode), has_classes=True, num_classes=num_classes, **(given or {}))

    for mode in ("dynamic", "int8", "int4", "int16x8"):
        check(mode)
        refusals: list[dict[str, Any]] = [
            {"mean_cosine": 0.89},
            {"difference_cosine": 0.91},
            {"decided_agreement": 0.9},
            {"num_classes": 10},
            {"images": 15},
            {"given": {"cosine": 0.95}},
            {"given": {"agreement": 0.0}},  # nothing would decide
        ]
        for changes in refusals:
            with pytest.raises(export.VerificationError):
                check(mode, **changes)
    for mode in ("none", "float16"):
        with pytest.raises(export.VerificationError, match="wanted cosine"):
            check(mode)


@pytest.mark.parametrize(
    ("mode", "images", "allowed"), [("dynamic", 36, 1), ("dynamic", 200, 2), ("int4", 36, 3), ("float16", 36, 0)]
)
def test_quantized_files_of_few_images_may_change_one(mode: str, images: int, allowed: int) -> None:
    def changed(count: int, **given: float) -> None:
        case = dataclasses.replace(report(decided_agreement=1 - count / images), images=images)
        check_thresholds(case, load_mode(mode), has_classes=True, **given)

    changed(allowed)
    with pytest.raises(export.VerificationError):
        changed(allowed + 1)
    with pytest.raises(export.VerificationError):
        changed(1, agreement=0.999)  # a given share is not rounded


def test_no_difference_between_images_is_no_refusal() -> None:
    check_thresholds(report(difference_cosine=None), load_mode("none"), has_classes=True)


@pytest.mark.parametrize("name", mode_names())
def test_thresholds_of_differences_allow_outliers_and_refuse_other_models(name: str) -> None:
    mode = load_mode(name)
    assert 0.9 <= mode.least_difference_cosine < LEAST.get(name, 1.0)
    assert mode.least_difference_cosine < mode.least_cosine


@pytest.mark.full
@pytest.mark.parametrize(("size", "seed"), [(48, 1), (48, 2)])
def test_a_model_fine_tuned_on_a_folder_is_exported_by_default(tmp_path: Path, size: int, seed: int) -> None:
    """Of seven such models two to four were refused, each for one near tie among the 80 held-out images."""
    data, folder = digits.load(), tmp_path / "five"
    parts = {"train": (data.train_images, data.train_labels, 40), "val": (data.test_images, data.test_labels, 16)}
    for split, (images, labels, count) in parts.items():
        for label in range(5):
            (folder / split / f"digit {label}").mkdir(parents=True)
            for number, image in enumerate(images[labels == label][:count]):
                Image.fromarray(image).save(folder / split / f"digit {label}" / f"{number}.png")
    recipe = train.recipe("finetune-photos", epochs=6, xla=False, seed=seed, image_size=size)
    model = train.run(recipe, model="digits", data=folder, out=tmp_path / "run").model
    held_out = sorted(map(str, (folder / "val").rglob("*.png")))
    assert export.tflite(model, tmp_path / "five.tflite", verify=held_out).images == 80
