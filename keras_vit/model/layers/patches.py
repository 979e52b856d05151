"""Embed patches as tokens (paper, equation 1)."""

from typing import Any

import keras
from keras import ops

from keras_vit.model.layers.initializers import initializer


@keras.saving.register_keras_serializable("keras_vit")
class PatchEmbedding(keras.layers.Layer):
    """Cut (batch, height, width, channels) into patches and project them to tokens, in row-major order.

    Pixels at the right and bottom that fill no patch are dropped.
    """

    def __init__(self, hidden_size: int, patch_size: tuple[int, int], *, use_bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden_size = hidden_size
        self.patch_size = tuple(patch_size)
        self.use_bias = use_bias

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.kernel = self.add_weight(
            shape=(*self.patch_size, input_shape[-1], self.hidden_size),
            initializer=initializer("convolution"),
            name="kernel",
        )
        self.bias = (
            self.add_weight(shape=(self.hidden_size,), initializer="zeros", name="bias") if self.use_bias else None
        )

    def call(self, images: Any) -> Any:
        x = ops.conv(images, self.kernel, strides=self.patch_size, padding="valid", data_format="channels_last")
        if self.bias is not None:
            x = x + self.bias
        rows, columns = x.shape[1:3]
        return ops.reshape(x, (-1, rows * columns, self.hidden_size))

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, columns = (side // patch for side, patch in zip(input_shape[1:3], self.patch_size, strict=True))
        return (input_shape[0], rows * columns, self.hidden_size)

    def get_config(self) -> dict[str, Any]:
        config = {"hidden_size": self.hidden_size, "patch_size": self.patch_size, "use_bias": self.use_bias}
        return {**super().get_config(), **config}
