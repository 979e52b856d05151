"""The linear probe: a head in closed form on features that are computed once; recipes that suit the data."""

from __future__ import annotations

import functools
import os
import re
import signal
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from sklearn.linear_model import RidgeClassifierCV

from keras_vit import digits, train, zoo
from keras_vit.errors import CheckpointError
from keras_vit.train import least_squares, prepare, probe
from keras_vit.train.data.sources import open_data
from keras_vit.train.least_squares import SCALES, STRENGTHS, Kept, Summed, cross_validate
from keras_vit.zoo.pretrained import ResolvedModel
from marks import full_except
from model_weights import assert_same_bits, values
from refusals import unrefused
from tiny_models import OTHERS, VARIANTS, built, randomised, tiny


def arrays(count: int = 120, held_out: int = 100) -> dict[str, Any]:
    data = digits.load()
    held = data.test_images[:held_out], data.test_labels[:held_out]
    return {"train": (data.train_images[:count], data.train_labels[:count]), "evaluation": held}


def test_a_probe_is_an_ordinary_model_with_the_metrics_of_evaluate(tmp_path: Path) -> None:
    headless = zoo.load("digits", num_classes=0)
    result = train.run(train.recipe("linear-probe"), model=headless, data=arrays(), out=tmp_path, progress=False)
    assert (result.steps, result.stopped, result.out) == (1, False, str(tmp_path))
    saved = zoo.load(tmp_path)
    assert_same_bits(values(saved), values(result.model))
    measured = train.evaluate(saved, arrays())
    # Float32 sums in another order.
    assert result.metrics == pytest.approx(
        {"accuracy": measured.top1, "top5": measured.top5, "loss": measured.loss}, abs=1e-4
    )
    assert measured.top1 > 0.9  # 120 images of ten digits, and features that were trained on digits
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == len(result.history)


def end_in_batch(number: int, end: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """End the process in this batch of features."""
    in_thread, computed = probe.in_thread, []

    def collect(*arguments: Any) -> Any:
        computed.append(arguments)
        if len(computed) == number:
            raise end
        return in_thread(*arguments)

    monkeypatch.setattr(probe, "in_thread", collect)


@pytest.mark.parametrize(("number", "words"), [(1, r"perhaps \d+ s"), (2, r"about \d+ s at most")])
def test_ctrl_c_says_how_long_the_batch_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, words: str
) -> None:
    monkeypatch.setattr(probe.strategies, "is_cpu", lambda: True)  # the first is guessed by its arithmetic
    in_thread, computed = probe.in_thread, []

    def interrupt(*arguments: Any) -> Any:
        computed.append(arguments)
        if len(computed) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return in_thread(*arguments)

    monkeypatch.setattr(probe, "in_thread", interrupt)
    recipe = train.recipe("linear-probe", batch_size=16, start="scratch", layers=1)
    model = tiny(image_size=8, num_layers=1)
    result = train.run(recipe, model=model, data=arrays(70, 20), out=tmp_path, progress=False)
    assert result.stopped and len(computed) == number
    said = capsys.readouterr().err
    assert re.search(rf"Stopping after this batch of 16 images \({words}\), then saving a checkpoint", said)


