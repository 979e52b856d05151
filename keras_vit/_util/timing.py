"""Measure the time of calls."""

import time
from collections.abc import Callable


def call_seconds(call: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds that each of several calls takes; `call` returns when its results are on the host."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds
