"""Keras itself opens models of ours, and Keras models that hold ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_vit import VisionTransformer, dense
from keras_vit.model.config import BlockConfig, ViTConfig
from keras_vit.model.layers import EncoderBlock, PatchEmbedding
from keras_vit.text import TextConfig, TextEncoder
from tiny_models import prepared

CONFIG = ViTConfig(
    image_size=16, patch_size=8, hidden_size=16, mlp_dim=32, num_heads=2, num_layers=2, num_classes=10, num_channels=1
)
# float32, two blocks of width 16: another processor, or another order of sums, moves the last digits only.
LOGITS_TOLERANCE = 1e-5


def models_around_ours() -> dict[str, keras.Model]:
    """Return Keras models that hold our model or our layers, by the name of their file."""
    vit = VisionTransformer(CONFIG)
    logits = vit(vit.inputs[0])
    return {
        "functional.keras": keras.Model(vit.inputs[0], keras.layers.Softmax()(logits)),
        "sequential.keras": keras.Sequential([vit, keras.layers.Softmax()]),
        "part.keras": keras.Model(vit.inputs[0], vit.get_layer("block_0").output),
        "layers.keras": keras.Sequential(
            [keras.Input((16, 16, 1)), PatchEmbedding(8, (4, 4)), EncoderBlock(BlockConfig(num_heads=2, mlp_dim=16))]
        ),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a saved model of every kind, the inputs and the expected outputs."""
    folder = tmp_path_factory.mktemp("saved")
    inputs, expected = {}, {}
    text = TextEncoder(TextConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2, mlp_dim=32, max_length=8))
    vit = VisionTransformer(CONFIG)
    models = {"model.keras": vit, "text.keras": text, "maps.keras": dense.segmenter(vit, 3), **models_around_ours()}
    for name, model in models.items():
        model.save(folder / name)
        inputs[name] = np.arange(16, dtype="int32").reshape(2, 8) if model is text else prepared(CONFIG)
        expected[name] = np.asarray(model(inputs[name]))
    np.savez(folder / "inputs.npz", **inputs)
    np.savez(folder / "expected.npz", **expected)
    return folder


LOAD_ALL = f"""
inputs, expected = np.load("inputs.npz"), np.load("expected.npz")
for name in expected.files:
    np.testing.assert_allclose(load_model(name)(inputs[name]), expected[name], atol={LOGITS_TOLERANCE})
"""


def test_keras_itself_opens_models(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    exec(LOAD_ALL, {"np": np, "load_model": keras.models.load_model})


# The order of the imports matters, so this needs a new process.
@pytest.mark.full
@pytest.mark.parametrize(
    "lines",
    [
        "import keras, keras_vit; load_model = keras.models.load_model",
        "import tensorflow, keras_vit; load_model = tensorflow.keras.models.load_model",
    ],
)
def test_keras_itself_opens_models_in_a_new_process(saved: Path, lines: str) -> None:
    subprocess.run([sys.executable, "-c", f"import numpy as np; {lines}{LOAD_ALL}"], check=True, cwd=saved)


@pytest.mark.full
def test_keras_explains_that_the_classes_must_be_imported_if_it_was_imported_later(saved: Path) -> None:
    code = f"""
import keras_vit, keras, numpy as np
load_model = keras.models.load_model
for name in ("model.keras", "text.keras", "maps.keras", "functional.keras"):
    try:
        load_model(name)
    except (TypeError, ValueError) as error:
        assert "make sure they are all imported" in str(error), error
    else:
        raise AssertionError(name)
from keras_vit import VisionTransformer
from keras_vit.dense import DenseModel
from keras_vit.text import TextEncoder
{LOAD_ALL}"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=saved)
