"""GPTQ: round a kernel to few bits so that the layer's outputs change least (arXiv 2210.17323)."""

import numpy as np

from keras_vit.export.litert.storage import Integers, Storage

DAMPING = 0.01  # share of the mean diagonal; section 3.3
COLUMNS = 64  # columns of a block, whose errors later blocks take at once; section 3.3, which uses 128
SHARES = np.linspace(1, 0.6, 9)  # of the largest weight, at which scales may end


def gptq(kernel: np.ndarray, hessian: np.ndarray, storage: Storage, damping: float = DAMPING) -> Integers:
    """Round a kernel; the columns that are not rounded yet compensate the error of each column (Algorithm 1).

    Columns with the largest inputs come first.

    Args:
        kernel: float (outputs, inputs).
        hessian: x.T @ x of the layer's inputs, summed over many rows x, (inputs, inputs); the paper's H is twice that.
        storage: of the integers.
        damping: share of the mean diagonal that is added to the diagonal.
    """
    scales = _least_error_scales(kernel, np.diag(hessian), storage) if storage.bits < 8 else storage.scales(kernel)
    most = storage.largest
    order = np.argsort(-np.diag(hessian), kind="stable")
    # (inputs, outputs): a column of the paper is a contiguous row here
    weights = kernel.T[order]
    steps = scales.T.repeat(len(order) // scales.shape[1], axis=0)[order]
    factor = _inverse_factor(hessian[np.ix_(order, order)].astype(np.float64), damping).astype(np.float32)
    integers = np.empty(kernel.shape, np.int8)
    for start in range(0, len(order), COLUMNS):
        stop = min(start + COLUMNS, len(order))
        errors = np.empty((stop - start, len(kernel)), np.float32)
        for i in range(start, stop):
            rounded = np.rint(weights[i] / steps[i]).clip(-most, most)
            integers[:, order[i]] = rounded
            error = errors[i - start] = (weights[i] - rounded * steps[i]) / factor[i, i]
            weights[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], error)
        weights[stop:] -= factor[start:stop, stop:].T @ errors
    return Integers(integers, scales)


def _least_error_scales(kernel: np.ndarray, squares: np.ndarray, storage: Storage) -> np.ndarray:
    """Return for each block the scale, of some, with the least error of the outputs if inputs were independent."""
    best, least = storage.scales(kernel), np.inf
    for share in SHARES:
        scales = storage.scales(kernel, share)
        steps = scales.repeat(kernel.shape[1] // scales.shape[1], axis=1)
        rounded = np.rint(kernel / steps).clip(-storage.largest, storage.largest) * steps
        errors = (np.square(rounded - kernel) * squares).reshape(*scales.shape, -1).sum(axis=-1)
        best, least = np.where(errors < least, scales, best), np.minimum(errors, least)
    return best


def _inverse_factor(hessian: np.ndarray, damping: float) -> np.ndarray:
    """Return the upper Cholesky factor of the inverse of the damped Hessian."""
    diagonal = np.diag(hessian)
    damped = hessian + np.diag(np.where(diagonal > 0, 0, 1) + damping * max(diagonal.mean(), 1e-30))
    return np.linalg.cholesky(np.linalg.inv(damped)).T
