"""A web server on this machine that simulates faults of networks and servers."""

import gzip
import hashlib
import io
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import h5py
import numpy as np
from safetensors.numpy import save


def npz(seed: int = 0, count: int = 20_000) -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.random.default_rng(seed).normal(size=count), b=np.arange(7))
    return file.getvalue()


def safetensors_file(values: int = 4) -> bytes:
    return save({"w": np.arange(values, dtype=np.float32), "b": np.ones(3)})


def hdf5() -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as out:
        out["w"] = np.arange(4, dtype=np.float32)
    return file.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


GOOD = npz()


@dataclass
class Served:
    """One file, and how its requests are answered.

    Each request takes the next of `faults`; after the last one `always` holds (None: a good answer). A fault is a
    status ("503"), "cut" (half of the data, then the end), "stall" (half, then nothing), "wrong" (inverted bytes),
    "shifted" (the range begins one byte too early), or "drip" (100 bytes per second). A client that accepts gzip gets
    gzip, which is wrong here.
    """

    body: bytes
    faults: list[str] = field(default_factory=list)
    always: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    stated_length: int | None = None  # instead of the correct one
    no_length: bool = False
    raw: bytes | None = None  # the whole response, sent instead of all of the above; it may drip


class HostileServer(ThreadingHTTPServer):
    """Serve `files` (path to Served) and record each path and its Range in `requests`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, Served] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HostileServer

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        self.server.requests.append((self.path, self.headers["Range"]))
        served = self.server.files.get(self.path)
        fault = "404" if served is None else served.faults.pop(0) if served.faults else served.always
        if served is not None and served.raw is not None:
            self._send(served.raw, fault)
            return
        if served is None or (fault and fault.isdigit()):
            self.send_error(int(fault or "404"))
            return
        start = self._start(served) - (fault == "shifted")
        if start and start >= len(served.body):
            self.send_error(416)
            return
        body = served.body[start:]
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body)
        self._send_head(served, start)
        if fault == "wrong":
            body = bytes(255 - byte for byte in body)
        self._send(body, fault)

    def _send(self, data: bytes, fault: str | None) -> None:
        with suppress(ConnectionError):  # the client has closed the connection
            while fault == "drip" and data and not self.server.closing.wait(0.01):
                self.wfile.write(data[:1])
                data = data[1:]
            self.wfile.write(data[: len(data) // 2] if fault in ("cut", "stall") else data)
            self.wfile.flush()
            if fault == "stall":
                self.server.closing.wait(30)

    def _start(self, served: Served) -> int:
        wanted = self.headers["Range"]
        if not served.ranges or wanted is None:
            return 0
        return int(wanted.removeprefix("bytes=").removesuffix("-"))

    def _send_head(self, served: Served, start: int) -> None:
        total = len(served.body) if served.stated_length is None else served.stated_length
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        if not served.no_length:
            self.send_header("Content-Length", str(total - start))
        for name, value in served.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""
