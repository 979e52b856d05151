"""Fit linear classifiers to features by regularised least squares, which has a closed form.

The regression maps standardised features to targets of -1 and 1. Follows big_vision's `evaluators/fewshot_lsr.py`, in
float64. Cross-validation chooses the strength of the regularisation and the scale that turns scores into logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BIAS = 100.0  # the constant feature for the bias, so large that the regularisation hardly affects the bias
MIN_DEVIATION = 1e-5  # added to the standard deviation of every feature, which is 0 for a constant one
FOLDS = 5
STRENGTHS = tuple(2.0**k for k in range(-12, 9, 2))  # of the regularisation, for each image
SCALES = tuple(2.0 ** (k / 4) for k in range(-4, 29))  # of the scores, which are about -1 and 1: 0.5 to 128


class LeastSquares:
    """The regression of features (images, width) to 1 for an image's label (images,) and -1 for all other classes."""

    def __init__(self, features: npt.ArrayLike, labels: npt.ArrayLike, *, num_classes: int) -> None:
        x = np.asarray(features, np.float64)
        self._mean, self._deviation = x.mean(axis=0), x.std(axis=0) + MIN_DEVIATION
        x = self._standardise(x)
        y = 2.0 * np.eye(num_classes)[np.asarray(labels)] - 1.0
        # (x'x + l2)^-1 x'y == x'(xx' + l2)^-1 y: the smaller of the two matrices is decomposed.
        is_tall = len(x) >= x.shape[1]
        self._values, vectors = np.linalg.eigh(x.T @ x if is_tall else x @ x.T)
        self._left = vectors if is_tall else x.T @ vectors
        self._right = vectors.T @ (x.T @ y if is_tall else y)

    def scores(self, features: npt.ArrayLike, l2: float) -> np.ndarray:
        """Return the scores (images, classes) of features (images, width), float64; `l2` > 0 takes two products."""
        return self._standardise(features) @ self._weights(l2)

    def head(self, l2: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the kernel (width, classes) and the bias (classes,) that give the scores of plain features."""
        *weights, constant = self._weights(l2)
        kernel = np.asarray(weights) / self._deviation[:, None]
        return kernel, BIAS * constant - self._mean @ kernel

    def _weights(self, l2: float) -> np.ndarray:
        return (self._left / (self._values + l2)) @ self._right

    def _standardise(self, features: npt.ArrayLike) -> np.ndarray:
        """Return standardised features and, as the last column, the bias."""
        standardised = (np.asarray(features, np.float64) - self._mean) / self._deviation
        return np.pad(standardised, ((0, 0), (0, 1)), constant_values=BIAS)


class Candidate(NamedTuple):
    """A strength of the regularisation for each image, and its results on images that its fits had not seen."""

    strength: float
    scale: float  # of the scores, with which their cross-entropy is the lowest
    loss: float  # mean cross-entropy in nats
    accuracy: float


def cross_validate(
    features: np.ndarray, labels: np.ndarray, *, num_classes: int, seed: int, strengths: Sequence[float] = STRENGTHS
) -> list[Candidate]:
    """Measure each strength: every fifth of the images, with a fifth of each class, is predicted from the others."""
    count = len(labels)
    order = np.random.default_rng(seed).permutation(count)
    folds = np.empty(count, np.int64)
    folds[order[np.argsort(labels[order], kind="stable")]] = np.arange(count) % FOLDS
    scores = np.zeros((len(strengths), count, num_classes))
    for number in range(min(FOLDS, count)):
        seen = folds != number
        fit = LeastSquares(features[seen], labels[seen], num_classes=num_classes)
        for place, strength in enumerate(strengths):
            scores[place, ~seen] = fit.scores(features[~seen], strength * seen.sum())
    return [_candidate(strength, each, labels) for strength, each in zip(strengths, scores, strict=True)]


def _candidate(strength: float, scores: np.ndarray, labels: np.ndarray) -> Candidate:
    # One more image with a wrong label keeps the scale finite where all images are right.
    targets = np.full(scores.shape, 1 / (len(labels) + 1) / scores.shape[1])
    targets[np.arange(len(labels)), labels] += len(labels) / (len(labels) + 1)
    scores = scores - scores.max(axis=1, keepdims=True)

    def loss(scale: float) -> float:
        logits = scale * scores
        return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - (targets * logits).sum(axis=1)))

    scale = min(SCALES, key=loss)
    return Candidate(strength, scale, loss(scale), float(np.mean(scores.argmax(axis=1) == labels)))
