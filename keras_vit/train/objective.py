"""Objectives: the losses that training minimises, as in the papers; one value per image."""

from collections.abc import Callable
from typing import Any, TypeAlias

from keras_vit.model.layers.runtime import random_scope
from keras_vit.model.task import Task

# (model, batch, seed) -> the loss of every image and further metrics of every image, each float32 (batch,).
Objective: TypeAlias = Callable[[Any, dict[str, Any], Any], tuple[Any, dict[str, Any]]]


def supervised(task: Task, kind: str, *, label_smoothing: float = 0.0, remat: bool = False) -> Objective:
    """Make the objective of `Task.losses`; `remat` recomputes encoder blocks for their gradient."""

    def objective(model: Any, batch: dict[str, Any], seed: Any) -> tuple[Any, dict[str, Any]]:
        with random_scope(seed, remat=remat):
            output = model(batch["image"], training=True)
        return task.losses(output, batch["label"], kind=kind, label_smoothing=label_smoothing)

    return objective
