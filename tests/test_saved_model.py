"""SavedModels give the model's results: in Python, in TensorFlow's C++ loader, and without Keras."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
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
from tiny_models import FAMILIES, OTHERS, VARIANTS, built, prepared

TESTS = Path(__file__).parent
# Largest error of a logit over the largest logit: float32 noise of another order of additions, 1e-7 to 2e-6.
NOISE = 1e-5
# The size of a graph with five signatures; the weights of tiny models are smaller.
GRAPH_BYTES = 1_200_000
FILE_SIGNATURES = ("serving_default", "tolerant", "features")


def small(kind: str = "pure") -> VisionTransformer:
    return built(num_layers=1, **VARIANTS[kind])


def error(got: Any, want: Any) -> float:
    want = np.asarray(want)
    return float(np.abs(np.reshape(got, want.shape) - want).max() / np.abs(want).max())


def pngs(model: VisionTransformer, count: int = 2) -> tuple[tf.Tensor, np.ndarray]:
    """Return PNG files, and their pixels prepared by `preprocess`."""
    photos = [image_kinds.photo(40 + 9 * seed, 50, seed) for seed in range(count)]
    files = tf.constant([image_kinds.encoded(photo, "PNG") for photo in photos])
    return files, np.concatenate([model.preprocess(photo) for photo in photos])


QUICK = ("pure", "hybrid", "map", "unpooled", "headless", "distilled", "relative positions", "rotary", "mixer", "BiT")


def nothing_but(folder: Path, *expected: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[VisionTransformer, Path, dict[str, Any], export.Report]:
    """Return a model with class names, its SavedModel's folder, loaded signatures and report."""
    model, folder = small("registers"), tmp_path_factory.mktemp("models") / "vit" / "1"
    report = export.saved_model(model, folder, labels=["ant", "bee", "cat", "dog", "eel"], top=3, warmup=(1, 4))
    return model, folder, tf.saved_model.load(str(folder)).signatures, report


@pytest.mark.parametrize("kind", full_except(QUICK, VARIANTS | FAMILIES | OTHERS))
def test_the_served_graph_computes_the_model(kind: str) -> None:
    model = built(**(VARIANTS | FAMILIES | OTHERS)[kind])
    images = prepared(model.config, batch=3)
    found = server.model_function(model)(images)
    assert error(found["logits" if model.config.num_classes else "features"], model(images)) < NOISE
    assert error(found["features"], model.features(images, ["pre_logits"])["pre_logits"]) < NOISE
    assert all(value.dtype == tf.float32 for value in found.values())


# The graph of the others is the same but for the model, which the test above has.
@pytest.mark.parametrize(
    "kind",
    full_except(["hybrid", "headless"], ["pure", "hybrid", "headless", "grey", "gap", "map", "unpooled", "distilled"]),
)
def test_every_signature_answers_as_the_model(tmp_path: Path, kind: str) -> None:
    model = small(kind)
    report = export.saved_model(model, tmp_path / "deep" / "1", warmup=())
    assert (report.path, report.images) == (tmp_path / "deep" / "1", 8)
    assert report.max_error < NOISE and report.cosine > 0.999999
    assert nothing_but(tmp_path / "deep", "1")
    call = tf.saved_model.load(str(tmp_path / "deep" / "1")).signatures
    images = prepared(model.config, batch=3)
    name = "logits" if model.config.num_classes else "features"
    assert error(call["float_images"](images=tf.constant(images))[name], model(images)) < NOISE
    pixels = np.random.default_rng(0).integers(0, 256, (2, 50, 41, model.config.num_channels), dtype=np.uint8)
    answers = call["uint8_images"](images=tf.constant(pixels))
    assert error(answers[name], model(model.preprocess(pixels))) < NOISE


def test_image_files_are_classified_as_the_model_does(saved: Any) -> None:
    model, _, call, _ = saved
    files, images = pngs(model)
    answer = {name: value.numpy() for name, value in call["serving_default"](image_bytes=files).items()}
    predictions = model.decode_predictions(model(images), top=3)
    names = np.array(["ant", "bee", "cat", "dog", "eel"])
    assert sorted(answer) == ["classes", "probabilities", "scores"]
    for row, best in enumerate(predictions):
        assert [name.decode() for name in answer["classes"][row]] == [names[int(p.label_id)] for p in best]
        np.testing.assert_allclose(answer["scores"][row], [p.probability for p in best], atol=1e-6)
    np.testing.assert_allclose(answer["probabilities"].sum(axis=1), 1, atol=1e-6)
    features = call["features"](image_bytes=files)["features"]
    assert error(features, model.features(images, ["pre_logits"])["pre_logits"]) < NOISE


