"""Show the progress of long work, and measure time."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from keras_vit._util.text import byte_size, printable

LINE_SECONDS = 30.0  # from one line to the next where no bar is drawn
Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, *, total: int | None = None, show: bool = True) -> Iterator[Item]:
    """Iterate over items with a progress bar; `total` defaults to `len(items)` if they have one."""
    length = total if total is not None else len(items) if isinstance(items, Sized) else None
    with counter(description, total=length, show=show) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def counter(
    description: str, *, total: int | None, done: int = 0, in_bytes: bool = False, show: bool = True
) -> Iterator[Callable[..., None]]:
    """Draw a bar from `done` to `total` (None: unknown) while the block runs.

    Yields `advance(count, details=None)`: it advances the bar by `count` and shows the text `details` beside it.
    A bar of bytes also shows the speed. A standard error that is no terminal or notebook, whatever the environment says
    (FORCE_COLOR), gets a line now and then instead. `show=False` shows nothing.
    """
    if not show:
        yield lambda *_: None
        return
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    console = Console(stderr=True)
    if not (sys.stderr.isatty() or console.is_jupyter):
        yield _lines(description, total, done, format_count=byte_size if in_bytes else "{:,}".format)
        return
    numbers: tuple[progress.ProgressColumn, ...] = (progress.MofNCompleteColumn(),)
    if in_bytes:
        numbers = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    bar = progress.Progress(
        # Without a maximum width, a long file name leaves no room for the numbers.
        progress.TextColumn("{task.description}", table_column=Column(max_width=console.width // 3, no_wrap=True)),
        progress.BarColumn(bar_width=console.width // 4),
        *numbers,
        progress.TextColumn("{task.fields[details]}"),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(printable(description), total=total, completed=done, details="")

        def advance(count: int, details: str | None = None) -> None:
            bar.advance(task, count)
            if details is not None:
                bar.update(task, details=details)

        yield advance


def _lines(
    description: str, total: int | None, done: int, *, format_count: Callable[[int], str]
) -> Callable[..., None]:
    """Make an `advance` that prints a line after half a minute, and then ever more rarely."""
    start = printed = time.monotonic()
    reached, shown = done, ""

    def advance(count: int, details: str | None = None) -> None:
        nonlocal printed, reached, shown
        reached, shown = reached + count, shown if details is None else details
        now = time.monotonic()
        if now - printed > max(LINE_SECONDS, (now - start) / 10):
            printed = now
            of = "" if total is None else f" of {format_count(total)}"
            print_line(f"{description}: {format_count(reached)}{of}  {shown}".rstrip())

    return advance


def print_line(text: str) -> None:
    """Print a line on standard error, above the bar if there is one."""
    print(printable(text), file=sys.stderr, flush=True)


Result = TypeVar("Result")


def timed(function: Callable[..., Result], *arguments: Any) -> tuple[Result, float]:
    """Call a function; return its result and the seconds it took."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start
