"""Configuration of a text tower: one frozen dataclass."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from keras_vit._util.checks import Count, WholeNumber
from keras_vit.model.config_groups import Activation, BlockConfig, Finite, NonNegative, document_groups


@dataclass(frozen=True, kw_only=True)
class TextConfig(BlockConfig):
    """Architecture of a text tower. The fields of the blocks are those of `ViTConfig`; the defaults are CLIP-B/16's.

    Args:
        vocab_size: number of tokens that the tower knows.
        max_length: most tokens of a text, start and end included.
        hidden_size: width of a token.
        num_layers: number of encoder blocks.
        causal: whether a token attends only to itself and to those in front of it (CLIP).
        pooling: "end" takes the end token, "last" the last position, whatever token it has (SigLIP), "first" the first.
        end_token: id of the end token; None: the largest id in a text, as in CLIP's first configs.
        projection_size: width of the embedding; 0 means no projection.
        projection_bias: whether the projection has a bias.
        logit_scale: natural logarithm of the factor of the cosine similarities of texts and images, as files have it;
            None if the file has none.
        logit_bias: number added to their product (SigLIP); None for a pair that is trained with softmax.

    Raises:
        ValueError: fields are wrong or contradict each other; one message names all of them.

    Example:
        >>> keras_vit.text.TextConfig(max_length=64, causal=False, pooling="last").to_dict()["num_layers"]
        12
    """

    vocab_size: Count = 49408
    max_length: Count = 77
    hidden_size: Count = 512
    num_layers: Count = 12
    num_heads: Count = 8
    mlp_dim: Count = 2048
    activation: Activation = "gelu_quick"
    norm_epsilon: NonNegative = 1e-5
    causal: bool = True
    pooling: Literal["end", "last", "first"] = "end"
    end_token: WholeNumber | None = None
    projection_size: WholeNumber = 512
    projection_bias: bool = False
    logit_scale: Finite | None = None
    logit_bias: Finite | None = None

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.hidden_size % self.num_heads:
            yield f"hidden_size must be a multiple of num_heads. Received: {self.hidden_size} and {self.num_heads}"
        if self.tokens_mlp_dim is not None:
            yield f"a text tower has attention and needs tokens_mlp_dim=None. Received: {self.tokens_mlp_dim}"
        if self.end_token is not None and self.end_token >= self.vocab_size:
            yield f"end_token must be below vocab_size={self.vocab_size}. Received: {self.end_token}"

    @property
    def width(self) -> int:
        """Width of the embeddings."""
        return self.projection_size or self.hidden_size


document_groups(TextConfig, BlockConfig)
