"""The runtime reads what the writer of LiteRT files writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit.export.litert import builder as building
from keras_vit.export.litert.builder import ALIGNMENT, Builder, schema
from keras_vit.export.litert.operators import FLOAT16, FLOAT32, INT8, Operators
from litert_graph import interpreter

RANDOM = np.random.default_rng(0)
KERNEL, BIAS = RANDOM.normal(size=(5, 24)), RANDOM.normal(size=5)


def file_of(folder: Path, *, outside: bool = False, **changes: Any) -> Path:
    """Write a file with one dense layer from "image" to "logits"."""
    builder = Builder(description="one dense layer")
    ops = Operators(builder, changes.get("storage", FLOAT32))
    image = builder.input("image", (changes.get("batch", 1), 24))
    builder.signature({"image": image}, {"logits": ops.dense(image, KERNEL, BIAS, "dense")})
    builder.metadata("NOTE", b"by hand")
    path = folder / "dense.tflite"
    with pytest.MonkeyPatch.context() as patch:
        if outside:
            patch.setattr(building, "MAX_FLATBUFFER_BYTES", 0)
        builder.write(path)
    return path


def computed(path: Path, x: np.ndarray) -> np.ndarray:
    graph = interpreter.Interpreter(str(path), num_threads=1)
    [image] = graph.get_input_details()
    graph.resize_tensor_input(image["index"], x.shape)
    graph.allocate_tensors()
    return graph.get_signature_runner()(image=x)["logits"]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("storage", "bound"), [(FLOAT32, 1e-6), (FLOAT16, 1e-3), (INT8, 0.05)])
def test_the_runtime_reads_what_was_written(tmp_path: Path, storage: Any, bound: float, outside: bool) -> None:
    x = RANDOM.normal(size=(1, 24)).astype(np.float32)
    made = computed(file_of(tmp_path, storage=storage, outside=outside), x)
    np.testing.assert_allclose(made, x @ KERNEL.T + BIAS, atol=bound * 10)  # values up to 10, of the type's rounding


def test_an_open_side_takes_any_number(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(7, 24)).astype(np.float32)
    np.testing.assert_allclose(computed(file_of(tmp_path, batch=None), x), x @ KERNEL.T + BIAS, atol=1e-5)


@pytest.mark.parametrize("outside", [False, True])
def test_weights_are_aligned_and_where_the_file_says(tmp_path: Path, outside: bool) -> None:
    content = file_of(tmp_path, outside=outside).read_bytes()
    model = schema().Model.GetRootAs(content)
    held = [model.Buffers(number) for number in range(model.BuffersLength())]
    assert content[4:8] == b"TFL3"
    assert held[0].DataIsNone()
    assert held[0].Offset() == 0  # buffer 0 is the empty one
    found = {}
    for number, buffer in enumerate(held[1:], start=1):
        if outside:
            assert buffer.DataIsNone()
            place, size = buffer.Offset(), buffer.Size()
        else:
            place = content.index(bytes(buffer.DataAsNumpy()))
            size = buffer.DataLength()
        assert place % ALIGNMENT == 0
        found[number] = content[place : place + size]
    assert KERNEL.astype(np.float32).tobytes() in found.values()
    assert found[model.Metadata(0).Buffer()] == b"by hand"
    assert model.Metadata(0).Name() == b"NOTE"


def test_the_signature_names_inputs_and_outputs(tmp_path: Path) -> None:
    graph = interpreter.Interpreter(str(file_of(tmp_path)))
    assert graph.get_signature_list() == {"serving_default": {"inputs": ["image"], "outputs": ["logits"]}}


def test_a_file_needs_a_signature(tmp_path: Path) -> None:
    builder = Builder()
    builder.input("image", (1, 2))
    with pytest.raises(ValueError, match="needs a signature"):
        builder.write(tmp_path / "model.tflite")
    assert not list(tmp_path.iterdir())


def test_small_constants_are_kept_once() -> None:
    builder = Builder()
    first = builder.constant(np.array([1, 2], np.int32), "a")
    assert builder.constant(np.array([1, 2], np.int32), "b") is first
    assert builder.constant(np.array([[1, 2]], np.int32), "c") is not first
    assert builder.constant(np.array([1, 2], np.int64), "d") is not first
    assert builder.constant(np.zeros(99, np.float32), "e") is not builder.constant(np.zeros(99, np.float32), "f")


def test_an_array_in_another_order_is_written_in_rows(tmp_path: Path) -> None:
    builder = Builder()
    table = RANDOM.normal(size=(6, 4)).astype(np.float32)
    image = builder.input("image", (4, 6))
    turned = builder.constant(table.T, "table")
    builder.signature({"image": image}, {"logits": Operators(builder).add(image, turned, "sum")})
    builder.write(tmp_path / "sum.tflite")
    np.testing.assert_array_equal(computed(tmp_path / "sum.tflite", np.zeros((4, 6), np.float32)), table.T)


def test_a_missing_runtime_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(ImportError, match=r'pip install "keras-vit-zoo\[litert\]"'):
        schema()


@pytest.mark.parametrize("open_batch", [False, True])
def test_slices_pads_and_sums_are_those_of_numpy(tmp_path: Path, open_batch: bool) -> None:
    builder = Builder()
    ops = Operators(builder)
    image = builder.input("image", (None if open_batch else 2, 6, 4))
    x = ops.pad(image, (0, 1, 0), "padded")
    x = ops.slice(x, 1, 1, 6, "taken")
    first, second = (ops.slice(x, 2, start, start + 2, f"half_{start}") for start in (0, 2))
    x = ops.matmul(first, second, "product", transpose_b=True)
    x = ops.sum(ops.subtract(x, ops.mean(x, [-1], "mean", keepdims=True), "less"), [1], "columns", keepdims=False)
    builder.signature({"image": image}, {"logits": ops.reshape(x, (image.shape[0], 5, 1), "last")})
    builder.write(tmp_path / "parts.tflite")
    given = RANDOM.normal(size=(2, 6, 4)).astype(np.float32)
    taken = given[:, :5]
    want = taken[..., :2] @ taken[..., 2:].transpose(0, 2, 1)
    want = (want - want.mean(axis=-1, keepdims=True)).sum(axis=1)[..., None]
    np.testing.assert_allclose(computed(tmp_path / "parts.tflite", given), want, atol=1e-6)  # of float32
