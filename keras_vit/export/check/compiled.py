"""Run .tflite files by LiteRT's CompiledModel: in half precision, or on an accelerator."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.export.check.running import Outputs

PROGRAM = Path(__file__).with_name("_compiled_process.py")
TIMEOUT = 600.0  # seconds


@dataclass(frozen=True, kw_only=True)
class CompiledRun:
    """What a .tflite file computes on some hardware."""

    outputs: Outputs  # for all images
    milliseconds: float  # median time of an image
    is_fully_accelerated: bool  # whether the accelerator takes every operator
    messages: str  # what LiteRT wrote, with the reasons for operators that stay on the CPU


def run_compiled(
    path: Path,
    images: np.ndarray,
    *,
    hardware: tuple[str, ...] = ("CPU",),
    cpu: dict[str, Any] | None = None,
    gpu: dict[str, Any] | None = None,
) -> CompiledRun:
    """Compile a .tflite file for some hardware and run it, in another process: drivers crash, and LiteRT talks much.

    Args:
        path: path of the file. Its input and outputs are floats or pixels, not integers with a scale.
        images: as the file takes them: prepared images or uint8 pixels (batch, height, width, channels).
        hardware: names of `HardwareAccelerator` in ai_edge_litert.compiled_model: "GPU" fails if the GPU does not take
            an operator, which ("GPU", "CPU") leaves to the CPU.
        cpu, gpu: arguments of `CpuOptions` and `GpuOptions` there.

    Raises:
        ValueError: LiteRT cannot compile or run the file with these options, crashes, or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        np.save(work / "images.npy", images)
        given = {"path": str(path.absolute()), "hardware": hardware, "cpu": cpu or {}, "gpu": gpu or {}}
        (work / "run.json").write_text(json.dumps(given), "utf-8")
        command = [sys.executable, "-P", str(PROGRAM), folder]  # -P: the modules beside the program are not its own
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{path} did not run on {hardware} in {TIMEOUT:g} seconds") from None
        if done.returncode:
            errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            reason = (errors or [f"exit status {done.returncode}"])[0]
            raise ValueError(f"{path} cannot be run on {' and '.join(hardware)}: {reason}")
        with np.load(work / "outputs.npz") as outputs:
            report = json.loads((work / "report.json").read_text("utf-8"))
            return CompiledRun(outputs=dict(outputs), messages=done.stderr, **report)
