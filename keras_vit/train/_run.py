"""Run a whole training: build the parts, restore them, train, evaluate, write the model."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
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
from keras_vit.train import prepare, strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train.checkpoints import (
    Checkpoints,
    check_run_folder,
    exclusive,
    make_folder,
    newest,
    plain_path,
    read_run,
)
from keras_vit.train.data.sources import open_data
from keras_vit.train.data.split import Data, DataRequest
from keras_vit.train.distill import Teacher, load_teacher
from keras_vit.train.log_files import Log, MetricLogger, plot
from keras_vit.train.loop import Best, HeldOut, Stop, cannot_evaluate, save_model, train
from keras_vit.train.probe import Probe
from keras_vit.train.recipe_files import recipe as load_recipe
from keras_vit.train.step import TrainState

FINGERPRINT = "data.fingerprint"  # among the facts of a checkpoint
# What may differ when a run is continued, because it does not influence the weights. The exception is accumulation: it
# changes rounding and dropout masks, but so does another number of devices, which may need another accumulation.
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
    "recipe.steps_per_call",
)
PROBE = "probe"  # folder of the run that finds the first head, in that of the training
OF_PROBE = {"image_size", "config", "layers", "precision", "seed"}  # fields of a recipe on which that head depends
_SHARED_PROBE: ContextVar[str | None] = ContextVar("folder of the probe that several runs begin with", default=None)
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
        history: lines that this process logged: dicts with "step" and metrics.
        steps: number of steps done, those before a restart included.
        images_per_second: training speed, in this process.
        skipped: number of training images that were left out because they cannot be decoded, of those that this
            process has read: a run that ends within its first epoch does not read all.
        unread: number of other files and folders in the class folders of a folder, which are not read.
        out: folder with the model, log and checkpoints; None if none was given, or another worker writes.
        stopped: whether a signal ended the run early; the same call continues it.
        best: the best evaluation of the run, and the file of its model; None without held-out images.

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
            depth/, a folder of prepared records, or {"train": (images, labels), "evaluation": (images, labels)}: uint8
            (n, height, width, channels), and integers (n,), zeros and ones (n, classes), or maps (n, height, width),
            integers for classes and floats for metres. "digits" is the data set that comes with the package. With
            `continue_from`, None takes that run's.
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
        progress: whether to write to standard error: a progress bar on a terminal, and a line for each evaluation.

    Raises:
        ValueError: An argument is not valid; before the first step.
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
    strategies.check_backend()
    devices = strategies.strategy(strategy) if isinstance(strategy, str) else strategy
    print_line = print_to_stderr if progress and strategies.is_chief(devices) else lambda _: None
    request = DataRequest(
        data=data, data_dir=data_dir, train_split=train_split, eval_split=eval_split, on_bad_image=on_bad_image
    )

    if out is not None and strategies.is_chief(devices):
        check_run_folder(plain_path(out))

    # The recipe; the model and the data that it is for, or those of an earlier run.
    earlier = None
    if isinstance(recipe, str | os.PathLike):
        recipe = load_recipe(recipe)
    if not isinstance(recipe, Recipe | None):
        raise ValueError(f"recipe must be a Recipe: write train.recipe(name). Received: {recipe!r:.200}")
    if continue_from is not None:
        if model is not None or weights is not None:
            raise ValueError(
                f"Give model or continue_from, not both. Received: {model or weights!r:.200}, {continue_from}"
            )
        earlier = read_run(continue_from, out)
        recipe = recipe.replace(reset_head=False) if recipe else earlier.recipe
        model, request = earlier.model, earlier.complete(request)
        teacher = earlier.teacher if teacher is None else teacher
    if recipe is None or model is None:
        missing = " and no ".join(name for name, value in {"recipe": recipe, "model": model}.items() if value is None)
        raise ValueError(f"Give a recipe and a model, or continue_from. Received: no {missing}")
    recipe = recipe.replace(**changes) if changes else recipe
    if request.data is None:
        raise ValueError(
            "data must say what to train on: a folder of images, the name of a data set, arrays, or 'digits'. "
            "Received: None"
        )

    # The parts of the run. No file is written before all of them are valid.
    source = prepare.choose_model(recipe, model, weights)
    loaded_teacher = load_teacher(recipe, teacher) if recipe.has_teacher or teacher is not None else None
    needs_labels = not recipe.has_teacher or recipe.label_weight > 0
    dataset = open_data(dataclasses.replace(request, needs_labels=needs_labels))
    if loaded_teacher and recipe.trains_head:
        dataset = loaded_teacher.match(dataset)
    if earlier is not None:
        earlier.check_classes(dataset)
    state: TrainState | Probe
    finish = functools.partial(_train_to_the_end, request=request, print_line=print_line, progress=progress)
    if recipe.head_start == "probe" and earlier is None:
        first = _begin(recipe, source, dataset, devices, out=out, print_line=print_line, finish=finish)
        if isinstance(first, Result):  # stopped
            return first
        source, recipe = first, recipe.replace(reset_head=False)
    if recipe.optimizer == "least_squares":  # no steps
        state = Probe(recipe, source, dataset, devices, print_line)
    else:
        state, dataset = prepare.build_state(
            recipe, source, dataset, devices, teacher=loaded_teacher, out=out, print_line=print_line
        )
    result = finish(state, dataset, teacher=loaded_teacher, out=out)
    dataset.training_split().warn_skipped()
    return result


@contextlib.contextmanager
def sharing_probe(folder: str | None) -> Iterator[None]:
    """Let the runs inside, of one model and data, begin with the head of one probe, whose folder this is."""
    token = _SHARED_PROBE.set(folder)
    try:
        yield
    finally:
        _SHARED_PROBE.reset(token)


def _begin(
    recipe: Recipe,
    source: prepare.Source,
    data: Data,
    devices: tf.distribute.Strategy,
    *,
    out: str | os.PathLike[str] | None,
    print_line: Callable[[str], None],
    finish: Callable[..., Result],
) -> prepare.Source | Result:
    """Find the head that a training begins with, in a run of its own; return the model, or the run if it is stopped.

    A training that has begun has its weights in its own checkpoints.
    """
    whole = None if out is None else plain_path(out)
    folder = _SHARED_PROBE.get() or (None if whole is None else f"{whole}/{PROBE}")
    if folder is not None and newest(f"{whole}/checkpoints") and tf.io.gfile.exists(f"{folder}/model.keras"):
        return prepare.load_model(recipe, prepare.choose_model(recipe, folder))
    probe = Probe(_probe_recipe(recipe, devices), source, data, devices, print_line)
    result = finish(probe, data, teacher=None, out=folder)
    return result if result.stopped else result.model


def _probe_recipe(recipe: Recipe, devices: tf.distribute.Strategy) -> Recipe:
    """Make the recipe of the probe whose head a training has."""
    probe = dataclasses.replace(load_recipe("linear-probe"), **{name: getattr(recipe, name) for name in OF_PROBE})
    replicas = devices.num_replicas_in_sync
    batch = replicas * max(1, probe.batch_size // replicas)
    return dataclasses.replace(probe, batch_size=batch, changed=(recipe.changed or frozenset()) & OF_PROBE)


def _solve_again(
    state: TrainState, data: Data, held_out: HeldOut, stop: Stop, *, show: bool
) -> dict[str, float] | None:
    """Move a solved head half of the way to one for the trained features; evaluate it, or return None if stopped.

    The last checkpoint has the head before it: a run that continues does this again.
    """
    recipe = dataclasses.replace(_probe_recipe(state.recipe, state.strategy), layers=1, config={})  # as the model is
    images = dataclasses.replace(data, evaluation=None)
    probe = Probe(recipe, held_out.copy_model(), images, state.strategy, lambda _: None)
    if probe.run(None, None, stop, print_line=lambda _: None, show=show)["stopped"]:
        return None
    head = state.model.get_layer("head")
    with state.strategy.scope():
        pairs = zip(head.get_weights(), probe.model.get_layer("head").get_weights(), strict=True)
        head.set_weights([(first + second) / 2 for first, second in pairs])
    return held_out.evaluate(state.total_steps)


def _train_to_the_end(
    state: TrainState | Probe,
    dataset: Data,
    *,
    request: DataRequest,
    teacher: Teacher | None,
    out: str | os.PathLike[str] | None,
    print_line: Callable[[str], None],
    progress: bool,
) -> Result:
    """Restore the newest checkpoint, continue to the end, and write the files of the run."""
    if out is not None and strategies.is_chief(state.strategy):
        check_run_folder(plain_path(out))
    folder = None if out is None else make_folder(out)
    own_folder = folder if strategies.is_chief(state.strategy) else None
    is_probe = isinstance(state, Probe)
    with contextlib.ExitStack() as stack:
        if own_folder is not None:
            stack.enter_context(exclusive(own_folder))
        stop = stack.enter_context(Stop())
        checkpoints = None if folder is None else _open_checkpoints(folder, state, dataset, request, teacher)
        restored = _restore(checkpoints, state) if checkpoints else None
        if reason := cannot_evaluate(state.recipe, dataset):
            print_line(f"Nothing to evaluate on: {reason}")
        log = Log(own_folder, last_step=None if is_probe else restored) if own_folder is not None else None
        if isinstance(state, Probe):
            if restored:
                print_line(f"{folder} continues after {restored:,} of {state.total:,} images.")
            trained = state.run(checkpoints, log, stop, print_line=print_line, show=progress)
        else:
            held_out = HeldOut(state, dataset, folder=own_folder, is_new=restored is None, print_line=print_line)
            done, total = restored or 0, state.total_steps
            show = progress and strategies.is_chief(state.strategy) and done < total
            bar = stack.enter_context(contextlib.ExitStack())
            advance = bar.enter_context(counter("Training", total=total, done=done, show=show))
            logger = MetricLogger(
                log,
                advance,
                metrics=state.objective.metrics,
                batch_size=state.recipe.batch_size,
                steps=total - done,
                print_line=print_line,
            )
            if done >= total:  # the log of a finished run has these metrics already
                print_line(FINISHED.format(folder=folder, total=total))
                metrics: dict[str, float] | None = held_out.evaluate(total, keep=False)
            else:
                changed = state.recipe.changed or frozenset()
                if done:
                    print_line(f"{folder} continues after step {done:,} of {total:,}.")
                elif state.recipe.head_start == "probe":
                    logger.log_evaluation(0, held_out.evaluate(0))
                if not done and changed & {"steps", "epochs"} and not changed & {"warmup_steps", "warmup_fraction"}:
                    print_line(f"warm-up: {state.recipe.resolved_warmup(total):,} of {total:,} steps")
                metrics = train(state, dataset, logger=logger, checkpoints=checkpoints, held_out=held_out, stop=stop)
            if metrics is not None and state.recipe.head_start == "probe" and not state.trains_head:
                bar.close()  # the next one is that of the features
                print_line("the head becomes the mean of itself and of a head for the trained features")
                metrics = _solve_again(state, dataset, held_out, stop, show=progress)
                if metrics and done < total:
                    logger.log_evaluation(total, metrics)
            final, final_metrics = held_out.final_model(metrics)
            trained = {
                "model": final,
                "metrics": final_metrics,
                "history": logger.history,
                "steps": int(state.step.numpy()),
                "images_per_second": logger.images_per_second,
                "stopped": metrics is None,
                "best": held_out.best,
            }
        if log:
            log.close()
        if own_folder is not None and not trained["stopped"]:
            save_model(trained["model"], f"{own_folder}/model.keras")
            if not is_probe and importlib.util.find_spec("matplotlib"):  # the extra `plots`
                plot(own_folder)
    split = dataset.training_split()
    return Result(recipe=state.recipe, skipped=split.num_skipped, unread=len(split.unread), out=own_folder, **trained)


def _restore(checkpoints: Checkpoints, state: TrainState | Probe) -> int | None:
    """Restore the newest checkpoint; say if it is of other images or labels, of which a probe keeps no features."""
    restored = checkpoints.restore()
    if restored is None or FINGERPRINT not in checkpoints.changed:
        return restored
    if isinstance(state, Probe):
        state.forget()
        checkpoints.clear()
        warn(f"{checkpoints.folder}: {CHANGED}: all features are computed again")
        return None
    warn(f"{checkpoints.folder}: {CHANGED}: training goes on with the data as they are now")
    return restored


def _open_checkpoints(
    folder: str, state: TrainState | Probe, data: Data, request: DataRequest, teacher: Teacher | None
) -> Checkpoints:
    """Open the checkpoints of a run, which the first worker writes."""
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
    if isinstance(state.model, DenseModel):
        facts["head"] = state.model.head.to_dict()
    if teacher:
        facts["teacher"] = teacher.facts()
    if isinstance(state, Probe):  # features of two models must not mix; a run's own checkpoints have its weights
        facts["weights"] = state.fingerprint()
    return Checkpoints(
        f"{folder}/checkpoints",
        state.variables,
        keep=state.recipe.keep,
        facts=facts,
        may_differ=MAY_DIFFER,
        writes=strategies.is_chief(state.strategy),
    )
