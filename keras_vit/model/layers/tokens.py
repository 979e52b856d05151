"""Prefix tokens: class token (paper, section 3.1), DeiT's distillation token (arXiv 2012.12877), registers."""

from typing import Any

import keras
from keras import ops

from keras_vit.model.layers.initializers import initializer


@keras.saving.register_keras_serializable("keras_vit")
class PrefixTokens(keras.layers.Layer):
    """Prepend learned tokens: class token, distillation token, registers (arXiv 2309.16588), in this order."""

    def __init__(
        self, *, class_token: bool = True, distilled: bool = False, num_registers: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.class_token = class_token
        self.distilled = distilled
        self.num_registers = num_registers

    def build(self, input_shape: tuple[Any, ...]) -> None:
        hidden_size = input_shape[-1]
        self.prefix = []
        if self.class_token:
            self.prefix.append(self.add_weight(shape=(1, 1, hidden_size), initializer="zeros", name="cls"))
        if self.distilled:
            self.prefix.append(self.add_weight(shape=(1, 1, hidden_size), initializer="zeros", name="distillation"))
        if self.num_registers:
            shape = (1, self.num_registers, hidden_size)
            self.prefix.append(self.add_weight(shape=shape, initializer=initializer("register"), name="registers"))

    def call(self, x: Any) -> Any:
        batch, _, hidden_size = ops.shape(x)
        prefix = [ops.broadcast_to(token, (batch, token.shape[1], hidden_size)) for token in self.prefix]
        return ops.concatenate([*(ops.cast(token, x.dtype) for token in prefix), x], axis=1)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        batch, tokens, hidden_size = input_shape
        return (batch, int(self.class_token) + int(self.distilled) + self.num_registers + tokens, hidden_size)

    def get_config(self) -> dict[str, Any]:
        config = {"class_token": self.class_token, "distilled": self.distilled, "num_registers": self.num_registers}
        return {**super().get_config(), **config}
