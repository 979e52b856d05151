"""Models by their names, with files as their authors published them; a folder replaces the network."""

from __future__ import annotations

import gc
import json
import warnings
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from file_server import FileServer, Served
from keras_vit import VisionTransformer, ViTConfig, converters, zoo
from keras_vit.converters.loading import variables_by_path as weights_of
from keras_vit.errors import DownloadError
from keras_vit.model import layers
from keras_vit.zoo import cards, catalogue, pretrained
from marks import full_except
from model_weights import values
from tiny_models import built

pytest_plugins = ["download_fixtures"]

TUNED_TAG = "augreg-imagenet21k+imagenet2012"
# A hybrid and a pure one without class token; the others take seconds and gigabytes each.
QUICK = {("ViT-S/16", "gsam")}
FILES = [
    (name, tag)
    for name in catalogue.names()
    for tag, row in cards.card(name).weights.items()
    if row.base.startswith("gs://vit_models/")
]
TI = "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"
TUNED = TI + "--imagenet2012-steps_20k-lr_0.03-res_384"
OTHER = "Ti_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.03-do_0.1-sd_0.1--cifar100-steps_10k-lr_0.003-res_224"

# ---- every file that a card names


def noise(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random values of a weight, always the same for a name, so that they need not be stored."""
    return np.random.default_rng(zlib.crc32(path.encode())).random(shape, np.float32) - np.float32(0.4)


def filled(config: ViTConfig) -> VisionTransformer:
    """Return a model of any size with random weights."""
    with layers.uninitialized():
        model = VisionTransformer(config)
    for path, variable in weights_of(model).items():
        variable.assign(noise(path, tuple(variable.shape)))
    return model


@pytest.mark.parametrize(("name", "tag"), full_except(QUICK, FILES, marks=pytest.mark.slow))
def test_every_published_file_comes_and_goes_to_the_bit(
    name: str, tag: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = cards.card(name).weights[tag]
    config = ViTConfig.from_name(name, **row.facts)
    path = tmp_path / row.base.removeprefix("gs://") / row.file
    path.parent.mkdir(parents=True)
    try:
        converters.save(filled(config), path, format="google")
        gc.collect()  # the largest model has 2.5 GB: one at a time
        monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path))
        model = zoo.load(name, weights=tag)
        assert model.config.replace(dropout_rate=0.0) == config.replace(dropout_rate=0.0)
        for variable, value in weights_of(model).items():
            assert np.array_equal(value, noise(variable, tuple(value.shape))), variable
    finally:
        path.unlink(missing_ok=True)
    assert [place.name for place in cache.iterdir()] == ["results"]  # nothing is downloaded


# ---- names, paths and URLs


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with files and folders that are named like models."""
    for folder in ("digits", "b16", "Ti", "B_16-i21k-300ep-mine"):
        (tmp_path / folder).mkdir()
    for file in (f"{TI}.npz", "mine.npz", "sam", "Ti/32"):
        (tmp_path / file).touch()
    (tmp_path / "google" / "vit-base-patch16-224").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


PUBLISHED = f"gs://vit_models/augreg/{TI}.npz"
SPECS: list[tuple[Any, str | None, str]] = [
    # what is asked for, name of the model, source
    ("digits", "ViT-digits", cards.select(cards.card("digits")).location),  # although there is such a folder
    ("b16", "ViT-B/16", cards.select(cards.card("B/16")).location),
    ("./digits", None, "./digits"),
    ("digits/", None, "digits/"),
    (Path("digits"), None, "digits"),
    ("mine.npz", None, "mine.npz"),
    ("absent.npz", None, "absent.npz"),
    ("Ti/32", None, "Ti/32"),  # an architecture without published weights
    ("google/vit-base-patch16-224", None, "google/vit-base-patch16-224"),
    (TI, "ViT-Ti/16", PUBLISHED),
    (f"{TI}.npz", None, f"{TI}.npz"),  # the name of a file that is there
    (f"{TI.replace('none', 'light1')}.npz", "ViT-Ti/16", PUBLISHED.replace("none", "light1")),
    ("B_16-i21k-300ep-mine", None, "B_16-i21k-300ep-mine"),
    ("https://host/digits", None, "https://host/digits"),
    ("hf://org/repo/model.safetensors", None, "hf://org/repo/model.safetensors"),
]


def test_a_name_of_the_zoo_comes_before_a_path_and_a_path_before_any_other_name(crowded: Path) -> None:
    for spec, name, source in SPECS:
        choice = pretrained.resolve(spec)
        assert (choice.name, choice.source, choice.is_file) == (name, source, name is None)
        assert (choice.published is not None) == (name is not None)


def test_a_tag_of_the_card_comes_before_a_path(crowded: Path) -> None:
    for weights, source in (
        ("sam", "gs://vit_models/sam/ViT-B_16.npz"),  # a tag, although there is such a file
        ("./sam", "./sam"),
        (Path("sam"), "sam"),
        ("digits", "digits"),  # a folder, not a tag of this card
        ("hf://org/repo/model.safetensors", "hf://org/repo/model.safetensors"),
        (None, None),
    ):
        choice = pretrained.resolve("B/16", weights, default=None)
        assert (choice.name, choice.source) == ("ViT-B/16", source)
        assert (choice.published is not None) == (weights == "sam")
    assert pretrained.fetch_source(pretrained.resolve("~/mine.npz")) == crowded / "mine.npz"
    assert pretrained.fetch_source(pretrained.resolve("B/16", "~/sam")) == crowded / "sam"


def test_neither_a_name_nor_a_path_is_an_error(crowded: Path) -> None:
    for spec in ("ViT-B/17x", "nothing", "", " "):
        with pytest.raises(zoo.UnknownModelError, match=f"Received: '{spec}'"):
            zoo.load(spec)
    with pytest.raises(ValueError, match="weights are for a model's name.*'sam'.*'./digits'"):
        pretrained.resolve("./digits", "sam")
    with pytest.raises(ValueError, match="Received: weights=''"):
        zoo.load("B/16", weights="")
    # What is written as a path is a file that may be missing, though it would be a name without the dot.
    paths = ("absent.npz", "absent.tflite", "nowhere/digits", "runs/nothing/", "./nothing", "../x", "./B_16", f"./{TI}")
    for spec in paths:
        with pytest.raises(FileNotFoundError, match=f"There is no file or folder .*{Path(spec).name}"):
            zoo.load(spec)
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        zoo.load("B/16", weights="./nothing")


def test_a_folder_whose_processor_crops_to_another_size_says_which_size_is_loaded(tmp_path: Path) -> None:
    folder = converters.save(built(image_size=64, patch_size=16), tmp_path / "vit", format="huggingface").parent
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor |= {"size": {"height": 48, "width": 48}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.warns(UserWarning, match=r"images of 64 x 64 pixels.*crops 32 x 32.*image_size=32"):
        assert zoo.load(folder).config.size == (64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert zoo.load(folder, image_size=32).config.size == (32, 32)


def test_load_takes_a_file_a_folder_and_a_path_as_the_converters_do(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = zoo.load("digits")
    converters.save(model, "mine.npz", format="google")
    Path("runs/mine").mkdir(parents=True)
    model.save("runs/mine/model.keras")
    for spec in (Path("mine.npz"), "runs/mine"):
        loaded = zoo.load(spec, num_classes=3, image_size=48, dtype="mixed_bfloat16")
        assert (loaded.config.num_classes, loaded.config.size) == (3, (48, 48))
        assert loaded.layers[1].compute_dtype == "bfloat16"
    for options, error in (
        ({"dropout_rate": 0.1}, "dropout_rate"),
        ({"weights": None}, "weights=None builds a model's name"),
        ({"weights": "sam"}, "weights are for a model's name"),
    ):
        with pytest.raises(ValueError, match=error):
            zoo.load("mine.npz", **options)


def test_what_describes_a_file_is_refused_with_a_name() -> None:
    with pytest.raises(ValueError, match=r"ViT-digits is a model of the zoo.*'config'.*num_heads"):
        pretrained.load_resolved(pretrained.resolve("digits"), config={"num_heads": 4}, format=None)


# ---- loading files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a mirror with two AugReg files of Ti/16, the recommended one and another."""
    folder = tmp_path_factory.mktemp("mirror")
    model = filled(ViTConfig.from_name("Ti/16", image_size=384))
    converters.save(model, folder / f"{TUNED}.npz", format="google")
    small = filled(ViTConfig.from_name("Ti/16", num_classes=100))
    converters.save(small, folder / f"{OTHER}.npz", format="google")
    return folder


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of the embedded model's architecture with a hundred classes."""
    config = zoo.load("digits").config.replace(num_classes=100, labels=None)
    return converters.save(filled(config), tmp_path_factory.mktemp("own") / "own head.npz", format="google")


@pytest.fixture
def mirror(files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the package take its files from this mirror."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(files))
    return files


@pytest.fixture
def web(server: FileServer, files: Path, hundred: Path, cache: Path) -> str:
    """Serve all of these files."""
    server.files = {f"/{path.relative_to(files)}": Served(path.read_bytes()) for path in files.rglob("*.*")}
    server.files[f"/{quote(hundred.name)}"] = Served(hundred.read_bytes())
    return server.url


def test_the_name_of_a_model_or_of_its_file_loads_it(mirror: Path) -> None:
    preprocessing = cards.select(cards.card("Ti/16")).preprocessing
    for name in ("TI_16", f"{TUNED.upper()}.npz"):
        model = zoo.load(name)
        assert (model.config.size, model.config.labels) == ((384, 384), "imagenet2012")
        assert model.config.preprocessing == preprocessing
        assert np.array_equal(model.get_layer("head").kernel, noise("head/kernel", (192, 1000)))
    model = zoo.load(OTHER)
    assert (model.config.size, model.config.num_classes, model.config.labels) == ((224, 224), 100, None)
    assert model.config.preprocessing == preprocessing


def test_a_path_or_url_is_loaded_by_the_name_of_its_architecture(
    hundred: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hundred.parent)
    for source in (str(hundred), hundred, hundred.as_uri(), f"{web}/{quote(hundred.name)}", hundred.name):
        model = zoo.load("ViT-digits", weights=source)
        assert model.config.num_classes == 100
        assert model.config.labels is None  # a hundred classes are not the digits
        assert np.array_equal(model.get_layer("head").bias, noise("head/bias", (100,)))


def test_size_classes_precision_and_fields_are_as_wanted(mirror: Path) -> None:
    model = zoo.load("Ti/16", image_size=(64, 96), num_classes=5, dtype="mixed_bfloat16", dropout_rate=0.1)
    assert (model.config.size, model.config.dropout_rate) == ((64, 96), 0.1)
    assert values(model)["position/embedding"].shape == (1, 1 + 4 * 6, 192)
    assert not values(model)["head/kernel"].any()
    assert model.get_layer("block_3").compute_dtype == "bfloat16"
    logits = model(np.zeros((1, 64, 96, 3), np.float32))
    assert (logits.shape, logits.dtype) == ((1, 5), "float32")


def test_a_head_of_ones_own_has_labels_of_ones_own() -> None:
    assert zoo.load("digits", num_classes=5).config.labels is None
    assert zoo.load("digits", weights=None, num_classes=5).config.labels is None
    named = zoo.load("digits", num_classes=2, labels=("cat", "dog"))
    assert {best.label for best in named.decode_predictions(np.zeros((1, 2)))[0]} == {"cat", "dog"}
    assert zoo.load("digits", num_classes=0).config.num_classes == 0
    with pytest.raises(zoo.UnknownModelError, match="ViT-Ti/32 has no published weights"):
        zoo.load("Ti/32")


def test_no_weights_are_random_ones(cache: Path) -> None:
    first, second = (values(zoo.load("Ti/16", weights=None, image_size=32, num_layers=1)) for _ in range(2))
    assert not np.array_equal(first["block_0/mlp/dense1/kernel"], second["block_0/mlp/dense1/kernel"])
    assert zoo.load("Ti/16", weights=None).config == ViTConfig.from_name("Ti/16")
    config = zoo.load("Ti/16", weights=None, classifier="gap", num_layers=1, image_size=32).config
    assert (config.classifier, config.class_token) == ("gap", False)
    assert not cache.exists()


def test_the_embedded_model_loads_without_any_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    model = zoo.load("ViT-digits", image_size=48)
    assert (model.config.labels, model.config.num_classes, model.config.grid) == ("digits", 10, (12, 12))
    with pytest.raises(DownloadError, match="KERAS_VIT_OFFLINE") as caught:
        zoo.load("Ti/16")
    assert f"https://storage.googleapis.com/vit_models/augreg/{TUNED}.npz" in str(caught.value)
    assert not cache.exists()


# ---- errors


def test_another_architecture_under_a_name_is_refused(files: Path) -> None:
    for name, said in (
        ("ViT-S/16", "hidden_size 192 instead of 384"),
        ("Ti/32", r"patch_size \(16, 16\) instead of \(32, 32\)"),
        ("R+ViT-Ti/16", r"a ResNet of None units instead of \(\)"),
        ("ViT-L/16", "num_layers 12 instead of 24"),
    ):
        with pytest.raises(ValueError, match=said):
            zoo.load(name, weights=files / f"{TUNED}.npz")


def test_a_wrong_name_tag_or_field_is_refused_with_those_there_are(cache: Path) -> None:
    for name, options, said in (
        ("ViT-B/61", {}, r"nearest.*'ViT-B/61'"),
        ("Ti/16", {"weights": "sam"}, r"ViT-Ti/16 has the weights \['augreg.*weights='sam'"),
        ("Ti/16", {"dropout": 0.1}, r"\['dropout'\].*dropout_rate"),
        ("Ti/16", {"weights": None, "clasifier": "gap"}, r"clasifier.*classifier"),
    ):
        with pytest.raises(ValueError, match=said):
            zoo.load(name, **options)
    assert not cache.exists()


def test_changes_that_the_weights_cannot_follow_are_refused() -> None:
    for changes in ({"num_layers": 2}, {"mlp_dim": 512}, {"layer_scale": 0.1}, {"num_registers": 4}):
        with pytest.raises(converters.CheckpointError, match="does not fit the model"):
            zoo.load("digits", **changes)


@pytest.mark.full
def test_the_config_beside_a_file_is_obeyed_wherever_it_comes_from(files: Path, server: FileServer) -> None:
    model = filled(ViTConfig.from_name("Ti/16", image_size=32, num_classes=2, activation="gelu_quick"))
    folder = converters.save(model, files / "hub", format="huggingface").parent
    server.files = {f"/hub/{path.name}": Served(path.read_bytes()) for path in folder.iterdir()}
    for weights in (folder, f"{server.url}/hub/model.safetensors"):
        again = zoo.load("Ti/16", weights=weights)
        assert (again.config.activation, again.config.norm_epsilon) == ("gelu_quick", model.config.norm_epsilon)
    bare = converters.save(model, files / "bare", format="timm")
    server.files = {"/bare/model.safetensors": Served(bare.read_bytes())}  # the name tells the heads
    assert zoo.load("Ti/16", weights=f"{server.url}/bare/model.safetensors").config.num_heads == 3


def test_labels_that_a_file_has_go_before_the_cards(tmp_path: Path) -> None:
    digits = zoo.load("digits")
    own = VisionTransformer(digits.config.replace(labels=tuple("abcdefghij")))
    path = converters.save(own, tmp_path / "own.npz", format="google")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its head, which is all zeros
        assert zoo.load("digits", weights=path).config.labels == tuple("abcdefghij")


def test_facts_of_a_file_are_an_argument_of_another_function() -> None:
    with pytest.raises(ValueError, match=r"converters\.load\(path, config=\.\.\.\)"):
        zoo.load("x.pth", config={"num_heads": 6})
