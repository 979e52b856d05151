"""What decides whether a file computes what its model does: cosines, differences between images, near ties."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import export
from keras_vit.export import verification as measures
from keras_vit.export.modes import Mode, load_mode, mode_names
from keras_vit.export.verification import check_thresholds
from keras_vit.model.task import Classification

TASK = Classification(num_classes=5)


def logits(images: int = 80, classes: int = 5, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(images, classes)).astype(np.float32)


def errors(like: np.ndarray) -> np.ndarray:
    """Return errors of the same size, -1 or 1."""
    return np.random.default_rng(9).choice([-1, 1], size=like.shape)


# ---- the cosine of differences


def pair_cosine(want: np.ndarray, got: np.ndarray) -> float:
    """Return the mean cosine of the differences between two images, over all pairs of images."""
    pairs = [(a, b) for a in range(len(want)) for b in range(a)]
    first, second = (np.stack([values[a] - values[b] for a, b in pairs]) for values in (want, got))
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return float(np.mean((first * second).sum(axis=1) / lengths))


def test_the_cosine_of_differences_is_the_mean_over_pairs() -> None:
    for shape in ((2, 5), (12, 10), (30, 4, 7)):
        want, noise = np.random.default_rng(0).normal(size=(2, *shape))
        got = want + 0.3 * noise
        expected = pair_cosine(want.reshape(len(want), -1), got.reshape(len(want), -1))
        # No pair of these is below a tenth of the root mean square difference.
        assert measures.difference_cosine(want, got) == pytest.approx(expected, abs=1e-12)
    many = logits(20_001, 10)  # of which all pairs would not fit into memory
    # The cosine of two normal vectors with a tenth of noise.
    assert measures.difference_cosine(many, many + 0.1 * errors(many)) == pytest.approx(1 / np.sqrt(1.01), abs=1e-3)


def test_what_all_images_share_does_not_flatter() -> None:
    want, got = logits(), logits(seed=1)
    assert measures.image_cosines(want + 1000, got + 1000).min() > 0.9999
    assert measures.difference_cosine(want + 1000, got + 1000) == pytest.approx(
        measures.difference_cosine(want, got), abs=1e-4
    )
    assert abs(measures.difference_cosine(want, got)) < 0.1


def test_equal_outputs_have_a_cosine_of_one_and_images_that_are_all_alike_none() -> None:
    want = logits()
    assert measures.difference_cosine(want, want) == 1
    twice = np.concatenate([want, want])  # every image is there a second time
    assert measures.difference_cosine(twice, twice) == 1
    assert measures.difference_cosine(twice, twice + 1e-3 * logits(160, seed=1)) > 0.999
    assert measures.difference_cosine(want + 30, np.full((80, 5), 30.3)) == pytest.approx(0, abs=1e-6)
    for alike in (logits(1), np.zeros((8, 5)), np.full((8, 5), 3.3), np.repeat(logits(1), 8, axis=0)):
        assert measures.difference_cosine(alike, alike + 1e-7 * logits(len(alike), seed=1)) is None


def test_pairs_that_the_model_hardly_distinguishes_do_not_count() -> None:
    sky = np.repeat(logits(1), 10, axis=0) + 1e-3 * logits(10, seed=1)  # ten photos of it
    want = np.concatenate([logits(10), sky])
    got = want + 0.02 * errors(want)
    assert pair_cosine(want, got) < 0.8
    assert measures.difference_cosine(want, got) > 0.998


# ---- near ties


@pytest.mark.parametrize(("margin", "decided"), [(0.05, 1.0), (0.2, 79 / 80), (1.5, 79 / 80)])
def test_a_changed_class_counts_where_the_models_margin_is_large(margin: float, decided: float) -> None:
    for noise in (0.0, 0.6, 5.0):
        want = logits()
        want[1:, 0] += 20  # no other image changes its class
        want -= want.mean(axis=1, keepdims=True)
        want /= want.std()
        want[0] = [2, 2 - margin, 0, 0, 0]
        got = want + 0.1 * noise * errors(want)  # however large the file's errors on other images are
        got[0] = [2 - margin, 2, 0, 0, 0]
        figures = measures.compare(TASK, {"logits": want}, {"logits": got})
        assert (figures["agreement"], figures["decided_agreement"]) == (79 / 80, decided)
        # The same model and file with probabilities: only their ratios are known.
        both = [np.exp(values) / np.exp(values).sum(axis=-1, keepdims=True) for values in (want, got)]
        figures = measures.compare(TASK, *({"probabilities": values} for values in both))
        assert figures["decided_agreement"] == decided


def test_the_margin_is_that_of_the_class_which_the_file_chooses_and_wrong_files_are_not_excused() -> None:
    want = np.tile([2.0, 1.99, 0, 0, 0], (80, 1))
    got = want + 0.01 * errors(want)
    got[0] = [2, 1.99, 3, 0, 0]  # a third class, although the first two are close
    assert not TASK.agreement("logits", want, got)[1][0]
    for count in (1, 2, 80):
        assert TASK.agreement("logits", logits(count), -logits(count))[1].mean() <= 0.1
    shuffled = logits()[:, ::-1] + 5 * logits(seed=1)
    assert TASK.agreement("logits", logits(), shuffled)[1].mean() < 0.5


# ---- thresholds


def report(**values: float) -> export.Report:
    given = {"cosine": 1.0, "difference_cosine": 1.0, "agreement": 1.0, "decided_agreement": 1.0, **values}
    return export.Report(path=Path("f"), bytes=1, images=80, max_error=0, sqnr=100, milliseconds=1, **given)


def refused(mode: Mode, **values: float) -> str:
    with pytest.raises(export.VerificationError) as caught:
        check_thresholds(report(**values), mode, has_classes=True)
    return str(caught.value)


def test_a_refusal_names_what_was_wanted_and_the_next_step() -> None:
    cases: list[tuple[str, dict[str, float], str, str]] = [
        ("dynamic", {"decided_agreement": 0.975}, "agreement >= 0.9875", "least_agreement=0.975"),
        ("int8", {"difference_cosine": 0.941}, "difference_cosine >= 0.95", "calibration=model.preprocess(...)"),
        ("dynamic", {"cosine": 0.2}, "cosine >= 0.995", "quantize='float16'"),
        (
            "int4",
            {"cosine": 0.97, "difference_cosine": 0.9, "decided_agreement": 0.91},
            "cosine >= 0.98 and difference_cosine >= 0.92 and agreement >= 0.9125",
            "least_cosine=0.9 and least_agreement=0.91",
        ),
        ("none", {"cosine": 0.99}, "cosine >= 0.99999", "accept it with least_cosine=0.99"),
        ("float16", {"difference_cosine": 0.1}, "difference_cosine >= 0.999", "write the damaged file again"),
    ]
    for mode, values, wanted, step in cases:
        message = refused(load_mode(mode), **values)
        assert re.search(r"wanted (.*?)\. on 80 images", message)[1] == wanted  # type: ignore[index]
        assert step in message.partition("What to do: ")[2]
    with pytest.raises(export.VerificationError, match="check that the file is of this model, with these weights$"):
        check_thresholds(report(cosine=-1), load_mode("none"), has_classes=True, is_detected=True)


def test_a_given_cosine_holds_for_differences_too_and_a_single_bad_image_is_no_refusal() -> None:
    dynamic = load_mode("dynamic")
    assert "difference_cosine" in refused(dynamic, difference_cosine=0.6)
    check_thresholds(report(difference_cosine=0.6), dynamic, has_classes=True, cosine=0.5)
    check_thresholds(report(difference_cosine=None), load_mode("none"), has_classes=True)
    check_thresholds(report(cosine=0.3, mean_cosine=0.9999), dynamic, has_classes=True)
    assert "cosine >= 0.995" in refused(dynamic, cosine=0.3, mean_cosine=0.99)
    for name in mode_names():  # allow outliers and refuse other models
        assert 0.9 <= load_mode(name).least_difference_cosine < load_mode(name).least_cosine, name


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


def test_quantized_files_of_few_images_may_change_one() -> None:
    def changed(mode: str, images: int, count: int, **given: float) -> None:
        case = dataclasses.replace(report(decided_agreement=1 - count / images), images=images)
        check_thresholds(case, load_mode(mode), has_classes=True, **given)

    for mode, images, allowed in (("dynamic", 36, 1), ("dynamic", 200, 2), ("int4", 36, 3), ("float16", 36, 0)):
        changed(mode, images, allowed)
        with pytest.raises(export.VerificationError):
            changed(mode, images, allowed + 1)
        with pytest.raises(export.VerificationError):
            changed(mode, images, 1, agreement=0.999)  # a given share is not rounded
