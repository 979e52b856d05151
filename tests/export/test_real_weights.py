"""A trained DINOv2-S/14: loading, resolutions, SavedModel and every quantization mode, on crops of real photos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dinov2_photos
from keras_vit import VisionTransformer, export
from outlier_models import score

pytestmark = pytest.mark.real
pytest.importorskip("litert_quantizer")

SEEDS = (1, 2)  # of two sets of crops
COUNT = 36  # crops in a set
# Least mean cosine of the differences of two images' features, of a mode with or without calibration images.
LEAST: dict[tuple[str, bool], float] = {
    ("none", False): 0.99999,
    ("float16", False): 0.9999,
    ("dynamic", False): 0.9985,
    ("dynamic", True): 0.9992,
    ("int8", True): 0.996,
    ("int16x8", True): 0.999,
    ("int4", True): 0.96,
}


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return dinov2_photos.folder()
    except dinov2_photos.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(folder: Path) -> VisionTransformer:
    return dinov2_photos.load()


@pytest.fixture(scope="module")
def sets() -> list[np.ndarray]:
    return [dinov2_photos.prepared(dinov2_photos.crops(COUNT, seed)) for seed in SEEDS]


@pytest.fixture(scope="module")
def expected(model: VisionTransformer, sets: list[np.ndarray]) -> list[np.ndarray]:
    return [model.predict(images, verbose=0) for images in sets]


def test_the_class_tokens_are_onnx_runtimes(folder: Path, sets: list[np.ndarray], expected: list[np.ndarray]) -> None:
    session = pytest.importorskip("onnxruntime").InferenceSession(folder / "tokens.onnx")
    (tokens,) = session.run(["cls"], {"input_image": sets[0].transpose(0, 3, 1, 2)})
    assert np.abs(tokens - expected[0]).max() <= 1e-5 * np.abs(tokens).max()  # measured 7e-7: float32 of other orders


def test_positions_of_518_pixels_are_the_files(folder: Path) -> None:
    from safetensors.numpy import load_file

    stored = load_file(folder / "model.safetensors")["embeddings.position_embeddings"]
    model = dinov2_photos.load(518)
    positions = np.array(model.get_layer("position").embedding)
    np.testing.assert_array_equal(positions[..., -stored.shape[1] :, :].reshape(stored.shape), stored)


def test_a_saved_model_computes_the_same(model: VisionTransformer, tmp_path: Path, sets: list[np.ndarray]) -> None:
    assert export.saved_model(model, tmp_path / "saved").difference_cosine > 0.99999
    assert export.verify(model, tmp_path / "saved", sets[0][:8]).difference_cosine > 0.99999


@pytest.mark.parametrize(("mode", "calibrated"), LEAST)
def test_a_mode_keeps_the_differences_of_photos(
    model: VisionTransformer,
    sets: list[np.ndarray],
    expected: list[np.ndarray],
    tmp_path: Path,
    mode: str,
    calibrated: bool,
) -> None:
    path = tmp_path / "out.tflite"
    given: dict[str, Any] = {"verify": sets[0]}
    if calibrated:
        given["calibration"] = dinov2_photos.prepared(dinov2_photos.crops(32, 0, calibration=True))
    export.tflite(model, path, quantize=mode, **given)
    run = export.runner(path)
    for images, features in zip(sets, expected, strict=True):
        assert score(features, run(images)) >= LEAST[mode, calibrated]


@pytest.mark.parametrize("size", [112, 224])
@pytest.mark.parametrize("mode", ["dynamic", "int4", "int8", "int16x8"])
def test_a_head_of_four_classes_is_accepted_and_keeps_its_classes(
    folder: Path, tmp_path: Path, mode: str, size: int
) -> None:
    model = dinov2_photos.with_head(size)
    images, classes = dinov2_photos.labelled_crops(COUNT, SEEDS[0], size=size)
    calibration, _ = dinov2_photos.labelled_crops(60, 100, calibration=True, size=size)
    path = tmp_path / "out.tflite"
    report = export.tflite(model, path, quantize=mode, calibration=calibration, verify=images)
    assert report.agreement >= 0.9
    expected = (model.predict(images, verbose=0).argmax(-1) == classes).mean()
    assert expected >= 0.75  # 0.81 to 1 by size and set, chance is 0.25: the classes mean something
    assert (export.runner(path)(images).argmax(-1) == classes).mean() >= expected - 0.1


def test_a_refusal_names_layers_and_a_mode_that_passes(
    model: VisionTransformer, tmp_path: Path, sets: list[np.ndarray]
) -> None:
    calibration = dinov2_photos.prepared(dinov2_photos.crops(4, 0, calibration=True))
    options: dict[str, Any] = {"calibration": calibration, "verify": sets[0], "least_cosine": 0.998}
    with pytest.raises(export.VerificationError) as caught:
        export.tflite(model, tmp_path / "out.tflite", quantize="int4", **options)
    assert "least SQNR of outputs by rounded kernels: block_" in str(caught.value)
    assert "tried: quantize='dynamic' passes" in str(caught.value)
    assert not list(tmp_path.iterdir())
