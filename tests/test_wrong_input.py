"""Each kind of wrong input gives one clear error and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keras_vit
import reference_cases as reference
from keras_vit import (
    VisionTransformer,
    ViTConfig,
    batch,
    converters,
    dense,
    errors,
    export,
    position,
    text,
    train,
    visualize,
    zoo,
)
from keras_vit._util import data_files
from keras_vit.batch._embed import _parse_shard
from keras_vit.converters import assign
from keras_vit.converters.table import load_table
from keras_vit.errors import CardError
from keras_vit.zoo.cards import read_family
from tiny_models import built

TOKEN = reference.checkpoint("vit_token")
Q = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel"
SCALE = "Transformer/encoderblock_2/LayerNorm_0/scale"
Tensors = dict[str, np.ndarray]


@pytest.fixture
def assigned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each assignment of weights to a model."""
    seen: list[str] = []
    assign_all = assign.assign

    def watched(*args: Any, **options: Any) -> None:
        seen.append("a model")
        assign_all(*args, **options)

    monkeypatch.setattr(assign, "assign", watched)
    return seen


def changed(folder: Path, change: Callable[[Tensors], Any], name: str = "changed.npz") -> Path:
    """Write a good checkpoint with a change."""
    tensors = reference.arrays(TOKEN)
    change(tensors)
    np.savez(folder / name, **tensors)
    return folder / name


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
    ("cls", (1, 2, 32)),
]


def test_one_tensor_that_is_missing_left_over_or_wrong_is_named_and_nothing_is_loaded(
    tmp_path: Path, assigned: list[str]
) -> None:
    right = reference.arrays(TOKEN)
    cases: list[tuple[Callable[[Tensors], Any], tuple[str, ...]]] = [
        *((partial(drop, name=name), (said,)) for name, said in MISSING.items()),
        *((partial(put, name=name, value=np.ones(3, np.float32)), (f"{name} is left over",)) for name in EXTRA),
        *(
            (partial(put, name=name, value=np.ones(shape, np.float32)), (name, str(shape), str(right[name].shape)))
            for name, shape in SHAPES
        ),
        *((partial(put, name=SCALE, value=np.ones(32, kind)), (SCALE, kind)) for kind in ("int32", "uint8", "bool")),
    ]
    for change, words in cases:
        first, *lines = problems(changed(tmp_path, change))
        assert "(1 problem" in first and "nothing" in first and len(lines) == 1, (words, lines)
        assert all(word in lines[0] for word in words), (words, lines)
    assert not assigned


def drop(tensors: Tensors, name: str) -> None:
    del tensors[name]


def put(tensors: Tensors, name: str, value: np.ndarray) -> None:
    tensors[name] = value


def test_a_class_token_that_is_missing_is_no_class_token_by_chance(tmp_path: Path) -> None:
    with pytest.raises(converters.CheckpointError, match="position embedding"):
        converters.load(changed(tmp_path, partial(drop, name="cls")))


def test_a_whole_block_missing_in_the_middle_is_named_in_one_error(tmp_path: Path, assigned: list[str]) -> None:
    def drop_block(tensors: Tensors) -> None:
        for name in [name for name in tensors if "encoderblock_1" in name]:
            del tensors[name]

    text = "\n".join(problems(changed(tmp_path, drop_block)))
    assert "no tensor for block_1/norm1/gamma" in text
    assert "encoderblock_2/LayerNorm_0/scale is left over" in text
    assert not assigned


def test_other_floats_are_read(tmp_path: Path) -> None:
    for dtype in ("float16", "float64", ">f4"):
        path = tmp_path / "other.npz"
        np.savez(path, **{name: tensor.astype(dtype) for name, tensor in reference.arrays(TOKEN).items()})
        scale = converters.load(path).get_layer("block_2").norm1.gamma
        assert np.array_equal(scale, reference.arrays(TOKEN)[SCALE].astype(dtype).astype("float32")), dtype
    # The sum of large weights is infinite in float32, but the values are finite.
    huge = np.full(32, 3e38, np.float32)
    path = changed(tmp_path, partial(put, name=SCALE, value=huge))
    assert np.array_equal(converters.load(path).get_layer("block_2").norm1.gamma, huge)


