"""Progress bars on standard error, by rich. Nothing is drawn where standard error is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, *, total: int | None = None, show: bool = True) -> Iterator[Item]:
    """Yield the items and advance a bar with each.

    Args:
        items: to go through once.
        description: stands before the bar, such as "Verifying".
        total: number of items; None takes `len(items)` where there is one.
        show: whether to draw the bar at all.
    """
    length = total if total is not None else len(items) if isinstance(items, Sized) else None
    with counter(description, total=length, show=show) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def counter(
    description: str, *, total: int | None, done: int = 0, in_bytes: bool = False, show: bool = True
) -> Iterator[Callable[..., None]]:
    """Draw a bar while the block runs.

    Args:
        description: stands before the bar.
        total: the number at the end of the bar, None where it is not known.
        done: the number at its beginning.
        in_bytes: whether to show the numbers as sizes, with the speed of the transfer.
        show: whether to draw the bar at all.

    Yields:
        a function of a number, by which it advances the bar, and optionally of a text to show beside the bar.
    """
    if not show:
        yield lambda *_: None
        return
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    numbers: tuple[progress.ProgressColumn, ...] = (progress.MofNCompleteColumn(),)
    if in_bytes:
        numbers = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *numbers,
        progress.TextColumn("{task.fields[details]}"),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (console.is_terminal or console.is_jupyter),
    )
    with bar:
        task = bar.add_task(description, total=total, completed=done, details="")

        def advance(count: int, details: str | None = None) -> None:
            bar.advance(task, count)
            if details is not None:
                bar.update(task, details=details)

        yield advance
