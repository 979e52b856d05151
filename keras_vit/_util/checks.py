"""Checks of single values, and their errors."""

from __future__ import annotations

from typing import Any


def is_count(value: Any, *, least: int) -> bool:
    """Whether a value is a whole number from `least`: NumPy's integers are, booleans are not."""
    return not isinstance(value, bool) and hasattr(value, "__index__") and int(value) >= least


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise a ValueError that names the field where its value is not a known one."""
    if value not in known:
        raise ValueError(f"{name} is one of {list(known)}. Received: {value!r}")


def pair(value: Any, name: str) -> tuple[int, int]:
    """An int or (height, width) as (height, width)."""
    sides = (value, value) if is_count(value, least=1) else value
    if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(is_count(side, least=1) for side in sides):
        raise ValueError(f"{name} is a whole number from 1 or (height, width). Received: {value!r}")
    return int(sides[0]), int(sides[1])
