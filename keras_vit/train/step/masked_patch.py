"""Masked patch prediction, the paper's self-supervision (section 4.6, appendix B.1.2; after BERT, arXiv 1810.04805).

Half of the patch embeddings are corrupted, and for each of those the model says which mean colour, of 512, its patch
had. Labels are not looked at. `MaskedPatchModel.encoder` is what goes on to fine-tuning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_vit.model.config import ViTConfig
from keras_vit.model.layers.initializers import initializer
from keras_vit.model.layers.randomness import scope
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train.step.objective import Objective

CORRUPTED = 0.5  # share of the patches
MASKED, SWAPPED = 8, 1  # in ten of the corrupted ones; the rest is kept
LEVELS = 8  # 3 bits a channel
MOST_CHANNELS = 4  # 4,096 classes
SALT = 0x6D61736B  # so that no layer draws from the same seed


class Corruption(NamedTuple):
    """What happens to the patch embeddings of a batch; every field (batch, patches), patches row by row.

    Attributes:
        corrupted: bool, the patches whose colour is asked for, the same number in every image.
        masked: bool, those of them that become the [mask] embedding.
        source: int32, the patch of the same image whose embedding stands here: another for those that are swapped,
            its own for all others.
    """

    corrupted: Any
    masked: Any
    source: Any


class MaskedPatchModel(keras.Model):
    """Predicts the colours of patches from their corrupted embeddings.

    The embeddings are corrupted before position embedding and prefix tokens, which stay as they are.

    Args:
        encoder: of any kind, hybrids included, best without a head. It shares its weights with this model, which has
            all that lead to its patch tokens; head, pre_logits and attention pooling do not take part.
        name: of the model.

    Input: images (batch, height, width, channels), prepared; and the keyword `corruption`.
    Output: logits (batch, patches, 8 ** channels), float32 whatever the policy, float64 under float64.

    Raises:
        ValueError: for an encoder of a single patch, or of too many channels.
    """

    def __init__(self, encoder: VisionTransformer, *, name: str = "masked_patch") -> None:
        # No autocast: the encoder casts the images by itself, and under bfloat16 not to it.
        super().__init__(name=name, autocast=False)
        config = encoder.config
        if config.num_channels > MOST_CHANNELS:
            raise ValueError(
                f"Every channel multiplies the colours by {LEVELS}: masked patch prediction is for images of up to "
                f"{MOST_CHANNELS} channels. Received: num_channels={config.num_channels}"
            )
        _check_patches(config.grid[0] * config.grid[1])
        self._encoder = lambda: encoder  # a function: Keras would count the encoder's other weights as ours
        # Where the last norm comes after pooling, it is here the same for every patch.
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
        """The Vision Transformer that is trained."""
        return self._encoder()

    def call(self, images: Any, *, corruption: Corruption, training: bool | None = None) -> Any:
        """The logits of every patch's colour, corrupted or not."""
        patches = self.stem(images, training=training)
        mask = tf.cast(self.mask_embedding, patches.dtype)
        patches = tf.gather(patches, corruption.source, batch_dims=1)
        patches = tf.where(corruption.masked[..., None], mask, patches)
        tokens = self.trunk(patches, training=training)[:, self.encoder.config.num_prefix_tokens :]
        return self.colours(tokens if self.norm is None else self.norm(tokens))


def colour_classes(images: Any, config: ViTConfig) -> Any:
    """The class of every patch: the three highest bits of its mean red, green and blue, red first.

    The preparation is undone, to 0..255; the mean of each channel is rounded to a whole number (halves to even), so
    that float errors do not decide between 31.99999 and 32. What augmentation or bicubic resizing put outside of 0..255
    is clipped. The stem of a hybrid may pad the image: only its pixels count.

    Args:
        images: float (batch, height, width, channels), prepared by the config's preprocessing.
        config: of the model: stride, grid, mean and deviation.

    Returns:
        int32 (batch, patches), 0..511 for three channels, patches row by row as the model's tokens.
    """
    images = tf.convert_to_tensor(images)
    height, width = (cells * step for cells, step in zip(config.grid, config.stride, strict=True))
    # SAME averages only over what is there, and is VALID for multiples of the stride.
    means = tf.nn.avg_pool2d(images[:, :height, :width], config.stride, config.stride, "SAME")
    mean, std = (tf.constant(values, images.dtype) for values in (config.preprocessing.mean, config.preprocessing.std))
    levels = tf.cast(tf.clip_by_value(tf.round((means * std + mean) * 255), 0, 255), tf.int32) // (256 // LEVELS)
    digits = LEVELS ** np.arange(config.num_channels)[::-1]
    return tf.reshape(tf.reduce_sum(levels * digits.astype(np.int32), axis=-1), (-1, config.grid[0] * config.grid[1]))


def corruption(seed: Any, *, batch: Any, patches: int) -> Corruption:
    """Draws what is corrupted: the same for the same seed.

    The paper says "we corrupt 50 % of patch embeddings": here exactly round(patches / 2) of every image, halves to
    even. Each of them is by itself masked (80 %), swapped for another patch of the image (10 %) or kept (10 %).

    Args:
        seed: int32 (2,).
        batch: number of images.
        patches: of an image, at least 2.

    Raises:
        ValueError: for fewer patches.
    """
    _check_patches(patches)
    which, fate, distance = tf.unstack(tf.random.stateless_uniform((3, batch, patches), seed, 0, 2**31 - 1, tf.int32))
    # The rank of a random number is uniform, and no two patches share one.
    corrupted = tf.argsort(tf.argsort(which, axis=-1), axis=-1) < round(CORRUPTED * patches)
    fate %= 10
    swapped = corrupted & (fate >= MASKED) & (fate < MASKED + SWAPPED)
    distance = 1 + distance % (patches - 1)  # never 0, which would be the patch itself
    source = (tf.range(patches) + tf.where(swapped, distance, 0)) % patches
    return Corruption(corrupted, corrupted & (fate < MASKED), source)


def objective(*, remat: bool = False) -> Objective:
    """Cross-entropy of the colours of the corrupted patches, the mean of each image.

    Args:
        remat: compute encoder blocks again for their gradient.

    Returns:
        an objective of a `MaskedPatchModel` on batches of "image" (batch, height, width, channels), prepared; accuracy
        is the share of an image's corrupted patches whose colour is right.
    """

    def masked_patch(model: Any, batch: dict[str, Any], seed: Any) -> tuple[Any, dict[str, Any]]:
        classes = colour_classes(batch["image"], model.encoder.config)
        salted = tf.random.experimental.stateless_fold_in(seed, SALT)
        drawn = corruption(salted, batch=tf.shape(classes)[0], patches=classes.shape[1])
        with scope(seed, remat=remat):
            logits = model(batch["image"], corruption=drawn, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
        right = tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), classes)
        counted = tf.cast(drawn.corrupted, losses.dtype)
        share = counted / tf.reduce_sum(counted, axis=-1, keepdims=True)
        accuracy = tf.reduce_sum(tf.cast(right, losses.dtype) * share, axis=-1)
        return tf.reduce_sum(losses * share, axis=-1), {"accuracy": accuracy}

    return masked_patch


def _check_patches(patches: int) -> None:
    if patches < 2:
        raise ValueError(
            "Masked patch prediction swaps patches of an image, and so needs two or more: a smaller patch_size or a "
            f"larger image_size. Received: a model of {patches} patch"
        )
