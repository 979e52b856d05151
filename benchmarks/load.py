"""Measure time and memory of building ViT-B/16 at 224 px and loading its weights, with all Keras packages.

    python benchmarks/load.py                         keras_vit and numpy.load, in this environment
    python benchmarks/load.py --peers DIR --setup     all of load.toml, each package in its own environment

Each measurement is a new process. The packages alternate, in a new random order in each round.
"""

import argparse
import datetime
import importlib.metadata
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
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

SCRIPT = Path(__file__).resolve()
TABLE = tomllib.loads(SCRIPT.with_suffix(".toml").read_text())
FRAMEWORK: list[str] = TABLE.pop("framework")
HUGGING_FACE = TABLE.pop("hugging_face")
FLOOR, OURS = "floor", "keras_vit"
# Relative to the largest logit. A tensor that was not read changes it by 6e-4 or more, except the keys' biases, which
# softmax cancels.
TOLERANCE = 1e-4
FASTER, LARGER = 1.5, 2.2  # targets: time against the fastest other package, memory against the file's size


def perturbed(model: Any) -> Any:
    """Return the model with seeded noise added to every weight, so that none has its initial value."""
    rng = np.random.default_rng(0)
    for variable in model.weights:
        if "seed_generator" not in variable.path:
            variable.assign(variable + rng.normal(0, 0.02, variable.shape).astype(np.float32))
    return model


def logits(model: Any) -> np.ndarray:
    """Return a model's logits of one seeded image, (1, 1000)."""
    image = np.random.default_rng(1).uniform(-1, 1, (1, 224, 224, 3)).astype(np.float32)
    return np.asarray(model(image, training=False))


def write_hugging_face(npz: Path, folder: Path) -> None:
    """Write an official ViT-B/16 as the two files of a Hugging Face repository of ViTForImageClassification."""
    from safetensors.numpy import save_file

    names = {key.format(i=i): name.format(i=i) for key, name in HUGGING_FACE["names"].items() for i in range(12)}
    with np.load(npz) as file:
        tensors = {
            "vit.embeddings.cls_token": file["cls"],
            "vit.embeddings.position_embeddings": file["Transformer/posembed_input/pos_embedding"],
        }
        for official, name in names.items():
            tensors[f"{name}.bias"] = file[f"{official}/bias"].ravel()
            weight = file[f"{official}/{'scale' if 'norm' in official.lower() else 'kernel'}"]
            if weight.ndim == 4:  # the patch kernel: (height, width, in, out)
                weight = weight.transpose(3, 2, 0, 1)
            elif weight.ndim > 1:  # (in, out), one of them possibly split into heads
                weight = weight.reshape(-1, 768) if official.endswith("out") else weight.reshape(len(weight), -1)
                weight = weight.T
            tensors[f"{name}.weight"] = np.ascontiguousarray(weight)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = HUGGING_FACE["config"] | {"id2label": {str(i): str(i) for i in range(1000)}}
    (folder / "config.json").write_text(json.dumps(config))


def prepare(name: str, folder: Path) -> None:
    """Write a package's file, and the logits of the model that it was written from."""
    scope = globals() | {"folder": folder}
    exec(TABLE[name]["setup"], scope)
    exec(TABLE[name]["prepare"], scope)
    np.save(folder / f"{name}.npy", logits(scope["model"]))


def measure(name: str, folder: Path) -> None:
    """Measure a package once, in this process alone, and print the result as JSON."""
    contender, scope = TABLE[name], {"folder": folder}
    load = compile(contender["load"], name, "exec")
    exec(contender["setup"], scope)
    imported = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    start, worked = time.perf_counter(), time.process_time()
    exec(load, scope)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if name != FLOOR:
        expected = np.load(folder / f"{contender.get('expects', name)}.npy")
        error = float(np.abs(logits(scope["model"]) - expected).max() / np.abs(expected).max())
        if not error < TOLERANCE:
            sys.exit(f"{name} has not loaded its weights: its logits are off by {error:.1e} of the largest")
    packages = {"tensorflow", "keras", "numpy"} | ({contender["package"]} - {"keras-vit"})
    versions = {package: importlib.metadata.version(package) for package in packages}
    print(json.dumps({"seconds": seconds, "cpu": worked, "imported": imported, "peak": peak, "versions": versions}))


