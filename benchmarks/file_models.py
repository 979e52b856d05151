"""Measure whole processes on a .tflite file beside the same on its model: predict, a server's worker, embed.

    python benchmarks/file_models.py > benchmarks/results/file_models.txt
    python benchmarks/file_models.py --models DINOv2-S/14 --weights FOLDER --photos FOLDER --peers PYTHON --only-embed

The ways of each row take turns, each in a new process. Seconds are those of the processor, user and system. Of vectors:
the cosine of differences to float32's (tests/support/outlier_models.py), and the share of float32's ten nearest photos
that are among the ten nearest. `--peers` is the Python of an environment with torch, timm, onnx, onnxscript,
onnxruntime, openvino, nncf and pytest (embed_peers.py); `--weights` is what `zoo.load` takes for the model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]  # this checkout

PIXELS = {  # as timm prepares them
    **{"resize": "crop", "interpolation": "bicubic", "antialias": True, "crop_fraction": 0.875, "round_pixels": True},
    **{"crop_rounding": "down", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
}
MODELS = {
    "digits": {},
    "DINOv2-S/14": {"image_size": 224, "num_classes": 1000, "preprocessing": PIXELS},
    "ViT-B/16": {"preprocessing": PIXELS},
}
TIMM = {"DINOv2-S/14": "vit_small_patch14_dinov2", "ViT-B/16": "vit_base_patch16_224"}
PEERS = ("openvino-int8", "openvino-bf16", "onnxruntime", "pytorch")
EXACT, NEAREST, COMPARED = "--dtype float32", 10, 200
# A worker loads what it serves, answers the content of one JPEG, prints a line, and sleeps.
WORKER = "import resource, sys; {load}; {answer}; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
WORKERS = {
    "file": {
        "load": "from keras_vit import export; model = export.load(sys.argv[1], threads=1)",
        "answer": "model.classify(open(sys.argv[2], 'rb').read())",
    },
    "SavedModel": {
        "load": "import tensorflow as tf; model = tf.saved_model.load(sys.argv[1])",
        "answer": "model.signatures['serving_default'](tf.constant([open(sys.argv[2], 'rb').read()]))",
    },
}


def measured(command: list[Any]) -> dict[str, float]:
    """Run a command: seconds of the processor, of the clock, and the largest memory in MB."""
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} failed")
    seconds = time.perf_counter() - start
    return {"CPU s": used.ru_utime + used.ru_stime, "s": seconds, "MB": used.ru_maxrss / 1024}


def compare(title: str, ways: dict[str, list[Any]], rounds: int, images: int = 1) -> None:
    """Run each way in turn, and print medians, and how many times the first way's they are."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    vectors: dict[str, Any] = {}
    for _ in range(rounds):
        for name, command in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                rows[name].append(measured([str(part).replace("FOLDER", folder) for part in command]))
                if images > NEAREST:
                    vectors[name] = read_vectors(Path(folder) / "vectors")
    print(f"\n{title}")
    middle = {
        name: {key: statistics.median(row[key] for row in found) for key in found[0]} for name, found in rows.items()
    }
    first = next(iter(middle.values()))
    for name, row in middle.items():
        ratios = f"{row['CPU s'] / first['CPU s']:6.1f} x {row['MB'] / first['MB']:6.1f} x"
        each = f"   {1000 * row['CPU s'] / images:5.0f} ms of processor an image" if images > 1 else ""
        if EXACT in vectors:
            each += f"   {quality(vectors[EXACT], vectors[name])}"
        print(f"  {name:28}{row['CPU s']:8.2f} CPU s {row['s']:8.2f} s {row['MB']:7.0f} MB {ratios}{each}", flush=True)


def read_vectors(folder: Path) -> Any:
    """Read the vectors of a run, of length 1: float32 (images, width)."""
    import numpy as np
    import pyarrow.parquet as pq

    if (folder / "vectors.npy").exists():
        vectors = np.load(folder / "vectors.npy")
    else:
        vectors = np.stack(pq.read_table(folder)["embeddings"].to_numpy())
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def quality(exact: Any, vectors: Any) -> str:
    """Compare vectors with those in float32: mean cosine of differences, and recall of the nearest."""
    import numpy as np

    from outlier_models import pair_cosines

    found = [np.argsort(-(each @ each.T - 4 * np.eye(len(each))))[:, :NEAREST] for each in (exact, vectors)]
    recall = np.mean([len({*want} & {*got}) / NEAREST for want, got in zip(*found, strict=True)])
    return f"cosine {pair_cosines(exact[:COMPARED], vectors[:COMPARED]).mean():.4f}, recall@{NEAREST} {recall:.3f}"


