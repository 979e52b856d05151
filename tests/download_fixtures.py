"""Fixtures for the tests of downloads; a test module lists this module in `pytest_plugins`."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile_server import HostileServer
from keras_vit._util.download import transfer


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with HostileServer() as it:
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
    monkeypatch.setattr(transfer, "BACKOFF", 0.001)
    return tmp_path / "cache"
