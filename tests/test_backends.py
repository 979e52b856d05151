"""The same numbers on Keras' JAX back end, from the same files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from places import DATA, ROOT

REFERENCE = DATA / "reference"
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
    outputs = {"logits": model.predict(images, verbose=0)}
    if name == sys.argv[3]:  # outside a compiled function JAX compiles every operation: once is enough
        features = model.features(images)
        outputs["uncompiled logits"] = keras.ops.convert_to_numpy(model(images))
        outputs["pre_logits"] = keras.ops.convert_to_numpy(features["pre_logits"])
        outputs["block_0"] = keras.ops.convert_to_numpy(features["block_0"])
        outputs["attention"] = keras.ops.convert_to_numpy(model.attention_maps(images)[0])
        model.save("model.keras")
        outputs["saved logits"] = keras.saving.load_model("model.keras").predict(images, verbose=0)
        model.resized((48, 64)).predict(np.zeros((1, 48, 64, 3), "float32"), verbose=0)
    np.savez(f"{name}.npz", **outputs)
"""


@pytest.fixture(scope="module")
def on_jax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("jax")
    folder = tmp_path_factory.mktemp("jax")
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM, "jax", str(REFERENCE), *CASES]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.jax
def test_jax_gives_the_reference_numbers_and_saves_loads_and_looks_inside(on_jax: Path) -> None:
    manifest = {case["id"]: case for case in json.loads((REFERENCE / "manifest.json").read_text())["cases"]}
    for name in CASES:
        tolerance = manifest[name]["suggested_tolerance"]["float32"]
        with np.load(REFERENCE / name / "reference.npz") as reference, np.load(on_jax / f"{name}.npz") as got:
            wanted = {"pre_logits": reference["pre_logits"], "block_0": reference["tokens/block_00"]}
            assert "logits" in got and (name != CASES[0] or len(got) == 6)
            for output in set(got) - {"attention"}:
                want = wanted.get(output, reference["logits"])
                assert np.abs(got[output] - want).max() <= tolerance * np.abs(want).max(), (name, output)
            if "attention" in got:
                np.testing.assert_allclose(got["attention"].sum(-1), 1, rtol=1e-5)
