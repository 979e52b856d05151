"""Drives a headless Chromium over its pipe (Chrome DevTools Protocol), with nothing but the standard library."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# A fresh profile, no errands of its own, and no address but this machine's: what a page needs, its folder has.
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--no-first-run",
)


def executable() -> str:
    """Where Chromium is.

    Raises:
        FileNotFoundError: where there is none.
    """
    for found in filter(None, map(shutil.which, NAMES)):
        return found
    raise FileNotFoundError(f"Chromium is needed, as {' or '.join(NAMES)}: `apt-get install chromium`")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the folder on a free port of this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class Page:
    """A page of a browser of its own, which ends with the `with` block.

    Args:
        profile: an empty folder for the browser's profile.
        flags: for the browser, beside FLAGS.
    """

    def __init__(self, profile: Path, *flags: str) -> None:
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        # Chromium takes commands on descriptor 3 and answers on 4; the shell puts the pipes there and becomes Chromium.
        shell = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
        root = ("--no-sandbox",) if os.geteuid() == 0 else ()  # as root, as in a container, there is no sandbox
        browser = (executable(), *FLAGS, *root, *flags, f"--user-data-dir={profile}")
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *browser],
            pass_fds=(command_read, answer_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._numbers = itertools.count(1)
        self._received = b""
        self._session: dict[str, str] = {}
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        self.call("Runtime.enable")
        self.call("Page.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = {}
        try:
            self.call("Browser.close")
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._write)
            os.close(self._read)

    def call(self, method: str, **parameters: Any) -> Any:
        """The answer to a command of the protocol (https://chromedevtools.github.io/devtools-protocol)."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            if answer["method"] == "Runtime.consoleAPICalled" and answer["params"]["type"] in ("error", "assert"):
                self.console.append(json.dumps(answer["params"]["args"]))
            if answer["method"] == "Runtime.exceptionThrown":
                self.console.append(json.dumps(answer["params"]["exceptionDetails"]))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> Any:
        """Waits until the expression is true, and gives its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} was not so within {seconds} s; the console has {self.console}")
            time.sleep(0.05)
        return value

    def choose(self, selector: str, file: Path) -> None:
        """Gives a file to an <input type="file">."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def resize(self, width: int, height: int = 900) -> None:
        """Makes the window so large; below 600 pixels, a phone."""
        size = {"width": width, "height": height, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, **size)

    def dark(self, on: bool) -> None:
        """Asks for dark or light colours."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as a PNG file."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(picture))

    def _next(self) -> Any:
        while b"\0" not in self._received:
            if not select.select([self._read], [], [], 60)[0]:
                raise TimeoutError("Chromium has not answered for a minute")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError(f"Chromium ended with code {self._process.wait()}")
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)
