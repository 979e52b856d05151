"""Files of earlier versions load, and an interrupted run of theirs continues (see tests/data/make_saved.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keras_vit import VisionTransformer, converters, train
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


def test_keras_itself_opens_a_model_of_an_earlier_version() -> None:
    script = (
        "import sys, keras, keras_vit, numpy as np\n"
        "keras_vit.VisionTransformer\n"  # registers the classes
        "model = keras.models.load_model(sys.argv[1])\n"
        "assert type(model) is keras_vit.VisionTransformer and model.config == keras_vit.ViTConfig(**eval(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", script, str(SAVED / "model.keras"), repr(CONFIG.to_dict())], check=True)


def test_a_run_of_an_earlier_version_continues(tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(SAVED / "run", out)
    result = train.run(train.recipe("digits", **FIELDS), model=VisionTransformer(CONFIG), out=out, progress=False)
    lines = (out / "log.jsonl").read_text().splitlines()
    before = (SAVED / "run" / "log.jsonl").read_text().splitlines()
    assert lines[:HALF] == before  # the first half was not trained again
    steps = [json.loads(line)["step"] for line in lines if "evaluation_loss" not in line]
    assert steps == list(range(1, FIELDS["steps"] + 1))
    with np.load(SAVED / "ended.npz") as ended:
        for v in result.model.weights:
            # Six steps of at most 0.002 change a weight by 1e-2; another processor's rounding changes it by 1e-6.
            np.testing.assert_allclose(v.numpy(), ended[v.path], atol=2e-5, err_msg=v.path)
