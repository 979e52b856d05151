"""The progress of a run on a terminal: steps, loss, accuracy, learning rate, speed, time to go."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType

from rich import progress


class Progress(contextlib.AbstractContextManager["Progress"]):
    """A bar, or nothing.

    Args:
        show: whether to draw it.
    """

    def __init__(self, *, show: bool) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.completed}/{task.total}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TimeRemainingColumn(),
            disable=not show,
        )
        self._task: progress.TaskID | None = None

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def start(self, total: int, done: int) -> None:
        """Begins with `done` of `total` steps behind it."""
        self._task = self._bar.add_task("", total=total, completed=done, figures="compiling")

    def advance(self, steps: int) -> None:
        """Some steps more are done."""
        if self._task is not None:
            self._bar.advance(self._task, steps)

    def show(self, figures: Mapping[str, float]) -> None:
        """Shows the newest figures of the log."""
        if self._task is not None:
            self._bar.update(
                self._task,
                figures=(
                    f"loss {figures['loss']:.4f}  accuracy {figures['accuracy']:.3f}  "
                    f"lr {figures['learning_rate']:.2e}  grad norm {figures['gradient_norm']:.2f}  "
                    f"{figures['images_per_second']:,.0f} images/s"
                ),
            )