def test_a_tolerant_call_gives_zeros_for_what_is_no_image(saved: Any) -> None:
    model, _, call, _ = saved
    files, _ = pngs(model)
    answer = call["tolerant"](image_bytes=tf.concat([files[:1], ["no image"], files[1:]], axis=0))
    strict = call["serving_default"](image_bytes=files)
    assert answer["valid"].numpy().tolist() == [True, False, True]
    assert answer["classes"].numpy()[1].tolist() == [b"", b"", b""]
    for name in ("probabilities", "scores"):
        np.testing.assert_allclose(answer[name].numpy()[::2], strict[name], atol=1e-6)
        assert not answer[name].numpy()[1].any()


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> tuple[VisionTransformer, Path, export.Report]:
    """Return a model, and the folder and report of its SavedModel with bfloat16 weights."""
    model, folder = built(hidden_size=256, mlp_dim=1024, num_layers=2), tmp_path_factory.mktemp("half") / "1"
    return model, folder, export.saved_model(model, folder, dtype="bfloat16")


def test_a_bfloat16_folder_has_the_same_signatures_and_half_the_weights(saved: Any, halved: Any) -> None:
    model, folder, report = halved
    _, _, signatures, _ = saved
    weights = (folder / "variables" / "variables.data-00000-of-00001").stat().st_size
    assert weights <= 1.05 * 2 * model.count_params() + 20_000  # the index of checkpoints beside the weights
    call = tf.saved_model.load(str(folder)).signatures
    assert sorted(call) == sorted(signatures)
    files, images = pngs(model)
    expected = np.asarray(model(images))
    answer = call["float_images"](images=tf.constant(images))
    assert all(value.dtype in (tf.float32, tf.string) for value in answer.values())
    # 8 bits: 0.004 is one rounding of the largest logit. Equality would mean that nothing is computed in bfloat16.
    assert 1e-4 < error(answer["logits"], expected) < 0.03
    answer = call["serving_default"](image_bytes=files)
    np.testing.assert_allclose(answer["probabilities"], keras.ops.softmax(expected), atol=0.02)
    assert (report.mode, report.agreement) == ("bfloat16", 1.0) and report.cosine > 0.999
    assert model.dtype == "float32"


def test_verify_knows_a_bfloat16_folder_and_refuses_a_wrong_one(halved: Any) -> None:
    model, folder, _ = halved
    report = export.verify(model, folder)
    assert report.mode == "bfloat16" and 1e-5 < report.files_error < 0.05
    other = model.with_config(model.config)
    kernel = other.get_layer("block_1").mlp.dense2.kernel
    kernel.assign(np.asarray(kernel) * 0.5)
    with pytest.raises(export.VerificationError, match=r"wanted .*cosine >= 0\.9[95]"):
        export.verify(other, folder)


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        export.saved_model(small(), tmp_path / "1", dtype="float16")
    assert nothing_but(tmp_path)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_one_operator_has_each_norm_and_each_gelu(dtype: str | None) -> None:
    # TensorFlow's optimizer joins them only in this form: a product, its bias, and tf.nn.gelu; a batch norm of rows.
    model = built(num_layers=2)
    served = model.with_config(model.config, dtype=dtype) if dtype else model
    spec = tf.TensorSpec((None, *model.config.size, 3), tf.float32)
    graph = tf.function(server.model_function(served), input_signature=[spec]).get_concrete_function().graph
    kinds = [operator.type for operator in graph.get_operations()]
    # The final norm, of the class token alone, stays as Keras computes it.
    assert kinds.count("FusedBatchNormV3") == 4 and kinds.count("SquaredDifference") == 1
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


@pytest.mark.parametrize("name", FILE_SIGNATURES)
def test_every_output_has_a_row_for_each_image(saved: Any, name: str) -> None:
    # A server that joins requests splits the results along the first axis.
    model, _, call, _ = saved
    for count in (0, 1, 3):
        files = pngs(model, count)[0] if count else tf.constant([], tf.string)
        assert {len(value) for value in call[name](image_bytes=files).values()} == {count}


