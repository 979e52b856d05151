"""Measure how far a file's outputs are from its model's."""

import math

import numpy as np

MOST_PAIRED = 1000  # images; of more, every second, third ... is taken
DISTINGUISHED = 0.1  # least difference of two images that counts, as a share of the root mean square one
ROUNDING = 1e-5  # as a share of the outputs: smaller differences between images are not the model's
# Times the noise. The largest of 15 changed classes of fine-tuned models was 2.1; normal errors of two classes exceed 4
# in one of 200 cases.
NEAR_TIE = 4.0
MOST_NOISE = 0.05  # that counts, as a share of the model's deviation over classes; an SQNR of 26 dB


def lowest_cosine(expected: np.ndarray, received: np.ndarray) -> float:
    """Return the lowest cosine similarity of an image's outputs, each (images, ...); 1 for equal ones, even zeros."""
    x, y = (values.reshape(len(values), -1).astype(np.float64) for values in (expected, received))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    cosines = np.einsum("ij,ij->i", x, y) / np.maximum(norms, np.finfo(np.float32).tiny)
    are_equal = np.all(x == y, axis=1)  # the logits of a new head are all zero, and have no direction
    return float(np.where(are_equal, 1.0, cosines.clip(-1, 1)).min())


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


def same_best_class(expected: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether images, or tokens, have the same best class (...), and whether they have it or are near ties.

    In a near tie the model's logits (..., classes) of its own class and of the file's are closer than `NEAR_TIE` times
    the file's noise, which is the root mean square of its errors on all other images: one wrong image is no near tie.
    A file that is wrong everywhere does not excuse itself, for the noise counts up to `MOST_NOISE`.
    """
    want, got = (values.reshape(-1, values.shape[-1]).astype(np.float64) for values in (expected, received))
    errors = ((got - want) ** 2).sum(axis=-1)
    noise = np.sqrt((errors.sum() - errors).clip(0) / (max(1, len(want) - 1) * want.shape[-1]))
    most = MOST_NOISE * (want - want.mean(axis=-1, keepdims=True)).std()
    of_files_class = np.take_along_axis(want, got.argmax(axis=-1)[:, None], axis=-1)[:, 0]
    are_same = want.argmax(axis=-1) == got.argmax(axis=-1)
    return are_same, are_same | (want.max(axis=-1) - of_files_class <= NEAR_TIE * noise.clip(max=most))
