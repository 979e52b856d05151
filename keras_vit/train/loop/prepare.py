"""Prepare the model that a run trains: load it, and adapt it to the recipe's resolution, head and precision."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras

from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import HEADS, VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.zoo import pretrained


def opened(
    recipe: Recipe,
    model: str | os.PathLike[str] | ViTConfig | VisionTransformer,
    *,
    weights: str | os.PathLike[str] | None = None,
) -> VisionTransformer:
    """Return the model that training begins with.

    Args:
        recipe: `start` decides between pretrained and random weights for a name; `seed` draws the random ones.
        model: a name of the zoo, a path or URL of a checkpoint or .keras file, a config (random weights), or a model,
            which is returned as it is.
        weights: for a name: a tag of its card, a path or a URL, whatever `start` says.

    Raises:
        ValueError: weights are given with anything but a name; and as `zoo.load` and `converters.load`.
    """
    if weights is not None and not isinstance(model, str):
        raise ValueError(f"weights are for a model's name. Received: weights={weights!r} and model={model!r}")
    if isinstance(model, VisionTransformer):
        return model
    keras.utils.set_random_seed(recipe.seed % 2**32)  # so that the same random weights are drawn every time
    if isinstance(model, ViTConfig):
        return VisionTransformer(model, dtype="float32")
    default = "default" if recipe.start == "pretrained" else None
    return pretrained.load_choice(pretrained.resolve(model, weights, default=default), dtype="float32")


def adapt_model(
    recipe: Recipe, source: VisionTransformer, *, num_classes: int, class_names: Sequence[str] | None = None
) -> VisionTransformer:
    """Return a new model with the source's weights and the recipe's changes. Call it in the scope of a strategy.

    Args:
        recipe: image_size, config, reset_head, precision and objective are used.
        source: model with the weights; it is not changed.
        num_classes: of the data. Where the source has another number, its head is replaced by a new one, of zeros.
        class_names: of the data, for a new head.
    """
    config = source.config
    changes: dict[str, Any] = {}
    if recipe.objective == "masked_patch":
        changes = {"num_classes": 0, "representation_size": None}
    elif recipe.reset_head or config.num_classes != num_classes:
        changes = {"num_classes": num_classes, "labels": tuple(class_names) if class_names else None}
    if recipe.reset_head:
        changes["representation_size"] = None
    target = config.replace(**changes | recipe.config_changes(config))
    keras.utils.set_random_seed(recipe.seed % 2**32)
    return source.rebuilt(target, dtype=recipe.precision, fresh=HEADS if recipe.reset_head else ())
