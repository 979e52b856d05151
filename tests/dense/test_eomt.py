"""EoMT: masks and classes of queries, and the segments that follow, as transformers finds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from command_line import run
from eomt_cases import FOLDER, check_segments, with_windows
from keras_vit import VisionTransformer, dense, errors, export, train, zoo
from keras_vit.export.exported import read_structure
from marks import full_except
from reference_cases import arrays, distance

CASES = ["eomt_1", "eomt_2", "eomt_dinov3_1", "eomt_dinov3_2"]  # the backbone and the number of upscalings
TOLERANCE = 1e-5  # of the largest value of an output: mask logits are sums of products and larger than 100


@pytest.mark.parametrize("name", full_except(["eomt_dinov3_1"], CASES))
def test_outputs_and_segments_are_the_official_ones(name: str, tmp_path: Path) -> None:
    expected, images = arrays(FOLDER / name / "reference.npz"), arrays(FOLDER / "images.npz")
    model = dense.load(FOLDER / name)
    outputs = model.predict_on_batch(images.pop("prepared"))
    for key in ("class_logits", "mask_logits"):
        assert distance(outputs[key], expected[key]) <= TOLERANCE
    windows = dense.load(with_windows(FOLDER / name, tmp_path / name))
    check_segments(model, windows, list(images.values()), expected)


def test_a_file_has_two_outputs_and_no_transposed_convolution(tmp_path: Path) -> None:
    images = arrays(FOLDER / "images.npz")
    dense.load(FOLDER / "eomt_dinov3_2").save(tmp_path / "model.keras")
    model = dense.load(tmp_path / "model.keras")
    shapes = {name: tensor.shape[1:] for name, tensor in model.resized(48).output.items()}
    assert shapes == {"class_logits": (8, 6), "mask_logits": (24, 24, 8)}
    verify = [images[key] for key in "012"]
    report = export.tflite(model, tmp_path / "model.tflite", quantize="none", verify=verify)
    assert report.max_error <= TOLERANCE
    assert (report.agreement, report.mean_iou) == (1, 1)
    assert report.segments
    assert "same segments" in str(report)
    assert not {"TRANSPOSE_CONV", "CUSTOM"} & read_structure(tmp_path / "model.tflite").operators
    other = dense.load(FOLDER / "eomt_2")
    with pytest.raises(errors.VerificationError):
        export.verify(other, tmp_path / "model.tflite", verify)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["dynamic", "int8"])
def test_every_mode_writes_segments(mode: str, tmp_path: Path) -> None:
    images = arrays(FOLDER / "images.npz")
    pictures = [images[key] for key in "012"]
    least = {"least_cosine": 0.0, "least_agreement": 0.75}  # random weights of 16 channels are rounded coarsely
    options = {"calibration": pictures, "verify": pictures, **least}
    assert export.tflite(dense.load(FOLDER / "eomt_2"), tmp_path / "m.tflite", quantize=mode, **options).cosine > 0.99


@pytest.mark.full
def test_a_saved_model_answers_with_both_outputs(tmp_path: Path) -> None:
    report = export.saved_model(dense.load(FOLDER / "eomt_1"), tmp_path / "1", warmup=())
    assert report.max_error <= TOLERANCE
    assert report.agreement == 1
    assert report.files_error is not None
    assert report.files_error <= TOLERANCE


def test_the_command_writes_numbers_a_list_and_an_overlay(tmp_path: Path) -> None:
    dense.load(FOLDER / "eomt_2").save(tmp_path / "model.keras")
    picture = arrays(FOLDER / "images.npz")["0"]
    Image.fromarray(picture).save(tmp_path / "photo.png")
    run("predict", tmp_path / "model.keras", tmp_path / "photo.png", "--to", tmp_path / "out", "--task", "instance")
    rows = json.loads((tmp_path / "out" / "photo.json").read_text(encoding="utf-8"))["segments"]
    [found] = dense.load(FOLDER / "eomt_2").predict_segments(picture, task="instance")
    assert [(row["label"], row["area"]) for row in rows] == [(part.label, part.area) for part in found.segments]
    with Image.open(tmp_path / "out" / "photo.png") as numbers:
        np.testing.assert_array_equal(np.asarray(numbers), found.ids)
        assert numbers.mode == "I;16"
    with Image.open(tmp_path / "out" / "photo-overlay.png") as overlay:
        assert overlay.size == picture.shape[1::-1]


def changed(target: Path, file: str, **changes: Any) -> Path:
    """Copy a model with other values in a JSON file."""
    if not target.exists():
        shutil.copytree(FOLDER / "eomt_1", target)
    values = json.loads((target / file).read_text(encoding="utf-8"))
    (target / file).write_text(json.dumps(values | changes), encoding="utf-8")
    return target


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    masked = changed(tmp_path / "masked", "config.json")
    tensors = load_file(masked / "model.safetensors")
    tensors["attn_mask_probs"] = np.array([0, 0.5], np.float32)
    save_file(tensors, masked / "model.safetensors")
    with pytest.raises(errors.CheckpointError, match=r"attn_mask_probs of 0.*Received: \[0.  0.5\]"):
        dense.load(masked)
    for changes, message in (
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"model_type": "mask2former"}, "model_type"),
        ({"image_size": 64}, "image_size|positions|shape"),
    ):
        with pytest.raises(errors.CheckpointError, match=message):
            dense.load(changed(tmp_path / str(changes), "config.json", **changes))
    for changes, message in (
        ({"do_normalize": False}, "do_normalize"),
        ({"size": {"shortest_edge": 640, "longest_edge": 640}}, "size is"),
        ({"do_split_image": True}, "do_split_image is True"),
    ):
        with pytest.raises(errors.CheckpointError, match=message):
            dense.load(changed(tmp_path / str(changes), "preprocessor_config.json", **changes))


def test_what_an_eomt_cannot_do_is_named(tmp_path: Path) -> None:
    model, pixels = dense.load(FOLDER / "eomt_1"), np.zeros((4, 32, 32, 3), np.uint8)
    masks = pixels[..., 0].copy()
    masks[:, :16] = 1
    data = {"train": (pixels, masks), "evaluation": (pixels, masks)}
    with pytest.raises(ValueError, match="neither trains nor evaluates a model that returns a class and a mask"):
        train.run(train.recipe("segment-folder", steps=1), model=model, data=data, out=tmp_path / "run")
    with pytest.raises(ValueError, match="neither trains nor evaluates"):
        model.task.losses({}, {}, kind="softmax")
    with pytest.raises(ValueError, match="needs a model with queries"):
        dense.segmenter(zoo.load("digits"), 3).predict_segments(pixels)
    windows = dense.load(with_windows(FOLDER / "eomt_1", tmp_path / "windows"))
    with pytest.raises(ValueError, match="task must be 'semantic'"):
        windows.predict_segments(pixels, task="panoptic")
    with pytest.raises(ValueError, match="task must be one of"):
        model.predict_segments(pixels, task="things")
    for wrong, message in (
        ({"threshold": float("nan")}, r"threshold must be in \[0, 1\]. Received: nan"),
        ({"threshold": 80}, r"threshold must be in \[0, 1\]. Received: 80"),
        ({"threshold": "0.8"}, "threshold must be an integer or a number"),
        ({"stuff_classes": [1, 5]}, r"stuff_classes must be integers from 0 to 4. Received: \[5\]"),
        ({"stuff_classes": {-1}}, r"Received: \[-1\]"),
        ({"stuff_classes": ["sky", True, 1.0]}, r"Received: \['sky', True, 1.0\]"),
        ({"threshold": 2, "task": "instances"}, "task must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            model.predict_segments(pixels[0], **wrong)
    [found] = model.predict_segments(pixels[0], threshold=np.float32(0.5), stuff_classes=np.arange(5))
    assert found.ids.shape == (32, 32)
    with pytest.raises(ValueError, match="kind='queries' goes with output='segments'"):
        dense.MapConfig(kind="queries", blocks=(1,), num_classes=3)
    biased = dense.load(FOLDER / "eomt_1").backbone.config.replace(relative_bias="shared")
    with pytest.raises(ValueError, match="have no place among the patches"):
        dense.DenseModel(VisionTransformer(biased), model.head)


def test_an_image_of_which_nothing_would_be_left_is_refused_as_by_transformers(tmp_path: Path) -> None:
    model, windows = dense.load(FOLDER / "eomt_1"), dense.load(with_windows(FOLDER / "eomt_1", tmp_path / "windows"))
    for shape in ((1, 64, 3), (200, 3, 3)):  # 32 pixels a side: half a pixel and less
        for call in (model.predict_segments, model.predict_maps):
            with pytest.raises(ValueError, match=f"would have no pixels .* Received: {shape[0]}x{shape[1]} pixels"):
                call(np.zeros(shape, np.uint8))
        assert windows.predict_maps(np.zeros(shape, np.uint8))[0].shape == shape[:2]
    assert model.predict_segments(np.zeros((1, 63, 3), np.uint8))[0].ids.shape == (1, 63)


@pytest.mark.torch
@pytest.mark.peers
@pytest.mark.parametrize("name", CASES)
def test_wider_models_have_the_same_segments_on_twenty_pictures(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from data import make_eomt

    kind, _, upscalings = name.rpartition("_")
    peer = make_eomt.build(kind, int(upscalings), seed=1, hidden_size=96)
    peer.save_pretrained(tmp_path / "fit")
    make_eomt.EomtImageProcessorPil(**make_eomt.FIT).save_pretrained(tmp_path / "fit")
    model, pictures = dense.load(tmp_path / "fit"), make_eomt.pictures(20)
    found, expected = model.predict_on_batch(make_eomt.prepared()), make_eomt.outputs(peer)
    assert max(distance(found[key], values) for key, values in expected.items()) <= TOLERANCE
    windows = dense.load(with_windows(tmp_path / "fit", tmp_path / "windows"))
    check_segments(model, windows, pictures, make_eomt.segments(peer, pictures), ties=0.005)
    report = export.tflite(model, tmp_path / "none.tflite", quantize="none", verify=pictures)
    assert (report.max_error <= TOLERANCE, report.agreement) == (True, 1)
    options = {"least_cosine": 0.0, "least_agreement": 0.95}
    print(export.tflite(model, tmp_path / "dynamic.tflite", verify=pictures, **options))
