"""The reference cases of maps: tiny checkpoints with the outputs of transformers, timm and Meta's code."""

from __future__ import annotations

import json

import numpy as np

from keras_vit import converters, dense
from places import DATA
from reference_cases import arrays

FOLDER = DATA / "dense"
TOLERANCES: dict[str, float] = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))["tolerance"]
FEATURES = [name for name in TOLERANCES if name.startswith("timm") or name.endswith("backbone")]
MAPS = [name for name in TOLERANCES if name not in FEATURES]


def expected(name: str) -> dict[str, np.ndarray]:
    """Return the official outputs by name, with the channels last."""
    found = arrays(FOLDER / name / "reference.npz")
    return {
        key: np.moveaxis(x, 1, -1) if x.ndim == 4 and not key.endswith("input_nhwc") else x for key, x in found.items()
    }


def sizes(outputs: dict[str, np.ndarray]) -> list[str]:
    """Return the prefixes of the names of a case's outputs: "" and those at other image sizes."""
    return sorted({name[: name.find("/") + 1] if name.startswith("resized") else "" for name in outputs})


def load(name: str) -> dense.DenseModel:
    """Load the model of a case."""
    folder = FOLDER / name
    if not name.startswith("dinov2"):
        return dense.load(folder)
    backbone = converters.load(folder / "backbone.safetensors", config={"num_heads": 3})
    (head,) = folder.glob("*_head.safetensors")
    return dense.load(head, backbone=backbone)


def padded(images: np.ndarray, model: dense.DenseModel) -> np.ndarray:
    """Return prepared images with the zeros around them that the head's official code adds."""
    if model.head.framing not in ("none", "short"):
        return images
    counts = [-side % model.head.multiple for side in images.shape[1:3]]
    return np.pad(images, ((0, 0), *((count // 2, count - count // 2) for count in counts), (0, 0)))
