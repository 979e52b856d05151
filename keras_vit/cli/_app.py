"""The command `keras-vit`. `--help` and `list` answer without importing TensorFlow."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import keras_vit
from keras_vit.cli import bench, export, gallery, show, visualize
from keras_vit.cli.options import (
    MENDABLE,
    BadImage,
    Classes,
    DataDir,
    Facts,
    Json,
    Model,
    Size,
    Weights,
    complete_format,
    complete_model,
    complete_recipe,
    complete_weights,
    facts,
    load,
    need_images,
    quiet,
    size,
    tell,
)

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(keras_vit.__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """Vision Transformers for TensorFlow and Keras 3: the official models, exactly, in and out."""


app.command("list")(show.list_models)
app.command("show")(show.show)


@app.command()
def predict(
    model: Model,
    images: Annotated[list[str], typer.Argument(help="JPEG or PNG files.")],
    weights: Weights = None,
    image_size: Size = None,
    top: Annotated[int, typer.Option(help="How many classes an image.")] = 5,
    as_json: Json = False,
) -> None:
    """Classifies images."""
    need_images(images)
    with quiet():
        rankings = load(model, weights, image_size).classify(images, top=top)
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
    to: Annotated[
        str,
        typer.Option("--to", help="The format to write, or a .toml table of your own.", autocompletion=complete_format),
    ],
    image_size: Size = None,
    num_classes: Classes = None,
    config: Facts = None,
    source_format: Annotated[
        str | None,
        typer.Option("--from", help="The source's format, or a .toml table.", autocompletion=complete_format),
    ] = None,
) -> None:
    """Rewrites a checkpoint in another format, resolution or number of classes."""
    with quiet():
        from keras_vit import converters

        path = converters.convert(
            source,
            target,
            format=to,
            image_size=size(image_size),
            num_classes=num_classes,
            config=facts(config or []) or None,
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

        same, known = converters.detect(source), facts(config or []) or None
        path = converters.convert(source, target, format=same, image_size=size(image_size), config=known)
    typer.echo(str(path))


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name, or a .toml file of your own.", autocompletion=complete_recipe)
    ],
    model: Annotated[str, typer.Option(help="A model of the zoo, or a checkpoint.", autocompletion=complete_model)],
    data: Annotated[
        str, typer.Option(help="A data set of tensorflow-datasets, or a folder of folders of images.")
    ] = "digits",
    out: Annotated[Path | None, typer.Option(help="Where model, log and checkpoints go; else runs/...")] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="What to begin with: a tag of the model's card, a path.", autocompletion=complete_weights),
    ] = None,
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

    given = {"image_size": size(image_size), "steps": steps, "variant": variant}
    fields = {name: value for name, value in given.items() if value is not None} | facts(changes or [], "--set")
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
    model: Model,
    data: Annotated[str, typer.Option(help="As for train.")] = "digits",
    split: Annotated[str | None, typer.Option(help="Which part; else the held-out one.")] = None,
    weights: Weights = None,
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
        from keras_vit import train as training

        loaded = load(model, weights, image_size)
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
    tell(evaluation, as_json)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="An architecture, such as ViT-L/16.", autocompletion=complete_model)],
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
        image_size=size(image_size),
        batch_size=batch,
        devices=devices,
        accumulation=accumulation,
        optimizer=optimizer,
        precision=precision,
        remat=remat,
        ema=ema,
        peak_tflops=peak_tflops,
    )
    tell(planned, as_json)


app.command("export")(export.export)
app.command("verify")(export.verify)
app.command("visualize")(visualize.visualize)
app.command("bench")(bench.bench)
app.command("gallery")(gallery.gallery)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the exported files and the report go.")] = Path("demo"),
    look: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in a browser.")] = True,
) -> None:
    """The tour on the embedded model, offline: load, classify, resize, fine-tune, export, verify, inspect."""
    with quiet():
        from keras_vit.cli import demo as tour

        tour.run(out, look=look)


def main() -> None:
    """Runs the command; what a user can mend is one line on standard error and exit code 1."""
    try:
        app()
    except MENDABLE as error:
        message = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else error
        sys.exit(f"keras-vit: {message}")


def _slug(text: str) -> str:
    """The text as the name of one folder."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")


if __name__ == "__main__":
    main()
