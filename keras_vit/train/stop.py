"""Stop on signals, while work goes on in threads."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from types import FrameType
from typing import Any, TypeVar

from keras_vit._util.progress import print_line

Answer = TypeVar("Answer")


class Stop(contextlib.AbstractContextManager["Stop"]):
    """Context in which SIGTERM and the first Ctrl-C (SIGINT) set `requested`, and a line says when the loop ends.

    The second Ctrl-C raises KeyboardInterrupt, but inside of `held` at its end. Only the main thread can handle
    signals; in others nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._part = "this step"
        self._saves = True
        self._on_request: Callable[[], None] = lambda: None
        self._interrupts = 0
        self._is_held = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python, and cannot be passed back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    @contextlib.contextmanager
    def during(self, part: str, *, saves: bool, on_request: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Say what a block does, which a stopped run finishes first, and whether it then `saves` a checkpoint.

        The first signal also calls `on_request`.
        """
        before = self._part, self._saves, self._on_request
        self._part, self._saves, self._on_request = part, saves, on_request
        try:
            yield
        finally:
            self._part, self._saves, self._on_request = before

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Finish a block that saves a checkpoint before a second Ctrl-C ends the run; a third ends it at once."""
        self._is_held, before = True, self._interrupts
        try:
            yield
        finally:
            self._is_held = False
        if self._interrupts > max(before, 1):
            raise KeyboardInterrupt

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 1 + self._is_held:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested = True
            saved, kept = (
                (", then saving a checkpoint", ", with the last whole step saved") if self._saves else ("", "")
            )
            again = f" Ctrl-C again ends at once{kept}." if number == signal.SIGINT else ""
            with contextlib.suppress(RuntimeError):  # the signal came while a line was printed
                print_line(f"Stopping after {self._part}{saved}.{again}")
            self._on_request()


def describe_wait(part: str, seconds: float | None, *, guess: float | None = None) -> str:
    """Describe what a stopped run finishes first, and its time if that is known, or a guess for the first."""
    if seconds is None and guess is not None:
        return f"{part} (perhaps {max(1, guess):.0f} s)"
    if seconds is None:
        return f"{part} (the first: how long it takes is not known yet)"
    return f"{part} (about {max(1, seconds):.0f} s at most)"


def in_thread(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Call a function in another thread: meanwhile this one handles signals, which TensorFlow would delay."""
    return wait_for(start_thread(function, *arguments))


def start_thread(function: Callable[..., Answer], *arguments: Any) -> futures.Future[Answer]:
    """Call a function in another thread."""
    future: futures.Future[Answer] = futures.Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised below
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()  # a daemon, so that a second Ctrl-C does not wait for it
    return future


def wait_for(future: futures.Future[Answer]) -> Answer:
    """Wait for the answer of a thread, and handle signals meanwhile."""
    # A signal does not end the wait if it comes just before it or to another thread: then the next round handles it.
    while not futures.wait([future], timeout=0.1).done:
        pass
    return future.result()
