"""Print the results of edge.py: a table for each model, and the targets with their results."""

import datetime
import os
import platform
import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

from edge_peers import MODES, ONNX, OPENVINO, OPENVINO_BF16, PEERS, REPEATS, SUFFIXES, THREADS

OURS, CONVERTER = "keras_vit", "converter"
KERAS_PEERS = [name for name in PEERS if name not in SUFFIXES]
LABELS = {
    CONVERTER: "keras.layers.GroupNormalization",
    ONNX: "ONNX Runtime",
    OPENVINO: "OpenVINO",
    OPENVINO_BF16: "OpenVINO, bfloat16",
}
KINDS = {"none": "float32", "dynamic": "dynamic int8"}
PRODUCTS = {"2048^3": (2048, 2048, 2048), "197x768x3072": (197, 768, 3072)}
SHARES = [f"% {product}" for product in PRODUCTS]
COLUMNS = ("ms", "best", "x ours", "MB", "cosine", "error", "export s", "added MB", *SHARES)
NOTES = """
x ours: the median of the rounds' ratios. cosine: the lowest of the images', to Keras in float64. error: of a logit at
most, of the largest, to the same. OpenVINO's int8 has fixed ranges, from 32
images; what is not int8 is float32 or bfloat16. export s, added MB: what the export took, and the memory that it added
to the loaded model, without verification; ~: others took processors. %: of TensorFlow's rate of float32 products, with
the operations of the model.
"""
NOT_JUDGED = "not judged, others took processors"
DISTURBED = 0.2  # mean number of processors that other programs may use; above it no target of time is judged
# Target: how many times as fast ours should be as each other file.
SPEED_TARGETS = [
    ("Ti/16", "none", (*KERAS_PEERS, ONNX), 1.15),
    ("Ti/16", "dynamic", (*KERAS_PEERS, ONNX), 1.15),
    ("B/16", "none", (*KERAS_PEERS, ONNX), 1.05),
    ("B/16", "dynamic", KERAS_PEERS, 1.1),
    ("B/16", "dynamic", (ONNX,), 1.3),
    ("B/16", "dynamic", (OPENVINO, OPENVINO_BF16, (OPENVINO_BF16, "none")), 1.0),
    ("B/16, gains", "dynamic", KERAS_PEERS, 1.05),
    ("B/16, gains and channels", "dynamic", KERAS_PEERS, 1.05),
    *((model, mode, (CONVERTER,), 1.8) for model in ("R26+S/32", "R50+B/16") for mode in MODES),
]
ERROR, COSINE = 1e-5, 0.999  # error of every float32 file, relative to the largest logit; error of B/16 in dynamic int8
EXPORT_SECONDS, EXPORT_BYTES = 5, 1.5e9  # of B/16
LARGE = {"L/16": 12e9, "H/14": None}  # peak bytes of the process that exports and verifies in dynamic int8
AGREEMENT, ACCURACY = 0.995, 0.002  # of the digits model: lowest agreement of the best class, largest loss of accuracy


