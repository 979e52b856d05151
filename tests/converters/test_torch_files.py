"""PyTorch's files are read without PyTorch, to the same numbers; what stands beside their tensors is not needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit.converters import torch_files
from keras_vit.converters.containers import open_container
from keras_vit.errors import CheckpointError
from places import DATA
from reference_cases import arrays

FOLDER = DATA / "torch"  # written by make_torch.py beside it
EXPECTED = arrays(FOLDER / "expected.npz")
NAMES = sorted({name.partition("/")[0] for name in EXPECTED})


def read_all(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a file, by their names in the dict that has them."""
    with open_container(path) as file:
        return {name.rpartition("/")[2]: file.read(name) for name in file.headers}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_that_pytorch_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    wanted = {key.partition("/")[2]: array for key, array in EXPECTED.items() if key.partition("/")[0] == name}
    read = read_all(FOLDER / f"{name}.pth")
    assert read.keys() == wanted.keys() and len(read) > 4
    for key, array in wanted.items():  # after the file is closed
        assert (read[key].dtype, read[key].shape) == (array.dtype, array.shape)
        assert np.array_equal(read[key], array)
        assert read[key].flags.writeable and read[key].dtype.isnative
    if "tied" in read:
        assert not np.shares_memory(read["tied"], read["whole"])


def test_the_types_of_tensors_are_those_of_the_file() -> None:
    with open_container(FOLDER / "types.pth") as file:
        assert [f"torch.{header.dtype}" for header in file.headers.values()] == list(file.headers)


def test_a_tensor_that_is_not_read_is_named_by_its_type_and_the_others_are_read() -> None:
    types = {
        "eight bits": "float8_e4m3fn",
        "complex": "complex64",
        "sparse": "torch._utils._rebuild_sparse_tensor",
    }
    with open_container(FOLDER / "unread.pth") as file:
        assert np.array_equal(file.read("weight"), np.ones(2, np.float32))
        for name, kind in types.items():
            with pytest.raises(CheckpointError, match=rf"tensor '{name}' is '{kind}'. Types read: float64, float32"):
                file.read(name)


def test_what_a_pickle_may_take_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("MAX_OPERATIONS", "more than 300 operations"), ("MAX_PICKLE_BYTES", "at most 300 are read")):
        with monkeypatch.context() as context:
            context.setattr(torch_files, name, 300)
            with pytest.raises(CheckpointError, match=limit):
                open_container(FOLDER / "views.pth")


def test_what_would_be_run_is_named_with_the_lines_that_save_the_tensors(tmp_path: Path) -> None:
    data = (FOLDER / "old.pth").read_bytes()
    (tmp_path / "other.pth").write_bytes(data.replace(b"cdatetime\ndatetime\n", b"csubprocess\nPopen\n"))
    with pytest.raises(CheckpointError) as caught:
        open_container(tmp_path / "other.pth")
    assert str(caught.value) == (
        f"{tmp_path / 'other.pth'}: is a PyTorch file that holds more than weights and is not run: it would call "
        "'subprocess.Popen'. Save its tensors alone where it was written: checkpoint = torch.load(path, "
        'weights_only=False); torch.save(dict(checkpoint["state_dict"]), "weights.pth"), with the key that it has for '
        "them."
    )


def test_tensors_of_one_storage_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read_bytes = torch_files.TorchFile._read_bytes

    def counted(self: Any, key: str) -> np.ndarray:
        reads.append(key)
        return read_bytes(self, key)

    monkeypatch.setattr(torch_files.TorchFile, "_read_bytes", counted)
    with open_container(FOLDER / "views.pth") as file:
        for name in ("transposed", "steps", "one row", "first rows"):
            file.read(name)
    assert len(reads) == 1


@pytest.mark.torch
@pytest.mark.parametrize("is_zip", [True, False])
def test_random_parts_of_storages_are_those_that_pytorch_reads(tmp_path: Path, *, is_zip: bool) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    rng = np.random.default_rng(0)
    types = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    storages = [torch.randint(-9, 9, (200,)).to(types[number % len(types)]) for number in range(12)]
    tensors = {}
    for number in range(200):
        shape, strides = rng.integers(0, 5, (2, rng.integers(0, 4))).tolist()
        storage = storages[number % len(storages)]
        tensors[str(number)] = torch.as_strided(storage, shape, strides, int(rng.integers(0, 100)))
    for number in range(12):
        tensors[f"whole {number}"] = storages[number]
        tensors[f"more {number}"] = torch.randn(20, 10)  # so that the others describe at most twice the file
    torch.save(tensors, tmp_path / "all.pth", _use_new_zipfile_serialization=is_zip)
    read = read_all(tmp_path / "all.pth")
    for name, tensor in torch.load(tmp_path / "all.pth", weights_only=True).items():
        wanted = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        assert (read[name].dtype, read[name].shape) == (wanted.dtype, wanted.shape)
        assert np.array_equal(read[name], wanted)
