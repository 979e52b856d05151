"""Pool tokens to one feature: a token, the end of a text, the mean of the patches, or attention pooling."""

from typing import Any

import keras
from keras import ops

from keras_vit.model.layers.attention import MultiHeadAttention
from keras_vit.model.layers.base import BaseLayer, glorot_uniform_matrix
from keras_vit.model.layers.mlp import MLP
from keras_vit.model.layers.norm import LayerNormalization


@keras.saving.register_keras_serializable("keras_vit")
class TokenPooling(BaseLayer):
    """Select the token with index `token`, or compute the mean of all tokens after the prefix if it is None."""

    def __init__(self, *, token: int | None = None, prefix_tokens: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.token = token
        self.prefix_tokens = prefix_tokens

    def call(self, x: Any) -> Any:
        return ops.mean(x[:, self.prefix_tokens :], axis=1) if self.token is None else x[:, self.token]

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (input_shape[0], input_shape[-1])


@keras.saving.register_keras_serializable("keras_vit")
class EndTokenPooling(BaseLayer):
    """Select the first token whose id is `end_token` (the first token if there is none), of tokens and their ids.

    None selects the first token with the largest id of its text: the end token of CLIP's own vocabulary.
    """

    def __init__(self, *, end_token: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.end_token = end_token

    def call(self, x: Any, ids: Any) -> Any:
        marks = ids if self.end_token is None else ops.cast(ops.equal(ids, self.end_token), "int32")
        row = ops.argmax(marks, axis=1)[:, None, None]
        return ops.take_along_axis(x, row, axis=1)[:, 0]

    def compute_output_shape(self, input_shape: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
        return (input_shape[0], input_shape[-1])


@keras.saving.register_keras_serializable("keras_vit")
class AttentionPooling(BaseLayer):
    """Let a learned probe attend to the tokens after the prefix, and add an MLP of the result.

    Source: big_vision's MAPHead (arXiv 2106.04560), which has no prefix tokens; timm leaves them out.
    """

    def __init__(
        self,
        num_heads: int,
        mlp_dim: int,
        *,
        activation: str = "gelu_tanh",
        norm_epsilon: float = 1e-6,
        prefix_tokens: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.activation = activation
        self.norm_epsilon = norm_epsilon
        self.prefix_tokens = prefix_tokens
        policy = {"dtype": self.dtype_policy}
        self.attention = MultiHeadAttention(num_heads, name="attention", **policy)
        self.norm = LayerNormalization(epsilon=norm_epsilon, name="norm", **policy)
        self.mlp = MLP(mlp_dim, activation=activation, name="mlp", **policy)

    def build(self, input_shape: tuple[Any, ...]) -> None:
        hidden_size = input_shape[-1]
        glorot = glorot_uniform_matrix(1, hidden_size)
        self.probe = self.add_weight(shape=(1, 1, hidden_size), initializer=glorot, name="probe")
        for part in (self.attention, self.norm, self.mlp):
            part.build((None, 1, hidden_size))

    def call(self, x: Any) -> Any:
        probe = ops.broadcast_to(ops.cast(self.probe, x.dtype), (ops.shape(x)[0], 1, x.shape[-1]))
        pooled = self.attention(probe, x[:, self.prefix_tokens :])
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (input_shape[0], input_shape[-1])
