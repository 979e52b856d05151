"""False files and their errors: {description: (pattern of the error, function that makes the file)}."""

import io
import pickle
import struct
import tarfile
from collections.abc import Callable

import numpy as np

from forgery import (
    DEFLATED,
    Member,
    archive,
    bomb,
    claim,
    deflate,
    entry,
    npy,
    npy_header,
    npz,
    safetensors,
)

ARRAY = npy(np.arange(6, dtype="<f4").reshape(2, 3))


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as out:
        out.addfile(tarfile.TarInfo("weights"))
    return file.getvalue()


def of(data: bytes, **told: object) -> Callable[[], bytes]:
    """Return a maker of an archive with one member "w" and the given false statements."""
    return lambda: archive(Member(**{"name": "w.npy", "packed": data, **told}))  # type: ignore[arg-type]


def patched(at: int, value: bytes) -> Callable[[], bytes]:
    """Return a maker of members "v" and "w", with bytes of the second's header overwritten."""
    start = len(archive(Member("v.npy", ARRAY)).partition(b"PK\1\2")[0]) + at
    data = archive(Member("v.npy", ARRAY), Member("w.npy", ARRAY))
    return lambda: data[:start] + value + data[start + len(value) :]


def zip64(members: int, directory_bytes: int) -> bytes:
    """Make an archive whose 64-bit record claims these numbers of members and directory bytes."""
    body = archive(Member("w.npy", ARRAY))[:-22]
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, members, members, directory_bytes, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(body), 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return body + record + locator + end


def tensors(header: object, data: bytes = bytes(8)) -> Callable[[], bytes]:
    return lambda: safetensors(header, data)


Table = dict[str, tuple[str, Callable[[], bytes]]]

OTHER_KINDS: Table = {
    "nothing": ("is empty", lambda: b""),
    "a pickle": ("is a pickle", lambda: pickle.dumps({"w": [1.0]})),
    "HDF5": ("is an HDF5 file", lambda: b"\x89HDF\r\n\x1a\n" + bytes(100)),
    "a tar archive": ("is a tar archive", tar),
    "an error page": ("is an HTML or XML page", lambda: b"<!DOCTYPE html><html><body>404</body></html>"),
    "a Git LFS pointer": ("is a Git LFS pointer", lambda: b"version https://git-lfs.github.com/spec/v1\n"),
    "one array": ("is a single .npy array", lambda: ARRAY),
    "a config": ("is a JSON file", lambda: b'{"hidden_size": 768}'),
    "PyTorch": ("is a PyTorch file", lambda: archive(Member("archive/data.pkl", pickle.dumps(0)))),
    "Keras": (
        "is a .keras file",
        lambda: archive(Member("a.json", b"{}"), Member("model.weights.h5", b"")),
    ),
    "noise": ("starts with the bytes 01 02 03", lambda: b"\1\2\3"),
}

