"""What somebody tries first, from memory of another library, is answered with what does it here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import command_line
import keras_vit
import keras_vit.cli
from keras_vit import VisionTransformer, dense, digits, zoo
from keras_vit._util import text
from tiny_models import built, prepared, tiny


def message(function: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def test_words_of_other_libraries_name_ours() -> None:
    missing = []
    for word, ours in text.OTHER_WORDS.items():
        error = message(lambda word=word: zoo.load("digits", **{word: 1}), ValueError)
        if f"{word} is here {ours}" not in error or len(error) > 200:
            missing.append((word, error))
    assert "keras_vit.zoo.names()" in message(lambda: keras_vit.list_models, AttributeError)
    assert not missing


def test_what_a_newcomer_tries_is_answered() -> None:
    for function, kind, words in (
        (lambda: VisionTransformer("digits"), TypeError, "keras_vit.zoo.load"),  # type: ignore[arg-type]
        (lambda: built(num_classes=0).classify(np.zeros((8, 8, 3), np.uint8)), ValueError, "num_classes=0"),
        (lambda: keras_vit.nothing, AttributeError, "nothing"),
        (lambda: keras_vit.text.load("SigLIP2-B/16"), FileNotFoundError, "keras_vit.zoo.text_encoder(name)"),
        (lambda: keras_vit.export.tflite(built(), "x.tflite", verify=False), ValueError, "built-in patterns"),
        (lambda: keras_vit.export.saved_model(built(), "x", verify=False), ValueError, "built-in patterns"),
    ):
        assert words in message(function, kind)
    assert not np.any(np.asarray(zoo.load("digits", weights="none").get_layer("head").kernel))


def test_pixels_are_no_prepared_images() -> None:
    data, model = digits.load(), zoo.load("digits")
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pixels, labels = data.test_images[:4], data.test_labels[:4]
    whole = np.zeros((4, *model.config.size, model.config.num_channels), np.uint8)
    segmenter = dense.segmenter(built(num_classes=0), 2)
    calls: list[Callable[[], Any]] = [
        lambda: model(whole),
        lambda: model(tf.constant(whole)),
        *(lambda each=each: model(each) for each in (whole[0], whole[:, :5], np.zeros((1, 480, 640, 3), np.uint8))),
        lambda: model.predict(np.zeros((1, 480, 640, 3), np.uint8), verbose=0),
        lambda: model.features(whole),
        lambda: model.attention_maps(whole),
        lambda: model.predict(whole, verbose=0),
        lambda: model.evaluate(whole, labels, verbose=0),
        lambda: model.fit(whole, labels, verbose=0),
        lambda: tf.function(model)(whole),
        lambda: segmenter(np.zeros((1, 32, 32, 3), np.int64)),
        lambda: segmenter(np.zeros((1, 480, 640, 3), np.uint8)),
        lambda: segmenter.predict(np.zeros((1, 32, 32, 3), np.int64), verbose=0),
    ]
    for call in calls:
        assert "model.preprocess(images)" in message(call, ValueError)
    for call in (lambda: model(whole + 255.0), lambda: model.predict(whole + 255.0, verbose=0)):
        with pytest.warns(UserWarning, match="values beyond"):
            call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(model.preprocess(pixels))
        model.predict(model.preprocess(pixels), verbose=0)
        built()(3 * prepared(tiny()))


def test_a_result_is_printed_in_twelve_lines() -> None:
    metrics = {f"metric {number}": 0.5 for number in range(30)}
    facts: dict[str, Any] = {"images_per_second": 7.0, "skipped": 1, "unread": 0, "out": "runs/a", "stopped": True}
    recipe = keras_vit.train.recipe("digits")
    result = keras_vit.train.Result(built(), recipe, metrics, [{"loss": 1.0}] * 999, 999, best=None, **facts)
    printed = str(result)
    assert len(printed.splitlines()) <= 12 and max(map(len, printed.splitlines())) <= 80
    assert "steps: 999 (stopped" in printed and "folder: runs/a" in printed and len(repr(recipe)) < 800


def test_a_card_is_printed_in_twelve_lines() -> None:
    for name in keras_vit.zoo.names():
        assert len(str(keras_vit.zoo.card(name)).splitlines()) <= 12
    assert "keras-vit show ViT-B/16" in str(keras_vit.zoo.card("ViT-B/16"))


def test_commands_know_the_words_of_other_libraries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["keras-vit", "predict", "digits", "photo.png", "--num-labels", "3"])
    with pytest.raises(SystemExit):
        keras_vit.cli.main()
    assert "num_labels is here num_classes" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    shown = command_line.run("export", "--help")
    assert all(panel in shown for panel in ("Model", "Data", "SavedModel", "LiteRT file"))
