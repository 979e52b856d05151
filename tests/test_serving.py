"""The clients in examples/ use a SavedModel over REST and gRPC, served by an imitation of TensorFlow Serving."""

from __future__ import annotations

import http.client
import io
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import image_kinds
from keras_vit import export, zoo
from keras_vit.export.report import measure_resources

grpc = pytest.importorskip("grpc", reason="the look-alike serves gRPC")
pytest.importorskip("tensorflow_serving", reason="the look-alike speaks tensorflow-serving-api's messages")

EXAMPLES = Path(__file__).parents[1] / "examples" / "serving"
sys.path.insert(0, str(EXAMPLES))

import grpc_client  # noqa: E402 - only where there is gRPC
import load  # noqa: E402
import rest_client  # noqa: E402
from tensorflow_serving.apis import (  # noqa: E402
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_log_pb2,
)

from serving_lookalike import WARM_UP, ModelServer, States  # noqa: E402

# Error of a probability: the same pixels and weights in float32, added in another order (1e-7 to 1e-6).
NOISE = 1e-5
FILES = [
    image_kinds.encoded(image_kinds.photo(60, 45, 1), "JPEG", quality=90),
    image_kinds.encoded(image_kinds.photo(33, 71, 2), "PNG"),
    image_kinds.encoded(image_kinds.photo(200, 150, 3), "JPEG"),
]
# A corrupt file, and a part of its error message.
CORRUPT = {
    "text": (b"This is no image at all, but long enough to look at.", "Not a JPEG or PNG file"),
    "half a PNG": (FILES[1][: len(FILES[1]) // 2], "Invalid PNG"),
    "half a JPEG": (FILES[0][: len(FILES[0]) // 2], "Invalid JPEG"),
    "nothing": (b"", "Not a JPEG or PNG file"),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.load("digits")


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models") / "vit"
    export.saved_model(model, base / "1", warmup=(1, 2))
    return base


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ModelServer]:
    with ModelServer(folder) as running:
        running.wait_for(1)
        yield running


@pytest.fixture(scope="module")
def connection(server: ModelServer) -> Iterator[http.client.HTTPConnection]:
    opened = http.client.HTTPConnection("127.0.0.1", server.rest, timeout=60)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def channel(server: ModelServer) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(channel: Any) -> Any:
    return grpc_client.PredictionServiceStub(channel)


@pytest.fixture(scope="module")
def expected(model: Any) -> np.ndarray:
    """Return the model's probabilities for the pixels that Pillow decodes."""
    images = [model.preprocess(np.asarray(Image.open(io.BytesIO(file)))[None]) for file in FILES]
    return keras.ops.convert_to_numpy(keras.ops.softmax(model(np.concatenate(images))))


def names(model: Any, probabilities: np.ndarray) -> list[list[str]]:
    """Return the five best classes of each row."""
    predictions = model.decode_predictions(np.log(probabilities), top=5)
    return [[prediction.label for prediction in row] for row in predictions]


def asked(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body))
    response = connection.getresponse()
    return response.status, json.load(response)


def test_rest_answers_as_keras(connection: http.client.HTTPConnection, model: Any, expected: np.ndarray) -> None:
    rows = rest_client.classify(connection, FILES)
    np.testing.assert_allclose([row["probabilities"] for row in rows], expected, atol=NOISE)
    np.testing.assert_allclose([row["scores"] for row in rows], -np.sort(-expected)[:, :5], atol=NOISE)
    assert [row["classes"] for row in rows] == names(model, expected)


def test_grpc_answers_as_keras(stub: Any, model: Any, expected: np.ndarray) -> None:
    answer = grpc_client.classify(stub, FILES)
    assert sorted(answer) == ["classes", "probabilities", "scores"]
    np.testing.assert_allclose(answer["probabilities"], expected, atol=NOISE)
    assert [[name.decode() for name in row] for row in answer["classes"]] == names(model, expected)
    assert sorted(grpc_client.classify(stub, FILES[:1], outputs=("scores",))) == ["scores"]
    assert grpc_client.classify(stub, [])["classes"].shape == (0, 5)


def test_images_as_lists_of_numbers_are_answered(
    connection: http.client.HTTPConnection, model: Any, expected: np.ndarray
) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(FILES[1])))[None]
    body = {"signature_name": "uint8_images", "inputs": {"images": pixels.tolist()}}
    status, answer = asked(connection, "POST", "/v1/models/vit/versions/1:predict", body)
    assert status == 200
    np.testing.assert_allclose(answer["outputs"]["probabilities"], expected[1:2], atol=NOISE)
    body = {"signature_name": "float_images", "instances": np.asarray(model.preprocess(pixels)).tolist()}
    status, answer = asked(connection, "POST", "/v1/models/vit:predict", body)
    assert status == 200
    np.testing.assert_allclose(answer["predictions"][0]["probabilities"], expected[1], atol=NOISE)


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_image_is_refused_with_a_sentence(
    connection: http.client.HTTPConnection, stub: Any, kind: str
) -> None:
    file, sentence = CORRUPT[kind]
    with pytest.raises(ValueError, match=f'400: .*"error": .*{sentence}'.replace(" .*", r"[\s\S]*")):
        rest_client.classify(connection, [FILES[0], file])
    with pytest.raises(grpc.RpcError) as caught:
        grpc_client.classify(stub, [FILES[0], file])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in caught.value.details()


def test_the_tolerant_signature_marks_corrupt_images(
    connection: http.client.HTTPConnection, stub: Any, expected: np.ndarray
) -> None:
    files = [FILES[0], *(file for file, _ in CORRUPT.values()), FILES[2]]
    answer = grpc_client.classify(stub, files, signature="tolerant")
    assert answer["valid"].tolist() == [True, *[False] * len(CORRUPT), True]
    np.testing.assert_allclose(answer["probabilities"][[0, -1]], expected[[0, 2]], atol=NOISE)
    assert not answer["probabilities"][1:-1].any()
    rows = rest_client.classify(connection, files, signature="tolerant")
    assert [row["valid"] for row in rows] == answer["valid"].tolist()
    assert rows[1]["classes"] == [""] * 5


B64 = {"b64": "aGVsbG8="}


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("vit:predict", b"{", 400, "JSON Parse error"),
        ("vit:predict", {}, 400, "Missing 'inputs' or 'instances' key"),
        ("vit:predict", {"instances": []}, 400, "instances"),
        ("vit:predict", {"instances": [{"b64": "no base64"}]}, 400, "image_bytes"),
        ("vit:predict", {"instances": [5]}, 400, "not of expected type: string"),
        ("vit:predict", {"instances": [{"picture": B64}]}, 400, "image_bytes"),
        ("vit:predict", {"inputs": {"picture": B64}}, 400, "Missing but required"),
        ("vit:predict", {"inputs": [[B64]]}, 400, "has shape"),
        ("vit:predict", {"instances": [B64], "signature_name": "other"}, 400, "not found in signature def"),
        ("vit:predict", {"instances": [[[0.5]]], "signature_name": "uint8_images"}, 400, "expected type: uint8"),
        ("vit/versions/7:predict", {"instances": [B64]}, 404, "Servable not found"),
        ("other:predict", {"instances": [B64]}, 404, "Servable not found"),
        ("vit:guess", {"instances": [B64]}, 400, "Malformed request"),
    ],
)
def test_a_wrong_request_is_told_so(
    connection: http.client.HTTPConnection, path: str, body: Any, status: int, error: str
) -> None:
    received, answer = asked(connection, "POST", f"/v1/models/{path}", body)
    assert (received, list(answer)) == (status, ["error"])
    assert error in answer["error"]


