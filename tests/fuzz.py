"""Damage small valid checkpoints of every format in many ways and open them: a model or a CheckpointError.

python tests/fuzz.py --count 2000 --format all --seed 0
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import random
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import reference_cases as reference
from forgery import DEFLATED, Member, archive, deflate, npy, safetensors
from keras_vit import ViTConfig, converters
from keras_vit._util.progress import track
from keras_vit.converters.config_json import KEY
from keras_vit.converters.containers import open_container

SEEDS = {
    "google": ("vit_gap", "vit_token_linen", "vit_opt_target", "hybrid_stem_only"),
    "big_vision": ("bv_gap_bf16_scan", "bv_map", "bv_siglip_img"),
    "huggingface": ("hf_gelu_new_eps_v5", "hf_model_pooler_v4", "hf_cls_newlayout_v5"),
    "timm": ("timm_reg", "timm_noqkvbias_ls", "timm_clip_prenorm", "timm_gap_fcnorm"),
    "keras_hub": ("classifier", "gap", "no_bias"),
}
PRESETS = reference.FOLDER.parent / "keras_hub"
SLOWEST = 10.0  # seconds of CPU time for one file
LOADED = 4  # one in so many files with valid headers is loaded too
NUMBERS = (0, -1, 1, 2, 3, 7, 33, 2**31, 2**63, 10**12, 10**30, 0.5, -0.5, 1e308, 1e-308, float("nan"), float("inf"))
TEXTS = ("", "a", "gelu", "token", "x" * 5000, "\0", "\ud800")
VALUES: tuple[Any, ...] = (*NUMBERS, True, False, None, *TEXTS, [], [1], [32, 32], [[[]]], {}, {"0": "a"})
TYPES = ("float16", "float32", "float64", "int8", "int64", "uint8", "bool", "bfloat16")
FIELDS = tuple(ViTConfig.__dataclass_fields__)


@dataclass
class Forged:
    """A checkpoint to be written: bytes, or the tensors and texts that it is made of."""

    tensors: dict[str, np.ndarray]
    container: str
    configs: dict[str, Any] = field(default_factory=dict)  # by file name
    beside: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # false ones
    types: dict[str, str] = field(default_factory=dict)  # false ones
    damage: list[Callable[[bytes], bytes]] = field(default_factory=list)
    config_damage: list[Callable[[bytes], bytes]] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Write the file and those beside it, and return its path."""
        for old in folder.iterdir():
            old.unlink()
        data = {"npz": self._npz, "safetensors": self._safetensors, "h5": self._h5}[self.container]()
        path = folder / "model.safetensors"  # the name does not matter
        path.write_bytes(_damaged(data, self.damage))
        for name, config in self.configs.items():
            (folder / name).write_bytes(_damaged(json.dumps(config).encode(), self.config_damage))
        for name, data in self.beside.items():
            (folder / name).write_bytes(data)
        return path

    def _h5(self) -> bytes:
        memory = io.BytesIO()
        with h5py.File(memory, "w") as file:
            for name, array in self.tensors.items():
                file[name] = array
        return memory.getvalue()

    def _npz(self) -> bytes:
        members = []
        for number, (name, array) in enumerate(self.tensors.items()):
            data = npy(array)
            if name in self.shapes or name in self.types:
                lie = {"shape": self.shapes.get(name, array.shape), "descr": self.types.get(name, array.dtype.str)}
                data = data.replace(repr(array.shape).encode(), repr(lie["shape"]).encode(), 1)
                data = data.replace(array.dtype.str.encode(), str(lie["descr"])[:3].encode(), 1)
            packed = deflate(data) if number % 5 == 4 else data
            members.append(Member(f"{name}.npy", packed, DEFLATED if number % 5 == 4 else 0))
        comment = json.dumps(self.metadata).encode()[:0xFFFF] if self.metadata else b""
        return archive(*members)[:-2] + struct.pack("<H", len(comment)) + comment

    def _safetensors(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **self.metadata}}
        data = b""
        for name, array in self.tensors.items():
            code = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "int8": "I8"}
            told = self.types.get(name, code.get(array.dtype.name, "U8"))
            raw = array.tobytes()
            shape = list(self.shapes.get(name, array.shape))
            header[name] = {"dtype": told, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
        return safetensors(header, data)


def _damaged(data: bytes, damage: list[Callable[[bytes], bytes]]) -> bytes:
    for change in damage:
        data = change(data)
    return data


# ---- mutations: each makes a random change to a Forged


def _bytes(forged: Forged, dice: random.Random) -> None:
    places = [(dice.random() ** dice.choice((1, 4, 0.2)), dice.randrange(256)) for _ in range(dice.randint(1, 8))]

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for share, value in places:
            if changed:
                changed[min(int(share * len(changed)), len(changed) - 1)] = value
        return bytes(changed)

    (forged.config_damage if forged.configs and dice.random() < 0.4 else forged.damage).append(change)


def _cut(forged: Forged, dice: random.Random) -> None:
    start, end = sorted((dice.random(), dice.random()))
    whole = dice.random() < 0.5  # cut at the end, else in the middle

    def cut(data: bytes) -> bytes:
        first, last = int(start * len(data)), int(end * len(data))
        return data[:last] if whole else data[:first] + data[last:]

    (forged.config_damage if forged.configs and dice.random() < 0.3 else forged.damage).append(cut)


def _header_number(forged: Forged, dice: random.Random) -> None:
    """Replace one little-endian number of a header by an extreme one."""
    share, width = dice.random() ** dice.choice((0.05, 8)), dice.choice((2, 4, 8))
    value = dice.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), dice.randrange(2 ** (8 * width))))

    def change(data: bytes) -> bytes:
        at = int(share * max(len(data) - width, 0))
        return data[:at] + value.to_bytes(width, "little") + data[at + width :]

    forged.damage.append(change)


