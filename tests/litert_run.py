"""Run all .tflite files of a folder on its images.npy, with LiteRT and NumPy alone: python litert_run.py FOLDER

Writes FILE.npy with the first output of FILE.tflite for each image, in floats, and versions.txt.
"""

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter


def outputs(path: Path, images: np.ndarray) -> np.ndarray:
    """Return the outputs of a file that takes one image a call."""
    interpreter = Interpreter(model_path=str(path), num_threads=2)
    interpreter.allocate_tensors()
    [image], [result, *_] = interpreter.get_input_details(), interpreter.get_output_details()
    found = []
    for values in images:
        interpreter.set_tensor(image["index"], to_integers(values[None], image))
        interpreter.invoke()
        found.append(to_floats(interpreter.get_tensor(result["index"]), result))
    return np.concatenate(found)


def to_integers(values: np.ndarray, tensor: dict) -> np.ndarray:
    """Return floats as the integers of a quantized tensor; unchanged for other tensors."""
    (scale, zero_point), dtype = tensor["quantization"], tensor["dtype"]
    if not scale:
        return values
    limits = np.iinfo(dtype)
    return np.rint(values / scale + zero_point).clip(limits.min, limits.max).astype(dtype)


def to_floats(values: np.ndarray, tensor: dict) -> np.ndarray:
    """Return the integers of a quantized tensor as floats; unchanged for other tensors."""
    scale, zero_point = tensor["quantization"]
    return (values.astype(np.float32) - zero_point) * scale if scale else values


def main(folder: Path) -> None:
    """Run all files."""
    images = np.load(folder / "images.npy")
    for path in sorted(folder.glob("*.tflite")):
        np.save(path.with_suffix(".npy"), outputs(path, images))
    (folder / "versions.txt").write_text(f"LiteRT {version('ai-edge-litert')}, {platform.machine()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
