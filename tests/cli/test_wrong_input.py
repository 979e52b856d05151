"""Each kind of wrong input gives one clear error and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reference_cases as reference
from keras_vit import ViTConfig, batch, converters, dense, errors, export, position, text, train, visualize, zoo
from keras_vit._util import files
from keras_vit.batch._embed import _parse_shard
from keras_vit.converters import loading
from keras_vit.converters.table import load_table
from keras_vit.errors import CardError
from keras_vit.zoo.cards import read_family
from tiny_models import built

TOKEN = reference.checkpoint("vit_token")
Q = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel"
SCALE = "Transformer/encoderblock_2/LayerNorm_0/scale"


@pytest.fixture
def assigned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each assignment of weights to a model."""
    seen: list[str] = []
    assign_all = loading.assign_tensors

    def watched(*args: Any, **options: Any) -> None:
        seen.append("a model")
        assign_all(*args, **options)

    monkeypatch.setattr(loading, "assign_tensors", watched)
    return seen


def changed(folder: Path, changes: dict[str, np.ndarray | None]) -> Path:
    """Write a good checkpoint with other tensors, and without those that are None."""
    tensors: dict[str, Any] = {**reference.arrays(TOKEN), **changes}
    np.savez(folder / "changed.npz", **{name: tensor for name, tensor in tensors.items() if tensor is not None})
    return folder / "changed.npz"


def problems(path: Path, **options: Any) -> list[str]:
    """Return the lines of the error that loading gives."""
    with pytest.raises(converters.CheckpointError) as caught:
        converters.load(path, **options)
    first, *lines = str(caught.value).splitlines()
    assert str(path) in first
    return [first, *(line.strip() for line in lines)]


# ---- tensors that do not fit

VALUE_BIAS = Q.replace("query", "value").replace("kernel", "bias")
# A tensor that is missing, and what the one line says.
MISSING = {
    "embedding/bias": "embedding",
    "Transformer/encoder_norm/scale": "encoder_norm",
    SCALE: "block_2/norm1/gamma",
    Q: "block_1/attention/query/kernel",
    VALUE_BIAS: "block_1/attention/value/bias",
    "head/bias": "head",
    "head/kernel": "head/bias",  # without its kernel there is no head, so the bias is left over
}
EXTRA = ("surplus", "head/extra", "Transformer/encoderblock_0/Dense_9/kernel", "head/kernel_ema")
SHAPES: list[tuple[str, tuple[int, ...]]] = [
    (SCALE, (33,)),
    (SCALE, (1, 32)),
    (SCALE, ()),
    ("head/bias", (8,)),
    ("Transformer/encoderblock_0/MlpBlock_3/Dense_1/kernel", (32, 64)),  # transposed
    ("Transformer/posembed_input/pos_embedding", (1, 17, 16)),
    (Q, (32, 32)),
    (Q, (32, 8, 4)),  # as many numbers, other heads
    ("cls", (1, 1, 31)),
]


def test_one_tensor_that_is_missing_left_over_or_wrong_is_named_and_nothing_is_loaded(
    tmp_path: Path, assigned: list[str]
) -> None:
    right = reference.arrays(TOKEN)
    cases: list[tuple[str, np.ndarray | None, tuple[str, ...]]] = [
        *((name, None, (said,)) for name, said in MISSING.items()),
        *((name, np.ones(3, np.float32), (f"{name} is left over",)) for name in EXTRA),
        *((name, np.ones(shape, np.float32), (name, str(shape), str(right[name].shape))) for name, shape in SHAPES),
        *((SCALE, np.ones(32, kind), (SCALE, kind)) for kind in ("int32", "uint8", "bool")),
    ]
    for name, tensor, words in cases:
        first, *lines = problems(changed(tmp_path, {name: tensor}))
        assert "(1 problem" in first and "nothing" in first and len(lines) == 1, (words, lines)
        assert all(word in lines[0] for word in words), (words, lines)
    # Without a class token there is one position too many.
    assert "position embedding" in "\n".join(problems(changed(tmp_path, {"cls": None})))
    assert not assigned


def test_all_problems_are_said_at_once_and_stay_one_screen(tmp_path: Path, assigned: list[str]) -> None:
    wrong = {
        "Transformer/encoder_norm/scale": None,
        "Transformer/encoder_norm/scalee": np.ones(32, np.float32),
        SCALE: np.ones(31, np.float32),
        "head/bias": np.ones(7, np.int64),
        "one/too/many": np.ones(1, np.float32),
    }
    first, *lines = problems(changed(tmp_path, wrong))
    assert "5 problems" in first
    for words in (["encoder_norm", "nearest", "scalee"], [SCALE, "(31,)"], ["head/bias", "int64"], ["one/too/many"]):
        assert any(all(word in line for word in words) for line in lines), words
    lines = problems(changed(tmp_path, {f"surplus_{i}": np.ones(1, np.float32) for i in range(100)}))
    assert "100 problems" in lines[0] and len(lines) == 22 and lines[-1] == "... and 80 more"
    block = [name for name in reference.arrays(TOKEN) if "encoderblock_1" in name]
    told = "\n".join(problems(changed(tmp_path, dict.fromkeys(block))))
    assert "no tensor for block_1/norm1/gamma" in told
    assert "encoderblock_2/LayerNorm_0/scale is left over" in told
    assert not assigned


