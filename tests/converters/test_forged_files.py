"""A damaged or malicious checkpoint is one CheckpointError that names it: no code is run, and no bomb unpacked."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import safetensors.numpy

import reference_cases as reference
from keras_vit import converters
from keras_vit._util import files
from keras_vit.converters.containers import open_container
from keras_vit.converters.facts import NOTE_KEY
from keras_vit.converters.saving import write_npz
from model_weights import values
from places import DATA

KERAS = DATA / "tiny.keras"  # what model.save wrote
KERNEL = "Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel"  # of the case vit_token
ARRAY = np.arange(6, dtype="<f4").reshape(2, 3)


class Trap:
    """Make a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return Path.mkdir, (Path("sprung"),)  # type: ignore[return-value]


# ---- files of tensors


def npz(**tensors: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **tensors)  # type: ignore[arg-type]
    return file.getvalue()


def zipped(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.comment = comment
    return file.getvalue()


def replaced(data: bytes, mark: bytes, offset: int, new: bytes) -> bytes:
    """Overwrite bytes at a distance from the last occurrence of a mark."""
    at = data.rindex(mark) + offset
    return data[:at] + new + data[at + len(new) :]


def npy_member(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    return zipped({"w.npy": b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data})


def claim(shape: str) -> str:
    return f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"


def safetensors_file(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}


def hdf5(make: Callable[[h5py.File], Any]) -> bytes:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        make(file)
    return memory.getvalue()


def torch_file(pickled: bytes, folder: str = "model", **storages: bytes) -> bytes:
    return zipped({f"{folder}/data.pkl": pickled, **{f"{folder}/data/{key}": data for key, data in storages.items()}})


def torch_tensor(shape: str = "I2\n", strides: str = "I1\n", offset: int = 0, key: str = "w", length: int = 2) -> bytes:
    """Write {"w": a tensor} in the operations of a pickle that are text."""
    storage = f"(Vstorage\nctorch\nFloatStorage\nV{key}\nVcpu\nI{length}\ntQ"
    text = f"}}Vw\nctorch._utils\n_rebuild_tensor_v2\n({storage}I{offset}\n({shape}t({strides}tI00\n}}tRs."
    return text.encode("latin-1")


BOMB = zipped({"w.npy": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
NOTED = {"w.npy": npz(w=ARRAY)}
OLD_TORCH = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
TORCH = {file.stem: file.read_bytes() for file in (DATA / "torch").glob("*.pth")}
# What is wrong: (words of the error, function that makes the file).
FORGED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "nothing": ("is empty", lambda: b""),
    "noise": ("starts with the bytes 01 02 03", lambda: b"\1\2\3"),
    "a pickle": ("is a pickle, which could run code and is never read", lambda: pickle.dumps(Trap())),
    "an error page": ("is an HTML or XML page", lambda: b"<!DOCTYPE html><html><body>404</body></html>"),
    "a Git LFS pointer": ("is a Git LFS pointer", lambda: b"version https://git-lfs.github.com/spec/v1\n"),
    "a model of Keras": ("is a .keras file", KERAS.read_bytes),
    # .npz
    "pickled objects": ("'w' holds pickled objects", lambda: npz(w=np.array([Trap()], dtype=object))),
    "a script": ("'run.sh', which is no .npy", lambda: zipped({"run.sh": b""})),
    "a header that is code": ("cannot be read", lambda: npy_member("__import__('os').abort()")),
    "800 GB in a header": ("'w' claims 800000000000 bytes", lambda: npy_member(claim("(200000000000,)"))),
    "a negative shape": ("cannot be read|claims", lambda: npy_member(claim("(-2, 1)"), bytes(8))),
    "an archive cut in its comment": ("was cut short", lambda: zipped(NOTED, comment=b'{"keras_vit": ""}')[:-17]),
    "a zip bomb": (
        "claim to unpack to 4294967294; at most 268435456",
        lambda: replaced(BOMB, b"PK\1\2", 24, struct.pack("<I", 2**32 - 2)),
    ),
    "a bomb that says it is small": ("claims|Bad CRC", lambda: replaced(BOMB, b"PK\1\2", 24, struct.pack("<I", 80))),
    "an encrypted member": ("is encrypted", lambda: replaced(npz(w=ARRAY), b"PK\1\2", 8, b"\1")),
    "a flipped bit": ("Bad CRC-32 for file 'w.npy'", lambda: replaced(npz(w=ARRAY), b"PK\1\2", -4, b"\1")),
    # .safetensors
    "a header past the end": ("invalid header length", lambda: safetensors_file("{}", b"", length=99)),
    "deep JSON": ("recursion limit", lambda: safetensors_file('{"a":' * 100_000)),
    "missing bytes": ("file not fully covered", lambda: safetensors_file({"a": entry()}, bytes(7))),
    "a type that is not read": ("is 'F8_E4M3'", lambda: safetensors_file({"a": entry(dtype="F8_E4M3", shape=[8])})),
    # .pth
    "code in a .pth": (
        "more than weights and is not run: it would call 'builtins.getattr'",
        lambda: torch_file(pickle.dumps({"model": {"w": Trap()}}, 2)),
    ),
    "code in an old .pth": (
        "it would call 'builtins.getattr'",
        lambda: OLD_TORCH + pickle.dumps({"w": Trap()}, 2),
    ),
    "a .pth without tensors": ("is a PyTorch file without tensors", lambda: torch_file(pickle.dumps({"epoch": 1}, 2))),
    "an operation of old pickles": ("the operation INST", lambda: torch_file(b"(ios\nsystem\n.")),
    "an extension of pickles": ("the operation EXT1", lambda: torch_file(b"\x82\1.")),
    "a terabyte of text": ("cannot be read", lambda: torch_file(b"\x8e" + struct.pack("<Q", 2**40))),
    "a terabyte in an old .pth": ("cannot be read", lambda: OLD_TORCH + b"\x8e" + struct.pack("<Q", 2**40)),
    "a memo of 2**31": ("without tensors", lambda: torch_file(b"}r\xff\xff\xff\x7f.")),
    "tuples without end": ("without tensors", lambda: torch_file(b")" + b"\x85" * 100_000 + b".")),
    "an empty stack": ("cannot be read", lambda: torch_file(b"s.")),
    "a storage that is not there": ("claims 8 bytes, and the file holds 0", lambda: torch_file(torch_tensor())),
    "a path as a storage": (
        "claims 8 bytes, and the file holds 0",
        lambda: torch_file(torch_tensor(key="../../../etc/passwd"), w=bytes(8)),
    ),
    "a short storage": ("claims 8 bytes, and the file holds 7", lambda: torch_file(torch_tensor(), w=bytes(7))),
    "a tensor past its storage": (
        "claims 12 bytes, and the file holds 8",
        lambda: torch_file(torch_tensor(offset=1), w=bytes(8)),
    ),
    "strides past a storage": (
        "claims 40 bytes, and the file holds 8",
        lambda: torch_file(torch_tensor(strides="I9\n"), w=bytes(8)),
    ),
    "a negative stride": ("no counts", lambda: torch_file(torch_tensor(strides="I-1\n"), w=bytes(8))),
    "a shape of shapes": ("no counts", lambda: torch_file(torch_tensor(shape="(I2\nt"), w=bytes(8))),
    "a shape that doubles 60 times": (
        "no counts",
        lambda: torch_file(torch_tensor(shape="I2\n" + "q\0h\0\x86" * 60), w=bytes(8)),
    ),
    "a stride of 400 digits": ("no counts", lambda: torch_file(torch_tensor(strides=f"I{10**400}\n"), w=bytes(8))),
    "a negative offset": ("no counts", lambda: torch_file(torch_tensor(offset=-1), w=bytes(8))),
    "800 GB in a .pth": (
        "describe 800000000000 bytes",
        lambda: torch_file(torch_tensor(shape="I200000000000\n", strides="I0\n"), w=bytes(8)),
    ),
    "a flipped bit in a .pth": (
        "Bad CRC-32",
        lambda: torch_file(torch_tensor(), w=b"12345678").replace(b"12345678", b"12345679"),
    ),
    # HDF5
    "HDF5 without content": ("cannot be read", lambda: b"\x89HDF\r\n\x1a\n" + bytes(100)),
    "HDF5 cut short": ("truncated file", lambda: hdf5(lambda file: file.create_dataset("w", data=np.ones(999)))[:4000]),
    "400 TB that were never written": (
        "claim to unpack to 4\\d{14}",
        lambda: hdf5(lambda file: file.create_dataset("w", (10**14,), "f4")),
    ),
}


def read_all(path: Path) -> dict[str, np.ndarray]:
    with open_container(path) as container:
        return {name: container.read(name) for name in container.headers}


def test_a_forged_file_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "vit"
    for what, (reason, make) in FORGED.items():
        path.write_bytes(make())
        with pytest.raises(converters.CheckpointError, match=reason) as caught:
            read_all(path)
        assert str(caught.value).startswith(f"{path}: "), what
        assert str(caught.value).isprintable() and len(str(caught.value)) < 700, what
        assert [file.name for file in tmp_path.iterdir()] == ["vit"], what  # the trap is not sprung
    with pytest.raises(converters.CheckpointError, match="is a folder"):
        open_container(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        open_container(tmp_path / "absent.npz")


WHOLE = {
    "npz": npz(a=ARRAY, b=np.ones(99)),
    "safetensors": safetensors.numpy.save({"a": ARRAY, "b": np.ones(99)}, {"format": "pt"}),
    "h5": hdf5(lambda file: file.create_dataset("layers/a/vars/0", data=np.ones(999))),
    "keras": KERAS.read_bytes(),
    "pth": TORCH["views"],
    "old.pth": TORCH["old"],
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_file_cut_short_anywhere_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"vit.{kind}"
    for length in np.linspace(0, len(WHOLE[kind]) - 1, 20, dtype=int):
        path.write_bytes(WHOLE[kind][:length])
        with pytest.raises(converters.CheckpointError, match=f"vit.{kind}"):
            converters.load(path) if kind == "keras" else read_all(path)


READ_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from keras_vit.converters.containers import open_container
from keras_vit.errors import CheckpointError

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        with open_container(path) as container:
            for name in container.headers:
                container.read(name)
    except CheckpointError as error:
        assert not isinstance(error.__cause__, MemoryError), error
    else:
        raise AssertionError(path + " was read")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_no_forged_file_takes_64_mib(tmp_path: Path) -> None:
    for what, (_, make) in FORGED.items():
        (tmp_path / what.replace(" ", "_")).write_bytes(make())
    command = [sys.executable, "-c", READ_IN_LITTLE_MEMORY, *map(str, sorted(tmp_path.iterdir()))]
    environment = {**os.environ, "PYTHONPATH": str(files.PACKAGE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


# ---- checkpoints


def refuse(path: Path, reason: str) -> None:
    """Check that a checkpoint is refused soon, in one error that names it."""
    start = time.process_time()  # CPU time, which does not depend on other processes
    with pytest.raises(converters.CheckpointError, match=reason) as caught:
        converters.load(path)
    assert time.process_time() - start < 5
    assert str(path.parent) in str(caught.value)
    assert len(str(caught.value)) < 2500


def google(folder: Path, change: Callable[[dict[str, np.ndarray]], Any], **metadata: str) -> Path:
    """Write a checkpoint of Google's format with changed tensors."""
    tensors = reference.arrays(reference.checkpoint("vit_token"))
    change(tensors)
    return write_npz(folder / "file.npz", tensors, metadata=metadata)


def _poison(tensors: dict[str, np.ndarray]) -> None:
    tensors[KERNEL] = tensors[KERNEL].copy()
    tensors[KERNEL].flat[7] = np.nan


def _widen(tensors: dict[str, np.ndarray]) -> None:
    tensors["embedding/kernel"] = np.zeros((1, 1, 1, 100_000), np.float32)
    tensors[KERNEL.replace("_1", "_0", 1)] = np.zeros((1, 100_000), np.float32)


TENSORS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    # words of the error: what is done to the tensors
    f"{KERNEL} holds values that are not finite; allow_nonfinite=True reads them": _poison,
    "no tensor for block_1/mlp/dense1/kernel": lambda tensors: tensors.pop(KERNEL),
    "stray is left over": lambda tensors: tensors.update(stray=ARRAY),
    f"{KERNEL} has shape": lambda tensors: tensors.update({KERNEL: tensors[KERNEL][:, :-1]}),
    f"{KERNEL} has type int32": lambda tensors: tensors.update({KERNEL: tensors[KERNEL].astype("i4")}),
    "describes a model of at least|does not describe": _widen,
}


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    for reason, change in TENSORS.items():
        refuse(google(tmp_path, change), reason)
    weights = values(converters.load(google(tmp_path, _poison), allow_nonfinite=True))
    assert sum(np.count_nonzero(~np.isfinite(array)) for array in weights.values()) == 1


def test_a_damaged_note_in_the_comment_is_refused(tmp_path: Path) -> None:
    for note, reason in {
        "": "JSON",
        "[" * 50_000: "JSON",
        '{"no_such_field": 1}': "no_such_field",
        '{"num_layers": 1000000000}': "describe",
        '{"image_size": [100000, 100000]}': "describe|patches",
    }.items():
        refuse(google(tmp_path, lambda _: None, **{NOTE_KEY: note}), reason)


def described(folder: Path, config: str | bytes) -> Path:
    """Write a checkpoint of Hugging Face with another config.json."""
    shutil.copy(reference.checkpoint("hf_cls_v5"), folder / "model.safetensors")
    (folder / "config.json").write_bytes(config.encode() if isinstance(config, str) else config)
    return folder / "model.safetensors"


def with_field(**field: Any) -> str:
    config = json.loads((reference.checkpoint("hf_cls_v5").parent / "config.json").read_bytes())
    return json.dumps(config | field)


CONFIGS: dict[str | bytes, str] = {
    # config.json: words of the error
    "[]": "a list, not an object",
    '{"a":' * 100_000 + "1" + "}" * 100_000: "not valid JSON",
    '{"a": ' + "[" * 40 + "]" * 40 + "}": "nested more than 32",
    '{"a": "' + "x" * 11_000_000 + '"}': "has 11,000,009 bytes",
    with_field(hidden_size=64): "config.json that says hidden_size 64 where the tensors have 32",
    with_field(num_attention_heads=10**12): "num_heads",
    with_field(image_size=10**12): "17 positions, but its config.json says image_size 1000000000000",
    with_field(hidden_act="__import__('os')"): "hidden_act",
    with_field(id2label={"0": "cat \ud800", **{str(i): "dog" for i in range(1, 7)}}): "valid Unicode",
}


def test_a_config_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for config, reason in CONFIGS.items():
        refuse(described(tmp_path, config), reason)
    described(tmp_path, with_field())
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": ' + "[" * 900 + "]" * 900 + "}")
    refuse(tmp_path / "model.safetensors", "preprocessor_config.json is not valid JSON: it is nested more than 32")


# ---- .keras


def keras_file(
    path: Path,
    *,
    config: bytes | None = None,
    model: Mapping[str, Any] | None = None,
    weights: Callable[[h5py.File], Any] | bytes | None = None,
    extra: Mapping[str, bytes] | None = None,
    **outer: Any,
) -> Path:
    """Write a copy of the good file with another config.json, fields of its ViTConfig, weights, members or keys."""
    with zipfile.ZipFile(KERAS) as good:
        members = {name: good.read(name) for name in good.namelist()}
    stored = json.loads(members["config.json"]) | outer
    stored["config"]["config"] |= model or {}
    members["config.json"] = json.dumps(stored).encode() if config is None else config
    if callable(weights):
        memory = io.BytesIO(members["model.weights.h5"])
        with h5py.File(memory, "a") as file:
            weights(file)
        weights = memory.getvalue()
    members["model.weights.h5"] = members["model.weights.h5"] if weights is None else weights
    path.write_bytes(zipped({**members, **(extra or {})}))
    return path


def _reshape(file: h5py.File) -> None:
    del file["layers/prefix_tokens/vars/0"]
    file["layers/prefix_tokens/vars/0"] = np.zeros((1, 1, 7), np.float32)


def _nan(file: h5py.File) -> None:
    file["layers/prefix_tokens/vars/0"][0, 0, 3] = np.nan


KERAS_FILES: list[tuple[str, dict[str, Any]]] = [
    # words of the error, and arguments of keras_file
    ("has a member '../../etc/cron.d/evil'", {"extra": {"../../etc/cron.d/evil": b"x"}}),
    ("has a config.json that is not valid JSON", {"config": b"[" * 1_000_000}),
    ("config.json of 20,000,009 bytes; the limit", {"config": b'{"a": "' + b"x" * 20_000_000 + b'"}'}),
    ("not a VisionTransformer's", {"config": b'{"registered_name": "keras_vit>VisionTransformer"}'}),
    ("Received: 'eval'", {"registered_name": "builtins>eval", "class_name": "eval"}),
    ("describes", {"model": {"hidden_size": 100_000}}),
    ("describes", {"model": {"image_size": [10**6, 10**6], "position": "none"}}),
    ("does not describe", {"model": {"no_such_field": 1}}),
    ("cannot be read", {"weights": b"\x89HDF\r\n\x1a\n"}),
    ("its weights do not fit the model", {"weights": lambda file: file.pop("layers/encoder_block/mlp")}),
    ("its weights do not fit the model", {"weights": _reshape}),
    ("are not finite; allow_nonfinite=True reads them", {"weights": _nan}),
]


def test_a_forged_keras_file_is_refused(tmp_path: Path) -> None:
    for reason, changes in KERAS_FILES:
        refuse(keras_file(tmp_path / "vit.keras", **changes), reason)
    data = zipped({"config.json": b"{}", "model.weights.h5": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    (tmp_path / "vit.keras").write_bytes(replaced(data, b"PK\1\2", 24, struct.pack("<I", 2**32 - 2)))
    refuse(tmp_path / "vit.keras", "claim to unpack to 42949")


def test_no_code_and_no_class_of_a_keras_file_is_used(tmp_path: Path) -> None:
    image = keras.Input((4,))
    keras.Model(image, keras.layers.Lambda(lambda x: x + 1)(image)).save(tmp_path / "lambda.keras")
    refuse(tmp_path / "lambda.keras", "does not contain a VisionTransformer. Received: 'Functional'")
    with zipfile.ZipFile(tmp_path / "lambda.keras") as file:
        code = json.loads(file.read("config.json"))["config"]["layers"][1]
    with zipfile.ZipFile(KERAS) as file:
        stored = json.loads(file.read("config.json"))
    stored["config"]["dtype"] = code  # where Keras would deserialise it
    refuse(
        keras_file(tmp_path / "inside.keras", config=json.dumps(stored).encode()),
        "does not describe a valid model|not a VisionTransformer's",
    )
    # The registered name decides: a module and a class of other names are never imported.
    path = keras_file(tmp_path / "elsewhere.keras", module="os", **{"class_name": "system"})
    assert converters.load(path).config == converters.load(KERAS).config


# ---- random damage


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Change, insert, remove or cut bytes, more often near the start and the end."""
    for _ in range(dice.randint(1, 4)):
        at = int(dice.random() ** dice.choice((1, 6, 0.1)) * (len(data) - 1))
        number = dice.choice((0, 1, 2**31, 2**40, 2**64 - 1)).to_bytes(8, "little")
        new, lost = dice.choice([(dice.randbytes(1), 1), (number, 8), (dice.randbytes(9), 0), (b"", 9)])
        data = data[:at] + new + data[at + lost :]
    return data[: dice.randrange(len(data))] if dice.random() < 0.1 else data


@pytest.mark.full
@pytest.mark.parametrize("case", ["vit_token", "bv_gap_bf16_scan", "hf_cls_v5", "timm_token"])
def test_random_damage_is_read_or_refused(case: str, tmp_path: Path) -> None:
    good = reference.checkpoint(case)
    files = {file.name: file.read_bytes() for file in good.parent.glob("*.json")} | {good.name: good.read_bytes()}
    outcomes = Counter[str]()
    for seed in range(300):
        dice = random.Random(seed)
        name = dice.choice(list(files)) if seed % 3 == 0 else good.name
        for other, content in files.items():
            (tmp_path / other).write_bytes(damaged(content, dice) if other == name else content)
        try:
            with warnings.catch_warnings(action="ignore"):
                (converters.load if seed % 8 == 0 else converters.read_config)(tmp_path / good.name)
        except converters.CheckpointError as error:
            outcomes["refused"] += 1
            assert 0 < len(str(error)) < 2500
        else:
            outcomes["read"] += 1
    assert min(outcomes["read"], outcomes["refused"]) > 10
