"""SavedModels give the model's results in Python, in TensorFlow's C++ loader and through the clients in examples/."""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.util
import io
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import image_kinds
from keras_vit import VisionTransformer, export
from keras_vit.export import _saved_model, server, verification
from marks import full_except
from places import ROOT, SUPPORT
from tiny_models import FAMILIES, OTHERS, VARIANTS, built, prepared

EXAMPLES = ROOT / "examples" / "serving"
# Largest error of a logit over the largest logit: float32 noise of another order of additions, 1e-7 to 2e-6.
NOISE = 1e-5
KINDS = VARIANTS | FAMILIES | OTHERS
QUICK = ("pure", "hybrid", "map", "unpooled", "headless", "distilled", "relative positions", "rotary", "mixer", "BiT")
# Signature -> (its input, the input's type, its outputs).
ANSWERS = ["classes", "probabilities", "scores"]
SIGNATURES = {
    "serving_default": ("image_bytes", tf.string, ANSWERS),
    "tolerant": ("image_bytes", tf.string, [*ANSWERS, "valid"]),
    "features": ("image_bytes", tf.string, ["features"]),
    "float_images": ("images", tf.float32, sorted([*ANSWERS, "logits"])),
    "uint8_images": ("images", tf.uint8, sorted([*ANSWERS, "logits"])),
}
FILE_SIGNATURES = [name for name, (_, dtype, _) in SIGNATURES.items() if dtype == tf.string]
FILES = [
    image_kinds.encoded(image_kinds.photo(60, 45, 1), "JPEG", quality=90),
    image_kinds.encoded(image_kinds.photo(33, 71, 2), "PNG"),
]
CORRUPT = FILES[0][: len(FILES[0]) // 2]


def small(kind: str = "pure", **changes: Any) -> VisionTransformer:
    return built(num_layers=1, **VARIANTS[kind], **changes)


def error(got: Any, want: Any) -> float:
    want = np.asarray(want)
    return float(np.abs(np.reshape(got, want.shape) - want).max() / np.abs(want).max())


def decoded(model: VisionTransformer, files: Any = FILES) -> np.ndarray:
    """Return the images of files as Pillow and the model prepare them."""
    mode = "L" if model.config.num_channels == 1 else "RGB"
    return np.concatenate([model.preprocess(Image.open(io.BytesIO(file)).convert(mode)) for file in files])


def nothing_but(folder: Path, *expected: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(expected)


# ---- functions that are saved


@pytest.mark.parametrize("kind", full_except(QUICK, KINDS))
def test_the_served_graph_computes_the_model(kind: str) -> None:
    model = built(**KINDS[kind])
    images = prepared(model.config, batch=3)
    found = server.model_function(model)(images)
    assert error(found["logits" if model.config.num_classes else "features"], model(images)) < NOISE
    assert error(found["features"], model.features(images, ["pre_logits"])["pre_logits"]) < NOISE
    assert all(value.dtype == tf.float32 for value in found.values())


def test_mixed_precision_leaves_with_float32_answers() -> None:
    model = built("mixed_bfloat16", num_layers=1)
    images = prepared(model.config)
    logits = server.model_function(model)(images)["logits"]
    assert logits.dtype == tf.float32
    assert error(logits, model(images)) < 0.05  # bfloat16 has 8 bits, and the graph may round in other places


def test_a_model_without_a_head_answers_with_features() -> None:
    model = small("headless")
    _, call = server.build(model, labels=None, top=5)
    images = prepared(model.config)
    answers = call["float_images"](tf.constant(images))
    assert sorted(call) == sorted(SIGNATURES) and list(answers) == ["features"]
    assert error(answers["features"], model(images)) < NOISE


def test_weights_that_were_added_are_not_left_out() -> None:
    model = small()
    model.get_layer("head").enable_lora(2)
    module, call = server.build(model, labels=None, top=5)
    kept = {id(variable) for variable in module.weights}
    used = call["float_images"].get_concrete_function().graph.variables
    assert len(used) == len(model.variables) and not [one.name for one in used if id(one) not in kept]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_one_operator_has_each_norm_and_each_gelu(dtype: str | None) -> None:
    # TensorFlow's optimizer joins them only in this form: a product, its bias, and tf.nn.gelu; a batch norm of rows.
    model = built(num_layers=2)
    served = model.with_config(model.config, dtype=dtype) if dtype else model
    spec = tf.TensorSpec((None, *model.config.size, 3), tf.float32)
    graph = tf.function(server.model_function(served), input_signature=[spec]).get_concrete_function().graph
    kinds = [operator.type for operator in graph.get_operations()]
    # The final norm, of the class token alone, stays as Keras computes it.
    assert kinds.count("FusedBatchNormV3") == 4 and kinds.count("Rsqrt") == 1
    for tanh in (operator for operator in graph.get_operations() if operator.type == "Tanh"):
        scope = tanh.name.rpartition("/")[0]
        (bias,) = {
            tensor.op.type
            for operator in graph.get_operations()
            if operator.name.startswith(scope)
            for tensor in operator.inputs
            if not tensor.op.name.startswith(scope)
        }
        assert bias == "BiasAdd"


# ---- folders


def test_signatures_have_the_inputs_and_outputs_of_the_guide(saved_digits: Any, saved_bfloat16: Any) -> None:
    for saved in (saved_digits, saved_bfloat16):
        found = {}
        for name, function in saved.call.items():
            [(key, spec)] = function.structured_input_signature[1].items()
            found[name] = (key, spec.dtype, sorted(function.structured_outputs))
        assert found == SIGNATURES
    guide = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", guide, re.MULTILINE)[: len(SIGNATURES)]
    assert [name for name, _, _ in rows] == list(SIGNATURES)
    words = {tf.string: "`image_bytes`|the same", tf.float32: "float32", tf.uint8: "0..255"}
    for name, takes, returns in rows:
        assert re.search(words[SIGNATURES[name][1]], takes), name
        assert set(re.findall(r"`(\w+)`", returns)) - {"top", "serving_default"} <= set(SIGNATURES[name][2]), name
    # The body for curl: a row for each file, in base64, without a name as there is one input, of strings.
    [start, end] = re.findall(r"printf '([^']+)'", guide)
    body = json.loads(start + base64.b64encode(FILES[0]).decode() + end)
    assert list(body) == ["instances"] and [list(row) for row in body["instances"]] == [["b64"]]
    files = [base64.b64decode(row["b64"]) for row in body["instances"]]
    assert saved_digits.call["serving_default"](image_bytes=files)["classes"].shape == (1, 3)


@pytest.mark.parametrize("name", ["saved_digits", pytest.param("saved_hybrid", marks=pytest.mark.full)])
def test_every_signature_answers_as_the_model(name: str, request: pytest.FixtureRequest) -> None:
    model, folder, report, call = request.getfixturevalue(name)
    assert (report.path, report.images) == (folder, 8) and nothing_but(folder.parent, "1")
    assert report.max_error < NOISE and report.cosine > 0.999999
    assert report.files_error < NOISE and "answers to image files differ by up to" in str(report)
    images = prepared(model.config, batch=3)
    assert error(call["float_images"](images=tf.constant(images))["logits"], model(images)) < NOISE
    pixels = np.random.default_rng(0).integers(0, 256, (2, 50, 41, model.config.num_channels), dtype=np.uint8)
    assert error(call["uint8_images"](images=tf.constant(pixels))["logits"], model(model.preprocess(pixels))) < NOISE
    files = FILES
    if model.config.num_channels == 1:  # decoders' greys of a colour file differ
        files = [image_kinds.encoded(image_kinds.photo(60, 45, seed).convert("L"), "PNG") for seed in range(2)]
    images = decoded(model, files)
    answer = {name: value.numpy() for name, value in call["serving_default"](image_bytes=files).items()}
    np.testing.assert_allclose(answer["probabilities"], keras.ops.softmax(model(images)), atol=NOISE)
    is_named = name == "saved_digits"
    names = (folder / "assets" / "labels.txt").read_text().split() if is_named else ["0", "1", "2", "3", "4"]
    best = np.argsort(-answer["probabilities"], axis=1)[:, : 3 if is_named else 5]
    assert [[name.decode() for name in row] for row in answer["classes"]] == [[names[i] for i in row] for row in best]
    np.testing.assert_allclose(answer["scores"], np.take_along_axis(answer["probabilities"], best, axis=1), atol=1e-6)
    features = call["features"](image_bytes=files)["features"]
    assert error(features, model.features(images, ["pre_logits"])["pre_logits"]) < NOISE


def test_a_tolerant_call_gives_zeros_for_what_is_no_image(saved_digits: Any) -> None:
    call = saved_digits.call
    answer = call["tolerant"](image_bytes=tf.constant([FILES[0], b"no image", FILES[1], CORRUPT]))
    strict = call["serving_default"](image_bytes=tf.constant(FILES))
    assert answer["valid"].numpy().tolist() == [True, False, True, False]
    assert answer["classes"].numpy()[1].tolist() == [b"", b"", b""]
    for name in ("probabilities", "scores"):
        # Batches of four and of two: float32 products of another order, up to 1.2e-6 on processors with AVX2 alone.
        np.testing.assert_allclose(answer[name].numpy()[::2], strict[name], atol=5e-6)
        assert not answer[name].numpy()[1::2].any()


def test_every_output_has_a_row_for_each_image(saved_digits: Any) -> None:
    # A server that joins requests splits the results along the first axis.
    rows = {
        (name, count): {len(value) for value in saved_digits.call[name](image_bytes=files).values()}
        for name in FILE_SIGNATURES
        for count, files in ((0, tf.constant([], tf.string)), (3, tf.constant(FILES[:1] * 3)))
    }
    assert rows == {(name, count): {count} for name, count in rows}


def test_every_weight_is_stored_once(saved_digits: Any, saved_bfloat16: Any) -> None:
    for (model, folder, report, _), size in ((saved_digits, 4), (saved_bfloat16, 2)):
        assert report.bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        weights = (folder / "variables" / "variables.data-00000-of-00001").stat().st_size
        # The rest is the index of checkpoints beside the weights.
        assert 0 <= weights - size * model.count_params() <= 0.05 * size * model.count_params() + 20_000


def test_the_warm_up_has_each_batch_of_each_signature(saved_digits: Any, saved_bfloat16: Any) -> None:
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    _, folder, report, call = saved_digits
    assert report.warmup == (1, 4) and "warm-up requests: for batches of 1, 4" in report.lines()
    seen = []
    for record in tf.data.TFRecordDataset(str(folder / _saved_model.WARMUP_FILE)):
        request = prediction_log_pb2.PredictionLog.FromString(record.numpy()).predict_log.request
        images = tf.make_ndarray(request.inputs["image_bytes"])
        call[request.model_spec.signature_name](image_bytes=tf.constant(images))
        seen.append((request.model_spec.signature_name, len(images)))
    assert sorted(seen) == sorted((name, n) for name in FILE_SIGNATURES for n in (1, 4))
    assert saved_bfloat16.report.warmup == (1,) and (saved_bfloat16.folder / _saved_model.WARMUP_FILE).exists()


@pytest.mark.parametrize("images", [1, 40, 5000])  # lengths of one, two and three bytes
def test_a_request_is_that_of_tensorflow_serving(images: int) -> None:
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    content = tf.make_tensor_proto([b"abc"] * images)
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.model_spec.signature_name = "tolerant"
    log.predict_log.request.inputs["image_bytes"].CopyFrom(content)
    assert _saved_model._prediction_log("tolerant", content.SerializeToString()) == log.SerializeToString()


@pytest.mark.full
def test_bfloat16_is_computed_in_bfloat16_and_answers_in_float32(saved_bfloat16: Any) -> None:
    model, folder, report, call = saved_bfloat16
    images = decoded(model)
    expected = np.asarray(model(images))
    answer = call["float_images"](images=tf.constant(images))
    assert all(value.dtype in (tf.float32, tf.string) for value in answer.values())
    # 8 bits: 0.004 is one rounding of the largest logit. Equality would mean that nothing is computed in bfloat16.
    assert 1e-4 < error(answer["logits"], expected) < 0.03
    answer = call["serving_default"](image_bytes=FILES)
    np.testing.assert_allclose(answer["probabilities"], keras.ops.softmax(expected), atol=0.02)
    assert (report.mode, report.agreement) == ("bfloat16", 1.0) and report.cosine > 0.999
    assert model.dtype == "float32"
    report = export.verify(model, folder)
    assert report.mode == "bfloat16" and 1e-5 < report.files_error < 0.05
    other = model.with_config(model.config)
    kernel = other.get_layer("block_1").mlp.dense2.kernel
    kernel.assign(np.asarray(kernel) * 0.5)
    with pytest.raises(export.VerificationError, match=r"wanted .*cosine >= 0\.9[95]"):
        export.verify(other, folder)


def test_a_model_of_two_channels_takes_arrays_and_names_are_answered_as_they_are(tmp_path: Path) -> None:
    model, names = small(num_channels=2), ["a\nb", "ü\u2028x", "", "猫", "d"]
    report = export.saved_model(model, tmp_path / "1", labels=names, top=99)
    assert (report.files_error, (tmp_path / "1" / _saved_model.WARMUP_FILE).exists()) == (None, False)
    assert (tmp_path / "1" / "assets" / "labels.txt").read_text("utf-8") == "a b\nü x\n\n猫\nd\n"
    call = tf.saved_model.load(str(tmp_path / "1")).signatures
    assert sorted(call) == ["float_images", "serving_default", "uint8_images"]
    images = prepared(model.config)
    answer = call["serving_default"](images=tf.constant(images))
    assert error(answer["logits"], model(images)) < NOISE
    assert sorted(name.decode() for name in answer["classes"].numpy()[0]) == sorted(names)


# ---- complete or absent


@pytest.mark.full
def test_a_version_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A server that polls the folder treats every numeric name as a version.
    seen, verify = [], verification.verify

    def look(*arguments: Any) -> export.Report:
        seen.extend(path.name for path in tmp_path.iterdir() if path.name.isdecimal())
        return verify(*arguments)

    monkeypatch.setattr(verification, "verify", look)
    report = export.saved_model(small(), tmp_path / "1", warmup=())
    assert not seen and nothing_but(tmp_path, "1")
    assert (tmp_path / "1").stat().st_mode & 0o555 == 0o555  # a server runs as another user
    assert report.warmup == () and "warm-up requests: none\n" in str(report)


def test_wrong_options_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"labels": ["one", "two"]}, "2 for 5 classes"),
        ({"labels": "nowhere"}, "labels must be"),
        ({"labels": [1, 2, 3, 4, 5]}, "all strings"),
        ({"top": 0}, "top must be"),
        ({"top": 2.5}, "top must be"),
        ({"warmup": (0,)}, "warmup must be"),
        ({"warmup": 8}, "warmup must be"),
        ({"warmup": (1.5,)}, "warmup must be"),
        ({"warmup": range(1, 2000)}, "at most 333"),
        ({"dtype": "float16"}, "dtype must be"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_saved_model, "_write_graph", lambda *_, **__: FILE_SIGNATURES)
        for options, said in wrong:
            with pytest.raises(ValueError, match=said):
                export.saved_model(small(), tmp_path / "vit" / "1", **options)
    with pytest.raises(ValueError, match=r"model.export"):
        export.saved_model(keras.Sequential([small()]), tmp_path / "1")
    assert not [path for path in tmp_path.rglob("*") if path.name != "vit"]