def test_other_floats_are_read(tmp_path: Path) -> None:
    for dtype in ("float16", "float64", ">f4"):
        path = tmp_path / "other.npz"
        np.savez(path, **{name: tensor.astype(dtype) for name, tensor in reference.arrays(TOKEN).items()})
        scale = converters.load(path).get_layer("block_2").norm1.gamma
        assert np.array_equal(scale, reference.arrays(TOKEN)[SCALE].astype(dtype).astype("float32")), dtype
    # The sum of large weights is infinite in float32, but the values are finite.
    huge = np.full(32, 3e38, np.float32)
    path = changed(tmp_path, {SCALE: huge})
    assert np.array_equal(converters.load(path).get_layer("block_2").norm1.gamma, huge)


def test_another_networks_tensors_are_no_known_format(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    for names in ([], ["w"], ["embedding/kernel"], ["stem/kernel", "head/bias"]):
        np.savez(path, **{name: np.ones(3, np.float32) for name in names})
        with pytest.raises(converters.CheckpointError, match=r"(?s)other.npz.*no format is known.*converters.formats"):
            converters.load(path)
    for name in ("embedding/kernel", "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"):
        path = changed(tmp_path, {name: None})
        with pytest.raises(converters.CheckpointError, match="is not a Vision Transformer in google format"):
            converters.load(path)


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    for read in (converters.load, converters.read_config, converters.detect):
        with pytest.raises(FileNotFoundError, match=r"nothing\.npz"):
            read(tmp_path / "nothing.npz")
    with pytest.raises(FileNotFoundError, match=r"nothing\.npz"):
        zoo.load("Ti/16", weights=tmp_path / "nothing.npz")


# ---- arguments


def test_sizes_and_numbers_that_are_none_are_refused() -> None:
    for image_size in (0, -16, 2.5, "32", (32,), (32, 32, 3), True):
        with pytest.raises(ValueError, match=r"image_size must be an integer >= 1 or \(height, width\)"):
            converters.load(TOKEN, image_size=image_size)
    for num_classes in (-1, 2.5, "7"):
        with pytest.raises(ValueError, match="num_classes must be"):
            converters.load(TOKEN, num_classes=num_classes)
    with pytest.raises(ValueError, match=r"smaller than one patch \(8x8 pixels\).*\(7, 32\)"):
        converters.load(TOKEN, image_size=(7, 32))
    with pytest.raises(ValueError, match=r"smaller than one patch \(16x16 pixels\).*\(8, 8\)"):
        zoo.load("B/16", weights=None, image_size=8)
    with pytest.raises(ValueError, match="smaller than one patch"):
        ViTConfig.from_name("R50+ViT-L/32", image_size=1, patch_size=2)
    with pytest.warns(UserWarning, match="keras_vit: images of 39x32 pixels are no multiple") as seen:
        model = converters.load(TOKEN, image_size=(39, 32))  # drops the rest and warns once
    assert len(seen) == 1 and model.config.grid == (4, 4)


def test_formats_and_facts_that_are_none_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"google.*\.toml.*'gogle'"):
        converters.load(TOKEN, format="gogle")
    with pytest.raises(ValueError, match=r"google.*\.toml.*'gogle'"):
        converters.save(built(num_layers=1), tmp_path / "out", format="gogle")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"num_headz.*num_heads"):
        converters.load(TOKEN, config={"num_headz": 4})
    with pytest.raises(ValueError, match=r"4 attention heads.*num_heads=8"):
        converters.load(TOKEN, config={"num_heads": 8})


def test_a_table_or_card_with_a_typo_is_refused_where_it_stands(tmp_path: Path) -> None:
    google = (files.data_folder("converters") / "checkpoints" / "google.toml").read_text(encoding="utf-8")
    card = (files.data_folder("zoo") / "digits.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    for right, wrong, said in (
        ("[tensors]", "[tensor]", "tensor"),
        ('layout = "keras"', 'layout = "kerras"', "layout.*the nearest is 'keras'"),
        ("norm_epsilon = 1e-6\nfinal", "norm_epsilom = 1e-6\nfinal", "norm_epsilom.*norm_epsilon"),
        ("| rank 4", "| rnk 4", "rnk 4"),
        ("block{s}/unit{u}/conv{k}/kernel", "block{s}/unit{u}/conv1/kernel", "placeholders"),
        ("prefixes = [", "prefixes = ", "mine.toml"),
        ("hidden_size", "hiden_size", "hiden_size"),
        ("license", "licens", "license"),
        ("image_size = ", 'image_size = "a" #', "image_size"),
        ("hidden_size = 64\n", "", "No architecture has this name.*'ViT-digits'"),
    ):
        is_card = right in card and right not in google
        text = card if is_card else google
        assert right in text
        path.write_text(text.replace(right, wrong, 1))
        with pytest.raises(CardError if is_card else ValueError, match=said) as caught:
            read_family(path) if is_card else converters.load(TOKEN, format=str(path))
        assert "mine.toml" in str(caught.value)


