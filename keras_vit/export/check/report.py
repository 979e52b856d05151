"""What an export measured of itself."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from keras_vit._util import html

SAMPLED = 0.005  # seconds between two looks at the memory


@dataclass(frozen=True, kw_only=True)
class Report:
    """A file that left, compared with the model it came from.

    Attributes:
        path: of the file or folder.
        bytes: on disk.
        images: how many were compared.
        max_error: largest difference of a logit, over the largest logit.
        cosine: lowest cosine similarity of an image's logits; of its attention too, where the file gives that.
        sqnr: power of the model's logits over the power of their differences, in dB, over all images.
        agreement: share of the images whose best class is the same, 0..1; without a head, of the largest feature.
        milliseconds: median time of one image on this machine.
        threads: that computed it; None where the runtime chooses.
        mode: how the file is quantized, where known.
        calibrated_on: whether the images were those of the calibration.
        preprocess_error: where the file resizes: largest difference of an image that it prepares from the model's
            `preprocess`, in units of 0..255.
        files_error: where image files are taken: largest difference of a probability from what the model makes of
            their pixels; without a head, of a feature over the largest.
        bfloat16_cosine: lowest cosine of the bfloat16 signatures of a SavedModel that has them.
        seconds: that the export took, without the verification.
        peak_bytes: that the export needed above what was in memory before, None where the system does not tell.
    """

    path: Path
    bytes: int
    images: int
    max_error: float
    cosine: float
    sqnr: float
    agreement: float
    milliseconds: float
    threads: int | None = None
    mode: str | None = None
    calibrated_on: bool = False
    preprocess_error: float | None = None
    files_error: float | None = None
    bfloat16_cosine: float | None = None
    seconds: float | None = None
    peak_bytes: int | None = None

    def __str__(self) -> str:
        return "\n  ".join(self.lines())

    def lines(self) -> list[str]:
        """What a reader wants to know, a sentence each."""
        known = " (those of the calibration)" if self.calibrated_on else ""
        lines = [
            f"{self.path}: {self.bytes:,} bytes{f', {self.mode}' if self.mode else ''}",
            f"on {self.images} images{known}: cosine {self.cosine:.6f}, SQNR {self.sqnr:.1f} dB, relative error "
            f"{self.max_error:.1e}, same best class {self.agreement:.2%}",
        ]
        if self.preprocess_error is not None:
            lines.append(f"its own resize is within {self.preprocess_error:.2g} of 255 of preprocess")
        if self.files_error is not None:
            lines.append(f"of image files: answers within {self.files_error:.1e}")
        if self.bfloat16_cosine is not None:
            lines.append(f"in bfloat16: cosine {self.bfloat16_cosine:.6f}")
        threads = "" if self.threads is None else f" on {self.threads} thread{'s' if self.threads > 1 else ''}"
        lines.append(f"{self.milliseconds:.2f} ms an image{threads}")
        if self.seconds is not None:
            memory = "" if self.peak_bytes is None else f", {self.peak_bytes / 1e6:,.0f} MB of memory above the model"
            lines.append(f"exported in {self.seconds:.1f} s{memory}")
        return lines

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        values = {name.replace("_", " "): _shown(value) for name, value in asdict(self).items() if name != "path"}
        return html.facts(str(self.path), values)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; numbers that are not finite (the SQNR of equals) are None."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _shown(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Watch:
    """Measures the time of a block and the memory that it adds: `with Watch() as watch: ...`.

    Attributes:
        seconds: of the block.
        peak_bytes: the most that was resident in between, above what was at the start; None where unknown.
    """

    seconds: float = 0.0
    peak_bytes: int | None = None

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._first = resident()
        self._start = time.perf_counter()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        if self._first is None:
            return
        self.peak_bytes = 0
        while True:
            last = self._over.wait(SAMPLED)
            self.peak_bytes = max(self.peak_bytes, (resident() or 0) - self._first)
            if last:
                return


def resident() -> int | None:
    """Bytes of this process that are in memory; None where the system does not tell as Linux does."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return 1024 * int(status.read_text(encoding="ascii").partition("VmRSS:")[2].split()[0])
