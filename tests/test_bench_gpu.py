"""`make bench-gpu` runs unattended and writes a row for each measurement; here on the CPU with tiny sizes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import gpu  # noqa: E402

TINY = {"model": "Ti/16", "batch": 2, "size": 32, "repeats": 1, "memory": 1000}


@pytest.mark.parametrize("row", ["training step, bfloat16", "logits, beside the CPU's", "SavedModel"])
@pytest.mark.full
def test_a_row_has_its_numbers(row: str) -> None:
    numbers = gpu.ROWS[row](argparse.Namespace(**TINY))
    assert all(value is None or value >= 0 for value in numbers.values())
    assert numbers.get("largest difference", 0) < 1e-5  # here both are the CPU, in float32
    assert numbers.get("cosine", 1) > 0.9999


@pytest.mark.slow
def test_all_rows_are_written_and_one_that_fails_costs_no_other(tmp_path: Path) -> None:
    arguments = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
    out = tmp_path / "gpu.txt"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments, "--out", str(out), "--seconds", "1200"]
    subprocess.run(command, check=True, timeout=1500)
    lines = out.read_text(encoding="utf-8").splitlines()
    assert [line[:30].strip() for line in lines[3:]] == list(gpu.ROWS)
    assert "no GPU found" in lines[0]
    assert not any("failed" in line or "not finished" in line for line in lines), lines
    replicas = next(line for line in lines if line.startswith("two replicas"))
    # Sums of gradients in another order, in float32.
    assert float(replicas.rpartition("loss differs by ")[2]) < 1e-4


def test_a_row_that_fails_or_takes_too_long_says_so() -> None:
    options = argparse.Namespace(**TINY)
    assert gpu.measured("no such row", options, 60).startswith("failed: KeyError")
    assert gpu.measured("SavedModel", options, 0.01) == "not finished after 0 s"
