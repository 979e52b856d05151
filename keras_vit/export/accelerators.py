"""Run .tflite files by LiteRT's CompiledModel on a GPU, or read what a phone computed, and count operators taken.

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
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from keras_vit.export.exported import ExportedModel, Outputs

ACCELERATORS = ("cpu", "gpu")  # of this machine
PHONE_ACCELERATORS = (*ACCELERATORS, "npu")
TIMEOUT = 600.0  # seconds
_OPERATOR_COUNTS = re.compile(
    r"^(\d+) operations will run on the GPU, and the remaining (\d+) operations", re.MULTILINE
)
_REFUSED_OPERATOR = re.compile(r"not supported by GPU delegate:\n(.+)")
_NO_DEVICE = re.compile(r"initialize WebGPU|No adapters|libvulkan|accelerator could not be")
_NO_GPU_ADVICE = (
    "LiteRT found no GPU (on Linux it needs Vulkan). Without one, Debian's package chromium computes in software: run "
    "again with the environment variables LD_LIBRARY_PATH=/usr/lib/chromium, VK_ICD_FILENAMES=/usr/lib/chromium/"
    "vk_swiftshader_icd.json and XDG_RUNTIME_DIR=/tmp"
)
# LiteRT's errors, and a library that the driver lacks. Errors within a line of another level are of vendors' plugins,
# which are tried on every machine.
_ERROR_LINE = re.compile(r"^(?:(?:ERROR|Warning|\w+Error): |[EF]\d{4} [^]\n]*\] )(.+)", re.MULTILINE)
# Lines of LiteRT's run_model, as of commit f677457 (August 2026). It writes no files: with a sample size that is large
# enough, its log has all values. The CPU's delegate is XNNPACK. For an NPU a compiler selects operators, of which the
# delegate then sees one.
_OUTPUT = re.compile(r"\] Output buffer \d+:")
_NUM_VALUES = re.compile(r"\] +Total logical elements: (\d+)")
_VALUE = re.compile(r"\] +(\d+): (\S+)")
_DELEGATED = re.compile(r"Replacing (\d+) out of (\d+) node\(s\) with delegate \((.*?)\) node")
_SELECTED = re.compile(r"selected (\d+) ops, from a total of (\d+) ops")
_MILLISECONDS = re.compile(r"Inference \(avg\): +([\d.]+) ms")  # of benchmark_model
_EXIT_STATUS = re.compile(r"^exit status (\d+)", re.MULTILINE)  # written by check.sh
PHONE_ADVICE = "examples/android/check.sh writes it"


@dataclass(frozen=True)
class Accelerated:
    """Which operators of a file run on an accelerator.

    Args:
        accelerator: name of the accelerator: "gpu"; of a phone also "cpu" or "npu".
        taken: number of operators that it runs.
        of: number of operators of the file.
        refused: why the first other operator runs elsewhere; None if the accelerator takes the whole file.
    """

    accelerator: str
    taken: int
    of: int
    refused: str | None = None

    def __str__(self) -> str:
        reason = "" if self.refused is None else f"; first refused: {self.refused}"
        return f"{self.taken} of {self.of} operators on the {self.accelerator}{reason}"


def check_accelerator(name: str, path: Path, *, is_phone: bool = False) -> None:
    """Raise a ValueError if there is no such accelerator, here or on a phone, or none for such a file."""
    known = PHONE_ACCELERATORS if is_phone else ACCELERATORS
    if name not in known:
        also = "" if is_phone else ", or 'npu' with the outputs= of a phone"
        raise ValueError(f"accelerator must be one of {list(known)}{also}. Received: {name!r:.200}")
    if name == "gpu" and path.is_dir():
        raise ValueError(f"accelerator='gpu' is for .tflite files. Received: the folder {path}")


@dataclass(frozen=True, kw_only=True)
class CompiledRun:
    """Outputs and time of a .tflite file on some hardware, and the messages of the runtime."""

    outputs: dict[str, np.ndarray]  # for all images
    milliseconds: float  # median time of an image
    messages: str  # of LiteRT, with the reasons for operators that stay on the CPU


def run_on_gpu(path: Path, images: np.ndarray) -> tuple[CompiledRun, Accelerated]:
    """Run a .tflite file on the GPU; operators that it refuses run on the CPU. Raise a ValueError without a GPU."""
    try:
        run = run_compiled(path, images, hardware=("GPU", "CPU"))
    except ValueError as error:
        if _NO_DEVICE.search(str(error)):
            raise ValueError(f"{_NO_GPU_ADVICE}. Received: {error}") from None
        if problem := _gpu_problem(path):
            raise ValueError(f"{error}: {problem}") from None
        raise
    shares = _OPERATOR_COUNTS.search(run.messages)
    refused = _REFUSED_OPERATOR.search(run.messages)
    if shares is None:
        from keras_vit.export.exported import read_structure

        total = read_structure(path).num_operators
        return run, Accelerated("gpu", total, total)
    taken, left = map(int, shares.groups())
    return run, Accelerated("gpu", taken, taken + left, refused[1].strip() if refused else "unknown")


def _gpu_problem(path: Path) -> str | None:
    """Say why GPUs do not run a file, and what to take instead; None if nothing is known of it."""
    from keras_vit.export.exported import read_structure
    from keras_vit.export.modes import DEVICES

    return DEVICES["gpu"].problem(has_int16=read_structure(path).storage == "int16x8")


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


# ---- a phone


def write_inputs(folder: Path, file: "ExportedModel", images: np.ndarray) -> None:
    """Write images as LiteRT's run_model reads them: a folder of raw values for each, in FOLDER/inputs."""
    inputs = _inputs(folder, file)
    if inputs.exists():
        raise ValueError(f"inputs: {inputs} exists. Choose another folder, or remove it with the outputs beside it")
    for number, image in enumerate(images):
        place = inputs / f"{number:04}"
        place.mkdir(parents=True)
        image.tofile(place / f"{file.input_name}.raw")