MORE = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}"
HOSTILE_NPZ: Table = {
    # claims of size
    "800 GB in a .npy header": ("claims 800000000000 bytes", of(claim(shape="(200000000000,)"))),
    "4 GB in a zip directory": (
        "claim to unpack to 4294967294",
        of(deflate(ARRAY), method=DEFLATED, size=2**32 - 2),
    ),
    "a bomb of 300 MiB": ("claim to unpack to 3145\\d{5};", lambda: bomb(300)),
    "a bomb that says it is small": ("Bad CRC", lambda: bomb(300, told=6)),
    "a shape whose product overflows": ("claims 73\\d+ bytes", of(claim(shape="(4294967296, 4294967297)"))),
    "a shape that is too large": ("claims 12 bytes", of(claim(shape="(3,)") + bytes(8))),
    "a negative shape": ("impossible shape", of(claim(shape="(-2, -1)") + bytes(8))),
    "a fractional shape": ("shape is not valid", of(claim(shape="(2.0,)") + bytes(8))),
    "a true shape": ("cannot be read", of(claim(shape="(True, 2)") + bytes(8))),
    "99 axes": ("cannot be read", of(claim(shape=str((0,) * 99)))),
    "a million members": ("cannot be read", lambda: zip64(10**6, 46)),
    "a directory with a rest": ("runs past the end", lambda: zip64(3, 50 + 1)),
    "a directory of 1 TB": ("Bad offset", lambda: zip64(1, 2**40)),
    "a directory of 17 MiB": (
        "names its members in 17825792 bytes; at most 16777216",
        lambda: b"PK\3\4" + bytes(17 << 20) + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 17 << 20, 4, 0),
    ),
    "a directory without its record": ("cannot be read", lambda: zip64(1, 46).replace(b"PK\6\6", b"XXXX")),
    "a comment that is not there": ("cut short", lambda: archive(Member("w.npy", ARRAY))[:-1] + b"\1"),
    # types
    "pickled objects": ("holds pickled objects", lambda: npz({"w": np.array([print, {}], dtype=object)})),
    "texts": ("is '<U3'. Types read", lambda: npz({"w": np.array(["abc"])})),
    "records": ("is .*<f4.*. Types read", lambda: npz({"w": np.zeros(2, [("x", "<f4")])})),
    "complex numbers": ("is 'complex64'. Types read", lambda: npz({"w": np.zeros(2, "<c8")})),
    # names
    "a name twice": ("two members 'w.npy'", lambda: archive(Member("w.npy", ARRAY), Member("w.npy", ARRAY))),
    "an absolute name": ("'/etc/w.npy', which is a path", of(ARRAY, name="/etc/w.npy")),
    "a name with ..": ("'a/../../w.npy', which is a path", of(ARRAY, name="a/../../w.npy")),
    "a Windows name": ("which is a path", of(ARRAY, name="a\\w.npy")),
    "a name that clears the screen": ("which is a path", of(ARRAY, name="\x1b[2Jw.npy")),
    "a name with a zero in it": ("which is a path", of(ARRAY, name="w.npy\0.npy")),
    "a script": (
        "'run.sh', which is not a .npy",
        lambda: archive(Member("w.npy", ARRAY), Member("run.sh", b"")),
    ),
    # false statements about members
    "an encrypted member": ("is encrypted", of(ARRAY, flags=1)),
    "an unknown compression": ("compressed by method 12", of(ARRAY, method=12)),
    "a stored member of two sizes": ("is stored, yet has two sizes", of(ARRAY, packed_size=len(ARRAY) - 1)),
    "a member that is another": (
        "File name in directory",
        lambda: archive(Member("w.npy", ARRAY), Member("v.npy", ARRAY, offset=0)),
    ),
    "a member that is the directory": (
        "Bad CRC-32",
        of(ARRAY, packed_size=len(ARRAY) + 9, size=len(ARRAY) + 9),
    ),
    "a stored member larger than the file": (
        "'w.npy' runs past the end of the file",
        of(claim(shape="(50000000,)"), size=200_000_074, packed_size=200_000_074),
    ),
    "a member beyond the file": ("runs past the end of the file", of(ARRAY, offset=10**6)),
    "a member that does not start there": ("Bad magic number", patched(0, b"XX")),
    "a strongly encrypted member": ("strong encryption", of(ARRAY, flags=0x40)),
    "a patch": ("compressed patched data", of(ARRAY, flags=0x20)),
    "two names for a member": ("File name in directory", patched(30, b"v")),
    # damage and .npy headers
    "a wrong checksum": ("Bad CRC-32", of(ARRAY, checksum=1)),
    "a wrong checksum, compressed": (
        "Bad CRC",
        of(deflate(ARRAY), method=DEFLATED, size=len(ARRAY), checksum=1),
    ),
    "no compressed data": ("cannot be read", of(b"\xff" * 99, method=DEFLATED, size=128, checksum=0)),
    "too few compressed data": (
        "Bad CRC|cut short",
        of(deflate(ARRAY[:-9]), method=DEFLATED, size=len(ARRAY)),
    ),
    "no .npy": ("is not a .npy array", of(b"no array at all")),
    "a .npy of version 7": ("version \\(7, 0\\), which is not read", of(b"\x93NUMPY\7\0" + ARRAY[8:])),
    "a header that says more": ("does not contain the correct keys", of(npy_header(MORE) + bytes(8))),
    "a long header": ("expected 20000 bytes", of(npy_header(" " * 20_000))),
    "a header of 4 GB": ("expected 4000000000 bytes", of(b"\x93NUMPY\2\0" + struct.pack("<I", 4 * 10**9))),
    "an incomplete header": ("does not contain the correct keys", of(npy_header("{'descr': '<f4', 'shape': (2,)}"))),
    "a header that is code": ("cannot be read", of(npy_header("__import__('os').abort()"))),
    "a header too deep for Python": ("cannot be read", of(npy_header("-" * 9990 + "1"))),
    "a header of open brackets": ("cannot be read", of(npy_header("(" * 9990))),
    "a number too long for Python": ("cannot be read", of(claim(shape=f"({'9' * 5000},)"))),
}

