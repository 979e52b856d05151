"""Files of NumPy, safetensors and h5py are read bit by bit, cut and damaged ones refused; writing is all or nothing."""

import argparse
import errno
import os
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from keras_vit import converters
from keras_vit.converters.containers import CheckpointError, Header, open_container
from keras_vit.converters.saving import write_npz, write_safetensors
from model_weights import assert_same_bits, values
from places import DATA
from tiny_models import built

BFLOAT16_CASE = DATA / "reference" / "bv_gap_bf16_scan" / "checkpoint.npz"

NUMBERS = np.array([0.0, -0.0, 1.5, -2.25, 3e38, 1e-40, np.inf, np.nan])  # 1e-40 is subnormal in float32
SMALL = np.array([0, 1, 2, 99])
TYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
Tensors = dict[str, np.ndarray]
TENSORS: Tensors = {
    **{f"types/{code}": SMALL.astype(code) for code in TYPES},
    "numbers": NUMBERS,
    "odd/size": NUMBERS.astype("f4")[:7],
    "scalar": np.array(7, "i8"),
    "empty": np.zeros((0, 3), "f4"),
    "cube": np.arange(24, dtype="f4").reshape(2, 3, 4),
    "größe": NUMBERS,
}
BRAIN = {"brain": NUMBERS.astype(ml_dtypes.bfloat16), "scalar": np.array(1.5, ml_dtypes.bfloat16)}


def write_h5py(path: Path, tensors: Tensors) -> None:
    with h5py.File(path, "w") as file:
        for name, array in tensors.items():
            file[name] = array.view("V2") if array.dtype.name == "bfloat16" else array  # as Keras does


WRITERS: dict[str, Callable[[Path, Tensors], object]] = {
    "numpy.savez": lambda path, tensors: np.savez(path, **tensors),  # type: ignore[arg-type]
    "numpy.savez_compressed": lambda path, tensors: np.savez_compressed(path, **tensors),  # type: ignore[arg-type]
    "safetensors": lambda path, tensors: safetensors.numpy.save_file(tensors, path),
    "h5py": write_h5py,
    "write_npz": write_npz,
    "write_safetensors": lambda path, tensors: write_safetensors(path, tensors, metadata={}),
}
OURS = ["write_npz", "write_safetensors"]


def read_all(path: Path) -> Tensors:
    with open_container(path) as container:
        return {name: container.read(name) for name in container.headers}


def read_by_numpy(path: Path) -> Tensors:
    with np.load(path) as file:
        return dict(file)


