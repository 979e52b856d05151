"""Few-shot evaluation: linear heads solved in closed form from a few images of each class."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_vit._util.text import warn
from keras_vit.model.config import Preprocessing
from keras_vit.model.task import Classification
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import strategies
from keras_vit.train.data import sources
from keras_vit.train.data.pipeline import ModelInput
from keras_vit.train.data.split import check_kind
from keras_vit.train.evaluation import choose_strategy, collect_images, distribute_batches, replicate
from keras_vit.train.least_squares import fit_head

SHOTS = (1, 5, 10, 25)


def few_shot(
    model: keras.Model,
    data: str | os.PathLike[str] | Mapping[str, Any] | sources.Data,
    *,
    shots: Sequence[int] = SHOTS,
    l2: float = 2.0**10,
    seed: int = 0,
    layer: str = "pre_logits",
    batch_size: int = 64,
    strategy: str | tf.distribute.Strategy = "auto",
    preprocessing: Preprocessing | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    on_bad_image: str = "skip",
) -> dict[int, float]:
    """Measure a linear classifier on held-out images after fitting it to a few training images of each class.

    Images are drawn without replacement; more shots include the images of fewer. Published figures are means over
    several seeds, because accuracy from one image per class varies much between draws.

    Args:
        model: its features are used, its head is not.
        data: as in `evaluate`, with a training and a held-out split.
        shots: images per class; if a class has fewer, all are used, with a warning.
        l2: strength of the L2 regularisation, above 0.
        seed: seed for the choice of images.
        layer: the layer whose output (batch, width) is the feature: a name in `VisionTransformer.feature_names`, or
            the name of a layer of another Keras model.
        batch_size: images per call on each device.
        strategy: the devices that compute features, as in `evaluate`.
        preprocessing: None takes the model's own.
        data_dir: folder of tensorflow-datasets' prepared data; None is its default.
        on_bad_image: "skip" leaves out files that cannot be decoded; "fail" raises an error.

    Returns:
        The accuracy, 0..1, for each number of shots.

    Raises:
        ValueError: the data lack a training or a held-out split or have several labels per image, the layer does not
            exist or does not return (batch, width), shots are below 1, or l2 is not above 0.

    Example:
        >>> from keras_vit import digits
        >>> data, model = digits.load(), keras_vit.zoo.load("digits")
        >>> train = data.train_images[:50], data.train_labels[:50]
        >>> held_out = data.test_images[:50], data.test_labels[:50]
        >>> keras_vit.train.few_shot(model, {"train": train, "evaluation": held_out}, shots=(1,))[1] > 0.9
        True
    """
    strategies.check_backend()
    counts = sorted(set(shots))
    if not counts or counts[0] < 1 or not l2 > 0:
        raise ValueError(f"shots must be integers >= 1, and l2 above 0. Received: {tuple(shots)} and {l2}")
    opened = sources.open_data(data, data_dir=data_dir, on_bad_image=on_bad_image)
    check_kind(opened, Classification(num_classes=0))
    if opened.train is None or opened.evaluation is None or opened.multi_label:
        raise ValueError(
            f"Few-shot needs a training and a held-out split with one label per image. Received: {opened.name}"
        )
    if opened.num_classes < 2:
        raise ValueError(f"Few-shot needs at least two classes. Received: {', '.join(opened.class_names)}")
    devices, model_input = choose_strategy(model, strategy), ModelInput.from_model(model, preprocessing)
    read = functools.partial(
        distribute_batches,
        strategy=devices,
        batch_size=batch_size,
        model_input=model_input,
        task=opened.task,
    )
    collect = feature_collector(replicate(model, devices), layer, devices)
    train, classes = opened.train, opened.num_classes
    train.expect(model_input.num_channels, model_input.preprocessing)
    if train.damage and not any(map(train.is_readable, range(train.count))):
        raise train.damage.none_left()
    drawn = draw_images(train.labels(), counts[-1], num_classes=classes, seed=seed, is_readable=train.is_readable)
    used = np.unique(np.concatenate(drawn))
    features, labels, indices = collect(read(train, only=used))
    test_features, test_labels, _ = collect(read(opened.evaluation))
    accuracy = {}
    for count in counts:
        mask = np.isin(indices, np.concatenate([images[:count] for images in drawn]))
        kernel, bias = fit_head(features[mask], labels[mask], num_classes=classes, l2=l2)
        accuracy[count] = float(np.mean((test_features @ kernel + bias).argmax(axis=1) == test_labels))
    return accuracy


def draw_images(
    labels: npt.ArrayLike,
    shots: int,
    *,
    num_classes: int,
    seed: int,
    is_readable: Callable[[int], bool] = lambda index: True,
) -> list[np.ndarray]:
    """Draw the indices of images of each class (all if it has fewer, with a warning), as big_vision.

    Another image is drawn in place of one that is not readable.
    """
    random, labels = np.random.default_rng(seed), np.asarray(labels)
    permuted = (random.permutation(np.flatnonzero(labels == number)).tolist() for number in range(num_classes))
    drawn = [np.array([*islice(filter(is_readable, images), shots)], np.int64) for images in permuted]
    if empty := [number for number, images in enumerate(drawn) if not len(images)]:
        raise ValueError(f"Few-shot needs an image of every class; these have none: {empty[:10]} of {num_classes}")
    if small := [number for number, images in enumerate(drawn) if len(images) < shots]:
        warn(
            f"keras_vit: {len(small)} of {num_classes} classes have fewer than {shots} images, class {small[0]} "
            f"{len(drawn[small[0]])}; all of them are used."
        )
    return drawn


def feature_collector(
    model: keras.Model, layer: str, devices: tf.distribute.Strategy
) -> Callable[[Any], list[np.ndarray]]:
    """Make a function from distributed batches to features, classes and indices of all images, in their order.

    The model has its weights on all devices; the features are the output (batch, width) of a layer.
    """
    if isinstance(model, VisionTransformer):

        def features(images: Any) -> Any:
            return model.features(images, [layer])[layer]
    elif layer in (names := [known.name for known in model.layers]):
        features = keras.Model(model.inputs, model.get_layer(layer).output)
    else:
        raise ValueError(f"layer must be one of {names}. Received: {layer!r:.200}")
    extract = tf.function(lambda images: tf.cast(features(images), tf.float32))
    shape = extract.get_concrete_function(tf.TensorSpec(model.input_shape)).output_shapes
    if shape.rank != 2:
        raise ValueError(
            f"A linear classifier needs a layer that returns (batch, width). Received: {layer!r:.200}, "
            f"which returns {shape}"
        )
    return collect_images(devices, lambda batch: (extract(batch["image"]), tf.argmax(batch["label"], axis=1)))