@pytest.mark.parametrize("broken", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_broken_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: BaseException) -> None:
    def write(_: VisionTransformer, folder: Path, **__: Any) -> None:
        folder.mkdir()
        (folder / "saved_model.pb").write_text("half a graph")
        raise broken

    monkeypatch.setattr(_saved_model, "_write_graph", write)
    with pytest.raises(type(broken)):
        export.saved_model(small(), tmp_path / "1")
    assert nothing_but(tmp_path)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "precious").write_text("keep")
    with pytest.raises(FileExistsError, match="already exists"):
        export.saved_model(small(), tmp_path / "1")

    def write(_: VisionTransformer, folder: Path, **__: Any) -> list[str]:
        for place in (folder, tmp_path / "2"):  # another export's, which is faster
            place.mkdir()
            (place / "saved_model.pb").write_text("the graph")
        return []

    monkeypatch.setattr(_saved_model, "_write_graph", write)
    monkeypatch.setattr(verification, "verify", lambda *_: None)
    with pytest.raises(FileExistsError, match="2 already exists: remove it, or write the next version"):
        export.saved_model(small(), tmp_path / "2", warmup=())
    assert nothing_but(tmp_path, "1", "2") and nothing_but(tmp_path / "1", "precious")


@pytest.mark.full
def test_a_graph_that_answers_otherwise_is_refused(
    saved_digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, build = small(num_channels=2), server.build
    monkeypatch.setattr(server, "build", lambda _, **options: build(other, **options))
    other.get_layer("head").bias.assign_add([5.0, 0, 0, 0, -5])
    with pytest.raises(export.VerificationError, match="differs from the model"):
        export.saved_model(small(num_channels=2), tmp_path / "1")
    assert nothing_but(tmp_path)
    model = saved_digits.model
    darker = model.with_config(model.config.replace(preprocessing={"mean": (0.6,), "std": (0.5,)}))
    with pytest.raises(export.VerificationError, match="prepares image files differently"):
        export.verify(darker, saved_digits.folder)


# ---- the loaders of servers, which restore by the graph's names: a folder may load in Python and still fail there


@pytest.mark.full
def test_a_session_answers_as_the_loaded_functions(saved_digits: Any) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(saved_digits.folder))
        signature = loaded.signature_def["serving_default"]
        fetched = {name: tensor.name for name, tensor in signature.outputs.items()}
        found = session.run(fetched, {signature.inputs["image_bytes"].name: np.array(FILES, object)})
    expected = saved_digits.call["serving_default"](image_bytes=tf.constant(FILES))
    assert sorted(found) == sorted(expected) and found["classes"].tolist() == expected["classes"].numpy().tolist()
    assert error(found["probabilities"], expected["probabilities"]) < NOISE


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the C program that loads SavedModels with the installed TensorFlow."""
    libraries = Path(tf.__file__).parent
    if not shutil.which("gcc") or not (libraries / "libtensorflow_cc.so.2").exists():
        pytest.skip("needs gcc and a TensorFlow for Linux")
    program = tmp_path_factory.mktemp("loader") / "savedmodel_run"
    linked = [f"-L{libraries}", "-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2"]
    source = [str(SUPPORT / "savedmodel_run.c"), "-o", str(program), f"-I{libraries / 'include'}"]
    subprocess.run(["gcc", "-O1", "-w", *source, *linked, f"-Wl,-rpath,{libraries}"], check=True, timeout=120)
    return program


def in_c(program: Path, folder: Path, name: str, value: np.ndarray, scratch: Path) -> dict[str, np.ndarray]:
    """Return a signature's outputs, computed without Python.

    Raises:
        RuntimeError: with the program's message.
    """
    from tensorflow.python.tools import saved_model_utils  # the graph's names for a signature's

    signature = saved_model_utils.get_meta_graph_def(str(folder), "serve").signature_def[name]
    [feed] = signature.inputs.values()
    texts = value.dtype.kind == "O"
    content = b"".join(len(text).to_bytes(8, "little") + text for text in value) if texts else value.tobytes()
    (scratch / "input").write_bytes(content)
    dtype = "string" if texts else {"float32": "float", "uint8": "uint8"}[value.dtype.name]
    shape = [value.ndim, *value.shape]
    words = [folder, feed.name, dtype, *shape, scratch / "input", *(out.name for out in signature.outputs.values())]
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stdout)
    return {name: parsed(line) for name, line in zip(signature.outputs, done.stdout.splitlines(), strict=True)}


def parsed(line: str) -> np.ndarray:
    number, rank, *rest = line.split(" ")
    shape = tuple(map(int, rest[: int(rank)]))
    kind = tf.dtypes.as_dtype(int(number))
    if kind == tf.string:
        return np.array([bytes.fromhex(text) for text in rest[-1].split(",")[:-1]], object).reshape(shape)
    return np.frombuffer(bytes.fromhex(rest[-1]), kind.as_numpy_dtype).reshape(shape)


@pytest.mark.full
def test_the_c_plus_plus_loader_answers_as_python(saved_digits: Any, loader: Path, tmp_path: Path) -> None:
    model, folder, _, call = saved_digits
    for name, (argument, dtype, outputs) in SIGNATURES.items():
        if dtype == tf.string:
            value = np.array([*FILES, *([b"none"] if name == "tolerant" else [])], object)
        elif dtype == tf.uint8:
            value = np.random.default_rng(0).integers(0, 256, (2, 50, 41, 3), dtype=np.uint8)
        else:
            value = prepared(model.config, batch=2)
        received = in_c(loader, folder, name, value, tmp_path)
        expected = call[name](**{argument: tf.constant(value)})
        assert sorted(received) == outputs, name
        for key, tensor in expected.items():
            if tensor.dtype == tf.float32:
                assert error(received[key], tensor) < NOISE, (name, key)
            else:
                assert received[key].tolist() == tensor.numpy().tolist(), (name, key)
    with pytest.raises(RuntimeError, match="code 3 running: .*Not a JPEG or PNG"):  # 3 is INVALID_ARGUMENT
        in_c(loader, folder, "serving_default", np.array([b"text"], object), tmp_path)


# ---- the clients in examples/serving, whose requests go to the signatures without a server


class FakeServer:
    """Answer the requests of both clients by the signatures: a connection for REST, and a stub for gRPC."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def request(self, method: str, path: str, body: str, headers: dict[str, str]) -> None:
        assert (method, path) == ("POST", "/v1/models/vit:predict")
        asked = json.loads(body)
        files = [base64.b64decode(row["b64"], validate=True) for row in asked["instances"]]
        try:
            outputs = self.call[asked["signature_name"]](image_bytes=tf.constant(files))
        except tf.errors.InvalidArgumentError as refused:
            self.status, self.content = 400, {"error": refused.message}
            return
        columns = {
            name: value.numpy().astype("U" if name == "classes" else None).tolist() for name, value in outputs.items()
        }
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        self.status, self.content = 200, {"predictions": rows}

    def getresponse(self) -> FakeServer:
        return self

    def read(self) -> bytes:
        return json.dumps(self.content).encode()

    def Predict(self, request: Any, timeout: float) -> Any:  # noqa: N802 - the name in the .proto
        from tensorflow_serving.apis import predict_pb2

        assert (request.model_spec.name, list(request.inputs)) == ("vit", ["image_bytes"])
        files = tf.constant(tf.make_ndarray(request.inputs["image_bytes"]), tf.string)
        answer = predict_pb2.PredictResponse()
        for name, value in self.call[request.model_spec.signature_name](image_bytes=files).items():
            if not request.output_filter or name in request.output_filter:
                answer.outputs[name].CopyFrom(tf.make_tensor_proto(value))
        return answer


