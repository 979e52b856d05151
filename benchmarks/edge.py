"""Compare exported files with those of other packages: milliseconds, megabytes, error, and cost of the export.

    python benchmarks/edge.py                          ours, and TensorFlow's converter for the hybrids
    python benchmarks/edge.py --peers DIR --setup      and the other packages, each in its own environment under DIR

All files of a model have the same random weights. They are timed in one process, in a new random order in each round.
Each export is a new process, one at a time. Linux only (/proc).
"""

import argparse
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from edge_peers import (
    ENVIRONMENTS,
    MODES,
    ONNX,
    OPENVINO,
    OPENVINO_BF16,
    PEERS,
    SUFFIXES,
    THREADS,
    measured,
    memory,
    runner,
    versions,
)
from edge_report import CONVERTER, KERAS_PEERS, KINDS, LABELS, LARGE, OURS, PRODUCTS, report, verdicts

SCRIPT = Path(__file__).resolve()
# Name in the report: architecture, image size.
MODELS = {
    "Ti/16": ("Ti/16", 224),
    "S/16": ("S/16", 224),
    "B/16": ("B/16", 224),
    "B/16 at 384": ("B/16", 384),
    "R26+S/32": ("R26+S/32", 224),
    "R50+B/16": ("R50+B/16", 224),
    "B/16, gains": ("B/16", 224),
    "B/16, gains and channels": ("B/16", 224),
}
# Outliers of tests/support/outlier_models.py: our dynamic files scale them away with operators that others lack.
OUTLIERS = {"B/16, gains": {"gain": 8}, "B/16, gains and channels": {"gain": 6, "channel": 120}}
IMAGES = 8  # to compare files with Keras
TIMEOUT = 1800  # seconds for a child process
# Memory that TensorFlow's converter needs, as a multiple of the weights; seconds to wait until it is free.
CONVERTER_MEMORY, PATIENCE = 12, 3600


def config(name: str) -> Any:
    """Return the architecture with timm's GELU and epsilons, which the other Keras packages have too."""
    import dataclasses

    from keras_vit import ViTConfig

    architecture, size = MODELS.get(name, (name, 224))
    made = ViTConfig.from_name(architecture, image_size=size, activation="gelu_erf")
    if made.resnet is None:
        return made
    epsilons: dict[str, Any] = {"norm_epsilon": 1e-5, "conv_epsilon": 1e-8, "conv_epsilon_place": "variance"}
    return made.replace(resnet=dataclasses.replace(made.resnet, **epsilons))


def seeded(name: str) -> Any:
    """Return a model in which no weight has its initial value."""
    import keras

    import keras_vit

    keras.utils.set_random_seed(0)
    model, rng = keras_vit.VisionTransformer(config(name)), np.random.default_rng(0)
    if name in OUTLIERS:
        sys.path.append(str(SCRIPT.parents[1] / "tests" / "support"))
        from outlier_models import plant

        return plant(model, seed=1, **OUTLIERS[name])
    for variable in model.weights:
        variable.assign(variable + 0.02 * rng.standard_normal(variable.shape, np.float32))
    return model


def prepare(name: str, folder: Path) -> None:
    """Write a seeded model in all formats that the packages read, and Keras' float64 logits of some images."""
    import warnings

    import keras_vit
    from keras_vit.export import samples
    from keras_vit.train.planner import plan

    model = seeded(name)
    hybrid = model.config.resnet is not None
    for format, file in {"timm": "timm", "google": "google.npz", "huggingface": "huggingface"}.items():
        if not (hybrid and format == "huggingface"):
            with warnings.catch_warnings(action="ignore"):  # the official files have the tanh GELU
                keras_vit.converters.save(model, folder / file, format=format)
    images = samples.images(model.config, IMAGES)
    wide = keras_vit.VisionTransformer(model.config, dtype="float64")
    for variable, weight in zip(wide.weights, model.weights, strict=True):
        variable.assign(weight)
    expected, single = (np.concatenate([m.predict_on_batch(image[None]) for image in images]) for m in (wide, model))
    np.save(folder / "images.npy", images)
    np.save(folder / "calibration.npy", samples.images(model.config, 5 * IMAGES)[IMAGES:])
    np.save(folder / "logits.npy", expected)
    error = float(np.abs(single - expected).max() / np.abs(expected).max())
    flops = plan(model.config, batch_size=1).forward_flops
    (folder / "model.json").write_text(json.dumps({"flops": flops, "hybrid": hybrid, "error": error}))


