"""The objective of a training: the loss of every image, the network that computes it, and the metrics beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from keras_vit.model.layers.runtime import random_scope
from keras_vit.model.task import of_labels
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe

Batch: TypeAlias = dict[str, Any]
# (network, batch, seed) -> the loss of every image and further metrics of every image, each float32 (batch,).
Losses: TypeAlias = Callable[[Any, Batch, Any], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class Objective:
    """The loss that training minimises, and the network that computes it.

    `network` is the trained model with the layers that the objective adds; `losses` takes it, a batch and a seed. Of
    the values beside the loss, `metrics` are logged. Training images have the height and width `view_size`.
    """

    losses: Losses
    network: Any
    metrics: tuple[str, ...]
    view_size: tuple[int, int]


def supervised(
    recipe: Recipe,
    model: VisionTransformer,
    *,
    has_several_labels: bool = False,
    class_weights: npt.NDArray[np.float32] | None = None,
) -> Objective:
    """Make the objective of a model's own task. A recipe's `remat` recomputes encoder blocks for their gradient."""
    task = of_labels(model.task, several=has_several_labels)

    def losses(network: Any, batch: Batch, seed: Any) -> tuple[Any, dict[str, Any]]:
        with random_scope(seed, remat=recipe.remat):
            output = network(batch["image"], training=True)
        return task.losses(
            output,
            batch["label"],
            kind=recipe.objective,
            label_smoothing=recipe.label_smoothing,
            class_weights=class_weights,
        )

    return Objective(losses, model, task.metrics, model.config.size)
