"""The command `keras-vit bench`."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from keras_vit._util.checks import check_counts, given
from keras_vit.cli.options import Json, Licence, Model, Patch, Size, Weights, find_model, quiet

WARM_UP = (3, 0.5)  # least calls and least seconds before the timed calls


def bench(
    model: Model,
    batch: Annotated[int | None, Option(help="Images per call; default: 1, or the file's own number.")] = None,
    rounds: Annotated[int, Option(help="Number of timed calls.")] = 20,
    threads: Annotated[int | None, Option(help="Default: the runtime's choice; 2 for a .tflite file.")] = None,
    weights: Weights = None,
    accept_licence: Licence = False,
    image_size: Size = None,
    patch_size: Patch = None,
    as_json: Json = False,
) -> None:
    """Time a model, a checkpoint, a .tflite file or a SavedModel on this machine, without preprocessing."""
    check_counts(**given(batch=batch, rounds=rounds, threads=threads))
    is_exported = _is_exported(model)
    if is_exported and given(weights=weights, image_size=image_size, patch_size=patch_size):
        raise ValueError(f"{model} has its weights and sizes: --weights, --image-size and --patch-size are for models")
    if is_exported and not Path(model).exists():
        raise FileNotFoundError(f"There is no exported file {model}")
    found = None if is_exported else find_model(model, weights, image_size, patch_size, accept_licence=accept_licence)
    with quiet():
        if found is None:
            call, images = _exported_call(model, batch, threads)
        else:
            import tensorflow as tf

            if threads is not None:  # which TensorFlow takes only before its first operation
                tf.config.threading.set_intra_op_parallelism_threads(threads)
            loaded = found.load()
            call, images = loaded.predict_on_batch, _images(loaded.input_shape[1:], "float32", batch or 1)
        times = timed(call, images, rounds)
    row = {"model": model, "image_size": images.shape[1:3], "batch": len(images), **times}
    typer.echo(json.dumps(row, indent=2) if as_json else _text(row))


def timed(call: Callable[[Any], Any], images: Any, rounds: int) -> dict[str, Any]:
    """Time single calls after the `WARM_UP` ones; `call` returns when its results are on the host.

    first_ms is the very first call, in which TensorFlow compiles; images_per_second is by the median.
    """

    def call_once() -> float:
        start = time.perf_counter()
        call(images)
        return time.perf_counter() - start

    first, start, calls = call_once(), time.perf_counter(), 0
    while calls < WARM_UP[0] or time.perf_counter() - start < WARM_UP[1]:
        call_once()
        calls += 1
    times = sorted(call_once() for _ in range(rounds))
    median = statistics.median(times)
    return {
        "rounds": rounds,
        "first_ms": 1000 * first,
        "median_ms": 1000 * median,
        "p90_ms": 1000 * times[min(rounds - 1, int(0.9 * rounds))],
        "images_per_second": len(images) / median,
    }


def _is_exported(model: str) -> bool:
    """Return whether this is an exported file: a .tflite file or a SavedModel, which `resolve` cannot load.

    No name ends in ".tflite". A folder with a SavedModel may have a name of the zoo, which is then the zoo's model.
    """
    from keras_vit.zoo.pretrained import resolve

    if model.casefold().endswith(".tflite"):
        return True
    return (Path(model) / "saved_model.pb").exists() and resolve(model).is_file


def _exported_call(path: str, batch: int | None, threads: int | None) -> tuple[Callable[[Any], Any], Any]:
    """Return an exported file's call, and images for it."""
    from keras_vit.export.check.running import load_exported

    file = load_exported(path, **({} if threads is None else {"threads": threads}))
    if file.threads is None and threads is not None:
        raise ValueError(f"{path} runs on as many threads as TensorFlow chooses. Received: --threads {threads}")
    if file.batch is not None and batch not in (None, file.batch):
        raise ValueError(f"{path} takes {file.batch} images per call. Received: --batch {batch}")
    return file.call, _images(file.shape, file.dtype, file.batch or batch or 1)


def _images(shape: tuple[int | None, ...], dtype: str, batch: int) -> Any:
    """Return random images: preprocessed ones, or pixels if the dtype is uint8."""
    import numpy as np

    sides = [side for side in shape if side is not None]
    if len(sides) < len(shape):
        raise ValueError(
            f"The file takes images of any size; only files of one size are timed. Received: shape {shape}"
        )
    random = np.random.default_rng(0)
    if dtype == "uint8":
        return random.integers(0, 256, (batch, *sides)).astype(dtype)
    return random.uniform(-1, 1, (batch, *sides)).astype(dtype)


def _text(row: dict[str, Any]) -> str:
    height, width = row["image_size"]
    return (
        f"{row['model']} at {height} x {width}, batch {row['batch']}: median {row['median_ms']:.2f} ms, "
        f"p90 {row['p90_ms']:.2f} ms, {row['images_per_second']:,.1f} images/s\n"
        f"  {row['rounds']} calls after warm-up; the first call took {row['first_ms']:,.0f} ms"
    )
