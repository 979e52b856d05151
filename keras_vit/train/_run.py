"""Run a whole training, in the order of events: request, recipe, model, data, head start, state, run."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_vit._util.progress import print_line as print_to_stderr
from keras_vit.dense.model import DenseModel
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import head_start, prepare, strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train._recipe import recipe as load_recipe
from keras_vit.train.checkpoints import EarlierRun, check_run_folder, plain_path, read_run
from keras_vit.train.data.sources import open_data
from keras_vit.train.data.split import DataRequest
from keras_vit.train.distill import load_teacher
from keras_vit.train.execute import Result, execute
from keras_vit.train.label_check import check_training
from keras_vit.train.probe import Probe
from keras_vit.train.steps import Steps


def run(
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    model: str | os.PathLike[str] | ViTConfig | VisionTransformer | DenseModel | None = None,
    data: Any = None,
    out: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | VisionTransformer | None = None,
    continue_from: str | os.PathLike[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    strategy: str | tf.distribute.Strategy = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    train_split: str | None = None,
    eval_split: str | None = None,
    on_bad_image: str = "skip",
    mask_values: str | Sequence[int | str] | None = None,
    progress: bool = True,
) -> Result:
    """Train a model by a recipe; with the `out` of a run that was stopped or killed, continue that run.

    A continued run ends with the same weights, bit for bit, as one that was not interrupted.

    Args:
        recipe: such as `train.recipe("finetune", steps=500)`, or the name or file of one, such as "segment-folder";
            with `continue_from`, None takes that run's.
        model: a name of the zoo, a checkpoint, a config (random weights) or a model, which is not changed. LoRA of a
            model is added to its kernels; the recipe's `lora_rank` gives new LoRA.
        data: a data set of tensorflow-datasets, a folder of folders of images, a folder of images/ and masks/ or
            depth/, a folder of prepared records, or {"train": (images, labels), "evaluation": (images, labels)}:
            pixels (n, height, width, channels) from 0 to 255, or of the values that the model's preprocessing states;
            and integers (n,) or (n, 1), zeros and ones (n, classes), or maps (n, height, width), integers for classes
            and floats for metres. "digits" is the data set that comes with the package. With `continue_from`, None
            takes that run's.
        out: folder for model, log and checkpoints; None writes no files.
        weights: initial weights for a model's name: a tag of its card, a path or a URL.
        teacher: model that this one learns from, for recipes such as "distill": a name of the zoo, a path, the folder
            of a run, or a model. It may have another family, resolution and patch size. With `continue_from`, None
            takes that run's.
        continue_from: folder of another run, in place of `model`: a new run begins with its last weights and keeps its
            head. Steps, schedule and optimizer begin anew.
        changes: fields of the recipe to change, such as {"steps": 500}.
        strategy: name as for `train.strategy`, or its result.
        data_dir: where tensorflow-datasets keeps prepared data; None for its default folder.
        train_split: part to train on: a split such as "train[:90%]", the name of a sub-folder, or "all" of a folder.
        eval_split: part to evaluate on, in the same form.
        on_bad_image: "skip" leaves out files of a folder that cannot be decoded, counts them, and names them in a
            warning at the end; "fail" raises an error at the first.
        mask_values: the value in masks of each class, in the order of the classes, where masks have others than the
            numbers of classes: (0, 255), "0,128,255", or colours such as "#ff0000". 255 does not count unless it is one
            of them. None takes numbers, or where only 0 and one other value occur, 255 or larger or a colour, these as
            two classes, with a warning.
        progress: whether to write to standard error: a progress bar on a terminal, and a line for each evaluation.

    Raises:
        ValueError: An argument is not valid, or fewer than two classes occur in the labels; before the first step.
        DivergedError: Loss or weights are not finite; earlier checkpoints are kept.
        CheckpointError: `out` holds a run with another recipe, model or data, or only damaged checkpoints.

    Example:
        >>> config = keras_vit.ViTConfig.from_name("Ti/8", image_size=16, num_layers=1, hidden_size=12)
        >>> recipe = keras_vit.train.recipe("digits", steps=1, batch_size=8, optimizer="sgd", xla=False)
        >>> images, labels = np.zeros((8, 16, 16, 3), "uint8"), np.arange(8)
        >>> result = keras_vit.train.run(recipe, model=config, data={"train": (images, labels)}, progress=False)
        >>> result.steps, result.stopped
        (1, False)
    """
    asked = DataRequest(
        data=data,
        data_dir=data_dir,
        train_split=train_split,
        eval_split=eval_split,
        on_bad_image=on_bad_image,
        mask_values=mask_values,
    )
    return carry_out(Request(recipe, model, asked, out, weights, teacher, continue_from, changes, strategy, progress))


@dataclass(frozen=True)
class Request:
    """The arguments of `run`."""

    recipe: Any
    model: Any
    data: DataRequest
    out: str | os.PathLike[str] | None = None
    weights: str | os.PathLike[str] | None = None
    teacher: Any = None
    continue_from: str | os.PathLike[str] | None = None
    changes: Mapping[str, Any] | None = None
    strategy: str | tf.distribute.Strategy = "auto"
    progress: bool = True


def carry_out(request: Request) -> Result:
    """Do what `run` is asked for. No file is written before all parts of the run are valid."""
    strategies.check_backend()
    devices = strategies.strategy(request.strategy) if isinstance(request.strategy, str) else request.strategy
    print_line = print_to_stderr if request.progress and strategies.is_chief(devices) else lambda _: None
    if request.out is not None and strategies.is_chief(devices):
        check_run_folder(plain_path(request.out))

    # Recipe, model and data
    request, earlier = _complete(request)
    recipe: Recipe = request.recipe
    source = prepare.choose_model(recipe, request.model, request.weights)
    teacher = load_teacher(recipe, request.teacher)
    needs_labels = not recipe.has_teacher or recipe.label_weight > 0
    has_single_class = recipe.objective == "sigmoid"
    data = open_data(dataclasses.replace(request.data, needs_labels=needs_labels, has_single_class=has_single_class))
    if line := check_training(data, recipe):
        print_line(line)
    if teacher and recipe.trains_head:
        data = teacher.match(data)
    if earlier is not None:
        earlier.check_classes(data)

    # The head of a probe, in a run of its own
    how: Any = {"start": prepare.describe_start(source), "print_line": print_line, "show": request.progress}
    if recipe.head_start == "probe" and earlier is None:
        begun = head_start.begin(recipe, source, data, devices, request.data, request.out, **how)
        if isinstance(begun, Result):
            return begun
        source, recipe = begun, recipe.replace(reset_head=False)

    # State and run
    state: Probe | Steps
    if recipe.optimizer == "least_squares":
        state = Probe(recipe, source, data, devices, print_line)
    else:
        built, data = prepare.build_state(
            recipe, source, data, devices, teacher=teacher, out=request.out, print_line=print_line
        )
        in_steps = head_start.StepsFromProbe if recipe.head_start == "probe" else Steps
        state = in_steps(built, data, teacher, print_line)
    result = execute(state, data, request.data, request.out, **how)
    data.training_split().warn_skipped()
    return result


def _complete(request: Request) -> tuple[Request, EarlierRun | None]:
    """Read the recipe, and take what is not given from the earlier run that is continued, if there is one."""
    recipe, model, data, teacher, earlier = request.recipe, request.model, request.data, request.teacher, None
    if isinstance(recipe, str | os.PathLike):
        recipe = load_recipe(recipe)
    if not isinstance(recipe, Recipe | None):
        raise ValueError(f"recipe must be a Recipe: write train.recipe(name). Received: {recipe!r:.200}")
    if request.continue_from is not None:
        if model is not None or request.weights is not None:
            raise ValueError(
                f"Give model or continue_from, not both. Received: {model or request.weights!r:.200}, "
                f"{request.continue_from}"
            )
        earlier = read_run(request.continue_from, request.out)
        recipe = recipe.replace(reset_head=False) if recipe else earlier.recipe
        model, data = earlier.model, earlier.complete(data)
        teacher = earlier.teacher if teacher is None else teacher
    if recipe is None or model is None:
        missing = " and no ".join(name for name, value in {"recipe": recipe, "model": model}.items() if value is None)
        raise ValueError(f"Give a recipe and a model, or continue_from. Received: no {missing}")
    if data.data is None:
        raise ValueError(
            "data must say what to train on: a folder of images, the name of a data set, arrays, or 'digits'. "
            "Received: None"
        )
    recipe = recipe.replace(**request.changes) if request.changes else recipe
    return dataclasses.replace(request, recipe=recipe, model=model, data=data, teacher=teacher), earlier
