"""Layers of models that return a map for every image: tokens as a map, bilinear resizing, depth from bins."""

from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from keras_vit.model.layers.base import BaseLayer


@keras.saving.register_keras_serializable("keras_vit")
class PatchMap(BaseLayer):
    """Arrange the tokens of patches as a map, (batch, rows, columns, width).

    `class_token` says what becomes of the first token: "drop", "add" to every patch, or "concat" behind every patch,
    which gives (batch, rows, columns, 2 * width).
    """

    def __init__(
        self, grid: tuple[int, int], *, prefix_tokens: int = 0, class_token: str = "drop", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.grid = tuple(grid)
        self.prefix_tokens = prefix_tokens
        self.class_token = class_token

    def call(self, x: Any) -> Any:
        patches = x[:, self.prefix_tokens :]
        if self.class_token == "add":
            patches = patches + x[:, :1]
        elif self.class_token == "concat":
            patches = ops.concatenate([patches, ops.broadcast_to(x[:, :1], ops.shape(patches))], axis=-1)
        return ops.reshape(patches, (-1, *self.grid, patches.shape[-1]))

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (input_shape[0], *self.grid, input_shape[-1] * (2 if self.class_token == "concat" else 1))


@keras.saving.register_keras_serializable("keras_vit")
class ResizeBilinear(BaseLayer):
    """Resize maps (batch, height, width, channels) bilinearly without antialias, as torch's `interpolate`.

    `align_corners` maps the centres of the corner cells onto each other; otherwise cells have half-pixel centres.
    """

    def __init__(self, size: tuple[int, int], *, align_corners: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = tuple(size)
        self.align_corners = align_corners

    def call(self, x: Any) -> Any:
        for axis, new in enumerate(self.size, start=1):
            if x.shape[axis] == new:
                continue
            first, share = neighbours(new, x.shape[axis], align_corners=self.align_corners)
            weights = ops.cast(share.reshape(-1, *(1,) * (3 - axis)), x.dtype)
            low = ops.take(x, first, axis=axis)
            high = ops.take(x, np.minimum(first + 1, x.shape[axis] - 1), axis=axis)
            x = low + (high - low) * weights
        return x

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (input_shape[0], *self.size, input_shape[-1])


def neighbours(new: int, old: int, *, align_corners: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Return, for each of `new` cells, the index of its lower neighbour among `old` ones, and the higher one's share.

    Source: area_pixel_compute_source_index of ATen/native/UpSample.h (PyTorch).
    """
    if align_corners:
        places = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        places = np.maximum((np.arange(new) + 0.5) * old / new - 0.5, 0)
    first = np.minimum(places.astype(np.int32), old - 1)
    return first, np.minimum(places - first, 1)


@keras.saving.register_keras_serializable("keras_vit")
class DepthBins(BaseLayer):
    """Turn scores of depth bins, (..., bins), into the expected depth, (..., 1).

    Each score is max(x, 0) + 0.1, divided by their sum; the bins are evenly spaced from `least` to `most` (dinov2's
    DepthBaseDecodeHead).
    """

    def __init__(self, least: float, most: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.least = least
        self.most = most

    def call(self, x: Any) -> Any:
        scores = ops.relu(x) + 0.1
        bins = ops.cast(np.linspace(self.least, self.most, x.shape[-1])[:, None], x.dtype)
        return ops.matmul(scores, bins) / ops.sum(scores, axis=-1, keepdims=True)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*input_shape[:-1], 1)
