"""Averages of the metrics of training steps, and the speed of training."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_vit.train.loop.log_files import Log
from keras_vit.train.step.train_step import metric_names


class MetricLogger:
    """Write means of metrics to the log (None for no files), the progress bar and `history`.

    `metrics` are the names of the task's metrics; `batch_size` is in images per step. `advance(steps, text)` moves the
    progress bar and shows a text beside it.
    """

    def __init__(
        self, log: Log | None, advance: Callable[..., None], *, metrics: Sequence[str], batch_size: int
    ) -> None:
        self.history: list[dict[str, float]] = []  # all lines, with "step"
        self._log = log
        self._advance = advance
        self._metrics = metrics
        self._batch_size = batch_size
        self._pending: list[tuple[int, Any]] = []  # tensors that the device may still compute
        self._is_compiled = False
        self._since = time.monotonic()
        self._timed_steps = 0  # since the last line
        self._shown = ""  # beside the bar
        self.show("compiling")  # until the first call is done
        self._all_steps, self._all_seconds = 0, 0.0

    def add(self, steps: int, metrics: Any) -> None:
        """Add the metrics of a call of `steps` steps, without waiting for them except for the first, which compiles."""
        self._pending.append((steps, metrics))
        self._timed_steps += steps
        if self._is_compiled:
            self._advance(steps)
        else:
            metrics.numpy()
            self._advance(steps, "")
            self._is_compiled = True
            self._since = time.monotonic()
            self._timed_steps = 0

    @property
    def has_pending(self) -> bool:
        """Whether steps were taken since the last line."""
        return bool(self._pending)

    def log_means(self, done: int, *, learning_rate: float) -> dict[str, float]:
        """Write the means since the last call as the line of step `done`; return them by name."""
        steps = [count for count, _ in self._pending]
        values = np.average([metrics.numpy() for _, metrics in self._pending], axis=0, weights=steps)
        self._pending.clear()
        means = dict(zip(metric_names(self._metrics), map(float, values), strict=True))
        line = {name: value for name, value in means.items() if name != "stop"}
        line |= {"learning_rate": learning_rate, "images_per_second": self._speed()}
        self.log(done, line)
        self._shown = _one_line(line, self._metrics)
        self.show(self._shown)
        return means

    def log_evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Write metrics on held-out images, if there are any, as one more line of step `done`."""
        if metrics:
            self.log(done, {f"evaluation_{name}": value for name, value in metrics.items()})
        self.show(self._shown)  # the evaluation is over

    def log(self, done: int, line: Mapping[str, float]) -> None:
        """Write a line."""
        self.history.append({"step": done, **line})
        if self._log:
            self._log.write(done, **line)

    def show(self, text: str) -> None:
        """Show a text beside the progress bar."""
        self._advance(0, text)

    def flush(self) -> None:
        """Write all lines to the disk."""
        if self._log:
            self._log.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the speed."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - start

    @property
    def images_per_second(self) -> float:
        """Speed of all steps after those of the first call; 0 if there are none."""
        return self._all_steps * self._batch_size / self._all_seconds if self._all_steps else 0.0

    def _speed(self) -> float:
        """Return the images per second since the last call."""
        now = time.monotonic()
        steps, seconds = self._timed_steps, now - self._since
        self._all_steps += steps
        self._all_seconds += seconds
        self._since = now
        self._timed_steps = 0
        return steps * self._batch_size / seconds if steps else 0.0


def _one_line(line: Mapping[str, float], metrics: Sequence[str]) -> str:
    shown = "".join(f"  {name} {line[name]:.3f}" for name in metrics)
    return (
        f"loss {line['loss']:.4f}{shown}  lr {line['learning_rate']:.2e}  "
        f"grad norm {line['gradient_norm']:.2f}  {line['images_per_second']:,.0f} images/s"
    )
