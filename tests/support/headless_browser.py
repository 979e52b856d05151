"""Control a headless Chromium over its pipe (Chrome DevTools Protocol), with the standard library only."""

from __future__ import annotations

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
# A new profile, no background requests, and no address except this machine's: a page may use only its own folder.
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
    """Return the path of Chromium.

    Raises:
        FileNotFoundError: there is none.
    """
    for found in filter(None, map(shutil.which, NAMES)):
        return found
    raise FileNotFoundError(f"Chromium is needed, as {' or '.join(NAMES)}: `apt-get install chromium`")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the folder on a free port of this machine; yield the address."""

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
    """Open a page in a new browser, which is closed at the end of the `with` block.

    Args:
        profile: an empty folder for the browser's profile.
        flags: for the browser, beside FLAGS.
    """

    def __init__(self, profile: Path, *flags: str) -> None:
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4. The shell connects the pipes, then runs Chromium.
        shell = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
        root = ("--no-sandbox",) if os.geteuid() == 0 else ()  # root, as in a container, cannot use the sandbox
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
        """Send a command of the protocol (https://chromedevtools.github.io/devtools-protocol) and return the answer."""
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
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> Any:
        """Wait until the expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} was not so within {seconds} s; the console has {self.console}")
            time.sleep(0.05)
        return value

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in an <input type="file">."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

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