def _name(forged: Forged, dice: random.Random) -> None:
    old = dice.choice(list(forged.tensors))
    number = dice.choice(("0", "1", "7", "999999999", "1" + "0" * 30, "-1", "٣"))
    parts = [
        old + dice.choice(("x", "/kernel", ".weight", "/", ".", "\n", "é")),
        "".join(number if char.isdigit() and dice.random() < 0.5 else char for char in old),
        old.replace(dice.choice("abdeiklnorst"), dice.choice("aex_/."), 1),
        "keras_vit/" + dice.choice(("prefix/cls", "position/embedding", "block_9/norm1/gamma", "embedding/kernel")),
        dice.choice(list(forged.tensors)),
    ]
    forged.tensors[dice.choice(parts)] = forged.tensors.pop(old)


def _drop(forged: Forged, dice: random.Random) -> None:
    for name in dice.sample(list(forged.tensors), dice.randint(1, min(6, len(forged.tensors)))):
        del forged.tensors[name]


def _shape(forged: Forged, dice: random.Random) -> None:
    name = dice.choice(list(forged.tensors))
    array = np.atleast_1d(forged.tensors[name])
    forged.tensors[name] = dice.choice(
        (
            array[..., :1],
            array[None],
            array.reshape(-1),
            array[:0],
            np.zeros((0, 10**9), array.dtype),
            np.zeros((dice.choice((0, 1, 2, 1001)), *array.shape[1:])[:4] or (1,), array.dtype),
            array.T.copy(),
            np.zeros((1, 1, 1, dice.choice((4, 3000, 20_000))), array.dtype),
            array.sum(keepdims=True),
            np.array(1, array.dtype),
        )
    )


def _lie(forged: Forged, dice: random.Random) -> None:
    """Write a header with another shape or type than the data have."""
    name = dice.choice(list(forged.tensors))
    shape = list(forged.tensors[name].shape) or [1]
    shape[dice.randrange(len(shape))] = dice.choice((0, 1, 2**31, 2**63, -1, 10**30))
    forged.shapes[name] = tuple(shape)
    if dice.random() < 0.3:
        forged.types[name] = (
            dice.choice(("F16", "BF16", "I64", "F8_E4M3", "")) if forged.configs else dice.choice(TYPES)
        )


def _type(forged: Forged, dice: random.Random) -> None:
    kinds = [kind for kind in TYPES if kind != "bfloat16"]
    for name in dice.sample(list(forged.tensors), dice.randint(1, len(forged.tensors))):
        with np.errstate(all="ignore"):
            forged.tensors[name] = forged.tensors[name].astype(dice.choice(kinds))


def _numbers(forged: Forged, dice: random.Random) -> None:
    name = dice.choice(list(forged.tensors))
    if forged.tensors[name].size and forged.tensors[name].dtype.kind == "f":
        poisoned = forged.tensors[name].copy()
        poisoned.flat[dice.randrange(poisoned.size)] = dice.choice((np.nan, np.inf, -np.inf, 3e38, 0))
        forged.tensors[name] = poisoned


def _note(forged: Forged, dice: random.Random) -> None:
    fields = {dice.choice((*FIELDS, "no_such_field")): dice.choice(VALUES) for _ in range(dice.randint(1, 3))}
    if dice.random() < 0.2:
        fields |= {"resnet": {"num_layers": [dice.choice(VALUES)]}}
    text = json.dumps(fields)
    forged.metadata[KEY] = text if dice.random() < 0.8 else text[: dice.randrange(len(text) + 1)]
    if dice.random() < 0.2:
        forged.metadata[dice.choice((KEY, "keras_vit_empty_rows", "format"))] = dice.choice(
            ("true", "", "{", "9" * 999)
        )


