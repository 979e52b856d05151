"""Compute the losses that training minimises, as in the papers; one value per image."""

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from keras_vit.model.layers.runtime import random_scope

# (model, batch, seed) -> the loss of every image and further metrics of every image, each float32 (batch,).
Objective: TypeAlias = Callable[[Any, dict[str, Any], Any], tuple[Any, dict[str, Any]]]


def classification(kind: str, *, label_smoothing: float = 0.0, remat: bool = False) -> Objective:
    """Return the cross-entropy between logits and float32 labels (batch, classes), which may be mixed.

    "sigmoid" treats each class independently and sums over classes, as big_vision's sigmoid_xent. `label_smoothing` is
    the share of a label that is spread over all classes. `remat` recomputes encoder blocks for their gradient.
    """

    def objective(model: Any, batch: dict[str, Any], seed: Any) -> tuple[Any, dict[str, Any]]:
        with random_scope(seed, remat=remat):
            logits = model(batch["image"], training=True)
        labels = batch["label"]
        is_correct = tf.equal(tf.argmax(logits, axis=-1), tf.argmax(labels, axis=-1))
        smooth = labels * (1 - label_smoothing) + label_smoothing / labels.shape[-1]
        return _cross_entropy(kind, logits, smooth), {"accuracy": tf.cast(is_correct, tf.float32)}

    return objective


def _cross_entropy(kind: str, logits: Any, labels: Any) -> Any:
    if kind == "sigmoid":
        return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits), axis=-1)
    return tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
