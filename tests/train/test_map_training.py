"""Training on images with maps: a frozen backbone, resuming, refusals, and the commands from folder to file."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image
from test_sources import prepare

import command_line
import doc_blocks
import map_folders
from keras_vit import dense, train
from keras_vit.dense.map_tasks import Depth, Segmentation
from keras_vit.train.data.sources import open_data
from marks import full_except
from model_weights import assert_same_bits
from places import DATA
from refusals import unrefused
from tiny_models import built, tiny

GUIDE = doc_blocks.ROOT / "docs" / "a-mask-for-every-photo.md"
pytestmark = pytest.mark.filterwarnings("ignore:.* 255 in masks does not count")  # which is told, and meant here
FIELDS: dict[str, Any] = {"steps": 6, "batch_size": 4, "xla": False, "log_steps": 1, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return map_folders.make(tmp_path_factory.mktemp("maps") / "photos")


def run(folder: Path, out: Path) -> train.Result:
    changes = FIELDS | {"linear_probe": False, "ema_decay": 0.5, "checkpoint_steps": 3, "eval_steps": 3}
    changes |= {"config": {"dropout_rate": 0.1, "stochastic_depth": 0.1}, "accumulation": 2}
    return train.run("segment-folder", model=tiny(), data=folder, out=out, changes=changes, progress=False)


def weights(out: Path) -> dict[str, np.ndarray]:
    return {v.path: v.numpy() for v in dense.load(out / "model.keras").weights}


@pytest.mark.full
def test_a_resumed_run_ends_the_same_bit_for_bit_and_another_continues_with_the_head(
    folder: Path, tmp_path: Path
) -> None:
    finished, again = tmp_path / "alone", tmp_path / "run"
    run(folder, finished)
    shutil.copytree(finished, again)
    for name in ("model.keras", "best.keras", "best.json", "checkpoints/step-00000006"):
        path = again / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run(folder, again)
    assert_same_bits(weights(again), weights(finished))
    (again / "model.keras").unlink()  # killed before the model was written
    result = train.run(continue_from=again, changes={"steps": 1, "learning_rate": 1e-12}, progress=False)
    for variable in result.model.trainable_variables:
        np.testing.assert_allclose(variable, weights(finished)[variable.path], atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["masks", "depth"])
def test_the_head_is_trained_on_a_frozen_backbone(kind: str, tmp_path: Path) -> None:
    folder, model = map_folders.make(tmp_path / "photos", kind=kind), built()
    name = {"masks": "segment-folder", "depth": "depth-folder"}[kind]
    result = train.run(name, model=model, data=folder, changes=FIELDS | {"steps": 40}, progress=False)
    assert isinstance(result.model, dense.DenseModel)
    trained = {v.path: v.numpy() for v in result.model.backbone.weights}
    for variable in model.get_layer("block_1").weights:
        np.testing.assert_array_equal(trained[variable.path], variable)
    assert result.history[-2]["loss"] < 0.7 * result.history[0]["loss"]
    first = {"masks": "mean_iou", "depth": "delta1"}[kind]
    assert result.best and list(result.metrics)[0] == first
    evaluated = train.evaluate(result.model, folder, split="val", batch_size=5)
    assert evaluated.metrics == pytest.approx(result.metrics, rel=1e-5)
    assert evaluated.by_class.keys() == ({"ground", "square"} if kind == "masks" else set())


def test_an_evaluation_is_that_of_numpy(folder: Path) -> None:
    model = dense.segmenter(built(), 2)
    images, classes = map_folders.arrays(5)
    found = train.evaluate(model, {"evaluation": (images, classes)}, batch_size=2)
    logits = tf.image.resize(model(model.preprocess(images)), (32, 32)).numpy()
    counted = classes != 255
    predicted = logits.argmax(-1)[counted]
    ious = [
        ((predicted == c) & (classes[counted] == c)).sum() / ((predicted == c) | (classes[counted] == c)).sum()
        for c in (0, 1)
    ]
    np.testing.assert_allclose([each["iou"] for each in found.by_class.values()], ious)
    assert found.mean_iou == pytest.approx(np.mean(ious)) and (found.count, found.classes) == (5, 2)


def test_data_of_another_task_are_refused(folder: Path) -> None:
    images, classes = map_folders.arrays(4)
    segmenter, classifier = dense.segmenter(built(), 2), built(num_classes=2)
    meter = dense.depth(built(), head="linear", max_depth=3)
    numbers, maps = {"train": (images, np.arange(4) % 2)}, {"train": (images, classes)}

    def run(model: Any, data: Any, **changes: Any) -> train.Result:
        return train.run("segment-folder", model=model, data=data, changes=FIELDS | changes, progress=False)

    cases = [
        ({"model": segmenter, "data": numbers}, "a class for every image, and the model returns a class for every pix"),
        ({"model": classifier, "data": maps, "head": "none"}, "a class for every pixel, and the model returns a class"),
        ({"model": meter, "data": maps}, "and the model returns the distance of every"),
        ({"model": classifier, "data": maps, "mixup": 0.1}, "mixup, shift and randaugment_layers must be 0 for maps"),
        ({"model": classifier, "data": maps, "objective": "sigmoid"}, "objective must be one of ['softmax']"),
    ]
    assert not unrefused(run, cases)
    with pytest.raises(ValueError, match="a class for every pixel, and the model returns a class for every image"):
        train.evaluate(classifier, folder)
    with pytest.raises(ValueError, match="An embedding is of a whole image"):
        segmenter.task.embedding_output()


@pytest.mark.parametrize("kind", full_except(["names"], ["names", "numbers", "depth"]))
def test_prepared_data_sets_have_maps(kind: str, tmp_path: Path) -> None:
    images, classes = map_folders.arrays(10, size=(24, 28))
    labels = classes[..., None] if kind != "depth" else map_folders.metres(classes).astype(np.float32)
    feature = {
        "names": tfds.features.LabeledImage(labels=["ground", "square"], shape=(None, None, 1)),
        "numbers": tfds.features.Image(shape=(None, None, 1), encoding_format="png"),
        "depth": tfds.features.Tensor(shape=(24, 28), dtype=np.float32),
    }[kind]
    parts = {"images": list(images), "labels": list(labels), "parts": ("train", "test")}
    data = open_data(prepare(tmp_path, feature=feature, **parts))
    assert isinstance(data.task, Depth if kind == "depth" else Segmentation)
    assert data.class_names == {"names": ("ground", "square"), "numbers": ("0", "1"), "depth": ()}[kind]
    found = sorted(np.asarray(each["label"]).tolist() for each in data.training_split().iterate_once())
    assert found == sorted(labels.reshape(classes.shape).tolist())


@pytest.mark.full
def test_the_commands_of_the_guide_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    map_folders.make(tmp_path / "yard")
    map_folders.make(tmp_path / "rooms", kind="depth")
    dense.load(DATA / "eomt" / "eomt_2").save("eomt.keras")
    text = "\n".join(doc_blocks.blocks(GUIDE.read_text(encoding="utf-8"), ""))
    for line in (line for line in text.splitlines() if line.startswith("$ keras-vit")):
        name, *arguments = shlex.split(line.removeprefix("$ keras-vit ").replace("$MODEL", "digits"))
        command_line.run(name, *arguments, *(("--set=epochs=1", "--set=xla=false") if name == "train" else ()))
    assert {"00.png", "00-overlay.png"} <= {path.name for path in (tmp_path / "masks").iterdir()}
    assert {"00.png", "00-overlay.png", "00.json"} <= {path.name for path in (tmp_path / "segments").iterdir()}
    assert {"00.png", "00-coloured.png"} <= {path.name for path in (tmp_path / "distances").iterdir()}
    dense.depth(built(), head="linear", max_depth=8).save("depth.keras")  # written as 16 bits, in millimetres
    photo = tmp_path / "rooms/val/images/00.jpg"
    [row] = json.loads(command_line.run("predict", "depth.keras", photo, f"--to={tmp_path}", "--json"))
    [expected] = dense.load("depth.keras").predict_maps(photo)
    assert row["depth"]["median"] == pytest.approx(np.median(expected), rel=1e-5)
    with Image.open(tmp_path / "00.png") as file:
        np.testing.assert_allclose(np.asarray(file) / 1000, expected, atol=6e-4)