def test_ctrl_c_while_images_are_read_computes_no_batch_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_thread, batches, computed = probe.in_thread, probe.distribute_batches, []

    def interrupting(*arguments: Any, **named: Any) -> Any:
        for number, batch in enumerate(batches(*arguments, **named)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    monkeypatch.setattr(probe, "distribute_batches", interrupting)
    monkeypatch.setattr(probe, "in_thread", lambda *each: computed.append(each) or in_thread(*each))
    recipe = train.recipe("linear-probe", batch_size=16, start="scratch", layers=1)
    run = functools.partial(train.run, recipe, model=tiny(image_size=8, num_layers=1), data=arrays(70, 20))
    result = run(out=tmp_path, progress=False)
    assert result.stopped and len(computed) == 1
    assert "Stopping after reading the next images, then saving a checkpoint" in capsys.readouterr().err
    monkeypatch.setattr(probe, "distribute_batches", batches)
    assert run(out=tmp_path, progress=False).metrics == run(progress=False).metrics
    assert len(computed) == 1 + 6 + 7  # 70 and 20 images are 5 and 2 batches


# Fields of a model, and the parts of the head that reads all of its two blocks.
PROBED: dict[str, tuple[dict[str, Any], list[tuple[str, int]]]] = {
    "token": ({"normalize_features": True}, [("token", 1), ("token", 0), ("mean", 1)]),
    "map": ({"classifier": "map", "position_prefix": False}, [("map", 0), ("mean", 1)]),
    "norm after the mean": ({"classifier": "gap", "final_norm": "pooled"}, [("mean", 1), ("mean", 0)]),
    "no final norm": (VARIANTS["no final norm"], [("token", 0)]),
    "hybrid": (VARIANTS["hybrid"], [("token", 1), ("token", 0), ("mean", 1)]),
    "mixer": (OTHERS["mixer"], [("mean", 1), ("mean", 0)]),
    "BiT": (OTHERS["BiT"], [("mean", 0)]),
    "two blocks already": ({"token_blocks": 2, "mean_blocks": 2}, [("token", 1), ("token", 0), ("mean", 1)]),
}


@pytest.mark.parametrize("name", full_except((), PROBED))
def test_a_probe_of_every_family_reads_its_last_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, parts = PROBED[name]
    model = built(**fields)
    # The random weights would choose by chance.
    monkeypatch.setattr(probe, "_numbers_of_blocks", lambda recipe, config: [config.num_read_blocks])
    result = train.run(train.recipe("linear-probe"), model=model, data=arrays(60, 20), progress=False)
    assert result.model.config.feature_parts == parts
    measured = train.evaluate(result.model, arrays(60, 20))
    assert result.metrics == pytest.approx(
        {"accuracy": measured.top1, "top5": measured.top5, "loss": measured.loss}, abs=1e-4
    )
    own = train.recipe("linear-probe", layers=1)  # the model's own feature
    same = prepare.adapt_model(own.replace(reset_head=True), model, num_classes=10).config
    assert same == model.config.replace(num_classes=10, representation_size=None)


@pytest.mark.full
def test_a_probe_of_many_images_adds_their_features_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(**options: Any) -> train.Result:
        return train.run(recipe, model=tiny(image_size=8, num_layers=1), data=arrays(70, 20), progress=False, **options)

    recipe = train.recipe("linear-probe", batch_size=16, start="scratch", layers=1)
    monkeypatch.setattr(least_squares, "STRENGTHS", (1.0,))  # or fewer images might choose another one
    monkeypatch.setattr(least_squares, "MIDDLE", 0)
    kept = fit()
    monkeypatch.setattr(probe, "MOST_FOLDED", 0)  # 32 features, 70 images
    monkeypatch.setattr(probe, "ADDED", 24)  # two batches
    whole = fit()
    with monkeypatch.context() as patch:
        end_in_batch(4, KeyboardInterrupt, patch)  # after three, of which two are added up
        with pytest.raises(KeyboardInterrupt):
            fit(out=tmp_path)
    continued = fit(out=tmp_path)
    assert_same_bits(values(continued.model), values(whole.model))
    assert whole.metrics["accuracy"] == kept.metrics["accuracy"]


@pytest.mark.full
@pytest.mark.parametrize(("end", "minutes"), [(SystemExit, 1e-9), (KeyboardInterrupt, None)])
def test_a_probe_that_was_killed_or_stopped_by_a_second_ctrl_c_continues_bit_for_bit(
    end: type[BaseException],
    minutes: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fit(out: Path | None, model: Any = "digits") -> train.Result:
        return train.run(recipe, model=model, data=arrays(70, 20), out=out)

    recipe = train.recipe("linear-probe", batch_size=32, checkpoint_minutes=minutes)
    whole = fit(None)
    with monkeypatch.context() as patch:
        end_in_batch(2, end, patch)
        with pytest.raises(end):
            fit(tmp_path)
    continued = fit(tmp_path)
    assert f"{tmp_path} continues after 32 of 90 images." in capsys.readouterr().err
    assert_same_bits(values(continued.model), values(whole.model))
    assert continued.metrics == whole.metrics
    with pytest.raises(CheckpointError, match="weights: .* then, .* now"):
        fit(tmp_path, model=randomised(zoo.load("digits")))


@pytest.mark.full
def test_features_of_other_images_are_not_used(tmp_path: Path) -> None:
    recipe, data = train.recipe("linear-probe"), arrays(40, 20)
    train.run(recipe, model="digits", data=data, out=tmp_path, progress=False)
    data["train"] = data["train"][0][::-1].copy(), data["train"][1]  # of other digits than the labels say
    wanted = train.run(recipe, model="digits", data=data, progress=False)
    with pytest.warns(UserWarning, match="not those of the run before: all features are computed again"):
        found = train.run(recipe, model="digits", data=data, out=tmp_path, progress=False)
    assert_same_bits(values(found.model), values(wanted.model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train.run(recipe, model="digits", data=data, out=tmp_path, progress=False)


def test_cross_validation_adds_up_the_cross_entropy_of_every_scale() -> None:
    random = np.random.default_rng(0)
    scores, labels = random.normal(size=(40, 7)), random.integers(0, 7, 40)
    targets = (40 * np.eye(7)[labels] + 1 / 7) / 41
    weights = random.uniform(0, 2, 40)
    wanted = [weights @ tf.nn.softmax_cross_entropy_with_logits(targets, scale * scores).numpy() for scale in SCALES]
    np.testing.assert_allclose(least_squares._add_losses(scores, labels, weights, 40), wanted, rtol=1e-9)


def test_cross_validation_takes_little_memory() -> None:
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(4000, 8)).astype("f4"), random.integers(0, 500, 4000)
    tracemalloc.start()
    sums = Summed.empty(8, 500)
    sums.add(features[800:], labels[800:])
    cross_validate(Summed(sums.products, sums.sums, held_out=(features[:800], labels[:800])), {1: np.arange(8)})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6  # the scores of 800 images in float64 and float32 have 4.8 MB, those of all 24 MB


def test_cross_validation_chooses_as_well_as_scikit_learn() -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(4, 60))
    labels, test_labels = random.integers(0, 4, 80), random.integers(0, 4, 2000)
    features, test = (centres[y] + random.normal(scale=2.5, size=(len(y), 60)) for y in (labels, test_labels))
    regressions = Kept(features, labels, num_classes=4)
    found = cross_validate(regressions, {1: np.arange(60)})
    best = min(found, key=lambda each: each.loss)
    kernel, bias = regressions.head(np.arange(60), best.strength * len(labels))
    scores = test @ kernel + bias
    theirs = RidgeClassifierCV(alphas=[80 * strength for strength in STRENGTHS]).fit(features, labels)
    accuracy = float(np.mean(scores.argmax(axis=1) == test_labels))
    assert accuracy > theirs.score(test, test_labels) - 0.02
    assert STRENGTHS[0] < best.strength  # noisy features need regularisation
    # The probabilities are honest: their mean is the share of right answers, within the noise of 80 images.
    probabilities = tf.nn.softmax(best.scale * scores).numpy()
    assert abs(probabilities.max(axis=1).mean() - accuracy) < 0.15


def test_a_probe_says_what_it_cannot_do() -> None:
    def run(data: Any = None, model: Any = "digits", **changes: Any) -> train.Result:
        recipe = train.recipe("linear-probe", **changes)
        return train.run(recipe, model=model, data=data or arrays(), progress=False)

    cases = [
        ({"steps": 9, "mixup": 0.2}, "has no use for ['mixup', 'steps']"),
        ({"data": {"train": (np.zeros((4, 8, 8, 3), "uint8"), np.eye(4))}}, "needs one class for each image"),
        ({"linear_probe": False}, "linear_probe=true"),
        ({"model": tiny(image_size=16, distilled=True), "start": "scratch"}, "two heads"),
    ]
    assert not unrefused(run, cases)


def test_a_recipe_chooses_what_suits_few_and_small_images_and_says_so(tmp_path: Path) -> None:
    for number in range(22):
        (tmp_path / f"c{number % 2}").mkdir(exist_ok=True)
        Image.new("RGB", (300, 260), (number, 0, 0)).save(tmp_path / f"c{number % 2}" / f"{number}.png")
    said: list[str] = []
    data = open_data(str(tmp_path), train_split="all")
    recipe = train.recipe("finetune-augreg", accumulation="auto")
    short = prepare.fit_length(recipe, data, replicas=2, print_line=said.append)
    assert (short.batch_size, short.steps) == (16, 138)  # 100 passes over 22 images
    assert "batch_size 16 in place of 512, steps 138 in place of 500" in said[0]
    stated = recipe.replace(batch_size=64, steps=500)
    assert prepare.fit_length(stated, data, replicas=2, print_line=said.append) is stated
    large, file = tiny(image_size=518, patch_size=14), ResolvedModel(source="dinov2.safetensors")
    own_size = train.recipe("finetune-photos")
    assert prepare.fit_size(own_size, file, large, data, print_line=said.append).image_size == 224
    assert said[-1].startswith("images have about 260 pixels a side: trained at 224, not at 518.")
    kept = [(recipe, large), (own_size, tiny()), (own_size.replace(image_size="none"), large)]
    kept += [(own_size, large.replace(image_size=(518, 504))), (own_size, large.replace(image_size=280))]
    for each, config in kept:
        assert prepare.fit_size(each, file, config, data, print_line=said.append) is each
    assert prepare.fit_size(own_size, large, large, data, print_line=said.append) is own_size  # the user's own config
    assert len(said) == 2
