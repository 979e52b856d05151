"""`keras-vit show`, and the tables in notebooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from command_line import run
from keras_vit import zoo
from keras_vit.cli import show
from keras_vit.export.report import Report
from keras_vit.train.evaluation import Evaluation
from keras_vit.zoo import catalogue
from test_parameter_counts import OFFICIAL

KITTI = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--kitti-steps_20k-lr_0.03-res_384"


def shown(*arguments: str) -> Any:
    return json.loads(run("show", *arguments, "--json"))


@pytest.mark.parametrize("name", ["ViT-B_16", "R26+ViT-S_32"])
def test_the_parts_are_the_whole_model(name: str) -> None:
    said = shown(name, "--image-size", "384")
    assert said["parameters"] == OFFICIAL[name][2] == sum(part["parameters"] for part in said["parts"])
    assert said["flops"] == sum(part["flops"] for part in said["parts"])
    assert said["parts"][-1] == {
        "name": "head",
        "copies": 1,
        "output": [1000],
        "parameters": said["hidden_size"] * 1000 + 1000,
        "flops": 2 * said["hidden_size"] * 1000,
    }


def test_a_summary_says_what_the_model_is_made_of() -> None:
    said = shown("B/16", "--image-size", "224x192")
    expected = {"image_size": [224, 192], "grid": [14, 12], "tokens": 169, "hidden_size": 768, "mlp_dim": 3072}
    expected |= {"name": "ViT-B/16", "num_heads": 12, "num_layers": 12, "num_classes": 1000, "patch_size": [16, 16]}
    assert expected.items() <= said.items()
    assert [part["output"] for part in said["parts"]][:2] == [[14, 12, 768], [169, 768]]


def test_a_summary_is_of_the_default_weights_and_followed_by_the_card() -> None:
    printed = run("show", "B/16")
    first, *_ = printed.splitlines()
    assert first == "ViT-B/16 at 384 x 384, augreg-imagenet21k+imagenet2012"
    assert printed.endswith(f"\n\n{catalogue.card('B/16')}\n")
    for said in ("86,859,496", "12 x attention, 12 heads of 64", "MLP, 3,072 wide, gelu_tanh", "24 x 24 patches"):
        assert said in printed
    # 17.56 G multiply-adds in torchvision's page of vit_b_16.
    assert "35.1 GFLOP an image: 17.6 G multiply-adds" in run("show", "B/16", "--image-size", "224")


@pytest.mark.parametrize("name", catalogue.names())
def test_a_summary_fits_a_terminal(name: str) -> None:
    card = catalogue.card(name)
    weights = card.weights[card.default]
    lines = show.summary(weights, weights.whole_config()).splitlines()
    assert max(map(len, lines)) <= 100
    assert not [line for line in lines if line != line.rstrip()]


def test_a_head_that_only_the_file_knows_is_not_counted_and_that_is_said() -> None:
    assert "not counted: only the file states" in run("show", KITTI)
    said = shown(KITTI)
    assert said["num_classes"] is None
    assert said["parameters"] == OFFICIAL["ViT-B_16"][2] - 769_000
    assert [row["load"] for row in said["weights"]] == [f"keras_vit.zoo.load({KITTI!r})"]


def test_json_has_the_rows_of_the_table() -> None:
    assert shown("B/16")["weights"] == json.loads(json.dumps(zoo.table("B/16")))


# Swin's table 1 (arXiv 2103.14030) for 384 pixels, in 1e9 multiply-adds. It has 17.5 where torchvision counts 17.56
# (DeiT-B at 224), so its last digit is not rounded exactly: 0.3 % of 55.4 is two units of it.
@pytest.mark.parametrize(("name", "published"), [("B/16", 55.4), ("L/16", 190.7)])
def test_arithmetic_at_another_resolution_is_what_is_published(name: str, published: float) -> None:
    assert shown(name, "--image-size", "384")["flops"] / 2e9 == pytest.approx(published, rel=0.003)


# ---- notebooks

EVALUATION = Evaluation(
    data="<b>",
    labels="single",
    metrics={"top1": 0.5, "top5": 1.0, "loss": 0.25},
    count=1234,
    unlabelled=0,
    skipped=3,
    images_per_second=9.0,
)
REPORT = Report(
    path=Path("a & b.tflite"),
    bytes=123456,
    images=8,
    max_error=0.001,
    cosine=0.9999,
    sqnr=float("inf"),
    agreement=1.0,
    milliseconds=1.25,
    threads=2,
    mode="dynamic",
)


def cells(html: str) -> list[list[str]]:
    """Return the text of a well-formed table, row by row."""
    rows = ElementTree.fromstring(f"<div>{html}</div>").iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def test_a_notebook_shows_an_evaluation_and_a_report() -> None:
    assert ["top-1", "50.00%"] in cells(EVALUATION._repr_html_())
    assert ["unreadable", "3"] in cells(EVALUATION._repr_html_())
    assert "without a label" not in EVALUATION._repr_html_()
    assert "&lt;b&gt;" in EVALUATION._repr_html_()
    rows = cells(REPORT._repr_html_())
    assert [rows[0], rows[3], rows[4]] == [["bytes", "121 KiB"], ["cosine", "0.9999"], ["sqnr", "inf"]]
    assert "a &amp; b.tflite" in REPORT._repr_html_()
    assert not [row for row in rows if row[1] == "None"]
