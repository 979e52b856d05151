"""Check how a float file runs in half precision, as on phone GPUs and on CPUs with float16 arithmetic."""

from pathlib import Path

import numpy as np

from keras_vit.export.check.compiled import run_compiled
from keras_vit.export.check.measures import difference_cosine
from keras_vit.export.check.running import main_output
from keras_vit.export.quantization.calibration import FileGraph, observe

FORCE_FP16 = 4  # XNNPACK's flag
NUM_IMAGES, NUM_OBSERVED = 4, 2  # images that run in half precision, and on which every tensor is looked at
FLOAT32_ERROR = 1e-5  # as a share of the largest output; that of half precision is 1e-4 and more


def half_precision_cosine(path: Path, images: np.ndarray, expected: np.ndarray, received: np.ndarray) -> float | None:
    """Return `difference_cosine` of a file in half precision, 0 for NaN; None if this CPU computes in float32 alone.

    `expected` and `received` are the main outputs of the model and, in float32, of the file.
    """
    some = np.linspace(0, len(images) - 1, min(len(images), NUM_IMAGES)).astype(int)
    try:
        run = run_compiled(path, images[some], cpu={"num_threads": 2, "xnnpack_flags": FORCE_FP16})
    except ValueError:
        return None
    half = main_output(run.outputs)
    if not np.isfinite(half).all():
        return 0.0
    if np.abs(half - received[some]).max() <= FLOAT32_ERROR * np.abs(half).max():
        return None
    return difference_cosine(expected[some], half)


def largest_value(path: Path, images: np.ndarray) -> float:
    """Return the largest absolute value of any float tensor of a file, in float32 and on a few images."""
    graph = FileGraph.read(np.memmap(path, np.uint8, "r"))
    # The runtime leaves the values of float16 kernels undefined where it multiplies by them directly.
    names = {graph.name(operator) for operator in graph.operators if operator.kind != "DEQUANTIZE"}
    maxima = [0.0]
    observe(
        path, graph, images[:NUM_OBSERVED], lambda _, x: maxima.append(np.abs(x).max()), names=names, progress=False
    )
    return float(max(maxima))