def test_all_problems_are_said_at_once(tmp_path: Path, assigned: list[str]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["Transformer/encoder_norm/scalee"] = tensors.pop("Transformer/encoder_norm/scale")
        tensors[SCALE] = np.ones(31, np.float32)
        tensors["head/bias"] = np.ones(7, np.int64)
        tensors["one/too/many"] = np.ones(1, np.float32)

    first, *lines = problems(changed(tmp_path, change))
    assert "5 problems" in first
    for words in (["encoder_norm", "nearest", "scalee"], [SCALE, "(31,)"], ["head/bias", "int64"], ["one/too/many"]):
        assert any(all(word in line for word in words) for line in lines), words
    assert not assigned


def test_a_misspelt_tensor_is_found_by_the_name_it_should_have(tmp_path: Path) -> None:
    wrong = SCALE.replace("scale", "scail")
    lines = problems(changed(tmp_path, lambda tensors: tensors.update({wrong: tensors.pop(SCALE)})))
    assert any("the nearest is " + wrong in line for line in lines)


def test_a_hundred_problems_stay_one_screen(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors.update({f"surplus_{i}": np.ones(1, np.float32) for i in range(100)})

    lines = problems(changed(tmp_path, change))
    assert "100 problems" in lines[0]
    assert len(lines) == 22
    assert lines[-1] == "... and 80 more"


def test_another_networks_tensors_are_no_known_format(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    for names in ([], ["w"], ["embedding/kernel"], ["model.embed_tokens.weight"], ["stem/kernel", "head/bias"]):
        np.savez(path, **{name: np.ones(3, np.float32) for name in names})
        with pytest.raises(converters.CheckpointError, match=r"other.npz.*no format is known.*google"):
            converters.load(path)
    for name in ("embedding/kernel", "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"):
        path = changed(tmp_path, partial(drop, name=name))
        with pytest.raises(converters.CheckpointError, match="is not a Vision Transformer in google format"):
            converters.load(path)


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    for read in (converters.load, converters.read_config, converters.detect):
        with pytest.raises(FileNotFoundError, match=r"nothing\.npz"):
            read(tmp_path / "nothing.npz")
    with pytest.raises(FileNotFoundError, match=r"nothing\.npz"):
        zoo.load("Ti/16", weights=tmp_path / "nothing.npz")


# ---- arguments


def test_an_image_smaller_than_a_patch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"smaller than one patch \(8x8 pixels\).*\(7, 32\)"):
        converters.load(TOKEN, image_size=(7, 32))
    with pytest.raises(ValueError, match=r"smaller than one patch \(16x16 pixels\).*\(8, 8\)"):
        zoo.load("B/16", weights=None, image_size=8)
    with pytest.raises(ValueError, match=r"smaller than one patch"):
        ViTConfig.from_name("R50+ViT-L/32", image_size=0 + 1, patch_size=2)


def test_numbers_that_are_none_are_refused() -> None:
    for image_size in (0, -16, 2.5, "32", (32,), (32, 32, 3), True):
        with pytest.raises(ValueError, match=r"image_size must be an integer >= 1 or \(height, width\)"):
            converters.load(TOKEN, image_size=image_size)
    for num_classes in (-1, 2.5, "7"):
        with pytest.raises(ValueError, match="num_classes must be"):
            converters.load(TOKEN, num_classes=num_classes)


def test_a_size_that_is_no_multiple_drops_the_rest_and_warns_once() -> None:
    with pytest.warns(UserWarning, match="keras_vit: images of 39x32 pixels are no multiple") as seen:
        model = converters.load(TOKEN, image_size=(39, 32))
    assert len(seen) == 1
    assert model.config.grid == (4, 4)


def test_a_format_that_is_none_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"google.*\.toml.*'gogle'"):
        converters.load(TOKEN, format="gogle")
    with pytest.raises(ValueError, match=r"google.*\.toml.*'gogle'"):
        converters.save(VisionTransformer(ViTConfig(num_layers=1)), tmp_path / "out", format="gogle")
    assert not list(tmp_path.iterdir())


def test_a_fact_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"num_headz.*num_heads"):
        converters.load(TOKEN, config={"num_headz": 4})
    with pytest.raises(ValueError, match=r"4 attention heads.*num_heads=8"):
        converters.load(TOKEN, config={"num_heads": 8})


