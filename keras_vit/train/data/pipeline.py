"""Build batches for training and evaluation with tf.data: decode, augment, prepare.

The augmentation of an image depends only on the seed and its position: a resumed run reads the same batches as one that
never stopped.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_vit._util.checks import pair
from keras_vit.model import images, preprocess
from keras_vit.model.config import Preprocessing
from keras_vit.model.pillow import BYTES, CHANNELS
from keras_vit.model.task import Task
from keras_vit.train._recipe import Recipe
from keras_vit.train.data import augment
from keras_vit.train.data.split import Example, Order, Split

CORES = os.cpu_count() or 1
READY_BATCHES = 2  # more would take memory that the plan of a step does not count
NUM_DRAWS = 5  # random numbers per image: flip (1), crop (2), shift (2); inception crop and RandAugment have own seeds
MAP_RANK = 2  # of a label that is a map; classes have rank 0 or 1


class ModelInput(NamedTuple):
    """The images that a model takes."""

    image_size: tuple[int, int]
    num_channels: int
    preprocessing: Preprocessing

    @classmethod
    def from_model(cls, model: keras.Model, preprocessing: Preprocessing | None = None) -> "ModelInput":
        """Read the input of a model; without `preprocessing`, other models than a VisionTransformer take -1..1."""
        if not isinstance(model, keras.Model):
            raise TypeError(f"Expected a Keras model, such as keras_vit.zoo.load returns. Received: {model!r:.200}")
        shape = getattr(model, "input_shape", None)
        if not isinstance(shape, tuple) or len(shape) != 4 or None in shape[1:]:
            raise ValueError(
                "Expected a model with the static input shape (batch, height, width, channels)."
                f" Received: a model with {shape}"
            )
        own = getattr(getattr(model, "config", None), "preprocessing", None) or Preprocessing()
        return cls(pair(shape[1:3], "image_size"), shape[3], preprocessing or own)

    def prepare_function(self) -> Callable[[Any], Any]:
        """Create the function that prepares images as `model.preprocess` does."""
        return preprocess.preprocessing_function(**self._asdict())


def training_batches(
    split: Split, recipe: Recipe, *, model_input: ModelInput, task: Task, order: Order
) -> tf.data.Dataset:
    """Stream augmented batches without end, one per local replica for each batch of `order`.

    The recipe's crop, flip, shift and RandAugment come first, then the mean and deviation of the model's preprocessing
    (its resizing is used for `crop="none"` only), then mixup; the seed of `order` seeds them all. A batch has `image`,
    float32 (batch, height, width, channels), and `label`, the targets of the task, float32 (batch, ...).
    """
    split.expect(model_input.num_channels, model_input.preprocessing)
    # Crops have the model's size already, and are not resized.
    without_resizing = dataclasses.replace(model_input.preprocessing, resize="squash", crop_fraction=1.0)
    prepare = model_input._replace(preprocessing=without_resizing).prepare_function()

    # XLA compiles this into one pass over the pixels, which is faster than single operations.
    @tf.function(jit_compile=True, autograph=False)
    def prepare_and_mix(image: Any, weight: Any) -> Any:
        return augment.mixup(prepare(image), weight)

    @tf.autograph.experimental.do_not_convert
    def finish_batch(batch: Example) -> Example:
        image, label = batch["image"], task.targets(batch["label"])
        if not recipe.mixup:
            return {"image": prepare(image), "label": label}
        # The second seed is negative, so that no image has the same pair of seeds.
        seeds = tf.stack([np.uint64(order.seed).astype(np.int64), -1 - batch["position"][0] // order.replica_batch])
        weight = augment.sample_mixup_weight(seeds, parameter=recipe.mixup)
        return {"image": prepare_and_mix(image, weight), "label": augment.mixup(label, weight)}

    augmentation = _augmentation(recipe, model_input, order.seed)
    examples = split.examples(order).map(augmentation, num_parallel_calls=CORES)
    batches = examples.batch(order.replica_batch, drop_remainder=True)
    return _with_options(batches.map(finish_batch, num_parallel_calls=READY_BATCHES))


def evaluation_batches(
    split: Split,
    *,
    only: npt.NDArray[np.int64] | None = None,
    shard: tuple[int, int] = (0, 1),
    multiple: int = 1,
    batch_size: int,
    model_input: ModelInput,
    task: Task,
) -> tf.data.Dataset:
    """Stream every usable example once, prepared as `model.preprocess` does, in batches of equal size.

    `only` are the indices of the examples to read; None reads all. `shard` is a worker's number and the number of
    workers: all get equally many batches, a multiple of `multiple`. Black images of weight 0 fill the last batches, as
    many more as examples cannot be used. A batch has `image`, float32 (batch, height, width, channels), `label`, the
    targets of the task, float32 (batch, ...), `index`, int64 (batch,), and `weight`, float32 (batch,): 1 for an
    example, 0 for padding.
    """
    split.expect(model_input.num_channels, model_input.preprocessing)
    prepare = model_input.prepare_function()

    @tf.autograph.experimental.do_not_convert
    def prepare_example(example: Example) -> Example:
        image = decode(example["image"], model_input.preprocessing)
        image = prepare(_match_channels(image, model_input.num_channels))
        label = task.targets(_move_map(example["label"], lambda x: augment.nearest(x, model_input.image_size)))
        return {"image": image, "label": label, "index": example["index"], "weight": tf.constant(1.0)}

    number, shards = shard
    count = split.count if only is None else len(only)
    examples = split.iterate_once(only=only, shard=number, shards=shards)
    prepared = examples.map(prepare_example, num_parallel_calls=CORES)
    padding = tf.data.Dataset.from_tensors(
        tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), prepared.element_spec)
    )
    together = batch_size * multiple
    padded = prepared.concatenate(padding.repeat()).take(-(-count // (together * shards)) * together)
    return _with_options(padded.batch(batch_size, drop_remainder=True))


def _augmentation(recipe: Recipe, model_input: ModelInput, seed: int) -> Callable[[Example], Example]:
    """Create the function that augments one example. A map moves with its image."""
    base = np.uint64(seed).astype(np.int64)
    if recipe.randaugment_layers and model_input.num_channels not in CHANNELS:
        raise ValueError(
            "RandAugment is for images of 1 or 3 channels: set randaugment_layers=0. "
            f"Received: {model_input.num_channels} channels"
        )
    # Values stay 0..255. The official crops are resized bilinearly; without a crop the model's own resizing is used.
    own = model_input.preprocessing if recipe.crop == "none" else Preprocessing()
    method = dataclasses.replace(own, mean=(0,), std=(1 / 255,))

    def resize(image: Any, size: tuple[int, int]) -> Any:
        prepare = model_input._replace(image_size=size, preprocessing=method).prepare_function()
        return prepare(_match_channels(image, model_input.num_channels))

    crop = _crop_function(recipe, model_input.image_size, resize, model_input.preprocessing)
    crop_map = _crop_function(recipe, model_input.image_size, augment.nearest)

    def flip(image: Any, draw: Any) -> Any:
        return augment.random_flip(image, draw) if recipe.flip else image

    @tf.autograph.experimental.do_not_convert
    def augment_example(example: Example) -> Example:
        # Separate seeds: operations with the same seed draw the same numbers.
        seeds = tf.random.experimental.stateless_split(tf.stack([base, example["position"]]), 3)
        crop_seed, draws_seed, randaugment_seed = tf.unstack(seeds)
        draws = tf.random.stateless_uniform((NUM_DRAWS,), draws_seed)
        image = flip(crop(example["image"], crop_seed, draws[1:3]), draws[0])
        label = _move_map(example["label"], lambda x: flip(crop_map(x, crop_seed, draws[1:3]), draws[0]))
        if recipe.shift:
            image = augment.random_shift(image, draws[3:], max_share=recipe.shift)
        if recipe.randaugment_layers:
            image = augment.randaugment(
                tf.saturate_cast(image, tf.uint8),
                layers=recipe.randaugment_layers,
                magnitude=recipe.randaugment_magnitude,
                seed=randaugment_seed,
            )
        return {**example, "image": image, "label": label}

    return augment_example


def _move_map(label: Any, move: Callable[[Any], Any]) -> Any:
    """Apply a function of (height, width, 1) to the label if it is a map."""
    return move(label[..., None])[..., 0] if label.shape.rank == MAP_RANK else label


def _crop_function(
    recipe: Recipe,
    size: tuple[int, int],
    resize: Callable[[Any, tuple[int, int]], Any],
    preprocessing: Preprocessing = BYTES,
) -> Callable[[Any, Any, Any], Any]:
    """Create the function that crops (image, seed, two draws) to the model's size; the image may be encoded."""
    read = functools.partial(decode, preprocessing=preprocessing)
    if recipe.crop == "inception":
        part = functools.partial(augment.inception_crop, min_area=recipe.min_area, preprocessing=preprocessing)
        return lambda image, seed, draws: resize(part(_scaled(image, preprocessing), seed), size)
    if recipe.crop == "random":
        side = recipe.crop_resize or round(max(size) * augment.RANDOM_CROP)
        if side < max(size):
            raise ValueError(f"A random crop of {size} needs crop_resize of that or more. Received: {side}")
        larger = (round(side * size[0] / max(size)), round(side * size[1] / max(size)))
        return lambda image, seed, draws: augment.random_crop(resize(read(image), larger), draws, size)
    return lambda image, seed, draws: resize(read(image), size)


def decode(image: Any, preprocessing: Preprocessing = BYTES) -> Any:
    """Decode a JPEG or PNG file to upright pixels; scale values that are not bytes. Pixels stay as they are."""
    if image.dtype != tf.string:
        return _scaled(image, preprocessing)
    return images.decode_pixels(image, images.read_orientation(image), preprocessing)


def _scaled(image: Any, preprocessing: Preprocessing) -> Any:
    return image if image.dtype == tf.string else preprocess.symbolic_pixels(image, preprocessing)


def _match_channels(image: Any, num_channels: int) -> Any:
    """Convert colour to grey for a model of one channel; `preprocessing_function` converts grey to colour."""
    return images.to_grey(image) if num_channels == 1 and image.shape[-1] == 3 else image


def _with_options(stream: tf.data.Dataset) -> tf.data.Dataset:
    """Prefetch in a deterministic order, with one thread per image and many images in parallel."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.max_intra_op_parallelism = 1
    # The autotuner waits by the wall clock: if the clock is set back a day, the end of the iterator takes a day.
    options.autotune.enabled = False
    return stream.prefetch(READY_BATCHES).with_options(options)
