"""Time single calls of a function."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def timed(function: Callable[..., Result], *arguments: Any) -> tuple[Result, float]:
    """Return what a function returns, and the seconds that the call took."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start
