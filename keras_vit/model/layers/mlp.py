"""MLP of an encoder block (paper, section 3.1)."""

from typing import Any

import keras

from keras_vit.model.layers import runtime
from keras_vit.model.layers.activations import activation_function
from keras_vit.model.layers.base import BaseLayer, dense_layer, initializer, refuse_quantize
from keras_vit.model.layers.dropout import Dropout
from keras_vit.model.layers.norm import LayerNormalization


@keras.saving.register_keras_serializable("keras_vit")
class Dense(keras.layers.Dense):
    """Keras' Dense, with an activation by its name; `runtime` can make bias and activation one program."""

    quantize = refuse_quantize

    def __init__(self, units: int, *, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.after = None if activation is None else activation_function(activation)
        self.activation_name = activation

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return runtime.product_then(self, super().__call__, x, self.after)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "activation": self.activation_name}


@keras.saving.register_keras_serializable("keras_vit")
class MLP(BaseLayer):
    """Apply Dense, activation and Dense, with dropout after both, to (..., hidden_size).

    `gated`: the activation is that of a second Dense layer, and multiplies the first one (arXiv 2002.05202).
    `norm_epsilon`: that of a LayerNorm before the last Dense layer; None means no such norm.
    """

    def __init__(
        self,
        mlp_dim: int,
        *,
        activation: str = "gelu_tanh",
        gated: bool = False,
        norm_epsilon: float | None = None,
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.mlp_dim = mlp_dim
        self.activation = activation
        self.gated = gated
        self.norm_epsilon = norm_epsilon
        self.dropout_rate = dropout_rate
        self.dropout = Dropout(dropout_rate, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape: tuple[Any, ...]) -> None:
        hidden_shape = (*input_shape[:-1], self.mlp_dim)
        self.dense1 = Dense(
            self.mlp_dim, activation=None if self.gated else self.activation, name="dense1", **self._options()
        )
        self.dense1.build(input_shape)
        if self.gated:
            self.gate = Dense(self.mlp_dim, activation=self.activation, name="gate", **self._options())
            self.gate.build(input_shape)
        if self.norm_epsilon is not None:
            self.norm = LayerNormalization(epsilon=self.norm_epsilon, name="norm", dtype=self.dtype_policy)
            self.norm.build(hidden_shape)
        self.dense2 = dense_layer(input_shape[-1], name="dense2", **self._options())
        self.dense2.build(hidden_shape)

    def _options(self) -> dict[str, Any]:
        return {
            "kernel_initializer": initializer("dense"),
            "bias_initializer": initializer("dense_bias"),
            "dtype": self.dtype_policy,
        }

    def call(self, x: Any, training: bool | None = None) -> Any:
        x = self.gate(x) * self.dense1(x) if self.gated else self.dense1(x)
        if self.norm_epsilon is not None:
            x = self.norm(x)
        x = self.dropout(x, training=training)
        return self.dropout(self.dense2(x), training=training)
