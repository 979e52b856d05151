"""What tasks of maps have in common."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from keras_vit import position


class MapTask:
    """Part of a task whose output is a map: it says nothing about an image as a whole."""

    NAME: ClassVar[str]

    def image_logits(self, logits: np.ndarray) -> np.ndarray:
        """See `keras_vit.model.task.Task`: an image as a whole has no class."""
        raise ValueError(f"Expected a model that classifies images. Received: one that returns {self.NAME}")

    def embedding_output(self) -> str:
        """See `keras_vit.model.task.Task`: a map is no embedding of an image."""
        raise no_embedding(self)


def no_embedding(task: Any) -> ValueError:
    """Return the error for the embedding of a model of maps."""
    return ValueError(f"An embedding is of a whole image: take model.backbone. Received: a model of {task.NAME}")


def enlarge(maps: Any, size: Sequence[int]) -> Any:
    """Resize maps (batch, rows, columns, channels) to a size, bilinear without antialias, by products of matrices.

    XLA has no gradient of TensorFlow's operation, and on a GPU that is not the same in every run.
    """
    import tensorflow as tf

    rows, columns = (
        position.kernel_matrix((np.arange(new) + 0.5) * old / new - 0.5, old, position.triangle, widening=1.0)
        for new, old in zip(size, maps.shape[1:3], strict=True)
    )
    if tuple(size) == tuple(maps.shape[1:3]):
        return maps
    maps = tf.einsum("ri,bijc->brjc", tf.cast(rows, maps.dtype), maps)
    return tf.einsum("sj,brjc->brsc", tf.cast(columns, maps.dtype), maps)