def export_ours(folder: Path, mode: str, target: Path) -> dict[str, Any]:
    """Write our file; return it and the cost of the export without verification."""
    from keras_vit import converters, export

    model = converters.load(folder / "timm")
    report, figures = measured(lambda: export.tflite(model, target, quantize=mode))
    alone = {"seconds": report.seconds, "added": report.peak_bytes}
    return {**figures, **alone, "versions": versions("keras", "numpy", "tensorflow")}


def export_converter(folder: Path, mode: str, target: Path) -> dict[str, Any]:
    """Convert the same model with Keras' own GroupNormalization by TensorFlow's converter."""
    import keras
    from edge_peers import to_tflite

    from keras_vit import converters
    from keras_vit.model.layers import resnet

    def group_norm(epsilon: float, *, groups: int, **options: Any) -> keras.layers.Layer:
        return keras.layers.GroupNormalization(groups, epsilon=epsilon, **options)

    resnet.GroupNormalization = group_norm  # type: ignore
    model = converters.load(folder / "timm")
    _, figures = measured(functools.partial(to_tflite, model, mode, target))
    return {**figures, "versions": versions("keras", "numpy", "tensorflow")}


def export_large(name: str, folder: Path) -> dict[str, Any]:
    """Export a large model in dynamic int8 and print the peak memory of the process."""
    from keras_vit import export

    target = folder / "large.tflite"
    report = export.tflite(seeded(name), target, quantize="dynamic")
    target.unlink()
    figures = {"bytes": report.bytes, "cosine": report.cosine, "ms": report.milliseconds, "seconds": report.seconds}
    return {**figures, "peak": memory("VmHWM")}


def sgemm() -> dict[str, float]:
    """Measure GFLOP/s of TensorFlow's float32 matrix products, by shape."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    found = {}
    for name, (rows, inner, columns) in PRODUCTS.items():
        a, b = tf.random.normal((rows, inner)), tf.random.normal((inner, columns))
        times = []
        for _ in range(50):
            start = time.perf_counter()
            tf.matmul(a, b)
            times.append(time.perf_counter() - start)
        found[name] = 2 * rows * inner * columns / statistics.median(times) / 1e9
    return found


def digits(folder: Path) -> dict[str, float]:
    """Measure the accuracy of the embedded model and of its int8 file on the held-out digits, and their agreement."""
    from keras_vit import digits as data
    from keras_vit import export, zoo

    model, held_out = zoo.load("digits"), data.load()
    export.tflite(model, folder / "digits.tflite", quantize="dynamic")
    images, run = np.asarray(model.preprocess(held_out.test_images)), runner(folder / "digits.tflite")
    ours = np.concatenate([run(image[None]) for image in images]).argmax(axis=1)
    keras = model.predict(images, verbose=0).argmax(axis=1)
    right = {
        name: float(np.mean(found == held_out.test_labels)) for name, found in {"keras": keras, "file": ours}.items()
    }
    return {**right, "agreement": float(np.mean(keras == ours))}


def child(python: str | Path, script: Path, *arguments: object) -> Any:
    """Run a step in a new process; return the JSON of its last line, or the reason for a failure as text."""
    given = {"PYTHONPATH": str(SCRIPT.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    given |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-W", "ignore", str(script), *map(str, arguments)]
    try:
        ended = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"not done after {TIMEOUT} s"
    if ended.returncode:
        return (ended.stderr.strip().splitlines() or [f"ended with {ended.returncode}"])[-1]
    return json.loads((ended.stdout.splitlines() or ["null"])[-1])


def set_up(peers: Path) -> None:
    """Create an environment for every other package."""
    for name, requirements in ENVIRONMENTS.items():
        subprocess.run([sys.executable, "-m", "venv", peers / name], check=True)
        subprocess.run([peers / name / "bin" / "pip", "install", "--quiet", *requirements], check=True)


def python_of(name: str, peers: Path) -> Path:
    """Return the interpreter of a package's environment; other runtimes share one."""
    return peers.absolute() / (ONNX if name in SUFFIXES else name) / "bin" / "python"


