"""Load the teacher of a run, compare its classes with the data's, and place it on the run's devices."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_vit._util.checks import as_path
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.classes import are_comparable, match_data
from keras_vit.train.data.sources import Data
from keras_vit.zoo.pretrained import load_choice, resolve


@dataclass(frozen=True)
class Teacher:
    """A model that another one learns from, and the name or path it was loaded from; None for a model in memory."""

    model: VisionTransformer
    source: str | None = None

    def match(self, data: Data) -> Data:
        """Return the data with the teacher's classes; raise a ValueError that names them if they are others."""
        config = self.model.config
        if not data.is_labelled:
            names = tuple(self.model.task.class_names() or ())
            return dataclasses.replace(data, num_classes=config.num_classes, class_names=names)
        advice = "Photos without labels lie in a folder without sub-folders; 'distill-features' needs no classes"
        has_names = are_comparable(config.labels, config.num_classes, data.class_names)
        if data.num_classes != config.num_classes and not has_names:
            raise ValueError(
                f"The data must have the teacher's classes. {advice}. Received: a teacher of {config.num_classes} "
                f"classes, and {data.num_classes} in {data.name}"
            )
        try:
            return match_data(data, config.labels, config.num_classes)
        except ValueError as error:
            problem = str(error).partition(". ")[0]  # what follows is advice about another head
            raise ValueError(f"The data must have the teacher's classes. {advice}. Received: {problem}") from error

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the teacher: a resumed run needs the same weights."""
        digest = hashlib.sha256()
        for variable in self.model.weights:
            digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
        return {"model": self.model.config.to_dict(), "weights": digest.hexdigest(), "source": self.source}

    def placed(self, recipe: Recipe) -> VisionTransformer:
        """Return the model in the recipe's precision. Call it in the scope of a strategy."""
        config = self.model.config
        changes = {} if recipe.trains_head else {"num_classes": 0, "representation_size": None}
        model = self.model.with_config(config.replace(**changes), dtype=recipe.precision)
        model.trainable = False
        return model


def load_teacher(recipe: Recipe, teacher: str | os.PathLike[str] | VisionTransformer | None) -> Teacher | None:
    """Load the teacher that a recipe needs, by a name of the zoo or a path; raise a ValueError if it fits no recipe."""
    if (teacher is not None) != recipe.has_teacher:
        needs = "needs a teacher: a name of the zoo, a path or a model" if recipe.has_teacher else "takes no teacher"
        raise ValueError(f"Recipe {recipe.name!r}, objective {recipe.objective!r}, {needs}. Received: {teacher!r:.200}")
    if teacher is None:
        return None
    if isinstance(teacher, VisionTransformer):
        found = Teacher(teacher)
    else:
        found = Teacher(load_choice(resolve(teacher), dtype="float32"), source=as_path(teacher, "teacher"))
    _check(recipe, found.model)
    return found


def check_student(student: VisionTransformer, teacher: VisionTransformer, recipe: Recipe) -> None:
    """Raise a ValueError if a model cannot learn from this teacher."""
    own, other = student.config.num_channels, teacher.config.num_channels
    if own != other:
        raise ValueError(f"Model and teacher must take images of equally many channels. Received: {own} and {other}")
    _check(recipe, student)


def _check(recipe: Recipe, model: VisionTransformer) -> None:
    config = model.config
    if recipe.objective == "distill_features" and (not config.num_layers or config.is_unpooled):
        raise ValueError(
            "'distill_features' compares the features of images and of patches. Received: a model that has no "
            f"{'patches' if not config.num_layers else 'feature of the whole image'}"
        )
    if recipe.objective == "distill" and model.output_shape[1:] != (config.num_classes,):
        raise ValueError(
            "'distill' compares the classes of images; 'distill_features' needs none. Received: a model of output "
            f"shape {model.output_shape}"
        )
