"""The commands `keras-vit train`, `keras-vit evaluate` and `keras-vit plan`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from keras_vit._util.checks import given
from keras_vit._util.fields import option_names
from keras_vit.cli import options
from keras_vit.train._recipe import SLOTS, Recipe

if TYPE_CHECKING:
    from keras_vit.train import Result

DATA_HELP = "digits, a data set of tensorflow-datasets, or a folder of folders of images."


@options.takes(*options.field_options(Recipe, *option_names(Recipe)))
def train(
    recipe: Annotated[
        str | None,
        Argument(help="A recipe's name, or a .toml file of your own.", autocompletion=options.complete_recipe),
    ] = None,
    model: Annotated[str | None, Option(help=options.MODEL_HELP, autocompletion=options.complete_model)] = None,
    data: Annotated[str | None, Option(help=DATA_HELP)] = None,
    out: Annotated[Path | None, options.folder("Folder for model, log and checkpoints; default: runs/...")] = None,
    weights: Annotated[
        str | None,
        Option(
            help="Initial weights: a tag of the model's card, a path or a URL.", autocompletion=options.complete_weights
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        Option(help="Model to learn from, for recipes such as distill.", autocompletion=options.complete_model),
    ] = None,
    config: options.ConfigFields = None,
    accept_license: options.License = False,
    continue_from: Annotated[
        Path | None, Option(help="Folder of a run: start a new one from its weights, with its recipe and data.")
    ] = None,
    add_to: Annotated[
        Path | None, Option(help="Folder of a linear probe: add the classes and images of --data, without its images.")
    ] = None,
    without: Annotated[
        list[str] | None, Option(help="With --add-to: a class to take out of the probe; may be repeated.")
    ] = None,
    changes: Annotated[
        list[str] | None, Option("--set", help="FIELD=VALUE of the recipe, such as seed=1; may be repeated.")
    ] = None,
    tried: Annotated[
        list[str] | None,
        Option("--try", help="FIELD=VALUE,VALUE: a run for each value and a table at the end; may be repeated."),
    ] = None,
    strategy: options.Strategy = "auto",
    data_dir: options.DataDir = None,
    train_split: Annotated[str | None, Option(help='Such as "train[:90%]".')] = None,
    eval_split: Annotated[str | None, Option(help="The split to evaluate on.")] = None,
    on_bad_image: options.BadImage = "skip",
    mask_values: options.MaskValues = None,
    as_json: options.Json = False,
    **stated: Any,
) -> None:
    """Train a model. After an interruption the same command resumes the run exactly."""
    from keras_vit import train as training

    needed = {"RECIPE": recipe, "--model NAME": model, "--data FOLDER (or --data digits)": data}
    missing = [name for name, value in needed.items() if value is None]
    if add_to or without:
        others: dict[str, Any] = {"RECIPE": recipe, "--model": model, "--weights": weights, "--teacher": teacher}
        others["--config"] = config
        others |= {"--continue-from": continue_from, "--set": changes, "--try": tried, "--mask-values": mask_values}
        wrong = [name for name, value in others.items() if value]
        wrong += [f"--{name.replace('_', '-')}" for name in given(**stated)]
        if wrong or not add_to:
            raise ValueError(
                "--add-to FOLDER takes model, recipe and fields from that run, and --without needs it. Received: "
                f"{', '.join(wrong) or '--without'}"
            )
    elif missing and not continue_from:
        raise typer.BadParameter(
            f"Missing {' and '.join(missing)}. Only --continue-from and --add-to take them from a run."
        )
    if config and continue_from:
        raise ValueError(f"--config is for the file that --model names, not for --continue-from. Received: {config}")
    if continue_from and not continue_from.is_dir():
        raise FileNotFoundError(f"There is no folder of a run {str(continue_from)!r}")
    fields = given(**stated) | options.parse_fields(changes, "--set")
    values = options.parse_lists(tried, "--try", fields)
    if values and (continue_from or not out):
        raise ValueError("--try needs --out FOLDER, in which each run has a folder, and no --continue-from")
    chosen = training.recipe(recipe, **fields) if recipe else None
    if data:
        options.check_data(data, data_dir)
    if chosen and model:
        default = "default" if chosen.start == "pretrained" else None
        found = options.find_model(model, weights, default=default, accept_license=accept_license, config=config)
        found.config.replace(**chosen.config_changes(found.config))
    if teacher:
        options.find_model(teacher, accept_license=accept_license)
    if continue_from or add_to:
        folder = out or Path(f"{continue_from}-continued" if continue_from else f"{add_to}-added")
    else:
        name = f"{chosen.name if chosen else recipe}-{model}-{data}"
        folder = out or Path("runs") / re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-")
    with options.quiet():
        devices = training.strategy(strategy)
        start = found.load() if config else model
    arguments: dict[str, Any] = {
        "data": data,
        "out": folder,
        "strategy": devices,
        "data_dir": data_dir,
        "train_split": train_split,
        "eval_split": eval_split,
        "on_bad_image": on_bad_image,
        "progress": not as_json,
    }
    of_run: dict[str, Any] = {"model": start, "weights": weights, "teacher": teacher, "mask_values": mask_values}
    if chosen and values:
        options.print_result(training.try_values(chosen, values, **arguments, **of_run), as_json)
        return
    if add_to:
        result = training.add_classes(add_to, without=without or (), **arguments)
    else:
        changed = None if chosen else fields
        result = training.run(chosen, continue_from=continue_from, changes=changed, **arguments, **of_run)
    if not as_json:
        options.echo(_result_line(result, folder))
        return
    shown = {
        name: getattr(result, name) for name in ("steps", "stopped", "skipped", "unread", "metrics", "temperature")
    }
    best = dataclasses.asdict(result.best) if result.best else None
    options.echo(json.dumps({"out": str(folder), **shown, "best": best}, indent=2))


def _result_line(result: Result, folder: Path) -> str:
    if result.stopped:
        return f"Stopped and saved after step {result.steps} in {folder}: the same command resumes the run."
    if result.out is None:
        return f"This worker has done its part of {result.steps} steps; the first worker has written {folder}."
    figures = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    steps = f"{result.steps} steps" if result.steps > 1 else "1 step"
    line = f"{folder}/model.keras after {steps}: {figures or 'nothing to evaluate on'}"
    if result.temperature is not None:
        line += f", temperature {result.temperature:.3g}"
    best = result.best
    if best and best.step < result.steps:
        name, value = next(iter(best.metrics.items()))
        line += f"; best: {best.path} after {best.step}, {name} {value:.4f}"
    if result.skipped:
        line += f"; training images left out because they cannot be read: {result.skipped}"
    if result.unread:
        line += f"; other files or folders left out: {result.unread}"
    return line


@options.takes(*options.MODEL_OPTIONS)
def evaluate(
    model: options.Model,
    data: Annotated[str, Option(help=DATA_HELP)],
    split: Annotated[
        str | None,
        Option(help="The split or sub-folder, all or held-out; default: the held-out one, or all of a plain folder."),
    ] = None,
    batch_size: Annotated[int, options.integer(1, "Images per call on each device.")] = 64,
    strategy: options.Strategy = "auto",
    real: Annotated[bool, Option("--real", help="Several labels for each image, each of them right (ReaL).")] = False,
    few_shot: Annotated[
        list[int] | None,
        options.integer(1, "Instead: fit a linear classifier on this many images per class; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, options.folder("Folder for a page and JSON: accuracy by class, confusion matrix, worst mistakes.")
    ] = None,
    predictions: Annotated[
        bool, Option("--predictions", help="With --out: also predictions.csv, a row an image.")
    ] = False,
    data_dir: options.DataDir = None,
    on_bad_image: options.BadImage = "skip",
    mask_values: options.MaskValues = None,
    as_json: options.Json = False,
    **chosen: Any,
) -> None:
    """Measure a model: top-1, top-5, cross-entropy and images per second; or few-shot accuracy of its features."""
    from keras_vit import train as training

    if predictions and not out:
        raise ValueError("--predictions needs --out FOLDER, the folder for predictions.csv")
    if out and (real or few_shot):
        raise ValueError("--out is for images with one class: leave out --real and --few-shot")
    if out:
        with options.quiet():
            from keras_vit.train.examination import result_paths

        result_paths(out, predictions=predictions)  # before the work
    is_file = options.is_tflite(model)
    found = None if is_file else options.find_model(model, **chosen)
    options.check_data(data, data_dir)
    with options.quiet():
        devices = training.strategy(strategy)  # before TensorFlow loads a model
        loaded = found.load() if found else options.load_file(model, **chosen)
    source: dict[str, Any] = {"data_dir": data_dir, "on_bad_image": on_bad_image, "strategy": devices}
    if few_shot:
        accuracies = training.few_shot(loaded, data, shots=tuple(few_shot), **source)
        rows = [{"shots": shots, "accuracy": accuracy} for shots, accuracy in accuracies.items()]
        lines = [(str(shots), "images per class", f"{accuracy:.2%}") for shots, accuracy in accuracies.items()]
        options.echo(json.dumps(rows, indent=2) if as_json else options.aligned(lines, right=(0, 2)))
        return
    source |= {"split": split, "batch_size": batch_size, "progress": not as_json}
    with options.quiet():
        if out:  # which measures, too
            examined = training.examine(loaded, data, **source)
            evaluation = examined.evaluation
        else:
            labels = "real" if real else None
            evaluation = training.evaluate(loaded, data, labels=labels, mask_values=mask_values, **source)
    options.print_result(evaluation, as_json)
    if out:
        options.echo("\n".join(map(str, examined.write(out, predictions=predictions))), err=as_json)


def plan(
    model: options.Model,
    batch: Annotated[int, options.integer(1, "Images per step, over all devices.")],
    image_size: options.Size = None,
    devices: Annotated[int, options.integer(1, "GPUs or TPU cores.")] = 1,
    accumulation: Annotated[int, options.integer(1, "Micro-batches per step.")] = 1,
    optimizer: Annotated[str, Option(help=f"{' or '.join(SLOTS)}.")] = "adamw",
    precision: Annotated[str, Option(help="float32 or mixed_bfloat16.")] = "float32",
    remat: Annotated[bool, Option("--remat", help="Recompute blocks in the backward pass.")] = False,
    ema: Annotated[bool, Option("--ema", help="Keep a moving average of the weights.")] = False,
    train_only: Annotated[
        list[str] | None, Option(help="norms, biases, lora or a pattern of paths: trained beside the head. Repeatable.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Estimate memory and arithmetic of training before anything is built."""
    from keras_vit import train as training

    found = options.find_model(model, image_size=image_size, default=None)
    with options.quiet():
        planned = training.plan(
            found.config,
            batch_size=batch,
            devices=devices,
            accumulation=accumulation,
            optimizer=optimizer,
            precision=precision,
            remat=remat,
            ema=ema,
            train_only=train_only or (),
        )
    options.print_result(dataclasses.replace(planned, name=found.resolved.name or Path(model).name), as_json)