def set_up(peers: Path) -> None:
    """Create an environment for every package."""
    for package in {contender["package"] for contender in TABLE.values()}:
        rows = [contender for contender in TABLE.values() if contender["package"] == package]
        requires = [requirement for row in rows for requirement in row.get("requires", [])]
        subprocess.run([sys.executable, "-m", "venv", peers / package], check=True)
        subprocess.run([peers / package / "bin" / "pip", "install", "--quiet", *FRAMEWORK, *requires], check=True)


def child(step: str, name: str, folder: Path, peers: Path | None) -> str:
    """Run one step in the environment of a package and return its output."""
    python = peers.absolute() / TABLE[name]["package"] / "bin" / "python" if peers else sys.executable
    given = {"PYTHONPATH": str(SCRIPT.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    command = [python, SCRIPT, "--child", step, name, folder]
    ended = subprocess.run(command, env=os.environ | given, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{step} {name} failed:\n{ended.stderr}")
    return ended.stdout


def compare(names: list[str], folder: Path, peers: Path | None, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Measure every package once per round. The first round warms the page cache and is not counted."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    order = random.Random(0)
    for turn in range(rounds + 1):
        for name in order.sample(names, len(names)):
            result = json.loads(child("measure", name, folder, peers).splitlines()[-1])
            print(f"round {turn}: {name} {result['seconds']:.2f} s", file=sys.stderr)
            results[name] += [result] if turn else []
    return results


def report(results: dict[str, list[dict[str, Any]]], size: int, rounds: int) -> None:
    """Print the measurements, the machine and the versions, and whether the targets are met."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = sorted({f"{package} {v}" for rows in results.values() for package, v in rows[0]["versions"].items()})
    absent = [row["row"] for name, row in TABLE.items() if "load" in row and name not in results]
    print(f"ViT-B/16 at 224, 1000 classes, float32, a file of {size / 1e6:.0f} MB: built and loaded, {rounds} rounds")
    print(f"{datetime.date.today()}, {cpu[1] if cpu else 'CPU unknown'}, {os.cpu_count()} CPUs, ", end="")
    priority = "real-time" if os.sched_getscheduler(0) else "ordinary"
    print(f"load average {os.getloadavg()[2]:.1f}, {priority} scheduling")
    print(f"Python {platform.python_version()}, {', '.join(versions)}")
    print(f"not run: {'; '.join(absent) or 'nothing'}")
    print(f"\n{'':38}{'median s':>9}{'min':>6}{'max':>6}{'CPU s':>7}{'imports MB':>12}{'peak MB':>9}{'increase':>10}")
    median = {
        name: {key: statistics.median(row[key] for row in rows) for key in ("seconds", "cpu", "imported", "peak")}
        for name, rows in results.items()
    }
    for name in sorted(results, key=lambda name: median[name]["seconds"]):
        now, times = median[name], [row["seconds"] for row in results[name]]
        print(
            f"{TABLE[name]['row']:38}{now['seconds']:9.2f}{min(times):6.2f}{max(times):6.2f}"
            f"{now['cpu']:7.2f}{now['imported'] / 1e6:12.0f}{now['peak'] / 1e6:9.0f}"
            f"{(now['peak'] - now['imported']) / size:9.2f}x"
        )
    ours = median[OURS]
    print(f"\nmemory over imports: {(ours['peak'] - ours['imported']) / size:.2f}x the file (target: at most {LARGER})")
    if peers := [row["seconds"] for name, row in median.items() if name not in (FLOOR, OURS)]:
        print(f"faster than the fastest peer: {min(peers) / ours['seconds']:.2f}x (target: at least {FASTER})")


def run(peers: Path | None, rounds: int) -> None:
    """Prepare the files, measure and print the report; without `peers` only the rows of this environment."""
    names = [name for name in TABLE if peers or TABLE[name]["package"] == TABLE[OURS]["package"]]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name in names:
            if "prepare" in TABLE[name]:
                child("prepare", name, folder, peers)
        results = compare([name for name in names if "load" in TABLE[name]], folder, peers, rounds)
        report(results, (folder / "ViT-B_16.npz").stat().st_size, rounds)


def main() -> None:
    """Read the command line; run the comparison, or one step of one package as its child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where the environments of the packages are")
    parser.add_argument("--setup", action="store_true", help="create them first")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        step, name, folder = options.child
        (prepare if step == "prepare" else measure)(name, Path(folder))
        return
    if options.setup and not options.peers:
        parser.error("--setup needs --peers DIR")
    if options.setup:
        set_up(options.peers)
    run(options.peers, options.rounds)


if __name__ == "__main__":
    main()
