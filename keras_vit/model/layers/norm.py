"""Normalization and scaling of the channels of tokens."""

from typing import Any

import keras
from keras import ops

from keras_vit.model.layers import runtime
from keras_vit.model.layers.base import BaseLayer


@keras.saving.register_keras_serializable("keras_vit")
class LayerNormalization(keras.layers.LayerNormalization):
    """Keras' LayerNormalization of the last axis, which `runtime` can observe, and compile as one if `is_fused`."""

    def __init__(self, *, epsilon: float = 1e-6, is_fused: bool = False, **kwargs: Any) -> None:
        super().__init__(epsilon=epsilon, **kwargs)
        self.is_fused = is_fused

    def call(self, inputs: Any) -> Any:
        runtime.observe(self.path, inputs)
        return runtime.layer_norm(self, super().call, inputs) if self.is_fused else super().call(inputs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "is_fused": self.is_fused}


@keras.saving.register_keras_serializable("keras_vit")
class LayerScale(BaseLayer):
    """Multiply every channel by a learned factor that starts small (CaiT, arXiv 2103.17239)."""

    def __init__(self, initial: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial = initial

    def build(self, input_shape: tuple[Any, ...]) -> None:
        constant = keras.initializers.Constant(self.initial)
        self.gamma = self.add_weight(shape=(input_shape[-1],), initializer=constant, name="gamma")

    def call(self, x: Any) -> Any:
        return x * self.gamma


@keras.saving.register_keras_serializable("keras_vit")
class L2Normalization(BaseLayer):
    """Divide each feature by its Euclidean norm. A feature of zeros stays zero, and its gradient is finite."""

    def call(self, x: Any) -> Any:
        squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
        return x * ops.rsqrt(ops.maximum(squares, 1e-24))
