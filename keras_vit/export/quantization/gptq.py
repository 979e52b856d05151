"""GPTQ: round a kernel to few bits so that the layer's outputs change least (arXiv 2210.17323)."""

import numpy as np

DAMPING = 0.01  # share of the mean diagonal; section 3.3
COLUMNS = 64  # columns of a block, whose errors later blocks take at once; section 3.3, which uses 128


def gptq(kernel: np.ndarray, hessian: np.ndarray, bits: int) -> np.ndarray:
    """Round a kernel; the columns that are not rounded yet compensate the error of each column (Algorithm 1).

    Columns with the largest inputs come first. The largest weight of each row keeps its value, so that a quantizer that
    derives the scale from the row's maximum finds the one used here.

    Args:
        kernel: float (outputs, inputs).
        hessian: x.T @ x of the layer's inputs, summed over many rows x, (inputs, inputs); the paper's H is twice that.
        bits: number of bits of the integers; a row of the result has multiples of max |row| / (2**(bits - 1) - 1).
    """
    largest_integer = 2 ** (bits - 1) - 1
    order = np.argsort(-np.diag(hessian), kind="stable")
    weights = kernel.T[order].astype(np.float64)  # (inputs, outputs): a column of the paper is a contiguous row here
    maxima = np.abs(weights).max(axis=0)
    scale = np.where(maxima > 0, maxima, 1) / largest_integer
    is_largest = np.abs(weights) == maxima
    extremes = np.sign(weights) * maxima
    factor = _inverse_factor(hessian[np.ix_(order, order)].astype(np.float64))
    for start in range(0, len(order), COLUMNS):
        stop = min(start + COLUMNS, len(order))
        errors = np.empty((stop - start, len(kernel)))
        for i in range(start, stop):
            integers = np.rint(weights[i] / scale).clip(-largest_integer, largest_integer)
            rounded = np.where(is_largest[i], extremes[i], integers * scale)
            error = errors[i - start] = (weights[i] - rounded) / factor[i, i]
            weights[i] = rounded
            weights[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], error)
        weights[stop:] -= factor[start:stop, stop:].T @ errors
    result = np.empty(kernel.shape, np.float32)
    result[:, order] = weights.T
    return result


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """Return the upper Cholesky factor of the inverse of the damped Hessian."""
    diagonal = np.diag(hessian)
    damped = hessian + np.diag(np.where(diagonal > 0, 0, 1) + DAMPING * max(diagonal.mean(), 1e-30))
    return np.linalg.cholesky(np.linalg.inv(damped)).T
