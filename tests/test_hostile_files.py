"""Any file is read or refused with a CheckpointError, and needs no more memory than its size."""

import contextlib
import os
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgery import DEFLATED, Member, archive, bomb, deflate, entry, npy, npz, safetensors
from hostile_files import HOSTILE_NPZ, HOSTILE_SAFETENSORS, OTHER_KINDS
from keras_vit.converters.containers import CheckpointError, open_container
from keras_vit.converters.containers.base import reading
from little_memory import assert_all_refused

TENSORS = {
    "a/kernel": np.arange(6, dtype="<f4").reshape(2, 3),
    "b": np.arange(4, dtype=">f8"),
    "t": np.array(7),
}
LISTS = {name: array.tolist() for name, array in TENSORS.items()}
GOOD = {
    "npz": npz(TENSORS),
    "deflated npz": archive(*(Member(f"{n}.npy", deflate(npy(a)), DEFLATED) for n, a in TENSORS.items())),
    "safetensors": safetensors(
        {"__metadata__": {"format": "pt"}, "a": entry(), "b": entry(8, 12, dtype="BF16")}, bytes(range(12))
    ),
}


def read_all(path: Path) -> dict[str, np.ndarray]:
    with open_container(path) as container:
        return {name: container.read(name) for name in container.headers}


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


REFUSED = [
    pytest.param(build, reason, id=f"{kind}: {what}")
    for kind, table in (("kind", OTHER_KINDS), ("npz", HOSTILE_NPZ), ("safetensors", HOSTILE_SAFETENSORS))
    for what, (reason, build) in table.items()
]


@pytest.mark.parametrize(("build", "reason"), REFUSED)
def test_a_hostile_file_is_refused_with_a_sentence_that_names_it_and_says_why(
    build: Callable[[], bytes], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "vit.npz"  # the name does not matter
    path.write_bytes(build())
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_all(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message) < 700
    assert message.isprintable()


@pytest.mark.parametrize("error", [KeyError("w"), MemoryError(), zipfile.BadZipFile("bad")], ids=repr)
def test_whatever_a_parser_raises_becomes_our_error(error: Exception) -> None:
    with (
        pytest.raises(CheckpointError, match=r"vit\.npz: cannot be read .*download it again") as caught,
        reading(Path("vit.npz")),
    ):
        raise error
    assert caught.value.__cause__ is error


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    for data in (pickle.dumps(Trap()), npz({"w": np.array([Trap()], dtype=object)})):
        path = tmp_path / "vit.npz"
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="never read"):
            read_all(path)
    assert not (tmp_path / "sprung").exists()


def test_a_folder_and_a_pipe_are_refused_and_a_missing_file_is_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is a folder"):
        open_container(tmp_path)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        open_container(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        open_container(tmp_path / "absent.npz")


@pytest.mark.parametrize("kind", GOOD)
def test_a_file_cut_short_anywhere_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "vit"
    for length in range(len(GOOD[kind])):
        path.write_bytes(GOOD[kind][:length])
        with pytest.raises(CheckpointError):
            read_all(path)


@pytest.mark.parametrize("kind", GOOD)
def test_a_file_cut_short_after_it_was_opened_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "vit"
    large = np.random.default_rng(0).random(9999)
    data = {
        "npz": npz({"w": large}),
        "deflated npz": archive(Member("w.npy", deflate(npy(large)), DEFLATED)),
        "safetensors": safetensors({"w": entry(0, 8 * 9999, dtype="F64", shape=[9999])}, large.tobytes()),
    }
    path.write_bytes(data[kind])
    with open_container(path) as container:
        os.truncate(path, 30_000)
        with pytest.raises(CheckpointError, match=r"cut short|EOF|failed to fill"):
            container.read("w")


@pytest.mark.parametrize("kind", ["npz", "deflated npz"])
def test_a_flipped_bit_is_refused_or_changes_no_tensor(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "vit"
    refused = 0
    for at in range(len(GOOD[kind])):  # dates and versions are not read and may differ
        path.write_bytes(flipped(GOOD[kind], at, bit=at % 8))
        try:
            found = read_all(path)
        except CheckpointError:
            refused += 1
        else:
            assert {name: array.tolist() for name, array in found.items()} == LISTS
    assert refused > 0.7 * len(GOOD[kind])  # all data and names; the rest is fields that are not read


@pytest.mark.parametrize("kind", GOOD)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_mutation_of_a_file_brings_out_another_error(kind: str, data: st.DataObject) -> None:
    forged = bytearray(GOOD[kind])
    places = st.integers(0, len(forged) - 1) | st.integers(0, 99)
    for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)):
        forged[at] = byte
    end = data.draw(st.just(len(forged)) | st.integers(0, len(forged)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vit"
        path.write_bytes(forged[:end] + data.draw(st.binary(max_size=4)))
        with contextlib.suppress(CheckpointError):
            read_all(path)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_claims_and_bombs_are_refused_in_64_mib_of_memory(tmp_path: Path) -> None:
    files = {
        "claim": HOSTILE_NPZ["800 GB in a .npy header"][1](),
        "directory": HOSTILE_NPZ["4 GB in a zip directory"][1](),
        "liar": HOSTILE_NPZ["a bomb that says it is small"][1](),
        "bomb": bomb(2048),
        "stored": HOSTILE_NPZ["a stored member larger than the file"][1](),
        "crowd": HOSTILE_NPZ["a directory of 1 TB"][1](),
        "header": HOSTILE_SAFETENSORS["a header of 2^60 bytes"][1](),
        "shape": HOSTILE_SAFETENSORS["a shape whose product overflows"][1](),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert_all_refused(tmp_path / name for name in files)
