"""The report is one file, complete, escaped and readable."""

from __future__ import annotations

import base64
import importlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import keras
import matplotlib
import numpy as np
import pytest
import typer
from markupsafe import escape
from PIL import Image
from typer.testing import CliRunner

from html_document import Document
from keras_vit import digits, zoo
from keras_vit._util.text import byte_size
from keras_vit.cli import predict
from keras_vit.export import Report
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize import report_page
from keras_vit.visualize.report_page import report, undo_preprocessing
from marks import full_except
from tiny_models import OTHERS, VARIANTS, built

HOSTILE = '<script>alert("1")</script>'
EXPORTS = (
    Report(
        path=Path("files/digits.tflite"),
        bytes=205_000,
        images=8,
        max_error=0.02,
        cosine=0.998765,
        sqnr=31.25,
        agreement=0.875,
        milliseconds=0.42,
        mode="dynamic",
    ),
    Report(
        path=Path("served/digits/1"),
        bytes=1_500_000,
        images=8,
        max_error=0.0,
        cosine=1.0,
        sqnr=float("inf"),
        agreement=1.0,
        milliseconds=1.5,
    ),
)


def written(model: Any, images: Any, folder: Path, **options: Any) -> Document:
    path = report(model, images, folder / "report.html", **options)
    assert [file.name for file in folder.iterdir()] == ["report.html"]
    return Document(path.read_text(encoding="utf-8"))


def pictures(count: int = 1, side: int = 40) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (count, side, side + 8, 3), np.uint8))


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return zoo.load("digits")


@pytest.fixture(scope="module")
def small() -> VisionTransformer:
    return built()


@pytest.fixture(scope="module")
def path(model: VisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report with all sections."""
    target = tmp_path_factory.mktemp("report") / "report.html"
    card = zoo.card("digits")
    images = digits.load().test_images[:4]
    return report(model, images, target, top=3, title="ViT-digits", card=card, exports=EXPORTS)


@pytest.fixture(scope="module")
def document(path: Path) -> Document:
    return Document(path.read_text(encoding="utf-8"))


# The file


def test_nothing_is_loaded_from_elsewhere(document: Document) -> None:
    for tag, attributes in document.tags:
        for name in {"src", "href", "srcset", "data", "action", "poster"} & set(attributes):
            assert attributes[name].startswith("data:" if tag == "img" or name == "src" else ("#", "data:")), tag
    assert not re.search(r"url\((?![\"']?(data:|#))|@import", document.source)
    assert "http://" not in document.source
    assert not document.all("script") and not document.all("link")


def test_every_picture_says_what_it_shows(document: Document) -> None:
    assert all(attributes.get("alt") for attributes in document.all("img"))
    drawings = document.all("svg")
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawings)
    # Distance, filters, similarity, norms, ranks.
    assert len(drawings) == 5
    # Pictures of each digit: the image, rollout, the last block, its four heads.
    assert len(document.all("img")) == 4 * 8 + 1  # the colour scale of the maps


def test_names_in_the_drawings_are_unique_and_found(document: Document) -> None:
    names = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(names) == len(set(names)) > 20
    used = {attributes["href"][1:] for attributes in document.all("use")}
    used.update(re.findall(r"url\(#([^)]+)\)", document.source))
    assert used == set(names)


def test_the_same_report_is_the_same_file(small: VisionTransformer, tmp_path: Path) -> None:
    first, second = (report(small, pictures(), tmp_path / name).read_text() for name in "ab")
    assert first == second


def test_it_is_small(path: Path) -> None:
    assert path.stat().st_size < 300_000


# Text


def test_it_begins_with_the_model_in_one_line(document: Document, model: VisionTransformer) -> None:
    assert "<h1>ViT-digits</h1>" in document.source
    assert f"Vision Transformer of {model.count_params():,} parameters: 4 blocks of 4 heads, width 64" in document.text
    assert "a grid of 8 × 8 patches and a class token;" in document.text
    assert "10 classes from the class token" in document.text


def test_the_predictions_are_the_models(document: Document, model: VisionTransformer) -> None:
    rows = re.findall(r'<tr><td>([^<]*)</td><td><span class="bar"[^>]*>([\d.]+%)</span></td></tr>', document.source)
    rankings = model.classify(digits.load().test_images[:4], top=3)
    assert rows == [(one.label, f"{one.probability:.1%}") for ranking in rankings for one in ranking]
    for name in ("image 1", "image 4"):
        assert f"<h3>{name}</h3>" in document.source


def test_the_logit_lens_ends_with_the_prediction(document: Document, model: VisionTransformer) -> None:
    [lens] = re.findall(r'<div class="lens">.*?</table>', document.source, re.DOTALL)
    rows = re.findall(r"<tr><td.*?</tr>", lens, re.DOTALL)
    assert len(rows) == 4
    leaders = re.findall(r"<strong>(.*?)</strong> (\d+%)", rows[-1])
    best = [ranking[0] for ranking in model.classify(digits.load().test_images[:4], top=1)]
    assert leaders == [(one.label, f"{one.probability:.0%}") for one in best]


def test_the_card_and_the_exports_are_there(document: Document, model: VisionTransformer) -> None:
    assert "99.17 % top-1, scikit-learn digits at 32 px" in document.text
    [table] = re.findall(r'aria-label="exported files.*?</table>', document.source, re.DOTALL)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><td.*?</tr>", table)]
    assert rows[0][:-1] == ["this model", "Keras", byte_size(4 * model.count_params()), "–", "–", "–"]
    assert float(rows[0][-1]) > 0  # milliseconds
    assert rows[1] == ["digits.tflite", "TFLite, dynamic", "200 KiB", "0.998765", "31.2", "87.5%", "0.42"]
    assert rows[2] == ["digits/1", "SavedModel", "1.43 MiB", "1.000000", "equal", "100.0%", "1.50"]


def test_card_and_exports_may_be_dicts_and_may_be_missing(small: VisionTransformer, tmp_path: Path) -> None:
    source = written(
        small, pictures(), tmp_path, card={"name": HOSTILE, "sha256": None}, exports=[EXPORTS[0].to_dict()]
    )
    assert HOSTILE in source.text and not source.all("script")
    assert "sha256" not in source.source
    assert "TFLite, dynamic" in source.text
    without = written(small, pictures(), tmp_path)
    assert "The card" not in without.source and "Exported files" not in without.source


RELATIVE = VARIANTS["relative positions"]
NO_POSITIONS = "Left out: this model has no positions to compare."
NO_ATTENTION = "Left out: this model has no attention."
NO_HEAD = "Left out: this model has no head."
SENTENCES: dict[str, tuple[dict[str, Any], list[str]]] = {
    # case: changes of the config, and a text in the report
    "hybrid": (
        VARIANTS["hybrid"],
        ["7 × 7 filters of the ResNet's first convolution", "ResNet and Vision Transformer"],
    ),
    "gap without positions": (
        {"classifier": "gap", "position": "none"},
        [
            NO_POSITIONS,
            "the mean over all patches",
            "4 × 4 patches; no positions",
        ],
    ),
    "headless, relative": ({**RELATIVE, "num_classes": 0}, [NO_HEAD, "relative positions, which are no vectors"]),
    "map": (VARIANTS["map"], ["the probe's attention alone", "The heads of the pooling"]),
    "registers, logits of every token": (
        {**VARIANTS["registers"], "classifier": "token_unpooled"},
        ["4 × 4 patches, a class token and 3 registers", "these are of the class token"],
    ),
    "logits of every patch, positions in every block": (
        {"classifier": "unpooled", "position_place": "blocks"},
        ["these are of the mean over the patches", "Of the first block; every block has its own."],
    ),
    "distilled": (
        VARIANTS["distilled"],
        ["5 classes from the class and the distillation token", ", the mean of class and distillation token"],
    ),
    "mixer": (OTHERS["mixer"], ["MLP-Mixer of", "2 blocks of a token MLP 24,", NO_ATTENTION, NO_POSITIONS]),
    "BiT": (OTHERS["BiT"], [" ResNet of", "3 units, width 256", "4 × 4 cells;", NO_ATTENTION, NO_POSITIONS]),
    "grey, not square": ({"num_channels": 1, "image_size": (32, 48)}, ["a grid of 4 × 6 patches and a class token"]),
}


@pytest.mark.parametrize("name", full_except(["distilled", "BiT"], SENTENCES))
def test_every_kind_of_model_is_shown_and_what_does_not_apply_is_said(name: str, tmp_path: Path) -> None:
    changes, sentences = SENTENCES[name]
    model = built(**changes)
    [image] = pictures()
    document = written(model, image if model.config.num_channels == 3 else image[..., 0], tmp_path)
    for sentence in sentences:
        assert sentence in document.text
    assert document.text.count("Left out") == sum("Left out" in s or "no vectors" in s for s in sentences)


def test_a_model_inside_of_another_is_shown_by_its_part(tmp_path: Path) -> None:
    inner = built(num_classes=0)
    whole = keras.Sequential([inner, keras.layers.Dense(3)], name="mine")
    document = written(whole, pictures(), tmp_path)
    assert "It is a part of the model 'mine'" in document.text
    assert f"{inner.count_params():,} parameters" in document.text


def test_a_map_covers_the_patches_and_not_the_rest(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no multiple"):
        model = built(image_size=(36, 40))
    document = written(model, pictures(), tmp_path)
    styles = {image.get("style") for image in document.all("img")} - {None}
    assert styles == {"width: 100%; height: 88.89%"}  # 32 of 36 rows


# Hostile text is escaped


def test_labels_and_file_names_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    file = folder / "<script>alert(1)<.png"
    Image.fromarray(pictures()[0]).save(file)
    labels = (HOSTILE, '" onload="x', "<img src=x>", "'a", "&amp;")
    (tmp_path / "out").mkdir()
    document = written(built(labels=labels), [file], tmp_path / "out", title=HOSTILE)
    assert not document.all("script")
    assert not [tag for tag in document.all("img") if "onload" in tag or not tag["src"].startswith("data:")]
    for text in (*labels, file.name, HOSTILE):
        assert escape(text) in document.source and text in document.text
    assert {f"{file.name} as the model sees it"} <= {image["alt"] for image in document.all("img")}


# After an error the old file is still there


@pytest.mark.parametrize(
    ("images", "error", "said"),
    [
        (["nothing.png"], FileNotFoundError, "nothing.png"),
        ([Path(__file__)], ValueError, "not an image of a known format"),
        ([], ValueError, "1 to 16 images.*Received: 0"),
        (pictures(17), ValueError, "1 to 16 images.*Received: 17"),
        (np.zeros((17, 8, 8, 3), np.uint8), ValueError, "Received: 17"),
        (np.full((8, 8, 3), -1.0), ValueError, "pixels from 0 to 255"),
    ],
    ids=["missing", "no image", "none", "too many", "too large a batch", "prepared"],
)
def test_bad_images_leave_no_file(
    images: Any, error: type[Exception], said: str, small: VisionTransformer, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        report(small, images, tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_when_the_new_one_is_complete(
    small: VisionTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    with monkeypatch.context() as broken, pytest.raises(RuntimeError):
        broken.setattr("keras_vit.visualize.report_page._render", Broken())
        report(small, pictures(), target)
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    assert report(small, pictures(), str(target)) == target
    assert target.read_text().startswith("<!DOCTYPE html>")


class Broken:
    """Let the page fail while it is written."""

    def __call__(self, *_: Any, **__: Any) -> Broken:
        return self

    def encode(self) -> bytes:
        raise RuntimeError("the disk is full")


@pytest.mark.parametrize(
    ("place", "error", "said"),
    [("missing/report.html", FileNotFoundError, "no folder for the report"), (".", ValueError, "the folder")],
)
def test_a_path_that_cannot_be_is_refused(
    place: str, error: type[Exception], said: str, small: VisionTransformer, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        report(small, pictures(), tmp_path / place)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("top", [0, -1, True, 2.5, None])
def test_top_is_a_number_of_classes(top: Any, small: VisionTransformer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="top must be an integer >= 1.*Received"):
        report(small, pictures(), tmp_path / "report.html", top=top)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "keras-vit-zoo\[plots\]"'):
        importlib.reload(report_page)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = built()
    head = model.get_layer("block_1").mlp
    head.weights[0].assign(np.full(head.weights[0].shape, np.nan))
    with pytest.raises(ValueError, match="NaN or infinity"):
        report(model, pictures(), tmp_path / "report.html")


# Pictures


@pytest.mark.parametrize(
    "preprocessing",
    [{}, {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}, {"mean": (0.0,), "std": (1 / 255,)}],
    ids=["default", "ImageNet", "pixels"],
)
def test_a_picture_is_shown_as_it_was_before_its_preparation(preprocessing: dict[str, Any]) -> None:
    model = built(preprocessing=preprocessing)
    [pixels] = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    np.testing.assert_array_equal(undo_preprocessing(model.config, model.preprocess(pixels)[0]), pixels)


def test_images_are_of_the_size_that_a_page_shows(tmp_path: Path) -> None:
    model = built(image_size=(900, 600), patch_size=150)
    noise = np.random.default_rng(0).integers(0, 256, (900, 600, 3), np.uint8)
    document = written(model, noise, tmp_path)
    sizes = set()
    for shown in document.all("img"):
        kind, _, data = shown["src"].partition(",")
        with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
            assert picture.format is not None and picture.format.lower() in kind
            sizes.add(picture.size)
    assert sizes == {(299, 448), (4, 6), (64, 1)}  # the picture, maps with one pixel per patch, their scale


def test_the_distances_are_dots_at_their_blocks() -> None:
    distance = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
    [axes] = report_page.draw_distances(distance).axes
    dots = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_array_equal(dots, [[1, 1], [1, 2], [1, 3], [2, 4], [2, 5], [2, 6]])
    assert axes.get_ylim()[0] == 0


def test_norms_that_differ_by_orders_of_magnitude_are_on_a_logarithmic_axis() -> None:
    norms = np.ones((3, 2, 9), np.float32)
    [axes] = report_page.draw_norms(norms, prefix_tokens=1).axes
    assert axes.get_yscale() == "linear"
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1] == "class token"
    norms[2, 1, 5] = 300
    [axes] = report_page.draw_norms(norms, prefix_tokens=0).axes
    assert axes.get_yscale() == "log"


def test_of_a_large_grid_evenly_spaced_maps_are_drawn() -> None:
    similarity = np.zeros((40, 20, 40, 20), np.float32)
    similarity[39, 19] = 1
    axes, scale = report_page.draw_similarities(similarity).axes
    mosaic = axes.images[0].get_array()
    gap = 6  # 0.15 of the longer side
    assert mosaic.shape == (16 * 46 - gap, 16 * 26 - gap, 4)
    np.testing.assert_allclose(mosaic[-1, -1], matplotlib.colormaps["viridis"](1.0))  # the last map is there
    assert axes.get_xticklabels()[0].get_text() == "1"
    assert scale.get_ylim() == (-1, 1)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_filters_of_any_number_of_channels_are_shown(channels: int) -> None:
    [axes] = report_page.draw_filters(np.random.default_rng(0).random((9, 5, 4, channels), np.float32)).axes
    mosaic = np.asarray(axes.images[0].get_array())
    assert mosaic.shape == (2 * 6 - 1, 7 * 5 - 1, 4)
    assert mosaic[..., 3].sum() == 9 * 5 * 4  # cells without a filter are transparent


def test_a_patch_is_as_dense_as_it_is_above_the_average() -> None:
    weights = np.ones((4, 5), np.float32)
    assert not report_page.heat(weights)[..., 3].any()  # no patch differs
    assert not report_page.heat(0 * weights)[..., 3].any()
    weights.ravel()[:5] = 0.5, 2, 3, 90, 0
    sheet = report_page.heat(weights * 20 / weights.sum())
    assert sheet.dtype == np.uint8 and sheet.shape == (4, 5, 4)
    assert (report_page.heat(weights) == sheet).all()  # only ratios matter
    assert sheet[0, 3, 3] == round(255 * report_page.MAX_OPACITY)
    steps = report_page.heat_scale()[0, :, 3].astype(int)
    assert steps[0] == 0 and steps[-1] == round(255 * report_page.MAX_OPACITY) and (np.diff(steps) > 0).all()


# The command


def run(*arguments: object) -> str:
    app = typer.Typer()
    app.command()(predict.visualize)
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    file = tmp_path / "seven.png"
    Image.fromarray(digits.load().test_images[0]).save(file)
    return file


def test_the_command_prints_the_path_and_shows_the_card(digit: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    assert run("digits", digit, "--out", out, "--top", 2) == f"{out}\n"
    document = Document(out.read_text(encoding="utf-8"))
    assert "<h1>ViT-digits</h1>" in document.source and "<h3>seven.png</h3>" in document.source
    assert "99.17 % top-1" in document.text


@pytest.mark.full
def test_of_a_file_the_command_knows_no_card(
    digit: Path, tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model.save("mine.keras")
    assert run("mine.keras", digit, "--image-size", 48) == "report.html\n"
    document = Document(Path("report.html").read_text(encoding="utf-8"))
    assert "<h1>mine.keras</h1>" in document.source and "The card" not in document.text
    assert "12 × 12 patches" in document.text


def test_a_missing_image_is_said_before_the_model_is_loaded() -> None:
    with pytest.raises(FileNotFoundError, match=r"no image file or folder 'nothing\.png'"):
        run("no such model", "nothing.png")


def test_images_of_the_same_file_name_are_told_apart(small: VisionTransformer, tmp_path: Path) -> None:
    files = []
    for name in ("a/x.png", "b/x.png", "b/y.png", "b/a/x.png"):
        files.append(tmp_path / "pictures" / name)
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pictures()[0]).save(files[-1])
    (tmp_path / "report").mkdir()
    page = written(small, [*files, files[2], pictures()[0]], tmp_path / "report")
    names = re.findall("<h3>(.*?)</h3>", page.source)[:6]
    assert names[:2] == ["pictures/a/x.png", "b/x.png"]
    assert page.source.count("<h1>Vision Transformer, 2 blocks of width 32</h1>") == 1  # not Keras' name, "vit"
    assert names[2:] == [f"{files[2]}, image 3", "b/a/x.png", f"{files[2]}, image 5", "image 6"]
