"""Batches for training and evaluation: decoding, augmentation and preparation, in tf.data.

What happens to an image follows from the seed and its position alone, whatever runs beside it and wherever the
stream was started: a run that goes on sees the batches it would have seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.model import preprocess
from keras_vit.model.config import Preprocessing
from keras_vit.train._recipe import Recipe
from keras_vit.train.data import augment
from keras_vit.train.data.order import Order
from keras_vit.train.data.randaugment import randaugment
from keras_vit.train.data.split import Once, Split

Example = dict[str, Any]
DRAWS = 5  # numbers an image draws besides its crop and RandAugment: flip, place (2), shift (2)


def training_batches(
    split: Split,
    recipe: Recipe,
    *,
    image_size: tuple[int, int],
    num_channels: int,
    preprocessing: Preprocessing,
    num_classes: int,
    order: Order,
) -> tf.data.Dataset:
    """Augmented batches without end.

    Args:
        split: the examples.
        recipe: its `crop`, `crop_resize`, `min_area`, `flip`, `shift`, `randaugment_layers`,
            `randaugment_magnitude` and `mixup` are what is done, in that order.
        image_size: (height, width) of the model.
        num_channels: of the model.
        preprocessing: of the model; its mean and deviation, and for `crop="none"` also its resizing.
        num_classes: columns of the labels.
        order: which examples, in batches for one replica; its seed is also the augmentation's.

    Returns:
        dictionaries of `image`, float32 (batch, height, width, channels), prepared, and `label`, float32
        (batch, num_classes), for each batch of `order` one a local replica.

    Raises:
        ValueError: for labels of another number of classes, `crop_resize` smaller than the image, or RandAugment
            on images that are neither grey nor of three colours.
    """
    prepare = preprocess.in_graph(
        image_size=image_size,
        num_channels=num_channels,
        preprocessing=dataclasses.replace(preprocessing, resize="squash"),  # they have their size: nothing is resized
    )
    one = _augmentation(recipe, image_size, num_channels, preprocessing, order.seed)

    # In one pass over the pixels: operation by operation this took a seventh of the whole pipeline's time.
    @tf.function(jit_compile=True)
    def mixed(image: Any, share: Any) -> Any:
        return augment.mixup(prepare(image), share)

    def finish(batch: Example) -> Example:
        image, label = batch["image"], _labels(batch["label"], num_classes)
        if not recipe.mixup:
            return {"image": prepare(image), "label": label}
        share = augment.mixup_share(_mixup_seed(order, batch["position"][0]), parameter=recipe.mixup)
        return {"image": mixed(image, share), "label": augment.mixup(label, share)}

    stream = split.examples(order).map(one, num_parallel_calls=tf.data.AUTOTUNE)
    stream = stream.batch(order.replica_batch, drop_remainder=True).map(finish, num_parallel_calls=tf.data.AUTOTUNE)
    return _ordered(stream)


def evaluation_batches(
    split: Once,
    *,
    batch_size: int,
    image_size: tuple[int, int],
    num_channels: int,
    preprocessing: Preprocessing,
    num_classes: int,
    shard: tuple[int, int] = (0, 1),
) -> tf.data.Dataset:
    """Every good example once, prepared as `model.preprocess` does, in batches of one size.

    Args:
        split: the examples.
        batch_size: of every batch: the last is filled up with black images of weight 0.
        image_size: (height, width) of the model.
        num_channels: of the model.
        preprocessing: of the model.
        num_classes: columns of the labels.
        shard: this worker's number, and how many there are. All have equally many batches.

    Returns:
        dictionaries of `image`, float32 (batch, height, width, channels), `label`, float32 (batch, num_classes), and
        `weight`, float32 (batch,): 1 for an example, 0 for what fills up.

    Raises:
        ValueError: for labels of another number of classes.
    """
    prepare = preprocess.in_graph(image_size=image_size, num_channels=num_channels, preprocessing=preprocessing)

    def one(example: Example) -> Example:
        image = prepare(_in_channels(_decoded(example["image"]), num_channels))
        return {"image": image, "label": _labels(example["label"], num_classes), "weight": tf.constant(1.0)}

    number, shards = shard
    batches = -(-split.good // (batch_size * shards))
    examples = split.once(shard=number, shards=shards).map(one, num_parallel_calls=tf.data.AUTOTUNE)
    filling = tf.data.Dataset.from_tensors(
        tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), examples.element_spec)
    )
    stream = examples.concatenate(filling.repeat()).take(batches * batch_size)
    return _ordered(stream.batch(batch_size, drop_remainder=True))


def _augmentation(
    recipe: Recipe, image_size: tuple[int, int], num_channels: int, preprocessing: Preprocessing, seed: int
) -> Callable[[Example], Example]:
    """What is done to one example before it joins a batch."""
    crop = _cropping(recipe, image_size, num_channels, preprocessing)
    base = np.uint64(seed).astype(np.int64)

    def one(example: Example) -> Example:
        own = tf.stack([base, example["position"]])
        # One seed each: operations that share one draw the same numbers.
        of_crop, of_draws, of_randaugment = tf.unstack(tf.random.experimental.stateless_split(own, 3))
        draws = tf.random.stateless_uniform((DRAWS,), of_draws)
        image = crop(example["image"], of_crop, draws[1:3])
        if recipe.flip:
            image = augment.flip(image, draws[0])
        if recipe.shift:
            image = augment.shift(image, draws[3:], share=recipe.shift)
        if recipe.randaugment_layers:
            image = randaugment(
                tf.saturate_cast(image, tf.uint8),
                layers=recipe.randaugment_layers,
                magnitude=recipe.randaugment_magnitude,
                seed=of_randaugment,
            )
        return {**example, "image": image}

    return one


def _cropping(
    recipe: Recipe, image_size: tuple[int, int], num_channels: int, preprocessing: Preprocessing
) -> Callable[[Any, Any, Any], Any]:
    """From an image of any size, encoded or not, a seed and two draws: 0..255 at the model's size and channels."""
    official = Preprocessing(mean=(0,), std=(1 / 255,))  # bilinear, both sides, values as they are

    def resized(image: Any, size: tuple[int, int], how: Preprocessing = official) -> Any:
        image = _in_channels(image, num_channels)
        return preprocess.in_graph(image_size=size, num_channels=num_channels, preprocessing=how)(image)

    if recipe.crop == "inception":
        return lambda image, seed, draws: resized(
            augment.inception_crop(image, seed, min_area=recipe.min_area), image_size
        )
    if recipe.crop == "random":
        side = recipe.crop_resize or round(max(image_size) * augment.RANDOM_CROP)
        if side < max(image_size):
            raise ValueError(f"A random crop of {image_size} needs crop_resize of that or more. Received: {side}")
        larger = (round(side * image_size[0] / max(image_size)), round(side * image_size[1] / max(image_size)))
        return lambda image, seed, draws: augment.place(resized(_decoded(image), larger), draws, image_size)
    how = official
    if recipe.crop == "none":
        how = dataclasses.replace(preprocessing, mean=official.mean, std=official.std)
    return lambda image, seed, draws: resized(_decoded(image), image_size, how)