def test_a_table_with_a_typo_is_refused_where_it_stands(tmp_path: Path) -> None:
    text = (data_files.folder("converters") / "checkpoints" / "google.toml").read_text(encoding="utf-8")
    for right, wrong, said in (
        ("[tensors]", "[tensor]", "tensor"),
        ('layout = "keras"', 'layout = "kerras"', "layout.*the nearest is 'keras'"),
        ("norm_epsilon = 1e-6\nfinal", "norm_epsilom = 1e-6\nfinal", "norm_epsilom.*norm_epsilon"),
        ("| rank 4", "| rnk 4", "rnk 4"),
        ("block{s}/unit{u}/conv{k}/kernel", "block{s}/unit{u}/conv1/kernel", "placeholders"),
        ("prefixes = [", "prefixes = ", "mine.toml"),
    ):
        assert right in text
        (tmp_path / "mine.toml").write_text(text.replace(right, wrong, 1))
        with pytest.raises(ValueError, match=said) as caught:
            converters.load(TOKEN, format=str(tmp_path / "mine.toml"))
        assert "mine.toml" in str(caught.value)


def test_a_card_with_a_typo_is_refused_where_it_stands(tmp_path: Path) -> None:
    text = (data_files.folder("zoo") / "digits.toml").read_text(encoding="utf-8")
    for right, wrong in (
        ("hidden_size", "hiden_size"),
        ("licence", "license"),
        ("image_size = ", 'image_size = "a" #'),
    ):
        assert right in text
        (tmp_path / "mine.toml").write_text(text.replace(right, wrong, 1))
        with pytest.raises(CardError, match=wrong.split(" ")[0]) as caught:
            read_family(tmp_path / "mine.toml")
        assert "mine.toml" in str(caught.value)
    (tmp_path / "mine.toml").write_text(text.replace("hidden_size = 64\n", ""))
    with pytest.raises(CardError, match="No architecture has this name.*'ViT-digits'"):
        read_family(tmp_path / "mine.toml")


def test_unknown_models_are_refused_with_the_nearest() -> None:
    for name in ("ViT-B/17x", "Vit-X/16", "R51+ViT-B/16"):
        with pytest.raises(zoo.UnknownModelError, match="nearest are .*ViT-B") as caught:
            zoo.load(name)
        assert repr(name) in str(caught.value)


# ---- errors


def test_a_failed_download_is_caught_as_zoo_load_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path))
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    monkeypatch.delenv("KERAS_VIT_MIRROR", raising=False)
    with pytest.raises(errors.DownloadError, match="KERAS_VIT_OFFLINE") as caught:
        zoo.load("Ti/16")
    assert isinstance(caught.value, errors.FileUnavailableError | OSError)
    assert keras_vit.errors.DownloadError.__module__ == "keras_vit.errors"


NAMED: dict[str, Callable[[Any], Any]] = {
    "the model": zoo.load,
    "name": zoo.card,
    "pattern": zoo.names,
    "weights": lambda value: _load_digits(value),
    "recipe": train.recipe,
    "shard": _parse_shard,
}


def test_an_argument_of_another_type_is_named() -> None:
    for argument, call in NAMED.items():
        for value in (3, 3.5, b"digits", ["digits"], {}, True):
            with pytest.raises(ValueError, match=rf"^{argument} must be .*Received: {re.escape(repr(value))}"):
                call(value)


READ = (
    *(converters.load, converters.read_config, converters.detect, export.runner),
    *(text.load, text.Tokenizer.load, dense.load),
)


def _load_digits(weights: Any) -> Any:
    return zoo.load("digits", weights=weights)


