"""Whether a classifier's probabilities are as high as its accuracy: calibration error, coverage, temperature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 15  # of equal width, as in arXiv 1706.04599
THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
BLOCK = 1 << 22  # logits in float64 at once: 32 MB
LARGEST = 2.0**20  # scale of the logits at which the search gives up
PRECISION = 1e-9  # of the scale, as a share of it: its square is lost in the loss


@dataclass(frozen=True)
class Calibration:
    """Largest probabilities of images compared with how many of these are right.

    Args:
        error: expected calibration error, 0..1 (arXiv 1706.04599): the difference of mean probability and accuracy in
            each of 15 bins of equal width, averaged over the images.
        bins: of each bin that has images: "above" and "most" (its ends, the upper one included), "images" (number),
            "probability" and "accuracy" (means).
        coverage: for each threshold: "threshold"; "answered", the share of the images whose largest probability is at
            least as high; "right", the share of these that is right, None if there are none.

    Example:
        >>> found = keras_vit.train.Calibration.measure(np.array([0.9, 0.9, 0.6]), np.array([True, True, False]))
        >>> round(found.error, 4), found.coverage[1]["right"], found.coverage[5]
        (0.2667, 0.6666666666666666, {'threshold': 0.9, 'answered': 0.6666666666666666, 'right': 1.0})
    """

    error: float
    bins: list[dict[str, float]]
    coverage: list[dict[str, float | None]]

    @classmethod
    def measure(cls, probabilities: np.ndarray, are_right: np.ndarray) -> Calibration | None:
        """Measure the largest probability of each image (n,), 0..1, and whether its class is right; None without any.

        Args:
            probabilities: of the predicted class, (n,) in 0..1. They are compared with the bins and thresholds as they
                are: float32 is not rounded to float64.
            are_right: bool or 0 and 1, (n,).
        """
        chances, right = np.asarray(probabilities), np.asarray(are_right, np.float64)
        if not len(chances):
            return None
        edges = np.linspace(0, 1, BINS + 1).astype(chances.dtype)
        places = np.clip(np.searchsorted(edges, chances, side="left") - 1, 0, BINS - 1)
        bins = [
            {
                "above": float(edges[place]),
                "most": float(edges[place + 1]),
                "images": float(np.sum(places == place)),
                "probability": float(np.mean(chances[places == place], dtype=np.float64)),
                "accuracy": float(np.mean(right[places == place])),
            }
            for place in np.unique(places)
        ]
        error = sum(each["images"] * abs(each["accuracy"] - each["probability"]) for each in bins) / len(chances)
        coverage = []
        for threshold in THRESHOLDS:
            is_answered = chances >= chances.dtype.type(threshold)
            share = float(np.mean(right[is_answered])) if is_answered.any() else None
            coverage.append({"threshold": threshold, "answered": float(np.mean(is_answered)), "right": share})
        return cls(error, bins, coverage)

    def __str__(self) -> str:
        rows = [("largest probability", "answered", "of these right")]
        for row in self.coverage:
            share = "-" if row["right"] is None else f"{row['right']:.2%}"
            rows.append((f"at least {row['threshold']:.2f}", f"{row['answered']:.2%}", share))
        lines = [f"{first:<20}{second:>10}{third:>16}" for first, second, third in rows]
        return "\n".join([f"expected calibration error {self.error:.4f}", *lines])


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Find the number by which the logits (n, classes) must be divided for the least mean cross-entropy of softmax.

    The class with the largest logit stays the same (arXiv 1706.04599). None if no number above 0 is the best: all
    images are right, the logits are no better than equal ones, or a right class has a logit of -inf.
    """
    rows = np.arange(len(labels))
    largest, own = logits.max(axis=1).astype(np.float64), logits[rows, labels].astype(np.float64)
    gaps = largest - own  # of the right class to the largest logit
    if not len(labels) or not np.isfinite(gaps).all() or not gaps.any():
        return None
    size = max(1, BLOCK // logits.shape[1])

    def derivatives(scale: float) -> tuple[float, float]:
        """First and second derivative of the summed loss with respect to the scale of the logits."""
        first = second = 0.0
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            shifted = logits[part].astype(np.float64) - largest[part, None]
            weights = np.exp(scale * shifted)
            shifted[weights == 0] = 0.0  # also of a logit of -inf
            weights /= weights.sum(axis=1, keepdims=True)
            means = np.sum(weights * shifted, axis=1)
            first += float(np.sum(means + gaps[part]))
            second += float(np.sum(np.sum(weights * shifted**2, axis=1) - means**2))
        return first, second

    # The loss is convex in the scale. Newton's steps, and where one leaves what is known of the optimum, half of it.
    low, high, scale = 0.0, LARGEST, 1.0
    while high - low > PRECISION * low or not low:
        slope, curvature = derivatives(scale)
        if slope == 0:
            break
        low, high = (low, scale) if slope > 0 else (scale, high)
        step = scale - slope / curvature if curvature > 0 else 0.0
        if abs(step - scale) <= PRECISION * scale:
            break
        scale = step if low < step < high else min(2 * low, (low + high) / 2) if low else high / 2
        if not 1 / LARGEST < scale < LARGEST / 2:
            return None
    return 1 / scale
