"""Each kind of wrong input gives one clear error and changes nothing."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
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
from keras_vit._util import files
from keras_vit.batch._embed import _parse_shard
from keras_vit.converters import assign
from keras_vit.converters.table import load_table
from keras_vit.errors import CardError
from keras_vit.zoo.cards import read_family
from marks import full_except
from public_names import public_names
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


@pytest.mark.parametrize(
    "missing",
    [
        "embedding/bias",
        "Transformer/encoder_norm/scale",
        SCALE,
        Q,
        Q.replace("query", "value").replace("kernel", "bias"),
        "head/bias",
        "head/kernel",
    ],
)
def test_one_tensor_missing_is_named(tmp_path: Path, assigned: list[str], missing: str) -> None:
    lines = problems(changed(tmp_path, lambda tensors: tensors.pop(missing)))
    # Without its kernel there is no head, so the bias is left over.
    said = "head/bias" if missing == "head/kernel" else missing.rpartition("/")[0].rpartition("/")[2]
    keras_names = {"LayerNorm_0": "block_2/norm1/gamma", "query": "block_1/attention/query/kernel"}
    keras_names["value"] = "block_1/attention/value/bias"
    assert len(lines) == 2
    assert "(1 problem" in lines[0]
    assert "nothing loaded" in lines[0].replace("was ", "")
    assert keras_names.get(said, said) in lines[1] or missing in lines[1]
    assert not assigned


def test_a_class_token_that_is_missing_is_no_class_token_by_chance(tmp_path: Path) -> None:
    with pytest.raises(converters.CheckpointError, match="position embedding"):
        converters.load(changed(tmp_path, lambda tensors: tensors.pop("cls")))


def test_a_whole_block_missing_in_the_middle_is_named_in_one_error(tmp_path: Path, assigned: list[str]) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if "encoderblock_1" in name]:
            del tensors[name]

    text = "\n".join(problems(changed(tmp_path, drop)))
    assert "no tensor for block_1/norm1/gamma" in text
    assert "encoderblock_2/LayerNorm_0/scale is left over" in text
    assert not assigned


@pytest.mark.parametrize(
    "extra", ["surplus", "head/extra", "Transformer/encoderblock_0/Dense_9/kernel", "head/kernel_ema"]
)
def test_one_tensor_too_many_is_named(tmp_path: Path, assigned: list[str], extra: str) -> None:
    lines = problems(changed(tmp_path, lambda tensors: tensors.update({extra: np.ones(3, np.float32)})))
    assert lines[1:] == [f"{extra} is left over"]
    assert not assigned


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (SCALE, (33,), "(33,)"),
        (SCALE, (1, 32), "(1, 32)"),
        (SCALE, (), "()"),
        ("head/bias", (8,), "(8,)"),
        ("Transformer/encoderblock_0/MlpBlock_3/Dense_1/kernel", (32, 64), "(32, 64)"),  # transposed
        ("Transformer/posembed_input/pos_embedding", (1, 17, 16), "(1, 17, 16)"),
        (Q, (32, 32), "(32, 32)"),
        (Q, (32, 8, 4), "(32, 8, 4)"),  # as many numbers, other heads
        ("cls", (1, 2, 32), "(1, 2, 32)"),
    ],
)
def test_a_wrong_shape_is_named_with_the_right_one(
    tmp_path: Path, assigned: list[str], name: str, shape: tuple[int, ...], said: str
) -> None:
    right = reference.arrays(TOKEN)[name].shape
    lines = problems(changed(tmp_path, lambda tensors: tensors.update({name: np.ones(shape, np.float32)})))
    assert len(lines) == 2
    assert name in lines[1]
    assert said in lines[1]
    assert str(right) in lines[1]
    assert not assigned


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_a_tensor_of_no_floats_is_named(tmp_path: Path, assigned: list[str], dtype: str) -> None:
    lines = problems(changed(tmp_path, lambda tensors: tensors.update({SCALE: np.ones(32, dtype)})))
    assert len(lines) == 2
    assert SCALE in lines[1]
    assert dtype in lines[1]
    assert not assigned


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4"])
def test_other_floats_are_read(tmp_path: Path, dtype: str) -> None:
    half = changed(tmp_path, lambda tensors: tensors.update({name: t.astype(dtype) for name, t in tensors.items()}))
    scale = converters.load(half).get_layer("block_2").norm1.gamma
    assert np.array_equal(scale, reference.arrays(TOKEN)[SCALE].astype(dtype).astype("float32"))


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


def test_large_weights_are_finite(tmp_path: Path) -> None:
    # Their sum is infinite in float32, but the values are finite.
    huge = np.full(32, 3e38, np.float32)
    path = changed(tmp_path, lambda tensors: tensors.update({SCALE: huge}))
    assert np.array_equal(converters.load(path).get_layer("block_2").norm1.gamma, huge)


@pytest.mark.parametrize("names", [{}, {"w": 1}, {"embedding/kernel": 1}, {"model.embed_tokens.weight": 1}], ids=str)
def test_another_networks_tensors_are_no_known_format(tmp_path: Path, names: dict[str, int]) -> None:
    np.savez(tmp_path / "other.npz", **{name: np.ones(3, np.float32) for name in names})
    with pytest.raises(converters.CheckpointError, match=r"other.npz.*no format is known.*google.*table of your own"):
        converters.load(tmp_path / "other.npz")


def test_a_mixer_of_the_same_authors_is_no_vision_transformer(tmp_path: Path) -> None:
    np.savez(tmp_path / "mixer.npz", **{"stem/kernel": np.ones((8, 8, 3, 4)), "head/bias": np.ones(2)})
    with pytest.raises(converters.CheckpointError, match=r"mixer.npz.*no format is known.*stem/kernel"):
        converters.load(tmp_path / "mixer.npz")


@pytest.mark.parametrize("name", ["embedding/kernel", "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"])
def test_a_file_without_its_first_matrices_is_no_vision_transformer(tmp_path: Path, name: str) -> None:
    path = changed(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(converters.CheckpointError, match=r"changed.npz.*is not a Vision Transformer in google format"):
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


@pytest.mark.parametrize("image_size", [0, -16, 2.5, "32", (32,), (32, 32, 3), True])
def test_an_image_size_that_is_none_is_refused(image_size: Any) -> None:
    with pytest.raises(ValueError, match=r"image_size must be an integer >= 1 or \(height, width\)"):
        converters.load(TOKEN, image_size=image_size)


@pytest.mark.parametrize("num_classes", [-1, 2.5, "7"])
def test_a_number_of_classes_that_is_none_is_refused(num_classes: Any) -> None:
    with pytest.raises(ValueError, match=r"num_classes must be (an integer|in \[0, inf\))"):
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


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("[tensors]", "[tensor]", "tensor"),
        (
            'layout = "keras"',
            'layout = "kerras"',
            r"layout must be one of \['keras', 'torch'\].*the nearest is 'keras'",
        ),
        ("norm_epsilon = 1e-6\nfinal", "norm_epsilom = 1e-6\nfinal", r"norm_epsilom.*norm_epsilon"),
        ("| rank 4", "| rnk 4", "rnk 4"),
        ("block{s}/unit{u}/conv{k}/kernel", "block{s}/unit{u}/conv1/kernel", "placeholders"),
        ("prefixes = [", "prefixes = ", "mine.toml"),
    ],
)
def test_a_table_with_a_typo_is_refused_where_it_stands(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    text = (files.data_folder("converters") / "checkpoints" / "google.toml").read_text(encoding="utf-8")
    assert right in text
    (tmp_path / "mine.toml").write_text(text.replace(right, wrong, 1))
    with pytest.raises(ValueError, match=said) as caught:
        converters.load(TOKEN, format=str(tmp_path / "mine.toml"))
    assert "mine.toml" in str(caught.value)


def test_a_card_with_a_typo_is_refused_where_it_stands(tmp_path: Path) -> None:
    text = (files.data_folder("zoo") / "digits.toml").read_text(encoding="utf-8")
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


def test_a_model_that_is_no_official_architecture_states_its_sizes(tmp_path: Path) -> None:
    text = (files.data_folder("zoo") / "digits.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace("hidden_size = 64\n", ""))
    with pytest.raises(CardError, match="No architecture has this name.*'ViT-digits'"):
        read_family(tmp_path / "mine.toml")


def test_unknown_models_are_refused_with_the_nearest() -> None:
    for name in ("ViT-B/17x", "Vit-X/16", "R51+ViT-B/16"):
        with pytest.raises(zoo.UnknownModelError, match="nearest are .*ViT-B") as caught:
            zoo.load(name)
        assert repr(name) in str(caught.value)


# ---- errors

PROMISED = re.compile(r"\b[A-Z]\w*Error\b")


def test_errors_that_are_promised_can_be_imported() -> None:
    docstrings = [public.docstring for public in public_names()]
    sections = [re.search(r"^Raises:\n((?: .*\n?|\n)+)", text, re.MULTILINE) for text in docstrings]
    promised = {name for section in sections if section for name in PROMISED.findall(section[1])}
    assert {"DownloadError", "CheckpointError", "UnknownModelError", "ValueError"} <= promised
    assert not {name for name in promised if not hasattr(builtins, name) and name not in errors.__all__}


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_one_of_the_package_and_a_built_in_one(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.KerasViTError)
    built_in = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert name == "KerasViTError" or built_in[0] is not Exception


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
    "weights": lambda value: zoo.load("digits", weights=value),
    "recipe": train.recipe,
    "shard": _parse_shard,
}


@pytest.mark.parametrize("value", [3, 3.5, b"digits", ["digits"], {}, True], ids=str)
@pytest.mark.parametrize("argument", NAMED)
def test_an_argument_of_another_type_is_named(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{argument.strip()} must be .*Received: {re.escape(repr(value))}"):
        NAMED[argument](value)


PATHS: dict[str, Callable[[Any], Any]] = {
    "converters.load": converters.load,
    "converters.read_config": converters.read_config,
    "converters.detect": converters.detect,
    "converters.save": lambda path: converters.save(built(num_layers=1), path, format="google"),
    "export.tflite": lambda path: export.tflite(built(num_layers=1), path),
    "export.saved_model": lambda path: export.saved_model(built(num_layers=1), path),
    "export.verify": lambda path: export.verify(built(num_layers=1), path),
    "export.runner": export.runner,
    "visualize.report": lambda path: visualize.report(built(num_layers=1), np.zeros((1, 32, 32, 3), np.uint8), path),
    "batch.embed": lambda path: batch.embed(built(num_layers=1), "photos", to=path),
    "source": lambda path: batch.embed(built(num_layers=1), path, to="out"),
    "weights": lambda path: zoo.load("digits", weights=path),
    "text.load": text.load,
    "text.Tokenizer.load": text.Tokenizer.load,
    "dense.load": dense.load,
}
NO_PATHS = (3, b"digits", frozenset(), "a\0b", "\ud800", "x" * 5000, "x/" * 3000, "~no-such-user/x")


@pytest.mark.parametrize("value", full_except([3, "a\0b", "x" * 5000], NO_PATHS), ids=lambda value: repr(value)[:9])
@pytest.mark.parametrize("function", PATHS)
def test_what_no_file_is_called_is_named(function: str, value: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"must be a .*Received: {re.escape(repr(value)[:200])}$"):
        PATHS[function](value)
    assert not list(tmp_path.iterdir())


def test_an_image_that_no_file_is_called_is_named() -> None:
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(ValueError, match="an image file must be a path: .*Received: '"):
            built(num_layers=1).preprocess(name)


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


@pytest.mark.parametrize("argument", QUOTED)
def test_messages_quote_at_most_200_characters(argument: str) -> None:
    with pytest.raises((ValueError, TypeError), match=r"\w") as caught:
        QUOTED[argument]()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("value", [3, 3.5, b"x", {1: 2}, object()], ids=lambda value: type(value).__name__)
def test_other_arguments_of_another_type_are_named_too(value: Any, tmp_path: Path) -> None:
    image = np.zeros((1, 32, 32, 3), np.float32)
    for call in (
        lambda: load_table(value),
        lambda: train.run(value, model=built(num_layers=1), data="digits"),
        lambda: train.strategy(value),
        lambda: export.verify(built(num_layers=1), TOKEN, mode=value),
        lambda: built(num_layers=1).features(image, value),
        lambda: position.resize(np.zeros((1, 4, 8)), 3, method=value),
    ):
        with pytest.raises(ValueError, match="Received: "):
            call()


@pytest.mark.parametrize("name", ["B/16\n", "\nViT-B/16", "facebook/dinov2-base\n", "digits\n", "a\x1b[2J"])
@pytest.mark.parametrize("load", [zoo.load, zoo.card, lambda name: zoo.load(name, weights=None)])
def test_a_name_is_one_line(name: str, load: Callable[[str], Any]) -> None:
    with pytest.raises(errors.UnknownModelError, match="must be one line of text. Received: '"):
        load(name)


def test_an_integer_of_thousands_of_digits_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(f"seed = {'9' * 5000}")
    for read in (zoo.read_cards, train.recipe, load_table):
        with pytest.raises(ValueError, match=r"long\.toml is not valid TOML: .* 5000 digits"):
            read(str(tmp_path / "long.toml"))


def test_predict_needs_an_image() -> None:
    model = built(num_layers=1)
    with pytest.raises(ValueError, match=r"predict needs at least one image. Received: an array of shape \(0, 32,"):
        model.predict(np.zeros((0, 32, 32, 3), np.float32))
    assert model.predict(np.zeros((3, 32, 32, 3), np.float32), batch_size=2, verbose=0).shape == (3, 5)
