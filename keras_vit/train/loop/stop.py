"""Being asked to stop: SIGTERM of a cluster, Ctrl-C of a person."""

import contextlib
import signal
import threading
from types import FrameType


class Stop(contextlib.AbstractContextManager["Stop"]):
    """Within it, SIGTERM and the first SIGINT (Ctrl-C) only set `requested`; a loop asks and ends in order.

    The second SIGINT raises KeyboardInterrupt, wherever the program then is. Python lets only the main thread
    handle signals: entered from another thread, this changes nothing and `requested` stays False.

    Attributes:
        requested: Whether a signal came.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupted = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python and cannot be named by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.requested = True
