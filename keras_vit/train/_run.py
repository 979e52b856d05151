"""Run a whole training, in the order of events: request, recipe, model, data, state, restore, loop, write."""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_vit._util import html
from keras_vit._util.progress import counter
from keras_vit._util.progress import print_line as print_to_stderr
from keras_vit._util.text import warn
from keras_vit.dense.model import DenseModel
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import head_start, prepare, strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train._recipe import recipe as load_recipe
from keras_vit.train.checkpoints import (
    FINAL_MODEL,
    Checkpoints,
    EarlierRun,
    check_run_folder,
    exclusive,
    make_folder,
    plain_path,
    read_run,
)
from keras_vit.train.data.sources import open_data
from keras_vit.train.data.split import Data, DataRequest
from keras_vit.train.distill import Teacher, load_teacher
from keras_vit.train.held_out import Best, HeldOut, Outcome, cannot_evaluate, save_model
from keras_vit.train.label_check import check_training
from keras_vit.train.log_files import Log, MetricLogger, plot
from keras_vit.train.loop import train
from keras_vit.train.probe import Probe
from keras_vit.train.step import TrainState
from keras_vit.train.stop import Stop

FINGERPRINT = "data.fingerprint"  # among the facts of a checkpoint
# Facts without influence on the weights, and accumulation: it changes rounding and dropout masks, as the number of
# devices does, and on other devices another number of micro-batches may fit.
MAY_DIFFER = (
    "data.arguments",
    FINGERPRINT,
    "teacher.source",
    "recipe.accumulation",
    "recipe.log_steps",
    "recipe.checkpoint_steps",
    "recipe.checkpoint_minutes",
    "recipe.keep",
    "recipe.eval_steps",
    "recipe.calibrate",
    "recipe.steps_per_call",
)
MOST_METRICS = 5  # that are printed of a result; `metrics` has all
CHANGED = "the images or labels, or the times of their files, are not those of the run before"
FINISHED = (
    "{folder} is finished: all {total:,} steps are done. To train longer, start a new run from its weights: "
    "keras-vit train --continue-from {folder} --steps N, or train.run(continue_from=...)."
)


@dataclass(frozen=True)
class Result:
    """Result of a training run.

    Args:
        model: with the final weights or their moving averages, or of a run that began with a probe those of its best
            evaluation; outside of any strategy; after masked_patch the encoder.
        recipe: the recipe that was used.
        metrics: results of its evaluation: "accuracy" and "top5" in [0, 1], "loss"; empty without held-out images.
            With class_weights also "balanced_accuracy", as scikit-learn's (of "sigmoid" without "least_squares" not).
            Of several labels for an image: "mean_average_precision", "accuracy" and "loss", see `Evaluation`.
        history: lines that this process logged: dicts with "step" and metrics.
        steps: number of steps done, those before a restart included.
        images_per_second: training speed, in this process.
        skipped: number of training images that were left out because they cannot be decoded, of those that this
            process has read: a run that ends within its first epoch does not read all.
        unread: number of other files and folders in the class folders of a folder, which are not read.
        out: folder with the model, log and checkpoints; None if none was given, or another worker writes.
        stopped: whether a signal ended the run early; the same call continues it.
        best: the best evaluation of the run, and the file of its model; None without held-out images.
        temperature: the number by which the logits are divided, for the least cross-entropy on the held-out images, and
            which the model's head contains; of a linear probe, its scores, on training images that the fits had not
            seen. None without one: no softmax, `calibrate` is False, or none is the best (all images are right).

    Example:
        >>> import dataclasses
        >>> [field.name for field in dataclasses.fields(keras_vit.train.Result)][:3]
        ['model', 'recipe', 'metrics']
    """

    model: VisionTransformer | DenseModel
    recipe: Recipe
    metrics: dict[str, float]
    history: list[dict[str, float]]
    steps: int
    images_per_second: float
    skipped: int
    unread: int
    out: str | None
    stopped: bool
    best: Best | None = None
    temperature: float | None = None

    def __repr__(self) -> str:
        """Results as lines, as `print` shows them."""
        lines = [f"{name}: {value}" for name, value in self._facts().items() if value is not None]
        return "\n  ".join([f"Result of {self.recipe.name}", *lines])

    def _repr_html_(self) -> str:
        """Results as a table for notebooks."""
        return html.facts(self.recipe.name, self._facts())

    def _facts(self) -> dict[str, str | int | None]:
        best = f"step {self.best.step:,}, {self.best.path or 'not saved'}" if self.best else None
        return {
            **{name: f"{value:.4f}" for name, value in [*self.metrics.items()][:MOST_METRICS]},
            "temperature": None if self.temperature is None else f"{self.temperature:.3g}",
            "steps": f"{self.steps:,}" + " (stopped: the same call resumes the run)" * self.stopped,
            "best model": best,
            "images/s": f"{self.images_per_second:,.0f}",
            "unreadable images": self.skipped or None,
            "folder": self.out,
        }


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
    if recipe.head_start == "probe" and earlier is None:
        out = None if request.out is None else plain_path(request.out)
        folder = None if out is None else f"{out}/{head_start.PROBE}"
        found = head_start.finished_probe(recipe, out, folder)
        if found is None:
            own = head_start.probe_recipe(recipe, devices)
            first = _train(Probe(own, source, data, devices, print_line), data, request, folder, print_line)
            if first.stopped:
                return first
            found = first.model
        source, recipe = found, recipe.replace(reset_head=False)

    # State
    state: Probe | Steps
    if recipe.optimizer == "least_squares":
        state = Probe(recipe, source, data, devices, print_line)
    else:
        built, data = prepare.build_state(
            recipe, source, data, devices, teacher=teacher, out=request.out, print_line=print_line
        )
        state = Steps(built, data, teacher)
    result = _train(state, data, request, request.out, print_line)
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


