"""A web server on this machine whose files may fail."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """One file, and how its requests are answered.

    Each request takes the next of `faults`, and none after the last: a status ("503"), "cut" (half of the data, then
    the end), "stall" (half, then nothing) or "wrong" (inverted bytes).
    """

    body: bytes
    faults: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    has_length: bool = True


class FileServer(ThreadingHTTPServer):
    """Serve `files` (path to Served) and record the path and the Range of each GET in `requests`."""

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
    server: FileServer

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        self.server.requests.append((self.path, self.headers["Range"]))
        served = self.server.files.get(self.path)
        fault = "404" if served is None else served.faults.pop(0) if served.faults else ""
        start = int((self.headers["Range"] or "bytes=0-")[6:-1])
        if served is None or fault.isdigit() or start > len(served.body):
            self.send_error(int(fault or "416"))
            return
        self._send_head(served, start)
        body = bytes(255 - byte for byte in served.body[start:]) if fault == "wrong" else served.body[start:]
        self.wfile.write(body[: len(body) // 2] if fault in ("cut", "stall") else body)
        if fault == "stall":
            self.server.closing.wait(30)

    def do_HEAD(self) -> None:  # noqa: N802 - the name that http.server calls
        served = self.server.files.get(self.path, Served(b"", ["404"]))
        self._send_head(served, 0, int(served.faults[0]) if served.faults else 200)

    def _send_head(self, served: Served, start: int, status: int = 200) -> None:
        self.send_response(206 if start else status)
        if served.has_length:
            self.send_header("Content-Length", str(len(served.body) - start))
        for name, value in served.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""
