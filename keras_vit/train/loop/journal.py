"""What is written down while training: figures of the steps, and how fast they were."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.train.loop.logs import Log
from keras_vit.train.loop.progress import Progress
from keras_vit.train.step import step


class Journal:
    """Collects the figures of steps, and writes their means to the log, to the bar and to `history`.

    Args:
        log: where lines go, None for nowhere.
        bar: that shows them.
        batch_size: images a step.

    Attributes:
        history: all lines: dicts with "step" and figures.
    """

    def __init__(self, log: Log | None, bar: Progress, *, batch_size: int) -> None:
        self.history: list[dict[str, float]] = []
        self._log, self._bar, self._batch_size = log, bar, batch_size
        self._pending: list[tuple[int, Any]] = []  # figures that nobody has waited for: the device may still work
        self._compiled = False
        self._since = time.monotonic()
        self._counted = 0  # steps that the clock has seen since the last line
        self._steps, self._seconds = 0, 0.0

    def add(self, steps: int, figures: Any) -> None:
        """Takes note of one call of the training function; nothing waits for it, but for the first.

        That one compiles: it does not count for the speed.
        """
        self._pending.append((steps, figures))
        self._bar.advance(steps)
        self._counted += steps
        if not self._compiled:
            figures.numpy()
            self._compiled, self._since, self._counted = True, time.monotonic(), 0

    def report(self, done: int, *, learning_rate: float) -> dict[str, float]:
        """Writes the means since the last report as the line of step `done`.

        Returns:
            them, and "stop": how many had been asked to stop.
        """
        steps = [count for count, _ in self._pending]
        figures = np.average([figures.numpy() for _, figures in self._pending], axis=0, weights=steps)
        self._pending.clear()
        now = time.monotonic()
        seconds = now - self._since
        self._steps, self._seconds = self._steps + self._counted, self._seconds + seconds
        speed = self._counted * self._batch_size / seconds if self._counted else 0.0
        self._since, self._counted = now, 0
        named = dict(zip(step.FIGURES, map(float, figures), strict=True))
        line = {name: value for name, value in named.items() if name != "stop"}
        line |= {"learning_rate": learning_rate, "images_per_second": speed}
        self.write(done, line)
        self._bar.show(line)
        return named

    def write(self, done: int, line: Mapping[str, float]) -> None:
        """Adds a line."""
        self.history.append({"step": done, **line})
        if self._log:
            self._log.write(done, **line)

    def settle(self) -> None:
        """Returns when all lines are on the disk."""
        if self._log:
            self._log.flush()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside does not count for the speed."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - begun

    @property
    def images_per_second(self) -> float:
        """Of all steps but those that compiled; 0 where there are none."""
        return self._steps * self._batch_size / self._seconds if self._steps else 0.0
