"""Heads in closed form: regularised least squares from standardised features to targets of -1 and 1, in float64.

Follows big_vision's `evaluators/fewshot_lsr.py`. (x'x + l2)^-1 x'y == x'(xx' + l2)^-1 y: `Kept` solves for few images
by their products (images, images), `Summed` for many by the products of their features (width, width), which are added
up. Images that a fit has not seen choose the features, the strength of the regularisation, and the scale that turns
scores into logits. An image of weight 2 counts as two images, in all sums, means and deviations.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

BIAS = 100.0  # the constant feature for the bias, so large that the regularisation hardly affects the bias
MIN_DEVIATION = 1e-5  # added to the standard deviation of every feature, which is 0 for a constant one
FOLDS = 5
MOST_FOLDED = 2000  # images: with more, the first of the folds alone is held out, and enough to choose by
MOST_HELD_OUT = 5000
STRENGTHS = tuple(2.0**k for k in range(-12, 9, 2))  # of the regularisation, for each image
MIDDLE = STRENGTHS.index(1.0)
STEPS = 4  # from a scale to twice the scale
SCALES = tuple(2.0 ** (k / STEPS) for k in range(-4, 29))  # of the scores, which are about -1 and 1: 0.5 to 128
BLOCK = 1 << 18  # numbers in a block: 2 MB in float64, which stay in a processor's cache
ROWS = 512  # of a large matrix at once
ADDED = 1024  # images whose products are added to those of the others at once

Columns = npt.NDArray[np.int64]  # the features that a fit reads
Head = tuple[np.ndarray, np.ndarray]  # kernel (features, classes) and bias (classes,) of plain features
Fold = tuple[np.ndarray, np.ndarray]  # features, or scores, of images that no fit has seen; their labels


class Kept:
    """Regressions on features (images, width) float32 that are in memory; `class_weights` (classes,) are of images."""

    def __init__(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        *,
        num_classes: int,
        seed: int = 0,
        class_weights: np.ndarray | None = None,
    ) -> None:
        self.class_weights = _class_weights(class_weights, num_classes)
        self._features, self._labels, self._targets = features, labels, _targets(labels, num_classes)
        self._weights = self.class_weights[labels]
        self.count = float(self._weights.sum())
        self._mean = np.average(features, axis=0, weights=self._weights)
        squares = sum(self._weights[rows] @ np.square(features[rows] - self._mean) for rows in _blocks(*features.shape))
        self._deviation = np.sqrt(squares / self.count) + MIN_DEVIATION
        self._folds = draw_folds(labels, seed)

    def predict(self, columns: Columns) -> Callable[[float], Iterator[Fold]]:
        """Make a function from a strength to the scores of each fold by a fit of the others."""
        products = self._products(columns)
        number = len(self._labels)
        used = range(min(FOLDS if number <= MOST_FOLDED else 1, number))

        def fit(strength: float) -> Iterator[Fold]:
            for fold in used:
                seen, others = np.flatnonzero(self._folds != fold), np.flatnonzero(self._folds == fold)
                l2 = strength * self._weights[seen].sum()
                duals = _solve(products[np.ix_(seen, seen)], self._targets[seen], self._weights[seen], l2)
                yield products[np.ix_(others, seen)] @ duals, self._labels[others]

        return fit

    def head(self, columns: Columns, l2: float) -> Head:
        """Fit all images; `l2` is above 0."""
        duals = _solve(self._products(columns), self._targets, self._weights, l2)
        kernel = np.concatenate([self._part(part).T @ duals for part in np.array_split(columns, _parts(columns))])
        kernel /= self._deviation[columns, None]
        return kernel, BIAS**2 * duals.sum(axis=0) - self._mean[columns] @ kernel

    def equations(self, columns: Columns) -> dict[str, np.ndarray]:
        """Return what `add_images` solves again from: the features that the fit reads, and the labels."""
        return {"features": self._features[:, columns], "labels": self._labels}

    def _products(self, columns: Columns) -> np.ndarray:
        """Products of each two images, with that of the constant feature."""
        products = np.full((len(self._labels),) * 2, BIAS**2)
        for part in np.array_split(columns, _parts(columns)):
            block = self._part(part)
            products += block @ block.T
        return products

    def _part(self, columns: Columns) -> np.ndarray:
        return (self._features[:, columns] - self._mean[columns]) / self._deviation[columns]


class Summed:
    """Regressions on features (images, width) that are added up, and forgotten but for those of held-out images."""

    def __init__(
        self, products: np.ndarray, sums: np.ndarray, *, held_out: Fold, class_weights: np.ndarray | None = None
    ) -> None:
        self.products = products  # of each two features
        self.sums = sums  # of the features of each class, and its number of images; both times its weight
        self.class_weights = _class_weights(class_weights, len(sums))
        self._held_out = held_out  # features and labels of the images that choose; the heads see them too

    @classmethod
    def empty(cls, width: int, num_classes: int, class_weights: np.ndarray | None = None) -> "Summed":
        """Sums of no images."""
        held_out = np.zeros((0, width), np.float32), np.zeros(0, np.int64)
        products, sums = np.zeros((width, width)), np.zeros((num_classes, width + 1))
        return cls(products, sums, held_out=held_out, class_weights=class_weights)

    @property
    def count(self) -> float:
        """Sum of the weights of all images."""
        return float(self.sums[:, -1].sum() + self.class_weights[self._held_out[1]].sum())

    def add(self, features: np.ndarray, labels: np.ndarray) -> None:
        """Add the features of some images."""
        for first in range(0, len(features), ADDED):
            rows = slice(first, first + ADDED)
            part, weights = features[rows].astype(np.float64), self.class_weights[labels[rows], None]
            self.products += part.T @ (weights * part)
            np.add.at(self.sums, labels[rows], weights * np.pad(part, ((0, 0), (0, 1)), constant_values=1.0))

    def predict(self, columns: Columns) -> Callable[[float], Iterator[Fold]]:
        """Make a function from a strength to the scores of the held-out images."""
        problem = _Normal(self, columns)

        def fit(strength: float) -> Iterator[Fold]:
            features, labels = self._held_out
            kernel, bias = problem.solve(strength * problem.count)
            yield features[:, columns] @ kernel.astype(np.float32) + bias.astype(np.float32), labels

        return fit

    def head(self, columns: Columns, l2: float) -> Head:
        """Fit all images; `l2` is above 0. Later calls of `predict` would know the held-out images too."""
        self.add(*self._held_out)
        self._held_out = self._held_out[0][:0], self._held_out[1][:0]
        return _Normal(self, columns).solve(l2)

    def equations(self, columns: Columns) -> dict[str, np.ndarray]:
        """Return what `add_images` solves again from, of all images after `head`: the sums that the fit reads."""
        return {"products": self.products[np.ix_(columns, columns)], "sums": self.sums[:, np.append(columns, -1)]}


Regressions: TypeAlias = Kept | Summed


class _Normal:
    """The normal equations of standardised features."""

    def __init__(self, summed: Summed, columns: Columns) -> None:
        totals = summed.sums.sum(axis=0)
        self.count = totals[-1]
        self._mean = totals[columns] / self.count
        self._matrix = summed.products[np.ix_(columns, columns)]
        variance = self._matrix.diagonal() / self.count - np.square(self._mean)
        self._deviation = np.sqrt(np.maximum(variance, 0.0)) + MIN_DEVIATION
        for first in range(0, len(columns), ROWS):
            rows = slice(first, first + ROWS)
            self._matrix[rows] -= self.count * self._mean[rows, None] * self._mean
            self._matrix[rows] /= self._deviation[rows, None] * self._deviation
        self._diagonal = self._matrix.diagonal().copy()
        # Targets are twice the label, 0 or 1, less 1; standardised features add up to 0.
        labels = summed.sums[:, -1]
        self._moments = 2.0 * (summed.sums[:, columns].T - self._mean[:, None] * labels) / self._deviation[:, None]
        self._mean_target = (2.0 * labels - self.count) * BIAS**2

    def solve(self, l2: float) -> Head:
        np.fill_diagonal(self._matrix, self._diagonal + l2)
        kernel = np.linalg.solve(self._matrix, self._moments) / self._deviation[:, None]
        return kernel, self._mean_target / (self.count * BIAS**2 + l2) - self._mean @ kernel


def fit_head(features: npt.ArrayLike, labels: npt.ArrayLike, *, num_classes: int, l2: float) -> Head:
    """Fit a head to features (images, width), by the smaller of the two matrices."""
    x, y = np.asarray(features), np.asarray(labels)
    regressions: Regressions
    if len(x) > x.shape[1]:
        regressions = summed = Summed.empty(x.shape[1], num_classes)
        summed.add(x, y)
    else:
        regressions = Kept(x, y, num_classes=num_classes)
    return regressions.head(np.arange(x.shape[1]), l2)


def add_images(
    sums: tuple[np.ndarray, np.ndarray] | None,
    features: np.ndarray,
    labels: np.ndarray,
    *,
    num_classes: int,
    strength: float,
) -> tuple[Head, dict[str, np.ndarray]]:
    """Fit a head to images whose products and sums are known, if there are any, and to others; return the equations.

    `num_classes` may be more than the sums have; `strength` is of the regularisation for each image.
    """
    columns = np.arange(features.shape[1])
    regressions: Regressions
    if sums is None and len(features) <= max(len(columns), MOST_FOLDED):
        regressions = Kept(features, labels, num_classes=num_classes)
    else:
        known = Summed.empty(len(columns), num_classes)
        if sums is not None:
            known.products += sums[0]
            known.sums[: len(sums[1])] += sums[1]
        regressions = Summed(known.products, known.sums, held_out=(features, labels))
    head = regressions.head(columns, strength * regressions.count)
    return head, regressions.equations(columns)


def draw_folds(labels: np.ndarray, seed: int) -> np.ndarray:
    """Divide images into fifths, with a fifth of each class."""
    count = len(labels)
    order = np.random.default_rng(seed).permutation(count)
    folds = np.empty(count, np.int64)
    folds[order[np.argsort(labels[order], kind="stable")]] = np.arange(count) % FOLDS
    return folds


def draw_held_out(labels: np.ndarray, seed: int) -> np.ndarray:
    """Draw the images that choose for `Summed`: a fifth of each class, or where that is too many, a smaller share."""
    fifth = np.flatnonzero(draw_folds(labels, seed) == 0)
    fifth = fifth[np.argsort(labels[fifth], kind="stable")]
    chosen = np.linspace(0, len(fifth) - 1, min(len(fifth), MOST_HELD_OUT)).astype(np.int64)
    return np.sort(fifth[chosen])


class Candidate(NamedTuple):
    """Features and a strength of the regularisation for each image, and its results on images that no fit had seen."""

    blocks: int  # whose features are read
    strength: float
    scale: float  # of the scores, with which their cross-entropy is the lowest
    loss: float  # mean cross-entropy in nats
    accuracy: float


def cross_validate(regressions: Regressions, columns: Mapping[int, Columns]) -> list[Candidate]:
    """Measure strengths from the middle down to the lowest loss, for the features of each number of blocks."""
    tried: list[Candidate] = []
    for blocks, own in columns.items():
        predict, found = regressions.predict(own), {}
        place: int | None = STRENGTHS.index(min(tried, key=lambda each: each.loss).strength) if tried else MIDDLE
        while place is not None:
            found[place] = _measure(blocks, STRENGTHS[place], predict, regressions.class_weights)
            best = min(found, key=lambda each: found[each].loss)
            places = (near for near in (best - 1, best + 1) if 0 <= near < len(STRENGTHS) and near not in found)
            place = next(places, None)
        tried += [found[key] for key in sorted(found)]
    return tried


def _measure(
    blocks: int, strength: float, predict: Callable[[float], Iterator[Fold]], class_weights: np.ndarray
) -> Candidate:
    losses, right = np.zeros(len(SCALES)), 0
    folds = [(scores.astype(np.float32), labels) for scores, labels in predict(strength)]
    count = sum(len(labels) for _, labels in folds)
    total = sum(class_weights[labels].sum() for _, labels in folds)
    for scores, labels in folds:
        for rows in _blocks(*scores.shape):
            losses += _add_losses(scores[rows], labels[rows], class_weights[labels[rows]], count)
        right += int(np.sum(scores.argmax(axis=1) == labels))
    best = int(losses.argmin())
    return Candidate(blocks, strength, SCALES[best], float(losses[best] / total), right / count)


def _add_losses(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """Add up the cross-entropies, by weight, of some of `count` images for each scale of their scores."""
    scores = scores - scores.max(axis=1, keepdims=True)
    own = scores[np.arange(len(labels)), labels]
    # One more image with a wrong label keeps the scale finite where all images are right.
    expected = np.sum(weights * (count * own + scores.mean(axis=1)), dtype=np.float64) / (count + 1)
    sums = np.empty(len(SCALES))
    for first in range(STEPS):
        powers = np.exp(SCALES[first] * scores)
        for place in range(first, len(SCALES), STEPS):
            sums[place] = weights @ np.log(powers.sum(axis=1))
            powers *= powers  # of the scale that is twice as large: faster than exp
    return sums - np.multiply(SCALES, expected)


def _solve(products: np.ndarray, targets: np.ndarray, weights: np.ndarray, l2: float) -> np.ndarray:
    """Solve for the dual variables of images with weights; `products` is changed."""
    roots = np.sqrt(weights)[:, None]
    products *= roots * roots.T
    products.flat[:: len(products) + 1] += l2
    return roots * np.linalg.solve(products, roots * targets)


def _class_weights(weights: np.ndarray | None, num_classes: int) -> np.ndarray:
    return np.ones(num_classes) if weights is None else weights.astype(np.float64)


def _targets(labels: np.ndarray, num_classes: int) -> np.ndarray:
    targets = np.full((len(labels), num_classes), -1.0)
    targets[np.arange(len(labels)), labels] = 1.0
    return targets


def _blocks(count: int, numbers: int) -> list[slice]:
    """Divide images into blocks; `numbers` are those that a block has for each image."""
    size = max(1, BLOCK // max(1, numbers))
    return [slice(first, first + size) for first in range(0, count, size)]


def _parts(columns: Columns) -> int:
    return -(-len(columns) // ROWS)
