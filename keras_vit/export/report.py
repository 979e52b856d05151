"""What an export measured of itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Report:
    """A file that left, compared with the model it came from.

    Attributes:
        path: of the file or folder.
        bytes: on disk.
        images: how many were compared.
        max_error: largest difference of a logit, over the largest logit.
        cosine: lowest cosine similarity of an image's logits.
        agreement: share of the images whose best class is the same, 0..1.
        milliseconds: median time of one image, batch 1, on this machine.
    """

    path: Path
    bytes: int
    images: int
    max_error: float
    cosine: float
    agreement: float
    milliseconds: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.bytes:,} bytes, on {self.images} images cosine {self.cosine:.6f}, relative error "
            f"{self.max_error:.1e}, same best class {self.agreement:.2%}, {self.milliseconds:.2f} ms an image"
        )
