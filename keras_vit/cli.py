"""The command `keras-vit`. `--help` and `list` answer without importing TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Vision Transformers for TensorFlow and Keras 3: the official models, exactly, in and out.",
)

Size = Annotated[str | None, typer.Option("--image-size", help="Pixels: 384 or HEIGHTxWIDTH.")]
Classes = Annotated[int | None, typer.Option("--num-classes", help="A new head of this many classes; 0 for none.")]
Facts = Annotated[
    list[str] | None,
    typer.Option("--config", help="FIELD=VALUE that the file cannot tell, such as num_heads=12; may be repeated."),
]
DataDir = Annotated[Path | None, typer.Option(help="Where tensorflow-datasets keeps what it prepared.")]
BadImage = Annotated[str, typer.Option(help="What a file that cannot be decoded does: skip or fail.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_models(
    pattern: Annotated[str, typer.Argument(help='Such as "B*" or "R50*".')] = "*", as_json: Json = False
) -> None:
    """The models of the zoo and their weights."""
    from keras_vit import catalogue

    cards = [catalogue.card(name) for name in catalogue.names(pattern)]
    rows = [{"name": card.name, "default": card.default, "weights": list(card.weights)} for card in cards]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max((len(card.name) for card in cards), default=0)
    for card in cards:
        typer.echo(f"{card.name:<{width}}  {', '.join(card.weights)}")


@app.command()
def show(name: Annotated[str, typer.Argument(help="A model, or the name of an AugReg file.")]) -> None:
    """All that is known of a model: its weights, their files, sizes and reported accuracy."""
    from keras_vit import catalogue

    typer.echo(str(catalogue.card(name)))


@app.command()
def predict(
    name: Annotated[str, typer.Argument(help="A model of the zoo.")],
    images: Annotated[list[str], typer.Argument(help="JPEG or PNG files.")],
    weights: Annotated[str, typer.Option(help="A tag of the model's card, a path or a URL.")] = "default",
    image_size: Size = None,
    top: Annotated[int, typer.Option(help="How many classes an image.")] = 5,
    as_json: Json = False,
) -> None:
    """Classifies images."""
    missing = [image for image in images if "://" not in image and not Path(image).is_file()]
    if missing:
        raise FileNotFoundError(f"There is no image file {missing[0]!r}")
    with quiet():
        from keras_vit import zoo

        model = zoo.load(name, weights=weights, image_size=_size(image_size))
        rankings = model.classify(images, top=top)
    if as_json:
        rows = [{"image": i, "predictions": [p._asdict() for p in r]} for i, r in zip(images, rankings, strict=True)]
        typer.echo(json.dumps(rows, indent=2))
        return
    for image, ranking in zip(images, rankings, strict=True):
        typer.echo(image)
        for prediction in ranking:
            typer.echo(f"  {prediction.probability:7.2%}  {prediction.label}  ({prediction.label_id})")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint in any known format.")],
    target: Annotated[Path, typer.Argument(help="The file to write.")],
    to: Annotated[str, typer.Option("--to", help="The format to write, or a .toml table of your own.")],
    image_size: Size = None,
    num_classes: Classes = None,
    config: Facts = None,
    source_format: Annotated[str | None, typer.Option("--from", help="The source's format, or a .toml table.")] = None,
) -> None:
    """Rewrites a checkpoint in another format, resolution or number of classes."""
    with quiet():
        from keras_vit import converters

        path = converters.convert(
            source,
            target,
            format=to,
            image_size=_size(image_size),
            num_classes=num_classes,
            config=_facts(config or []),
            source_format=source_format,
        )
    typer.echo(str(path))


@app.command()
def resize(
    source: Annotated[Path, typer.Argument(help="A checkpoint.")],
    target: Annotated[Path, typer.Argument(help="The file to write, in the same format.")],
    image_size: Annotated[str, typer.Argument(help="Pixels: 384 or HEIGHTxWIDTH.")],
    config: Facts = None,
) -> None:
    """Takes a checkpoint to another resolution: its position embeddings are interpolated."""
    with quiet():
        from keras_vit import converters

        same, facts = converters.detect(source), _facts(config or [])
        path = converters.convert(source, target, format=same, image_size=_size(image_size), config=facts)
    typer.echo(str(path))


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a .toml file of your own.")],
    model: Annotated[str, typer.Option(help="A model of the zoo, or a checkpoint.")],
    data: Annotated[
        str, typer.Option(help="A data set of tensorflow-datasets, or a folder of folders of images.")
    ] = "digits",
    out: Annotated[Path | None, typer.Option(help="Where model, log and checkpoints go; else runs/...")] = None,
    weights: Annotated[str | None, typer.Option(help="What to begin with: a tag of the model's card, a path.")] = None,
    image_size: Size = None,
    steps: Annotated[int | None, typer.Option(help="In all.")] = None,
    variant: Annotated[str | None, typer.Option(help="One of the recipe's variants, such as light1.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="FIELD=VALUE of the recipe, such as seed=1; may be repeated.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="auto, one, mirrored, workers, tpu or tpu:NAME.")] = "auto",
    data_dir: DataDir = None,
    train_split: Annotated[str | None, typer.Option(help='Such as "train[:90%]".')] = None,
    eval_split: Annotated[str | None, typer.Option(help="The part to evaluate on.")] = None,
    on_bad_image: BadImage = "skip",
    as_json: Json = False,
) -> None:
    """Trains a model. The same command goes on where a run was stopped or killed, exactly."""
    with quiet():
        from keras_vit import train as training

    given = {"image_size": _size(image_size), "steps": steps, "variant": variant}
    fields = {name: value for name, value in given.items() if value is not None} | _facts(changes or [], "--set")
    chosen = training.recipe(recipe, **fields)
    folder = out or Path("runs") / _slug(f"{chosen.name}-{model}-{data}")
    result = training.run(
        chosen,
        model=model,
        data=data,
        out=folder,
        weights=weights,
        strategy=strategy,
        data_dir=data_dir,
        train_split=train_split,
        eval_split=eval_split,
        on_bad_image=on_bad_image,
        progress=not as_json,
    )
    summary = {"out": str(folder), "steps": result.steps, "stopped": result.stopped, "skipped": result.skipped}
    if as_json:
        typer.echo(json.dumps(summary | {"metrics": result.metrics}, indent=2))
    elif result.stopped:
        typer.echo(f"Stopped and saved after step {result.steps} in {folder}: the same command goes on from there.")
    elif result.out is None:
        typer.echo(f"This worker took its part of {result.steps} steps; the first one has written {folder}.")
    else:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        skipped = f"; images left out because they cannot be read: {result.skipped}" if result.skipped else ""
        typer.echo(f"{folder}/model.keras after {result.steps} steps: {figures or 'nothing to evaluate on'}{skipped}")


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A model of the zoo, a checkpoint or a .keras file.")],
    data: Annotated[str, typer.Option(help="As for train.")] = "digits",
    split: Annotated[str | None, typer.Option(help="Which part; else the held-out one.")] = None,
    weights: Annotated[str | None, typer.Option(help="For a name: a tag of the model's card, a path.")] = None,
    image_size: Size = None,
    batch_size: Annotated[int, typer.Option(help="Images a call.")] = 64,
    real: Annotated[bool, typer.Option("--real", help="Several labels an image, any is right (ReaL).")] = False,
    few_shot: Annotated[
        list[int] | None, typer.Option(help="Instead: a linear classifier on this many images a class; repeatable.")
    ] = None,
    data_dir: DataDir = None,
    on_bad_image: BadImage = "skip",
    as_json: Json = False,
) -> None:
    """Measures a model: top-1, top-5, cross-entropy and images a second; or few-shot accuracy of its features."""
    with quiet():
        from keras_vit import converters, zoo
        from keras_vit import train as training

        size = _size(image_size)
        if weights is None and Path(model).exists():
            loaded = converters.load(model, image_size=size)
        else:
            loaded = zoo.load(model, weights=weights or "default", image_size=size)
    places: dict[str, Any] = {"data_dir": data_dir, "on_bad_image": on_bad_image}
    if few_shot:
        found = training.few_shot(loaded, data, shots=tuple(few_shot), **places)
        rows = [{"shots": shots, "accuracy": accuracy} for shots, accuracy in found.items()]
        lines = [f"{row['shots']:>4} images a class  {row['accuracy']:.2%}" for row in rows]
        typer.echo(json.dumps(rows, indent=2) if as_json else "\n".join(lines))
        return
    labels = "real" if real else "single"
    evaluation = training.evaluate(
        loaded, data, split=split, batch_size=batch_size, labels=labels, progress=not as_json, **places
    )
    typer.echo(json.dumps(evaluation.to_dict(), indent=2) if as_json else str(evaluation))


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="An architecture, such as ViT-L/16.")],
    batch: Annotated[int, typer.Option(help="Images a step, over all devices.")],
    image_size: Size = None,
    devices: Annotated[int, typer.Option(help="GPUs or TPU cores.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Micro-batches a step.")] = 1,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "adamw",
    precision: Annotated[str, typer.Option(help="float32 or mixed_bfloat16.")] = "float32",
    remat: Annotated[bool, typer.Option("--remat", help="Compute blocks again for their gradient.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="Keep a moving average of the weights.")] = False,
    peak_tflops: Annotated[float | None, typer.Option(help="Of one device: gives an estimate of the time.")] = None,
    as_json: Json = False,
) -> None:
    """Estimates memory and arithmetic of training before anything is rented."""
    from keras_vit import train as training

    planned = training.plan(
        model,
        image_size=_size(image_size),
        batch_size=batch,
        devices=devices,
        accumulation=accumulation,
        optimizer=optimizer,
        precision=precision,
        remat=remat,
        ema=ema,
        peak_tflops=peak_tflops,
    )
    typer.echo(json.dumps(planned.to_dict(), indent=2) if as_json else str(planned))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the exported files go.")] = Path("demo"),
) -> None:
    """The whole path on the embedded model, offline: load, classify, resize, fine-tune, export, compare."""
    with quiet():
        from keras_vit import demo as tour
    tour.run(out)


def main() -> None:
    """Runs the command; what a user can mend is one line on standard error and exit code 1."""
    try:
        app()
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        message = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else error
        sys.exit(f"keras-vit: {message}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what TensorFlow's libraries write to standard error while they start; it is shown where the block fails.

    They write before any of their settings is read, so that the file descriptor itself is turned aside.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except BaseException:
            aside.seek(0)
            os.write(kept, aside.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    yield


def _slug(text: str) -> str:
    """The text as the name of one folder."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")


def _facts(texts: list[str], option: str = "--config") -> dict[str, Any]:
    """["num_heads=12", "classifier=gap"] as a dict; values are JSON, or words as they are."""
    facts: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{option} is FIELD=VALUE. Received: {text!r}")
        try:
            facts[name] = json.loads(value)
        except ValueError:
            facts[name] = value
    return facts


def _size(text: str | None) -> Any:
    """384 or 384x256 as `image_size` takes it."""
    if text is None:
        return None
    sides = [int(side) for side in text.lower().split("x") if side.isdecimal()]
    if len(sides) not in (1, 2) or "x".join(map(str, sides)) != text.lower():
        raise ValueError(f"--image-size is a number of pixels or HEIGHTxWIDTH. Received: {text!r}")
    return sides[0] if len(sides) == 1 else tuple(sides)


if __name__ == "__main__":
    main()
