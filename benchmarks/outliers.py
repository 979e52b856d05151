"""Measure every quantization mode on ViT-Ti/16 with planted outliers, which trained Vision Transformers have.

    python benchmarks/outliers.py                   every mode and kind; a quarter of an hour on two cores
    python benchmarks/outliers.py dynamic int8      some modes

The weights are random, with outliers as tests/support/outlier_models.py plants them. The score is the mean cosine of
differences of two images' logits, file against Keras in float32: what all images share does not count.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from edge_peers import to_tflite

import keras_vit
from keras_vit.export import modes, samples

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from outlier_models import KINDS, images, plant, score

CONVERTER = "converter"  # TensorFlow's, in the mode dynamic
MODES = ("dynamic", CONVERTER, "float16", "int16x8", "int8", "int4")
CALIBRATION = 8  # built-in patterns, and as many images of other kinds


def main() -> None:
    """Print a row for each kind of outliers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", default=MODES)
    parser.add_argument("--model", default="Ti/16")
    parser.add_argument(
        "--block", type=int, default=3, help="the block that writes large channels; -1: the position embedding"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    model = keras_vit.VisionTransformer(keras_vit.ViTConfig.from_name(options.model))
    patterns = samples.images(model.config, 4 * CALIBRATION)
    calibration = np.concatenate([patterns[-CALIBRATION:], images(model.config, CALIBRATION, seed=9)])
    shown = np.concatenate([patterns[CALIBRATION : CALIBRATION + 6], images(model.config, 6)])
    print(f"{options.model}, random weights".ljust(28), *(f"{mode:>10}" for mode in options.modes))
    for kind, outliers in KINDS.items():
        for seed in options.seeds:
            plant(model, seed, block=options.block, **outliers)
            expected = model.predict_on_batch(shown)
            scores = [score(expected, exported(model, mode, calibration, shown)) for mode in options.modes]
            print(f"{kind}, seed {seed}".ljust(28), *(f"{value:10.4f}" for value in scores), flush=True)


def exported(model: keras_vit.VisionTransformer, mode: str, calibration: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Return what a file of the model computes for images."""
    given: dict[str, Any] = {"quantize": mode}
    if mode != CONVERTER and modes.load_mode(mode).needs_calibration:
        given["calibration"] = calibration
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        if mode == CONVERTER:
            to_tflite(model, "dynamic", path)
        else:
            keras_vit.export.tflite(model, path, verify=shown[:1], least_cosine=-1, least_agreement=0, **given)
        return keras_vit.export.runner(path)(shown)


if __name__ == "__main__":
    main()
