"""Train in steps, from the newest checkpoint to an outcome: log, evaluations, the loop, the model that comes out."""

from __future__ import annotations

import contextlib
from typing import Any

from keras_vit._util.progress import counter
from keras_vit.dense.model import DenseModel
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import strategies
from keras_vit.train.checkpoints import Checkpoints
from keras_vit.train.data.split import Data
from keras_vit.train.distill import Teacher
from keras_vit.train.held_out import HeldOut, Outcome
from keras_vit.train.log_files import Log, MetricLogger
from keras_vit.train.loop import train
from keras_vit.train.prepare import PrintLine
from keras_vit.train.step import TrainState
from keras_vit.train.stop import Stop

FINISHED = (
    "{folder} is finished: all {total:,} steps are done. To train longer, start a new run from its weights: "
    "keras-vit train --continue-from {folder} --steps N, or train.run(continue_from=...)."
)


class Steps:
    """Training in steps. `Probe`, which has none, has the same attributes and methods."""

    has_curves = True
    keeps_best = False  # in memory, where the run has no folder

    def __init__(self, state: TrainState, data: Data, teacher: Teacher | None, print_line: PrintLine) -> None:
        self.recipe, self.model = state.recipe, state.model
        self.strategy, self.variables = state.strategy, state.variables
        self._state, self._data, self._teacher, self._print_line = state, data, teacher, print_line

    def facts(self) -> dict[str, Any]:
        """Facts of a checkpoint: the head for maps and the teacher, if there are any."""
        head = {"head": self.model.head.to_dict()} if isinstance(self.model, DenseModel) else {}
        return head | ({"teacher": self._teacher.facts()} if self._teacher else {})

    def accept_other_data(self, _: Checkpoints) -> str:
        """Say what is done if the images or labels have changed: nothing."""
        return "training goes on with the data as they are now"

    def run(self, checkpoints: Checkpoints | None, stop: Stop, *, show: bool) -> Outcome:
        """Train until the last step or a signal, and evaluate."""
        state, total, print_line = self._state, self._state.total_steps, self._print_line
        done = int(state.step.numpy())
        folder = checkpoints.run_folder if checkpoints else None
        log = Log(folder, last_step=done or None) if folder is not None else None
        with contextlib.closing(log) if log else contextlib.nullcontext():
            held_out = HeldOut(
                state, self._data, folder=folder, is_new=not done, keeps_weights=self.keeps_best, print_line=print_line
            )
            show_bar = show and strategies.is_chief(state.strategy) and done < total
            with counter("Training", total=total, done=done, show=show_bar) as advance:
                logger = MetricLogger(
                    log,
                    advance,
                    metrics=state.objective.metrics,
                    batch_size=self.recipe.batch_size,
                    steps=total - done,
                    print_line=print_line,
                )
                metrics: dict[str, float] | None
                if done >= total:  # the log of a finished run has these metrics already
                    print_line(FINISHED.format(folder=folder, total=total))
                    metrics = held_out.evaluate(total, keep=False)
                else:
                    if done:
                        print_line(f"{folder} continues after step {done:,} of {total:,}.")
                    else:
                        self.begin(logger, held_out)
                    metrics = train(
                        state, self._data, logger=logger, checkpoints=checkpoints, held_out=held_out, stop=stop
                    )
            if metrics is not None:
                metrics = self.end(metrics, logger, held_out, stop, show)
        is_stopped, steps, speed = metrics is None, int(state.step.numpy()), logger.images_per_second
        model, metrics = self.choose_model(metrics or {}, held_out)
        temperature = held_out.temperature if metrics else None
        return Outcome(model, metrics, logger.history, steps, speed, is_stopped, held_out.best, temperature)

    def begin(self, _logger: MetricLogger, _held_out: HeldOut) -> None:
        """Do what comes before the first step of a new run."""
        recipe, total = self.recipe, self._state.total_steps
        changed = recipe.changed or frozenset()
        if changed & {"steps", "epochs"} and not changed & {"warmup_steps", "warmup_fraction"}:
            self._print_line(f"warm-up: {recipe.resolved_warmup(total):,} of {total:,} steps")

    def end(
        self, metrics: dict[str, float], _logger: MetricLogger, _held_out: HeldOut, _stop: Stop, _show: bool
    ) -> dict[str, float] | None:
        """Do what comes after the last step, and return the last metrics; None if stopped."""
        return metrics

    def choose_model(self, metrics: dict[str, float], held_out: HeldOut) -> tuple[VisionTransformer, dict[str, float]]:
        """Choose the model that comes out, and its metrics. {} are those of a run that was stopped or not evaluated."""
        return held_out.evaluated_model() if metrics else held_out.copy_model(), metrics