def test_metadata_names_the_inputs_and_outputs(connection: http.client.HTTPConnection, stub: Any) -> None:
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "vit"
    found = get_model_metadata_pb2.SignatureDefMap()
    stub.GetModelMetadata(request).metadata["signature_def"].Unpack(found)
    image_files, answers = ["image_bytes"], ["classes", "probabilities", "scores"]
    signatures = {
        name: (sorted(signature.inputs), sorted(signature.outputs))
        for name, signature in found.signature_def.items()
        if not name.startswith("__")
    }
    assert signatures == {
        "serving_default": (image_files, answers),
        "tolerant": (image_files, [*answers, "valid"]),
        "features": (image_files, ["features"]),
        "float_images": (["images"], sorted([*answers, "logits"])),
        "uint8_images": (["images"], sorted([*answers, "logits"])),
    }
    status, plain = asked(connection, "GET", "/v1/models/vit/metadata")
    assert status == 200 and plain["model_spec"]["version"] == "1"
    assert plain["metadata"]["signature_def"]["signature_def"].keys() == found.signature_def.keys()


def test_the_state_of_versions_is_told(connection: http.client.HTTPConnection, channel: Any) -> None:
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "vit"
    (state,) = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(request).model_version_status
    assert (state.version, state.state) == (1, States.AVAILABLE)
    status, answer = asked(connection, "GET", "/v1/models/vit")
    assert status == 200
    assert answer["model_version_status"][0]["state"] == "AVAILABLE"
    assert asked(connection, "GET", "/v1/models/vit/versions/9")[0] == 404


