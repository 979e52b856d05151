"""The variables that a recipe trains, and their rule: SGD or AdamW as optax computes them, under every strategy.

Unlike Keras', the momentum of `optax.sgd` does not include the learning rate, which matters under a schedule, and the
epsilon of `optax.scale_by_adam` is added to the root after the bias correction, not before.
"""

import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_vit.model.vision_transformer import HEADS
from keras_vit.train._recipe import SLOTS, Recipe

# fn(variable, *tensors and slots) assigns to the variable and the slots.
Update = tuple[tf.Variable, Callable[..., Any], Sequence[Any]]

# Layers before the first block; a hybrid's ResNet is part of the patch embedding. Relative positions and biases that
# all blocks share are not among them: BEiT trains these at the full rate.
_STEM = re.compile(r"(embedding|prefix|position(?!/relative)|pre_norm|masked_patch|root|stage_\d+_unit_\d+)/")
_BLOCK = re.compile(r"(?:block|position|relative_bias)_(\d+)/")  # position_3 is added before block 3


class Optimizer:
    """State and update of one optimizer. Create it inside `strategy.scope()`.

    `variables` are float32 (for a Keras variable, its `.value`); `names` are their paths without the model's name, such
    as "block_3/mlp/dense1/kernel". `warmup` counts updates; `num_layers` is for the layer-wise decay.
    """

    def __init__(
        self,
        recipe: Recipe,
        variables: Sequence[tf.Variable],
        names: Sequence[str],
        *,
        total_steps: int,
        warmup: int,
        num_layers: int,
    ) -> None:
        self.recipe = recipe
        self.variables = list(variables)
        self.names = list(names)
        self.factor = schedule(recipe, total_steps, warmup)
        self._scales = [recipe.layer_decay ** (num_layers + 1 - _depth(name, num_layers)) for name in names]
        first, *others = SLOTS[recipe.optimizer]
        self._kinds = {first: recipe.momentum_dtype, **dict.fromkeys(others, "float32")}
        self.slots = {  # such as "momentum/block_0/norm1/gamma", in the shape of the variable
            f"{kind}/{name}": tf.Variable(
                tf.zeros(variable.shape, dtype), trainable=False, name=f"{kind}/{name}".replace("/", "_")
            )
            for kind, dtype in self._kinds.items()
            for name, variable in zip(names, variables, strict=True)
        }

    def rate(self, step: tf.Tensor) -> tf.Tensor:
        """Learning rate of a step, a float32 scalar, before the layer-wise decay."""
        return self.recipe.learning_rate * self.factor(step)

    def apply(self, gradients: Sequence[tf.Tensor], step: tf.Tensor) -> None:
        """Update every variable. Call it in the context of each replica, or outside of any strategy.

        Gradients are in the order of the variables, all-reduced and clipped, float32; `step` is an int64 scalar from 0.
        """
        rules: dict[str, Callable[..., None]] = {"sgd": self._sgd, "adamw": self._adamw}
        rule = rules[self.recipe.optimizer]
        factor, rate = self.factor(step), self.rate(step)
        count = tf.cast(step, tf.float32) + 1.0
        updates: list[Update] = []
        for name, variable, gradient, scale in zip(self.names, self.variables, gradients, self._scales, strict=True):
            slots = [self.slots[f"{kind}/{name}"] for kind in self._kinds]
            decay = self._decay(name, factor, rate * scale)
            updates.append((variable, rule, (gradient, rate * scale, decay, count, *slots)))
        update_variables(updates)

    def _decay(self, name: str, factor: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Share of its value that a variable loses in a step; in both official codes only kernels decay."""
        if name.rpartition("/")[2] != "kernel":
            return tf.constant(0.0)
        # big_vision/optax.py adds the decay after the learning rate and its multipliers, before the schedule.
        return self.recipe.weight_decay * (factor if self.recipe.weight_decay_independent else rate)

    def _sgd(
        self, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor, decay: tf.Tensor, _: tf.Tensor, slot: Any
    ) -> None:
        momentum = gradient + _decayed(slot, self.recipe.momentum)
        slot.assign(tf.cast(momentum, slot.dtype))
        variable.assign_sub(rate * momentum + decay * variable)

    def _adamw(
        self,
        variable: tf.Variable,
        gradient: tf.Tensor,
        rate: tf.Tensor,
        decay: tf.Tensor,
        count: tf.Tensor,
        mu_slot: tf.Variable,
        nu_slot: tf.Variable,
    ) -> None:
        beta1, beta2 = self.recipe.beta1, self.recipe.beta2
        mu = (1.0 - beta1) * gradient + _decayed(mu_slot, beta1)
        nu = (1.0 - beta2) * tf.square(gradient) + _decayed(nu_slot, beta2)
        mu_slot.assign(tf.cast(mu, mu_slot.dtype))
        nu_slot.assign(nu)
        root = tf.sqrt(nu / (1.0 - tf.pow(beta2, count)))
        direction = mu / (1.0 - tf.pow(beta1, count)) / (root + self.recipe.epsilon)
        variable.assign_sub(rate * direction + decay * variable)


def schedule(recipe: Recipe, total_steps: int, warmup: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Make a function of the step (int64 from 0): the share of the recipe's learning rate, float32, 1 at the peak.

    The rate rises linearly from 0 for `warmup` steps, then follows the recipe's schedule up to `total_steps`, as
    `create_learning_rate_schedule` in vit_jax/utils.py and big_vision/utils.py.
    """
    end = recipe.linear_end / recipe.learning_rate

    def share(step: tf.Tensor) -> tf.Tensor:
        step = tf.cast(step, tf.int64)
        # Subtract integers: float32 has all of them only up to 16.7 million.
        progress = tf.clip_by_value(tf.cast(step - warmup, tf.float32) / float(total_steps - warmup), 0.0, 1.0)
        if recipe.schedule == "cosine":
            value = 0.5 * (1.0 + tf.cos(math.pi * progress))
        elif recipe.schedule == "linear":
            value = end + (1.0 - end) * (1.0 - progress)
        else:
            value = tf.ones_like(progress)
        return value * tf.minimum(1.0, tf.cast(step, tf.float32) / float(warmup)) if warmup else value

    return share


def _decayed(slot: tf.Variable, rate: float) -> tf.Tensor:
    """Multiply a slot by a number in the slot's dtype, as JAX does, and return float32."""
    return tf.cast(tf.cast(rate, slot.dtype) * slot, tf.float32)


def _depth(name: str, num_layers: int) -> int:
    """Number of a variable's layer in BEiT (`get_num_layer_for_vit` in optim_factory.py): 0 before block 0."""
    if block := _BLOCK.match(name):
        return int(block[1]) + 1
    return 0 if _STEM.match(name) else num_layers + 1


def update_variables(updates: Sequence[Update]) -> None:
    """Run each function on every copy of its variable, from the context of a replica.

    The function gets the variable, and its further tensors and variables, as they are on one device.
    """

    def merged(strategy: tf.distribute.Strategy, *arguments: Sequence[Any]) -> None:
        for (variable, fn, _), args in zip(updates, arguments, strict=True):
            strategy.extended.update(variable, fn, args=args, group=False)

    strategy = tf.distribute.get_strategy()
    # As Keras' optimizers do: replicas meet in merge_call, except where the strategy (TPU, NCCL) has none.
    tf.__internal__.distribute.interim.maybe_merge_call(merged, strategy, *(tuple(args) for _, _, args in updates))


def clip(gradients: Sequence[tf.Tensor], clip_norm: float | None) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Scale all-reduced gradients to a global norm of at most `clip_norm`, as `optax.clip_by_global_norm` does.

    Returns float32 gradients and their norm before clipping. NaN stays NaN; a norm beyond float32 is infinite and makes
    the gradients 0, so check it before you apply them.
    """
    dense = [tf.cast(tf.convert_to_tensor(gradient), tf.float32) for gradient in gradients]
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in dense]))
    if clip_norm is None:
        return dense, norm
    # tf.where, because multiplying by 1 rounds the gradients where the norm is below the limit.
    return [tf.where(norm < clip_norm, gradient, gradient / norm * clip_norm) for gradient in dense], norm


# ---- what is trained


def trained_variables(recipe: Recipe, model: Any) -> list[Any]:
    """Choose the variables that the recipe trains; raise ValueError for a pattern that matches none."""
    paths = [v.path for v in model.weights]
    heads = getattr(model, "head_layers", HEADS)

    def match(patterns: Iterable[str]) -> set[str]:
        return {path for pattern in patterns for path in fnmatch.filter(paths, pattern)}

    frozen = match(recipe.freeze)
    trained = [v for v in model.trainable_variables if v.path not in frozen]
    if recipe.linear_probe or recipe.trained_patterns:
        others = set() if recipe.linear_probe else match(itertools.chain(*recipe.trained_patterns.values()))
        trained = [v for v in trained if v.path.split("/")[0] in heads or v.path in others]
    unused = {
        "freeze": [pattern for pattern in recipe.freeze if not match([pattern])],
        "train_only": [word for word, patterns in recipe.trained_patterns.items() if not match(patterns)],
    }
    wrong = [f"{name} matches no variable with {words}" for name, words in unused.items() if words]
    if recipe.lora_rank and not any("/lora_kernel_" in v.path for v in trained):
        wrong.append(f"lora_rank={recipe.lora_rank} adds updates that nothing trains: add 'lora' to train_only")
    if wrong or not trained:
        raise ValueError(
            f"{' and '.join(wrong) or 'no variable is left to train'}. Received: freeze={list(recipe.freeze)}, "
            f"train_only={list(recipe.train_only)}, linear_probe={recipe.linear_probe}. Paths of variables are "
            f"{paths[:3]} ... {paths[-2:]}"
        )
    return trained


def is_of_head(variable: Any) -> bool:
    """Whether a variable belongs to the head of a VisionTransformer."""
    return bool(variable.path.split("/")[0] in HEADS)


def enable_lora(recipe: Recipe, model: Any) -> None:
    """Give the kernels of a recipe's `lora_targets` updates, which begin at 0. Call it in the strategy's scope."""
    if not recipe.lora_rank:
        return
    dense = [layer for layer in model._flatten_layers() if hasattr(layer, "enable_lora")]
    inner = [layer for layer in dense if re.search(r"\bblock_\d+/", layer.path)]
    names = {layer.name for layer in inner}
    if not recipe.lora_targets or not names.issuperset(recipe.lora_targets):
        raise ValueError(
            f"lora_targets are names of layers in the blocks, of {sorted(names)}. Received: {list(recipe.lora_targets)}"
        )
    for layer in inner:
        if layer.name in recipe.lora_targets:
            layer.enable_lora(recipe.lora_rank)
