"""State of a training run in memory: model, optimizer, averages and step, and the function that updates them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_vit.model.vision_transformer import HEADS, VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.loop import prepare
from keras_vit.train.step import masked_patch, strategies
from keras_vit.train.step.objective import Objective, classification
from keras_vit.train.step.optimizer import Optimizer
from keras_vit.train.step.train_step import Trained, make_train_step


class TrainState:
    """Everything that changes while training. Restoring `variables` continues a run.

    Args:
        recipe: how to train.
        source: model with the initial weights; it is not changed.
        num_images: number of training images.
        num_classes: of the data.
        class_names: of the data; None where the classes have no names.
        strategy: of tf.distribute; all variables are created in its scope.

    Attributes:
        recipe: as given.
        model: the VisionTransformer that is trained.
        total_steps: number of steps of the whole run.
        step: int64 variable, number of steps done.
        optimizer: of the trained variables.
        train_step: see `make_train_step`.
        has_workers: whether several processes train together.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: VisionTransformer,
        *,
        num_images: int,
        num_classes: int,
        class_names: Sequence[str] | None,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self.recipe = recipe
        self.total_steps = recipe.resolved_steps(num_images)
        self.has_workers = strategies.has_workers(strategy)
        with strategy.scope():
            self.model = prepare.adapt_model(recipe, source, num_classes=num_classes, class_names=class_names)
            self._whole_model, objective = _with_objective(recipe, self.model)
            trained = _trained_variables(recipe, self._whole_model)
            variables = [v.value for v in trained]
            self.optimizer = Optimizer(
                recipe,
                variables,
                [v.path for v in trained],
                total_steps=self.total_steps,
                warmup=recipe.resolved_warmup(self.total_steps),
                num_layers=self.model.config.num_layers,
            )
            self._averages = {v.path: _copy(v.value) for v in trained} if recipe.ema_decay else {}
            self.step = tf.Variable(
                0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, name="step"
            )
        self.train_step = make_train_step(
            Trained(
                recipe=recipe,
                model=self._whole_model,
                objective=objective,
                variables=variables,
                optimizer=self.optimizer,
                averages=list(self._averages.values()),
                step=self.step,
                strategy=strategy,
            )
        )

    @property
    def steps_done(self) -> int:
        """Number of steps done; waits for the devices."""
        return int(self.step.numpy())

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """All variables of a checkpoint, by name."""
        return {
            "step": self.step,
            **{f"weights/{v.path}": v.value for v in self._whole_model.weights},
            **{f"optimizer/{name}": slot for name, slot in self.optimizer.slots.items()},
            **{f"average/{name}": average for name, average in self._averages.items()},
        }

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, which is counted from 0."""
        return float(self.optimizer.rate(tf.constant(step, tf.int64)))

    def is_finite(self) -> bool:
        """Whether every number that a checkpoint would hold is finite."""
        return all(bool(tf.reduce_all(tf.math.is_finite(v))) for v in self.variables.values() if v.dtype.is_floating)

    def copy_to(self, model: VisionTransformer) -> None:
        """Copy the moving averages, or without them the weights, into a model of the same config."""
        for target, own in zip(model.weights, self.model.weights, strict=True):
            target.assign(self._averages.get(own.path, own.value).numpy())


def _with_objective(recipe: Recipe, model: VisionTransformer) -> tuple[Any, Objective]:
    """Return the model that is called, with the layers that the objective adds, and the objective."""
    if recipe.objective == "masked_patch":
        return masked_patch.MaskedPatchModel(model), masked_patch.objective(remat=recipe.remat)
    return model, classification(recipe.objective, label_smoothing=recipe.label_smoothing, remat=recipe.remat)


def _trained_variables(recipe: Recipe, model: Any) -> list[Any]:
    """Return the variables that the recipe trains.

    Raises:
        ValueError: A pattern of `freeze` matches no variable, or all variables are frozen.
    """
    paths = [v.path for v in model.weights]
    matches = {pattern: fnmatch.filter(paths, pattern) for pattern in recipe.freeze}
    frozen = {path for found in matches.values() for path in found}
    trained = [v for v in model.trainable_variables if v.path not in frozen]
    if recipe.linear_probe:
        trained = [v for v in trained if v.path.split("/")[0] in HEADS]
    unused = [pattern for pattern, found in matches.items() if not found]
    if unused or not trained:
        wrong = f"freeze matches no variable with {unused}" if unused else "no variable is left to train"
        raise ValueError(
            f"{wrong}. Received: freeze={list(recipe.freeze)}, linear_probe={recipe.linear_probe}. Paths of variables "
            f"are {paths[:3]} ... {paths[-2:]}"
        )
    return trained


def _copy(variable: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.convert_to_tensor(variable), trainable=False, dtype=variable.dtype)
