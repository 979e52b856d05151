"""Maps: the tokens of patches as a map, resizing, depth from bins, and what of a Vision Transformer becomes a map."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit import position
from keras_vit._util.checks import is_count
from keras_vit.model.config import ViTConfig
from keras_vit.model.layers.base import BaseLayer
from keras_vit.model.resizing import neighbours

Blocks = int | Iterable[int | str] | None


@keras.saving.register_keras_serializable("keras_vit")
class PatchMap(BaseLayer):
    """Arrange the tokens of patches, (batch, tokens, width), as a map, (batch, rows, columns, width).

    Args:
        grid: (rows, columns).
        prefix_tokens: number of tokens in front of the patches.
        class_token: what becomes of the first token: "drop", "add" to every patch, or "concat" behind every patch,
            which gives (batch, rows, columns, 2 * width).
        **kwargs: of `keras.layers.Layer`.

    Example:
        >>> keras_vit.dense.PatchMap((4, 6), prefix_tokens=1)(np.zeros((2, 25, 8))).shape
        TensorShape([2, 4, 6, 8])
    """

    def __init__(
        self, grid: tuple[int, int], *, prefix_tokens: int = 0, class_token: str = "drop", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.grid = tuple(grid)
        self.prefix_tokens = prefix_tokens
        self.class_token = class_token

    def call(self, x: Any) -> Any:
        """Compute the map."""
        patches = x[:, self.prefix_tokens :]
        if self.class_token == "add":
            patches = patches + x[:, :1]
        elif self.class_token == "concat":
            patches = ops.concatenate([patches, ops.broadcast_to(x[:, :1], ops.shape(patches))], axis=-1)
        return ops.reshape(patches, (-1, *self.grid, patches.shape[-1]))

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Shape of the map."""
        return (input_shape[0], *self.grid, input_shape[-1] * (2 if self.class_token == "concat" else 1))


@keras.saving.register_keras_serializable("keras_vit")
class ResizeBilinear(BaseLayer):
    """Resize maps (batch, height, width, channels) bilinearly without antialias, as PyTorch's `interpolate`.

    Args:
        size: the new (height, width).
        align_corners: whether the centres of the corner cells stay there; otherwise cells have half-pixel centres.
        **kwargs: of `keras.layers.Layer`.

    Example:
        >>> keras_vit.dense.ResizeBilinear((30, 40))(np.zeros((2, 3, 4, 8))).shape
        TensorShape([2, 30, 40, 8])
    """

    def __init__(self, size: tuple[int, int], *, align_corners: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = tuple(size)
        self.align_corners = align_corners

    def call(self, x: Any) -> Any:
        """Resize the map."""
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
        """Shape of the map."""
        return (input_shape[0], *self.size, input_shape[-1])


def resize_maps(maps: Any, size: Sequence[int], *, method: str = "bilinear", rows_first: bool = True) -> Any:
    """Resize TensorFlow tensors (batch, rows, columns, channels) by products with constant matrices.

    XLA compiles the products and their gradients on every device, and on a GPU they are the same in every run, unlike
    TensorFlow's resize. `method` is one of `position.METHODS`. Without `rows_first` TensorFlow chooses the faster
    order, which changes the last bits.
    """
    import tensorflow as tf

    old = tuple(maps.shape[1:3])
    if tuple(size) == old:
        return maps
    rows, columns = (
        tf.cast(position.axis_matrix(*sides, method=method), maps.dtype) for sides in zip(size, old, strict=True)
    )
    if not rows_first:
        return tf.einsum("hi,wj,bijc->bhwc", rows, columns, maps)
    return tf.einsum("wj,bhjc->bhwc", columns, tf.einsum("hi,bijc->bhjc", rows, maps))


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
        """Compute the expected depth."""
        scores = ops.relu(x) + 0.1
        bins = ops.cast(np.linspace(self.least, self.most, x.shape[-1])[:, None], x.dtype)
        return ops.matmul(scores, bins) / ops.sum(scores, axis=-1, keepdims=True)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Shape of the map."""
        return (*input_shape[:-1], 1)


@keras.saving.register_keras_serializable("keras_vit")
class FirstTokens(BaseLayer):
    """Take the first `count` tokens of (batch, tokens, width)."""

    def __init__(self, count: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = count

    def call(self, x: Any) -> Any:
        """Take the tokens."""
        return x[:, : self.count]

    def compute_output_shape(self, input_shape: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
        """Shape of the tokens."""
        return (input_shape[0], self.count, input_shape[-1])


@keras.saving.register_keras_serializable("keras_vit")
class MaskLogits(BaseLayer):
    """Multiply queries (batch, queries, width) with each cell of maps (batch, rows, columns, width).

    The result is (batch, rows, columns, queries): a mask for each query.
    """

    def call(self, queries: Any, maps: Any) -> Any:
        """Compute the products."""
        return ops.einsum("bqc,bhwc->bhwq", queries, maps)

    def compute_output_shape(self, queries_shape: tuple[Any, ...], maps_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Shape of the masks."""
        return (*maps_shape[:-1], queries_shape[1])


def map_names(config: ViTConfig, blocks: Blocks) -> list[str]:
    """Names of the intermediate results that `VisionTransformer.feature_maps` turns into maps."""
    stages = range(1, 1 + len(config.resnet.num_layers)) if config.resnet else range(0)
    numbered = [f"block_{i}" for i in range(config.num_layers)] or [f"stage_{i}" for i in stages]
    named = [*numbered, "tokens", *(f"stage_{i}" for i in stages), *(["root"] if stages else [])]
    count: Any = 1 if blocks is None else blocks
    if is_count(count, least=1):
        chosen: list[Any] = list(range(len(numbered)))[-int(count) :]
        is_known = int(count) <= len(numbered)
    else:
        chosen = list(blocks) if isinstance(blocks, Iterable) and not isinstance(blocks, str) else []
        is_known = bool(chosen) and all(
            block in named if isinstance(block, str) else is_count(block, least=0) and block < len(numbered)
            for block in chosen
        )
    if not is_known:
        raise ValueError(
            f"blocks must be a number of last blocks from 1 to {len(numbered)}, or a list of numbers from 0 to "
            f"{len(numbered) - 1} and of names in {named}. Received: {blocks!r:.200}"
        )
    return [block if isinstance(block, str) else numbered[block] for block in chosen]


def to_map(model: Any, name: str, tensor: Any, *, norm: bool, class_token: str = "drop") -> Any:
    """Convert an intermediate result of a VisionTransformer to a map, (batch, rows, columns, width).

    With `norm` the tokens pass the final LayerNorm first, if the model has it in front of the pooling, and the last
    stage of a BiT its norm and ReLU.
    """
    config = model.config
    if len(tensor.shape) == 4:
        is_last = name == f"stage_{len(config.resnet.num_layers)}" and config.resnet.version == 2
        return model.get_layer("resnet")(model.get_layer("resnet_norm")(tensor)) if norm and is_last else tensor
    if norm and config.num_layers and config.final_norm == "tokens":
        tensor = model.get_layer("encoder_norm")(tensor)
    options = {"name": f"map_{name}", "dtype": keras.backend.standardize_dtype(tensor.dtype)}
    return PatchMap(config.grid, prefix_tokens=config.num_prefix_tokens, class_token=class_token, **options)(tensor)
