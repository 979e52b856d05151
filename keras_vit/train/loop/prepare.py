"""Prepare the model that a run trains: load it, and adapt it to the recipe."""

import os
import warnings
from collections.abc import Callable, Sequence
from math import ceil, log2
from typing import Any

import keras
import numpy as np

from keras_vit.dense.model import DenseModel, depth, segmenter
from keras_vit.dense.task import Depth, Segmentation
from keras_vit.model.config import ViTConfig
from keras_vit.model.task import Task
from keras_vit.model.vision_transformer import HEADS, VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.classes import are_comparable, check_kind, match_data
from keras_vit.train.data.pipeline import decode
from keras_vit.train.data.split import Data, Split
from keras_vit.zoo.pretrained import Choice, load_any, resolve

# Recipes are written for large data sets and large images. These suit fewer and smaller ones.
FEW_IMAGES, MOST_PASSES = 10_000, 100  # with fewer training images than this, so many passes over them
USUAL_SIZE = 224  # pixels of pre-training: images are not enlarged far beyond their own size and this one
SIZED_IMAGES = 16  # whose sizes are read


def choose_model(
    recipe: Recipe,
    model: str | os.PathLike[str] | ViTConfig | VisionTransformer | DenseModel,
    weights: str | os.PathLike[str] | None = None,
) -> tuple[Recipe, Choice | ViTConfig | VisionTransformer | DenseModel]:
    """Find what `model` stands for, as `train.run` does; return it with the recipe's variant for the model's name."""
    if isinstance(model, ViTConfig | VisionTransformer | DenseModel):
        if weights is not None:
            raise ValueError(
                f"weights are for a model's name. Received: weights={weights!r:.200} and model={model!r:.200}"
            )
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
    with warnings.catch_warnings():  # recipe and data decide which size is trained
        warnings.filterwarnings("ignore", message=".*is loaded for images of")
        return load_any(model, dtype="float32")


def is_stated(recipe: Recipe, field: str) -> bool:
    """Return whether the user chose the value of a field, and not the recipe's file."""
    return recipe.origin is None or field in recipe.origin.changes


def fit_length(recipe: Recipe, data: Data, *, replicas: int, say: Callable[[str], None]) -> Recipe:
    """Return the recipe with a batch and a number of steps that suit few images, unless the user states them."""
    count = data.training_split().count
    changes: dict[str, Any] = {}
    if recipe.batch_size > count and not is_stated(recipe, "batch_size"):
        unit = replicas * (1 if recipe.accumulation == "auto" else recipe.accumulation)
        changes["batch_size"] = unit * 2 ** int(log2(max(count / unit, 1)))
    steps = ceil(MOST_PASSES * count / changes.get("batch_size", recipe.batch_size))
    if count < FEW_IMAGES and (recipe.steps or 0) > steps and not is_stated(recipe, "steps"):
        changes["steps"] = steps
    if not changes:
        return recipe
    chosen = ", ".join(f"{name} {value:,} in place of {getattr(recipe, name):,}" for name, value in changes.items())
    options = " and ".join(f"--set {name}=N" for name in changes)
    say(f"{count:,} training images of {data.num_classes:,} classes: {chosen}. To choose: {options}")
    return recipe.replace(**changes)


def fit_size(
    recipe: Recipe,
    model: Choice | ViTConfig | VisionTransformer | DenseModel,
    config: ViTConfig,
    data: Data,
    *,
    say: Callable[[str], None],
) -> Recipe:
    """Return the recipe with a size that suits images smaller than the model's, unless recipe or user states one.

    The user states the size of a config or a model, but not that of a name or a file.
    """
    side = min(config.size)
    is_chosen = recipe.image_size is not None or is_stated(recipe, "image_size") or not isinstance(model, Choice)
    if is_chosen or not USUAL_SIZE < side == max(config.size):
        return recipe
    of_images = _median_side(data.training_split())
    smaller = USUAL_SIZE * max(1, round(of_images / USUAL_SIZE))
    if smaller > 0.75 * side:
        return recipe
    say(f"images have about {of_images} pixels a side: trained at {smaller}, not at {side}. To choose: --image-size N")
    return recipe.replace(image_size=smaller)


def _median_side(split: Split) -> int:
    """Return the median of the shorter sides of some images, in pixels."""
    chosen = np.unique(np.linspace(0, split.count - 1, SIZED_IMAGES).astype(np.int64))
    return int(np.median([min(decode(example["image"]).shape[:2]) for example in split.iterate_once(only=chosen)]))


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
    if (recipe.objective == "masked_patch" or recipe.has_teacher) and isinstance(source, VisionTransformer):
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
    if not recipe.trains_head or recipe.reset_head is True:
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
    if not recipe.trains_head:
        changes = {"num_classes": 0, "representation_size": None}
    elif recipe.reset_head or config.num_classes != num_classes:
        changes = {"num_classes": num_classes, "labels": tuple(class_names) if class_names else None}
    elif class_names and not are_comparable(config.labels, num_classes, class_names):
        changes = {"labels": tuple(class_names)}
    if recipe.objective == "softmax":
        changes["probabilities"] = "softmax"
    if recipe.reset_head:
        changes["representation_size"] = None
    target = config.replace(**changes | recipe.config_changes(config))
    keras.utils.set_random_seed(recipe.seed % 2**32)
    return source.with_config(target, dtype=recipe.precision, fresh=HEADS if recipe.reset_head else ())
