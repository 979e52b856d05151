"""Embed many JPEG files with Ti/16: memory, images/s beside its parts, and runs that are killed on the way.

    python benchmarks/batch.py                       10,000 images of 224 px, and a tenth of them
    python benchmarks/batch.py --images 100000

The images are tiles of scikit-learn's two sample photos with random changes; one in a hundred is damaged. The report
is printed and written to results/batch.txt. Linux only (/proc).
"""

import argparse
import datetime
import io
import json
import multiprocessing
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
MODEL, SIZE, BATCH, ROWS = "ViT-Ti/16", 224, 16, 512
ONE_DAMAGED_IN = 100
ALONE = 512  # images for the measurements of decoding and of the model alone
MOST_MEMORY, LEAST_RATE = 300e6, 0.9  # the targets
KILLS = 3


def make_images(folder: Path, count: int) -> None:
    """Write JPEG files to folder/<thousand>/<number>.jpg, with all cores."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        pool.starmap(_make_thousand, [(folder, first, min(count, first + 1000)) for first in range(0, count, 1000)])


def _make_thousand(folder: Path, first: int, end: int) -> None:
    import numpy as np
    from PIL import Image, ImageEnhance
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    place = folder / f"{first // 1000:05}"
    place.mkdir(parents=True)
    for number in range(first, end):
        draw = np.random.default_rng(number)
        photo = photos[number % 2]
        side = int(draw.integers(SIZE // 2, 400))
        left, top = draw.integers(0, photo.width - side), draw.integers(0, photo.height - side)
        tile = photo.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        tile = ImageEnhance.Brightness(tile).enhance(draw.uniform(0.6, 1.4)).rotate(90 * int(draw.integers(4)))
        buffer = io.BytesIO()
        tile.save(buffer, "JPEG", quality=int(draw.integers(75, 96)))
        data = buffer.getvalue()
        if number % ONE_DAMAGED_IN == ONE_DAMAGED_IN - 1:
            data = data[: int(draw.integers(0, len(data) // 2))]
        (place / f"{number:08}.jpg").write_bytes(data)


def load(weights: Path) -> Any:
    """Return the model with random weights, the same in every process."""
    import keras

    from keras_vit import zoo

    if not weights.exists():
        keras.utils.set_random_seed(0)
        zoo.load(MODEL, weights=None, num_classes=0).save(weights)
    return keras.saving.load_model(weights)


def resident(name: str) -> int:
    """Return the resident bytes of this process: now ("VmRSS") or at the peak ("VmHWM")."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def embed(images: str, weights: str, out: str) -> dict[str, float]:
    """Embed a folder; return seconds, processor seconds, and bytes of memory above the loaded model."""
    from keras_vit import batch

    model = load(Path(weights))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start, processor = time.perf_counter(), time.process_time()
    result = batch.embed(model, images, to=out, rows_per_file=ROWS, batch_size=BATCH)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    memory = resident("VmHWM") - before
    return {"seconds": seconds, "processor": processor, "memory": memory, "rows": result.rows, "errors": result.errors}


