"""Run .tflite files by LiteRT's CompiledModel on a GPU or a CPU, and count the operators that the GPU takes.

The module runs itself as a program in another process, because drivers crash and LiteRT describes each step on standard
error. At the top it imports nothing of the package, which would take seconds.
"""

import functools
import json
import operator
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TIMEOUT = 600.0  # seconds
_OPERATOR_COUNTS = re.compile(
    r"^(\d+) operations will run on the GPU, and the remaining (\d+) operations", re.MULTILINE
)
_NO_DEVICE = re.compile(r"initialize WebGPU|No adapters|libvulkan|accelerator could not be")
# LiteRT's errors, and a library that the driver lacks.
_ERROR_LINE = re.compile(r"^(?:(?:ERROR|Warning|\w+Error): |[EF]\d{4} [^]\n]*\] )(.+)", re.MULTILINE)
_NO_GPU_ADVICE = (
    "LiteRT found no GPU (on Linux it needs Vulkan). Without one, Debian's package chromium computes in software: run "
    "again with the environment variables LD_LIBRARY_PATH=/usr/lib/chromium, VK_ICD_FILENAMES=/usr/lib/chromium/"
    "vk_swiftshader_icd.json and XDG_RUNTIME_DIR=/tmp"
)


@dataclass(frozen=True, kw_only=True)
class CompiledRun:
    """Outputs and time of a .tflite file on some hardware, and the messages of the runtime."""

    outputs: dict[str, np.ndarray]  # for all images
    milliseconds: float  # median time of an image
    messages: str  # of LiteRT, with the reasons for operators that stay on the CPU


def run_on_gpu(path: Path, images: np.ndarray) -> tuple[CompiledRun, int, int]:
    """Run a .tflite file on the GPU, and on the CPU what the GPU refuses: the run, operators taken, and of how many."""
    try:
        run = run_compiled(path, images, hardware=("GPU", "CPU"))
    except ValueError as error:
        if _NO_DEVICE.search(str(error)):
            raise ValueError(f"{_NO_GPU_ADVICE}. Received: {error}") from None
        raise
    if shares := _OPERATOR_COUNTS.search(run.messages):
        taken, left = map(int, shares.groups())
        return run, taken, taken + left
    from keras_vit.export.exported import read_structure

    total = read_structure(path).num_operators
    return run, total, total


def run_compiled(path: Path, images: np.ndarray, *, hardware: tuple[str, ...] = ("CPU",)) -> CompiledRun:
    """Compile a .tflite file for some hardware and run it.

    Args:
        path: path of the file. Its input and outputs are floats or pixels, not integers with a scale.
        images: as the file takes them: prepared images or uint8 pixels (batch, height, width, channels).
        hardware: names of `HardwareAccelerator` in ai_edge_litert.compiled_model: "GPU" fails if the GPU does not take
            an operator, which ("GPU", "CPU") leaves to the CPU.

    Raises:
        ValueError: LiteRT cannot compile or run the file, crashes, or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        np.save(work / "images.npy", images)
        (work / "run.json").write_text(json.dumps({"path": str(path.absolute()), "hardware": hardware}))
        command = [sys.executable, "-P", __file__, folder]  # -P: the modules beside this file hide no others
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{path} did not run on {' and '.join(hardware)} in {TIMEOUT:g} seconds") from None
        if done.returncode:
            reasons = "; ".join(_ERROR_LINE.findall(done.stderr)[:3]) or "LiteRT crashed"
            raise ValueError(
                f"{path} cannot be run on {' and '.join(hardware)}: {reasons} (exit status {done.returncode})"
            )
        with np.load(work / "outputs.npz") as outputs:
            report = json.loads((work / "report.json").read_text())
            return CompiledRun(outputs=dict(outputs), messages=done.stderr, **report)


def _run(work: Path, path: str, hardware: list[str]) -> None:
    """Run a file on work/images.npy; write outputs.npz, and the other fields of a `CompiledRun` to report.json."""
    from ai_edge_litert.compiled_model import CompiledModel, HardwareAccelerator

    accelerators = functools.reduce(operator.or_, (HardwareAccelerator[name] for name in hardware))
    model = CompiledModel.from_file(path, accelerators)
    key = model.get_signature_by_index(0)["key"]
    [(name, image)], tensors = model.get_input_tensor_details(key).items(), model.get_output_tensor_details(key)
    given = {name: model.create_input_buffer_by_name(key, name)}
    results = {output: model.create_output_buffer_by_name(key, output) for output in tensors}
    images = np.load(work / "images.npy", mmap_mode="r")
    batch = image["shape"][0]
    times = []
    outputs: dict[str, list[np.ndarray]] = {output: [] for output in tensors}
    for start in range(-batch, len(images), batch):  # the first batch twice: the first call prepares kernels
        indices = np.arange(max(start, 0), max(start, 0) + batch).clip(max=len(images) - 1)
        began = time.perf_counter()
        given[name].write(images[indices].astype(image["dtype"]))
        model.run_by_name(key, given, results)
        for output, tensor in tensors.items():
            values = results[output].read(int(np.prod(tensor["shape"])), np.dtype(tensor["dtype"]))
            outputs[output].append(values.reshape(tensor["shape"]))
        times.append(1000 * (time.perf_counter() - began) / batch)
    joined: dict[str, Any] = {output: np.concatenate(parts[1:])[: len(images)] for output, parts in outputs.items()}
    np.savez(work / "outputs.npz", **joined)
    report = {"milliseconds": statistics.median(times[1:])}
    (work / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    _run(Path(sys.argv[1]), **json.loads((Path(sys.argv[1]) / "run.json").read_text()))