def short_of_memory(folder: Path) -> str:
    """Wait until there is enough memory for TensorFlow's converter; after a timeout, return what is missing."""
    needed = CONVERTER_MEMORY * (folder / "timm" / "model.safetensors").stat().st_size + 2e9
    for _ in range(PATIENCE // 10):
        available = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
        free = int(available[1]) * 1024 if available else 0
        if free >= needed:
            return ""
        time.sleep(10)
    return f"the conversion takes {needed / 1e9:.0f} GB of memory; {free / 1e9:.0f} GB were free"


def export(contender: str, mode: str, folder: Path, peers: Path | None) -> dict[str, Any] | str:
    """Return a package's file and the cost of its export, or the reason for a failure. Others' files are made once."""
    if contender == OPENVINO_BF16:
        exported = export(OPENVINO, mode, folder, peers)
        for path in folder.glob(f"{OPENVINO}-{mode}.*"):
            shutil.copy(path, path.with_name(path.name.replace(OPENVINO, contender)))
        return exported
    target = folder / f"{contender}-{mode}{SUFFIXES.get(contender, '.tflite')}"
    noted = target.with_suffix(".json")
    if contender != OURS and target.exists() and noted.exists():
        figures: dict[str, Any] = json.loads(noted.read_text())
        return figures
    shortage = short_of_memory(folder) if contender in (*KERAS_PEERS, CONVERTER) else ""
    if contender in PEERS and peers:
        python, script = python_of(contender, peers), SCRIPT.with_name("edge_peers.py")
        received = shortage or child(python, script, contender, mode, folder, target)
    else:
        received = shortage or child(sys.executable, SCRIPT, "--child", contender, mode, folder, target)
    if isinstance(received, str):
        target.unlink(missing_ok=True)
        return received
    noted.write_text(json.dumps(received))
    return dict(received)


def measure(name: str, folder: Path, peers: Path | None, rounds: int) -> dict[str, Any]:
    """Measure one model: its files, the cost of their exports, their times, and the failures."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.json").exists():
        required(child(sys.executable, SCRIPT, "--child", "prepare", name, folder))
    model = json.loads((folder / "model.json").read_text())
    contenders = [OURS, *([CONVERTER] if model["hybrid"] else KERAS_PEERS if peers else [])]
    contenders += SUFFIXES if peers else []
    exports, left_out = {}, {}
    for contender in contenders:
        for mode in MODES:
            figures = export(contender, mode, folder, peers)
            print(f"{name}: {contender}, {KINDS[mode]}: {figures}", file=sys.stderr)
            if isinstance(figures, str):
                left_out[f"{LABELS.get(contender, contender)}, {KINDS[mode]}"] = figures
            else:
                exports[contender, mode] = figures
    python = python_of(ONNX, peers) if peers else sys.executable
    timing = required(child(python, SCRIPT.with_name("edge_peers.py"), "time", folder, rounds))
    rows = {tuple(file.rpartition(".")[0].rsplit("-", 1)): row for file, row in timing.pop("files").items()}
    rows = {key: rows[key] | exports[key] for key in exports}
    return {**timing, **model, "rows": rows, "left_out": left_out}


def required(received: Any) -> Any:
    """Return the result of a child process, or exit with its error."""
    return sys.exit(received) if isinstance(received, str) else received


# Steps that child processes of this script run, by their name on the command line.
CHILDREN: dict[str, Callable[..., Any]] = {
    "prepare": lambda name, folder: prepare(name, Path(folder)),
    OURS: lambda mode, folder, target: export_ours(Path(folder), mode, Path(target)),
    CONVERTER: lambda mode, folder, target: export_converter(Path(folder), mode, Path(target)),
    "large": lambda name, folder: export_large(name, Path(folder)),
    "digits": lambda folder: digits(Path(folder)),
    "sgemm": sgemm,
}


def run(options: argparse.Namespace, work: Path) -> None:
    """Measure the chosen models and print the report."""
    this = functools.partial(child, sys.executable, SCRIPT, "--child")
    peak = [required(this("sgemm"))]
    results = {
        name: measure(name, work / re.sub(r"\W+", "-", name), options.peers, options.rounds) for name in options.models
    }
    peak.append(required(this("sgemm")))
    large = {name: this("large", name, work) for name in (LARGE if options.large else ())}
    report(results, {shape: max(run[shape] for run in peak) for shape in PRODUCTS}, options.rounds)
    verdicts(results, this("digits", work), large)


def main() -> None:
    """Read the command line; run the comparison, or one step as its child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where the environments of the peers are")
    parser.add_argument("--setup", action="store_true", help="create them first")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the files there; a peer's file is made once")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--large", action="store_true", help="export L/16 and H/14 too")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        step, *arguments = options.child
        print(json.dumps(CHILDREN[step](*arguments)))
        return
    if options.setup and not options.peers:
        parser.error("--setup needs --peers DIR")
    if options.setup:
        set_up(options.peers)
    with tempfile.TemporaryDirectory() as temporary:
        run(options, (options.work or Path(temporary)).absolute())


if __name__ == "__main__":
    main()
