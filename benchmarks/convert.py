"""Measure time and memory of converting ViT-B/16 between all formats, and of timm's and transformers' own loading.

    python benchmarks/convert.py                    keras_vit alone
    python benchmarks/convert.py --peers PYTHON     PYTHON has torch, timm and transformers

Each measurement is a new process; the rows alternate. Seconds do not include imports and the start of the process.
Memory is the peak of the process, and the part of it that the work added.
"""

import argparse
import datetime
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve()
# Source: its folder or file.
SOURCES = {"google": "google.npz", "big_vision": "big_vision.npz", "timm": "timm", "huggingface": "huggingface"}
OURS = "from keras_vit import converters"
DIRECTIONS = [
    *(("google", target) for target in ("timm", "huggingface", "big_vision")),
    *((source, "google") for source in ("timm", "huggingface", "big_vision")),
]
# Row: the import, and the timed function.
CONTENDERS: dict[str, tuple[str, str]] = {
    **{
        f"keras_vit: {source} -> {target}": (
            OURS,
            f"converters.convert(folder / {SOURCES[source]!r}, out / {SOURCES[target]!r}, format={target!r})",
        )
        for source, target in DIRECTIONS
    },
    **{
        f"keras_vit: load {source}": (OURS, f"model = converters.load(folder / {SOURCES[source]!r})")
        for source in ("google", "timm", "huggingface")
    },
}
# PyTorch's loaders may only map the file; this first use reads it.
USED = "; sum(float(weight.detach().sum()) for weight in model.parameters())"
# timm imports torchvision, but does not need it to load weights.
TIMM = "sys.path.append(str(tests)); from torch_peers import import_timm; timm = import_timm()"
PEERS: dict[str, tuple[str, str]] = {
    "timm: load timm": (TIMM, "model = timm.create_model(f'local-dir:{folder / \"timm\"}', pretrained=True)" + USED),
    "timm: load google": (
        TIMM,
        "model = timm.create_model('vit_base_patch16_224'); model.load_pretrained(folder / 'google.npz')" + USED,
    ),
    "transformers: load huggingface": (
        "from transformers import ViTForImageClassification",
        "model = ViTForImageClassification.from_pretrained(folder / 'huggingface')" + USED,
    ),
}


def prepare(folder: Path) -> None:
    """Write a ViT-B/16 with random weights in every format."""
    import warnings

    import numpy as np

    import keras_vit

    model = keras_vit.VisionTransformer(keras_vit.ViTConfig())
    rng = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(variable + rng.normal(0, 0.02, variable.shape).astype(np.float32))
    for format, name in SOURCES.items():
        with warnings.catch_warnings(action="ignore"):  # the formats have different GELUs and epsilons
            keras_vit.converters.save(model, folder / name, format=format)


def measure(name: str, folder: Path) -> None:
    """Do the work of one row once, in this process alone, and print the figures as JSON."""
    setup, work = {**CONTENDERS, **PEERS}[name]
    scope = {"folder": folder, "tests": SCRIPT.parents[1] / "tests", "sys": sys}
    exec(setup, scope)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(dir=folder.parent) as out:
        scope["out"] = Path(out)
        start = time.perf_counter()
        exec(work, scope)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak": peak * 1024, "added": (peak - before) * 1024}))


def child(python: str, step: str, *arguments: object) -> str:
    """Run a step in a new process and return its output."""
    given = {"PYTHONPATH": str(SCRIPT.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3", "HF_HUB_OFFLINE": "1"}
    command = [python, "-W", "ignore", str(SCRIPT), "--child", step, *map(str, arguments)]
    run = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"no success with {step} {arguments}\n{run.stderr}")
    return run.stdout


def versions(python: str) -> str:
    """Return the measured packages with their versions."""
    code = (
        "import importlib.metadata as m\n"
        "for name in ('tensorflow', 'keras', 'numpy', 'torch', 'timm', 'transformers'):\n"
        "    try: print(name, m.version(name))\n"
        "    except m.PackageNotFoundError: pass"
    )
    return ", ".join(subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.splitlines())


def report(results: dict[str, list[dict[str, float]]], size: int, rounds: int, pythons: list[str]) -> None:
    """Print the medians, the machine and the versions."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(f"ViT-B/16 at 224, 1000 classes, float32, {size / 1e6:.0f} MB: medians of {rounds} fresh processes each")
    print(
        f"{datetime.date.today()}, {cpu[1] if cpu else platform.machine()}, {os.cpu_count()} CPUs, shared with others"
    )
    for python in pythons:
        print(f"Python {platform.python_version()}, {versions(python)}")
    print(f"\n{'':40}{'s':>7}{'min':>7}{'max':>7}{'peak MB':>9}{'added MB':>10}{'of file':>9}")
    for name, rows in results.items():
        times = [row["seconds"] for row in rows]
        peak, added = (statistics.median(row[key] for row in rows) for key in ("peak", "added"))
        figures = (
            f"{statistics.median(times):7.2f}{min(times):7.2f}{max(times):7.2f}{peak / 1e6:9.0f}{added / 1e6:10.0f}"
        )
        print(f"{name:40}{figures}{added / size:8.2f}x")


def main() -> None:
    """Read the command line; run the comparison, or one step as its child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="the interpreter that has torch, timm and transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        step, *arguments = options.child
        return prepare(Path(arguments[0])) if step == "prepare" else measure(arguments[0], Path(arguments[1]))
    python = {
        **dict.fromkeys(CONTENDERS, sys.executable),
        **dict.fromkeys(PEERS if options.peers else (), options.peers),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in python}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "files"
        folder.mkdir()
        child(sys.executable, "prepare", folder)
        for turn in range(options.rounds + 1):  # the first one warms the page cache and is not counted
            for name in order.sample(list(python), len(python)):
                row = json.loads(child(python[name], "measure", name, folder).splitlines()[-1])
                print(f"round {turn}: {name} {row['seconds']:.2f} s", file=sys.stderr)
                results[name] += [row] if turn else []
        size = (folder / SOURCES["google"]).stat().st_size
    report(results, size, options.rounds, sorted(set(python.values())))
    return None


if __name__ == "__main__":
    main()
