"""Serve a .tflite file over HTTP, without TensorFlow. See README.md.

MODEL=digits.tflite uvicorn app:app --workers 8
"""

import asyncio
import hashlib
import io
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import numpy as np
import prometheus_client
from fastapi import FastAPI, HTTPException, Query, Request, Response
from PIL import Image
from prometheus_client import multiprocess

from keras_vit import export

STARTUP_FAILURE = 3  # uvicorn's exit code: it ends, and does not start its workers again
IMAGE_ERRORS = (OSError, ValueError, ArithmeticError, MemoryError)  # of a file that is no image, or a damaged one


def stop(message: str) -> Any:
    """End the server with one line."""
    print(message, file=sys.stderr)
    sys.exit(STARTUP_FAILURE)


def read_number(name: str, default: int) -> int:
    """Read an environment variable that is an integer from 1."""
    text = os.environ.get(name, str(default))
    return int(text) if text.isdecimal() and int(text) else stop(f"{name} must be an integer >= 1. Received: {text!r}")


def load_model() -> Any:
    """Load the file that MODEL names, which must classify images."""
    # One thread: each of the server's workers has a copy, and several workers share the processors better than threads.
    path = os.environ.get("MODEL", "")
    try:
        loaded: Any = export.load(path, threads=1) if path else stop("Set MODEL to a .tflite file")
        if not hasattr(loaded, "classify"):
            raise ValueError(f"{path} is a file of texts")
        loaded.class_output()
    except (OSError, ValueError) as error:
        stop(f"MODEL must be a .tflite file that classifies images. {error}")
    return loaded


MAX_BYTES = read_number("MAX_BYTES", 10 * 2**20)  # of an image file
MAX_PIXELS = read_number("MAX_PIXELS", 25_000_000)  # of an image; the package itself takes 50,000,000
model = load_model()
with model.path.open("rb") as file:
    SHA256 = hashlib.file_digest(file, "sha256").hexdigest()[:12]
pool = ThreadPoolExecutor(read_number("IMAGES", 2))  # images that are decoded at a time; all others wait
app = FastAPI(title=model.path.name)
REQUESTS = prometheus_client.Counter("requests", "Answered requests.", ["path", "status"])
SECONDS = prometheus_client.Histogram("seconds", "Seconds of a request.", ["path"])


@app.middleware("http")
async def measure(request: Request, call_next: Any) -> Response:
    """Count requests and their seconds."""
    start = time.perf_counter()
    response: Response = await call_next(request)
    path = request.url.path if response.status_code != 404 else "other"
    REQUESTS.labels(path, str(response.status_code)).inc()
    SECONDS.labels(path).observe(time.perf_counter() - start)
    return response


async def read_body(request: Request) -> bytearray:
    """Read the content of an image file, up to MAX_BYTES."""
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise HTTPException(415, "Send the image file itself as the body, not a form: curl --data-binary @cat.jpg")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"An image file has at most {MAX_BYTES:,} bytes")
    return body


def prepare(body: bytearray) -> np.ndarray:
    """Decode an image file, whose header must state at most MAX_PIXELS, and prepare it for the model."""
    try:
        with Image.open(io.BytesIO(body)) as image:
            pixels = image.width * image.height
    except Exception:  # Pillow's readers raise errors of any kind; the next lines say what is wrong with the file
        pixels = 0
    if pixels > MAX_PIXELS:
        raise HTTPException(400, f"An image has at most {MAX_PIXELS:,} pixels. Received: {pixels:,}")
    try:
        prepared: np.ndarray = model.preprocess(body)
    except IMAGE_ERRORS as error:
        reason = str(error)
        if "preprocessing=" in reason:  # advice for those who load the model, not for clients
            reason = "has more than 8 bits for a colour, and does not state how many of them it uses. Send 8 bits"
        raise HTTPException(400, f"The file {reason}") from None
    return prepared


def compute(body: bytearray, top: int) -> list[dict[str, Any]]:
    """Classify an image file."""
    values = model.run_prepared(prepare(body))[model.class_output()]
    if not np.isfinite(values).all():
        raise HTTPException(500, "The model computes NaN or infinity: its file is damaged")
    [ranking] = model.decode_predictions(values, top)
    return [prediction._asdict() for prediction in ranking]


@app.post("/classify")
async def classify(request: Request, top: Annotated[int, Query(ge=1, le=100)] = 5) -> list[dict[str, Any]]:
    """Classify the image file that is the body of the request."""
    return await asyncio.get_running_loop().run_in_executor(pool, compute, await read_body(request), top)


@app.get("/health")
def health() -> dict[str, str]:
    """Answer when the model is loaded, and say which file it is."""
    return {"model": model.path.name, "sha256": SHA256}


@app.get("/metrics")
def metrics() -> Response:
    """Return the counts of all workers, as Prometheus reads them."""
    registry = prometheus_client.REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    return Response(prometheus_client.generate_latest(registry), media_type=prometheus_client.CONTENT_TYPE_LATEST)
