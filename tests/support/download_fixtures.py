"""Fixtures for the tests of downloads; a test module lists this module in `pytest_plugins`."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from file_server import FileServer
from keras_vit._util import downloads


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as it:
        thread = threading.Thread(target=it.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield it
        it.closing.set()
        it.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty cache folder, remove the user's settings, and let the client retry at once."""
    for name in ("KERAS_VIT_OFFLINE", "HF_HUB_OFFLINE", "KERAS_VIT_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(downloads, "BACKOFF", 0.001)
    monkeypatch.setattr(downloads, "CHUNK", 1000)  # what arrives of a chunk that is cut is lost
    return tmp_path / "cache"