def times(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the ratio of two times: the median of the ratios in each round."""
    return statistics.median(a / b for a, b in zip(one["ms"], other["ms"], strict=True))


def report(results: dict[str, dict[str, Any]], peak: dict[str, float], rounds: int) -> None:
    """Print the machine and the versions, and a table for each model."""
    info = Path("/proc/cpuinfo").read_text()
    cpu = re.search(r"model name\s*: (.*)", info)
    processor = (cpu[1] if cpu else platform.machine()) + (" with AMX" if "amx_int8" in info else "")
    installed = {f"Python {platform.python_version()}"}
    for result in results.values():
        for row in (result, *result["rows"].values()):
            installed |= {f"{package} {version}" for package, version in row["versions"].items()}
    rates = ", ".join(f"{shape} {rate:.0f} GFLOP/s" for shape, rate in peak.items())
    head = f"""
    Exported files, one image a call, {THREADS} threads: {rounds} rounds in one process, in each {REPEATS} calls of
    every file in shuffled order. {datetime.date.today()}, {processor}, {os.cpu_count()}
    CPUs, a load of {os.getloadavg()[2]:.1f} over fifteen minutes, this included; {", ".join(sorted(installed))}.
    TensorFlow's float32 products: {rates}.
    """
    print(fill(head))
    for name, result in results.items():
        print(
            f"\n{name}: {result['flops'] / 1e9:.1f} GFLOP; Keras' own float32 is off by {result['error']:.1e}; ", end=""
        )
        print(f"others took {result['others']:.2f} processors")
        for mode in MODES:
            print(f"{KINDS[mode]:32}" + "".join(f"{column:>{max(10, len(column) + 2)}}" for column in COLUMNS))
            for (contender, kind), row in result["rows"].items():
                if kind == mode:
                    print(line(contender, row, result["rows"].get((OURS, mode)), result["flops"], peak))
        for what, reason in result["left_out"].items():
            print(f"left out: {what}: {reason}")
    print(f"\n{fill(NOTES)}")


def fill(text: str) -> str:
    """Print a paragraph."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def line(name: str, row: dict[str, Any], ours: dict[str, Any] | None, flops: int, peak: dict[str, float]) -> str:
    """Return a file's line of the table."""
    middle = statistics.median(row["ms"])
    figures = f"{LABELS.get(name, name):32}{middle:10.2f}{min(row['ms']):10.2f}"
    figures += f"{times(row, ours):9.2f}x" if ours else f"{'-':>10}"
    figures += f"{row['bytes'] / 1e6:10.1f}{row['cosine']:10.6f}{row['error']:10.1e}"
    figures += f"{row['seconds']:9.1f}{'~' if disturbed(row) else ' '}{row['added'] / 1e6:10.0f}"
    shares = {shape: flops / middle / 1e4 / rate for shape, rate in peak.items()}
    return figures + "".join(f"{share:{max(10, len(shape) + 4)}.0f}" for shape, share in shares.items())


def verdicts(results: dict[str, dict[str, Any]], digit: dict[str, float] | str, large: dict[str, Any]) -> None:
    """Print every target that this run can judge."""
    print()
    for name, mode, others, least in SPEED_TARGETS:
        rows = results[name]["rows"] if name in results else {}
        if (OURS, mode) not in rows:
            continue
        keys = [(other, mode) if isinstance(other, str) else other for other in others]
        ratios = {name_in(key, mode): times(rows[key], rows[OURS, mode]) for key in keys if key in rows}
        if ratios:
            verdict = NOT_JUDGED if disturbed(results[name]) else met(min(ratios.values()) >= least)
            words = ", ".join(f"{ratio:.2f}x {other}" for other, ratio in ratios.items())
            print(f"{name}, {KINDS[mode]}: faster than others, {words} (target: {least}x): {verdict}")
    for name, result in results.items():
        if row := result["rows"].get((OURS, "none")):
            print(f"{name}, float32: error {row['error']:.1e} (target: {ERROR:.0e}): {met(row['error'] <= ERROR)}")
    rows = results["B/16"]["rows"] if "B/16" in results else {}
    for mode in MODES:
        if row := rows.get((OURS, mode)):
            words = f"{row['seconds']:.1f} s, {row['added'] / 1e9:.2f} GB"
            right = row["seconds"] <= EXPORT_SECONDS and row["added"] <= EXPORT_BYTES
            late = row["seconds"] > EXPORT_SECONDS and disturbed(row)
            target = f"{EXPORT_SECONDS} s, {EXPORT_BYTES / 1e9} GB"
            print(f"B/16, {KINDS[mode]}: export {words} (target: {target}): {NOT_JUDGED if late else met(right)}")
    if row := rows.get((OURS, "dynamic")):
        words = f"cosine {row['cosine']:.6f} (target: {COSINE})"
        print(f"B/16, dynamic int8: {words}: {met(row['cosine'] >= COSINE)}")
    other_verdicts(digit, large)


def name_in(key: tuple[str, str], mode: str) -> str:
    """Return the name of a file in a verdict about files of a mode."""
    contender, kind = key
    return LABELS.get(contender, contender) + (f" ({KINDS[kind]})" if kind != mode else "")


def other_verdicts(digit: dict[str, float] | str, large: dict[str, Any]) -> None:
    """Print the targets of the other models."""
    if isinstance(digit, str):
        print(f"digits: not judged: {digit}")
    else:
        right = digit["agreement"] >= AGREEMENT and digit["file"] >= digit["keras"] - ACCURACY
        words = f"accuracy {digit['keras']:.4f}, of the file {digit['file']:.4f}, agreement {digit['agreement']:.4f}"
        print(f"digits, dynamic int8: {words} (target: within {ACCURACY}, {AGREEMENT}): {met(right)}")
    for name, figures in large.items():
        if isinstance(figures, str):
            print(f"{name}, dynamic int8: MISSED: {figures}")
            continue
        words = f"{figures['bytes'] / 1e6:.0f} MB in {figures['seconds']:.1f} s, run in {figures['ms']:.0f} ms, cosine "
        words += f"{figures['cosine']:.6f}, the whole process {figures['peak'] / 1e9:.1f} GB"
        most = LARGE[name]
        target = f"{most / 1e9:.0f} GB" if most else "written and run"
        print(f"{name}, dynamic int8: {words} (target: {target}): {met(not most or figures['peak'] <= most)}")


def disturbed(measured: dict[str, Any]) -> bool:
    """Return whether other programs used processors during a measurement."""
    return bool(measured["others"] > DISTURBED)


def met(whether: bool) -> str:
    """Return the verdict that is printed after a target."""
    return "met" if whether else "MISSED"
