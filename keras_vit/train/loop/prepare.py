"""Prepare the model that a run trains: load it, and adapt it to the recipe."""

import os
from collections.abc import Sequence
from typing import Any

import keras

from keras_vit.dense.model import DenseModel, depth, segmenter
from keras_vit.dense.task import Depth, Segmentation
from keras_vit.model.config import ViTConfig
from keras_vit.model.task import Task
from keras_vit.model.vision_transformer import HEADS, VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.classes import are_comparable, check_kind, match_data
from keras_vit.train.data.split import Data
from keras_vit.zoo.pretrained import Choice, load_any, resolve


def choose_model(
    recipe: Recipe,
    model: str | os.PathLike[str] | ViTConfig | VisionTransformer | DenseModel,
    weights: str | os.PathLike[str] | None = None,
) -> tuple[Recipe, Choice | ViTConfig | VisionTransformer | DenseModel]:
    """Find what `model` stands for, as `train.run` does; return it with the recipe's variant for the model's name."""
    if isinstance(model, ViTConfig | VisionTransformer | DenseModel):
        if weights is not None:
            raise ValueError(f"weights are for a model's name. Received: weights={weights!r} and model={model!r}")
        return recipe, model
    choice = _resolve(recipe, model, weights)
    chosen = recipe.for_model(choice.name) if choice.name else recipe
    return chosen, choice if chosen.start == recipe.start else _resolve(chosen, model, weights)


def _resolve(recipe: Recipe, model: str | os.PathLike[str], weights: str | os.PathLike[str] | None) -> Choice:
    return resolve(model, weights, default="default" if recipe.start == "pretrained" else None)


def load_model(
    recipe: Recipe, model: Choice | ViTConfig | VisionTransformer | DenseModel
) -> VisionTransformer | DenseModel:
    """Return the model that training begins with: loaded, new with random weights, or `model` itself."""
    if isinstance(model, VisionTransformer | DenseModel):
        return model
    keras.utils.set_random_seed(recipe.seed % 2**32)  # so that the same random weights are drawn every time
    if isinstance(model, ViTConfig):
        return VisionTransformer(model, dtype="float32")
    return load_any(model, dtype="float32")


def check_task(recipe: Recipe, source: VisionTransformer | DenseModel, data: Data) -> VisionTransformer | DenseModel:
    """Return the model, with the recipe's head if maps need one; raise a ValueError if it is not for the data."""
    task = data.task
    has_maps = isinstance(task, Segmentation | Depth)
    if has_maps and isinstance(source, VisionTransformer) and recipe.head is not None:
        keras.utils.set_random_seed(recipe.seed % 2**32)
        if isinstance(task, Depth):
            source = depth(source, head=recipe.head, max_depth=recipe.max_depth)
        else:
            source = segmenter(source, data.num_classes, head=recipe.head, labels=data.class_names)
    if recipe.objective == "masked_patch" and isinstance(source, VisionTransformer):
        return source
    check_kind(data, source.task)
    if recipe.objective not in task.OBJECTIVES:
        raise ValueError(
            f"objective must be one of {list(task.OBJECTIVES)} for {task.NAME}. Received: {recipe.objective!r}"
        )
    if has_maps and (recipe.mixup or recipe.shift or recipe.randaugment_layers):
        raise ValueError("mixup, shift and randaugment_layers must be 0 for maps, which they would not move")
    return source


def match_head(recipe: Recipe, task: Task | ViTConfig, data: Data) -> tuple[Recipe, Data]:
    """Return the recipe with `reset_head` decided, and the data with the class numbers of a head that is kept.

    A head for another number of classes is never kept. Raises a ValueError if one should be kept for other classes.
    """
    if recipe.objective == "masked_patch" or recipe.reset_head is True:
        return recipe, data
    is_auto = recipe.reset_head == "auto"
    keeps_head = task.num_classes == data.num_classes and not is_auto
    has_names = are_comparable(task.labels, task.num_classes, data.class_names)
    if has_names and task.num_classes == data.num_classes:
        try:
            data, keeps_head = match_data(data, task.labels, task.num_classes), True
        except ValueError:
            if not is_auto:
                raise
    return recipe.replace(reset_head=is_auto and not keeps_head), data


def adapt_model(
    recipe: Recipe,
    source: VisionTransformer | DenseModel,
    *,
    num_classes: int,
    class_names: Sequence[str] | None = None,
) -> VisionTransformer | DenseModel:
    """Return a new model with the source's weights and the recipe's changes. Call it in the scope of a strategy.

    If `num_classes` of the data is not the source's, a head of zeros with `class_names` replaces the source's; a head
    without names that is kept gets them.
    """
    layers = source._flatten_layers()
    if special := [part.path for part in layers if part.quantization_mode or hasattr(part, "lora_kernel_a")]:
        raise ValueError(
            "A recipe trains floating-point weights without LoRA; model.fit trains LoRA, "
            f"model.with_config(model.config) adds its updates to kernels. Received: a model with LoRA or quantized "
            f"layers: {special[:3]}"
        )
    config = source.config
    if isinstance(source, DenseModel):
        keras.utils.set_random_seed(recipe.seed % 2**32)
        source = source.with_config(config.replace(**recipe.config_changes(config)), dtype=recipe.precision)
        if recipe.reset_head or source.head.num_classes != num_classes:
            head = source.head.replace(num_classes=num_classes, labels=tuple(class_names) if class_names else None)
            return DenseModel(source.backbone, head, name=source.name)
        return source
    changes: dict[str, Any] = {}
    if recipe.objective == "masked_patch":
        changes = {"num_classes": 0, "representation_size": None}
    elif recipe.reset_head or config.num_classes != num_classes:
        changes = {"num_classes": num_classes, "labels": tuple(class_names) if class_names else None}
    elif class_names and not are_comparable(config.labels, num_classes, class_names):
        changes = {"labels": tuple(class_names)}
    if recipe.reset_head:
        changes["representation_size"] = None
    target = config.replace(**changes | recipe.config_changes(config))
    keras.utils.set_random_seed(recipe.seed % 2**32)
    return source.with_config(target, dtype=recipe.precision, fresh=HEADS if recipe.reset_head else ())
