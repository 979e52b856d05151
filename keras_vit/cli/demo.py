"""The commands `demo` and `bench`: a tour on embedded data, and the speed of a model."""

import functools
import json
import os
import shutil
import statistics
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from keras_vit._util import progress
from keras_vit._util.checks import given
from keras_vit.cli import options

NAME = "ViT-digits"
OUTPUTS = ("1", "digits.tflite", "finetuned", "report.html")  # files and folders that an earlier demo has left


def demo(
    out: Annotated[Path, Option(help="Folder for the exported files and the report.")] = Path("demo"),
    look: Annotated[bool, Option("--open/--no-open", help="Open the report in a browser.")] = True,
) -> None:
    """Show the package on the embedded model, offline: load, classify, resize, fine-tune, export, verify, inspect."""
    _empty_folder(out)
    with options.quiet():
        report = _tour(out)
    # Without a desktop, Python opens a text browser in the terminal.
    has_desktop = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if look and has_desktop:
        webbrowser.open(report.resolve().as_uri())


def _empty_folder(out: Path) -> None:
    """Create the folder of the demo, or empty it; raise a ValueError if it contains files that no demo has written."""
    out.mkdir(parents=True, exist_ok=True)
    found = [path for path in out.iterdir() if not path.name.startswith(".")]
    if others := sorted({path.name for path in found}.difference(OUTPUTS)):
        raise ValueError(f"The demo needs a folder of its own, and {out} contains {others[0]}: choose another by --out")
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _tour(out: Path) -> Path:
    """Load, classify, change the resolution, fine-tune, export to both formats, and write a report; return its path."""
    from keras_vit import digits, export, train, visualize, zoo
    from keras_vit.zoo import catalogue

    data, model = digits.load(), zoo.load(NAME)
    images, labels = data.test_images, data.test_labels
    print(f"{NAME}: {model.count_params():,} parameters, {len(images)} held-out digits")
    [[first]] = model.classify(images[0], top=1)
    print(f"The first is a {labels[0]}; the model says {first.label} ({first.probability:.1%})")

    recipe = train.recipe("finetune-digits", image_size=48)
    print(f"Fine-tuning at 48 px, the official way (fresh zero head, SGD), {recipe.steps} steps:")
    models = {
        "Keras, 32 px": model,
        "48 px, position embeddings interpolated": zoo.load(NAME, image_size=48),
        "48 px, fine-tuned": train.run(recipe, model=NAME, data="digits", out=out / "finetuned").model,
    }
    for name, variant in models.items():
        measured = str(train.evaluate(variant, "digits", progress=False))
        print(f"{name}: {measured.splitlines()[0]}")  # without the table of thresholds

    paths = [
        export.saved_model(model, out / "1").path,
        export.tflite(model, out / "digits.tflite", progress=True).path,
    ]
    exports = [export.verify(model, path, images) for path in paths]
    print(*exports, sep="\n")

    classes = model.predict_on_batch(model.preprocess(images)).argmax(axis=1)
    shown = [(labels == number).argmax() for number in range(10)]  # the first image of each class
    shown.append((classes != labels).argmax())  # and the first that the model gets wrong
    page = visualize.report(
        model,
        images[shown],
        out / "report.html",
        title=NAME,
        top=3,
        card=catalogue.details(zoo.card(NAME)),
        exports=exports,
        progress=True,
    )
    print(f"The exported files are in {out}/, the fine-tuned model and its log in {out}/finetuned/")
    print(f"Report: {page}")
    return page


WARM_UP_CALLS = 3  # at least, before the timed calls
WARM_UP_SECONDS = 0.5  # at least

TimedCall = Callable[[Any], tuple[Any, float]]