def test_warm_up_requests_are_read_and_replayed(server: ModelServer) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "vit"
    with server.version(request.model_spec) as version:
        warmed = [(one.model_spec.signature_name, *one.inputs) for one in version.warmed]
        sizes = [one.inputs["image_bytes"].tensor_shape.dim[0].size for one in version.warmed]
    assert sorted(set(warmed)) == [(name, "image_bytes") for name in ("features", "serving_default", "tolerant")]
    assert sizes == [1, 2] * 3


def test_a_warm_up_that_fails_keeps_a_version_from_being_served(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "1", tmp_path / "1")
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.model_spec.signature_name = "unheard of"
    with tf.io.TFRecordWriter(str(tmp_path / "1" / WARM_UP)) as records:
        records.write(log.SerializeToString())
    with ModelServer(tmp_path) as running:
        running.wait_for(1, States.END)
        assert "unheard of" in running.states[1].status.error_message


def senders(server: ModelServer) -> dict[str, Any]:
    return {
        "rest": lambda: load.over_rest(f"http://127.0.0.1:{server.rest}", model="vit", signature="serving_default"),
        "grpc": lambda: load.over_grpc(f"127.0.0.1:{server.grpc}", model="vit", signature="serving_default"),
    }


@pytest.mark.full
def test_a_new_version_takes_over_under_load_without_a_lost_request(model: Any, folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "vit"
    base.mkdir()
    (base / "1").symlink_to(folder / "1")
    done = threading.Event()
    with ModelServer(base, poll=0.01) as running, ThreadPoolExecutor() as pool:
        running.wait_for(1)
        connection = http.client.HTTPConnection("127.0.0.1", running.rest, timeout=60)
        before = rest_client.classify(connection, FILES[:1])
        loads = [
            pool.submit(load.run, make, FILES, going=lambda: not done.wait(0.04), threads=2, corrupt=0.05)
            for make in senders(running).values()
        ]
        try:
            export.saved_model(model, base / "2", labels=[f"digit {number}" for number in range(10)])
            running.wait_for(2)
            running.wait_for(1, States.END)
        finally:
            done.set()
        after = rest_client.classify(connection, FILES[:1])
        connection.close()
        counts = [future.result(60) for future in loads]
    for count in counts:
        assert not count.failures, str(count)
        assert len(count.times) > 20 and count.refused
    # The watcher looked 100 times per second while the version was written, and never saw a part of it.
    assert running.history[:6] == [
        (1, States.LOADING),
        (1, States.AVAILABLE),
        (2, States.LOADING),
        (2, States.AVAILABLE),
        (1, States.UNLOADING),
        (1, States.END),
    ]
    assert after[0]["classes"][0] == f"digit {np.argmax(before[0]['probabilities'])}"


@pytest.mark.parametrize("protocol", ["rest", pytest.param("grpc", marks=pytest.mark.full)])
def test_64_clients_at_once_lose_no_good_request(server: ModelServer, protocol: str) -> None:
    left = iter(range(192))
    counts = load.run(
        senders(server)[protocol], FILES, going=lambda: next(left, None) is not None, threads=64, corrupt=0.1
    )
    assert not counts.failures, str(counts)
    assert len(counts.times) == 192 and counts.refused == counts.corrupt > 5


def test_large_requests_are_answered_or_refused_in_bounded_memory(
    connection: http.client.HTTPConnection, stub: Any
) -> None:
    with measure_resources() as used:
        assert len(grpc_client.classify(stub, FILES[:1] * 256)["classes"]) == 256
        assert len(rest_client.classify(connection, FILES[:1] * 256)) == 256
        with pytest.raises(grpc.RpcError) as caught:
            grpc_client.classify(stub, [bytes(20_000_000)])
        with pytest.raises(ValueError, match="400"):
            rest_client.classify(connection, [bytes(20_000_000)])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    # Of client and server in one process: the files, their text and messages on both sides. 450 MB were measured.
    assert used.peak_bytes is None or used.peak_bytes < 1_000_000_000
    assert len(grpc_client.classify(stub, FILES)["classes"]) == len(FILES)


def test_a_folder_with_half_a_version_is_seen_as_such(folder: Path, tmp_path: Path) -> None:
    # The test above relies on this: the look-alike tries every numeric name.
    (tmp_path / "1").symlink_to(folder / "1")
    with ModelServer(tmp_path, poll=0.01) as running:
        running.wait_for(1)
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "saved_model.pb").write_bytes((folder / "1" / "saved_model.pb").read_bytes()[:1000])
        running.wait_for(2, States.END)
        assert running.states[1].state == States.AVAILABLE
        connection = http.client.HTTPConnection("127.0.0.1", running.rest, timeout=60)
        assert len(rest_client.classify(connection, FILES)) == len(FILES)
        connection.close()