def test_every_weight_is_stored_once(tmp_path: Path) -> None:
    model = built(hidden_size=512, mlp_dim=2048, num_layers=1)
    report = export.saved_model(model, tmp_path / "1")
    on_disk = sum(path.stat().st_size for path in (tmp_path / "1").rglob("*") if path.is_file())
    assert report.bytes == on_disk
    assert on_disk <= 1.05 * 4 * model.count_params() + GRAPH_BYTES


def test_names_of_classes_lie_beside_the_model(saved: Any) -> None:
    _, folder, _, _ = saved
    assert (folder / "assets" / "labels.txt").read_text().split() == ["ant", "bee", "cat", "dog", "eel"]


def test_a_name_is_a_line_and_is_answered_as_it_is(tmp_path: Path) -> None:
    model, names = small(), ["a\nb", "ü\u2028x", "", "猫", "d"]
    export.saved_model(model, tmp_path / "1", labels=names, top=99)
    assert (tmp_path / "1" / "assets" / "labels.txt").read_text("utf-8") == "a b\nü x\n\n猫\nd\n"
    call = tf.saved_model.load(str(tmp_path / "1")).signatures
    [found] = call["float_images"](images=tf.constant(prepared(model.config, batch=1)))["classes"].numpy()
    assert sorted(name.decode() for name in found) == sorted(names)


def test_the_warm_up_has_each_batch_of_each_signature(saved: Any) -> None:
    from tensorflow_serving.apis import prediction_log_pb2

    _, folder, call, report = saved
    assert report.warmup == (1, 4) and "warm-up requests: for batches of 1, 4" in report.lines()
    seen = []
    for record in tf.data.TFRecordDataset(str(folder / _saved_model.WARMUP_FILE)):
        request = prediction_log_pb2.PredictionLog.FromString(record.numpy()).predict_log.request
        images = tf.make_ndarray(request.inputs["image_bytes"])
        call[request.model_spec.signature_name](image_bytes=tf.constant(images))
        seen.append((request.model_spec.signature_name, len(images)))
    assert sorted(seen) == sorted((name, n) for name in FILE_SIGNATURES for n in (1, 4))


