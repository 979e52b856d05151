"""Measure how far a file's outputs are from its model's."""

import math
from typing import Any

import numpy as np

from keras_vit.export.check.running import Outputs, main_name
from keras_vit.model.task import Task

MOST_PAIRED = 1000  # images; of more, every second, third ... is taken
DISTINGUISHED = 0.1  # least difference of two images that counts, as a share of the root mean square one
ROUNDING = 1e-5  # as a share of the outputs: smaller differences between images are not the model's
TINY = float(np.finfo(np.float32).tiny)


def compare(task: Task, expected: Outputs, received: Outputs) -> dict[str, Any]:
    """Return the fields of a `Report` that compare a file's outputs with the model's, by name and of equal shapes."""
    name = main_name(expected)
    amounts = [each for each, values in expected.items() if values.dtype.kind == "f"]  # not numbers of classes
    want, got = (outputs[name].astype(np.float64) for outputs in (expected, received))
    agree, agree_or_tie = task.agreement(name, want, got)
    by_output = [image_cosines(expected[each], received[each]) for each in amounts]
    power, noise = float(np.sum(want**2)), float(np.sum((want - got) ** 2))
    return {
        "images": len(want),
        "max_error": float(np.abs(want - got).max()) / max(float(np.abs(want).max()), TINY),
        "cosine": min((float(cosines.min()) for cosines in by_output), default=1.0),
        "mean_cosine": min((float(cosines.mean()) for cosines in by_output), default=1.0),
        "sqnr": math.inf if noise == 0 else 10 * math.log10(max(power, TINY) / noise),
        "difference_cosine": difference_cosine(want, got),
        "agreement": float(agree.mean()),
        "decided_agreement": float(agree_or_tie.mean()),
        **task.comparison(name, want, got),
    }


def image_cosines(expected: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Return the cosine similarity of each image's outputs, each (images, ...); 1 for equal ones, even zeros."""
    x, y = (values.reshape(len(values), -1).astype(np.float64) for values in (expected, received))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    cosines = np.einsum("ij,ij->i", x, y) / np.maximum(norms, TINY)
    are_equal = np.all(x == y, axis=1)  # the logits of a new head are all zero, and have no direction
    return np.where(are_equal, 1.0, cosines.clip(-1, 1))


def difference_cosine(expected: np.ndarray, received: np.ndarray) -> float | None:
    """Return the mean cosine similarity between differences of two images' outputs, each (images, ...), over all pairs.

    What all images share does not count, however large. Pairs that the model hardly distinguishes do not count either:
    the difference of two photos of the same sky is mostly noise. None if it distinguishes no two images.
    """
    step = math.ceil(len(expected) / MOST_PAIRED)
    x, y = (
        values[::step].reshape(-1, math.prod(values.shape[1:])).astype(np.float64) for values in (expected, received)
    )
    power = float((x**2).sum(axis=1).mean())
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)  # keeps the differences, and the digits of small ones
    pairs = np.triu_indices(len(x), 1)
    products, model, file = (_difference_products(*both)[pairs] for both in ((x, y), (x, x), (y, y)))
    if not len(model) or model.mean() <= ROUNDING**2 * power:
        return None
    counts = model >= DISTINGUISHED**2 * model.mean()
    lengths = np.sqrt(model * np.maximum(file, ROUNDING**2 * model))  # a file may give the same for all images
    return float((products[counts] / lengths[counts]).clip(-1, 1).mean())


def _difference_products(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the scalar products (images, images) of the differences x[i] - x[j] and y[i] - y[j]."""
    gram = x @ y.T
    own = np.diag(gram)
    return own[:, None] + own - gram - gram.T