def test_names_of_models_are_one_line_and_the_nearest_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ViT-B/17x", "Vit-X/16", "R51+ViT-B/16"):
        with pytest.raises(zoo.UnknownModelError, match="nearest are .*ViT-B") as caught:
            zoo.load(name)
        assert repr(name) in str(caught.value)
    for name in ("B/16\n", "\nViT-B/16", "facebook/dinov2-base\n", "digits\n", "a\x1b[2J"):
        for load in (zoo.load, zoo.card, partial(zoo.load, weights=None)):
            with pytest.raises(errors.UnknownModelError, match="must be one line of text. Received: '"):
                load(name)
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path))
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    monkeypatch.delenv("KERAS_VIT_MIRROR", raising=False)
    with pytest.raises(errors.DownloadError, match="KERAS_VIT_OFFLINE") as failed:  # as zoo.load promises
        zoo.load("Ti/16")
    assert isinstance(failed.value, errors.FileUnavailableError | OSError)


def _load_digits(weights: Any) -> Any:
    return zoo.load("digits", weights=weights)


def _evaluate_digits(model: Any) -> Any:
    return train.evaluate(model, "digits")


def _embed_to(to: Any) -> Any:
    return batch.embed(built(num_layers=1), "photos", to=to)


NO_PATHS = (3, b"digits", frozenset(), "a\0b", "\ud800", "x" * 5000, "x/" * 3000, "~no-such-user/x")


def test_what_no_file_is_called_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, image = built(num_layers=1), np.zeros((1, 32, 32, 3), np.uint8)
    for function in (
        *(converters.load, converters.read_config, converters.detect, export.runner),
        *(text.load, text.Tokenizer.load, dense.load, _embed_to, _load_digits),
        *(partial(function, model) for function in (export.tflite, export.saved_model, export.verify)),
        partial(converters.save, model, format="google"),
        partial(visualize.report, model, image),
        partial(batch.embed, model, to="out"),
    ):
        for value in NO_PATHS:
            with pytest.raises(ValueError, match=rf"must be a .*Received: {re.escape(repr(value)[:200])}$"):
                function(value)
            assert not list(tmp_path.iterdir()), function
    for value in ("a\0b", "x" * 5000):
        with pytest.raises(ValueError, match="an image file must be a path: .*Received: '"):
            model.preprocess(value)


def test_an_argument_of_another_type_is_named_and_a_long_one_is_cut() -> None:
    named: dict[str, Callable[[Any], Any]] = {
        **{"the model": zoo.load, "name": zoo.card, "pattern": zoo.names, "weights": _load_digits},
        **{"recipe": train.recipe, "shard": _parse_shard},
    }
    for argument, function in named.items():
        for value in (3, 3.5, b"digits", ["digits"], {}, True):
            with pytest.raises(ValueError, match=rf"^{argument} must be .*Received: {re.escape(repr(value))}"):
                function(value)
    model, image = built(num_layers=1), np.zeros((1, 32, 32, 3), np.float32)
    calls: list[Callable[[Any], Any]] = [
        load_table,
        train.strategy,
        partial(train.run, model=model, data="digits"),
        partial(model.features, image),
        partial(_with_keyword, partial(export.verify, model, TOKEN), "mode"),
        partial(_with_keyword, partial(position.resize, np.zeros((1, 4, 8)), 3), "method"),
    ]
    for value in (3, 3.5, b"x", {1: 2}, object()):
        for call in calls:
            with pytest.raises(ValueError, match="Received: "):
                call(value)
    long = "x" * 100_000
    for function, value in (
        *((call, [long] if call is calls[3] else long) for call in calls),
        (partial(_with_keyword, partial(converters.load, TOKEN), "config"), long),
        (partial(_with_keyword, partial(export.saved_model, model, "sm"), "labels"), [long] * 3),
        *((partial(train.evaluate, model), value) for value in (long, [long])),
        (_evaluate_digits, long),
        (_parse_shard, long),
    ):
        with pytest.raises((ValueError, TypeError), match=r"\w") as caught:
            function(value)
        assert len(str(caught.value)) < 600, function


def _with_keyword(function: Callable[..., Any], name: str, value: Any) -> Any:
    return function(**{name: value})


@pytest.mark.full
def test_predict_needs_an_image() -> None:
    model = built(num_layers=1)
    with pytest.raises(ValueError, match=r"predict needs at least one image. Received: an array of shape \(0, 32,"):
        model.predict(np.zeros((0, 32, 32, 3), np.float32))
    assert model.predict(np.zeros((3, 32, 32, 3), np.float32), batch_size=2, verbose=0).shape == (3, 5)