@options.takes(*options.MODEL_OPTIONS)
def bench(
    model: options.Model,
    batch: Annotated[int | None, options.integer(1, "Images per call; default: 1, or the file's own number.")] = None,
    rounds: Annotated[int, options.integer(1, "Number of timed calls.")] = 20,
    threads: Annotated[int | None, options.integer(1, "Default: the runtime's choice; 2 for a .tflite file.")] = None,
    as_json: options.Json = False,
    **chosen: Any,
) -> None:
    """Time a model, a checkpoint, a .tflite file or a SavedModel on this machine, without preprocessing."""
    from keras_vit.zoo.pretrained import resolve

    # A SavedModel whose path is also a name of the zoo is the zoo's model.
    is_folder = (Path(model) / "saved_model.pb").exists() and resolve(model).is_file
    is_exported = is_folder or options.is_tflite(model)
    if is_exported and any(chosen.values()):
        raise ValueError(
            "--weights, --which, --config, --accept-license, --image-size and --patch-size are for models. "
            f"Received: the file {model}"
        )
    if is_exported and not Path(model).exists():
        raise FileNotFoundError(f"There is no exported file {model}")
    if not is_exported:
        found = options.find_model(model, **chosen)
    timed_call: TimedCall
    with options.quiet(starts_tensorflow=not options.is_tflite(model)):
        if is_exported:
            from keras_vit.export.exported import load_exported

            file = load_exported(model, **given(threads=threads))
            if file.threads is None and threads is not None:
                raise ValueError(
                    f"{model} runs on as many threads as TensorFlow chooses. Received: --threads {threads}"
                )
            if file.batch is not None and batch not in (None, file.batch):
                raise ValueError(f"{model} takes {file.batch} images per call. Received: --batch {batch}")
            timed_call = functools.partial(progress.timed, file.call)
            images = _images(file.shape, file.dtype, file.batch or batch or 1)
        else:
            import tensorflow as tf

            if threads is not None:  # which TensorFlow takes only before its first operation
                tf.config.threading.set_intra_op_parallelism_threads(threads)
            loaded = found.load()
            timed_call = functools.partial(progress.timed, loaded.predict_on_batch)
            images = _images(loaded.input_shape[1:], "float32", batch or 1)
        times = measure(timed_call, images, rounds)
    row = {"model": model, "image_size": images.shape[1:3], "batch": len(images), **times}
    height, width = images.shape[1:3]
    text = (
        f"{model} at {height} x {width}, batch {len(images)}: median {times['median_ms']:.2f} ms, "
        f"p90 {times['p90_ms']:.2f} ms, {times['images_per_second']:,.1f} images/s\n"
        f"  {rounds} calls after warm-up; the first call took {times['first_ms']:,.0f} ms"
    )
    options.echo(json.dumps(row, indent=2) if as_json else text)


def measure(timed_call: TimedCall, images: Any, rounds: int) -> dict[str, Any]:
    """Time single calls; first_ms is the very first, in which TensorFlow compiles, the others come after a warm-up."""
    _, first = timed_call(images)
    warm_up: list[float] = []
    while len(warm_up) < WARM_UP_CALLS or sum(warm_up) < WARM_UP_SECONDS:
        warm_up.append(progress.timed(timed_call, images)[1])
    times = sorted(timed_call(images)[1] for _ in range(rounds))
    median = statistics.median(times)
    return {
        "rounds": rounds,
        "first_ms": 1000 * first,
        "median_ms": 1000 * median,
        "p90_ms": 1000 * times[min(rounds - 1, int(0.9 * rounds))],
        "images_per_second": len(images) / median,
    }


def _images(shape: tuple[Any, ...], dtype: str, batch: int) -> Any:
    """Draw random images, preprocessed ones, or pixels if the dtype is uint8."""
    import numpy as np

    if None in shape:
        raise ValueError(f"Only files that take images of one size are timed. Received: shape {shape}")
    random = np.random.default_rng(0)
    if dtype == "uint8":
        return random.integers(0, 256, (batch, *shape)).astype(dtype)
    return random.uniform(-1, 1, (batch, *shape)).astype(dtype)
