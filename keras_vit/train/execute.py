"""Carry out one run in its folder: restore, train to the end or a signal, write the model, and say what came out."""

import contextlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from keras_vit._util import html
from keras_vit._util.text import warn
from keras_vit.dense.model import DenseModel
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train.checkpoints import FINAL_MODEL, Checkpoints, check_run_folder, exclusive, make_folder, plain_path
from keras_vit.train.data.split import Data, DataRequest
from keras_vit.train.held_out import Best, cannot_evaluate, save_model
from keras_vit.train.log_files import plot
from keras_vit.train.prepare import PrintLine
from keras_vit.train.probe import Probe
from keras_vit.train.steps import Steps
from keras_vit.train.stop import Stop

FINGERPRINT, STARTED = "data.fingerprint", "start.weights"  # among the facts of a checkpoint
# Facts without influence on the weights, and accumulation: it changes rounding and dropout masks, as the number of
# devices does, and on other devices another number of micro-batches may fit.
MAY_DIFFER = (
    "data.arguments",
    FINGERPRINT,
    STARTED,
    "teacher.source",
    "recipe.source",
    "recipe.notes",
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
            seen. None without one: no softmax, `calibrate` is False, or none is the best (all images are right); and if
            the best evaluation was in an earlier process, though the head contains its temperature.

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


def execute(
    state: Probe | Steps,
    data: Data,
    asked: DataRequest,
    out: str | os.PathLike[str] | None,
    *,
    start: str,
    print_line: PrintLine,
    show: bool,
) -> Result:
    """Restore the newest checkpoint in `out`, continue to the end, and write the model.

    `asked` is what another run that continues from this one takes its data by, `start` the weights that a new run
    begins with, in words. `show` shows a progress bar.
    """
    is_chief = strategies.is_chief(state.strategy)
    if out is not None and is_chief:
        check_run_folder(plain_path(out))
    folder = None if out is None else make_folder(out)
    with contextlib.ExitStack() as stack:
        if folder is not None and is_chief:
            stack.enter_context(exclusive(folder))
        stop = stack.enter_context(Stop())
        checkpoints = None if folder is None else _restore(folder, state, data, asked, start)
        if reason := cannot_evaluate(state.recipe, data):
            print_line(f"Nothing to evaluate on: {reason}")
        outcome = state.run(checkpoints, stop, show=show)
        own_folder = folder if is_chief else None
        if own_folder is not None and not outcome.stopped:
            save_model(outcome.model, f"{own_folder}/{FINAL_MODEL}")
            if state.has_curves and importlib.util.find_spec("matplotlib"):  # the extra `plots`
                plot(own_folder)
    split, learned = data.training_split(), vars(outcome)
    return Result(recipe=state.recipe, skipped=split.num_skipped, unread=len(split.unread), out=own_folder, **learned)


def _restore(folder: str, state: Probe | Steps, data: Data, asked: DataRequest, start: str) -> Checkpoints:
    """Open the checkpoints of a run, which the first worker writes, and restore the newest one."""
    facts: dict[str, Any] = {
        "recipe": state.recipe.to_dict(),
        "model": state.model.config.to_dict(),
        "data": {
            "name": data.name,
            "count": data.training_split().count,
            "num_classes": data.num_classes,
            "fingerprint": data.fingerprint(),
            "arguments": asked.stored(),  # for another run that continues from this one
        },
        "start": {"weights": start},
    }
    checkpoints = Checkpoints(
        f"{folder}/checkpoints",
        state.variables,
        keep=state.recipe.keep,
        facts=facts | state.facts(),
        may_differ=MAY_DIFFER,
        writes=strategies.is_chief(state.strategy),
    )
    if checkpoints.restore() is None:
        return checkpoints
    if FINGERPRINT in checkpoints.changed:
        warn(f"{checkpoints.folder}: {CHANGED}: {state.accept_other_data(checkpoints)}")
    if STARTED in checkpoints.changed:
        then, now = checkpoints.changed[STARTED]
        warn(f"{folder} continues a run that began with {then}. Not read: {now}. To begin with it, use another folder")
    return checkpoints
