"""`make bench-gpu` runs unattended and writes a row for each measurement; here on the CPU with tiny sizes."""

from __future__ import annotations

import argparse
import sys

import pytest

from places import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))
import gpu  # noqa: E402

from marks import full_except  # noqa: E402

TINY = {"model": "Ti/16", "batch": 2, "size": 32, "repeats": 1, "memory": 1000}
LOGITS = "logits, beside the CPU's"


@pytest.mark.parametrize("row", full_except([LOGITS], ["training step, bfloat16", LOGITS], marks=pytest.mark.slow))
@pytest.mark.full
def test_a_row_has_its_numbers(row: str) -> None:
    numbers = gpu.ROWS[row](argparse.Namespace(**TINY))
    assert all(value is None or value >= 0 for value in numbers.values())
    assert numbers.get("largest difference", 0) < 1e-5  # here both are the CPU, in float32
    assert numbers.get("cosine", 1) > 0.9999


def test_a_row_that_fails_or_takes_too_long_says_so() -> None:
    options = argparse.Namespace(**TINY)
    assert gpu.measured("no such row", options, 60).startswith("failed: KeyError")
    assert gpu.measured("SavedModel", options, 0.01) == "not finished after 0 s"
