"""Masked patch prediction, the paper's self-supervision (section 4.6, appendix B.1.2; after BERT, arXiv 1810.04805).

Half of the patch embeddings are corrupted, and for each of them the model predicts the mean colour of its patch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_vit.model.config import ViTConfig
from keras_vit.model.layers.base import initializer
from keras_vit.model.layers.runtime import random_scope
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train.objective import Batch, Objective

CORRUPTED = 0.5  # share of the patches
MASKED, SWAPPED = 8, 1  # of every ten corrupted patches; the others are kept
LEVELS = 8  # per channel, 3 bits
MAX_CHANNELS = 4  # 4,096 classes
SALT = 0x6D61736B  # so that no layer draws from the same seed


class Corruption(NamedTuple):
    """Corruption of the patch embeddings of a batch; every field is (batch, patches), patches row by row."""

    corrupted: Any  # bool: the colour is predicted; the same number in every image
    masked: Any  # bool: corrupted, and replaced by the [mask] embedding
    source: Any  # int32: patch that the embedding is taken from, another one where it was swapped


class MaskedPatchModel(keras.Model):
    """Predict the colours of patches, logits (batch, patches, 8 ** channels), from corrupted patch embeddings.

    It shares the weights of an encoder up to the last block and norm, not head and attention pooling. Embeddings are
    corrupted before position embeddings and prefix tokens are added. Logits are float32, or float64 under that policy.
    """

    def __init__(self, encoder: VisionTransformer) -> None:
        # No autocast: under bfloat16, too, the encoder takes images in float32.
        super().__init__(name="masked_patch", autocast=False)
        config = encoder.config
        _check_config(config)
        # A function, because Keras would count the encoder's unused weights as this model's.
        self._encoder = lambda: encoder
        # A final norm that follows pooling is applied here to every patch.
        self.norm = encoder.get_layer("encoder_norm") if config.final_norm == "pooled" else None
        patches = encoder.get_layer("embedding").output
        tokens = encoder.get_layer(f"block_{config.num_layers - 1}" if self.norm else "encoder_norm").output
        self.stem = keras.Model(encoder.inputs, patches, name="stem")
        self.trunk = keras.Model(patches, tokens, name="trunk")
        self.mask_embedding = self.add_weight(
            shape=(config.hidden_size,), initializer=initializer("position"), name="mask_embedding"
        )
        classes = LEVELS**config.num_channels
        self.colours = keras.layers.Dense(
            classes, kernel_initializer="zeros", name="colours", dtype=encoder.outputs[0].dtype
        )
        self.colours.build((None, None, config.hidden_size))
        self.built = True

    @property
    def encoder(self) -> VisionTransformer:
        """Vision Transformer that is trained."""
        return self._encoder()

    def call(self, images: Any, *, corruption: Corruption, training: bool | None = None) -> Any:
        """Compute the logits of every patch of preprocessed images (batch, height, width, channels)."""
        patches = self.stem(images, training=training)
        mask = tf.cast(self.mask_embedding, patches.dtype)
        patches = tf.gather(patches, corruption.source, batch_dims=1)
        patches = tf.where(corruption.masked[..., None], mask, patches)
        tokens = self.trunk(patches, training=training)[:, self.encoder.config.num_prefix_tokens :]
        return self.colours(tokens if self.norm is None else self.norm(tokens))


def colour_classes(images: Any, config: ViTConfig) -> Any:
    """Compute int32 (batch, patches): the three highest bits of a patch's mean colour, red first, 0..511 for RGB.

    Preprocessing of the images (batch, height, width, channels) is inverted to 0..255. Means are rounded to whole
    numbers, so that float errors do not decide between 31.99999 and 32, and clipped: augmentation and bicubic resizing
    can leave the range. The padding of a hybrid's stem does not count.
    """
    images = tf.convert_to_tensor(images)
    height, width = (cells * step for cells, step in zip(config.grid, config.stride, strict=True))
    # SAME averages over existing pixels only, and equals VALID for multiples of the stride.
    means = tf.nn.avg_pool2d(images[:, :height, :width], config.stride, config.stride, "SAME")
    mean, std = (tf.constant(values, images.dtype) for values in (config.preprocessing.mean, config.preprocessing.std))
    levels = tf.cast(tf.clip_by_value(tf.round((means * std + mean) * 255), 0, 255), tf.int32) // (256 // LEVELS)
    digits = LEVELS ** np.arange(config.num_channels)[::-1]
    return tf.reshape(tf.reduce_sum(levels * digits.astype(np.int32), axis=-1), (-1, config.grid[0] * config.grid[1]))


def corruption(seed: Any, *, batch: Any, patches: int) -> Corruption:
    """Draw the corruption of `batch` images of at least 2 patches, the same for the same seed, int32 (2,).

    "We corrupt 50 % of patch embeddings" (paper): exactly round(patches / 2) per image, halves to even. Each of them is
    independently masked (80 %), replaced by another patch of the image (10 %) or kept (10 %).
    """
    which, fate, distance = tf.unstack(tf.random.stateless_uniform((3, batch, patches), seed, 0, 2**31 - 1, tf.int32))
    # The rank of a random number is uniform, and no two patches have the same rank.
    corrupted = tf.argsort(tf.argsort(which, axis=-1), axis=-1) < round(CORRUPTED * patches)
    fate %= 10
    swapped = corrupted & (fate >= MASKED) & (fate < MASKED + SWAPPED)
    distance = 1 + distance % (patches - 1)  # 0 would be the patch itself
    source = (tf.range(patches) + tf.where(swapped, distance, 0)) % patches
    return Corruption(corrupted, corrupted & (fate < MASKED), source)


def objective(encoder: VisionTransformer, *, remat: bool = False) -> Objective:
    """Make the objective of `MaskedPatchModel`: the mean cross-entropy of the colours of the corrupted patches."""

    def losses(model: Any, batch: Batch, seed: Any) -> tuple[Any, dict[str, Any]]:
        classes = colour_classes(batch["image"], model.encoder.config)
        salted = tf.random.experimental.stateless_fold_in(seed, SALT)
        drawn = corruption(salted, batch=tf.shape(classes)[0], patches=classes.shape[1])
        with random_scope(seed, remat=remat):
            logits = model(batch["image"], corruption=drawn, training=True)
        of_patches = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
        is_correct = tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), classes)
        counted = tf.cast(drawn.corrupted, of_patches.dtype)
        share = counted / tf.reduce_sum(counted, axis=-1, keepdims=True)
        accuracy = tf.reduce_sum(tf.cast(is_correct, of_patches.dtype) * share, axis=-1)
        return tf.reduce_sum(of_patches * share, axis=-1), {"accuracy": accuracy}

    return Objective(losses, MaskedPatchModel(encoder), ("accuracy",), encoder.config.size)


def _check_config(config: ViTConfig) -> None:
    """Raise a ValueError for a model that cannot predict masked patches."""
    if config.num_channels > MAX_CHANNELS:
        raise ValueError(
            f"Every channel multiplies the number of colours by {LEVELS}: masked patch prediction takes images of "
            f"up to {MAX_CHANNELS} channels. Received: num_channels={config.num_channels}"
        )
    if config.grid == (1, 1):
        raise ValueError(
            "Masked patch prediction swaps patches of an image and needs two or more: use a smaller patch_size or a "
            "larger image_size. Received: a model of 1 patch"
        )
    if not config.num_layers:
        raise ValueError(
            "Masked patch prediction corrupts the embeddings of patches; train a ResNet with another objective. "
            "Received: a model without patch embedding (num_layers=0)"
        )
