"""What leaves computes what the model computes, runs without Keras, and is whole or not there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import VisionTransformer, export
from tiny_models import VARIANTS, built, prepared

KINDS = ("pure", "hybrid", "gap", "map", "registers", "headless", "distilled")
# The functions of the package have the names of the modules they are in.
SAVED_MODEL, TFLITE, VERIFY = (
    importlib.import_module(f"keras_vit.export.{name}") for name in ("saved_model", "tflite", "verify")
)
# Largest error of a logit over the largest logit. float32: another order of additions, measured 1e-7 to 2e-6, a
# hundredfold below what the wrong activation costs (2e-4). float16: weights keep 11 bits, 2.4e-4 of each, and errors
# of many weights partly cancel. dynamic: weights keep 8 bits (4e-3 of a channel's largest) and so do activations.
WORST_ERROR = {"none": 1e-5, "float16": 5e-3, "dynamic": 0.15}
WORST_COSINE = {"none": 0.999999, "float16": 0.99999, "dynamic": 0.99}
# Without its weights a tiny model's file is its graph: operations and their names.
GRAPH_BYTES = 400_000


def small(kind: str = "pure") -> VisionTransformer:
    """A model of one block, so that converting it takes a moment."""
    return built(num_layers=1, **VARIANTS[kind])


def largest_error(got: np.ndarray, want: Any) -> float:
    want = np.asarray(want).reshape(got.shape)
    return float(np.abs(got - want).max() / np.abs(want).max())


def nothing_but(folder: Path, *expected: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(expected)


# ---- SavedModel


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_gives_the_models_logits(tmp_path: Path, kind: str) -> None:
    model = small(kind)
    report = export.saved_model(model, tmp_path / "deep" / "1")
    images = prepared(model.config, batch=3)
    received = export.runner(tmp_path / "deep" / "1")(images)
    assert largest_error(received, model(images)) < 1e-5  # see WORST_ERROR["none"]
    assert report.path == tmp_path / "deep" / "1"
    assert (report.images, report.agreement) == (8, 1.0)
    assert report.max_error < 1e-5
    assert report.cosine > 0.999999
    assert report.milliseconds > 0
    assert nothing_but(tmp_path / "deep", "1")


def test_every_weight_is_stored_once(tmp_path: Path) -> None:
    model = built(hidden_size=512, mlp_dim=2048, num_layers=1)
    report = export.saved_model(model, tmp_path / "1")
    on_disk = sum(path.stat().st_size for path in (tmp_path / "1").rglob("*") if path.is_file())
    assert report.bytes == on_disk
    assert on_disk <= 1.05 * 4 * model.count_params() + GRAPH_BYTES


ALONE = """
    import sys

    sys.modules["keras"] = sys.modules["keras_vit"] = None  # as if they were not installed
    import numpy as np
    import tensorflow as tf

    folder, images, logits = sys.argv[1:]
    loaded = tf.saved_model.load(folder)
    result = loaded.signatures["serving_default"](images=tf.constant(np.load(images)))
    np.save(logits, result["logits"].numpy())
    assert not [name for name in sys.modules if name.startswith(("keras.", "keras_vit."))]
