"""Measure SavedModels of ViT-B/16, ours and those of others: size, memory, cold start, time of a call.

    python benchmarks/serving.py [--model B/16] [--rounds 7] [--peer keras_hub=FOLDER ...]

If `openvino` is installed, it runs our .tflite file beside them. A peer's folder is a SavedModel that takes float32
(batch, 224, 224, 3); benchmarks/README.md says how to make one. Each cold start is a new process. The calls alternate
in one process, in a new random order in each round.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
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
OURS16 = "keras_vit, dtype=bfloat16"
FLOAT, HALF = f"{OURS}: float_images", f"{OURS16}: float_images"
TARGETS_AMX = {(FLOAT, 1): 150, (HALF, 1): 85, (HALF, 8): 480}  # milliseconds
TARGET_RATIO = 1.6  # of float32's time to bfloat16's, on processors without AMX
OPENVINO = {"float32": "f32", "bfloat16": "bf16"}
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
    folders = {OURS: folder / "ours" / "1", OURS16: folder / "ours16" / "1", KERAS: folder / "keras" / "1"}
    print(export.saved_model(model, folders[OURS]), file=sys.stderr)
    print(export.saved_model(model, folders[OURS16], dtype="bfloat16"), file=sys.stderr)
    if importlib.util.find_spec("openvino"):
        export.tflite(model, folder / "model.tflite", quantize="none", batch=None)
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
    before = resident_megabytes()
    start = time.perf_counter()
    made = signatures(folder)
    loaded = time.perf_counter()
    call = next(f for (_, dtype), f in made.items() if dtype == "float32")
    next(iter(call(value).values())).numpy()
    first = time.perf_counter() - loaded
    print(json.dumps({"load": loaded - start, "first": first, "memory": resident_megabytes() - before}))


def resident_megabytes() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 1000


def cold_starts(folders: dict[str, Path], size: int, rounds: int) -> dict[str, tuple[float, ...]]:
    """Return the median seconds of loading and of the first call, and the memory, in new processes that alternate."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(rounds):
        for name, folder in folders.items():
            command = [sys.executable, str(SCRIPT), "--cold", str(folder), "--size", str(size)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows[name].append(json.loads(done.stdout.splitlines()[-1]))
    middle = lambda name, key: statistics.median(row[key] for row in rows[name])  # noqa: E731
    return {name: tuple(middle(name, key) for key in ("load", "first", "memory")) for name in folders}


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
            if place in (OURS, OURS16) or dtype == "float32":
                made[f"{place}: {name}"] = (function, dtype)
    return made | openvino_calls(work / "model.tflite")


def openvino_calls(file: Path) -> dict[str, tuple[Callable[[Any], Any], str]]:
    """Return OpenVINO's rows for our .tflite file; none if it is not installed."""
    if not file.exists():
        return {}
    import openvino
    import tensorflow as tf

    model, made = openvino.convert_model(file), {}
    for precision, hint in OPENVINO.items():
        settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": THREADS}
        run = openvino.Core().compile_model(model, "CPU", settings)
        made[f"OpenVINO, our .tflite: {precision}"] = (
            lambda images, run=run: {"logits": tf.constant(run(images.numpy())[0])},
            "float32",
        )
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


def profile(folder: Path, size: int) -> tuple[float, dict[str, tuple[int, float]]]:
    """Return the processor's milliseconds for one image on one thread, and each kind of operator's count and share."""
    import tensorflow as tf

    v1, image = tf.compat.v1, inputs(size, 1)["float32"].numpy()
    settings = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with v1.Session(graph=tf.Graph(), config=settings) as session:
        signature = v1.saved_model.loader.load(session, ["serve"], str(folder)).signature_def["float_images"]
        feed = {signature.inputs["images"].name: image}
        fetch, options = signature.outputs["logits"].name, v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        times, traces = [], []
        for turn in range(8):
            traced = v1.RunMetadata()
            start = time.process_time()
            session.run(fetch, feed, **({"options": options, "run_metadata": traced} if turn > 3 else {}))
            times.append(1000 * (time.process_time() - start))
            kinds: dict[str, tuple[int, float]] = {}
            for step in (step for device in traced.step_stats.dev_stats for step in device.node_stats):
                kind = re.search(r"= (\w+)\(", step.timeline_label)
                count, spent = kinds.get(kind[1] if kind else step.node_name, (0, 0.0))
                taken = (step.op_end_rel_micros - step.op_start_rel_micros) / 1000
                kinds[kind[1] if kind else step.node_name] = count + 1, spent + taken
            traces.append(kinds)
    best = min(traces[4:], key=lambda kinds: sum(spent for _, spent in kinds.values()))
    return min(times[1:4]), best


def print_profile(place: str, folder: Path, size: int) -> None:
    """Print the largest rows of a profile."""
    total, kinds = profile(folder, size)
    print(f"\n{place}: float_images, one image, one thread: {total:.1f} ms of processor time, of which")
    for kind, (count, spent) in sorted(kinds.items(), key=lambda row: -row[1][1])[:10]:
        print(f"  {kind:30}{count:6}{spent:10.1f}")


def machine() -> str:
    """Return the processor's name, whether it has AMX and AVX512_BF16, and the load."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    has = ", ".join(f"{'with' if flag in text else 'without'} {flag}" for flag in ("amx_bf16", "avx512_bf16"))
    load = f"a load of {os.getloadavg()[2]:.1f} over fifteen minutes, this included"
    return f"{datetime.date.today()}, {name[1] if name else platform.machine()}, {os.cpu_count()} CPUs, {has};\n{load}"


def report(name: str, folders: dict[str, Path], starts: Any, times: dict[int, dict[str, float]], rounds: int) -> None:
    """Print the machine and the versions, the tables and the targets."""
    packages = [
        package for package in ("tensorflow", "keras", "numpy", "openvino") if importlib.util.find_spec(package)
    ]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    print(f"SavedModels of {name}, random weights, {THREADS} threads: medians of {rounds} turns\n{machine()}")
    print(f"Python {platform.python_version()}, {versions}\n")
    print(f"{'':42}{'MB on disk':>12}{'MB of memory':>14}{'load s':>10}{'first call s':>14}")
    for place, folder in folders.items():
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        load, first, memory = starts[place]
        print(f"{place:42}{size:12.1f}{memory:14.0f}{load:10.2f}{first:14.2f}")
    print(f"\n{'milliseconds of a call':42}" + "".join(f"{f'batch {b}':>10}{'of ours':>9}" for b in times))
    for contender in next(iter(times.values())):
        row = (f"{t[contender]:10.1f}{t[contender] / t[FLOAT]:8.2f}x" for t in times.values())
        print(f"{contender:42}" + "".join(row))
    print("\nof ours: in the time of float_images. image files are JPEGs of 640x480, uint8_images their pixels")
    print("MB of memory: after loading and one call of float_images, above that before loading\n")
    targets(times)


def targets(times: dict[int, dict[str, float]]) -> None:
    """Print each figure beside its target."""
    others = [contender for contender in times[1] if not contender.startswith((OURS, "OpenVINO"))]
    for batch, t in times.items():
        best = min(others, key=t.__getitem__)
        print(f"batch {batch}: float_images is {t[best] / t[FLOAT]:.2f}x as fast as the fastest other, {best}")
    if "amx_bf16" in Path("/proc/cpuinfo").read_text():
        for (contender, batch), most in TARGETS_AMX.items():
            value = times[batch][contender]
            print(f"{contender}, batch {batch}: {value:.1f} ms (target {most}: {'met' if value <= most else 'missed'})")
    for batch, t in times.items():
        ratio = t[FLOAT] / t[HALF]
        print(f"bfloat16 at batch {batch}: {ratio:.2f}x as fast (target without AMX: {TARGET_RATIO}x)")


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
        for place in (OURS, OURS16):
            print_profile(place, folders[place], options.size)
    return None


if __name__ == "__main__":
    main()
