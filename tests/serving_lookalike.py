"""Imitate TensorFlow Serving, for tests and for trying a SavedModel without the real server.

One model, from a folder of versions, over gRPC and REST. It loads and runs SavedModels as the real server does, in a
session of TensorFlow's C++ runtime by the names in the signature, exchanges the messages of tensorflow-serving-api,
and its errors have the words of the real ones (servables/tensorflow/predict_util.cc). Not covered:

- joining requests into batches; several models, labels of versions, other policies than "the highest version";
- Classify, Regress, MultiInference, HandleReloadConfigRequest; monitoring; limits on the size of a request;
- trying again after a failed load: here a version that cannot be loaded is not tried again;
- the C++ parser of JSON: this one is Python's (serving_lookalike_rest.py).

As a program: python tests/serving_lookalike.py models/vit --rest 8501 --grpc 8500
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import error_codes_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_log_pb2,
    prediction_service_pb2_grpc,
)

from serving_lookalike_rest import RefusedError, RestServer, invalid

WARM_UP = "assets.extra/tf_serving_warmup_requests"
States = get_model_status_pb2.ModelVersionStatus


class Version:
    """A SavedModel in a session, warmed up. `requests` counts the running ones, under the server's lock."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.number, self.requests = name, int(folder.name), 0
        self.session = tf.compat.v1.Session(graph=tf.Graph())
        try:
            with self.session.graph.as_default():
                graph = tf.compat.v1.saved_model.loader.load(self.session, ["serve"], str(folder))
            self.signatures = dict(graph.signature_def)
            self.warmed = self._warm_up(folder / WARM_UP)
        except BaseException:
            self.session.close()
            raise

    def _warm_up(self, file: Path) -> list[predict_pb2.PredictRequest]:
        if not file.exists():
            return []
        records = tf.data.TFRecordDataset(str(file)).as_numpy_iterator()
        requests = [prediction_log_pb2.PredictionLog.FromString(record).predict_log.request for record in records]
        for request in requests:
            self.predict(request)
        return requests

    def predict(self, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
        name = request.model_spec.signature_name or "serving_default"
        if name not in self.signatures:
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, f'Serving signature key "{name}" not found.')
        signature = self.signatures[name]
        sent, wanted = set(request.inputs), set(signature.inputs)
        if sent != wanted:
            raise invalid(
                f"input size does not match signature: {len(sent)}!={len(wanted)}. "
                f"Sent extra: {sorted(sent - wanted)}. Missing but required: {sorted(wanted - sent)}."
            )
        outputs = list(request.output_filter) or list(signature.outputs)
        unknown = [output for output in outputs if output not in signature.outputs]
        if unknown or len(set(outputs)) < len(outputs):
            raise invalid(
                f"output tensor alias not found in signature, or twice: {unknown or outputs} "
                f"Outputs expected to be in the set {sorted(signature.outputs)}."
            )
        feeds = {signature.inputs[key].name: _array(request.inputs[key], signature.inputs[key]) for key in wanted}
        found = self._run({key: signature.outputs[key].name for key in outputs}, feeds)
        response = predict_pb2.PredictResponse()
        response.model_spec.name, response.model_spec.signature_name = self.name, name
        response.model_spec.version.value = self.number
        for key, value in found.items():
            tensor = tf.make_tensor_proto(value, dtype=signature.outputs[key].dtype, shape=value.shape)
            response.outputs[key].CopyFrom(tensor)
        return response

    def _run(self, fetches: dict[str, str], feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        try:
            return self.session.run(fetches, feeds)
        except tf.errors.OpError as error:
            original = error.__context__ or error  # without the lines of Python that Session.run adds
            code = next(code for code in grpc.StatusCode if code.value[0] == error.error_code)
            raise RefusedError(code, getattr(original, "message", error.message)) from error


def _array(tensor: Any, wanted: Any) -> np.ndarray:
    """Return a request's tensor; raise an error unless it has the type and shape of the signature."""
    if tensor.dtype != wanted.dtype:
        names = tf.dtypes.as_dtype(wanted.dtype).name, tf.dtypes.as_dtype(tensor.dtype).name
        raise invalid(f"Expects {wanted.name} to be {names[0]} but {names[1]} is provided")
    try:
        value = tf.make_ndarray(tensor)
    except (TypeError, ValueError) as error:
        raise invalid(f"Tensor proto of {wanted.name} cannot be read: {error}") from error
    if not tf.TensorShape(wanted.tensor_shape).is_compatible_with(value.shape):
        raise invalid(f"{wanted.name} has shape {tf.TensorShape(wanted.tensor_shape)}, got {list(value.shape)}")
    return value


class ModelServer:
    """Watch a folder, load its highest version, and answer on two local ports; a context manager.

    Args:
        folder: whose sub-folders with integer names are versions.
        name: of the model.
        rest: port; 0 for a free one, which is then in the attribute `rest`.
        grpc_port: likewise, in `grpc`.
        poll: seconds between two checks of the folder.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, name: str = "vit", rest: int = 0, grpc_port: int = 0, poll: float = 0.1
    ) -> None:
        self.folder, self.name, self.poll = Path(folder), name, poll
        self.states: dict[int, States] = {}  # of all versions seen so far
        self.history: list[tuple[int, int]] = []  # (version, state) in order of time
        self._loaded: dict[int, Version] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._http = RestServer(self, rest)
        options = [("grpc.max_receive_message_length", -1)]  # as the real server; gRPC's default is 4 MB
        self._grpc = grpc.server(ThreadPoolExecutor(16), options=options)
        prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(_Prediction(self), self._grpc)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(_Models(self), self._grpc)
        self.rest = self._http.server_address[1]
        self.grpc = self._grpc.add_insecure_port(f"127.0.0.1:{grpc_port}")

    def __enter__(self) -> Self:
        self._watcher.start()
        self._http.start()
        self._grpc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(grace=5).wait()
        self._http.stop()
        self._closing.set()
        self._watcher.join()
        for number in list(self._loaded):
            self._unload(number)

    def wait_for(self, version: int, state: int = States.AVAILABLE, *, seconds: float = 60) -> None:
        """Wait until a version has a state.

        Raises:
            TimeoutError: it still has another one.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: (version, state) in self.history, seconds):
                raise TimeoutError(f"version {version} is not {States.State.Name(state)}: {self.states}")

    def predict(self, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
        with self.version(request.model_spec) as version:
            return version.predict(request)

    @contextmanager
    def version(self, spec: Any) -> Iterator[Version]:
        """Yield the version that a request asks for, or the latest; it stays loaded during the block.

        Raises:
            RefusedError: it is not loaded.
        """
        with self._changed:
            number = spec.version.value if spec.HasField("version") else max(self._loaded, default=-1)
            if spec.name != self.name or number not in self._loaded:
                asked = f"Specific({spec.name}, {number})" if spec.HasField("version") else f"Latest({spec.name})"
                raise RefusedError(grpc.StatusCode.NOT_FOUND, f"Servable not found for request: {asked}")
            version = self._loaded[number]
            version.requests += 1
        try:
            yield version
        finally:
            with self._changed:
                version.requests -= 1
                self._changed.notify_all()

    def metadata(self, request: get_model_metadata_pb2.GetModelMetadataRequest) -> Any:
        fields = list(request.metadata_field)
        if fields != ["signature_def"]:
            raise invalid(f"Metadata field {fields} is not supported: only signature_def")
        with self.version(request.model_spec) as version:
            answer = get_model_metadata_pb2.GetModelMetadataResponse()
            answer.model_spec.name = self.name
            answer.model_spec.version.value = version.number
            signatures = get_model_metadata_pb2.SignatureDefMap(signature_def=version.signatures)
            answer.metadata["signature_def"].Pack(signatures)
            return answer

    def status(self, request: get_model_status_pb2.GetModelStatusRequest) -> Any:
        spec, answer = request.model_spec, get_model_status_pb2.GetModelStatusResponse()
        with self._changed:
            for number in sorted(self.states, reverse=True):
                if spec.name == self.name and (not spec.HasField("version") or spec.version.value == number):
                    answer.model_version_status.append(self.states[number])
        if not answer.model_version_status:
            raise RefusedError(grpc.StatusCode.NOT_FOUND, f"Could not find any versions of model {spec.name}")
        return answer

    def _watch(self) -> None:
        while not self._closing.is_set():
            versions = [int(path.name) for path in self.folder.glob("*") if path.name.isdigit() and path.is_dir()]
            highest = max(versions, default=None)
            failed = highest in self.states and self.states[highest].status.error_code != error_codes_pb2.OK
            if highest is not None and highest not in self._loaded and not failed and self._load(highest):
                for other in [number for number in self._loaded if number != highest]:
                    self._unload(other)  # the new one first, then the old one: there is always one
            self._closing.wait(self.poll)

    def _load(self, number: int) -> bool:
        self._set(number, States.LOADING)
        try:
            version = Version(self.name, self.folder / str(number))
        except Exception as error:  # a bad folder must not stop the loaded version
            self._set(number, States.END, error=str(error) or repr(error))
            return False
        with self._changed:
            self._loaded[number] = version
        self._set(number, States.AVAILABLE)
        return True

    def _unload(self, number: int) -> None:
        with self._changed:
            version = self._loaded.pop(number)
            self._set(number, States.UNLOADING)
            self._changed.wait_for(lambda: not version.requests)
        version.session.close()
        self._set(number, States.END)

    def _set(self, number: int, state: int, *, error: str = "") -> None:
        with self._changed:
            self.states[number] = States(version=number, state=state)
            self.states[number].status.error_code = error_codes_pb2.UNKNOWN if error else error_codes_pb2.OK
            self.states[number].status.error_message = error
            self.history.append((number, state))
            self._changed.notify_all()


def _or_abort(call: Callable[[Any], Any], request: Any, context: grpc.ServicerContext) -> Any:
    try:
        return call(request)
    except RefusedError as error:
        context.abort(error.code, error.message)


class _Prediction(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, server: ModelServer) -> None:
        self.server = server

    def Predict(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the name in the .proto
        return _or_abort(self.server.predict, request, context)

    def GetModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return _or_abort(self.server.metadata, request, context)


class _Models(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, server: ModelServer) -> None:
        self.server = server

    def GetModelStatus(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return _or_abort(self.server.status, request, context)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="of the model's versions")
    parser.add_argument("--name", default="vit")
    parser.add_argument("--rest", type=int, default=8501)
    parser.add_argument("--grpc", type=int, default=8500)
    asked = parser.parse_args()
    with ModelServer(asked.folder, name=asked.name, rest=asked.rest, grpc_port=asked.grpc) as server:
        print(f"{asked.name} on http://127.0.0.1:{server.rest} and gRPC 127.0.0.1:{server.grpc}", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
