"""Float files are run in half precision where that is asked for, and their largest value is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit import export
from keras_vit.export.check import half_precision
from keras_vit.export.check.compiled import CompiledRun, run_compiled
from keras_vit.export.check.running import load_exported
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.storage import FLOAT16, FLOAT32, Storage
from test_verify import KERNEL, file, linear
from tiny_models import built, prepared

__all__ = ["linear"]  # a fixture

HALF: dict[str, Any] = {"num_threads": 2, "xnnpack_flags": half_precision.FORCE_FP16}


@pytest.mark.parametrize("mode", ["none", "float16"])
def test_a_float_file_is_run_in_half_precision(mode: str, tmp_path: Path) -> None:
    model, path = built(), tmp_path / "file.tflite"
    images = prepared(model.config)
    assert export.tflite(model, path, quantize=mode, verify=images).half_precision_cosine is None
    report = export.verify(model, path, images, mode=mode, half_precision=True)
    if report.half_precision_cosine is not None:  # a CPU without any float16 computes in float32
        # Measured .99999 with sums in float16, .9999998 with sums in float32; rounding to 11 bits.
        assert 0.999 < report.half_precision_cosine < 1
        sums = report.half_precision_sums
        assert sums in ("float16", "float32")
        assert f"in half precision, sums in {sums}: differences between images, cosine " in str(report)
    assert f"largest value of a tensor {report.largest_value:,.0f}" in str(report)


@pytest.mark.parametrize("storage", [FLOAT32, FLOAT16])
def test_half_precision_rounds_image_weights_and_results(storage: Storage, tmp_path: Path) -> None:
    """NumPy computes the same as the runtime, with sums in float16 within their rounding."""
    random = np.random.default_rng(0)
    kernel = 0.1 * random.normal(size=(16, 768)).astype(np.float32)
    images = random.normal(size=(3, 16, 16, 3)).astype(np.float32)
    ops, path = Operators(Builder(), storage), tmp_path / "file.tflite"
    image = ops.builder.input("image", (1, 16, 16, 3))
    ops.builder.signature(
        {"image": image}, {"logits": ops.dense(ops.reshape(image, (1, 768), "row"), kernel, None, "logits")}
    )
    ops.builder.write(path)
    received = run_compiled(path, images, cpu=HALF).outputs["logits"]
    rows, weights = (values.reshape(len(values), -1).astype(np.float16) for values in (images, kernel))
    in_float32 = (rows.astype(np.float32) @ weights.T.astype(np.float32)).astype(np.float16)
    error = np.abs(received - in_float32).max() / np.abs(in_float32).max()
    if np.array_equal(received, received.astype(np.float16)):  # else this CPU computes in float32 alone
        # Measured 0 with sums in float32. In float16, with one rounding for each product, NumPy's sums are 0.01 off.
        assert error <= (1e-3 if half_precision.dtype_of_sums() == "float32" else 0.05)


@pytest.mark.parametrize(("lost", "dtype"), [(0, "float32"), (2, "float32"), (16, "float16"), (1023, "float16")])
def test_the_dtype_of_sums_is_measured(lost: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(path: Path, terms: np.ndarray) -> CompiledRun:
        assert path.is_file()
        outputs = {"logits": np.full((1, 8), terms.sum() - lost)}
        return CompiledRun(outputs=outputs, milliseconds=1.0, is_fully_accelerated=True, messages="")

    monkeypatch.setattr(half_precision, "_run", run)
    assert half_precision.dtype_of_sums.__wrapped__() == dtype


def test_what_has_no_half_precision_is_said(tmp_path: Path, linear: keras.Model) -> None:
    path = file(tmp_path / "file.tflite")
    for arguments, said in (
        ({"mode": "int8"}, "is for files with float weights. Received: mode='int8'"),
        ({"accelerator": "gpu"}, "runs on the CPU"),
    ):
        with pytest.raises(ValueError, match=said):
            export.verify(linear, path, half_precision=True, **arguments)
    with pytest.raises(ValueError, match="is for .tflite files. Received: the folder"):
        export.verify(linear, tmp_path, half_precision=True)


def test_a_cpu_without_half_precision_says_nothing(
    tmp_path: Path, linear: keras.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, in_float32 = file(tmp_path / "file.tflite"), run_compiled

    def verified() -> export.Report:
        return export.verify(linear, path, mode="none", half_precision=True)

    monkeypatch.setattr(half_precision, "_run", lambda path, images: in_float32(path, images))
    assert (verified().half_precision_cosine, verified().half_precision_sums) == (None, None)

    def fail(*_: Any) -> None:
        raise ValueError("no such hardware")

    monkeypatch.setattr(half_precision, "_run", fail)
    assert verified().half_precision_cosine is None


def test_values_that_half_precision_cannot_hold_are_reported(tmp_path: Path) -> None:
    image = keras.Input((2, 2, 3))
    model = keras.Model(image, keras.layers.Dense(5, use_bias=False)(keras.layers.Flatten()(image)))
    model.set_weights([1e5 * KERNEL])
    path = file(tmp_path / "large.tflite", 1e5 * KERNEL)
    images = np.random.default_rng(1).uniform(-1, 1, (6, 2, 2, 3)).astype(np.float32)
    report = export.verify(model, path, images, mode="none", half_precision=True)
    assert report.largest_value == pytest.approx(np.abs(model.predict_on_batch(images)[:2]).max(), rel=1e-5)
    assert f"tensor {report.largest_value:,.0f}: the largest of float16 is 65,504" in str(report)
    assert report.half_precision_cosine in (None, 0)


def test_the_largest_value_is_that_of_any_tensor(tmp_path: Path, linear: keras.Model) -> None:
    images = np.full((2, 2, 2, 3), 7.5, np.float32)
    path = file(tmp_path / "file.tflite", 1e-3 * KERNEL)
    assert half_precision.largest_value(path, images) == 7.5  # the image's own


def test_a_compiled_file_computes_what_the_interpreter_does(tmp_path: Path) -> None:
    path, model = tmp_path / "file.tflite", built(num_layers=1)
    export.tflite(model, path, batch=2, attention=True, input_dtype="uint8")
    pixels = np.random.default_rng(0).integers(0, 256, (3, *model.config.size, 3), np.uint8)
    run, loaded = run_compiled(path, pixels), load_exported(path)
    assert set(run.outputs) == {"logits", "attention"}
    for name, values in run.outputs.items():
        expected = np.concatenate([loaded.call(batch)[name][:count] for batch, count in loaded.batches(pixels)])
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    assert run.milliseconds > 0
    assert "XNNPACK" in run.messages


def test_a_file_that_cannot_be_compiled_says_why(tmp_path: Path) -> None:
    path = tmp_path / "bad.tflite"
    path.write_bytes(b"abcdTFL3" * 100)
    with pytest.raises(ValueError, match=r"bad.tflite cannot be run on CPU: .*Flatbuffer"):
        run_compiled(path, np.zeros((1, 2, 2, 3), np.float32))


def test_a_program_that_crashes_or_hangs_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keras_vit.export.check import compiled

    program = tmp_path / "program.py"
    monkeypatch.setattr(compiled, "__file__", str(program))
    program.write_text("import os; os.abort()")
    with pytest.raises(ValueError, match="LiteRT crashed .exit status -6"):
        run_compiled(tmp_path / "file.tflite", np.zeros((1, 2, 2, 3), np.float32), hardware=("GPU", "CPU"))
    program.write_text("raise SystemExit('F0000 00:00:1.5 17028 model.cc:218] Check failed: !IsInput(x)')")
    with pytest.raises(ValueError, match=r"GPU: Check failed: !IsInput\(x\) \(exit status 1\)"):
        run_compiled(tmp_path / "file.tflite", np.zeros((1, 2, 2, 3), np.float32), hardware=("GPU",))
    program.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(compiled, "TIMEOUT", 0.2)
    with pytest.raises(ValueError, match="did not run on GPU in 0.2 seconds"):
        run_compiled(tmp_path / "file.tflite", np.zeros((1, 2, 2, 3), np.float32), hardware=("GPU",))
