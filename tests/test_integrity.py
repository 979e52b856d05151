"""Integrity checks of files, and the damage that they find."""

import io
from pathlib import Path

import numpy as np
import pytest

from hostile_server import GOOD, npz, safetensors_file, sha256
from keras_vit._util.download import integrity


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
@pytest.mark.parametrize(("suffix", "data"), [(".npz", GOOD), (".safetensors", safetensors_file(5000))])
def test_files_that_check_themselves(tmp_path: Path, suffix: str, data: bytes, damage: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data)
    assert integrity.verify(path, integrity.Expected()) == sha256(data)
    flipped = bytearray(data)
    flipped[len(data) // 2 if suffix == ".npz" else 9] ^= 0xFF  # a safetensors file has a check of its header only
    path.write_bytes({"truncated": data[:-1], "flipped": bytes(flipped), "empty": b""}[damage])
    with pytest.raises(integrity.CorruptFileError):
        integrity.verify(path, integrity.Expected())


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_random_damage_is_refused_or_harmless(tmp_path: Path, suffix: str) -> None:
    data = npz(count=8) if suffix == ".npz" else safetensors_file()
    random, path = np.random.default_rng(0), tmp_path / f"x{suffix}"
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[random.integers(len(data))] ^= 1 << random.integers(8)
        path.write_bytes(damaged)
        try:
            integrity.verify(path, integrity.Expected())
        except integrity.CorruptFileError:
            refused += 1
        else:
            if suffix == ".npz":  # what NumPy reads from it is unchanged
                with np.load(path) as after, np.load(io.BytesIO(data)) as before:
                    assert all(np.array_equal(after[name], before[name]) for name in set(before) & set(after))
    assert refused > 30