def parts(images: str, weights: str, out: str) -> dict[str, float]:
    """Return the seconds an image takes to decode with a plain tf.data pipeline, and in the compiled model alone."""
    import numpy as np
    import tensorflow as tf

    from keras_vit.batch.compute import Worker
    from keras_vit.model import preprocess

    model = load(Path(weights))
    dtype = json.loads((Path(out) / "_run.json").read_text())["dtype"]
    paths = sorted(map(str, Path(images).rglob("*.jpg")))[:ALONE]
    prepare = preprocess.preprocessing_function(
        image_size=(SIZE, SIZE), num_channels=3, preprocessing=model.config.preprocessing
    )

    def read(path: Any) -> Any:
        return prepare(tf.io.decode_jpeg(tf.io.read_file(path), channels=3, dct_method="INTEGER_ACCURATE"))

    pipeline = tf.data.Dataset.from_tensor_slices(paths).map(read, num_parallel_calls=tf.data.AUTOTUNE)
    pipeline = pipeline.ignore_errors().batch(BATCH).prefetch(tf.data.AUTOTUNE)
    worker = Worker(model, what="embeddings", dtype=dtype, output_dtype="float32", batch_size=BATCH)
    prepared = np.random.default_rng(0).normal(size=(BATCH, SIZE, SIZE, 3)).astype(np.float32)
    figures = {}
    for name, run, count in (
        ("decode", lambda: [None for _ in pipeline], len(paths)),
        ("model", lambda: [worker._call(prepared) for _ in range(ALONE // BATCH)], ALONE),
    ):
        times = []
        for _ in range(3):
            start, processor = time.perf_counter(), time.process_time()
            run()
            times.append(((time.perf_counter() - start) / count, (time.process_time() - processor) / count))
        figures[name], figures[f"{name}_processor"] = sorted(times)[1]
    return figures


def child(task: str, *arguments: Path | str) -> dict[str, float]:
    """Run a task of this script in a new process, and return its figures."""
    done = start(task, *arguments)
    output, errors = done.communicate()
    if done.returncode:
        raise RuntimeError(errors[-3000:])
    return json.loads(output.splitlines()[-1])


def start(task: str, *arguments: Path | str) -> subprocess.Popen[str]:
    """Start a task of this script in a new process."""
    command = [sys.executable, str(SCRIPT), task, *map(str, arguments)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(SCRIPT.parents[1])}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def embed_with_kills(images: Path, weights: Path, out: Path) -> list[int]:
    """Embed a folder in processes that are killed, and one that is not; return the files finished at each kill."""
    files = -(-sum(1 for _ in images.rglob("*.jpg")) // ROWS)
    finished = []
    for number in range(KILLS):
        process = start("embed", images, weights, out)
        wanted = files * (number + 1) // (KILLS + 1)
        while process.poll() is None and len(list(out.glob("part-*"))) < wanted:
            time.sleep(0.1)
        time.sleep(random.uniform(0, 5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        finished.append(len(list(out.glob("part-*"))))
    child("embed", images, weights, out)
    return finished


def report(count: int, folder: Path) -> str:
    """Run everything, and return the text of the report."""
    import pyarrow.parquet as pq

    images, weights = folder / "images", folder / "weights.keras"
    make_images(images / "small", count // 10)
    make_images(images / "large", count)
    load(weights)
    small = child("embed", images / "small", weights, folder / "small")
    alone = child("parts", images / "large", weights, folder / "small")
    large = child("embed", images / "large", weights, folder / "whole")
    again = child("parts", images / "large", weights, folder / "small")
    finished = embed_with_kills(images / "large", weights, folder / "killed")
    tables = [pq.read_table(folder / name).sort_by("path") for name in ("whole", "killed")]
    paths = sorted(map(str, (images / "large").rglob("*.jpg")))
    decode, model = ((alone[name] + again[name]) / 2 for name in ("decode", "model"))
    work = sum(each[f"{name}_processor"] for each in (alone, again) for name in ("decode", "model")) / 2
    rate = (decode + model) * count / large["seconds"]
    same = "the same rows" if tables[0].equals(tables[1]) else "OTHER ROWS"
    once = "each image once" if tables[1]["path"].to_pylist() == paths else "NOT EACH IMAGE ONCE"
    dtype = json.loads((folder / "whole" / "_run.json").read_text())["dtype"]

    def megabytes(figures: dict[str, float]) -> str:
        return f"{figures['memory'] / 1e6:,.0f} MB for {figures['rows']:,} images"

    def milliseconds(seconds: float) -> str:
        return f"{1000 * seconds:.2f} ms an image"

    rows = {
        "memory above the model": f"{megabytes(small)}, {megabytes(large)} (target: {MOST_MEMORY / 1e6:.0f} MB)",
        "time": f"{large['seconds']:,.1f} s: {count / large['seconds']:,.1f} images/s, with start and compilation",
        "decode alone": f"{milliseconds(decode)}, plain tf.data",
        "model alone": milliseconds(model),
        "rate": f"{rate:.2f} of decode and model alone, one after the other (target: {LEAST_RATE})",
        "processor time": f"{milliseconds(large['processor'] / count)}, of the two alone {milliseconds(work)}",
        "rows": f"{large['rows']:,}, {large['errors']:,} of them with an error",
        "kill -9": f"after {finished} of {-(-count // ROWS)} files, then to the end: {same}, {once}",
    }
    return "\n".join([*title(count, dtype), "", *(f"{name:24} {text}" for name, text in rows.items())]) + "\n"


def title(count: int, dtype: str) -> list[str]:
    """Return the lines that say what was measured, and on which machine."""
    info = Path("/proc/cpuinfo").read_text()
    cpu = re.search(r"model name\s*: (.*)", info)
    processor = (cpu[1] if cpu else platform.machine()) + (" with AMX" if "amx_bf16" in info else "")
    packages = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "pyarrow"))
    return [
        f"{count:,} JPEG files of {SIZE} px, one in {ONE_DAMAGED_IN} damaged; {MODEL} in {dtype}, batches of {BATCH}.",
        f"{datetime.date.today()}, {processor}, {os.cpu_count()} CPUs, a load of {os.getloadavg()[2]:.1f}",
        f"Python {platform.python_version()}, {packages}",
    ]


def main() -> None:
    """Run the benchmark, or one of its tasks."""
    if len(sys.argv) > 1 and sys.argv[1] in TASKS:
        print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=SCRIPT.parent / "results" / "batch.txt")
    parser.add_argument("--work", type=Path, help="a folder for images and rows, which are removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        text = report(options.images, Path(folder))
    print(text)
    options.out.write_text(text)


TASKS = {"embed": embed, "parts": parts}

if __name__ == "__main__":
    main()
