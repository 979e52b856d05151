"""HDF5 files that Keras wrote are read as h5py reads them; hostile ones are refused."""

from __future__ import annotations

import contextlib
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_vit.converters.containers import CheckpointError, open_container
from little_memory import assert_all_refused

TYPES = ["<f8", "<f4", "<f2", ">f4", "<i8", "<i4", ">i2", "i1", "<u8", "<u4", "<u2", "u1"]


def made(path: Path, make: Callable[[h5py.File], Any], **options: Any) -> Path:
    with h5py.File(path, "w", **options) as file:
        make(file)
    return path


def read_all(path: Path) -> dict[str, np.ndarray]:
    with open_container(path) as container:
        return {name: container.read(name) for name in container.headers}


def test_arrays_of_every_type_are_read_as_h5py_reads_them(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        f"a/b{i}": np.arange(24).reshape(2, 3, 4).astype(dtype) for i, dtype in enumerate(TYPES)
    }
    arrays |= {"scalar": np.array(7.0), "empty": np.zeros((0, 3), np.float32)}
    arrays |= {f"many/of/them/{i}": np.full(i, i, np.float32) for i in range(200)}  # more than one node of names
    received = read_all(
        made(tmp_path / "w.h5", lambda file: [file.create_dataset(k, data=v) for k, v in arrays.items()])
    )
    assert received.keys() == arrays.keys()
    for name, array in arrays.items():
        assert received[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(received[name], array)


def test_bfloat16_is_read_as_keras_writes_it(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC040], np.uint16)  # 1.0 and -3.0
    path = made(tmp_path / "w.h5", lambda file: file.create_dataset("w", data=bits.view("V2")))
    assert read_all(path)["w"].tolist() == [1.0, -3.0]


def _hard_link(file: h5py.File) -> None:
    file["w"] = np.zeros(3)
    file["v"] = file["w"]


def _loop(file: h5py.File) -> None:
    group = file.create_group("a/b")
    group["c"] = file["a"]


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "w", (4,))
    file.create_virtual_dataset("w", layout)


HOSTILE: dict[str, tuple[str, Callable[[h5py.File], Any]]] = {
    "a soft link": ("link", lambda file: file.__setitem__("w", h5py.SoftLink("/v"))),
    "a soft link to itself": ("link", lambda file: file.__setitem__("w", h5py.SoftLink("/w"))),
    "a link to another file": (
        "links? of the newer kind",
        lambda file: file.__setitem__("w", h5py.ExternalLink("v.h5", "/v")),
    ),
    "two names for one array": ("two objects at byte", _hard_link),
    "a group in itself": ("two objects at byte", _loop),
    "data in another file": (
        "keeps its data in another file",
        lambda file: file.create_dataset("w", (4,), "f4", external=[("/etc/passwd", 0, 16)]),
    ),
    "data in other arrays": ("is not contiguous", _virtual),
    "chunks": ("is not contiguous", lambda file: file.create_dataset("w", data=np.zeros(9), chunks=(3,))),
    "a bomb": (
        "packed by a filter",
        lambda file: file.create_dataset("w", data=np.zeros(1 << 23), compression="gzip", chunks=(1 << 20,)),
    ),
    "400 TB that were never written": ("points to byte", lambda file: file.create_dataset("w", (10**14,), "f4")),
    "texts": ("is 'HDF5 type 9'. Types read", lambda file: file.create_dataset("w", data=["a", "b"])),
    "records": ("is 'HDF5 type 6'. Types read", lambda file: file.create_dataset("w", data=np.zeros(2, "i4,f4"))),
    "truths": ("is 'HDF5 type 8'. Types read", lambda file: file.create_dataset("w", data=np.zeros(2, bool))),
    "references": (
        "is 'HDF5 type 7'. Types read",
        lambda file: file.create_dataset("w", data=[file.ref], dtype=h5py.ref_dtype),
    ),
    "a type without an array": ("neither a group nor an array", lambda file: file.__setitem__("w", np.dtype("f4"))),
    "a group a thousand deep": ("a path of \\d+ characters", lambda file: file.create_group("/".join("a" * 1000))),
    "no value at all": ("version 2", lambda file: file.create_dataset("w", data=h5py.Empty("f4"))),
}


@pytest.mark.parametrize(("reason", "make"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_keras_does_not_write_is_refused_and_says_why(
    reason: str, make: Callable[[h5py.File], Any], tmp_path: Path
) -> None:
    path = made(tmp_path / "w.h5", make)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_all(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "download it again" not in message  # our own check refuses it, not a parser's error
    assert len(message) < 700
    assert message.isprintable()


def test_the_newer_layout_of_hdf5_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "w.h5", lambda file: file.create_dataset("w", data=np.zeros(3)), libver="latest")
    with pytest.raises(CheckpointError, match="of a kind that Keras does not write"):
        read_all(path)


GOOD = (Path(__file__).parent / "data" / "keras_hub" / "classifier" / "task.weights.h5").read_bytes()


def forged(mark: bytes, offset: int, value: int) -> bytes:
    """Overwrite eight bytes of a file at a distance from the first occurrence of a mark."""
    at = GOOD.index(mark) + offset
    return GOOD[:at] + struct.pack("<Q", value) + GOOD[at + 8 :]


FORGED = {
    "a heap of 1 TB": ("names its tensors in more than", forged(b"HEAP", 8, 1 << 40)),
    "a heap beyond the end": ("points to byte", forged(b"HEAP", 24, 1 << 40)),
    "a heap that is the file's start": ("two objects at byte 0", forged(b"HEAP", 24, 0)),
    "a tree that is its own child": ("two objects at byte|damaged table", forged(b"TREE", 32, GOOD.index(b"TREE"))),
    "an end beyond the end": ("was cut short", forged(b"\x89HDF", 40, 1 << 50)),
    "a root beyond the end": ("points to byte", forged(b"\x89HDF", 64, 1 << 50)),
}


@pytest.mark.parametrize(("reason", "data"), FORGED.values(), ids=FORGED.keys())
def test_a_pointer_that_lies_is_refused(reason: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=reason):
        read_all(path)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    for length in [*range(0, len(GOOD), 101), len(GOOD) - 1]:
        path.write_bytes(GOOD[:length])
        with pytest.raises(CheckpointError):
            read_all(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_mutation_brings_out_another_error(data: st.DataObject) -> None:
    mutated = bytearray(GOOD)
    busy = [at for at, byte in enumerate(GOOD) if byte]
    places = st.sampled_from(busy) | st.integers(0, len(GOOD) - 1)
    for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)):
        mutated[at] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.h5"
        path.write_bytes(mutated)
        with contextlib.suppress(CheckpointError):
            read_all(path)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_claims_and_bombs_are_refused_in_64_mib_of_memory(tmp_path: Path) -> None:
    paths = []
    for what in ("a bomb", "400 TB that were never written", "a group a thousand deep", "a group in itself"):
        paths.append(made(tmp_path / f"{what}.h5", HOSTILE[what][1]))
    for what, (_, data) in FORGED.items():
        paths.append(tmp_path / f"{what}.h5")
        paths[-1].write_bytes(data)
    assert_all_refused(paths)
