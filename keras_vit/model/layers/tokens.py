"""From patches to tokens, and from tokens to one feature: class token, pooling."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.model.layers.attention import MultiHeadAttention
from keras_vit.model.layers.base import BaseLayer, LayerNormalization, glorot_uniform_matrix, initializer
from keras_vit.model.layers.block import MLP
from keras_vit.model.layers.runtime import Shape, Tensor


@keras.saving.register_keras_serializable("keras_vit")
class PatchEmbedding(BaseLayer):
    """Cut images into patches and project them to tokens, row by row; pixels that fill no patch are dropped."""

    def __init__(self, hidden_size: int, patch_size: tuple[int, int], *, use_bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden_size = hidden_size
        self.patch_size = tuple(patch_size)
        self.use_bias = use_bias

    def build(self, input_shape: Shape) -> None:
        self.kernel = self.add_weight(
            shape=(*self.patch_size, input_shape[-1], self.hidden_size),
            initializer=initializer("convolution"),
            name="kernel",
        )
        self.bias = (
            self.add_weight(shape=(self.hidden_size,), initializer="zeros", name="bias") if self.use_bias else None
        )

    def call(self, images: Tensor) -> Tensor:
        x = ops.conv(images, self.kernel, strides=self.patch_size, padding="valid", data_format="channels_last")
        if self.bias is not None:
            x = x + self.bias
        rows, columns = x.shape[1:3]
        return ops.reshape(x, (-1, rows * columns, self.hidden_size))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        rows, columns = (side // patch for side, patch in zip(input_shape[1:3], self.patch_size, strict=True))
        return (input_shape[0], rows * columns, self.hidden_size)


@keras.saving.register_keras_serializable("keras_vit")
class PrefixTokens(BaseLayer):
    """Prepend learned tokens: class tokens, DeiT's distillation token, registers (arXiv 2309.16588), in this order."""

    def __init__(
        self,
        *,
        class_token: bool = True,
        num_class_tokens: int = 1,
        distilled: bool = False,
        num_registers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.class_token = class_token
        self.num_class_tokens = num_class_tokens
        self.distilled = distilled
        self.num_registers = num_registers

    def build(self, input_shape: Shape) -> None:
        # An attribute each: TensorFlow's checkpoints leave out variables in a list. Several class tokens have another
        # name, because formats with one token have no place for them.
        count = self.num_class_tokens if self.class_token else 0
        hidden_size = input_shape[-1]
        self.cls = self._add("cls", count if count == 1 else 0, hidden_size, "zeros")
        self.class_tokens = self._add("class_tokens", count if count > 1 else 0, hidden_size, initializer("position"))
        self.distillation = self._add("distillation", int(self.distilled), hidden_size, "zeros")
        self.registers = self._add("registers", self.num_registers, hidden_size, initializer("register"))

    def _add(self, name: str, count: int, hidden_size: int, initial: Any) -> Any:
        return self.add_weight(shape=(1, count, hidden_size), initializer=initial, name=name) if count else None

    @property
    def prefix(self) -> list[Tensor]:
        """The variables, (1, tokens, hidden_size) each, in the order of their tokens."""
        tokens = (self.cls, self.class_tokens, self.distillation, self.registers)
        return [token for token in tokens if token is not None]

    def call(self, x: Tensor) -> Tensor:
        batch, _, hidden_size = ops.shape(x)
        prefix = [ops.broadcast_to(token, (batch, token.shape[1], hidden_size)) for token in self.prefix]
        return ops.concatenate([*(ops.cast(token, x.dtype) for token in prefix), x], axis=1)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        batch, tokens, hidden_size = input_shape
        class_tokens = self.num_class_tokens * bool(self.class_token)
        return (batch, class_tokens + int(self.distilled) + self.num_registers + tokens, hidden_size)


@keras.saving.register_keras_serializable("keras_vit")
class TokenEmbedding(BaseLayer):
    """Embed the ids of a text's tokens, (batch, up to `max_length`) integers from 0, and add their positions."""

    def __init__(self, vocab_size: int, max_length: int, hidden_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.hidden_size = hidden_size

    def build(self, input_shape: Shape) -> None:
        for name, rows in (("embedding", self.vocab_size), ("positions", self.max_length)):
            shape = (rows, self.hidden_size)
            setattr(self, name, self.add_weight(shape=shape, initializer=initializer("position"), name=name))

    def call(self, ids: Tensor) -> Tensor:
        if (ids.shape[1] or 0) > self.max_length:
            raise ValueError(f"A text must have at most {self.max_length} tokens. Received: {ids.shape[1]}")
        if hasattr(ids, "numpy"):  # its values can be read
            values = ops.convert_to_numpy(ids)
            if outside := np.unique(values[(values < 0) | (values >= self.vocab_size)]).tolist():
                raise ValueError(f"The ids of tokens are from 0 to {self.vocab_size - 1}. Received: {outside[:5]}")
        ids = ops.where(ids < 0, self.vocab_size, ids)  # `take` would count these from the last row
        return ops.take(self.embedding, ids, axis=0) + self.positions[: ops.shape(ids)[1]]

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape, self.hidden_size)


@keras.saving.register_keras_serializable("keras_vit")
class TokenPooling(BaseLayer):
    """Select the token with index `token`, or compute a mean of tokens.

    Args:
        token: index of the token; None means all tokens after the prefix.
        num_tokens: number of tokens from that index on.
        prefix_tokens: number of tokens that None leaves out.
        **kwargs: of `keras.layers.Layer`.
    """

    def __init__(self, *, token: int | None = None, num_tokens: int = 1, prefix_tokens: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.token = token
        self.num_tokens = num_tokens
        self.prefix_tokens = prefix_tokens

    def call(self, x: Tensor) -> Tensor:
        if self.token is None:
            return ops.mean(x[:, self.prefix_tokens :], axis=1)
        if self.num_tokens == 1:
            return x[:, self.token]
        return ops.mean(x[:, self.token : self.token + self.num_tokens], axis=1)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (input_shape[0], input_shape[-1])


@keras.saving.register_keras_serializable("keras_vit")
class EndTokenPooling(BaseLayer):
    """Select the first token whose id is `end_token` (the first token if there is none), of tokens and their ids.

    None selects the first token with the largest id of its text: the end token of CLIP's own vocabulary.
    """

    def __init__(self, *, end_token: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.end_token = end_token

    def call(self, x: Tensor, ids: Tensor) -> Tensor:
        marks = ids if self.end_token is None else ops.cast(ops.equal(ids, self.end_token), "int32")
        row = ops.argmax(marks, axis=1)[:, None, None]
        return ops.take_along_axis(x, row, axis=1)[:, 0]

    def compute_output_shape(self, input_shape: Shape, *_: Any) -> Shape:
        return (input_shape[0], input_shape[-1])


@keras.saving.register_keras_serializable("keras_vit")
class AttentionPooling(BaseLayer):
    """Let a learned probe attend to the tokens after the prefix, and add an MLP of the result.

    Source: big_vision's MAPHead (arXiv 2106.04560), which has no prefix tokens; timm leaves them out. With an `mlp_dim`
    of 0 there is no MLP, and the probe is the query itself (AIMv2). `use_bias` is that of queries, keys and values.
    """

    def __init__(
        self,
        num_heads: int,
        mlp_dim: int,
        *,
        activation: str = "gelu_tanh",
        norm_epsilon: float = 1e-6,
        prefix_tokens: int = 0,
        use_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.activation = activation
        self.norm_epsilon = norm_epsilon
        self.prefix_tokens = prefix_tokens
        self.use_bias = use_bias
        policy = {"dtype": self.dtype_policy}
        self.attention = MultiHeadAttention(
            num_heads, projects_query=mlp_dim > 0, use_bias=use_bias, name="attention", **policy
        )
        self.norm: Any = None
        self.mlp: Any = None
        if mlp_dim:
            self.norm = LayerNormalization(epsilon=norm_epsilon, name="norm", **policy)
            self.mlp = MLP(mlp_dim, activation=activation, name="mlp", **policy)

    def build(self, input_shape: Shape) -> None:
        hidden_size = input_shape[-1]
        glorot = glorot_uniform_matrix(1, hidden_size)
        self.probe = self.add_weight(shape=(1, 1, hidden_size), initializer=glorot, name="probe")
        for part in (self.attention, self.norm, self.mlp):
            if part is not None:
                part.build((None, 1, hidden_size))

    def call(self, x: Tensor) -> Tensor:
        probe = ops.broadcast_to(ops.cast(self.probe, x.dtype), (ops.shape(x)[0], 1, x.shape[-1]))
        pooled = self.attention(probe, x[:, self.prefix_tokens :])
        return (pooled if self.mlp is None else pooled + self.mlp(self.norm(pooled)))[:, 0]

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (input_shape[0], input_shape[-1])
