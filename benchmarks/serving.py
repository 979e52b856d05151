"""Measure SavedModels of ViT-B/16 (ours, Keras' export of ours, other packages'): size, cold start, time of a call.

    python benchmarks/serving.py [--model B/16] [--rounds 7] [--peer keras_hub=FOLDER ...]

A peer's folder is a SavedModel that takes float32 (batch, 224, 224, 3); benchmarks/README.md says how to make one. Each
cold start is a new process. The calls alternate in one process, in a new random order in each round.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
SCRIPT = Path(__file__).resolve()
sys.path.insert(0, str(SCRIPT.parents[1]))  # this checkout

THREADS = 2
OURS, KERAS, FUNCTION = "keras_vit", "Keras' export", "tf.function, no file"
FLOAT, HALF = f"{OURS}: float_images", f"{OURS}: float_images_bfloat16"
BATCHES = (1, 8)
PHOTO = (480, 640)  # of the JPEG files


def write(folder: Path, name: str) -> dict[str, Path]:
    """Export a model with random weights in both ways; return the folders."""
    import keras

    from keras_vit import VisionTransformer, ViTConfig, export

    keras.utils.set_random_seed(0)
    model = VisionTransformer(ViTConfig.from_name(name))
    rng = np.random.default_rng(0)
    model.get_layer("head").kernel.assign(rng.normal(0, 0.02, model.get_layer("head").kernel.shape))
    folders = {OURS: folder / "ours" / "1", KERAS: folder / "keras" / "1"}
    print(export.saved_model(model, folders[OURS], bfloat16=True), file=sys.stderr)
    model.export(str(folders[KERAS]), verbose=False)
    model.save(folder / "model.keras")
    return folders


def inputs(size: int, batch: int) -> dict[str, Any]:
    """Return the inputs of the signatures, by name of the argument and dtype."""
    import tensorflow as tf

    rng = np.random.default_rng(1)
    coarse = rng.uniform(0, 255, (batch, 12, 16, 3))
    photos = tf.cast(tf.image.resize(coarse, PHOTO, method="bicubic"), tf.uint8)
    return {
        "string": tf.constant([tf.io.encode_jpeg(photo, quality=90).numpy() for photo in photos]),
        "uint8": photos,
        "float32": tf.constant(rng.uniform(-1, 1, (batch, size, size, 3)).astype(np.float32)),
    }


def signatures(folder: Path) -> dict[str, Callable[[Any], Any]]:
    """Return a SavedModel's signatures as functions of their one input, with the input's dtype after the name."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(folder))
    made = {}
    for name, function in loaded.signatures.items():
        [(argument, spec)] = function.structured_input_signature[1].items()
        made[name, spec.dtype.name] = lambda value, f=function, a=argument, keep=loaded: f(**{a: value})
    return made


def threads() -> None:
    """Limit TensorFlow to THREADS threads."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)


def cold(folder: Path, size: int) -> None:
    """Load a SavedModel in this process, call its float signature once, and print both times."""
    threads()
    value = inputs(size, 1)["float32"]
    start = time.perf_counter()
    made = signatures(folder)
    loaded = time.perf_counter()
    call = next(f for (name, dtype), f in made.items() if dtype == "float32" and "bfloat16" not in name)
    next(iter(call(value).values())).numpy()
    print(json.dumps({"load": loaded - start, "first": time.perf_counter() - loaded}))


def cold_starts(folders: dict[str, Path], size: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of loading and of the first call, in new processes that alternate."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(rounds):
        for name, folder in folders.items():
            command = [sys.executable, str(SCRIPT), "--cold", str(folder), "--size", str(size)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows[name].append(json.loads(done.stdout.splitlines()[-1]))
    middle = lambda name, key: statistics.median(row[key] for row in rows[name])  # noqa: E731
    return {name: (middle(name, "load"), middle(name, "first")) for name in folders}


def calls(folders: dict[str, Path], work: Path) -> dict[str, tuple[Callable[[Any], Any], str]]:
    """Return for each row a function of one input, and the input's dtype."""
    import tensorflow as tf

    from keras_vit import converters

    model = converters.load(work / "model.keras")
    made: dict[str, tuple[Callable[[Any], Any], str]] = {
        FUNCTION: (tf.function(lambda images: {"logits": model(images, training=False)}), "float32")
    }
    for place, folder in folders.items():
        for (name, dtype), function in signatures(folder).items():
            if place == OURS or dtype == "float32":
                made[f"{place}: {name}"] = (function, dtype)
    return made


def measure(made: dict[str, tuple[Callable[[Any], Any], str]], size: int, batch: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a call."""
    given = inputs(size, batch)
    times: dict[str, list[float]] = {name: [] for name in made}
    order = random.Random(0)
    for turn in range(rounds + 1):  # the first is not counted
        for name in order.sample(list(made), len(made)):
            function, dtype = made[name]
            start = time.perf_counter()
            for value in function(given[dtype]).values():
                value.numpy()
            if turn:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(row) for name, row in times.items()}


def report(name: str, folders: dict[str, Path], starts: Any, times: dict[int, dict[str, float]], rounds: int) -> None:
    """Print the machine and the versions, the tables and the targets."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("tensorflow", "keras", "numpy"))
    print(f"SavedModels of {name}, random weights, {THREADS} threads: medians of {rounds} turns")
    print(
        f"{datetime.date.today()}, {cpu[1] if cpu else platform.machine()}, {os.cpu_count()} CPUs, shared with others:"
    )
    print(f"a load of {os.getloadavg()[2]:.1f} over fifteen minutes, this included")
    print(f"Python {platform.python_version()}, {versions}\n")
    print(f"{'':38}{'MB on disk':>12}{'load s':>10}{'first call s':>14}")
    for place, folder in folders.items():
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        print(f"{place:38}{size:12.1f}{starts[place][0]:10.2f}{starts[place][1]:14.2f}")
    print(f"\n{'milliseconds of a call':38}" + "".join(f"{f'batch {b}':>10}{'of ours':>9}" for b in times))
    for contender in next(iter(times.values())):
        row = (f"{t[contender]:10.1f}{t[contender] / t[FLOAT]:8.2f}x" for t in times.values())
        print(f"{contender:38}" + "".join(row))
    others = [c for c in times[1] if not c.startswith(OURS)]
    print("\nof ours: in the time of float_images. image files are JPEGs of 640x480, uint8_images their pixels")
    for batch, t in times.items():
        best = min(others, key=t.__getitem__)
        print(f"batch {batch}: float_images is {t[best] / t[FLOAT]:.2f}x as fast as the fastest other, {best}")
    print(f"bfloat16 at batch 8: {times[8][FLOAT] / times[8][HALF]:.2f}x as fast (target: 1.3x)")


def main() -> None:
    """Read the command line, export, measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--cold", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=224, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cold:
        return cold(options.cold, options.size)
    peers = {name: Path(folder) for name, _, folder in (peer.partition("=") for peer in options.peer)}
    threads()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        folders = {**write(work, options.model), **peers}
        starts = cold_starts(folders, options.size, 3)
        made = calls(folders, work)
        times = {batch: measure(made, options.size, batch, options.rounds) for batch in BATCHES}
        report(options.model, folders, starts, times, options.rounds)
    return None


if __name__ == "__main__":
    main()
