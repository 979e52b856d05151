"""State of a training run in memory: model, optimizer, moving averages and step."""

import fnmatch
from typing import Any

import tensorflow as tf

from keras_vit.model.vision_transformer import HEADS, VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.step import distill, masked_patch
from keras_vit.train.step.objective import Objective, supervised
from keras_vit.train.step.optimizer import Optimizer


class TrainState:
    """Everything that changes during training. Create it in the strategy's scope, like the model."""

    def __init__(
        self,
        recipe: Recipe,
        model: VisionTransformer,
        *,
        total_steps: int,
        teacher: VisionTransformer | None = None,
        has_labels: bool = True,
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.view_size = distill.view_size(model, teacher) if teacher else model.config.size
        self.total_steps = total_steps
        self.whole_model: Any = model  # with the layers that the objective adds
        self.objective: Objective
        self.metrics: tuple[str, ...]  # names of what the objective returns beside the loss, and is logged
        if recipe.objective == "masked_patch":
            self.whole_model = masked_patch.MaskedPatchModel(model)
            self.objective, self.metrics = masked_patch.objective(remat=recipe.remat), ("accuracy",)
        elif recipe.objective == "distill_features":
            assert teacher
            self.whole_model = distill.FeatureDistillation(model, teacher)
            self.objective, self.metrics = distill.features_objective(recipe, model, teacher), ("cosine",)
        elif recipe.objective == "distill":
            assert teacher
            self.objective = distill.logits_objective(recipe, model, teacher)
            self.metrics = ("agreement", *(model.task.metrics if has_labels else ()))
        else:
            smoothing, self.metrics = recipe.label_smoothing, model.task.metrics
            self.objective = supervised(model.task, recipe.objective, label_smoothing=smoothing, remat=recipe.remat)
        trained = _trained_variables(recipe, self.whole_model)
        self.trained = [v.value for v in trained]
        self.optimizer = Optimizer(
            recipe,
            self.trained,
            [v.path for v in trained],
            total_steps=total_steps,
            warmup=recipe.resolved_warmup(total_steps),
            num_layers=model.config.num_layers,
        )
        self.averages = {  # path of a trained variable -> its moving average
            v.path: tf.Variable(tf.convert_to_tensor(v.value), trainable=False, dtype=v.value.dtype)
            for v in (trained if recipe.ema_decay else ())
        }
        self.strategy = tf.distribute.get_strategy()
        self.step = tf.Variable(  # number of steps done
            0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, name="step"
        )
        self.interrupt = tf.Variable(  # 1 ends a step with an error before its next micro-batch
            0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, name="interrupt"
        )

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """All variables of a checkpoint, by name."""
        return {
            "step": self.step,
            **{f"weights/{v.path}": v.value for v in self.whole_model.weights},
            **{f"optimizer/{name}": slot for name, slot in self.optimizer.slots.items()},
            **{f"average/{name}": average for name, average in self.averages.items()},
        }

    def is_finite(self) -> bool:
        """Return whether every number that a checkpoint would hold is finite."""
        return all(bool(tf.reduce_all(tf.math.is_finite(v))) for v in self.variables.values() if v.dtype.is_floating)

    def copy_to(self, model: VisionTransformer) -> None:
        """Copy the moving averages, or without them the weights, into a model of the same config."""
        for target, own in zip(model.weights, self.model.weights, strict=True):
            target.assign(self.averages.get(own.path, own.value).numpy())


def _trained_variables(recipe: Recipe, model: Any) -> list[Any]:
    """Return the variables that the recipe trains; raise ValueError for a `freeze` pattern that matches none."""
    paths = [v.path for v in model.weights]
    matches = {pattern: fnmatch.filter(paths, pattern) for pattern in recipe.freeze}
    frozen = {path for found in matches.values() for path in found}
    trained = [v for v in model.trainable_variables if v.path not in frozen]
    if recipe.linear_probe:
        heads = getattr(model, "head_layers", HEADS)
        trained = [v for v in trained if v.path.split("/")[0] in heads]
    unused = [pattern for pattern, found in matches.items() if not found]
    if unused or not trained:
        wrong = f"freeze matches no variable with {unused}" if unused else "no variable is left to train"
        raise ValueError(
            f"{wrong}. Received: freeze={list(recipe.freeze)}, linear_probe={recipe.linear_probe}. Paths of variables "
            f"are {paths[:3]} ... {paths[-2:]}"
        )
    return trained
