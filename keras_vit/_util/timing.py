"""Time single calls of a function."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


def timed(function: Callable[..., Result], *arguments: Any) -> tuple[Result, float]:
    """Return what a function returns, and the seconds that the call took."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def median_milliseconds(function: Callable[[Any], Any], inputs: Iterable[Any]) -> float:
    """Return the median time of a call with each input."""
    return 1000 * statistics.median(timed(function, each)[1] for each in inputs)
