"""Show the package on the embedded model and real images, offline: `keras-vit demo` and `make demo`."""

import os
import statistics
import sys
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_vit import digits, export, train, visualize, zoo
from keras_vit._util.progress import track
from keras_vit.model.vision_transformer import VisionTransformer

NAME = "ViT-digits"
TIMED_IMAGES = 50  # classified one by one for the median


class Row(NamedTuple):
    """One line of the table: results of a model or file on the held-out digits."""

    name: str
    logits: np.ndarray
    bytes: int
    milliseconds: float


def run(out: Path, *, open_report: bool = True) -> None:
    """Load, classify, change the resolution, fine-tune, export to both formats, verify, and write a report.

    `out` is a folder that exists and holds nothing of an earlier demo.
    """
    console = Console()
    keras.utils.set_random_seed(0)  # so that every run draws the same new position embeddings and prints the same table
    data = digits.load()
    model = zoo.load(NAME)
    console.print(f"{NAME}: {model.count_params():,} parameters, {len(data.test_images)} held-out digits")
    first = model.classify(data.test_images[0], top=1)[0][0]
    console.print(f"The first is a {data.test_labels[0]}; the model says {first.label} ({first.probability:.1%})")

    interpolated = zoo.load(NAME, image_size=48)
    recipe = train.recipe("finetune-digits", image_size=48)
    console.print(f"Fine-tuning at 48 px, the official way (fresh zero head, SGD), {recipe.steps} steps:")
    tuned = train.run(recipe, model=NAME, data="digits", out=out / "finetuned").model
    exports: list[export.Report] = []
    jobs: list[Callable[[], Row]] = [
        lambda: _keras_row("Keras, 32 px", model, data.test_images),
        lambda: _keras_row("48 px, interpolated", interpolated, data.test_images),
        lambda: _keras_row("48 px, fresh", _fresh_positions(interpolated), data.test_images),
        lambda: _keras_row("48 px, fine-tuned", tuned, data.test_images),
        lambda: _file_row("SavedModel", export.saved_model(model, out / "1"), model, data.test_images, exports),
        lambda: _file_row(
            "TFLite, int8", export.tflite(model, out / "digits.tflite"), model, data.test_images, exports
        ),
    ]
    rows = [job() for job in track(jobs, "Exporting and comparing")]
    console.print(_table(rows, data.test_labels))
    console.print(
        "At another resolution: before fine-tuning with position embeddings interpolated or new, and after fine-tuning."
    )
    page = _report(model, data, out / "report.html", exports)
    console.print(f"The exported files are in {out}/, the fine-tuned model and its log in {out}/finetuned/")
    console.print(f"Report: {page}", soft_wrap=True)
    # Without a desktop, Python opens a text browser in the terminal.
    has_desktop = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if open_report and has_desktop:
        webbrowser.open(page.resolve().as_uri())


def _report(model: VisionTransformer, data: digits.Digits, path: Path, exports: list[export.Report]) -> Path:
    """Write a report on one image of each class and one that the model gets wrong."""
    wrong = model.predict_on_batch(model.preprocess(data.test_images)).argmax(axis=1) != data.test_labels
    shown = [*(int(np.argmax(data.test_labels == number)) for number in range(10)), int(np.argmax(wrong))]
    images = [data.test_images[index] for index in shown]
    return visualize.report(model, images, path, title=NAME, top=3, card=zoo.card(NAME), exports=exports, progress=True)


def _fresh_positions(model: VisionTransformer) -> VisionTransformer:
    """Return a model with the same weights, but new random position embeddings."""
    return model.with_config(model.config, fresh=["position"])


def _keras_row(name: str, model: VisionTransformer, images: np.ndarray) -> Row:
    prepared = model.preprocess(images)
    run = model.predict_on_batch
    run(prepared[:1])
    return Row(name, run(prepared), 4 * model.count_params(), _milliseconds(run, prepared))


def _file_row(
    name: str, written: export.Report, model: VisionTransformer, images: np.ndarray, exports: list[export.Report]
) -> Row:
    """Run an exported file on all images; the report that compares it with the model joins `exports`."""
    prepared = model.preprocess(images)
    exports.append(export.verify(model, written.path, images))
    run = export.runner(written.path)
    logits = np.concatenate([run(image[None]) for image in prepared])
    return Row(name, logits, written.bytes, _milliseconds(run, prepared))


def _milliseconds(run: Callable[[np.ndarray], np.ndarray], images: np.ndarray) -> float:
    times = []
    for image in images[:TIMED_IMAGES]:
        start = time.perf_counter()
        run(image[None])
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def _table(rows: list[Row], labels: np.ndarray) -> Table:
    table = Table("on the held-out digits", "accuracy", "same as Keras", "bytes", "ms an image")
    for column in table.columns[1:]:
        column.justify = "right"
    keras_classes = rows[0].logits.argmax(axis=1)
    for row in rows:
        classes = row.logits.argmax(axis=1)
        accuracy, agreement = np.mean(classes == labels), np.mean(classes == keras_classes)
        table.add_row(row.name, f"{accuracy:.2%}", f"{agreement:.2%}", f"{row.bytes:,}", f"{row.milliseconds:.2f}")
    return table
