"""Few-shot linear accuracy: how far a handful of labels goes on frozen features (paper, section 4.1).

A regularised least-squares regression maps the features onto targets of -1 and 1; its solution has a closed form, so
that there is nothing to tune. After big_vision's `evaluators/fewshot_lsr.py`, in float64.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_vit.model.config import Preprocessing
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train.data import pipeline, sources
from keras_vit.train.data.split import Once
from keras_vit.train.measure.evaluation import Images

# A feature that is always this: so large that the ridge hardly holds the bias back.
BIAS = 100.0
# Added to every feature's deviation: one that never changes is divided by it.
LEAST_DEVIATION = 1e-5
SHOTS = (1, 5, 10, 25)


def few_shot(
    model: keras.Model,
    data: str | os.PathLike[str] | Mapping[str, Any] | sources.Data = "digits",
    *,
    shots: Sequence[int] = SHOTS,
    l2: float = 2.0**10,
    seed: int = 0,
    layer: str = "pre_logits",
    batch_size: int = 64,
    preprocessing: Preprocessing | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    on_bad_image: str = "skip",
) -> dict[int, float]:
    """Accuracy on held-out images of a linear classifier that saw a few training images of each class.

    The images are drawn by `seed`, without replacement; more shots hold those of fewer. Published figures are means
    over several seeds: one draw of one image a class differs much from the next.

    Args:
        model: its weights are used as they are; what its head says is not.
        data: as for `sources.open_data`, or what it gave.
        shots: images of each class; where a class has fewer, all it has, with a warning.
        l2: strength of the ridge, above 0.
        seed: which images.
        layer: whose output is the feature, (batch, width): a name out of `VisionTransformer.feature_names`, or of a
            layer of another Keras model.
        batch_size: images a call.
        preprocessing: None is the model's own.
        data_dir: where tfds has its data sets.
        on_bad_image: "skip" or "fail".

    Returns:
        shots -> accuracy, 0..1.

    Raises:
        ValueError: for data without a training or a held-out part or with several labels an image, a layer that is
            not there or gives no (batch, width), shots below 1, an l2 not above 0.
    """
    wanted = sorted(set(shots))
    if not wanted or wanted[0] < 1 or not l2 > 0:
        raise ValueError(f"shots are whole numbers from 1 and l2 lies above 0. Received: {tuple(shots)} and {l2}")
    opened = data
    if not isinstance(opened, sources.Data):
        opened = sources.open_data(data, data_dir=data_dir, on_bad_image=on_bad_image)
    if opened.train is None or opened.evaluation is None or opened.multi_label:
        raise ValueError(
            f"Few-shot needs a training and a held-out part with one label an image. Received: {opened.name}"
        )
    extract, images = _extractor(model, layer), Images.of(model, preprocessing)

    def features(part: Once) -> tuple[np.ndarray, np.ndarray]:
        batches = pipeline.evaluation_batches(
            part, batch_size=batch_size, num_classes=opened.num_classes, **images._asdict()
        )
        return _gathered(extract, batches)

    numbers, labels = _labels(opened.train)
    chosen = draw(labels, wanted[-1], num_classes=opened.num_classes, seed=seed)
    seen = np.unique(np.concatenate(chosen))  # in the order in which the part gives them
    known, classes = features(_Part(opened.train, numbers[seen]))
    held_out, expected = features(opened.evaluation)
    accuracy = {}
    for count in wanted:
        taken = np.isin(seen, np.concatenate([some[:count] for some in chosen]))
        classifier = least_squares(known[taken], classes[taken], num_classes=opened.num_classes, l2=l2)
        accuracy[count] = float(np.mean(classifier(held_out).argmax(axis=1) == expected))
    return accuracy


@dataclass(frozen=True)
class Linear:
    """A linear classifier of standardised features: `classifier(features)` gives (batch, classes)."""

    mean: np.ndarray
    deviation: np.ndarray
    weights: np.ndarray

    def __call__(self, features: npt.ArrayLike) -> np.ndarray:
        """Scores (batch, classes), float64, from features (batch, width)."""
        return _with_bias((np.asarray(features, np.float64) - self.mean) / self.deviation) @ self.weights


def least_squares(features: npt.ArrayLike, labels: npt.ArrayLike, *, num_classes: int, l2: float) -> Linear:
    """Solves the regularised least squares.

    Args:
        features: (images, width).
        labels: (images,), 0..num_classes - 1.
        num_classes: targets are 1 at the image's class and -1 at all others.
        l2: strength of the ridge, above 0; the bias is under it too, but BIAS times cheaper.
    """
    x = np.asarray(features, np.float64)
    mean, deviation = x.mean(axis=0), x.std(axis=0) + LEAST_DEVIATION
    x = _with_bias((x - mean) / deviation)
    y = 2.0 * np.eye(num_classes)[np.asarray(labels)] - 1.0
    # (x'x + l2)^-1 x'y == x'(xx' + l2)^-1 y: the smaller of the two matrices is the one to take apart.
    images, width = x.shape
    values, vectors = np.linalg.eigh(x.T @ x if images >= width else x @ x.T)
    inverse = (vectors / (values + l2)) @ vectors.T
    return Linear(mean, deviation, inverse @ (x.T @ y) if images >= width else x.T @ (inverse @ y))


def _with_bias(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, 1)), constant_values=BIAS)


def draw(labels: npt.ArrayLike, shots: int, *, num_classes: int, seed: int) -> list[np.ndarray]:
    """Draws images of each class: a permutation of the class's own, by one NumPy generator, as big_vision's.

    Args:
        labels: (images,) of the whole training part.
        shots: how many of each class; all of a class that has fewer, with a warning.
        num_classes: classes 0..num_classes - 1.
        seed: of the generator.

    Returns:
        for each class the places of its images, in the order drawn.

    Raises:
        ValueError: where a class has no image.
    """
    random, labels = np.random.default_rng(seed), np.asarray(labels)
    chosen = [random.permutation(np.flatnonzero(labels == number))[:shots] for number in range(num_classes)]
    if empty := [number for number, some in enumerate(chosen) if not len(some)]:
        raise ValueError(f"Few-shot needs an image of every class; these have none: {empty[:10]} of {num_classes}")
    if least := [number for number, some in enumerate(chosen) if len(some) < shots]:
        warnings.warn(
            f"keras_vit: {len(least)} of {num_classes} classes have fewer than {shots} images, class {least[0]} "
            f"{len(chosen[least[0]])}; all they have are taken.",
            stacklevel=3,
        )
    return chosen


@dataclass(frozen=True)
class _Part:
    """Some examples of a split, to be looked at once."""

    split: sources.Split
    indices: np.ndarray

    @property
    def good(self) -> int:
        return len(self.indices)

    def once(self, *, shard: int = 0, shards: int = 1) -> tf.data.Dataset:
        wanted = tf.constant(np.isin(np.arange(self.split.count), self.indices))
        return self.split.once(shard=shard, shards=shards).filter(lambda example: wanted[example["index"]])


def _labels(split: sources.Split) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and labels of all good examples of a split; no image is decoded."""
    stream = split.once().map(lambda example: (example["index"], example["label"])).batch(1024)
    pairs = list(stream.as_numpy_iterator())
    return np.concatenate([indices for indices, _ in pairs]), np.concatenate([labels for _, labels in pairs])