def _decoded(image: Any) -> Any:
    return augment.decode(image) if image.dtype == tf.string else image


def _in_channels(image: Any, num_channels: int) -> Any:
    """Colour made grey where the model is; the rest is `preprocess.in_graph`'s."""
    return tf.image.rgb_to_grayscale(image) if num_channels == 1 and image.shape[-1] == 3 else image


def _labels(label: Any, num_classes: int) -> Any:
    """Class numbers as rows with a one; rows as they are."""
    if label.dtype.is_integer:
        tf.debugging.assert_less(label, tf.cast(num_classes, label.dtype), "A label is not below the number of classes")
        tf.debugging.assert_non_negative(label, "A label is below 0")
        return tf.one_hot(label, num_classes)
    if label.shape[-1] != num_classes:
        raise ValueError(f"Labels of {num_classes} classes are wanted. Received: rows of {label.shape[-1]}")
    return tf.cast(label, tf.float32)


def _mixup_seed(order: Order, position: Any) -> Any:
    """Of the batch that begins at a position: its number and replica. Below zero, where no position is."""
    base = np.uint64(order.seed).astype(np.int64)
    return tf.stack([base, -1 - position // order.replica_batch])


def _ordered(stream: tf.data.Dataset) -> tf.data.Dataset:
    """The stream with its options: always the same order; one thread an image, many images at once."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.max_intra_op_parallelism = 1
    return stream.prefetch(tf.data.AUTOTUNE).with_options(options)