def _embed_to(model: VisionTransformer, to: Any) -> Any:
    return batch.embed(model, "photos", to=to)


NO_PATHS = (3, b"digits", frozenset(), "a\0b", "\ud800", "x" * 5000, "x/" * 3000, "~no-such-user/x")


def test_what_no_file_is_called_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = built(num_layers=1)
    image = np.zeros((1, 32, 32, 3), np.uint8)
    functions: dict[str, Callable[[Any], Any]] = {
        "converters.save": partial(converters.save, model, format="google"),
        "export.tflite": partial(export.tflite, model),
        "export.saved_model": partial(export.saved_model, model),
        "export.verify": partial(export.verify, model),
        "visualize.report": partial(visualize.report, model, image),
        "batch.embed": partial(_embed_to, model),
        "source": partial(batch.embed, model, to="out"),
        "weights": partial(_load_digits),
        **{f"{read.__module__}.{read.__name__}": read for read in READ},
    }
    for name, function in functions.items():
        for value in NO_PATHS:
            with pytest.raises(ValueError, match=rf"must be a .*Received: {re.escape(repr(value)[:200])}$"):
                function(value)
            assert not list(tmp_path.iterdir()), name
    for value in ("a\0b", "x" * 5000):
        with pytest.raises(ValueError, match="an image file must be a path: .*Received: '"):
            model.preprocess(value)


LONG = "x" * 100_000
QUOTED: dict[str, Callable[[], Any]] = {
    "format": lambda: load_table(LONG),
    "config": lambda: converters.load(TOKEN, config=LONG),
    "mode": lambda: export.verify(built(num_layers=1), TOKEN, accelerator=LONG),
    "recipe": lambda: train.run(LONG, model=built(num_layers=1), data="digits"),
    "data": lambda: train.evaluate(built(num_layers=1), LONG),
    "images": lambda: train.evaluate(built(num_layers=1), [LONG]),
    "model": lambda: train.evaluate(LONG, "digits"),
    "strategy": lambda: train.strategy(LONG),
    "shard": lambda: _parse_shard(LONG),
    "layers": lambda: built(num_layers=1).features(np.zeros((1, 32, 32, 3), np.float32), [LONG]),
    "method": lambda: position.resize(np.zeros((1, 4, 8)), 3, method=LONG),
    "labels": lambda: export.saved_model(built(num_layers=1), "sm", labels=[LONG] * 3),
}


def test_messages_quote_at_most_200_characters() -> None:
    for argument, call in QUOTED.items():
        with pytest.raises((ValueError, TypeError), match=r"\w") as caught:
            call()
        assert len(str(caught.value)) < 600, argument


def test_other_arguments_of_another_type_are_named_too() -> None:
    image, model = np.zeros((1, 32, 32, 3), np.float32), built(num_layers=1)
    for value in (3, 3.5, b"x", {1: 2}, object()):
        for call in (
            partial(load_table, value),
            partial(train.run, value, model=model, data="digits"),
            partial(train.strategy, value),
            partial(export.verify, model, TOKEN, mode=value),
            partial(model.features, image, value),
            partial(position.resize, np.zeros((1, 4, 8)), 3, method=value),
        ):
            with pytest.raises(ValueError, match="Received: "):
                call()


def test_a_name_is_one_line() -> None:
    for name in ("B/16\n", "\nViT-B/16", "facebook/dinov2-base\n", "digits\n", "a\x1b[2J"):
        for load in (zoo.load, zoo.card, partial(zoo.load, weights=None)):
            with pytest.raises(errors.UnknownModelError, match="must be one line of text. Received: '"):
                load(name)


def test_predict_needs_an_image() -> None:
    model = built(num_layers=1)
    with pytest.raises(ValueError, match=r"predict needs at least one image. Received: an array of shape \(0, 32,"):
        model.predict(np.zeros((0, 32, 32, 3), np.float32))
    assert model.predict(np.zeros((3, 32, 32, 3), np.float32), batch_size=2, verbose=0).shape == (3, 5)
