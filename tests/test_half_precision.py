"""Float files are run in half precision where the CPU can, and their largest value is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit import export
from keras_vit.export.check import half_precision
from keras_vit.export.check.compiled import run_compiled
from keras_vit.export.check.running import load_exported
from test_verify import KERNEL, file, linear
from tiny_models import built, prepared

__all__ = ["linear"]  # a fixture

HALF: dict[str, Any] = {"num_threads": 2, "xnnpack_flags": half_precision.FORCE_FP16}


def has_half_precision() -> bool | None:
    """Return whether the CPU computes in float16; None where Linux does not say it."""
    cpu = Path("/proc/cpuinfo")
    return any(flag in cpu.read_text().split() for flag in ("avx512_fp16", "asimdhp")) if cpu.is_file() else None


@pytest.mark.parametrize("mode", ["none", "float16"])
def test_a_float_file_is_run_in_half_precision(mode: str, tmp_path: Path) -> None:
    model = built()
    report = export.tflite(model, tmp_path / "file.tflite", quantize=mode, verify=prepared(model.config))
    if has_half_precision() is not None:
        assert (report.half_precision_cosine is not None) == has_half_precision()
    if report.half_precision_cosine is not None:
        # Measured .99999; rounding to 11 bits.
        assert 0.999 < report.half_precision_cosine < 1
        assert "in half precision: differences between images, cosine 0.999" in str(report)
    assert f"largest value of a tensor {report.largest_value:,.0f}" in str(report)


def test_a_quantized_file_is_not_run_in_half_precision(tmp_path: Path) -> None:
    report = export.tflite(built(), tmp_path / "file.tflite")
    assert (report.half_precision_cosine, report.largest_value) == (None, None)


def test_a_cpu_without_half_precision_says_nothing(
    tmp_path: Path, linear: keras.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_float32 = run_compiled
    monkeypatch.setattr(half_precision, "run_compiled", lambda path, images, cpu: in_float32(path, images))
    assert export.verify(linear, file(tmp_path / "file.tflite"), mode="none").half_precision_cosine is None

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such hardware")

    monkeypatch.setattr(half_precision, "run_compiled", fail)
    assert export.verify(linear, file(tmp_path / "file.tflite"), mode="none").half_precision_cosine is None


def test_values_that_half_precision_cannot_hold_are_reported(tmp_path: Path) -> None:
    image = keras.Input((2, 2, 3))
    model = keras.Model(image, keras.layers.Dense(5, use_bias=False)(keras.layers.Flatten()(image)))
    model.set_weights([1e5 * KERNEL])
    path = file(tmp_path / "large.tflite", 1e5 * KERNEL)
    images = np.random.default_rng(1).uniform(-1, 1, (6, 2, 2, 3)).astype(np.float32)
    report = export.verify(model, path, images, mode="none")
    assert report.largest_value == pytest.approx(np.abs(model.predict_on_batch(images)[:2]).max(), rel=1e-5)
    assert f"tensor {report.largest_value:,.0f}: half precision holds 65,504 at most" in str(report)
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
    with pytest.raises(ValueError, match="exit status -6"):
        run_compiled(tmp_path / "file.tflite", np.zeros((1, 2, 2, 3), np.float32), hardware=("GPU", "CPU"))
    program.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(compiled, "TIMEOUT", 0.2)
    with pytest.raises(ValueError, match="did not run on GPU in 0.2 seconds"):
        run_compiled(tmp_path / "file.tflite", np.zeros((1, 2, 2, 3), np.float32), hardware=("GPU",))