def read_inputs(folder: Path, file: "ExportedModel") -> np.ndarray:
    """Read the images that `write_inputs` wrote for a file: (images, height, width, channels)."""
    inputs = _inputs(folder, file)
    if not (places := sorted(inputs.glob(f"*/{file.input_name}.raw"))):
        raise ValueError(f"outputs: there are no images in {inputs}; {PHONE_ADVICE}, and so does inputs=")
    images = []
    for place in places:
        values = np.fromfile(place, file.dtype)
        if (size := place.stat().st_size) != values.itemsize * np.prod(file.shape):  # type: ignore[arg-type]
            raise ValueError(f"{place} is for another file: it has {size:,} bytes, and not {file.dtype} {file.shape}")
        images.append(values.reshape(file.shape))  # type: ignore[arg-type]
    return np.stack(images)


def _inputs(folder: Path, file: "ExportedModel") -> Path:
    if file.batch != 1 or None in file.shape:
        raise ValueError(f"A phone's run_model needs a .tflite file of batch 1. Received: {(file.batch, *file.shape)}")
    return folder / "inputs"


def read_outputs(
    folder: Path, accelerator: str, example: "Outputs", num_operators: int
) -> tuple[CompiledRun, Accelerated, str]:
    """Read what a phone computed of the images in a folder, from the logs of LiteRT's programs.

    Args:
        folder: with inputs/0000/, ..., the logs gpu/0000.log, ... of run_model and gpu/benchmark.log of
            benchmark_model, and device.txt, which describes phone and runtime.
        accelerator: "cpu", "gpu" or "npu".
        example: the file's outputs for an image. The log numbers outputs and does not name them: they are told apart by
            their numbers of values.
        num_operators: number of the file's operators, where no log has it.

    Returns:
        The outputs, which operators the accelerator took, and the device in words.

    Raises:
        ValueError: a log is missing, of a program that failed, or has other outputs than the file.
    """
    logs = folder / accelerator
    images = sorted(place.parent.name for place in (folder / "inputs").glob("*/*.raw"))
    texts = {image: _read_log(logs / f"{image}.log") for image in images}
    benchmark = _read_log(logs / "benchmark.log")
    if not (time := _MILLISECONDS.search(benchmark)):
        raise ValueError(f"{logs / 'benchmark.log'} has no line 'Inference (avg): ... ms'; {PHONE_ADVICE}")
    found = [_outputs(logs / f"{name}.log", text, example) for name, text in texts.items()]
    outputs = {name: np.concatenate([each[name] for each in found]) for name in example}
    everything = "\n".join([benchmark, *texts.values()])
    run = CompiledRun(outputs=outputs, milliseconds=float(time[1]), messages=everything)
    described = folder / "device.txt"
    device = "; ".join(described.read_text("utf-8").splitlines()) if described.exists() else "a device without a name"
    return run, _taken(accelerator, everything, num_operators), device