class Steps:
    """Training in steps. `Probe`, which has none, has the same attributes and methods."""

    has_curves = True

    def __init__(self, state: TrainState, data: Data, teacher: Teacher | None) -> None:
        self.recipe, self.model = state.recipe, state.model
        self.strategy, self.variables = state.strategy, state.variables
        self._state, self._data, self._teacher = state, data, teacher

    def facts(self) -> dict[str, Any]:
        """Facts of a checkpoint: the head for maps and the teacher, if there are any."""
        head = {"head": self.model.head.to_dict()} if isinstance(self.model, DenseModel) else {}
        return head | ({"teacher": self._teacher.facts()} if self._teacher else {})

    def accept_other_data(self, _: Checkpoints) -> str:
        """Say what is done if the images or labels have changed: nothing."""
        return "training goes on with the data as they are now"

    def run(
        self, checkpoints: Checkpoints | None, stop: Stop, *, print_line: Callable[[str], None], show: bool
    ) -> Outcome:
        """Train until the last step or a signal, and evaluate."""
        state, data, recipe, total = self._state, self._data, self.recipe, self._state.total_steps
        done, starts_with_probe = int(state.step.numpy()), recipe.head_start == "probe"
        folder = checkpoints.run_folder if checkpoints else None
        log = Log(folder, last_step=done or None) if folder is not None else None
        held_out = HeldOut(
            state, data, folder=folder, is_new=not done, keeps_weights=starts_with_probe, print_line=print_line
        )
        show_bar = show and strategies.is_chief(state.strategy) and done < total
        with counter("Training", total=total, done=done, show=show_bar) as advance:
            logger = MetricLogger(
                log,
                advance,
                metrics=state.objective.metrics,
                batch_size=recipe.batch_size,
                steps=total - done,
                print_line=print_line,
            )
            if done >= total:  # the log of a finished run has these metrics already
                print_line(FINISHED.format(folder=folder, total=total))
                metrics: dict[str, float] | None = held_out.evaluate(total, keep=False)
            else:
                if done:
                    print_line(f"{folder} continues after step {done:,} of {total:,}.")
                elif starts_with_probe:
                    logger.log_evaluation(0, held_out.evaluate(0))
                changed = recipe.changed or frozenset()
                if not done and changed & {"steps", "epochs"} and not changed & {"warmup_steps", "warmup_fraction"}:
                    print_line(f"warm-up: {recipe.resolved_warmup(total):,} of {total:,} steps")
                metrics = train(state, data, logger=logger, checkpoints=checkpoints, held_out=held_out, stop=stop)
        if metrics is not None and starts_with_probe and not state.trains_head:
            print_line("the head becomes the mean of itself and of a head for the trained features")
            metrics = head_start.solve_again(state, data, held_out, stop, show=show)
            if metrics and done < total:
                logger.log_evaluation(total, metrics)
        if log:
            log.close()
        is_stopped, steps, speed = metrics is None, int(state.step.numpy()), logger.images_per_second
        if starts_with_probe:
            model, metrics = head_start.best_model(held_out, metrics or {}, print_line)
        else:
            model = held_out.evaluated_model() if metrics else held_out.copy_model()
        temperature = held_out.temperature if metrics else None
        return Outcome(model, metrics or {}, logger.history, steps, speed, is_stopped, held_out.best, temperature)


def _train(
    state: Probe | Steps,
    data: Data,
    request: Request,
    out: str | os.PathLike[str] | None,
    print_line: Callable[[str], None],
) -> Result:
    """Restore the newest checkpoint in `out`, continue to the end, and write the model."""
    is_chief = strategies.is_chief(state.strategy)
    if out is not None and is_chief:
        check_run_folder(plain_path(out))
    folder = None if out is None else make_folder(out)
    with contextlib.ExitStack() as stack:
        if folder is not None and is_chief:
            stack.enter_context(exclusive(folder))
        stop = stack.enter_context(Stop())
        checkpoints = None if folder is None else _restore(folder, state, data, request.data)
        if reason := cannot_evaluate(state.recipe, data):
            print_line(f"Nothing to evaluate on: {reason}")
        outcome = state.run(checkpoints, stop, print_line=print_line, show=request.progress)
        own_folder = folder if is_chief else None
        if own_folder is not None and not outcome.stopped:
            save_model(outcome.model, f"{own_folder}/{FINAL_MODEL}")
            if state.has_curves and importlib.util.find_spec("matplotlib"):  # the extra `plots`
                plot(own_folder)
    split, learned = data.training_split(), vars(outcome)
    return Result(recipe=state.recipe, skipped=split.num_skipped, unread=len(split.unread), out=own_folder, **learned)


def _restore(folder: str, state: Probe | Steps, data: Data, request: DataRequest) -> Checkpoints:
    """Open the checkpoints of a run, which the first worker writes, and restore the newest one."""
    facts: dict[str, Any] = {
        "recipe": state.recipe.to_dict(),
        "model": state.model.config.to_dict(),
        "data": {
            "name": data.name,
            "count": data.training_split().count,
            "num_classes": data.num_classes,
            "fingerprint": data.fingerprint(),
            "arguments": request.stored(),  # for another run that continues from this one
        },
    }
    checkpoints = Checkpoints(
        f"{folder}/checkpoints",
        state.variables,
        keep=state.recipe.keep,
        facts=facts | state.facts(),
        may_differ=MAY_DIFFER,
        writes=strategies.is_chief(state.strategy),
    )
    if checkpoints.restore() is not None and FINGERPRINT in checkpoints.changed:
        warn(f"{checkpoints.folder}: {CHANGED}: {state.accept_other_data(checkpoints)}")
    return checkpoints