HOSTILE_SAFETENSORS: Table = {
    "a header of 2^60 bytes": (f"claims a header of {2**60} bytes", lambda: safetensors({}, length=2**60)),
    "a header of 17 MiB": ("the limit is 16777216", tensors("{}" + " " * (17 << 20), bytes(17 << 20))),
    "a header longer than the tensors": ("the limit is 1048576", tensors('{"a":' + "[]," * (350 << 10))),
    "a header past the end": ("claims a header of 3 bytes in", lambda: safetensors("{}", length=3)),
    "a name twice": ("missing field", tensors('{"a":{},"a":{}}')),
    "a field twice": ("duplicate field", tensors('{"a":{"dtype":"F32","dtype":"F16"}}')),
    "half a character": ("invalid JSON", tensors('{"\\ud800": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}')),
    "a size of -0": ("expected usize", tensors('{"a":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}')),
    "a type that does not exist": ("unknown variant", tensors({"a": entry(dtype="F33")})),
    "a length that is not the type's": ("invalid shape", tensors({"a": entry(dtype="F4")})),
    "a size over 64 bits": ("expected usize", tensors({"a": entry(0, 0, shape=[0, 2**64])}, b"")),
    "a product over 64 bits": ("overflow computing", tensors({"a": entry(0, 0, shape=[2**40, 2**40, 0])}, b"")),
    "deep JSON": ("recursion limit", tensors('{"a":' * 100_000)),
    "a number too long for Python": ("number out of range", tensors('{"a":' + "9" * 5000 + "}")),
    "half a header": ("EOF while parsing", tensors('{"a":')),
    "a header that is no UTF-8": ("invalid UTF-8", lambda: struct.pack("<Q", 4) + b'{"\xff"'),
    "metadata that are numbers": (
        "expected a string",
        tensors({"__metadata__": {"format": 1}, "a": entry()}),
    ),
    "metadata that are a list": ("expected a map", tensors({"__metadata__": [], "a": entry()})),
    "no offsets": ("missing field", tensors({"a": {"dtype": "F32", "shape": [2]}})),
    "negative offsets": ("expected usize", tensors({"a": entry(-8, 0)})),
    "offsets the wrong way round": ("invalid offset", tensors({"a": entry(8, 0)})),
    "fractional offsets": ("expected usize", tensors({"a": entry(0.0, 8.0)})),
    "a false offset": ("expected usize", tensors({"a": entry(False, 8)})),
    "a type that clears the screen": ("unknown variant", tensors({"a": entry(dtype="F32\x1b[2J")})),
    "a type that is not read": (
        "is 'F8_E4M3'. Types read",
        tensors({"a": entry(dtype="F8_E4M3", shape=[8])}),
    ),
    "a negative shape": ("expected usize", tensors({"a": entry(shape=[-2])})),
    "a true shape": ("expected usize", tensors({"a": entry(shape=[True, 2])})),
    "a shape that is too large": ("invalid shape", tensors({"a": entry(shape=[3])})),
    "a shape whose product overflows": ("overflow computing", tensors({"a": entry(shape=[2**63] * 3)})),
    "99 axes": ("cannot be read", tensors({"a": entry(0, 0, shape=[0] * 99)}, b"")),
    "an overlap": (
        "invalid offset for tensor `b`",
        tensors({"a": entry(), "b": entry(4, 12)}, bytes(12)),
    ),
    "a hole": ("invalid offset for tensor `b`", tensors({"a": entry(), "b": entry(12, 20)}, bytes(20))),
    "a hole in front": ("invalid offset for tensor `a`", tensors({"a": entry(4, 12)}, bytes(12))),
    "trailing bytes": ("file not fully covered", tensors({"a": entry()}, bytes(9))),
    "missing bytes": ("file not fully covered", tensors({"a": entry()}, bytes(7))),
}
