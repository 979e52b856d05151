"""Serve a .tflite file over HTTP, without TensorFlow. See README.md.

MODEL=digits.tflite uvicorn app:app --workers 8
"""

import os
import time
from typing import Annotated, Any

import prometheus_client
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import multiprocess

from keras_vit import export

MAX_BYTES = int(os.environ.get("MAX_BYTES", 10 * 2**20))  # of a request
IMAGE_ERRORS = (OSError, ValueError, ArithmeticError, MemoryError)  # of a file that is no image, or a damaged one

# One thread: each of the server's workers has a copy, and several workers share the processors better than threads do.
model: Any = export.load(os.environ.get("MODEL", "model.tflite"), threads=1)
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


async def read_body(request: Request) -> bytes:
    """Read the content of an image file, up to MAX_BYTES."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"An image file has at most {MAX_BYTES:,} bytes")
    return bytes(body)


def compute(body: bytes) -> dict[str, Any]:
    """Compute the outputs of an image file."""
    try:
        image = model.preprocess(body)
    except IMAGE_ERRORS as error:
        raise HTTPException(400, f"The file {error}") from None
    return dict(model.run_prepared(image))


@app.post("/classify")
async def classify(request: Request, top: Annotated[int, Query(ge=1, le=100)] = 5) -> list[dict[str, Any]]:
    """Classify the image file that is the body of the request."""
    outputs = await run_in_threadpool(compute, await read_body(request))
    [ranking] = model.decode_predictions(outputs[model.class_output()], top)
    return [prediction._asdict() for prediction in ranking]


@app.get("/health")
def health() -> dict[str, str]:
    """Answer when the model is loaded."""
    return {"model": model.path.name}


@app.get("/metrics")
def metrics() -> Response:
    """Return the counts of all workers, as Prometheus reads them."""
    registry = prometheus_client.REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    return Response(prometheus_client.generate_latest(registry), media_type=prometheus_client.CONTENT_TYPE_LATEST)
