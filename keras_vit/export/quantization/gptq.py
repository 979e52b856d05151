"""GPTQ: kernels in few bits, rounded so that the layer's results change least (arXiv 2210.17323)."""

from __future__ import annotations

import numpy as np

DAMPING = 0.01  # share of the mean of the diagonal; section 3.3
COLUMNS = 64  # that are rounded before those behind them are touched; likewise, there 128


def gptq(kernel: np.ndarray, squares: np.ndarray, bits: int) -> np.ndarray:
    """Rounds a kernel so that its results change least: each column's error is made good by those not yet rounded.

    Algorithm 1, columns in the order of how large their inputs are. A row's largest weight keeps its value, so that
    whoever looks for the row's scale finds the one that was used.

    Args:
        kernel: float (outputs, inputs).
        squares: of the layer's inputs, x' x summed over many rows x, float (inputs, inputs).
        bits: of the integers.

    Returns:
        float32 (outputs, inputs): in each row whole multiples of max |row| / (2**(bits - 1) - 1).
    """
    most = 2 ** (bits - 1) - 1
    order = np.argsort(-np.diag(squares), kind="stable")
    weights = kernel.T[order].astype(np.float64)  # (inputs, outputs): what is rounded together lies together
    largest = np.abs(weights).max(axis=0)
    scale = np.where(largest > 0, largest, 1) / most
    kept = np.abs(weights) == largest
    extremes = np.sign(weights) * largest
    factor = _factor(squares[np.ix_(order, order)].astype(np.float64))
    for start in range(0, len(order), COLUMNS):
        stop = min(start + COLUMNS, len(order))
        errors = np.empty((stop - start, len(kernel)))
        for place in range(start, stop):
            whole = np.rint(weights[place] / scale).clip(-most, most)
            rounded = np.where(kept[place], extremes[place], whole * scale)
            error = errors[place - start] = (weights[place] - rounded) / factor[place, place]
            weights[place] = rounded
            weights[place + 1 : stop] -= np.outer(factor[place, place + 1 : stop], error)
        weights[stop:] -= factor[start:stop, stop:].T @ errors
    result = np.empty(kernel.shape, np.float32)
    result[:, order] = weights.T
    return result


def _factor(squares: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor of the damped inverse."""
    diagonal = np.diag(squares)
    damped = squares + np.diag(np.where(diagonal > 0, 0, 1) + DAMPING * max(diagonal.mean(), 1e-30))
    return np.linalg.cholesky(np.linalg.inv(damped)).T