def write_models(folder: Path, name: str, fields: dict[str, Any], weights: str | None) -> dict[str, Path]:
    """Write a model, its files, its SavedModel, and the weights for the peers."""
    from keras_vit import converters, export, zoo

    model = zoo.load(name, weights=weights, **fields) if weights or name != "digits" else zoo.load(name)
    paths = {kind: folder / f"{kind}{suffix}" for kind, suffix in SUFFIXES.items()}
    model.save(paths["model"])
    lenient: Any = {"least_cosine": -1.0, "least_agreement": 0.0}
    export.tflite(model, paths["file"], **lenient)
    features = model.with_config(model.config.replace(num_classes=0))
    export.tflite(features, paths["features"], **lenient)
    export.saved_model(model, paths["SavedModel"], warmup=())
    if name in TIMM:
        paths["peers"].mkdir()
        converters.save(features, paths["peers"] / "model.safetensors", format="timm")
        own = model.config.preprocessing
        facts = {"name": TIMM[name], "mean": own.mean, "std": own.std, "before_crop": round(224 / own.crop_fraction)}
        (paths["peers"] / "model.json").write_text(json.dumps(facts), encoding="utf-8")
    return paths


SUFFIXES = {"model": ".keras", "file": ".tflite", "features": ".tflite", "SavedModel": "/1", "peers": ""}


def write_photos(folder: Path, count: int) -> None:
    """Write random smooth photos of 640 x 480 as JPEG."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    random = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(folder / f"{i:04}.jpg", quality=90)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=48, help="photos to embed")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--weights", help="of the models, or random ones")
    parser.add_argument("--photos", type=Path, help="a folder of JPEG, instead of drawn ones")
    parser.add_argument("--peers", help="Python of the peers' environment")
    parser.add_argument("--only-embed", action="store_true")
    parser.add_argument("--write", nargs=3, metavar=("NAME", "FIELDS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:  # in a process of its own, whose memory ends with it
        name, fields, target = options.write
        paths = write_models(Path(target), name, json.loads(fields), options.weights)
        print(json.dumps({kind: str(path) for kind, path in paths.items()}))
        return
    from serving import machine

    print(f"Whole processes on a .tflite file (dynamic) beside its model: medians of {options.rounds}\n{machine()}")
    with tempfile.TemporaryDirectory() as folder:
        photos = options.photos or Path(folder) / "photos"
        if not options.photos:
            write_photos(photos, options.images)
        files = sorted(photos.glob("*.jpg"))
        one, python, images = files[0], sys.executable, len(files)
        for number, name in enumerate(options.models):
            fields = MODELS[name]
            target = Path(folder) / str(number)
            target.mkdir()
            command = [python, __file__, "--write", name, json.dumps(fields), str(target)]
            command += ["--weights", options.weights] if options.weights else []
            written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            paths = json.loads(written.splitlines()[-1])
            ways: dict[str, list[Any]]
            if not options.only_embed:
                predict = [python, "-m", "keras_vit", "predict"]
                ways = {
                    ".tflite": [*predict, paths["file"], one],
                    ".keras": [*predict, paths["model"], one],
                }
                compare(f"{name}: keras-vit predict MODEL photo.jpg", ways, options.rounds)
                ways = {kind: [python, "-c", WORKER.format(**code), paths[kind], one] for kind, code in WORKERS.items()}
                compare(f"{name}: a server's worker, from its start to its first answer", ways, options.rounds)
            if name == "digits":
                continue
            embed = [python, "-m", "keras_vit", "embed"]
            ways = {
                "features.tflite": [*embed, paths["features"], photos, "--to", "FOLDER/vectors"],
                **{
                    f"--dtype {dtype}": [*embed, paths["model"], photos, "--to", "FOLDER/vectors", "--dtype", dtype]
                    for dtype in ("int8", "float32", "bfloat16")
                    if dtype != "bfloat16" or "bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
                },
            }
            if options.peers:
                peer = [options.peers, Path(__file__).with_name("embed_peers.py")]
                subprocess.run([*peer, "prepare", paths["peers"], photos], capture_output=True, check=True)
                ways |= {way: [*peer, way, paths["peers"], photos, "FOLDER/vectors"] for way in PEERS}
            compare(f"{name}: keras-vit embed of {images:,} JPEG", ways, options.rounds, images)


if __name__ == "__main__":
    main()