def test_without_tensorflow_serving_api_only_the_default_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    hidden = "tensorflow_serving"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == hidden else find(name, *rest))
    with pytest.raises(ImportError, match=r'pip install "keras-vit-zoo\[serving\]"`. Received: warmup=\(1,\)'):
        export.saved_model(small(), tmp_path / "1", warmup=(1,))
    assert nothing_but(tmp_path)
    report = export.saved_model(small(), tmp_path / "1")
    assert report.warmup == () and "warm-up requests: none (`pip install" in str(report)
    assert not (tmp_path / "1" / _saved_model.WARMUP_FILE).exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"labels": ["one", "two"]}, "2 for 5 classes"),
        ({"labels": "nowhere"}, r"labels must be one of \['digits'"),
        ({"labels": [1, 2, 3, 4, 5]}, "all strings. Received: 1"),
        ({"top": 0}, "top must be an integer >= 1"),
        ({"top": 2.5}, "top must be an integer >= 1"),
        ({"warmup": (0,)}, "batch sizes >= 1"),
        ({"warmup": 8}, r"batch sizes >= 1, such as \(1, 8\); \(\) means none. Received: 8"),
        ({"warmup": (1.5,)}, "batch sizes >= 1"),
    ],
)
def test_wrong_options_leave_nothing(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        export.saved_model(small(), tmp_path / "vit" / "1", **options)
    assert nothing_but(tmp_path)


def test_weights_that_were_added_are_not_left_out(tmp_path: Path) -> None:
    model = small()
    model.get_layer("head").enable_lora(2)
    report = export.saved_model(model, tmp_path / "1")
    assert report.max_error < NOISE


def test_more_warm_up_requests_than_a_server_accepts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 333 batch sizes. Received: 1999"):
        export.saved_model(small(), tmp_path / "1", warmup=range(1, 2000))
    assert nothing_but(tmp_path)


def test_a_model_around_one_is_sent_to_kerass_export(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`model.export\(path\)` writes other Keras models. Received: Sequential"):
        export.saved_model(keras.Sequential([small()]), tmp_path / "1")


@pytest.mark.parametrize("channels", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_model_of_other_channels_takes_arrays(channels: int, tmp_path: Path) -> None:
    model = built(num_layers=1, num_channels=channels)
    report = export.saved_model(model, tmp_path / "1")
    assert (report.files_error, (tmp_path / "1" / _saved_model.WARMUP_FILE).exists()) == (None, False)
    call = tf.saved_model.load(str(tmp_path / "1")).signatures
    assert sorted(call) == ["float_images", "serving_default", "uint8_images"]
    images = prepared(model.config)
    assert error(call["serving_default"](images=tf.constant(images))["logits"], model(images)) < NOISE


def test_mixed_precision_leaves_with_float32_answers(tmp_path: Path) -> None:
    model = built("mixed_bfloat16", num_layers=1)
    export.saved_model(model, tmp_path / "1")
    images = prepared(model.config)
    received = export.runner(tmp_path / "1")(images)
    assert received.dtype == np.float32
    assert error(received, model(images)) < 0.05  # bfloat16 has 8 bits, and the graph may round in other places


def test_a_new_heads_zeros_are_the_same_as_themselves(tmp_path: Path) -> None:
    model = small()
    for variable in (model.get_layer("head").kernel, model.get_layer("head").bias):
        variable.assign(np.zeros(variable.shape))
    report = export.saved_model(model, tmp_path / "1")
    assert (report.cosine, report.max_error, report.agreement) == (1.0, 0.0, 1.0)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "precious").write_text("keep")
    with pytest.raises(FileExistsError, match="already exists"):
        export.saved_model(small(), tmp_path / "1")
    assert nothing_but(tmp_path / "1", "precious") and nothing_but(tmp_path, "1")


def test_the_slower_of_two_exports_to_one_path_gets_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: VisionTransformer, folder: Path, **__: Any) -> list[str]:
        for place in (folder, tmp_path / "1"):  # the other one's too
            place.mkdir()
            (place / "saved_model.pb").write_text("the graph")
        return []

    monkeypatch.setattr(_saved_model, "_write", write)
    monkeypatch.setattr(verification, "verify", lambda *_: None)
    with pytest.raises(FileExistsError, match=r"1 already exists: remove it, or write the next version beside it"):
        export.saved_model(small(), tmp_path / "1", warmup=())
    assert nothing_but(tmp_path, "1") and nothing_but(tmp_path / "1", "saved_model.pb")


def test_a_version_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A server that polls the folder treats every numeric name as a version.
    seen = []
    real = _saved_model._write_warmup

    def write(*arguments: Any) -> None:
        seen.append([path.name for path in tmp_path.iterdir() if path.name.isdecimal()])
        real(*arguments)

    monkeypatch.setattr(_saved_model, "_write_warmup", write)
    export.saved_model(small(), tmp_path / "1")
    assert seen == [[]] and nothing_but(tmp_path, "1")
    assert (tmp_path / "1").stat().st_mode & 0o555 == 0o555  # a server runs as another user


@pytest.mark.parametrize("broken", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_broken_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: BaseException) -> None:
    def write(*_: Any) -> None:
        raise broken

    monkeypatch.setattr(_saved_model, "_write_warmup", write)
    with pytest.raises(type(broken)):
        export.saved_model(small(), tmp_path / "1")
    assert nothing_but(tmp_path)


def test_a_graph_that_answers_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = small()
    real = server.build
    monkeypatch.setattr(server, "build", lambda _, **options: real(other, **options))
    other.get_layer("head").bias.assign_add([5.0, 0, 0, 0, -5])
    with pytest.raises(export.VerificationError, match="differs from the model"):
        export.saved_model(small(), tmp_path / "1")
    assert nothing_but(tmp_path)


ALONE = """
    import sys

    sys.modules["keras"] = sys.modules["keras_vit"] = None  # as if they were not installed
    import numpy as np
    import tensorflow as tf

    folder, images, logits = sys.argv[1:]
    loaded = tf.saved_model.load(folder)
    np.save(logits, loaded.signatures["float_images"](images=tf.constant(np.load(images)))["logits"].numpy())
    assert not [name for name in sys.modules if name.startswith(("keras.", "keras_vit."))]
"""


def test_it_runs_without_keras_and_this_package(saved: Any, tmp_path: Path) -> None:
    model, folder, _, _ = saved
    images = prepared(model.config, batch=2)
    np.save(tmp_path / "images.npy", images)
    script = [sys.executable, "-c", textwrap.dedent(ALONE)]
    files = [folder, tmp_path / "images.npy", tmp_path / "logits.npy"]
    done = subprocess.run([*script, *map(str, files)], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert error(np.load(tmp_path / "logits.npy"), model(images)) < NOISE


@pytest.mark.full
def test_the_command_line_of_tensorflow_runs_it(saved: Any, tmp_path: Path) -> None:
    # Servers restore by the graph's names: a folder may load in Python and still fail there.
    model, folder, _, _ = saved
    images = prepared(model.config, batch=2)
    np.save(tmp_path / "images.npy", images)
    run = ["run", "--dir", folder, "--tag_set", "serve", "--signature_def", "float_images"]
    files = ["--inputs", f"images={tmp_path / 'images.npy'}", "--outdir", tmp_path / "out"]
    start = "from tensorflow.python.tools.saved_model_cli import main; main()"
    command = [sys.executable, "-c", start, *map(str, run + files)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert error(np.load(tmp_path / "out" / "logits.npy"), model(images)) < NOISE


# ---- TensorFlow's C++ loader


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the C program that loads SavedModels with the installed TensorFlow."""
    libraries = Path(tf.__file__).parent
    if not shutil.which("gcc") or not (libraries / "libtensorflow_cc.so.2").exists():
        pytest.skip("needs gcc and a TensorFlow for Linux")
    program = tmp_path_factory.mktemp("loader") / "savedmodel_run"
    linked = [f"-L{libraries}", "-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2"]
    source = [str(TESTS / "savedmodel_run.c"), "-o", str(program), f"-I{libraries / 'include'}"]
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


@pytest.mark.parametrize(
    "name",
    full_except(["serving_default"], [*FILE_SIGNATURES, "float_images", "uint8_images"]),
)
def test_the_c_plus_plus_loader_answers_as_python(saved: Any, loader: Path, name: str, tmp_path: Path) -> None:
    model, folder, call, _ = saved
    if name in FILE_SIGNATURES:
        good, _ = pngs(model)
        value = np.array([*good.numpy(), *([b"none"] if name == "tolerant" else [])], object)
    elif name == "uint8_images":
        value = np.random.default_rng(0).integers(0, 256, (2, 50, 41, 3), dtype=np.uint8)
    else:
        value = prepared(model.config, batch=2)
    received = in_c(loader, folder, name, value, tmp_path)
    [argument] = call[name].structured_input_signature[1]
    expected = call[name](**{argument: tf.constant(value)})
    assert sorted(received) == sorted(expected)
    for key, tensor in expected.items():
        if tensor.dtype == tf.float32:
            assert error(received[key], tensor) < NOISE, key
        else:
            assert received[key].tolist() == tensor.numpy().tolist(), key


def test_the_c_plus_plus_loader_refuses_a_bad_file(saved: Any, loader: Path, tmp_path: Path) -> None:
    _, folder, _, _ = saved
    with pytest.raises(RuntimeError, match="code 3 running: .*Not a JPEG or PNG"):  # 3 is INVALID_ARGUMENT
        in_c(loader, folder, "serving_default", np.array([b"text"], object), tmp_path)


@pytest.mark.parametrize("batches", [6, pytest.param(50, marks=pytest.mark.full)])
def test_a_saved_folder_answers_files_as_pillow_and_keras_do_or_refuses(
    saved: tuple[VisionTransformer, Path, dict[str, Any], export.Report], batches: int
) -> None:
    model, _, signatures, _ = saved
    random, seen = np.random.default_rng(5), {"good": 0, "refused": 0}
    for _ in range(batches):
        kinds, files = zip(*(image_kinds.drawn(random) for _ in range(20)), strict=True)
        answer = {name: value.numpy() for name, value in signatures["tolerant"](image_bytes=tf.constant(files)).items()}
        valid = answer["valid"]
        for file in (file for file, good in zip(files, valid, strict=True) if not good):
            seen["refused"] += 1
            with pytest.raises(tf.errors.InvalidArgumentError):
                signatures["serving_default"](image_bytes=tf.constant([file]))
        whole = [file for file, good in zip(files, valid, strict=True) if good]
        seen["good"] += len(whole)
        strict = signatures["serving_default"](image_bytes=tf.constant(whole))["probabilities"].numpy()
        np.testing.assert_allclose(strict, answer["probabilities"][valid], rtol=0, atol=NOISE)
        pictures = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in whole]
        expected = keras.ops.softmax(model(np.concatenate([model.preprocess(picture) for picture in pictures])))
        # CMYK pixels differ by one of 255 levels (test_image_bytes.py), which may change the classes.
        exact = ["CMYK" not in kind for kind, good in zip(kinds, valid, strict=True) if good]
        np.testing.assert_allclose(strict[exact], np.asarray(expected)[exact], rtol=0, atol=NOISE)
    assert seen["good"] > 12 * batches and seen["refused"] > 4 * batches
