"""The server of examples/serving/plain bounds its memory, says which file it has, and explains what it refuses.

It needs FastAPI, uvicorn and httpx, which no extra of the package has.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import image_kinds
from keras_vit import export, zoo
from places import ROOT

APP = ROOT / "examples" / "serving" / "plain" / "app.py"
STARTUP_FAILURE = 3  # of uvicorn, whose parent then ends
PHOTO = image_kinds.encoded(image_kinds.photo(60, 45, 1), "PNG")

pytest.importorskip("prometheus_client")
testclient = pytest.importorskip("fastapi.testclient")


@pytest.fixture(scope="module")
def digits_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "digits.tflite"
    export.tflite(zoo.load("digits"), path)
    return path


@pytest.fixture
def served(digits_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the server as uvicorn does, with these settings."""
    import prometheus_client

    monkeypatch.setenv("MODEL", str(digits_file))
    monkeypatch.setenv("MAX_PIXELS", "10000")
    spec = importlib.util.spec_from_file_location("plain_server", APP)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(prometheus_client, "Counter", _unregistered(prometheus_client.Counter))
    monkeypatch.setattr(prometheus_client, "Histogram", _unregistered(prometheus_client.Histogram))
    spec.loader.exec_module(module)
    return module


def _unregistered(kind: Any) -> Any:
    return lambda *arguments: kind(*arguments, registry=None)


def client(served: Any) -> Any:
    return testclient.TestClient(served.app, raise_server_exceptions=False)


def test_health_has_the_hash_of_the_file_that_was_loaded(served: Any, digits_file: Path) -> None:
    wanted = hashlib.sha256(digits_file.read_bytes()).hexdigest()
    assert client(served).get("/health").json() == {"model": "digits.tflite", "sha256": wanted[:12]}


def test_an_image_is_classified_as_by_the_file(served: Any, digits_file: Path) -> None:
    [[wanted]] = export.load(digits_file).classify(PHOTO, top=1)
    [received] = client(served).post("/classify?top=1", content=PHOTO).json()
    assert received["label"] == wanted.label and received["probability"] == pytest.approx(wanted.probability)


def test_outputs_that_are_not_finite_are_an_error(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.model, "run_prepared", lambda _: {"logits": np.full((1, 10), np.nan, np.float32)})
    answer = client(served).post("/classify", content=PHOTO)
    assert answer.status_code == 500 and "NaN" in answer.json()["detail"]


def test_pixels_are_limited_before_they_are_decoded(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.model, "preprocess", lambda _: pytest.fail("decoded"))
    large = image_kinds.encoded(Image.new("RGB", (101, 100)), "PNG")
    answer = client(served).post("/classify", content=large)
    assert answer.status_code == 400
    assert answer.json()["detail"] == "An image has at most 10,000 pixels. Received: 10,100"


def test_only_so_many_images_are_decoded_at_a_time(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, running, most = threading.Lock(), 0, 0
    own, enough = served.model.preprocess, threading.Event()

    def preprocess(body: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        enough.wait(0.05)
        with lock:
            running -= 1
        return own(body)

    monkeypatch.setattr(served.model, "preprocess", preprocess)
    with client(served) as http, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: http.post("/classify", content=PHOTO).status_code, range(8)))
    assert answers == [200] * 8 and most == 2


@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        ({"content-type": "multipart/form-data; boundary=x"}, b"--x--", 415, "as the body"),
        ({}, b"text", 400, "not an image of a known format"),
        ({}, "small 16 bits", 400, "Send 8 bits"),
    ],
    ids=["form", "text", "16 bits"],
)
def test_a_client_is_told_what_to_send(served: Any, headers: Any, body: Any, status: int, words: str) -> None:
    if isinstance(body, str):
        file = io.BytesIO()
        Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8)).save(file, "PNG")
        body = file.getvalue()
    answer = client(served).post("/classify", content=body, headers=headers)
    assert answer.status_code == status and words in answer.json()["detail"]
    assert "preprocessing" not in answer.json()["detail"]


@pytest.fixture(scope="module")
def features_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("features") / "features.tflite"
    export.tflite(zoo.load("digits", num_classes=0), path)
    return path


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "Set MODEL to a .tflite file"),
        ({"MODEL": "nope.tflite"}, "MODEL must be a .tflite file that classifies images. There is no exported file"),
        ({"MODEL": "features"}, "was exported without one"),
        ({"MODEL": "digits", "MAX_BYTES": "10MB"}, "MAX_BYTES must be an integer >= 1. Received: '10MB'"),
    ],
    ids=["unset", "missing", "features", "bytes"],
)
def test_a_wrong_setting_ends_all_workers_with_its_name(
    settings: dict[str, str], line: str, digits_file: Path, features_file: Path
) -> None:
    pytest.importorskip("uvicorn")
    files = {"digits": str(digits_file), "features": str(features_file)}
    settings = {name: files.get(value, value) for name, value in settings.items()}
    environment = {name: value for name, value in os.environ.items() if name not in ("MODEL", "MAX_BYTES")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **settings}
    command = [sys.executable, "-m", "uvicorn", "app:app", "--workers", "2", "--port", "0"]
    done = subprocess.run(command, cwd=APP.parent, env=environment, capture_output=True, text=True, timeout=120)
    assert line in done.stderr and "Traceback" not in done.stderr and "failed to start, stopping" in done.stderr
