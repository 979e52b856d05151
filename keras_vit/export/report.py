"""The report of an export: the comparison with the model, and the time and memory that the export took."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keras_vit._util import html
from keras_vit._util.checks import json_able
from keras_vit._util.text import byte_size
from keras_vit.export.phone import Accelerated

NOT_COMPARED = (
    "not compared: the model gives the same output for all of them, as a new head of zeros does. The file gives it "
    "too; verify a file of the trained model"
)
SAMPLING_INTERVAL = 0.005  # seconds between two looks at the memory


@dataclass(frozen=True, kw_only=True)
class Report:
    """The comparison of an exported file with its model.

    Args:
        path: path of the file or folder.
        bytes: size on disk.
        images: number of images that were compared.
        max_error: largest difference of a logit, divided by the largest logit.
        cosine: lowest cosine similarity of an image's logits, or of its attention where the file returns it; -1 to 1.
        mean_cosine: mean cosine similarity over the images, which is compared with `least_cosine`; -1 to 1.
        sqnr: signal-to-quantization-noise ratio in dB: power of the model's logits over that of the differences; of
            several outputs the lowest.
        difference_cosine: mean cosine similarity between the differences of two images' logits, the file's and the
            model's, over all pairs, -1 to 1. Parts common to all images do not count, nor do pairs whose difference is
            below a tenth of the root mean square one. None if the model distinguishes no two images.
        difference_scale: how many times as large as the model's the file's differences between images are, by least
            squares: 1 in a right file. None as for `difference_cosine`.
        is_constant: whether the model gives the same outputs for all images, as one with a new head of zeros does. Then
            nothing is compared but that the file gives them too: the errors, cosines and agreements are None.
        has_classes: whether the model has classes of images or pixels; if not, the agreement is not printed.
        agreement: share of images with the same best class, 0 to 1; without a head, with the same largest feature. Of
            maps, the share of pixels with the same class, or of depth with a ratio to the model's below 1.25.
        decided_agreement: share with the same best class or a near tie: the model's logits of the two classes are
            closer than a tenth of the standard deviation of its logits over classes.
        mean_iou: for maps of classes, the mean IoU with the model's maps, 0 to 1. The errors and cosines of a file that
            returns numbers of classes and no logits are None.
            For segments, that of the masks of the queries that have a class.
        segments: number of panoptic segments that the model finds in the images; the agreement is then twice the number
            that the file finds too (the same class, IoU above 0.5), divided by those of both.
        relative_error: for depth, the mean difference from the model's, divided by the model's.
        milliseconds: median time of one image on this machine.
        threads: number of threads; None where the runtime chooses.
        mode: name of the mode that was given, or by which the file is stored; "bfloat16" for a SavedModel with such
            weights, None for other SavedModels.
        rounding: which layers' outputs the rounding of kernels changes most, in lines of text.
        device: the processor that the file was written for, what was chosen for it, and why; for the outputs of a
            phone, the phone and its runtime.
        accelerated: which operators the accelerator takes, if the file was run on one.
        calibrated_on: whether the images are those of the calibration.
        preprocess_error: largest difference (0..255) of images that the file resizes from `model.preprocess`.
        calibration_images: number of images on which a mode that calibrates was calibrated; None for other modes.
        accuracy: share of the images whose best class is the labelled one, for the file; None without labels.
        model_accuracy: the same for the model.
        files_error: for image files: largest difference of a probability from the model's for the same pixels; without
            a head, of a feature, divided by the largest.
        warmup: batch sizes of the warm-up requests that an export wrote into a SavedModel.
        seconds: duration of the export without the comparison.
        peak_bytes: peak memory of the export above that in use before it; None where the system does not report it.

    Example:
        >>> print(keras_vit.export.tflite(keras_vit.zoo.load("digits"), "digits.tflite"))
        digits.tflite: ... KiB, dynamic
          on 8 images: cosine 0.99..., SQNR ... dB, relative error ..., same best class 100.00%
          differences between images: cosine 0.99..., scale ...
          ... ms an image on 2 threads
          exported in ... s...
    """

    path: Path
    bytes: int
    images: int
    max_error: float | None
    cosine: float | None
    sqnr: float | None
    agreement: float | None
    milliseconds: float
    threads: int | None = None
    mode: str | None = None
    mean_cosine: float | None = None
    difference_cosine: float | None = None
    difference_scale: float | None = None
    is_constant: bool = False
    has_classes: bool = True
    decided_agreement: float | None = None
    mean_iou: float | None = None
    segments: int | None = None
    relative_error: float | None = None
    device: str | None = None
    accelerated: Accelerated | None = None
    rounding: tuple[str, ...] = ()
    calibrated_on: bool = False
    calibration_images: int | None = None
    accuracy: float | None = None
    model_accuracy: float | None = None
    preprocess_error: float | None = None
    files_error: float | None = None
    warmup: tuple[int, ...] | None = None
    seconds: float | None = None
    peak_bytes: int | None = None

    def __str__(self) -> str:
        return "\n  ".join(self.lines())

    def lines(self) -> list[str]:
        """Lines of the printed report.

        Example:
            >>> keras_vit.export.tflite(keras_vit.zoo.load("digits"), "digits.tflite").lines()[0]
            'digits.tflite: ... KiB, dynamic'
        """
        caveat = " (those of the calibration)" if self.calibrated_on else ""
        ties = ""
        if self.decided_agreement not in (None, self.agreement):
            ties = f", {self.decided_agreement:.2%} with near ties"
        same = "same best class" if self.mean_iou is None else "pixels of the same class"
        same = same if self.relative_error is None else "pixels within a factor of 1.25"
        same = same if self.segments is None else f"same segments, of {self.segments},"
        figures = []
        if self.cosine is not None:
            figures.append(f"cosine {self._cosines()}, SQNR {self.sqnr:.1f} dB, relative error {self.max_error:.1e}")
        if self.agreement is not None and (self.has_classes or self.relative_error is not None):
            figures.append(f"{same} {self.agreement:.2%}{ties}")
        compared = NOT_COMPARED if self.agreement is None else ", ".join(figures)
        lines = [
            f"{self.path}: {byte_size(self.bytes)}{f', {self.mode}' if self.mode else ''}",
            f"on {self.images} images{caveat}: {compared}",
        ]
        if self.device is not None:
            lines.append(self.device)
        if self.calibration_images is not None and not self.calibrated_on:
            lines.append(f"calibrated on {self.calibration_images} other images")
        if self.accuracy is not None and self.model_accuracy is not None:
            lines.append(f"accuracy on their classes: file {self.accuracy:.2%}, model {self.model_accuracy:.2%}")
        if self.mean_iou is not None:
            lines.append(f"mean IoU with the model's maps {self.mean_iou:.4f}")
        if self.relative_error is not None:
            lines.append(f"mean relative error of the depth {self.relative_error:.1e}")
        if self.difference_cosine is not None:
            scale = "" if self.difference_scale is None else f", scale {self.difference_scale:.4f}"
            lines.append(f"differences between images: cosine {self.difference_cosine:.6f}{scale}")
        lines += self.rounding
        if self.preprocess_error is not None:
            lines.append(f"resized images differ from preprocess by up to {self.preprocess_error:.2g} of 255")
        if self.files_error is not None:
            lines.append(f"answers to image files differ by up to {self.files_error:.1e}")
        if self.warmup is not None:
            sizes = ", ".join(map(str, self.warmup))
            lines.append(f"warm-up requests: {f'for batches of {sizes}' if sizes else 'none'}")
        threads = "" if self.threads is None else f" on {self.threads} thread{'s' if self.threads > 1 else ''}"
        if self.accelerated is not None:
            lines.append(str(self.accelerated))
        lines.append(f"{self.milliseconds:.2f} ms an image{threads}")
        if self.seconds is not None:
            memory = "" if self.peak_bytes is None else f", {byte_size(self.peak_bytes)} of memory above the model"
            lines.append(f"exported in {self.seconds:.1f} s{memory}")
        return lines

    def _repr_html_(self) -> str:
        """Show the report as a table in notebooks."""
        values = asdict(self) | {"accelerated": self.accelerated and str(self.accelerated)}
        cells = {name.replace("_", " "): _cell(name, value) for name, value in values.items() if name != "path"}
        return html.facts(str(self.path), cells)

    def _cosines(self) -> str:
        if self.mean_cosine is None or self.images == 1:
            return f"{self.cosine:.6f}"
        return f"{self.mean_cosine:.6f} (lowest {self.cosine:.6f})"

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON: the path as a string, numbers that are not finite as None.

        Example:
            >>> keras_vit.export.tflite(keras_vit.zoo.load("digits"), "digits.tflite").to_dict()["path"]
            'digits.tflite'
        """
        return dict(json_able(asdict(self) | {"path": str(self.path)}))


def _cell(name: str, value: Any) -> Any:
    if name in ("bytes", "peak_bytes") and value is not None:
        return byte_size(value)
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


@dataclass
class Resources:
    """The duration of a block, and its peak of resident memory above that at the start (None if not known)."""

    seconds: float = 0.0
    peak_bytes: int | None = None


@contextlib.contextmanager
def measure_resources() -> Iterator[Resources]:
    """Measure the block; the yielded Resources are complete after the block."""
    used = Resources()
    has_ended = threading.Event()
    before = resident_bytes()

    def sample_memory() -> None:
        if before is None:
            return
        is_last = False
        while not is_last:
            is_last = has_ended.wait(SAMPLING_INTERVAL)
            used.peak_bytes = max(used.peak_bytes or 0, (resident_bytes() or 0) - before)

    sampler = threading.Thread(target=sample_memory, daemon=True)
    start = time.perf_counter()
    sampler.start()
    try:
        yield used
    finally:
        used.seconds = time.perf_counter() - start
        has_ended.set()
        sampler.join()


def resident_bytes() -> int | None:
    """Read the resident memory of this process; None on systems without Linux's /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return 1024 * int(status.read_text(encoding="ascii").partition("VmRSS:")[2].split()[0])
