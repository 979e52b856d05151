"""Exported files give Keras' results in other LiteRT runtimes: the lowest allowed version, and on emulated ARM64.

`make test-arm` runs the second part: it downloads Debian's packages of an emulator into build/arm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from packaging.requirements import Requirement

import arm_machine
from keras_vit import VisionTransformer, ViTConfig, digits, export, zoo
from keras_vit.export import modes
from outlier_models import images, score
from places import ROOT, SUPPORT

ARM = ROOT / "build" / "arm"
RUN = SUPPORT / "litert_run.py"
# Lowest mean cosine of differences of two images' logits, to Keras. Measured on ARM64, and on x86 within 2e-4 of it:
# digits .99995 dynamic, .9998 int8, .9998 int4, .99997 int16x8; Ti/16 .9996 dynamic, .9989 int8;
# R26+S/32 .9987 dynamic, .9913 int8. A wrong kernel gives far less.
LEAST = {"none": 0.999999, "float16": 0.99999, "dynamic": 0.997, "int8": 0.985}
LEAST |= {"int4": 0.99, "int16x8": 0.999}
LARGE = ("none", "dynamic", "int8")  # modes of the larger models; the emulator takes seconds for an image


def write_files(folder: Path, name: str) -> np.ndarray:
    """Write files of a model in several modes, and images.npy; return Keras' logits of the images.

    All but the digits have initial weights and a random head.
    """
    if name == "digits":
        model, data = zoo.load(name), digits.load()
        calibration, shown = model.preprocess(data.train_images[:100]), model.preprocess(data.test_images[:60])
    else:
        keras.utils.set_random_seed(1)
        model = VisionTransformer(ViTConfig.from_name(name))
        head = model.get_layer("head").kernel  # all zeros
        head.assign(keras.random.normal(head.shape, stddev=0.05))
        calibration, shown = images(model.config, 16, seed=9), images(model.config, 4)
    np.save(folder / "images.npy", shown)
    for mode in modes.mode_names() if name == "digits" else LARGE:
        given: dict[str, Any] = {"calibration": calibration} if modes.load_mode(mode).needs_calibration else {}
        unchecked = {"least_cosine": -1, "least_agreement": 0}
        export.tflite(model, folder / f"{mode}.tflite", quantize=mode, verify=shown[:1], **unchecked, **given)
    return model.predict(np.asarray(shown), verbose=0)


def check(folder: Path, expected: np.ndarray) -> dict[str, float]:
    """Compare the outputs of the runtime with Keras; return the score of each mode."""
    scores = {path.stem: score(expected, np.load(path.with_suffix(".npy"))) for path in folder.glob("*.tflite")}
    print((folder / "versions.txt").read_text(), *(f"{mode} {value:.6f}" for mode, value in scores.items()))
    assert not {mode: value for mode, value in scores.items() if not value >= LEAST[mode]}
    return scores


@pytest.mark.slow
def test_the_lowest_allowed_litert_exports_and_runs_every_mode(tmp_path: Path) -> None:
    wanted = map(Requirement, metadata.requires("keras-vit-zoo") or [])
    [bound] = {bound for one in wanted if one.name == "ai-edge-litert" for bound in one.specifier}
    assert bound.operator == ">="
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", tmp_path / "site"]
    subprocess.run([*pip, f"ai-edge-litert=={bound.version}"], check=True, capture_output=True)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT), str(SUPPORT), str(Path(__file__).parent)])
    }
    code = f"import numpy as np, test_litert_runtimes as t; from pathlib import Path; folder = Path({str(tmp_path)!r});"
    code += "np.save(folder / 'keras', t.write_files(folder, 'digits'))"
    for command in (["-c", code], [RUN, tmp_path]):
        subprocess.run([sys.executable, "-W", "ignore", *command], env=env, check=True)
    assert f"LiteRT {bound.version}," in (tmp_path / "versions.txt").read_text()
    assert len(check(tmp_path, np.load(tmp_path / "keras.npy"))) == len(modes.mode_names())


@pytest.fixture(scope="module")
def scores() -> Iterator[dict[str, dict[str, float]]]:
    """Set up the emulated machine; at the end, write the scores of all models beside it."""
    try:
        arm_machine.set_up(ARM)
    except arm_machine.UnavailableError as error:
        pytest.skip(f"no emulated ARM64: {error}")
    found: dict[str, dict[str, float]] = {}
    yield found
    (ARM / "scores.json").write_text(json.dumps(found, indent=1) + "\n")


@pytest.mark.arm
@pytest.mark.parametrize("name", ["digits", "Ti/16", "R26+S/32"])
def test_files_are_right_on_arm64(name: str, scores: dict[str, dict[str, float]], tmp_path: Path) -> None:
    expected = write_files(tmp_path, name)
    arm_machine.run(ARM, RUN, tmp_path)
    assert "aarch64" in (tmp_path / "versions.txt").read_text()
    scores[name] = check(tmp_path, expected)
