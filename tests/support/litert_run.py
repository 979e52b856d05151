"""Run all .tflite files of a folder on its images.npy, with LiteRT and NumPy alone: python litert_run.py FOLDER

Writes FILE.npy with the first output of FILE.tflite, which takes and returns floats, for each image, and versions.txt.
"""

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter


def main(folder: Path) -> None:
    """Run all files."""
    images = np.load(folder / "images.npy")
    for path in sorted(folder.glob("*.tflite")):
        interpreter = Interpreter(model_path=str(path), num_threads=2)
        interpreter.allocate_tensors()
        [image], [result, *_] = interpreter.get_input_details(), interpreter.get_output_details()
        outputs = []
        for values in images:
            interpreter.set_tensor(image["index"], values[None])
            interpreter.invoke()
            outputs.append(interpreter.get_tensor(result["index"]))
        np.save(path.with_suffix(".npy"), np.concatenate(outputs))
    (folder / "versions.txt").write_text(f"LiteRT {version('ai-edge-litert')}, {platform.machine()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
