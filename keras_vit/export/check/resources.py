"""Measure the time and the memory of a block."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SAMPLING_INTERVAL = 0.005  # seconds


@dataclass
class Resources:
    """The duration of a block, and its peak of resident memory above that at the start (None if not known)."""

    seconds: float = 0.0
    peak_bytes: int | None = None


@contextlib.contextmanager
def measure_resources() -> Iterator[Resources]:
    """Measure the block; the yielded Resources are complete after the block."""
    used = Resources()
    has_ended = threading.Event()
    before = resident_bytes()

    def sample_memory() -> None:
        if before is None:
            return
        is_last = False
        while not is_last:
            is_last = has_ended.wait(SAMPLING_INTERVAL)
            used.peak_bytes = max(used.peak_bytes or 0, (resident_bytes() or 0) - before)

    sampler = threading.Thread(target=sample_memory, daemon=True)
    start = time.perf_counter()
    sampler.start()
    try:
        yield used
    finally:
        used.seconds = time.perf_counter() - start
        has_ended.set()
        sampler.join()


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None on systems without Linux's /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return 1024 * int(status.read_text(encoding="ascii").partition("VmRSS:")[2].split()[0])
