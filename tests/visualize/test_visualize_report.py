"""The report is one file, complete, escaped and readable."""

from __future__ import annotations

import base64
import errno
import importlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import keras
import matplotlib
import numpy as np
import pytest
from markupsafe import escape
from PIL import Image

from command_line import run
from html_document import Document
from keras_vit import digits, zoo
from keras_vit._util import files
from keras_vit._util.text import byte_size
from keras_vit.export import Report
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train.evaluation import Evaluation
from keras_vit.visualize import report_page
from keras_vit.visualize.report_page import report, undo_preprocessing
from marks import full_except
from tiny_models import OTHERS, VARIANTS, built

HOSTILE = '<script>alert("1")</script>'
MEASURED: dict[str, Any] = {"images": 8, "milliseconds": 0.42}
EXPORTS = (
    Report(
        path=Path("files/digits.tflite"),
        **{**MEASURED, "bytes": 205_000, "max_error": 0.02, "cosine": 0.998765, "sqnr": 31.25, "agreement": 0.875},
        mode="dynamic",
    ),
    Report(
        path=Path("served/digits/1"),
        **{**MEASURED, "bytes": 1_500_000, "max_error": 0.0, "cosine": 1.0, "sqnr": float("inf"), "agreement": 1.0},
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
def document(model: VisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Document:
    """Write a report with all sections."""
    images, folder = digits.load().test_images[:4], tmp_path_factory.mktemp("report")
    return written(model, images, folder, top=3, title="ViT-digits", card=zoo.card("digits"), exports=EXPORTS)


def test_nothing_is_loaded_from_elsewhere_and_every_picture_says_what_it_shows(document: Document) -> None:
    for tag, attributes in document.tags:
        for name in {"src", "href", "srcset", "data", "action", "poster"} & set(attributes):
            assert attributes[name].startswith("data:" if tag == "img" or name == "src" else ("#", "data:")), tag
    assert not re.search(r"url\((?![\"']?(data:|#))|@import", document.source)
    assert "http://" not in document.source and len(document.source) < 300_000
    assert not document.all("script") and not document.all("link")
    assert all(attributes.get("alt") for attributes in document.all("img"))
    drawings = document.all("svg")
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawings)
    assert len(drawings) == 5  # distance, filters, similarity, norms, ranks
    # Pictures of each digit: the image, rollout, the last block, its four heads.
    assert len(document.all("img")) == 4 * 8 + 1  # the colour scale of the maps
    names = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    used = {attributes["href"][1:] for attributes in document.all("use")}
    used.update(re.findall(r"url\(#([^)]+)\)", document.source))
    assert len(names) == len(set(names)) > 20 and used == set(names)


def test_text_and_tables_are_of_the_model_the_card_and_the_exports(document: Document, model: Any) -> None:
    assert "<h1>ViT-digits</h1>" in document.source
    assert f"Vision Transformer of {model.count_params():,} parameters: 4 blocks of 4 heads, width 64" in document.text
    assert "a grid of 8 × 8 patches and a class token;" in document.text
    assert "10 classes from the class token" in document.text
    rows = re.findall(r'<tr><td>([^<]*)</td><td><span class="bar"[^>]*>([\d.]+%)</span></td></tr>', document.source)
    rankings = model.classify(digits.load().test_images[:4], top=3)
    assert rows == [(one.label, f"{one.probability:.1%}") for ranking in rankings for one in ranking]
    assert "<h3>image 1</h3>" in document.source and "<h3>image 4</h3>" in document.source
    # The logit lens ends with the prediction.
    [lens] = re.findall(r'<div class="lens">.*?</table>', document.source, re.DOTALL)
    blocks = re.findall(r"<tr><td.*?</tr>", lens, re.DOTALL)
    leaders = re.findall(r"<strong>(.*?)</strong> (\d+%)", blocks[-1])
    assert len(blocks) == 4 and leaders == [(best.label, f"{best.probability:.0%}") for best, *_ in rankings]
    assert "99.17 % top-1, scikit-learn digits at 32 px" in document.text
    [table] = re.findall(r'aria-label="exported files.*?</table>', document.source, re.DOTALL)
    files = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><td.*?</tr>", table)]
    assert files[0][:-1] == ["this model", "Keras", byte_size(4 * model.count_params()), "–", "–", "–"]
    assert float(files[0][-1]) > 0  # milliseconds
    assert files[1] == ["digits.tflite", "TFLite, dynamic", "200 KiB", "0.998765", "31.2", "87.5%", "0.42"]
    assert files[2] == ["digits/1", "SavedModel", "1.43 MiB", "1.000000", "equal", "100.0%", "0.42"]


@pytest.mark.full
def test_card_and_exports_may_be_dicts_and_may_be_missing(small: VisionTransformer, tmp_path: Path) -> None:
    exports = [EXPORTS[0].to_dict()]
    source = written(small, pictures(), tmp_path, card={"name": HOSTILE, "sha256": None}, exports=exports)
    assert HOSTILE in source.text and not source.all("script")
    assert "sha256" not in source.source and "TFLite, dynamic" in source.text
    without = written(small, pictures(), tmp_path)
    assert "The card" not in without.source and "Exported files" not in without.source
    assert written(small, pictures(), tmp_path).source == without.source  # the same report is the same file


NO_POSITIONS = "Left out: this model has no positions to compare."
NO_ATTENTION = "Left out: this model has no attention."
SENTENCES: dict[str, tuple[dict[str, Any], list[str]]] = {
    # case: changes of the config, and a text in the report
    "hybrid": (
        VARIANTS["hybrid"],
        ["7 × 7 filters of the ResNet's first convolution", "ResNet and Vision Transformer"],
    ),
    "gap without positions": ({"classifier": "gap", "position": "none"}, [NO_POSITIONS, "the mean over all patches"]),
    "headless, relative": (
        {**VARIANTS["relative positions"], "num_classes": 0},
        ["Left out: this model has no head.", "relative positions, which are no vectors"],
    ),
    "map": (VARIANTS["map"], ["the probe's attention alone", "The heads of the pooling"]),
    "registers, logits of every token": (
        {**VARIANTS["registers"], "classifier": "token_unpooled"},
        ["4 × 4 patches, a class token and 3 registers", "these are of the class token"],
    ),
    "logits of every patch, positions in every block": (
        {"classifier": "unpooled", "position_place": "blocks"},
        ["these are of the mean over the patches", "Of the first block; every block has its own."],
    ),
    "distilled": (VARIANTS["distilled"], ["5 classes from the class and the distillation token"]),
    "mixer": (OTHERS["mixer"], ["MLP-Mixer of", "2 blocks of a token MLP 24,", NO_ATTENTION, NO_POSITIONS]),
    "BiT": (OTHERS["BiT"], [" ResNet of", "3 units, width 256", "4 × 4 cells;", NO_ATTENTION, NO_POSITIONS]),
    "grey, not square": ({"num_channels": 1, "image_size": (32, 48)}, ["a grid of 4 × 6 patches and a class token"]),
}


@pytest.mark.parametrize("name", full_except(["grey, not square"], SENTENCES))
def test_every_kind_of_model_is_shown_and_what_does_not_apply_is_said(name: str, tmp_path: Path) -> None:
    changes, sentences = SENTENCES[name]
    model = built(**changes)
    [image] = pictures()
    document = written(model, image if model.config.num_channels == 3 else image[..., 0], tmp_path)
    assert not [sentence for sentence in sentences if sentence not in document.text]
    assert document.text.count("Left out") == sum("Left out" in s or "no vectors" in s for s in sentences)


def test_a_model_inside_of_another_is_shown_by_its_part_and_maps_cover_the_patches(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no multiple"):
        inner = built(num_classes=0, image_size=(36, 40))
    whole = keras.Sequential([inner, keras.layers.Dense(3)], name="mine")
    document = written(whole, pictures(), tmp_path)
    assert "It is a part of the model 'mine'" in document.text
    assert f"{inner.count_params():,} parameters" in document.text
    styles = {image.get("style") for image in document.all("img")} - {None}
    assert styles == {"width: 100%; height: 88.89%"}  # 32 of 36 rows


def test_labels_and_file_names_are_escaped_and_told_apart(tmp_path: Path) -> None:
    files = []
    for name in ("<script>alert(1)<.png", "a/x.png", "b/x.png", "b/a/x.png"):
        files.append(tmp_path / "pictures" / name)
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pictures()[0]).save(files[-1])
    labels = (HOSTILE, '" onload="x', "<img src=x>", "'a", "&amp;")
    (tmp_path / "out").mkdir()
    document = written(built(labels=labels), [*files, files[2]], tmp_path / "out", title=HOSTILE)
    assert not document.all("script")
    assert not [tag for tag in document.all("img") if "onload" in tag or not tag["src"].startswith("data:")]
    for text in (*labels, files[0].name, HOSTILE):
        assert escape(text) in document.source and text in document.text
    assert {f"{files[0].name} as the model sees it"} <= {image["alt"] for image in document.all("img")}
    names = re.findall("<h3>(.*?)</h3>", document.source)[1:5]
    assert names == ["pictures/a/x.png", f"{files[2]}, image 3", "b/a/x.png", f"{files[2]}, image 5"]


@pytest.mark.full
def test_on_a_full_disk_the_old_report_stays(
    small: VisionTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "an old page of keras-vit"
    with files.writing_result(tmp_path / "report.html") as file:
        file.write(old.encode())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.html'"):
        report(small, pictures(), tmp_path / "report.html")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.html", old)]


def test_what_is_wrong_leaves_no_file(small: VisionTransformer, tmp_path: Path) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (["nothing.png"], FileNotFoundError, "nothing.png"),
        ([Path(__file__)], ValueError, "not an image of a known format"),
        ([], ValueError, "1 to 16 images.*Received: 0"),
        (pictures(17), ValueError, "1 to 16 images.*Received: 17"),
        (np.zeros((17, 8, 8, 3), np.uint8), ValueError, "Received: 17"),
        (np.full((8, 8, 3), -1.0), ValueError, "pixels from 0 to 255"),
    ]
    for images, error, said in wrong:
        with pytest.raises(error, match=said):
            report(small, images, tmp_path / "report.html")
    for top in (0, -1, True, 2.5, None):
        with pytest.raises(ValueError, match="top must be an integer >= 1.*Received"):
            report(small, pictures(), tmp_path / "report.html", top=top)
    with pytest.raises(FileNotFoundError, match="no folder for the file"):
        report(small, pictures(), tmp_path / "missing" / "report.html")
    with pytest.raises(ValueError, match="the folder"):
        report(small, pictures(), tmp_path)
    broken = built()
    kernel = broken.get_layer("block_1").mlp.weights[0]
    kernel.assign(np.full(kernel.shape, np.nan))
    with pytest.raises(ValueError, match="NaN or infinity"):
        report(broken, pictures(), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "keras-vit-zoo\[plots\]"'):
        importlib.reload(report_page)


def test_in_a_notebook_an_evaluation_and_an_export_are_tables() -> None:
    metrics = {"top1": 0.5, "top5": 1.0, "loss": 0.25}
    counts = {"count": 1234, "unlabelled": 0, "skipped": 3, "images_per_second": 9.0}
    evaluation = Document(Evaluation(data="<b>", labels="single", metrics=metrics, **counts)._repr_html_())
    assert "top-1 50.00%" in evaluation.text and "unreadable 3" in evaluation.text and "<b>" in evaluation.text
    assert "without a label" not in evaluation.text and "&lt;b&gt;" in evaluation.source
    exported = Document(EXPORTS[0]._repr_html_())
    assert "cosine 0.998765" in exported.text and "200 KiB" in exported.text and "None" not in exported.text


# Pictures


def test_a_picture_is_shown_as_it_was_before_its_preparation() -> None:
    [pixels] = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    imagenet = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    for preprocessing in ({}, imagenet, {"mean": (0.0,), "std": (1 / 255,)}):
        model = built(preprocessing=preprocessing)
        np.testing.assert_array_equal(undo_preprocessing(model.config, model.preprocess(pixels)[0]), pixels)


@pytest.mark.full
def test_images_are_of_the_size_that_a_page_shows(tmp_path: Path) -> None:
    model = built(image_size=(900, 600), patch_size=150)
    noise = np.random.default_rng(0).integers(0, 256, (900, 600, 3), np.uint8)
    sizes = set()
    for shown in written(model, noise, tmp_path).all("img"):
        with Image.open(io.BytesIO(base64.b64decode(shown["src"].partition(",")[2]))) as picture:
            sizes.add(picture.size)
    assert sizes == {(299, 448), (4, 6), (64, 1)}  # the picture, maps with one pixel per patch, their scale


def test_distances_and_norms_are_drawn_at_their_blocks() -> None:
    distance = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
    [axes] = report_page.draw_distances(distance).axes
    dots = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_array_equal(dots, [[1, 1], [1, 2], [1, 3], [2, 4], [2, 5], [2, 6]])
    norms = np.ones((3, 2, 9), np.float32)
    [axes] = report_page.draw_norms(norms, prefix_tokens=1).axes
    assert axes.get_yscale() == "linear"
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1] == "class token"
    norms[2, 1, 5] = 300  # orders of magnitude
    [axes] = report_page.draw_norms(norms, prefix_tokens=0).axes
    assert axes.get_yscale() == "log"


def test_maps_and_filters_are_tiled_with_gaps() -> None:
    similarity = np.zeros((40, 20, 40, 20), np.float32)
    similarity[39, 19] = 1
    axes, scale = report_page.draw_similarities(similarity).axes  # of a large grid, evenly spaced maps
    mosaic = axes.images[0].get_array()
    gap = 6  # 0.15 of the longer side
    assert mosaic.shape == (16 * 46 - gap, 16 * 26 - gap, 4)
    np.testing.assert_allclose(mosaic[-1, -1], matplotlib.colormaps["viridis"](1.0))  # the last map is there
    assert axes.get_xticklabels()[0].get_text() == "1" and scale.get_ylim() == (-1, 1)
    for channels in (1, 3, 4):
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
    assert steps[0] == 0 and steps[-1] == sheet[0, 3, 3] and (np.diff(steps) > 0).all()


# The command


def test_the_command_prints_the_path_and_shows_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(digits.load().test_images[0]).save("seven.png")
    assert run("visualize", "digits", "seven.png", "--out", "out.html", "--top", 2) == "out.html\n"
    document = Document(Path("out.html").read_text(encoding="utf-8"))
    assert "<h1>ViT-digits</h1>" in document.source and "<h3>seven.png</h3>" in document.source
    assert "99.17 % top-1" in document.text


@pytest.mark.full
def test_the_command_shows_a_model_without_a_card(
    model: VisionTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(digits.load().test_images[0]).save("seven.png")
    model.save("mine.keras")
    assert run("visualize", "mine.keras", "seven.png", "--image-size", 48) == "report.html\n"
    document = Document(Path("report.html").read_text(encoding="utf-8"))
    assert "<h1>mine.keras</h1>" in document.source and "The card" not in document.text
    assert "12 × 12 patches" in document.text