@pytest.mark.parametrize("writer", WRITERS)
def test_every_type_and_shape_is_read_bit_for_bit(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "vit.npz"
    WRITERS[writer](path, TENSORS)
    assert_same_bits(read_all(path), TENSORS)
    with open_container(path) as container:  # headers are read without the tensors
        assert container.path == path
        for name, array in TENSORS.items():
            assert container.headers[name] == Header(name, array.shape, array.dtype.name)
            assert container.headers[name].bytes == array.nbytes


def test_what_we_write_is_read_by_the_formats_own_library(tmp_path: Path) -> None:
    write_npz(tmp_path / "vit.npz", TENSORS)
    assert_same_bits(read_by_numpy(tmp_path / "vit.npz"), TENSORS)
    write_safetensors(tmp_path / "vit.safetensors", TENSORS, metadata={})
    assert_same_bits(safetensors.numpy.load_file(tmp_path / "vit.safetensors"), TENSORS)


@pytest.mark.parametrize("writer", ["safetensors", "h5py", *OURS])
def test_bfloat16_comes_back_as_the_float32_of_the_same_value(writer: str, tmp_path: Path) -> None:
    WRITERS[writer](tmp_path / "vit", BRAIN)
    with open_container(tmp_path / "vit") as container:
        assert {header.dtype for header in container.headers.values()} == {"bfloat16"}
        assert container.headers["brain"].bytes == 2 * len(NUMBERS)
    expected = {name: array.astype(np.float32) for name, array in BRAIN.items()}
    assert_same_bits(read_all(tmp_path / "vit"), expected)


def test_bfloat16_is_written_and_read_as_numpy_and_big_vision_have_it(tmp_path: Path) -> None:
    write_npz(tmp_path / "vit.npz", BRAIN)
    found = read_by_numpy(tmp_path / "vit.npz")["brain"]
    assert found.dtype.str == "|V2"
    assert found.tobytes() == BRAIN["brain"].tobytes()
    expected = {
        name: array.view(ml_dtypes.bfloat16).astype(np.float32) if array.dtype.kind == "V" else array
        for name, array in read_by_numpy(BFLOAT16_CASE).items()
    }
    assert_same_bits(read_all(BFLOAT16_CASE), expected)


@pytest.mark.parametrize("writer", ["numpy.savez", "numpy.savez_compressed", "h5py", *OURS])
def test_any_layout_of_an_array_is_written_and_read_as_the_same_numbers(writer: str, tmp_path: Path) -> None:
    plain = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    layouts = {
        "big-endian": plain.astype(">f4"),
        "Fortran": np.asfortranarray(plain),
        "both": np.asfortranarray(plain.astype(">f4")),
        "strided": np.repeat(plain, 2, axis=1)[:, ::2],
    }
    WRITERS[writer](tmp_path / "vit.npz", layouts)
    for name, found in read_all(tmp_path / "vit.npz").items():
        assert found.dtype == np.dtype("f4").newbyteorder("="), name
        np.testing.assert_array_equal(found, plain, err_msg=name)


def test_an_archive_written_to_a_stream_has_its_sizes_after_the_data_and_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:  # small enough for a pipe's buffer
        np.savez(pipe, **TENSORS)  # type: ignore[arg-type]
    with os.fdopen(reading, "rb") as pipe:
        (tmp_path / "vit").write_bytes(pipe.read())
    assert_same_bits(read_all(tmp_path / "vit"), TENSORS)


def test_tensors_outlive_their_container_and_may_be_written_to(tmp_path: Path) -> None:
    write_npz(tmp_path / "vit", TENSORS)
    with open_container(tmp_path / "vit") as container:
        cube = container.read("cube")
    (tmp_path / "vit").write_bytes(b"")
    cube += 1
    np.testing.assert_array_equal(cube, TENSORS["cube"] + 1)
    with pytest.raises(CheckpointError, match="closed"):
        container.read("cube")


def test_one_damaged_tensor_does_not_stop_the_others_from_being_read(tmp_path: Path) -> None:
    write_npz(tmp_path / "vit", {"damaged": np.repeat(NUMBERS, 1000), "good": NUMBERS})
    content = bytearray((tmp_path / "vit").read_bytes())
    content[30_000] ^= 1
    (tmp_path / "vit").write_bytes(content)
    with open_container(tmp_path / "vit") as container:
        with pytest.raises(CheckpointError, match="Bad CRC-32 for file 'damaged.npy'.*download it again"):
            container.read("damaged")
        assert container.read("good").tobytes() == NUMBERS.tobytes()
        with pytest.raises(CheckpointError, match="has no tensor 'absent' among its 2"):
            container.read("absent")


def test_metadata_of_safetensors_are_read_and_an_npz_has_none(tmp_path: Path) -> None:
    write_npz(tmp_path / "npz", TENSORS)
    safetensors.numpy.save_file(TENSORS, tmp_path / "safetensors", {"format": "pt", "größe": '"1"'})
    with open_container(tmp_path / "npz") as container:
        assert container.metadata == {}
    with open_container(tmp_path / "safetensors") as container:
        assert container.metadata == {"format": "pt", "größe": '"1"'}


def test_the_same_tensors_make_the_same_bytes_at_any_time(tmp_path: Path) -> None:
    for writer in OURS:
        WRITERS[writer](tmp_path / "first", TENSORS)
        WRITERS[writer](tmp_path / "second", {name: array.copy() for name, array in TENSORS.items()})
        assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    with zipfile.ZipFile(write_npz(tmp_path / "vit", TENSORS)) as file:
        assert {info.date_time for info in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_an_npz_is_written_with_one_tensor_in_memory(tmp_path: Path) -> None:
    def pairs() -> Iterator[tuple[str, np.ndarray]]:
        last = None
        for number in range(5):
            assert last is None or last() is None
            array = np.full(9, number)
            last = weakref.ref(array)
            yield f"w{number}", array
            del array

    write_npz(tmp_path / "vit", pairs())
    assert [array[0] for array in read_all(tmp_path / "vit").values()] == [0, 1, 2, 3, 4]


def failing(error: BaseException) -> Iterator[tuple[str, np.ndarray]]:
    yield "w", NUMBERS
    raise error


@pytest.mark.parametrize("writer", OURS)
def test_a_writer_that_fails_or_a_full_disk_leaves_the_old_file_and_nothing_else(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "vit").write_bytes(b"old")
    for error in (RuntimeError("no more"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            WRITERS[writer](tmp_path / "vit", failing(error))  # type: ignore[arg-type]
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"vit": b"old"}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        WRITERS[writer](tmp_path / "vit", TENSORS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"vit": b"old"}


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    for writer in OURS:
        WRITERS[writer](tmp_path / "vit", TENSORS)
        assert (tmp_path / "vit").stat().st_mode == (tmp_path / "plain").stat().st_mode, writer


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    for writer, pairs, reason in (
        ("write_npz", [("w", NUMBERS), ("w", NUMBERS)], "Two tensors are named 'w'"),
        ("write_npz", [("w", np.array([None]))], "'w' is object"),
        ("write_safetensors", [("w", NUMBERS), ("w", NUMBERS)], "Two tensors are named 'w'"),
        ("write_safetensors", [("__metadata__", NUMBERS)], "under the name '__metadata__'"),
        ("write_safetensors", [("w", np.array(["a"]))], "'w' is <U1"),
    ):
        with pytest.raises(ValueError, match=reason):
            WRITERS[writer](tmp_path / "vit", pairs)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# ---- PyTorch's files (test_torch_files.py has more of them)

ERF: dict[str, Any] = {"activation": "gelu_erf"}
FACTS = {"num_heads": 4, "position_prefix": True}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.torch
@pytest.mark.parametrize(("outside", "inside"), [(None, ""), ("model", "module."), ("state_dict", ""), ("teacher", "")])
def test_weights_are_found_where_training_programs_keep_them(
    tmp_path: Path, torch: Any, outside: str | None, inside: str
) -> None:
    path = converters.save(built(**ERF), tmp_path / "timm" / "model", format="timm")
    with open_container(path) as file:
        state = {inside + name: torch.from_numpy(file.read(name)) for name in file.headers}
    whole = {outside: state, "epoch": 3, "args": argparse.Namespace(lr=0.1)} if outside else state
    torch.save(whole, tmp_path / "model.pth")
    assert converters.detect(tmp_path / "model.pth") == "timm"
    assert_same_bits(values(converters.load(tmp_path / "model.pth", config=FACTS)), values(built(**ERF)))


@pytest.mark.torch
def test_a_folder_of_hugging_face_may_hold_a_pytorch_file(tmp_path: Path, torch: Any) -> None:
    model = built(**ERF, norm_epsilon=1e-12)
    path = converters.save(model, tmp_path / "model", format="huggingface")
    with open_container(path) as file:
        state = {name: torch.from_numpy(file.read(name)) for name in file.headers}
    torch.save(state, path.with_name("pytorch_model.bin"))
    path.unlink()
    assert_same_bits(values(converters.load(path.parent)), values(model))
