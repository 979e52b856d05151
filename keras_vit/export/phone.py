"""Images for a phone, and what LiteRT's programs computed of them there, from their logs."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keras_vit._util.checks import one_of

if TYPE_CHECKING:
    from keras_vit.export.exported import ExportedModel, Outputs

ACCELERATORS = ("cpu", "gpu", "npu")
_REFUSED_OPERATOR = re.compile(r"not supported by GPU delegate:\n(.+)")
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
_ADVICE = "examples/android/check.sh writes it"


@dataclass(frozen=True)
class Accelerated:
    """Which operators of a file run on an accelerator.

    Args:
        accelerator: its name: "cpu", "gpu" or "npu".
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


@dataclass(frozen=True, kw_only=True)
class PhoneRun:
    """Outputs, time and operators of a phone, for the images in a folder."""

    outputs: "Outputs"  # for all images
    milliseconds: float  # mean time of an image
    accelerated: Accelerated
    device: str  # phone and runtime in words


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
        raise ValueError(f"outputs: there are no images in {inputs}; {_ADVICE}, and so does inputs=")
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


def read_outputs(folder: Path, accelerator: str, example: "Outputs", num_operators: int) -> PhoneRun:
    """Read what a phone computed of the images in a folder, from the logs of LiteRT's programs.

    Args:
        folder: with inputs/0000/, ..., the logs gpu/0000.log, ... of run_model and gpu/benchmark.log of
            benchmark_model, and device.txt, which describes phone and runtime.
        accelerator: "cpu", "gpu" or "npu".
        example: the file's outputs for an image. The log numbers outputs and does not name them: they are told apart by
            their numbers of values.
        num_operators: number of the file's operators, where no log has it.

    Raises:
        ValueError: there is no such accelerator, or a log is missing, of a program that failed, or has other outputs
            than the file.
    """
    one_of("accelerator", accelerator, ACCELERATORS)
    logs = folder / accelerator
    images = sorted(place.parent.name for place in (folder / "inputs").glob("*/*.raw"))
    texts = {image: _read_log(logs / f"{image}.log") for image in images}
    benchmark = _read_log(logs / "benchmark.log")
    if not (time := _MILLISECONDS.search(benchmark)):
        raise ValueError(f"{logs / 'benchmark.log'} has no line 'Inference (avg): ... ms'; {_ADVICE}")
    found = [_outputs(logs / f"{name}.log", text, example) for name, text in texts.items()]
    outputs = {name: np.concatenate([each[name] for each in found]) for name in example}
    everything = "\n".join([benchmark, *texts.values()])
    described = folder / "device.txt"
    device = "; ".join(described.read_text("utf-8").splitlines()) if described.exists() else "a device without a name"
    return PhoneRun(
        outputs=outputs,
        milliseconds=float(time[1]),
        accelerated=_taken(accelerator, everything, num_operators),
        device=device,
    )


def _read_log(path: Path) -> str:
    """Read the log of a program that did not fail."""
    if not path.exists():
        raise ValueError(f"outputs: there is no {path}; {_ADVICE}")
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
