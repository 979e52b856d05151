"""Check that other runtimes give the same outputs as Keras with the exported files.

    python benchmarks/runtimes.py write DIR       with keras_vit: write files of the digits model, images, logits
    python benchmarks/runtimes.py run DIR         with OpenVINO, MediaPipe or tflite-runtime: run those installed

The second command does not import keras_vit. Its exit status is 1 if a runtime gives other outputs.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FLOATS = ("none", "float16")
MODES = (*FLOATS, "dynamic", "int4", "int8", "int16x8")
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
IMAGES = 50
LEAST_AGREEMENT = 0.98  # lowest share of images with Keras' best class: one may differ


def write(folder: Path) -> None:
    """Write all modes for prepared images and logits, and two for pixels, which they resize, and probabilities."""
    from keras_vit import digits, export, zoo

    folder.mkdir(parents=True, exist_ok=True)
    model, data = zoo.load("digits"), digits.load()
    images = data.test_images[:IMAGES]
    prepared = model.preprocess(images)
    for mode in MODES:
        known = data.train_images[:100] if mode.startswith("int") else None
        print(export.tflite(model, folder / f"{mode}.tflite", quantize=mode, calibration=known, verify=images))
    for mode in ("none", "dynamic"):
        path, pixels = folder / f"pixels_{mode}.tflite", {"input_dtype": "uint8", "source_size": images.shape[1:3]}
        print(export.tflite(model, path, quantize=mode, output="probabilities", verify=images, **pixels))
    np.savez(folder / "cases.npz", pixels=images, images=prepared, logits=model.predict_on_batch(prepared))


def openvino(folder: Path, cases: Any) -> Iterator[tuple[str, float, float]]:
    """Run the files of every mode."""
    import openvino as runtime

    core = runtime.Core()
    for mode in MODES:
        call = core.compile_model(folder / f"{mode}.tflite", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        found = np.concatenate([next(iter(call([image[None]]).values())) for image in cases["images"]])
        yield mode, *compared(found, cases["logits"])


def tflite_runtime(folder: Path, cases: Any) -> Iterator[tuple[str, float, float]]:
    """Run the float files: the last release, 2.14, does not know the current version of int8 products of floats."""
    from tflite_runtime.interpreter import Interpreter

    for mode in FLOATS:
        call = Interpreter(str(folder / f"{mode}.tflite")).get_signature_runner()
        found = np.concatenate([next(iter(call(image=image[None]).values())) for image in cases["images"]])
        yield mode, *compared(found, cases["logits"])


def mediapipe(folder: Path, cases: Any) -> Iterator[tuple[str, float, float]]:
    """Run MediaPipe's ImageClassifier, which reads metadata and class names, on pixels."""
    import mediapipe as runtime
    from mediapipe.tasks.python import BaseOptions, vision

    for mode in ("none", "dynamic"):
        path = str(folder / f"pixels_{mode}.tflite")
        options = vision.ImageClassifierOptions(base_options=BaseOptions(model_asset_path=path), max_results=1)
        with vision.ImageClassifier.create_from_options(options) as classifier:
            best = [
                classifier.classify(
                    runtime.Image(image_format=runtime.ImageFormat.SRGB, data=np.ascontiguousarray(image))
                )
                for image in cases["pixels"]
            ]
        found = [NAMES.index(result.classifications[0].categories[0].category_name) for result in best]
        yield f"pixels, {mode}", float("nan"), float(np.mean(found == cases["logits"].argmax(axis=1)))


RUNTIMES: dict[str, Callable[[Path, Any], Iterator[tuple[str, float, float]]]] = {
    "openvino": openvino,
    "tflite-runtime": tflite_runtime,
    "mediapipe": mediapipe,
}


def compared(found: np.ndarray, logits: np.ndarray) -> tuple[float, float]:
    """Return the largest error relative to the largest logit, and the share of images with the same best class."""
    error = np.abs(found - logits).max() / np.abs(logits).max()
    return float(error), float(np.mean(found.argmax(axis=1) == logits.argmax(axis=1)))


def run(folder: Path) -> int:
    """Print a line for each file and runtime; return the number that gave other outputs."""
    cases, wrong, ran = dict(np.load(folder / "cases.npz")), 0, 0
    for name, files in RUNTIMES.items():
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            print(f"{name}: not here")
            continue
        for mode, error, agreement in files(folder, cases):
            told = "" if np.isnan(error) else f"error {error:.1e}, "
            print(f"{name} {importlib.metadata.version(name)}: {mode:16} {told}same class {agreement:.1%}")
            wrong += agreement < LEAST_AGREEMENT
            ran += 1
    return wrong if ran else 1


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "run"):
        sys.exit(__doc__)
    sys.exit(write(Path(sys.argv[2])) if sys.argv[1] == "write" else min(1, run(Path(sys.argv[2]))))
