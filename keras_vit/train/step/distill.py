"""Distillation: a student learns from a teacher that sees the same views (function matching, arXiv 2106.05237).

A view is a training image at the larger of both models' sizes, with the student's mean and deviation. Both models take
it at their own size. The teacher is not trained and belongs to no checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit.model.layers.base import initializer
from keras_vit.model.layers.runtime import random_scope
from keras_vit.model.maps import resize_maps
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.step.objective import Objective

# Metrics that the objectives return beside the loss.
METRICS = ("agreement",)  # and those of the labels
FEATURE_METRICS = ("cosine",)


class FeatureDistillation(keras.Model):
    """A student's features in the space of its teacher: of the whole image, and of every patch.

    It shares the weights of the student and adds two linear maps, which are dropped after training.
    """

    def __init__(self, student: VisionTransformer, teacher: VisionTransformer, *, name: str = "distillation") -> None:
        # No autocast: under bfloat16, too, the student takes images in float32.
        super().__init__(name=name, autocast=False)
        self.student = student
        self._compute = _features(student)
        options = {"kernel_initializer": initializer("convolution"), "dtype": student.outputs[0].dtype}
        self.image_map = keras.layers.Dense(teacher.output_shape[-1], name="image_map", **options)
        self.image_map.build((None, student.output_shape[-1]))
        self.patch_map = keras.layers.Dense(teacher.config.hidden_size, name="patch_map", **options)
        self.patch_map.build((None, None, None, student.config.hidden_size))
        self.built = True

    def call(self, images: Any, *, training: bool | None = None) -> tuple[Any, Any]:
        """Return float32 (batch, width) and (batch, rows, columns, width) of the teacher's widths."""
        image, patches = self._compute(images, training=training)
        return self.image_map(image), self.patch_map(patches)


def view_size(student: VisionTransformer, teacher: VisionTransformer) -> tuple[int, int]:
    """Return the height and width of the training images, the larger ones of both models'."""
    (height, width), (other_height, other_width) = student.config.size, teacher.config.size
    return max(height, other_height), max(width, other_width)


def logits_objective(recipe: Recipe, student: VisionTransformer, teacher: VisionTransformer) -> Objective:
    """Return the objective that matches the teacher's classes: the divergence of its probabilities, in nats.

    With `recipe.label_weight` a share of the loss is the labels'. "agreement" is the share of images, and of mixed
    ones, for which both models have the same best class.
    """
    teach = _teacher_function(teacher, student, _logits)
    size = student.config.size
    task, temperature, share = student.task, recipe.temperature, recipe.label_weight

    def distill(model: Any, batch: dict[str, Any], seed: Any) -> tuple[Any, dict[str, Any]]:
        target = teach(batch["image"])
        with random_scope(seed, remat=recipe.remat):
            output = model(_resize(batch["image"], size), training=True)
        best = tf.argmax(target, axis=-1)
        if recipe.hard_targets:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=best, logits=output)
        else:
            losses = temperature**2 * _divergence(target / temperature, output / temperature)
        agreement = tf.cast(tf.equal(tf.argmax(output, axis=-1), best), tf.float32)
        of_labels, metrics = task.losses(output, batch["label"], kind="softmax", label_smoothing=recipe.label_smoothing)
        if share:
            losses = (1 - share) * losses + share * of_labels
        return losses, {"agreement": agreement, **metrics}

    return distill


def features_objective(recipe: Recipe, student: VisionTransformer, teacher: VisionTransformer) -> Objective:
    """Return the objective of `FeatureDistillation`: mean squared differences of normalised features.

    The teacher's features are normalised to mean 0 and variance 1 over their channels, as in data2vec (arXiv
    2202.03555), and its patches interpolated to the student's grid. `recipe.patch_weight` weighs the patches' loss.
    "cosine" is that of the features of whole images.
    """
    teach = _teacher_function(teacher, student, _features)
    size, grid = student.config.size, student.config.grid

    def distill(model: Any, batch: dict[str, Any], seed: Any) -> tuple[Any, dict[str, Any]]:
        target, target_patches = teach(batch["image"])
        with random_scope(seed, remat=recipe.remat):
            image, patches = model(_resize(batch["image"], size), training=True)
        target, target_patches = _standardize(target), _resize(_standardize(target_patches), grid)
        losses = tf.reduce_mean(tf.math.squared_difference(image, target), axis=-1)
        patch_losses = tf.reduce_mean(tf.math.squared_difference(patches, target_patches), axis=(1, 2, 3))
        cosine = tf.reduce_sum(tf.math.l2_normalize(image, -1) * tf.math.l2_normalize(target, -1), axis=-1)
        return losses + recipe.patch_weight * patch_losses, {"cosine": cosine}

    return distill


def _divergence(target: Any, output: Any) -> Any:
    """Return the Kullback-Leibler divergence of the softmax of logits (batch, classes) from that of the target's."""
    log_target = tf.nn.log_softmax(target)
    return tf.reduce_sum(tf.exp(log_target) * (log_target - tf.nn.log_softmax(output)), axis=-1)


def _standardize(features: Any) -> Any:
    mean, variance = tf.nn.moments(features, axes=-1, keepdims=True)
    return (features - mean) * tf.math.rsqrt(variance + 1e-6)


# ---- what both models compute of a view


def _teacher_function(
    teacher: VisionTransformer, student: VisionTransformer, make: Callable[[VisionTransformer], Any]
) -> Callable[[Any], Any]:
    """Return the function from views to what the teacher says of them, without a gradient."""
    own, other = teacher.config.preprocessing, student.config.preprocessing
    scale = (np.array(other.std) / own.std).astype(np.float32)
    offset = ((np.array(other.mean) - own.mean) / own.std).astype(np.float32)
    compute, size = make(teacher), teacher.config.size

    def teach(views: Any) -> Any:
        return tf.nest.map_structure(tf.stop_gradient, compute(_resize(views, size) * scale + offset, training=False))

    return teach


def _logits(model: VisionTransformer) -> VisionTransformer:
    return model


def _features(model: VisionTransformer) -> Callable[..., tuple[Any, Any]]:
    """Return the function from prepared images to float32 features: of the image, and of its patches on their grid."""
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


_resize = functools.partial(resize_maps, method="bilinear-antialias", rows_first=False)