def _json(forged: Forged, dice: random.Random) -> None:
    if not forged.configs:
        return _note(forged, dice)
    for _ in range(dice.randint(1, 3)):
        place = forged.configs[dice.choice(list(forged.configs))]
        if not place:
            break
        key = dice.choice(list(place))
        while isinstance(place[key], dict) and place[key] and dice.random() < 0.8:
            place = place[key]
            key = dice.choice(list(place))
        action = dice.random()
        if action < 0.8:
            place[key] = dice.choice(VALUES)
        elif action < 0.9:
            del place[key]
        else:
            place[dice.choice(("hidden_size", "num_heads", "reg_tokens", "", "0"))] = dice.choice(VALUES)
    return None


MUTATIONS = (_bytes, _cut, _header_number, _name, _drop, _shape, _lie, _type, _numbers, _note, _json, _json)


def valid(format: str) -> list[Forged]:
    """Return small valid checkpoints of a format."""
    found = []
    for case in SEEDS[format]:
        hub = format == "keras_hub"
        path = PRESETS / case / "model.weights.h5" if hub else reference.checkpoint(case)
        with open_container(path) as container:
            tensors = {name: container.read(name) for name in container.headers}
        seed = Forged(tensors, path.suffix[1:])
        if path.suffix != ".npz":  # an .npz has a config.json of the reference cases, not of the format
            seed.configs = {file.name: json.loads(file.read_bytes()) for file in path.parent.glob("*.json")}
        if hub:
            seed.beside = {"task.weights.h5": (path.parent / "task.weights.h5").read_bytes()}
        found.append(seed)
    return found


def forge(format: str, dice: random.Random, seeds: list[Forged]) -> Forged:
    """Return one of the valid checkpoints with one to three mutations."""
    seed = dice.choice(seeds)
    configs = json.loads(json.dumps(seed.configs))
    forged = Forged(dict(seed.tensors), seed.container, configs, dict(seed.beside))
    for mutate in dice.choices(MUTATIONS, k=dice.randint(1, 3)):
        if forged.tensors:
            mutate(forged, dice)
    if forged.beside and dice.random() < 0.2:  # damage the other file
        forged.beside = {name: _damaged(data, forged.damage) for name, data in forged.beside.items()}
        forged.damage = []
    return forged


def outcome(path: Path, *, whole: bool) -> str:
    """Open a file; return "read", "refused", or the traceback of any other error."""
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            converters.read_config(path)
            if whole:
                converters.load(path)
        result = "read"
    except converters.CheckpointError as error:
        result = "refused" if str(error).strip() else "a refusal without a word"
    except Exception:  # any other error is what the fuzzer looks for
        result = traceback.format_exc()
    seconds = time.process_time() - start
    return result if seconds < SLOWEST else f"{result}, after {seconds:.0f} s"


def fuzz(format: str, count: int, seed: int, folder: Path) -> Iterator[tuple[int, str]]:
    """Forge a number of files of a format and open them; yield the seed and outcome of each."""
    seeds = valid(format)
    numbers = itertools.count(seed)
    while count:
        number = next(numbers)
        forged = forge(format, random.Random(f"{format} {number}"), seeds)
        try:
            path = forged.write(folder)
        except (ValueError, OverflowError, struct.error, UnicodeError):  # values that no file can hold
            continue
        count -= 1
        yield number, outcome(path, whole=number % LOADED == 0)


def parse_options(description: str | None, formats: Iterable[str], count: int) -> argparse.Namespace:
    """Read --count, --format and --seed from the command line; `formats` has the chosen ones."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help=f"files of each format (default: {count})")
    parser.add_argument("--format", choices=["all", *formats], default="all")
    parser.add_argument("--seed", type=int, default=0, help="of the first file; each has its own (default: 0)")
    options = parser.parse_args()
    options.formats = list(formats) if options.format == "all" else [options.format]
    return options


def main() -> None:
    """Run the fuzzer, print the outcomes, and fail if there was an error other than CheckpointError."""
    options = parse_options(__doc__, SEEDS, 2000)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for format in options.formats:
            start, seen = time.perf_counter(), Counter[str]()
            files = fuzz(format, options.count, options.seed, Path(folder))
            for number, result in track(files, format, total=options.count):
                kind = result if result in ("read", "refused") else "failed"
                seen[kind] += 1
                if kind == "failed":
                    failures += 1
                    print(f"--format {format} --seed {number} --count 1:\n{result}")
            print(f"{format}: {dict(seen)}, {time.perf_counter() - start:.0f} s")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
