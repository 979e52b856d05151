"""Which variables a recipe trains, and the updates of LoRA that it adds to a model."""

import fnmatch
import itertools
import re
from collections.abc import Iterable
from typing import Any

from keras_vit.model.vision_transformer import HEADS
from keras_vit.train._recipe import Recipe


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
