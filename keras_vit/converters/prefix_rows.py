"""Where the class token's position stands: in a row of the position embedding (Google, Hugging Face), or in the token
itself (big_vision). The two are the same function, and a model is written in either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig

POSITION = "position/embedding"
# In the order in which they stand in front.
PREFIX = ("prefix/cls", "prefix/distillation", "prefix/registers")


def moved(variables: Mapping[str, Any], config: ViTConfig, position_prefix: bool) -> dict[str, np.ndarray]:
    """The variables that change where a model is written with rows for its prefix tokens, or without.

    Args:
        variables: of the model, by path.
        config: of the model.
        position_prefix: whether the rows are wanted.

    Returns:
        path -> new value; empty where nothing has to move. Adding rows is exact (they are zero), leaving them out adds
        each to its token: one rounding.
    """
    count = config.num_prefix_tokens
    if not count or POSITION not in variables or config.position_prefix == position_prefix:
        return {}
    if config.position_place != "stem":  # a row that every block adds is no part of the token
        return {}
    table = keras.ops.convert_to_numpy(variables[POSITION]).astype(np.float32)
    if position_prefix:
        return {POSITION: np.concatenate([np.zeros_like(table[:, :1]).repeat(count, axis=1), table], axis=1)}
    changed = {POSITION: table[:, count:]}
    start = 0
    for path in PREFIX:
        if path in variables:
            token = keras.ops.convert_to_numpy(variables[path]).astype(np.float32)
            changed[path] = token + table[:, start : start + token.shape[1]]
            start += token.shape[1]
    return changed


def without_empty(table: np.ndarray, count: int) -> np.ndarray:
    """A position embedding without the rows of its prefix tokens, which `moved` had added.

    Args:
        table: (1, count + grid, hidden_size).
        count: of the rows.

    Raises:
        CheckpointError: where they are not empty after all.
    """
    if np.any(table[:, :count]):
        raise CheckpointError(f"notes that the first {count} rows of its position embedding are zero, and they are not")
    return table[:, count:]
