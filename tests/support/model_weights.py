"""Compare the weights of models as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_vit.converters.loading import variables_by_path


def values(model: Any) -> dict[str, np.ndarray]:
    """Return the weights of a model, by path."""
    return {path: np.array(variable) for path, variable in variables_by_path(model).items()}


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Check for the same names, shapes, types and bits."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        assert got[name].tobytes() == value.tobytes(), name