def test_the_load_generator_counts_what_goes_wrong() -> None:
    answers = iter([[True], [True, True], ValueError("no"), OSError("gone"), [False]])

    def send(_: list[bytes]) -> list[bool]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    left = iter(range(5))
    counts = load.run(lambda: nullcontext(send), FILES, going=lambda: next(left, None) is not None, threads=1)
    assert (len(counts.times), counts.failures.total(), counts.refused, counts.corrupt) == (5, 4, 0, 0)
    accepted = iter([True, False])
    counts = load.run(
        lambda: nullcontext(lambda _: [True]), FILES, going=lambda: next(accepted), threads=1, corrupt=1.0
    )
    assert counts.failures.total() == 1, "a corrupt image that is not refused is a failure"


@pytest.mark.parametrize("client", ["rest_client", "grpc_client"])
def test_the_clients_print_classes(
    server: ModelServer,
    tmp_path: Path,
    model: Any,
    expected: np.ndarray,
    client: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "one.jpg").write_bytes(FILES[0])
    address = f"http://127.0.0.1:{server.rest}" if client == "rest_client" else f"127.0.0.1:{server.grpc}"
    monkeypatch.setattr(sys, "argv", [client, address, str(tmp_path / "one.jpg")])
    sys.modules[client].main()
    printed = capsys.readouterr().out
    assert re.search(rf"one\.jpg {names(model, expected)[0][0]} \d+\.\d%", printed)


def test_the_real_server_is_configured_with_files_that_are_there() -> None:
    from google.protobuf import text_format
    from tensorflow_serving.config import model_server_config_pb2

    compose = (EXAMPLES / "docker-compose.yml").read_text()
    mounted = re.findall(r"- \./([\w.-]+):", compose)
    assert mounted and all((EXAMPLES / name).exists() for name in mounted if name != "models")
    configured = text_format.Parse(
        (EXAMPLES / "models.config").read_text(), model_server_config_pb2.ModelServerConfig()
    )
    (one,) = configured.model_config_list.config
    assert (one.name, one.base_path) == ("vit", "/models/vit")
    assert list(one.model_version_policy.specific.versions) == [1, 2]
