"""Run a float file in half precision, as phone GPUs do and as XNNPACK does on CPUs.

XNNPACK rounds the image, the weights and the result of every operator to float16. A CPU with float16 arithmetic adds
the products of a matrix product in float16 too; one that only converts float16 (F16C) adds them in float32. The second
is exactly NumPy's `float16(float32(x16) @ float32(w16))`, and says nothing about overflow within a sum.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.export.check.compiled import CompiledRun, run_compiled
from keras_vit.export.check.measures import difference_cosine
from keras_vit.export.check.running import main_output
from keras_vit.export.check.structure import damage_errors
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.operators import Operators
from keras_vit.export.quantization.calibration import FileGraph, observe
from keras_vit.export.quantization.modes import Mode

FORCE_FP16 = 4  # XNNPACK's flag
HALF = 16  # bits
NUM_IMAGES = 4  # that run in half precision
NUM_OBSERVED = 2  # images on which the largest value is looked for
FLOAT32_ERROR = 1e-5  # as a share of the largest output; that of half precision is 1e-4 and more
# A sum whose first term is 2,048 and all others 1: float16 has no 2,049.
LARGE_TERM = 2048
NUM_TERMS = 1024


def check_half_precision(path: Path, mode: Mode | None, accelerator: str | None) -> None:
    """Raise a ValueError if a file of this mode is not run in half precision."""
    if path.is_dir():
        raise ValueError(f"half_precision=True is for .tflite files. Received: the folder {path}")
    if mode is not None and min(mode.bits) < HALF:
        raise ValueError(f"half_precision=True is for files with float weights. Received: mode={mode.name!r}")
    if accelerator == "gpu":
        raise ValueError(
            "half_precision=True runs on the CPU: call verify once with it and once with accelerator='gpu'"
        )


def half_precision_figures(
    path: Path, images: np.ndarray, expected: np.ndarray, received: np.ndarray
) -> dict[str, Any]:
    """Return the fields of a `Report` about a float file in half precision.

    `expected` and `received` are the main outputs of the model and, in float32, of the file.
    """
    cosine = _half_precision_cosine(path, images, expected, received)
    return {
        "half_precision_cosine": cosine,
        "half_precision_sums": None if cosine is None else dtype_of_sums(),
        "largest_value": largest_value(path, images),
    }


def _half_precision_cosine(path: Path, images: np.ndarray, expected: np.ndarray, received: np.ndarray) -> float | None:
    """Return `difference_cosine` of a file in half precision, 0 for NaN; None if this CPU computes in float32 alone."""
    some = np.linspace(0, len(images) - 1, min(len(images), NUM_IMAGES)).astype(int)
    try:
        half = main_output(_run(path, images[some]).outputs)
    except ValueError:
        return None
    if not np.isfinite(half).all():
        return 0.0
    if np.abs(half - received[some]).max() <= FLOAT32_ERROR * np.abs(half).max():
        return None
    return difference_cosine(expected[some], half)


@functools.cache
def dtype_of_sums() -> str:
    """Return "float16" or "float32", in which this CPU adds the products of a matrix product in half precision."""
    ops = Operators(Builder())
    image = ops.builder.input("image", (1, 1, 1, NUM_TERMS))
    logits = ops.dense(ops.reshape(image, (1, NUM_TERMS), "terms"), np.ones((8, NUM_TERMS), np.float32), None, "logits")
    ops.builder.signature({"image": image}, {"logits": logits})
    terms = np.ones((1, 1, 1, NUM_TERMS), np.float32)
    terms[..., 0] = LARGE_TERM
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sum.tflite"
        ops.builder.write(path)
        total = float(_run(path, terms).outputs["logits"].min())
    # Two at most are lost where the float32 sum is rounded at the end.
    return "float32" if total >= LARGE_TERM + NUM_TERMS - 3 else "float16"


def _run(path: Path, images: np.ndarray) -> CompiledRun:
    return run_compiled(path, images, cpu={"num_threads": 2, "xnnpack_flags": FORCE_FP16})


def largest_value(path: Path, images: np.ndarray) -> float:
    """Return the largest absolute value of any float tensor of a file, in float32 and on a few images."""
    with damage_errors(path):
        graph = FileGraph.read(np.memmap(path, np.uint8, "r"))
    # The runtime leaves the values of float16 kernels undefined where it multiplies by them directly.
    names = {graph.name(operator) for operator in graph.operators if operator.kind != "DEQUANTIZE"}
    maxima = [0.0]
    observe(
        path, graph, images[:NUM_OBSERVED], lambda _, x: maxima.append(np.abs(x).max()), names=names, progress=False
    )
    return float(max(maxima))
