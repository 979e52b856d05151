"""Distillation: a student learns from a teacher that sees the same views (function matching, arXiv 2106.05237).

A view is a training image at the larger of both models' sizes, with the student's mean and deviation. Both models take
it at their own size. The teacher is not trained and belongs to no checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit._util.checks import as_path, given
from keras_vit.model.classify import check_outputs
from keras_vit.model.layers.base import initializer
from keras_vit.model.layers.runtime import random_scope
from keras_vit.model.maps import resize_maps
from keras_vit.model.vision_transformer import VisionTransformer, hash_weights
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.pipeline import ModelInput, evaluation_batches
from keras_vit.train.data.split import Data, Order, are_comparable, match_data
from keras_vit.train.objective import Batch, Losses, Objective
from keras_vit.zoo.pretrained import load_resolved, resolve


@dataclass(frozen=True)
class Teacher:
    """A model that another one learns from, and the name or path it was loaded from; None for a model in memory."""

    model: VisionTransformer
    source: str | None = None

    def match(self, data: Data) -> Data:
        """Give data the class numbers of the teacher.

        Raise a ValueError if the classes are others, or if the teacher computes NaN or infinity from the first images:
        of NaN, argmax would teach class 0.
        """
        config = self.model.config
        self._check_first_images(data)
        if not data.is_labelled:
            names = tuple(self.model.task.class_names() or ())
            return dataclasses.replace(data, num_classes=config.num_classes, class_names=names)
        try:
            return match_data(data, config.labels, config.num_classes)
        except ValueError as error:
            problem = str(error).partition(". ")[0]  # what follows is advice about another head
            if data.num_classes != config.num_classes and not are_comparable(
                config.labels, config.num_classes, data.class_names
            ):
                problem = f"a teacher of {config.num_classes} classes, and {data.num_classes} in {data.name}"
            raise ValueError(
                "The data must have the teacher's classes. Photos without labels lie in a folder without sub-folders; "
                f"'distill-features' needs no classes. Received: {problem}"
            ) from error

    def _check_first_images(self, data: Data) -> None:
        split, model_input = data.training_split(), ModelInput.from_model(self.model)
        first = np.arange(min(2, split.count))
        with split.naming_bad_image(Order(batch=1, shuffle=False), batches=split.count):
            for batch in evaluation_batches(split, only=first, batch_size=2, model_input=model_input, task=data.task):
                check_outputs(self.model(batch["image"], training=False), are_logits=True)

    def facts(self) -> dict[str, Any]:
        """Facts of the teacher in a checkpoint, because a resumed run needs the same weights."""
        digest = hash_weights(self.model.weights)
        return {"model": self.model.config.to_dict(), "weights": digest, "source": self.source}

    def copy_model(self, recipe: Recipe) -> VisionTransformer:
        """Copy the model to the devices, in the recipe's precision. Call it in the scope of a strategy."""
        config = self.model.config
        changes: dict[str, Any] = given(image_size=recipe.teacher_size)
        if not recipe.trains_head:
            changes |= {"num_classes": 0, "representation_size": None}
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
    source = None if isinstance(teacher, VisionTransformer) else as_path(teacher, "teacher")
    model = teacher if isinstance(teacher, VisionTransformer) else load_resolved(resolve(teacher), dtype="float32")
    _check_abilities(recipe, model)
    return Teacher(model, source)


def check_student(student: VisionTransformer, teacher: VisionTransformer, recipe: Recipe) -> None:
    """Raise a ValueError if a model cannot learn from this teacher."""
    own, other = student.config.num_channels, teacher.config.num_channels
    if own != other:
        raise ValueError(f"Model and teacher must take images of equally many channels. Received: {own} and {other}")
    _check_abilities(recipe, student)


def _check_abilities(recipe: Recipe, model: VisionTransformer) -> None:
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


class FeatureDistillation(keras.Model):
    """A student, and linear maps of its features to those of its teacher, which are dropped after training."""

    def __init__(self, student: VisionTransformer, teacher: VisionTransformer) -> None:
        # No autocast: under bfloat16, too, the student takes images in float32.
        super().__init__(name="distillation", autocast=False)
        self.student = student
        self._compute = _features(student)
        options = {"kernel_initializer": initializer("convolution"), "dtype": student.outputs[0].dtype}
        self.image_map = keras.layers.Dense(teacher.output_shape[-1], name="image_map", **options)
        self.image_map.build((None, student.output_shape[-1]))
        self.patch_map = keras.layers.Dense(teacher.config.hidden_size, name="patch_map", **options)
        self.patch_map.build((None, None, None, student.config.hidden_size))
        self.built = True

    def call(self, images: Any, *, training: bool | None = None) -> tuple[Any, Any]:
        """Compute float32 (batch, width) and (batch, rows, columns, width) of the teacher's widths."""
        image, patches = self._compute(images, training=training)
        return self.image_map(image), self.patch_map(patches)


