"""GPTQ: round a kernel to few bits so that the layer's outputs change least (arXiv 2210.17323)."""

import numpy as np

from keras_vit.export.litert.storage import Integers, Storage

DAMPING = 0.01  # share of the mean diagonal; section 3.3
COLUMNS = 64  # columns of a block, whose errors later blocks take at once; section 3.3, which uses 128
SWEEPS = 2  # over all columns, after which few integers change
SHARES = np.linspace(1, 0.6, 9)  # of the largest weight, at which scales may end


def gptq(kernel: np.ndarray, hessian: np.ndarray, storage: Storage, damping: float = DAMPING) -> Integers:
    """Round a kernel; the columns that are not rounded yet compensate the error of each column (Algorithm 1).

    Columns with the largest inputs come first. Then kernels of few bits are rounded again column by column, each
    to make up for all others (QuantEase, arXiv 2309.01885).

    Args:
        kernel: float (outputs, inputs).
        hessian: x.T @ x of the layer's inputs, summed over many rows x, (inputs, inputs); the paper's H is twice that.
        storage: of the integers.
        damping: share of the mean diagonal that is added to the diagonal.
    """
    scales = _least_error_scales(kernel, np.diag(hessian), storage) if storage.bits < 8 else storage.scales(kernel)
    order = np.argsort(-np.diag(hessian), kind="stable")
    # (inputs, outputs): a column of the paper is a contiguous row here
    weights = kernel.T[order]
    steps = scales.T.repeat(len(order) // scales.shape[1], axis=0)[order]
    damped = _damped(hessian, damping)[np.ix_(order, order)]
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    integers = np.empty(kernel.shape, np.int8)
    for start in range(0, len(order), COLUMNS):
        stop = min(start + COLUMNS, len(order))
        errors = np.empty((stop - start, len(kernel)), np.float32)
        for i in range(start, stop):
            rounded = np.rint(weights[i] / steps[i]).clip(storage.least, storage.largest)
            integers[:, order[i]] = rounded
            error = errors[i - start] = (weights[i] - rounded * steps[i]) / factor[i, i]
            weights[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], error)
        weights[stop:] -= factor[start:stop, stop:].T @ errors
    if storage.bits < 8:
        _round_again(integers, kernel, scales, _damped(hessian, damping), storage)
    return Integers(integers, scales)


def _round_again(
    integers: np.ndarray, kernel: np.ndarray, scales: np.ndarray, hessian: np.ndarray, storage: Storage
) -> None:
    """Move each integer, in place, to where the squared error of the layer's outputs is least, the others fixed."""
    steps = scales.T.repeat(kernel.shape[1] // scales.shape[1], axis=0)  # (inputs, outputs)
    diagonal, hessian = np.diag(hessian), hessian.astype(np.float32)
    current = integers.T.astype(np.float32)
    pull = hessian @ (kernel.T - current * steps)
    for start in [*range(0, len(steps), COLUMNS)] * SWEEPS:
        stop = min(start + COLUMNS, len(steps))
        moved = np.zeros((stop - start, len(kernel)), np.float32)
        for i in range(start, stop):
            left = pull[i] - hessian[i, start:i] @ moved[: i - start]
            rounded = np.rint(current[i] + left / (diagonal[i] * steps[i])).clip(storage.least, storage.largest)
            moved[i - start] = (rounded - current[i]) * steps[i]
            current[i] = rounded
        pull -= hessian[:, start:stop] @ moved
    integers[...] = current.T


def _least_error_scales(kernel: np.ndarray, squares: np.ndarray, storage: Storage) -> np.ndarray:
    """Return for each block the scale, of some, with the least error of the outputs if inputs were independent."""
    best, least = storage.scales(kernel), np.inf
    for share in SHARES:
        scales = storage.scales(kernel, share)
        steps = scales.repeat(kernel.shape[1] // scales.shape[1], axis=1)
        rounded = np.rint(kernel / steps).clip(storage.least, storage.largest) * steps
        errors = (np.square(rounded - kernel) * squares).reshape(*scales.shape, -1).sum(axis=-1)
        best, least = np.where(errors < least, scales, best), np.minimum(errors, least)
    return best


def _damped(hessian: np.ndarray, damping: float) -> np.ndarray:
    """Return the Hessian, float64, with more on its diagonal."""
    diagonal = np.diag(hessian)
    return hessian + np.diag(np.where(diagonal > 0, 0.0, 1.0) + damping * max(diagonal.mean(), 1e-30))
