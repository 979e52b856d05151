"""Few-shot evaluation: linear heads solved in closed form from a few images of each class.

The regression maps standardised features to targets of -1 and 1. Follows big_vision's `evaluators/fewshot_lsr.py`, in
float64. Cross-validation chooses the strength of the regularisation and the scale that turns scores into logits.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

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

BIAS = 100.0  # the constant feature for the bias, so large that the regularisation hardly affects the bias
MIN_DEVIATION = 1e-5  # added to the standard deviation of every feature, which is 0 for a constant one
FOLDS = 5
STRENGTHS = tuple(2.0**k for k in range(-12, 9, 2))  # of the regularisation, for each image
STEPS = 4  # from a scale to twice the scale
SCALES = tuple(2.0 ** (k / STEPS) for k in range(-4, 29))  # of the scores, which are about -1 and 1: 0.5 to 128
BLOCK = 1 << 18  # numbers in a block: 2 MB in float64, which stay in a processor's cache


class LeastSquares:
    """The regression of features (images, width) to 1 for an image's label (images,) and -1 for all other classes.

    More images than features are added up in blocks, so that little more memory is needed than for the features.
    """

    def __init__(self, features: npt.ArrayLike, labels: npt.ArrayLike, *, num_classes: int) -> None:
        x, labels = np.asarray(features), np.asarray(labels)
        blocks = _blocks(len(x), x.shape[1] + num_classes)
        self._mean = x.mean(axis=0, dtype=np.float64)
        squares = sum(np.square(x[rows] - self._mean).sum(axis=0) for rows in blocks)
        self._deviation = np.sqrt(squares / len(x)) + MIN_DEVIATION
        # (x'x + l2)^-1 x'y == x'(xx' + l2)^-1 y: the smaller of the two matrices is decomposed.
        if len(x) > x.shape[1]:
            products, moments = np.zeros((x.shape[1] + 1,) * 2), np.zeros((x.shape[1] + 1, num_classes))
            for rows in blocks:
                part = self._standardise(x[rows])
                products += part.T @ part
                moments += part.T @ _targets(labels[rows], num_classes)
            self._values, self._left = np.linalg.eigh(products)
            self._right = self._left.T @ moments
        else:
            x = self._standardise(x)
            self._values, vectors = np.linalg.eigh(x @ x.T)
            self._left, self._right = x.T @ vectors, vectors.T @ _targets(labels, num_classes)

    def scores(self, features: npt.ArrayLike, l2: float) -> np.ndarray:
        """Compute the scores (images, classes) of features (images, width), float64; `l2` > 0 takes two products."""
        return self._standardise(features) @ self._weights(l2)

    def head(self, l2: float) -> tuple[np.ndarray, np.ndarray]:
        """Compute the kernel (width, classes) and bias (classes,) that give the scores of plain features."""
        *weights, constant = self._weights(l2)
        kernel = np.asarray(weights) / self._deviation[:, None]
        return kernel, BIAS * constant - self._mean @ kernel

    def _weights(self, l2: float) -> np.ndarray:
        return (self._left / (self._values + l2)) @ self._right

    def _standardise(self, features: npt.ArrayLike) -> np.ndarray:
        """Standardise features, and add the bias as the last column."""
        standardised = (np.asarray(features, np.float64) - self._mean) / self._deviation
        return np.pad(standardised, ((0, 0), (0, 1)), constant_values=BIAS)


def _blocks(count: int, numbers: int) -> list[slice]:
    """Divide images into blocks; `numbers` are those that a block has for each image."""
    size = max(1, BLOCK // numbers)
    return [slice(first, first + size) for first in range(0, count, size)]


def _targets(labels: np.ndarray, num_classes: int) -> np.ndarray:
    targets = np.full((len(labels), num_classes), -1.0)
    targets[np.arange(len(labels)), labels] = 1.0
    return targets


class Candidate(NamedTuple):
    """A strength of the regularisation for each image, and its results on images that its fits had not seen."""

    strength: float
    scale: float  # of the scores, with which their cross-entropy is the lowest
    loss: float  # mean cross-entropy in nats
    accuracy: float


def cross_validate(features: np.ndarray, labels: np.ndarray, *, num_classes: int, seed: int) -> list[Candidate]:
    """Measure each strength: every fifth of the images, with a fifth of each class, is predicted from the others."""
    count = len(labels)
    order = np.random.default_rng(seed).permutation(count)
    folds = np.empty(count, np.int64)
    folds[order[np.argsort(labels[order], kind="stable")]] = np.arange(count) % FOLDS
    losses, right = np.zeros((len(STRENGTHS), len(SCALES))), np.zeros(len(STRENGTHS))
    for number in range(min(FOLDS, count)):
        seen, others = np.flatnonzero(folds != number), np.flatnonzero(folds == number)
        fit = LeastSquares(features[seen], labels[seen], num_classes=num_classes)
        for place, strength in enumerate(STRENGTHS):
            kernel, bias = (values.astype(np.float32) for values in fit.head(strength * len(seen)))  # as a model's
            for rows in _blocks(len(others), num_classes):
                scores, wanted = features[others[rows]] @ kernel + bias, labels[others[rows]]
                losses[place] += _add_losses(scores, wanted, count)
                right[place] += np.sum(scores.argmax(axis=1) == wanted)
    best = losses.argmin(axis=1)
    return [
        Candidate(strength, SCALES[best[place]], float(losses[place, best[place]] / count), float(right[place] / count))
        for place, strength in enumerate(STRENGTHS)
    ]


def _add_losses(scores: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """Add up the cross-entropies of some of `count` images for each scale of their scores (images, classes)."""
    scores = scores - scores.max(axis=1, keepdims=True)
    own = scores[np.arange(len(labels)), labels]
    # One more image with a wrong label keeps the scale finite where all images are right.
    expected = np.sum(count * own + scores.mean(axis=1), dtype=np.float64) / (count + 1)
    sums = np.empty(len(SCALES))
    for first in range(STEPS):
        powers = np.exp(SCALES[first] * scores)
        for place in range(first, len(SCALES), STEPS):
            sums[place] = np.log(powers.sum(axis=1)).sum(dtype=np.float64)
            powers *= powers  # of the scale that is twice as large: faster than exp
    return sums - np.multiply(SCALES, expected)


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
    devices = choose_strategy(model, strategy)
    read = functools.partial(
        distribute_batches,
        strategy=devices,
        batch_size=batch_size,
        model_input=ModelInput.from_model(model, preprocessing),
        task=opened.task,
    )
    collect = feature_collector(replicate(model, devices), layer, devices)
    train, classes = opened.train, opened.num_classes
    drawn = draw_images(train.labels(), counts[-1], num_classes=classes, seed=seed, is_readable=train.is_readable)
    used = np.unique(np.concatenate(drawn))
    features, labels, indices = collect(read(train, only=used))
    test_features, test_labels, _ = collect(read(opened.evaluation))
    accuracy = {}
    for count in counts:
        mask = np.isin(indices, np.concatenate([images[:count] for images in drawn]))
        regression = LeastSquares(features[mask], labels[mask], num_classes=classes)
        accuracy[count] = float(np.mean(regression.scores(test_features, l2).argmax(axis=1) == test_labels))
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