"""


def test_a_saved_model_runs_without_keras_and_this_package(tmp_path: Path) -> None:
    model = small("hybrid")
    export.saved_model(model, tmp_path / "1")
    images = prepared(model.config, batch=2)
    np.save(tmp_path / "images.npy", images)
    script = [sys.executable, "-c", textwrap.dedent(ALONE)]
    files = [tmp_path / "1", tmp_path / "images.npy", tmp_path / "logits.npy"]
    done = subprocess.run([*script, *map(str, files)], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert largest_error(np.load(tmp_path / "logits.npy"), model(images)) < 1e-5


def test_a_session_finds_the_variables_as_the_c_plus_plus_loader_does(tmp_path: Path) -> None:
    # Servers restore by the graph's own names, not by Python's objects: a folder may load well in Python and still
    # fail there with "Could not find variable". The command line of TensorFlow takes their way.
    model = small()
    export.saved_model(model, tmp_path / "1")
    images = prepared(model.config, batch=2)
    np.save(tmp_path / "images.npy", images)
    run = ["run", "--dir", tmp_path / "1", "--tag_set", "serve", "--signature_def", "serving_default"]
    files = ["--inputs", f"images={tmp_path / 'images.npy'}", "--outdir", tmp_path / "out"]
    start = "from tensorflow.python.tools.saved_model_cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, *map(str, run + files)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert largest_error(np.load(tmp_path / "out" / "logits.npy"), model(images)) < 1e-5


def test_the_signature_takes_any_batch_of_the_models_images(tmp_path: Path) -> None:
    import tensorflow as tf

    model = built(image_size=(16, 40))
    export.saved_model(model, tmp_path / "1")
    signature = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    [images] = signature.structured_input_signature[1].values()
    assert (images.name, images.shape.as_list(), images.dtype) == ("images", [None, 16, 40, 3], tf.float32)
    [(name, logits)] = signature.structured_outputs.items()
    assert (name, logits.shape.as_list(), logits.dtype) == ("logits", [None, 5], tf.float32)


def test_mixed_precision_leaves_with_float32_logits(tmp_path: Path) -> None:
    model = built("mixed_bfloat16")
    export.saved_model(model, tmp_path / "1")
    images = prepared(model.config)
    received = export.runner(tmp_path / "1")(images)
    assert received.dtype == np.float32
    # bfloat16 has 8 bits, and the compiled graph may round in other places than single operations do.
    assert largest_error(received, model(images)) < 0.05


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "precious").write_text("keep")
    with pytest.raises(FileExistsError, match="is there already"):
        export.saved_model(small(), tmp_path / "1")
    assert nothing_but(tmp_path / "1", "precious")
    assert nothing_but(tmp_path, "1")


def test_a_servers_user_may_read_the_folder(tmp_path: Path) -> None:
    export.saved_model(small(), tmp_path / "1")
    assert (tmp_path / "1").stat().st_mode & 0o555 == 0o555


# ---- TFLite


def operations(path: Path) -> set[str]:
    from ai_edge_litert.interpreter import Interpreter

    return {detail["op_name"] for detail in Interpreter(model_path=str(path))._get_ops_details()}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *[("none", kind) for kind in ("pure", "hybrid", "gap", "map", "registers")],
        *[("float16", kind) for kind in ("pure", "hybrid")],
        *[("dynamic", kind) for kind in ("pure", "hybrid", "gap", "map")],
    ],
)
def test_a_tflite_file_gives_the_models_logits(tmp_path: Path, kind: str, mode: str) -> None:
    model = small(kind)
    images = prepared(model.config, batch=4)
    report = export.tflite(model, tmp_path / "tiny.tflite", quantize=mode, verify=images)
    run = export.runner(tmp_path / "tiny.tflite")
    received = np.concatenate([run(image[None]) for image in images])
    want = np.asarray(model(images))
    error = largest_error(received, want)
    cosine = min(a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(received, want, strict=True))
    assert error <= WORST_ERROR[mode]
    assert cosine >= WORST_COSINE[mode]
    assert (report.images, report.bytes) == (4, (tmp_path / "tiny.tflite").stat().st_size)
    assert report.max_error == pytest.approx(error, rel=1e-3, abs=1e-6)
    assert report.cosine == pytest.approx(cosine, abs=1e-6)
    assert not [name for name in operations(tmp_path / "tiny.tflite") if name.startswith("Flex") or "CUSTOM" in name]
    assert nothing_but(tmp_path, "tiny.tflite")


def test_quantized_files_are_smaller(tmp_path: Path) -> None:
    model = built(hidden_size=256, mlp_dim=1024, num_layers=1)
    assert export.tflite(model, tmp_path / "default").bytes < 2 * model.count_params()
    sizes = {
        mode: export.tflite(model, tmp_path / mode, quantize=mode).bytes for mode in ("none", "float16", "dynamic")
    }
    weights = 4 * model.count_params()
    assert weights <= sizes["none"] <= weights + GRAPH_BYTES
    assert weights / 2 <= sizes["float16"] <= weights / 2 + GRAPH_BYTES
    assert weights / 4 <= sizes["dynamic"] <= weights / 4 + GRAPH_BYTES


@pytest.mark.parametrize("mode", ["int3", "", "Dynamic"])
def test_an_unknown_mode_is_refused_with_those_there_are(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ValueError, match=r"none.*float16.*dynamic.*Received: "):
        export.tflite(small(), tmp_path / "out.tflite", quantize=mode)
    assert nothing_but(tmp_path)


# ---- verification


@pytest.mark.parametrize("write", [export.saved_model, export.tflite])
def test_what_is_not_the_model_is_refused_and_leaves_nothing(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    servable = SAVED_MODEL.servable

    def of_another(_: Any) -> Any:
        return servable(small("registers"))

    for module in (SAVED_MODEL, TFLITE):
        monkeypatch.setattr(module, "servable", of_another)
    with pytest.raises(export.VerificationError, match="is not what the model computes: wanted cosine >= 0.99"):
        write(model, tmp_path / "out")
    assert nothing_but(tmp_path)


def test_a_file_of_nan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    export.saved_model(model, tmp_path / "1")
    monkeypatch.setattr(VERIFY, "runner", lambda path: lambda images: np.full((len(images), 5), np.nan))
    with pytest.raises(export.VerificationError, match="cosine nan"):
        export.verify(model, tmp_path / "1")


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.tflite").write_bytes(b"yesterday's")

    def refuse(*_: Any, **__: Any) -> None:
        raise export.VerificationError("no")

    monkeypatch.setattr(TFLITE, "verify_file", refuse)
    with pytest.raises(export.VerificationError):
        export.tflite(small(), tmp_path / "out.tflite")
    assert (tmp_path / "out.tflite").read_bytes() == b"yesterday's"
    assert nothing_but(tmp_path, "out.tflite")


def test_another_models_file_is_told_apart(tmp_path: Path) -> None:
    model = small()
    export.saved_model(model, tmp_path / "1")
    images = prepared(model.config, batch=5)
    report = export.verify(model, tmp_path / "1", images)
    assert (report.images, report.agreement) == (5, 1.0)
    other = small()
    other.get_layer("head").bias.assign(-5 * np.asarray(other.get_layer("head").bias))
    other.get_layer("head").kernel.assign(-np.asarray(other.get_layer("head").kernel))
    with pytest.raises(export.VerificationError):
        export.verify(other, tmp_path / "1", images)
    assert export.verify(other, tmp_path / "1", images, least_cosine=-1.0).cosine < 0


def test_a_report_measures_what_it_says() -> None:
    want = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    got = np.array([[3.0, 4.0], [1.0, 0.0], [1.0, 0.0]])
    report = VERIFY._compare(Path(__file__), want, got, 1.5)
    assert report.images == 3
    assert report.bytes == Path(__file__).stat().st_size
    assert report.max_error == pytest.approx(2 / 4)
    assert report.cosine == pytest.approx(0.0)
    assert report.agreement == pytest.approx(2 / 3)
    assert "1.50 ms" in str(report)


def test_a_new_heads_zeros_are_the_same_as_themselves(tmp_path: Path) -> None:
    model = small()
    for variable in (model.get_layer("head").kernel, model.get_layer("head").bias):
        variable.assign(np.zeros(variable.shape))
    report = export.saved_model(model, tmp_path / "1")
    assert (report.cosine, report.max_error, report.agreement) == (1.0, 0.0, 1.0)
