"""Run .tflite files on accelerators, and count the operators that these take."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keras_vit.export.check import structure
from keras_vit.export.check.compiled import CompiledRun, run_compiled

ACCELERATORS = ("cpu", "gpu")
_SHARES = re.compile(r"^(\d+) operations will run on the GPU, and the remaining (\d+) operations", re.MULTILINE)
_REFUSED = re.compile(r"not supported by GPU delegate:\n(.+)")
_NO_DEVICE = re.compile(r"initialize WebGPU|No adapters|libvulkan|accelerator could not be")
_SOFTWARE = (
    "LiteRT found no GPU (on Linux it needs Vulkan). Without one, Debian's package chromium computes in software: run "
    "again with the environment variables LD_LIBRARY_PATH=/usr/lib/chromium, VK_ICD_FILENAMES=/usr/lib/chromium/"
    "vk_swiftshader_icd.json and XDG_RUNTIME_DIR=/tmp"
)


@dataclass(frozen=True)
class Accelerated:
    """Which operators of a file run on an accelerator.

    Args:
        accelerator: name of the accelerator, "gpu".
        taken: number of operators that it runs.
        of: number of operators of the file.
        refused: why the first other operator runs on the CPU; None if the accelerator takes the whole file.
    """

    accelerator: str
    taken: int
    of: int
    refused: str | None = None

    def __str__(self) -> str:
        reason = "" if self.refused is None else f"; first refused: {self.refused}"
        return f"{self.taken} of {self.of} operators on the {self.accelerator}{reason}"


def check_accelerator(name: str | None, path: Path) -> None:
    """Raise a ValueError if there is no such accelerator, or none for such a file."""
    if name not in (None, *ACCELERATORS):
        raise ValueError(f"accelerator must be one of {list(ACCELERATORS)}. Received: {name!r:.200}")
    if name == "gpu" and path.is_dir():
        raise ValueError(f"accelerator='gpu' is for .tflite files. Received: the folder {path}")


def run_on_gpu(path: Path, images: np.ndarray) -> tuple[CompiledRun, Accelerated]:
    """Run a .tflite file on the GPU, and on the CPU what the GPU refuses; raise a ValueError if there is no GPU."""
    try:
        run = run_compiled(path, images, hardware=("GPU", "CPU"))
    except ValueError as error:
        if _NO_DEVICE.search(str(error)):
            raise ValueError(f"{_SOFTWARE}. Received: {error}") from None
        raise
    shares = _SHARES.search(run.messages)
    refused = _REFUSED.search(run.messages)
    if shares is None:
        total = structure.read_structure(path).num_operators
        return run, Accelerated("gpu", total, total)
    taken, left = map(int, shares.groups())
    return run, Accelerated("gpu", taken, taken + left, refused[1].strip() if refused else "unknown")
