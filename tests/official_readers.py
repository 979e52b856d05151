"""Compare the containers with the official readers of their formats on damaged files: NumPy, safetensors, h5py.

python tests/official_readers.py --count 10000 --format all --seed 0
"""

from __future__ import annotations

import io
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import safetensors.numpy

from forgery import DEFLATED, Member, archive, deflate, npy
from fuzz import parse_options
from keras_vit._util.progress import track
from keras_vit.converters.containers import CheckpointError, open_container

Tensors = dict[str, np.ndarray]
TENSORS: Tensors = {
    "layers/a/kernel": np.arange(6, dtype="<f4").reshape(2, 3),
    "layers/a/bias": np.arange(4, dtype="<f8"),
    "layers/b": np.arange(5, dtype="<i2"),
    "step": np.array(7),
}


def _npz() -> bytes:
    packed = [(name, npy(array)) for name, array in TENSORS.items()]
    return archive(
        *(Member(f"{n}.npy", deflate(d) if i % 2 else d, DEFLATED if i % 2 else 0) for i, (n, d) in enumerate(packed))
    )


def _hdf5() -> bytes:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        for name, array in TENSORS.items():
            file[name] = array
        file["layers"].attrs["name"] = "vit"
    return memory.getvalue()


def _read_npz(path: Path) -> Tensors:
    with np.load(path) as file:
        return dict(file)


def _read_hdf5(path: Path) -> Tensors:
    found: Tensors = {}

    def visit(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


FORMATS: dict[str, tuple[bytes, Callable[[Path], Tensors]]] = {
    "npz": (_npz(), _read_npz),
    "safetensors": (safetensors.numpy.save(TENSORS, {"format": "pt"}), safetensors.numpy.load_file),
    "hdf5": (_hdf5(), _read_hdf5),
}


def _ours(path: Path) -> Tensors:
    with open_container(path) as container:
        return {name: container.read(name) for name in container.headers}


# Values for the header of a .safetensors file, each in place of one number or text.
_NUMBERS = (
    *(b"-0", b"0", b"-1", b"1e0", b"1.0", b"00", b"01", b"true", b"null", b"[]", b"NaN"),
    *(b"0,18446744073709551615", b"0,18446744073709551616", b"9999999999,9999999999,0", b"0,9999999999,9999999999"),
)
_TEXTS = (
    b'"\\ud800"',
    b'"F8_E4M3"',
    b'"F4"',
    b'"C64"',
    b'"I4"',
    b'"f32"',
    b'"BF16"',
    b'""',
    b'"a"',
    b'"shape"',
    b"{}",
    b"7",
)


def edited(good: bytes, dice: random.Random) -> bytes:
    """Change one to three numbers or texts in the header of a .safetensors file."""
    length = int.from_bytes(good[:8], "little")
    header, data = good[8 : 8 + length], good[8 + length :]
    for _ in range(dice.randint(1, 3)):
        found = list(re.finditer(rb'"[^"]*"|\d+', header))
        place = dice.choice(found)
        header = header[: place.start()] + dice.choice(_TEXTS + _NUMBERS) + header[place.end() :]
    return len(header).to_bytes(8, "little") + header + data


def damaged(good: bytes, dice: random.Random) -> bytes:
    """Change one to three bytes or little-endian numbers of a file, mostly those that are not zero."""
    data = bytearray(good)
    busy = [at for at, byte in enumerate(good) if byte]
    for _ in range(dice.randint(1, 3)):
        at = dice.choice(busy) if dice.random() < 0.8 else dice.randrange(len(data))
        kind = dice.random()
        if kind < 0.4:
            data[at] ^= 1 << dice.randrange(8)
        elif kind < 0.7:
            data[at] = dice.randrange(256)
        elif kind < 0.8:
            data[at] = dice.choice(b'0123456789[]{},:" tfn-.eE\\')
        else:
            other = dice.randrange(len(data))
            data[at : at + 4] = data[other : other + 4]
    return bytes(data[: len(good)])


def difference(format: str, path: Path) -> str | None:
    """Return how the container is more tolerant than the official reader of a file; None if it is not."""
    try:
        ours = _ours(path)
    except CheckpointError:
        return None
    try:
        official = FORMATS[format][1](path)
    except BaseException as error:  # safetensors raises Rust's panics
        return f"refused by the official reader: {type(error).__name__}: {error}"
    if ours.keys() != official.keys():
        return f"has {sorted(ours.keys() ^ official.keys())} in one reader only"
    for name, array in ours.items():
        theirs = official[name]
        if theirs.dtype in ("V2", ml_dtypes.bfloat16):
            theirs = theirs.view(ml_dtypes.bfloat16).astype(np.float32)
        if array.shape != theirs.shape or array.astype(theirs.dtype).tobytes() != theirs.tobytes():
            return f"has other values in {name}: {array!r} and {theirs!r}"
    return None


def differences(format: str, count: int, seed: int, folder: Path) -> Iterator[tuple[int, str | None]]:
    """Damage a file many times; yield each seed and the difference between the readers."""
    path = folder / "file"
    for number in range(seed, seed + count):
        change = edited if format == "safetensors" and number % 2 else damaged
        path.write_bytes(change(FORMATS[format][0], random.Random(f"{format} {number}")))
        yield number, difference(format, path)


def main() -> None:
    """Run the comparison, print the differences, and fail if there are any."""
    options = parse_options(__doc__, FORMATS, 10_000)
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        for format in options.formats:
            seen = Counter[str]()
            for number, text in track(
                differences(format, options.count, options.seed, Path(folder)), format, total=options.count
            ):
                if text is not None:
                    found += 1
                    seen[text.partition(" (")[0][:110]] += 1
                    if seen[text.partition(" (")[0][:110]] <= 3:
                        print(f"--format {format} --seed {number} --count 1: {text[:300]}")
            print(f"{format}: {sum(seen.values())} of {options.count}")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