def test_the_clients_send_what_the_signatures_take(saved_digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow_serving")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    rest_client, grpc_client = (importlib.import_module(name) for name in ("rest_client", "grpc_client"))
    server = FakeServer(saved_digits.call)
    probabilities = np.asarray(keras.ops.softmax(saved_digits.model(decoded(saved_digits.model))))
    rows = rest_client.classify(server, FILES)
    np.testing.assert_allclose([row["probabilities"] for row in rows], probabilities, atol=NOISE)
    with pytest.raises(ValueError, match=r"400: [\s\S]*Invalid JPEG"):
        rest_client.classify(server, [FILES[0], CORRUPT])
    careful = rest_client.classify(server, [CORRUPT, FILES[0]], signature="tolerant")
    assert [row["valid"] for row in careful] == [False, True] and careful[0]["classes"] == [""] * 3

    answer = grpc_client.classify(server, FILES)
    np.testing.assert_allclose(answer["probabilities"], probabilities, atol=NOISE)
    assert [[name.decode() for name in row] for row in answer["classes"]] == [row["classes"] for row in rows]
    assert sorted(grpc_client.classify(server, FILES, outputs=("scores",))) == ["scores"]
    assert grpc_client.classify(server, [])["classes"].shape == (0, 3)


def test_the_load_generator_counts_what_goes_wrong() -> None:
    load = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "load.py")))
    answers = iter([[True], [True, True], ValueError("no"), OSError("gone"), [False]])

    def send(_: list[bytes]) -> list[bool]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    left, accepted = iter(range(5)), iter([True, False])
    make = functools.partial(contextlib.nullcontext, send)
    counts = load.run(make, FILES, going=lambda: next(left, None) is not None, threads=1)
    assert (len(counts.times), counts.failures.total(), counts.refused, counts.corrupt) == (5, 4, 0, 0)
    make = functools.partial(contextlib.nullcontext, lambda _: [True])
    counts = load.run(make, FILES, going=lambda: next(accepted), threads=1, corrupt=1.0)
    assert counts.failures.total() == 1, "a corrupt image that is not refused is a failure"


def test_the_real_server_is_configured_with_files_that_are_there() -> None:
    model_server_config_pb2 = pytest.importorskip("tensorflow_serving.config.model_server_config_pb2")
    from google.protobuf import text_format

    compose = (EXAMPLES / "docker-compose.yml").read_text()
    mounted = re.findall(r"- \./([\w.-]+):", compose)
    assert mounted and all((EXAMPLES / name).exists() for name in mounted if name != "models")
    configured = text_format.Parse(
        (EXAMPLES / "models.config").read_text(), model_server_config_pb2.ModelServerConfig()
    )
    (one,) = configured.model_config_list.config
    assert (one.name, one.base_path) == ("vit", "/models/vit")
    assert list(one.model_version_policy.specific.versions) == [1, 2]
