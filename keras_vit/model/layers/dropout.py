"""Dropout and stochastic depth."""

from typing import Any

import keras
from keras import ops

from keras_vit.model.layers import runtime
from keras_vit.model.layers.base import BaseLayer


@keras.saving.register_keras_serializable("keras_vit")
class Dropout(keras.layers.Dropout):
    """Keras' Dropout, which takes its seeds from `runtime.random_scope` inside of it."""

    def call(self, inputs: Any, training: bool | None = False) -> Any:
        if not training or not self.rate:
            return inputs
        seed = runtime.seed_generator(self.seed_generator)
        return keras.random.dropout(inputs, self.rate, noise_shape=self.noise_shape, seed=seed)


@keras.saving.register_keras_serializable("keras_vit")
class StochasticDepth(BaseLayer):
    """Drop a residual branch with probability `rate` in training (arXiv 1603.09382), or scale it by 1 / (1 - rate)."""

    def __init__(self, rate: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator() if rate else None

    def call(self, x: Any, training: bool | None = None) -> Any:
        if not training or self.seed_generator is None:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        seed = runtime.seed_generator(self.seed_generator)
        return keras.random.dropout(ops.ones(shape, x.dtype), self.rate, seed=seed) * x
