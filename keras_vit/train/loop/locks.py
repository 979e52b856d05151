"""Give the folder of a run to one process: by a lock on a file system, by a lease in a bucket.

A lease is the file `.lease`, which its owner rewrites with another number every RENEWAL seconds. It has expired if it
was seen unchanged for EXPIRY seconds, so that no clocks of two machines are compared.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import filelock
import tensorflow as tf

from keras_vit._util.progress import print_line
from keras_vit.train.loop import storage

RENEWAL, EXPIRY = 15.0, 60.0  # seconds
SETTLING = 3.0  # seconds to wait after writing, in case another process writes at the same time
POLL = 1.0  # seconds from one look at another process' lease to the next
REMEDY = "Wait for its end, stop it, or use another folder."


@contextlib.contextmanager
def exclusive(folder: str | os.PathLike[str]) -> Iterator[Callable[[], None]]:
    """Create a folder and keep it for one training run; raise BlockingIOError if another run has it.

    Yields a function that raises BlockingIOError if another process has meanwhile taken the folder, which is possible
    in a bucket that this process could not reach for EXPIRY seconds.
    """
    path = storage.make_folder(folder)
    if not storage.is_local(path):
        with _Lease(path) as lease:
            yield lease.check
        return
    try:
        lock = filelock.FileLock(f"{path}/.lock", timeout=0).acquire()
    except filelock.Timeout:
        raise BlockingIOError(f"Another process trains in this folder: {path}. {REMEDY}") from None
    except OSError as error:
        raise OSError(
            f"{path}/.lock cannot be locked ({error.strerror or error}). It must be a file that you may write: "
            "remove what is there, or use another folder."
        ) from error
    with lock:
        yield lambda: None


class _Lease:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file = f"{folder}/.lease"
        self._owner = f"{socket.gethostname()}, process {os.getpid()}"
        self._id = uuid.uuid4().hex
        self._renewals = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> "_Lease":
        """Wait until the lease of another process is released or has expired, then write one."""
        other, start = self._read(), time.monotonic()
        if other:
            print_line(f"{self._folder} was used by {other[0]}: waiting up to {EXPIRY:.0f} s to see if it still is")
        while other and time.monotonic() - start < EXPIRY:
            time.sleep(POLL)
            now = self._read()
            if now and now != other:
                raise BlockingIOError(f"Another process trains in this folder: {self._folder} ({now[0]}). {REMEDY}")
            other = now
        self._write()
        time.sleep(SETTLING)
        self.check()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        # Another process may have it, or the bucket may be out of reach.
        with contextlib.suppress(BlockingIOError, tf.errors.OpError):
            self.check()
            storage.remove(self._file)

    def check(self) -> None:
        """Raise BlockingIOError if the lease is of another process, or was deleted."""
        found = self._read()
        if found is None or found[1] != self._id:
            owner = found[0] if found else "a process that has ended"
            raise BlockingIOError(f"Another process has taken this folder: {self._folder} ({owner}). {REMEDY}")

    def _renew(self) -> None:
        """Rewrite the lease until the run has ended, or another process has the lease."""
        with contextlib.suppress(BlockingIOError):
            while not self._ended.wait(RENEWAL):
                with contextlib.suppress(tf.errors.OpError):  # try again after the next pause
                    self.check()
                    self._write()

    def _read(self) -> tuple[str, str, int] | None:
        try:
            # The last line, because TensorFlow's in-memory file system appends.
            owner, number, count = json.loads(storage.read(self._file).splitlines()[-1])
        except tf.errors.NotFoundError:
            return None
        except (ValueError, TypeError, IndexError):
            return "an unknown process", "", 0
        return str(owner), str(number), int(count)

    def _write(self) -> None:
        self._renewals += 1
        storage.replace(self._file, json.dumps([self._owner, self._id, self._renewals]).encode() + b"\n")