def _gathered(extract: Callable[[Any], Any], batches: tf.data.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Features and classes of all images; what fills the last batch up is left out."""
    rows = []
    for batch in batches:
        real = batch["weight"].numpy() > 0
        rows.append((extract(batch["image"]).numpy()[real], batch["label"].numpy().argmax(axis=1)[real]))
    return np.concatenate([features for features, _ in rows]), np.concatenate([classes for _, classes in rows])


def _extractor(model: keras.Model, layer: str) -> Callable[[Any], Any]:
    """Images to features, compiled.

    Raises:
        ValueError: where the layer is not there, or does not give (batch, width).
    """
    if isinstance(model, VisionTransformer):
        part = lambda images: model.features(images, [layer])[layer]  # noqa: E731
    elif layer in (names := [known.name for known in model.layers]):
        part = keras.Model(model.inputs, model.get_layer(layer).output)
    else:
        raise ValueError(f"layer is one of {names}. Received: {layer!r}")
    call = tf.function(lambda images: tf.cast(part(images), tf.float32))
    shape = call.get_concrete_function(tf.TensorSpec(model.input_shape)).output_shapes
    if shape.rank != 2:
        raise ValueError(f"Few-shot wants a layer that gives (batch, width). Received: {layer!r}, which gives {shape}")
    return call
