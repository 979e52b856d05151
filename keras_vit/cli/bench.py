"""The command `keras-vit bench`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from keras_vit.cli.options import Json, Model, Size, Weights, load, quiet

WARM = (3, 0.5)  # calls and seconds, both at least, that are not counted


def bench(
    model: Model,
    batch: Annotated[int | None, typer.Option(help="Images a call; else 1, or the file's own.")] = None,
    rounds: Annotated[int, typer.Option(help="Calls that are timed.")] = 20,
    threads: Annotated[int | None, typer.Option(help="Else the runtime's choice; 2 for a .tflite file.")] = None,
    weights: Weights = None,
    image_size: Size = None,
    as_json: Json = False,
) -> None:
    """Times a model of the zoo, a checkpoint, a .tflite file or a SavedModel on this machine, preprocessing aside."""
    for name, value in (("--batch", batch), ("--rounds", rounds), ("--threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is a whole number from 1. Received: {value}")
    with quiet():
        exported = model.endswith(".tflite") or (Path(model) / "saved_model.pb").exists()
        if exported and (weights is not None or image_size is not None):
            raise ValueError(f"{model} has its weights and its size: --weights and --image-size are for models")
        prepare = _file if exported else _model
        call, images = prepare(model, batch, threads, weights=weights, image_size=image_size)
        found = timed(call, images, rounds)
    row = {"model": model, "image_size": images.shape[1:3], "batch": len(images), **found}
    typer.echo(json.dumps(row, indent=2) if as_json else _text(row))


def timed(call: Callable[[Any], Any], images: Any, rounds: int) -> dict[str, Any]:
    """Times calls one by one, after `WARM` ones.

    Args:
        call: takes the images, and comes back when its results are on the host.
        images: a batch.
        rounds: how many calls are counted.

    Returns:
        rounds; first_ms, of the very first call, in which TensorFlow compiles; median_ms and p90_ms of the counted
        ones; images_per_second, by the median.
    """

    def once() -> float:
        start = time.perf_counter()
        call(images)
        return time.perf_counter() - start

    first, begun, calls = once(), time.perf_counter(), 0
    while calls < WARM[0] or time.perf_counter() - begun < WARM[1]:
        once()
        calls += 1
    times = sorted(once() for _ in range(rounds))
    median = statistics.median(times)
    return {
        "rounds": rounds,
        "first_ms": 1000 * first,
        "median_ms": 1000 * median,
        "p90_ms": 1000 * times[min(rounds - 1, int(0.9 * rounds))],
        "images_per_second": len(images) / median,
    }


def _model(
    name: str, batch: int | None, threads: int | None, *, weights: str | None, image_size: str | None
) -> tuple[Callable[[Any], Any], Any]:
    """A Keras model's compiled call, as `classify` makes it, and images for it."""
    import tensorflow as tf

    if threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    loaded = load(name, weights, image_size)
    return loaded.predict_on_batch, _images(loaded.input_shape[1:], "float32", batch or 1)


def _file(path: str, batch: int | None, threads: int | None, **_: str | None) -> tuple[Callable[[Any], Any], Any]:
    """An exported file's call, and images for it."""
    from keras_vit.export.check.running import running

    file = running(path, **({} if threads is None else {"threads": threads}))
    if file.threads is None and threads is not None:
        raise ValueError(f"{path} runs on as many threads as TensorFlow chooses. Received: --threads {threads}")
    if file.batch is not None and batch not in (None, file.batch):
        raise ValueError(f"{path} takes {file.batch} images a call. Received: --batch {batch}")
    return file.call, _images(file.shape, file.dtype, file.batch or batch or 1)


def _images(shape: tuple[int | None, ...], dtype: str, batch: int) -> Any:
    """Random images: prepared ones, or pixels."""
    import numpy as np

    sides = [side for side in shape if side is not None]
    if len(sides) < len(shape):
        raise ValueError(f"The file takes images of any size, and says no size to time it at. Received: shape {shape}")
    random = np.random.default_rng(0)
    if dtype == "uint8":
        return random.integers(0, 256, (batch, *sides)).astype(dtype)
    return random.uniform(-1, 1, (batch, *sides)).astype(dtype)


def _text(row: dict[str, Any]) -> str:
    height, width = row["image_size"]
    return (
        f"{row['model']} at {height} x {width}, batch {row['batch']}: median {row['median_ms']:.2f} ms, "
        f"p90 {row['p90_ms']:.2f} ms, {row['images_per_second']:,.1f} images/s\n"
        f"  {row['rounds']} calls after warming up; the first call took {row['first_ms']:,.0f} ms"
    )
