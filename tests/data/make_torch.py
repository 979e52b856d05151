"""Writes tests/data/torch: files of PyTorch 2.13 of every kind, and what PyTorch reads in them.

python tests/data/make_torch.py
"""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent / "torch"
SIGNED = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool)
OLD: dict[str, Any] = {"_use_new_zipfile_serialization": False}


def types() -> dict[str, Any]:
    """One tensor of each type."""
    numbers = torch.tensor([0, 1, 2, 99])
    return {str(dtype): (numbers if dtype in UNSIGNED else -numbers).to(dtype) for dtype in SIGNED + UNSIGNED}


def views() -> dict[str, Any]:
    """Tensors that are parts of a storage in many ways."""
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    noted = torch.arange(3.0)
    noted.note = "an attribute"  # type: ignore[attr-defined]
    return {
        "whole": wide,
        "tied": wide,
        "transposed": wide.T,
        "steps": wide[1:3, ::2],
        "one row": wide[3],
        "first rows": wide[:2],
        "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "overlapping": torch.arange(10.0).unfold(0, 4, 2),
        "expanded": torch.arange(3.0).expand(2, 3),
        "channels last": torch.arange(12.0).reshape(1, 3, 2, 2).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.arange(4.0)),
        "noted": noted,
        "part of bfloat16": torch.arange(8).bfloat16()[3:6],
    }


def beside(weights: dict[str, Any]) -> dict[str, Any]:
    """Put weights beside what training programs save with them."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    return {
        "state_dict": collections.OrderedDict(weights),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, output=Path("run")),
        "best": np.float64(0.7),
        "curve": np.arange(5),
        "time": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc),  # noqa: UP017
        "optimizer": optimizer.state_dict(),
        "counts": collections.Counter("aab"),
        "lists": collections.defaultdict(list, {"a": [1]}),
        "values": (None, True, 1j, 2**200, {1, 2}, frozenset([1]), b"x" * 300, torch.Size([1]), torch.device("cpu")),
        "dtype": torch.float16,
    }


class Net(torch.nn.Module):
    """Layers in layers, a buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
        self.scale = torch.nn.Parameter(torch.ones(2).half())
        self.register_buffer("mean", torch.arange(2.0))
        self.register_buffer("cache", torch.arange(2.0), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Compute something."""
        return self.blocks(values) * self.scale + self.mean


def rewritten(source: bytes, *, compress: bool = False, sizes: dict[str, int] | None = None) -> bytes:
    """Copy an archive compressed, or with the bytes of numbers of these sizes in the order of a big-endian machine."""
    memory = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as old, zipfile.ZipFile(memory, "w") as new:
        for info in old.infolist():
            if info.filename.endswith(".debug_pkl"):  # of TorchScript, with paths
                continue
            data, key = old.read(info), info.filename.rpartition("/")[2]
            if sizes and "/data/" in info.filename:
                data = np.frombuffer(data, f"u{sizes[key]}").byteswap().tobytes()
            if sizes and key == "byteorder":
                data = b"big"
            new.writestr(info.filename, data, zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED)
    return memory.getvalue()


def main() -> None:
    """Writes all files and the numbers in them."""
    torch.manual_seed(0)
    net = Net()
    expected: dict[str, np.ndarray] = {}
    new = ("torch.uint16", "torch.uint32", "torch.uint64")  # the old format has no such storages
    old_types = {name: tensor for name, tensor in types().items() if name not in new}
    contents: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {  # what is saved, its tensors, options
        "types": (types(), types(), {}),
        "views": (views(), views(), {}),
        "beside": (beside(views()), views(), {}),
        "beside_protocol_4": (beside(views()), views(), {"pickle_protocol": 4}),
        "old": (beside(views()), views(), OLD),
        "old_types": (old_types, old_types, OLD),
        "model": (net, net.state_dict(), {}),
        "old_model": ({"model": net, "epoch": 1}, net.state_dict(), OLD),
    }
    # The old format keeps the source code of classes, with its path.
    torch.serialization.get_source_lines_and_file = lambda *_: ([""], 0, "net.py")  # type: ignore[attr-defined]
    for name, (content, tensors, options) in contents.items():
        torch.save(content, FOLDER / f"{name}.pth", **options)
        read = torch.load(FOLDER / f"{name}.pth", weights_only=False)
        read = read.get("state_dict", read.get("model", read)) if isinstance(read, dict) else read
        read = read.state_dict() if isinstance(read, Net) else read
        assert list(read) == list(tensors)
        expected |= {f"{name}/{key}": numbers(value) for key, value in read.items()}
    memory = io.BytesIO()
    torch.jit.save(torch.jit.script(net), memory)
    (FOLDER / "script.pth").write_bytes(rewritten(memory.getvalue()))
    script = torch.jit.load(FOLDER / "script.pth").state_dict()
    expected |= {f"script/{key}": numbers(value) for key, value in script.items()}
    whole = (FOLDER / "views.pth").read_bytes()
    (FOLDER / "compressed.pth").write_bytes(rewritten(whole, compress=True))
    expected |= {f"compressed/{key}": numbers(value) for key, value in torch.load(FOLDER / "compressed.pth").items()}
    with zipfile.ZipFile(FOLDER / "views.pth") as archive:
        keys = [name.rpartition("/")[2] for name in archive.namelist() if "/data/" in name]
    sizes = {key: 2 if key == keys[-1] else 4 for key in keys}  # only the last is bfloat16
    (FOLDER / "big_endian.pth").write_bytes(rewritten(whole, sizes=sizes))
    expected |= {f"big_endian/{key}": numbers(value) for key, value in torch.load(FOLDER / "big_endian.pth").items()}
    unread = {"eight bits": torch.ones(2).to(torch.float8_e4m3fn), "complex": torch.ones(2, dtype=torch.complex64)}
    torch.save({**unread, "sparse": torch.eye(2).to_sparse(), "weight": torch.ones(2)}, FOLDER / "unread.pth")
    np.savez_compressed(FOLDER / "expected.npz", **expected)  # type: ignore[arg-type]


def numbers(tensor: Any) -> np.ndarray:
    """Convert a tensor; NumPy has no bfloat16."""
    tensor = tensor.detach()
    array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


if __name__ == "__main__":
    main()
