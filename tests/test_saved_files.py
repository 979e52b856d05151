"""Files of earlier versions load, and an interrupted run of theirs continues (see tests/data/make_saved.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_vit import VisionTransformer, converters, train
from keras_vit.model.config import BlockConfig
from keras_vit.model.layers import EncoderBlock, PatchEmbedding
from saved_run import CONFIG, FIELDS, HALF
from tiny_models import prepared

SAVED = Path(__file__).parent / "data" / "saved"
# float32, two blocks of width 16: another processor, or another order of sums, moves the last digits only.
LOGITS_TOLERANCE = 1e-5


def expected_logits() -> np.ndarray:
    with np.load(SAVED / "outputs.npz") as outputs:
        return outputs["logits"]


@pytest.mark.parametrize("name", ["model.keras", "model.npz"])
def test_a_file_of_an_earlier_version_loads(name: str) -> None:
    model = converters.load(SAVED / name, config={"num_heads": CONFIG.num_heads} if name.endswith(".npz") else None)
    np.testing.assert_allclose(model(prepared(CONFIG)), expected_logits(), atol=LOGITS_TOLERANCE)


def test_weights_of_an_earlier_version_load() -> None:
    model = VisionTransformer(CONFIG)
    model.load_weights(SAVED / "model.weights.h5")
    np.testing.assert_allclose(model(prepared(CONFIG)), expected_logits(), atol=LOGITS_TOLERANCE)


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


def test_keras_itself_opens_models_in_a_new_process(tmp_path: Path) -> None:
    shutil.copy(SAVED / "model.keras", tmp_path)  # of an earlier version
    expected = {"model.keras": expected_logits()}
    for name, model in models_around_ours().items():
        model.save(tmp_path / name)
        expected[name] = np.asarray(model(prepared(CONFIG)))
    np.savez(tmp_path / "expected.npz", **expected)
    np.save(tmp_path / "images.npy", prepared(CONFIG))
    script = (
        "import numpy as np\n"
        "from keras.models import load_model\n"
        "from keras_vit import VisionTransformer\n"
        "images, expected = np.load('images.npy'), np.load('expected.npz')\n"
        "for name in expected.files:\n"
        f"    np.testing.assert_allclose(load_model(name)(images), expected[name], atol={LOGITS_TOLERANCE})\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_a_run_of_an_earlier_version_continues(tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(SAVED / "run", out)
    recipe = train.recipe("digits", **FIELDS)
    result = train.run(recipe, model=VisionTransformer(CONFIG), data="digits", out=out, progress=False)
    lines = (out / "log.jsonl").read_text().splitlines()
    before = (SAVED / "run" / "log.jsonl").read_text().splitlines()
    assert lines[:HALF] == before  # the first half was not trained again
    steps = [json.loads(line)["step"] for line in lines if "evaluation_loss" not in line]
    assert steps == list(range(1, FIELDS["steps"] + 1))
    with np.load(SAVED / "ended.npz") as ended:
        for v in result.model.weights:
            # Six steps of at most 0.002 change a weight by 1e-2; another processor's rounding changes it by 1e-6.
            np.testing.assert_allclose(v.numpy(), ended[v.path], atol=2e-5, err_msg=v.path)
