"""The tour behind `keras-vit demo` and `make demo`: everything on the embedded model and real images, offline."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from keras_vit import digits, export, train, visualize, zoo
from keras_vit.model.vision_transformer import VisionTransformer

NAME = "ViT-digits"
TIMED = 50  # images that are classified one by one for the median
MADE = ("1", "digits.tflite", "finetuned", "report.html")  # what the tour leaves in its folder


@dataclass(frozen=True)
class Row:
    """One line of the table: a model or file, on the held-out digits."""

    what: str
    logits: np.ndarray
    bytes: int
    milliseconds: float


def run(out: Path, *, look: bool = True) -> None:
    """Loads, classifies, changes the resolution, fine-tunes, exports both ways, verifies, and draws a report.

    Args:
        out: folder for all files, made where it is not there; what an earlier run left there is replaced.
        look: whether to open the report in a browser, where there is a desktop.

    Raises:
        ValueError: the folder has other files.
        FileExistsError: it is a file.
    """
    _cleared(out)
    console = Console()
    keras.utils.set_random_seed(0)  # the fresh position embeddings, for the same table each time
    data = digits.load()
    model = zoo.load(NAME)
    side, _ = model.config.size
    larger = side * 3 // 2
    console.print(f"{NAME}: {model.count_params():,} parameters, {len(data.test_images)} held-out digits")
    first = model.classify(data.test_images[0], top=1)[0][0]
    console.print(f"The first is a {data.test_labels[0]}; the model says {first.label} ({first.probability:.1%})")

    interpolated = zoo.load(NAME, image_size=larger)
    recipe = train.recipe("finetune-digits", image_size=larger)
    console.print(f"Fine-tuning at {larger} px, the official way (fresh zero head, SGD), {recipe.steps} steps:")
    tuned = train.run(recipe, model=NAME, data="digits", out=out / "finetuned").model
    exports: list[export.Report] = []
    jobs: list[Callable[[], Row]] = [
        lambda: _keras(f"Keras, {side} px", model, data.test_images),
        lambda: _keras(f"{larger} px, interpolated", interpolated, data.test_images),
        lambda: _keras(f"{larger} px, fresh", _fresh_positions(interpolated), data.test_images),
        lambda: _keras(f"{larger} px, fine-tuned", tuned, data.test_images),
        lambda: _file("SavedModel", export.saved_model(model, out / "1"), model, data.test_images, exports),
        lambda: _file("TFLite, int8", export.tflite(model, out / "digits.tflite"), model, data.test_images, exports),
    ]
    rows = [job() for job in track(jobs, description="Exporting and comparing", console=console)]
    console.print(_table(rows, data.test_labels))
    console.print(
        "At another resolution: before any fine-tuning with position embeddings interpolated and drawn afresh, "
        "and after it."
    )
    page = _report(model, data, out / "report.html", exports)
    console.print(f"The exported files are in {out}/, the fine-tuned model and its log in {out}/finetuned/")
    console.print(f"What the model sees, to look at: {page}", soft_wrap=True)
    if look and _has_a_desktop():
        webbrowser.open(page.resolve().as_uri())


def _cleared(out: Path) -> None:
    """Makes the folder, without what an earlier run left in it."""
    out.mkdir(parents=True, exist_ok=True)
    shown = sorted(path for path in out.iterdir() if not path.name.startswith("."))
    others = [path.name for path in shown if path.name not in MADE]
    if others:
        raise ValueError(f"The tour takes a folder of its own: name another than {out}. Received: one with {others[0]}")
    for path in shown:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _report(model: VisionTransformer, data: digits.Digits, path: Path, exports: list[export.Report]) -> Path:
    """One image of each class, and one that the model gets wrong."""
    wrong = model.predict_on_batch(model.preprocess(data.test_images)).argmax(axis=1) != data.test_labels
    shown = [*(int(np.argmax(data.test_labels == number)) for number in range(10)), int(np.argmax(wrong))]
    images = [data.test_images[index] for index in shown]
    return visualize.report(model, images, path, title=NAME, top=3, card=zoo.card(NAME), exports=exports, progress=True)


def _has_a_desktop() -> bool:
    # Without one, Python would open a browser for the terminal, in the terminal.
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def _fresh_positions(model: VisionTransformer) -> VisionTransformer:
    """The same weights with position embeddings as a new model draws them."""
    fresh = VisionTransformer(model.config)
    fresh.copy_weights_from(model, skip=["position"])
    return fresh


def _keras(what: str, model: VisionTransformer, images: np.ndarray) -> Row:
    prepared = model.preprocess(images)
    run = model.predict_on_batch
    run(prepared[:1])
    return Row(what, run(prepared), 4 * model.count_params(), _milliseconds(run, prepared))


def _file(
    what: str, written: export.Report, model: VisionTransformer, images: np.ndarray, exports: list[export.Report]
) -> Row:
    """Runs an exported file on all images; its comparison with the model joins the others."""
    prepared = model.preprocess(images)
    exports.append(export.verify(model, written.path, images))
    run = export.runner(written.path)
    logits = np.concatenate([run(image[None]) for image in prepared])
    return Row(what, logits, written.bytes, _milliseconds(run, prepared))


def _milliseconds(run: Callable[[np.ndarray], np.ndarray], images: np.ndarray) -> float:
    times = []
    for image in images[:TIMED]:
        start = time.perf_counter()
        run(image[None])
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def _table(rows: list[Row], labels: np.ndarray) -> Table:
    table = Table("on the held-out digits", "accuracy", "same as Keras", "bytes", "ms an image")
    for column in table.columns[1:]:
        column.justify = "right"
    keras_says = rows[0].logits.argmax(axis=1)
    for row in rows:
        says = row.logits.argmax(axis=1)
        accuracy, agreement = np.mean(says == labels), np.mean(says == keras_says)
        table.add_row(row.what, f"{accuracy:.2%}", f"{agreement:.2%}", f"{row.bytes:,}", f"{row.milliseconds:.2f}")
    return table
