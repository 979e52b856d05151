"""Segmentation and depth as tasks: losses, metrics as sums, comparison of exported files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import dense, export
from keras_vit.dense.map_tasks import Depth, Segmentation
from keras_vit.errors import VerificationError
from keras_vit.export.verification import compare
from keras_vit.model.vision_transformer import VisionTransformer
from marks import full_except
from tiny_models import prepared, randomised, tiny

CLASSES = 4


@pytest.fixture(scope="module")
def segmenter() -> dense.DenseModel:
    return dense.segmenter(randomised(VisionTransformer(tiny())), CLASSES, labels=["a", "b", "c", "d"])


@pytest.fixture(scope="module")
def meter() -> dense.DenseModel:
    return dense.depth(randomised(VisionTransformer(tiny())), head="linear", max_depth=8.0)


def totals(task: Any, output: Any, targets: Any, weights: Any) -> dict[str, float]:
    return dict(zip(task.sum_names, map(float, task.sums(output, targets, weights)), strict=True))


def test_segmentation_is_measured_as_keras_measures_it() -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(5, 6, 7, CLASSES)).astype(np.float32)
    logits[..., 3] = -9  # is never predicted, and not in the labels
    labels = draw.integers(0, 3, (5, 6, 7)).astype(np.int32)
    labels[0, :3] = 255
    labels[3] = 255
    task = Segmentation(num_classes=CLASSES)
    parts = [totals(task, logits[i : i + 2], labels[i : i + 2], np.ones(len(labels[i : i + 2]))) for i in (0, 2, 4)]
    added = {name: sum(part[name] for part in parts) for name in task.sum_names}
    padded = totals(task, logits.repeat(2, axis=0), labels.repeat(2, axis=0), np.tile([1, 0], 5))
    assert padded == pytest.approx(added, rel=1e-6)
    assert (added["count"], added["unlabelled"]) == (4, 1)
    measured = task.means(added)
    official = keras.metrics.MeanIoU(CLASSES, ignore_class=255)
    official.update_state(labels, logits.argmax(axis=-1))
    counted = labels != 255
    assert measured["mean_iou"] == pytest.approx(float(official.result()), rel=1e-6)
    assert measured["pixel_accuracy"] == (logits.argmax(axis=-1) == labels)[counted].mean()
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels[counted], logits[counted])
    assert measured["loss"] == pytest.approx(float(losses), rel=1e-6)
    assert np.isnan(task.by_class(added)["3"]["iou"])
    # Names that two classes have change no mean.
    twice = Segmentation(num_classes=CLASSES, labels=("a", "b", "a", "a"))
    assert twice.means(added) == measured
    assert [*twice.by_class(added)] == ["a (0)", "b", "a (2)", "a (3)"]


def test_the_loss_of_a_small_map_is_that_of_the_enlarged_map() -> None:
    draw = np.random.default_rng(1)
    logits, labels = draw.normal(size=(2, 3, 5, CLASSES)).astype(np.float32), draw.integers(0, 4, (2, 12, 13))
    labels[0, :6], labels[1] = 255, 255
    task = Segmentation(num_classes=CLASSES)
    losses, metrics = task.losses(logits, task.targets(labels), kind="softmax")
    large = tf.image.resize(logits, (12, 13)).numpy()  # bilinear, half-pixel centres
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels[0, 6:], large[0, 6:])
    np.testing.assert_allclose(losses, [expected, 0], rtol=1e-5)
    np.testing.assert_allclose(metrics["pixel_accuracy"], [(large[0, 6:].argmax(-1) == labels[0, 6:]).mean(), 0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="neither below 4 nor 255"):
        task.targets(np.full((1, 2, 2), 4))


def test_depth_is_measured_by_the_definitions() -> None:
    draw = np.random.default_rng(2)
    label, depth = draw.uniform(0.5, 12, (2, 3, 6, 5))
    label[0, 0], label[2] = 0, 0
    task = Depth(max_depth=10.0)
    found = task.means(totals(task, depth, label, np.ones(3)))
    rows = []
    for y, d in zip(label[:2], depth[:2], strict=True):
        known = (y > 1e-3) & (y < 10)
        y, d = y[known], d[known]
        ratio, logs = np.maximum(y / d, d / y), np.log(d) - np.log(y)
        rows.append(
            {
                **{f"delta{k}": (ratio < 1.25**k).mean() for k in (1, 2, 3)},
                "abs_rel": (np.abs(d - y) / y).mean(),
                "sq_rel": ((d - y) ** 2 / y).mean(),
                "rmse": np.sqrt(((d - y) ** 2).mean()),
                "rmse_log": np.sqrt((logs**2).mean()),
                "log10": np.abs(np.log10(d) - np.log10(y)).mean(),
                "loss": np.sqrt((logs**2).mean() - 0.5 * logs.mean() ** 2),
            }
        )
    assert found == pytest.approx({name: np.mean([row[name] for row in rows]) for name in rows[0]}, rel=1e-9)
    losses, _ = task.losses(tf.constant(depth, tf.float32), task.targets(label), kind="silog")
    np.testing.assert_allclose(losses, [rows[0]["loss"], rows[1]["loss"], 1e-6], rtol=1e-4)


def test_relative_depth_is_fitted_to_each_image_first() -> None:
    label = np.random.default_rng(3).uniform(1, 9, (2, 5, 4))
    task = Depth()
    found = task.means(totals(task, 3 / label + 7, label, np.ones(2)))
    assert found["abs_rel"] < 1e-9 and found["delta1"] == 1


def test_maps_are_compared_by_pixels() -> None:
    draw = np.random.default_rng(4)
    want = draw.normal(size=(3, 8, 8, CLASSES)).astype(np.float32)
    got = want.copy()
    got[0, :2, :, 1] += 50
    fields = compare(Segmentation(num_classes=CLASSES), {"logits": want}, {"logits": got})
    official = keras.metrics.MeanIoU(CLASSES)
    official.update_state(want.argmax(-1), got.argmax(-1))
    assert fields["mean_iou"] == pytest.approx(float(official.result()), rel=1e-6)
    assert fields["agreement"] == (want.argmax(-1) == got.argmax(-1)).mean()
    numbers = {"classes": want.argmax(-1).astype(np.uint8)}, {"classes": got.argmax(-1).astype(np.uint8)}
    of_numbers = compare(Segmentation(num_classes=CLASSES), *numbers)
    assert (of_numbers["mean_iou"], of_numbers["agreement"]) == (fields["mean_iou"], fields["agreement"])
    assert of_numbers["cosine"] is None
    depth = compare(Depth(max_depth=9.0), {"depth": want[..., 0] ** 2 + 1}, {"depth": 1.1 * (want[..., 0] ** 2 + 1)})
    assert depth["relative_error"] == pytest.approx(0.1, rel=1e-5) and depth["agreement"] == 1


EXPORTS = [("classes", "dynamic"), ("logits", "none"), ("classes", "int8")]


@pytest.mark.parametrize(("output", "mode"), full_except(EXPORTS[:1], EXPORTS))
def test_a_segmenter_is_exported_and_verified(
    output: str, mode: str, segmenter: dense.DenseModel, tmp_path: Path
) -> None:
    images = prepared(segmenter.config)
    report = export.tflite(segmenter, tmp_path / "x.tflite", quantize=mode, output=output, calibration=images)
    assert report.mean_iou is not None and report.mean_iou > 0.9 and report.agreement > 0.95
    assert "pixels of the same class" in str(report)
    found = export.runner(tmp_path / "x.tflite")(images[:1])
    assert (found.dtype, found.shape) == (
        (np.uint8, (1, 32, 32)) if output == "classes" else (np.float32, (1, 4, 4, 4))
    )
    other = dense.segmenter(randomised(VisionTransformer(tiny()), seed=9), CLASSES)
    with pytest.raises(VerificationError, match="mean IoU with the model's maps"):
        export.verify(other, tmp_path / "x.tflite", images)


def test_depth_is_exported_and_verified(meter: dense.DenseModel, tmp_path: Path) -> None:
    report = export.tflite(meter, tmp_path / "x.tflite")
    assert report.relative_error is not None and report.relative_error < 0.01
    assert "mean relative error of the depth" in str(report)


@pytest.mark.full
def test_a_server_answers_with_maps(segmenter: dense.DenseModel, meter: dense.DenseModel, tmp_path: Path) -> None:
    report = export.saved_model(segmenter, tmp_path / "s", warmup=())
    assert report.warmup == () and not (tmp_path / "s" / "assets.extra").exists()
    assert report.agreement == 1 and report.files_error is not None
    served = tf.saved_model.load(tmp_path / "s").signatures["serving_default"]
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    [classes] = served(image_bytes=tf.constant([tf.io.encode_png(pixels).numpy()])).values()
    logits = tf.image.resize(segmenter(segmenter.preprocess(pixels)), (32, 32))
    assert (classes.dtype, classes.shape) == (tf.uint8, (1, 32, 32))
    assert (classes.numpy() == logits.numpy().argmax(-1)).mean() > 0.99  # ties of float32
    assert (export.saved_model(meter, tmp_path / "d", warmup=()).relative_error or 0) < 1e-5
