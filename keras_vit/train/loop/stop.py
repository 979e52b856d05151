"""Handle requests to stop a run: SIGTERM from a cluster, Ctrl-C from a person."""

import contextlib
import signal
import threading
from types import FrameType


class Stop(contextlib.AbstractContextManager["Stop"]):
    """Context in which SIGTERM and the first Ctrl-C (SIGINT) only set `requested`, so that a loop can finish its step.

    The second Ctrl-C raises KeyboardInterrupt. Only the main thread can handle signals; in others nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupted = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python, and cannot be passed back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.requested = True
