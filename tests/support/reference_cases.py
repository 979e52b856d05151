"""The reference cases: tiny checkpoints with the results of their format's official code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from places import DATA

FOLDER = DATA / "reference"
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))["cases"]
}


def of_kind(kind: str) -> list[str]:
    """Return the names of the cases of one kind, such as "official_npz"."""
    return [name for name, case in CASES.items() if case["kind"] == kind]


def checkpoint(name: str) -> Path:
    """Return the file to load."""
    return FOLDER / CASES[name]["files"]["checkpoint"]


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an .npz, read by NumPy."""
    with np.load(path) as file:
        return dict(file)


def expected(name: str, *, float64: bool = False) -> dict[str, np.ndarray]:
    """Return the official outputs, in float32 or in float64."""
    return arrays(FOLDER / CASES[name]["files"]["reference_f64" if float64 else "reference"])


def tolerance(name: str, *, float64: bool = False) -> float:
    """Return the manifest's bound for `distance`: above the rounding errors, below every known mistake."""
    return CASES[name]["suggested_tolerance"]["float64_vs_reference_f64" if float64 else "float32"]


def distance(got: Any, want: np.ndarray) -> float:
    """Return the largest difference divided by the largest value."""
    got = np.asarray(got)
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())
