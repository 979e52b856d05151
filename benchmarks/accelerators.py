"""Run every quantization mode on a CPU and on a GPU; on ARM64 from a file of figures.

    python benchmarks/accelerators.py                          digits, Ti/16, R26+S/32; half an hour on two cores
    python benchmarks/accelerators.py --models digits          some models
    python benchmarks/accelerators.py --arm arm.json           with {model: {mode: cosine}} measured on ARM64

Without a GPU, Debian's package chromium has one in software, SwiftShader:
LD_LIBRARY_PATH=/usr/lib/chromium VK_ICD_FILENAMES=/usr/lib/chromium/vk_swiftshader_icd.json XDG_RUNTIME_DIR=/tmp

The figure is the mean cosine of differences of two images' logits, the file's against Keras' in float32. Weights are
random but for digits. On a GPU it is followed by the operators that the GPU takes, of how many.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_vit
from keras_vit import digits
from keras_vit.export import samples

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from compiled_model import run_on_gpu
from outlier_models import images, score

MODES = ("none", "float16", "dynamic", "int4", "int8", "int16x8")
MODELS = ("digits", "Ti/16", "R26+S/32")
CALIBRATION = 8  # built-in patterns, and as many other images
SHOWN, ON_GPU = 10, 4  # images; software takes seconds for one


def main() -> None:
    """Print a row for each mode of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--arm", type=Path, help="a JSON file, {model: {mode: cosine}}")
    options = parser.parse_args()
    arm = json.loads(options.arm.read_text("utf-8")) if options.arm else {}
    print(f"{'model':10}{'mode':11}{'CPU':>9}{'GPU':>9}  {'taken':12}{'ARM64':>9}")
    for name in options.models:
        model, calibration, shown = prepared(name)
        expected = model.predict_on_batch(shown)
        for mode in options.modes:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.tflite"
                keras_vit.export.tflite(
                    model,
                    path,
                    quantize=mode,
                    calibration=calibration,
                    verify=shown[:1],
                    least_cosine=-1,
                    least_agreement=0,
                )
                cells = " ".join(measured(path, shown, expected))
            on_arm = arm.get(name, {}).get(mode)
            print(f"{name:10}{mode:11}{cells}{'' if on_arm is None else f'{on_arm:9.4f}'}", flush=True)


def prepared(name: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return a model, calibration images, and the images on which it is compared."""
    if name == "digits":
        data, model = digits.load(), keras_vit.zoo.load(name)
        return model, model.preprocess(data.train_images[:256]), model.preprocess(data.test_images[:SHOWN])
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    model = keras_vit.VisionTransformer(keras_vit.ViTConfig.from_name(name))
    for variable in model.weights:
        variable.assign(variable + 0.02 * random.standard_normal(variable.shape))
    patterns = samples.images(model.config, 4 * CALIBRATION)
    calibration = np.concatenate([patterns[-CALIBRATION:], images(model.config, CALIBRATION, seed=9)])
    half = SHOWN // 2
    shown = np.stack([patterns[CALIBRATION : CALIBRATION + half], images(model.config, half)], axis=1)
    return model, calibration, shown.reshape(-1, *shown.shape[2:])


def measured(path: Path, shown: np.ndarray, expected: np.ndarray) -> Iterator[str]:
    """Yield the cells of a file: CPU, GPU, operators that the GPU takes."""
    yield f"{score(expected, keras_vit.export.runner(path)(shown)):8.4f}"
    try:
        run, taken, of = run_on_gpu(path, shown[:ON_GPU])
        yield f"{score(expected[:ON_GPU], run.outputs['logits']):8.4f}  {taken}/{of}".ljust(22)
    except ValueError as error:
        print(error, file=sys.stderr)
        yield f"{'refused':>8}".ljust(22)


if __name__ == "__main__":
    main()
