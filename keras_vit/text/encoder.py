"""Text tower of CLIP or SigLIP: a functional Keras model built from one config, with its tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_vit._util.checks import check_counts
from keras_vit.model import layers as vit
from keras_vit.model.classify import check_outputs, unit_length
from keras_vit.model.config import BlockConfig
from keras_vit.model.config import TextConfig as TextConfig
from keras_vit.model.layers.base import dense_layer, refuse_quantize
from keras_vit.model.layers.tokens import EndTokenPooling, TokenEmbedding
from keras_vit.model.task import Classification
from keras_vit.model.tokenizer import Tokenizer as Tokenizer

BATCH = 64  # texts in a call


@keras.saving.register_keras_serializable("keras_vit")
class TextEncoder(keras.Model):
    """Text tower of CLIP (arXiv 2103.00020), SigLIP (2303.15343) or SigLIP 2 (2502.14786).

    A file of `model.save("text.keras")` has the tokenizer inside.

    Args:
        config: the architecture.
        tokenizer: a Tokenizer of `config.max_length` ids and `config.vocab_size` tokens; None for a model that takes
            ids only.
        dtype: a Keras dtype policy or its name, such as "mixed_bfloat16"; None means the global policy.
        name: name of the model.

    Input: int32 ids (batch, length), as `tokenize` returns them; length is at most `config.max_length`, and exactly
    that for SigLIP. Output: the embeddings (batch, config.width), of any length, which transformers call text_features
    (without a projection, pooler_output); float32 under every dtype policy but "float64".

    Raises:
        ValueError: the tokenizer does not belong to the model.

    Example:
        >>> encoder = keras_vit.zoo.text_encoder("digits")
        >>> ids = encoder.tokenize(["seven", "a photo of a three."])
        >>> ids.shape, encoder(ids).shape, encoder.embed("seven").shape
        ((2, 40), TensorShape([2, 64]), (1, 64))
        >>> encoder.features(ids, ["block_0"])["block_0"].shape
        TensorShape([2, 40, 32])
    """

    def __init__(
        self, config: TextConfig, tokenizer: Tokenizer | None = None, *, dtype: Any = None, name: str = "text"
    ) -> None:
        policy = keras.dtype_policies.get(dtype if dtype is not None else keras.config.dtype_policy())
        ids = keras.Input((None,), dtype="int32", name="ids")
        super().__init__(inputs=ids, outputs=_network(config, policy, ids), name=name)
        self.config = config
        self._policy = policy
        # A cached function, because Keras would save models that it finds in attributes.
        self._feature_model = functools.cache(
            lambda names: keras.Model(ids, {name: self.get_layer(name).output for name in names})
        )
        if tokenizer is not None:
            _check_tokenizer(tokenizer, config)
        self.tokenizer = tokenizer

    @property
    def task(self) -> Classification:
        """Task of the output, which is a feature."""
        return Classification(num_classes=0)

    def features(self, ids: Any, layers: Iterable[str]) -> dict[str, Any]:
        """Compute intermediate results for ids (batch, length).

        Args:
            ids: as `tokenize` returns them.
            layers: names of layers: "tokens" (words and positions), "block_0" ..., "encoder_norm", "pool".

        Returns:
            A dict from name to tensor (batch, length, hidden_size), for "pool" (batch, hidden_size).
        """
        return self._feature_model(tuple(layers))(ids)

    def tokenize(self, texts: str | Iterable[str]) -> np.ndarray:
        """Convert texts to ids, int32 (texts, config.max_length), as `Tokenizer` does.

        Args:
            texts: a string, or a list of strings.

        Raises:
            ValueError: there is no text, or no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(
                "The text encoder has no tokenizer, because there was none beside its file: "
                "load it with keras_vit.text.load(path, tokenizer=folder)"
            )
        return self.tokenizer(texts)

    def embed(self, texts: str | Iterable[str], *, batch_size: int = BATCH) -> np.ndarray:
        """Embed one text or several. Embeddings have length 1: dot products are cosine similarities.

        Args:
            texts: a string, or a list of strings.
            batch_size: number of texts in a call, from 1.

        Returns:
            float32 (texts, config.width), in the order of the texts.

        Raises:
            ValueError: there is no text, or no tokenizer; the weights are not finite.
        """
        check_counts(batch_size=batch_size)
        ids = self.tokenize(texts)
        parts = [self(ids[start : start + batch_size], training=False) for start in range(0, len(ids), batch_size)]
        joined = np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])
        check_outputs(joined)
        return unit_length(joined)

    def get_config(self) -> dict[str, Any]:
        """Arguments of `from_config`: config, dtype policy and name."""
        policy = keras.dtype_policies.serialize(self._policy)
        return {"config": self.config.to_dict(), "dtype": policy, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> TextEncoder:
        """Build a new model with initial weights and no tokenizer from the result of `get_config`."""
        del custom_objects  # every layer is registered
        return cls(TextConfig(**config["config"]), dtype=config["dtype"], name=config["name"])

    quantize = refuse_quantize

    def save_own_variables(self, store: Any) -> None:
        """Save the tokenizer; each layer saves its weights."""
        if self.tokenizer is not None:
            store["tokenizer"] = np.frombuffer(self.tokenizer.model, np.uint8)
            store["padding"] = np.array(self.tokenizer.pad_id)

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` saved."""
        if "tokenizer" in store:
            model = np.asarray(store["tokenizer"]).tobytes()
            padding = int(np.asarray(store["padding"]))
            self.tokenizer = Tokenizer(model, length=self.config.max_length, padding=padding)


def _network(config: TextConfig, policy: Any, ids: Any) -> Any:
    """Connect the layers from symbolic ids to embeddings."""
    x = TokenEmbedding(config.vocab_size, config.max_length, config.hidden_size, name="tokens", dtype=policy)(ids)
    for i in range(config.num_layers):
        block = BlockConfig.part_of(config)
        x = vit.EncoderBlock(block, causal=config.causal, name=f"block_{i}", dtype=policy)(x)
    x = vit.LayerNormalization(name="encoder_norm", dtype=policy, **config.norm_options)(x)
    if config.pooling == "end":
        x = EndTokenPooling(end_token=config.end_token, name="pool", dtype=policy)(x, ids)
    else:
        token = {"first": 0, "last": -1}[config.pooling]
        x = vit.TokenPooling(token=token, name="pool", dtype=policy)(x)
    dtype = "float64" if policy.compute_dtype == "float64" else "float32"
    if not config.projection_size:
        return keras.layers.Identity(name="feature", dtype=dtype)(x)
    return dense_layer(config.projection_size, use_bias=config.projection_bias, name="head", dtype=dtype)(x)


def _check_tokenizer(tokenizer: Tokenizer, config: TextConfig) -> None:
    """Raise a ValueError if a tokenizer is not that of a text tower with this config."""
    found, wanted = [tokenizer.vocab_size, tokenizer.length], [config.vocab_size, config.max_length]
    if config.pooling == "end" and config.end_token is not None:
        found, wanted = [*found, tokenizer.end_id], [*wanted, config.end_token]
    if found != wanted:
        names = "vocab_size, length and end token"
        raise ValueError(
            f"The tokenizer is another model's: the text tower has the {names} {wanted}. Received: {found}"
        )