def objective(recipe: Recipe, student: VisionTransformer, teacher: VisionTransformer, *, has_labels: bool) -> Objective:
    """Make the objective of "distill" or "distill_features", on images of the larger sides of both models."""
    (height, width), (other_height, other_width) = student.config.size, teacher.config.size
    size = max(height, other_height), max(width, other_width)
    if recipe.objective == "distill_features":
        network = FeatureDistillation(student, teacher)
        return Objective(features_losses(recipe, student, teacher), network, ("cosine",), size)
    metrics = ("agreement", *(student.task.metrics if has_labels else ()))
    return Objective(logits_losses(recipe, student, teacher), student, metrics, size)


def logits_losses(recipe: Recipe, student: VisionTransformer, teacher: VisionTransformer) -> Losses:
    """Make the losses that match the teacher's classes: the divergence of its probabilities, in nats.

    With `recipe.label_weight` a share of the loss is the labels'. "agreement" is the share of images, and of mixed
    ones, for which both models have the same best class.
    """
    teach, resize = _view_functions(student, teacher, teacher)
    task, temperature, share = student.task, recipe.temperature, recipe.label_weight

    def distill(model: Any, batch: Batch, seed: Any) -> tuple[Any, dict[str, Any]]:
        target = teach(batch["image"])
        with random_scope(seed, remat=recipe.remat):
            output = model(resize(batch["image"]), training=True)
        best = tf.argmax(target, axis=-1)
        if recipe.hard_targets:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=best, logits=output)
        else:  # the Kullback-Leibler divergence
            log_target = tf.nn.log_softmax(target / temperature)
            log_output = tf.nn.log_softmax(output / temperature)
            losses = temperature**2 * tf.reduce_sum(tf.exp(log_target) * (log_target - log_output), axis=-1)
        agreement = tf.cast(tf.equal(tf.argmax(output, axis=-1), best), tf.float32)
        label_losses, metrics = task.losses(
            output, batch["label"], kind="softmax", label_smoothing=recipe.label_smoothing
        )
        if share:
            losses = (1 - share) * losses + share * label_losses
        return losses, {"agreement": agreement, **metrics}

    return distill


def features_losses(recipe: Recipe, student: VisionTransformer, teacher: VisionTransformer) -> Losses:
    """Make the losses of `FeatureDistillation`: mean squared differences of normalised features.

    The teacher's features are normalised to mean 0 and variance 1 over their channels, as in data2vec (arXiv
    2202.03555), and its patches interpolated to the student's grid. `recipe.patch_weight` weighs the patches' loss.
    "cosine" is that of the features of whole images.
    """
    teach, resize = _view_functions(student, teacher, _features(teacher))

    def distill(model: Any, batch: Batch, seed: Any) -> tuple[Any, dict[str, Any]]:
        target, target_patches = teach(batch["image"])
        with random_scope(seed, remat=recipe.remat):
            image, patches = model(resize(batch["image"]), training=True)
        target, target_patches = _standardize(target), _resize(_standardize(target_patches), student.config.grid)
        losses = tf.reduce_mean(tf.math.squared_difference(image, target), axis=-1)
        patch_losses = tf.reduce_mean(tf.math.squared_difference(patches, target_patches), axis=(1, 2, 3))
        cosine = tf.reduce_sum(tf.math.l2_normalize(image, -1) * tf.math.l2_normalize(target, -1), axis=-1)
        return losses + recipe.patch_weight * patch_losses, {"cosine": cosine}

    return distill


def _standardize(features: Any) -> Any:
    mean, variance = tf.nn.moments(features, axes=-1, keepdims=True)
    return (features - mean) * tf.math.rsqrt(variance + 1e-6)


def _view_functions(
    student: VisionTransformer, teacher: VisionTransformer, compute: Callable[..., Any]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Make two functions of views: the teacher's output, without a gradient, and the student's images."""
    teachers, students = teacher.config.preprocessing, student.config.preprocessing
    scale = (np.array(students.std) / teachers.std).astype(np.float32)
    offset = ((np.array(students.mean) - teachers.mean) / teachers.std).astype(np.float32)

    def teach(views: Any) -> Any:
        return tf.nest.map_structure(
            tf.stop_gradient, compute(_resize(views, teacher.config.size) * scale + offset, training=False)
        )

    return teach, functools.partial(_resize, size=student.config.size)


def _features(model: VisionTransformer) -> Callable[..., tuple[Any, Any]]:
    """Make a function from prepared images to float32 features of the image, and of its patches on their grid."""
    config = model.config
    has_late_norm = config.final_norm == "pooled"
    tokens = model.get_layer(f"block_{config.num_layers - 1}" if has_late_norm else "encoder_norm").output
    inner = keras.Model(model.inputs, [model.output, tokens])

    def compute(images: Any, training: bool | None = None) -> tuple[Any, Any]:
        image, x = inner(images, training=training)
        x = model.get_layer("encoder_norm")(x) if has_late_norm else x
        patches = tf.reshape(x[:, config.num_prefix_tokens :], (-1, *config.grid, config.hidden_size))
        return tf.cast(image, tf.float32), tf.cast(patches, tf.float32)

    return compute


def _resize(maps: Any, size: tuple[int, int]) -> Any:
    return resize_maps(maps, size, method="bilinear-antialias", rows_first=False)
