"""What one run holds in memory: the model, its optimizer, averages and step, and the function that trains them."""

from __future__ import annotations

import fnmatch
from typing import Any

import tensorflow as tf

from keras_vit.model.vision_transformer import HEADS, VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.loop import prepare
from keras_vit.train.step import masked_patch, step
from keras_vit.train.step.objective import Objective, classification
from keras_vit.train.step.optimizer import Optimizer


class Session:
    """Everything that changes while training. Made anew for every run; `variables` brings one back.

    Args:
        recipe: how to train.
        source: the model to begin with; left as it is.
        images: number of training images.
        num_classes: of the data.
        class_names: of the data, where they have names.
        strategy: of tf.distribute; all variables live in its scope.

    Attributes:
        model: the VisionTransformer that is trained.
        total: steps of the whole run.
        step: int64 variable, steps done.
        optimizer: of what is trained.
        train: the function of `step.make`.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: VisionTransformer,
        *,
        images: int,
        num_classes: int,
        class_names: Any,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self.recipe = recipe
        self.total = recipe.resolved_steps(images)
        with strategy.scope():
            self.model = prepare.fitted(recipe, source, num_classes=num_classes, class_names=class_names)
            self._whole, objective = _objective(recipe, self.model)
            trained = _trained(recipe, self._whole)
            variables = [v.value for v in trained]
            names = [v.path for v in trained]
            self.optimizer = Optimizer(
                recipe,
                variables,
                names,
                total_steps=self.total,
                warmup=recipe.resolved_warmup(self.total),
                num_layers=self.model.config.num_layers,
            )
            self._averages = {v.path: _copy(v.value) for v in trained} if recipe.ema_decay else {}
            self.step = tf.Variable(
                0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, name="step"
            )
        self.train = step.make(
            recipe,
            model=self._whole,
            objective=objective,
            variables=variables,
            optimizer=self.optimizer,
            averages=list(self._averages.values()),
            step=self.step,
            strategy=strategy,
        )

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """All that a checkpoint needs, by name."""
        return {
            "step": self.step,
            **{f"weights/{v.path}": v.value for v in self._whole.weights},
            **{f"optimizer/{name}": slot for name, slot in self.optimizer.slots.items()},
            **{f"average/{name}": average for name, average in self._averages.items()},
        }

    def is_finite(self) -> bool:
        """Whether every number that a checkpoint would hold is one."""
        return all(bool(tf.reduce_all(tf.math.is_finite(v))) for v in self.variables.values() if v.dtype.is_floating)

    def copy_to(self, model: VisionTransformer) -> None:
        """Sets the weights of a model of the same config, outside of the strategy, to the averages or the newest."""
        for target, own in zip(model.weights, self.model.weights, strict=True):
            target.assign(self._averages.get(own.path, own.value).numpy())


def _objective(recipe: Recipe, model: VisionTransformer) -> tuple[Any, Objective]:
    """What is called, and what its loss is."""
    if recipe.objective == "masked_patch":
        return masked_patch.MaskedPatchModel(model), masked_patch.objective(remat=recipe.remat)
    kind, smoothing = recipe.objective, recipe.label_smoothing
    return model, classification(kind, label_smoothing=smoothing, remat=recipe.remat)


def _trained(recipe: Recipe, model: Any) -> list[Any]:
    """The variables that the recipe trains."""
    paths = [v.path for v in model.weights]
    frozen = {path for pattern in recipe.freeze for path in fnmatch.filter(paths, pattern)}
    unused = [pattern for pattern in recipe.freeze if not fnmatch.filter(paths, pattern)]
    trained = [v for v in model.trainable_variables if v.path not in frozen]
    if recipe.linear_probe:
        trained = [v for v in trained if v.path.split("/")[0] in HEADS]
    if unused or not trained:
        wrong = f"freeze names no variable by {unused}" if unused else "nothing is left to train"
        raise ValueError(
            f"{wrong}: freeze={list(recipe.freeze)}, linear_probe={recipe.linear_probe}. It has paths such "
            f"as {paths[:3]} ... {paths[-2:]}"
        )
    return trained


def _copy(variable: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.convert_to_tensor(variable), trainable=False, dtype=variable.dtype)
