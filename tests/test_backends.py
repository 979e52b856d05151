"""The same numbers on Keras' JAX back end, from the same files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REFERENCE = Path(__file__).parent / "data" / "reference"
CASES = ("vit_token", "hybrid_r50", "vit_gap")
PROGRAM = """
import sys
import numpy as np
from pathlib import Path
import keras
from keras_vit import converters

assert keras.backend.backend() == sys.argv[1]
for name in sys.argv[3:]:
    case = Path(sys.argv[2]) / name
    model = converters.load(case / "checkpoint.npz")
    with np.load(case / "reference.npz") as reference:
        images = reference["input"]
    # Through a compiled function, through Python, and saved and loaded again.
    outputs = {"predict": model.predict(images, verbose=0), "call": keras.ops.convert_to_numpy(model(images))}
    features = model.features(images)
    outputs["pre_logits"] = keras.ops.convert_to_numpy(features["pre_logits"])
    outputs["block_0"] = keras.ops.convert_to_numpy(features["block_0"])
    outputs["attention"] = keras.ops.convert_to_numpy(model.attention_maps(images)[0])
    model.save(f"{name}.keras")
    outputs["saved"] = keras.saving.load_model(f"{name}.keras").predict(images, verbose=0)
    model.resized((48, 64)).predict(np.zeros((1, 48, 64, 3), "float32"), verbose=0)
    np.savez(f"{name}.npz", **outputs)
"""


@pytest.fixture(scope="module")
def on_jax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("jax")
    folder = tmp_path_factory.mktemp("jax")
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM, "jax", str(REFERENCE), *CASES]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def of_manifest(name: str) -> dict[str, Any]:
    cases = json.loads((REFERENCE / "manifest.json").read_text())["cases"]
    return next(case for case in cases if case["id"] == name)


@pytest.mark.jax
@pytest.mark.parametrize("name", CASES)
def test_jax_gives_the_reference_numbers(name: str, on_jax: Path) -> None:
    tolerance = of_manifest(name)["suggested_tolerance"]["float32"]
    with np.load(REFERENCE / name / "reference.npz") as reference, np.load(on_jax / f"{name}.npz") as got:
        wanted = {
            **dict.fromkeys(("predict", "call", "saved"), reference["logits"]),
            "pre_logits": reference["pre_logits"],
            "block_0": reference["tokens/block_00"],
        }
        for output, want in wanted.items():
            assert np.abs(got[output] - want).max() <= tolerance * np.abs(want).max(), output
        np.testing.assert_allclose(got["attention"].sum(-1), 1, rtol=1e-5)