def _read_log(path: Path) -> str:
    """Read the log of a program that did not fail."""
    if not path.exists():
        raise ValueError(f"outputs: there is no {path}; {PHONE_ADVICE}")
    text = path.read_text("utf-8", errors="replace").replace("\r", "")
    status = [*_EXIT_STATUS.findall(text), "not known"][0]
    if status != "0":
        lines = [line for line in text.splitlines() if line and not _EXIT_STATUS.match(line)]
        reasons = "; ".join(_ERROR_LINE.findall(text)[:3] or lines[-1:])
        raise ValueError(f"{path}: the program failed on the phone (exit status {status}): {reasons:.300}")
    return text


def _outputs(path: Path, text: str, example: "Outputs") -> "Outputs":
    """Read the outputs (1, ...) from the log of run_model for an image."""
    names = {values.size: name for name, values in example.items()}
    wanted = {name: values.size for name, values in example.items()}
    if len(names) != len(wanted):
        raise ValueError(f"Outputs of as many values cannot be told apart in a log of run_model. Received: {wanted}")
    outputs = {}
    for part in _OUTPUT.split(text)[1:]:
        stated = _NUM_VALUES.search(part)
        size = int(stated[1]) if stated else 0
        values = {int(index): float(value) for index, value in _VALUE.findall(part)}
        if size not in names or sorted(values) != list(range(size)):
            raise ValueError(f"{path} has {len(values)} values of an output of {size}. Expected: {wanted}")
        name = names[size]
        outputs[name] = np.array([values[index] for index in range(size)]).reshape(example[name].shape)
        outputs[name] = outputs[name].astype(example[name].dtype)
    if outputs.keys() != wanted.keys():
        raise ValueError(f"{path} has the outputs {list(outputs)}. Expected: {wanted}")
    return {name: outputs[name] for name in example}


def _taken(accelerator: str, text: str, num_operators: int) -> Accelerated:
    """Read how many operators an accelerator takes from the logs of its programs."""
    delegated = [(int(n), int(of), "xnn" in name.lower()) for n, of, name in _DELEGATED.findall(text)]
    pairs = [(n, of) for n, of, is_cpu in delegated if is_cpu == (accelerator == "cpu")]
    if accelerator == "npu":
        pairs = [(int(n), int(of)) for n, of in _SELECTED.findall(text)] or pairs
    if not pairs:
        return Accelerated(accelerator, 0, num_operators, "no log names a delegate for it, the CPU may have run all")
    refused = _REFUSED_OPERATOR.search(text)
    taken, of = pairs[0]
    return Accelerated(accelerator, taken, of, None if taken == of else refused[1].strip() if refused else "unknown")


if __name__ == "__main__":
    _run(Path(sys.argv[1]), **json.loads((Path(sys.argv[1]) / "run.json").read_text()))
