"""Imitate the REST interface of TensorFlow Serving: JSON in both formats of its util/json_tensor.cc."""

from __future__ import annotations

import base64
import binascii
import json
import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_pb2, predict_pb2

if TYPE_CHECKING:
    from serving_lookalike import ModelServer

PATH = re.compile(r"/v1/models/([^/:]+)(?:/versions/(\d+))?(/metadata|:predict)?")
# model_servers/http_server.cc, ToHTTPStatusCode; the rest is 500.
HTTP = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}


class RefusedError(Exception):
    """An error that is sent to the client."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def invalid(message: str) -> RefusedError:
    return RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message)


class RestServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # for clients that keep their connections open
    request_queue_size = 128

    def __init__(self, models: ModelServer, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.models = models

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: RestServer
    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True  # head and body go out at once, without 40 ms between them

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        self._answer(b"")

    def do_POST(self) -> None:  # noqa: N802
        self._answer(self.rfile.read(int(self.headers["Content-Length"] or 0)))

    def _answer(self, body: bytes) -> None:
        try:
            status, found = HTTPStatus.OK, self._found(body)
        except RefusedError as error:
            status, found = HTTP.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR), {"error": error.message}
        content = json.dumps(found, indent=4).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _found(self, body: bytes) -> dict[str, Any]:
        path = PATH.fullmatch(self.path)
        if path is None or (self.command == "POST") != (path[3] == ":predict"):
            raise invalid(f"Malformed request: {self.command} {self.path}")
        spec = model_pb2.ModelSpec(name=path[1])
        if path[2]:
            spec.version.value = int(path[2])
        if path[3] == ":predict":
            return _predict(self.server.models, spec, body)
        if path[3] == "/metadata":
            wanted = get_model_metadata_pb2.GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"])
            answer = _plain(self.server.models.metadata(wanted))
            del answer["metadata"]["signature_def"]["@type"]  # of the Any, which the real server takes off
            return answer
        return _plain(self.server.models.status(get_model_status_pb2.GetModelStatusRequest(model_spec=spec)))

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _plain(message: Any) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _predict(models: ModelServer, spec: model_pb2.ModelSpec, body: bytes) -> dict[str, Any]:
    """Answer a request in JSON through the same function as gRPC."""
    try:
        asked = json.loads(body)
    except ValueError as error:
        raise invalid(f"JSON Parse error: {error}") from error
    if not isinstance(asked, dict) or len({"instances", "inputs"} & asked.keys()) != 1:
        raise invalid("Missing 'inputs' or 'instances' key" if isinstance(asked, dict) else "JSON Value: Is not object")
    name = asked.get("signature_name", "serving_default")
    with models.version(spec) as version:
        if name not in version.signatures:
            raise invalid(f'Serving signature name: "{name}" not found in signature def')
        inputs = dict(version.signatures[name].inputs)
    request = predict_pb2.PredictRequest(model_spec=spec)
    request.model_spec.signature_name = name
    try:
        columns = _columns_of_rows(asked["instances"], inputs) if "instances" in asked else asked["inputs"]
        if not isinstance(columns, dict) or _is_base64(columns):
            (only,) = inputs
            columns = {only: columns}
        for key, value in columns.items():
            if key in inputs:  # the version reports missing and unknown inputs
                request.inputs[key].CopyFrom(_tensor(value, inputs[key]))
    except (TypeError, ValueError, OverflowError, binascii.Error) as error:
        raise invalid(f"Failed to process the values of '{'/'.join(inputs)}'. Error: {error}") from error
    response = models.predict(request)
    outputs = {key: _json(key, tf.make_ndarray(tensor)) for key, tensor in response.outputs.items()}
    if "inputs" in asked:
        return {"outputs": outputs if len(outputs) > 1 else next(iter(outputs.values()))}
    if len({len(rows) if isinstance(rows, list) else None for rows in outputs.values()}) > 1:
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "Tensors have inconsistent batch sizes")
    rows = [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]
    return {"predictions": rows if len(outputs) > 1 else next(iter(outputs.values()))}


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["b64"] and isinstance(value["b64"], str)


def _columns_of_rows(rows: Any, inputs: dict[str, Any]) -> dict[str, list[Any]]:
    """Return each input's values from a list of values or of objects."""
    if not isinstance(rows, list) or not rows:
        raise ValueError("'instances' is a list of at least one value")
    named = [isinstance(row, dict) and not _is_base64(row) for row in rows]
    if not any(named):
        (only,) = inputs
        return {only: rows}
    if not all(named) or any(row.keys() != inputs.keys() for row in rows):
        raise ValueError(f"'instances' are all values, or all objects with the keys {sorted(inputs)}")
    return {key: [row[key] for row in rows] for key in inputs}


def _tensor(value: Any, wanted: Any) -> Any:
    """Return a tensor of the signature's type from nested lists; strings are text or {"b64": ...}."""
    dtype = tf.dtypes.as_dtype(wanted.dtype)
    if dtype == tf.string:
        value = _strings(value)
        return tf.make_tensor_proto(value, dtype=dtype, shape=np.shape(np.array(value, dtype=object)))
    array = np.array(value)  # of ragged lists: ValueError
    if array.size and array.dtype.kind not in ("iuf" if dtype.is_floating else "iu" if dtype.is_integer else "b"):
        raise TypeError(f"JSON Value is not of expected type: {dtype.name}")
    return tf.make_tensor_proto(array.astype(dtype.as_numpy_dtype), dtype=dtype)


def _strings(value: Any) -> Any:
    if isinstance(value, list):
        return [_strings(item) for item in value]
    if _is_base64(value):
        return base64.b64decode(value["b64"], validate=True)
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"JSON Value: {json.dumps(value)[:80]} is not of expected type: string")


def _json(name: str, value: np.ndarray) -> Any:
    """Return nested lists; strings as text, those of names that end in _bytes as {"b64": ...}."""
    if value.dtype != object:
        return value.tolist()

    def text(item: Any) -> Any:
        if isinstance(item, list):
            return [text(part) for part in item]
        return {"b64": base64.b64encode(item).decode()} if name.endswith("_bytes") else item.decode()

    return text(value.tolist())
