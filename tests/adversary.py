"""Damage what people give to the package in many ways: each case is read, or refused with one error of the package.

PYTHONPATH=. python tests/adversary.py --area all --seed 0

A case fails if it raises another error, takes 30 seconds, or gives a wrong result without an error. Memory is that of
the process, and of the largest one that it started.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tensorflow as tf
from PIL import Image
from safetensors.numpy import load_file, save

import image_kinds
from fuzz import VALUES
from html_document import Document
from keras_vit import batch, converters, errors, visualize
from keras_vit._util.progress import track
from keras_vit.batch import compute, images
from keras_vit.model.vision_transformer import VisionTransformer
from tiny_models import built

FAMILIES = Path(__file__).parent / "data" / "families"
SECONDS = 30  # more are a hang
MOST_LETTERS = 1500  # of a message: an image's or a list's name, a reason, and what to do
LOADED = 8  # one folder in so many is loaded, not only its headers
SIZES = (0, 1, 2, 8000, 10**9, 2**63, 0.1, -1, float("inf"), float("nan"), "224", {}, [], {"height": 0.1, "width": 9})
NAMES = (
    '<script>alert("1")</script>',
    '" onload="alert(1)',
    "<img src=x onerror=alert(1)>",
    "</style><svg/onload=alert(1)>",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "a\x1b[2Jb",
    "\u202ereversed",
    "&lt;b&gt; &amp; 'quoted'",
    "javascript:alert(1)",
    "x" * 5000,
    "--><!--",
    "]]>",
    "\n\r\t",
    "é\u0301😀\u200b",
)
LINES = (
    *("/dev/zero", "/dev/stdin", "/proc/self/mem", "/proc/kmsg", "~nobody/x", "a" * 300 + ".png", "b/" * 3000, "*.png"),
    *("[!", "{}", "..", ".", "/", "//", "a#b", "a.tfrecord", "a.array_record", "\ud800.png", "%00", "-rf"),
)
SCHEMES = (
    *("http://127.0.0.1:9/", "file://", "memory://", "zip://", "tar://", "reference://", "simplecache::", "s4://"),
    *("data:", "hf:/", "ftp:"),
)
# Of the package's own errors, and of built-in ones that it raises itself.
REFUSALS = {getattr(errors, name) for name in errors.__all__}
REFUSALS |= {ValueError, FileNotFoundError, FileExistsError, ImportError}

Case = Callable[[], str | None]  # returns what is wrong, or None; raises an error of `REFUSALS` if it is refused


def model() -> VisionTransformer:
    """Return the model that all cases use."""
    return _model()


@functools.cache
def _model() -> VisionTransformer:
    return built(num_layers=1)


class Hang(BaseException):
    """A case that takes too long; no `except Exception` hides it."""


def outcome(case: Case) -> str:
    """Run a case; return "accepted", "refused", or what is wrong with it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return case() or "accepted"
    except Hang:
        return f"took more than {SECONDS} seconds:\n{traceback.format_exc()}"
    except Exception as error:
        if type(error) not in REFUSALS:
            return traceback.format_exc()
        is_one_message = bool(str(error).strip()) and len(str(error)) < MOST_LETTERS
        return "refused" if is_one_message else f"a message of {len(str(error))} letters: {str(error)[:300]!r}"
    finally:
        signal.alarm(0)


# ---- folders of checkpoints


@functools.cache
def _folders() -> list[dict[str, bytes]]:
    """Return the files of valid folders: those of the families, one of them in two files with an index."""
    found = []
    for config in sorted(FAMILIES.glob("hf_*/config.json")):
        names = ("model.safetensors", "config.json", "preprocessor_config.json")
        found.append({name: (config.parent / name).read_bytes() for name in names if (config.parent / name).exists()})
    tensors = load_file(FAMILIES / "hf_siglip_vision" / "model.safetensors")
    files = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    halves = [dict(list(tensors.items())[number::2]) for number in (0, 1)]
    weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    split = {file: save(half) for file, half in zip(files, halves, strict=True)}
    split["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    split["config.json"] = (FAMILIES / "hf_siglip_vision" / "config.json").read_bytes()
    return [*found, *[split] * 4]


def _change_json(content: bytes, dice: random.Random) -> bytes:
    """Replace, remove or add values of a JSON object."""
    whole = json.loads(content)
    for _ in range(dice.randint(1, 3)):
        place = whole
        while nested := [value for value in place.values() if isinstance(value, dict) and value]:
            if dice.random() < 0.4:
                break
            place = dice.choice(nested)
        key = dice.choice(list(place)) if place and dice.random() < 0.9 else dice.choice(("id2label", "size", "", "0"))
        if dice.random() < 0.15:
            place.pop(key, None)
        else:
            place[key] = copy.deepcopy(dice.choice((*VALUES, *SIZES, *NAMES, {"0": dice.choice(NAMES)}, "[" * 2000)))
    return json.dumps(whole).encode()


def _change_bytes(content: bytes, dice: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(dice.randint(1, 6)):
        if data:
            data[int(dice.random() ** dice.choice((1, 6)) * (len(data) - 1))] = dice.randrange(256)
    return bytes(data[: dice.randrange(len(data) + 1)] if dice.random() < 0.2 else data)


def folder_case(seed: int, work: Path) -> Case:
    """Damage a folder of a checkpoint."""
    dice = random.Random(f"folder {seed}")
    files = dict(dice.choice(_folders()))
    lost, broken = None, set[str]()
    for _ in range(dice.randint(1, 2)):
        name = dice.choice(list(files))
        action = dice.random()
        if name.endswith(".json") and action < 0.7 and name not in broken:
            files[name] = _change_json(files[name], dice)
        elif action < 0.9:
            files[name] = _change_bytes(files[name], dice)
            broken.add(name)
        elif len(files) > 1:
            del files[name]
            lost = name
    whole = seed % LOADED == 0
    folder = work / "folder"

    def case() -> str | None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        converters.load(folder) if whole else converters.read_config(folder)
        if lost and lost.endswith(".safetensors"):
            return f"read without {lost}"
        return None

    return case


# ---- lists and records for `embed`


@functools.cache
def _worker(model: VisionTransformer, **settings: Any) -> compute.Worker:
    return _WORKER(model, **settings)


_WORKER = compute.Worker


@functools.cache
def _good() -> tuple[list[bytes], np.ndarray]:
    """Return image files and their embeddings."""
    pictures = [image_kinds.photo(32, 32, seed=number) for number in range(4)]
    return [image_kinds.encoded(picture, "PNG") for picture in pictures], model().embed(list(map(np.asarray, pictures)))


def _embed(source: Path, work: Path) -> list[dict[str, Any]]:
    """Return the rows of a run."""
    compute.Worker = _worker  # type: ignore[misc, assignment]  # keeps the compiled model
    images.PAUSE = 0.0
    shutil.rmtree(work / "out", ignore_errors=True)
    batch.embed(model(), source, to=work / "out", dtype="float32", batch_size=4, progress=False)
    rows: list[dict[str, Any]] = pq.read_table(work / "out").to_pylist()
    return rows


def _wrong_rows(rows: list[dict[str, Any]], expected: dict[int, np.ndarray]) -> str | None:
    """Return what is wrong with the rows: without an error, a row has the embedding of its image."""
    for number, row in enumerate(rows):
        if (row["embeddings"] is None) == (row["error"] is None):
            return f"row {number} has {row}"
        if row["error"] is not None and not 0 < len(row["error"]) < MOST_LETTERS:
            return f"row {number} has an error of {len(row['error'])} letters"
        if row["error"] is None and np.abs(np.array(row["embeddings"]) - expected[number]).max() > 1e-5:
            return f"row {number} is not that of its image"
    return None


def line_case(seed: int, work: Path) -> Case:
    """Put a hostile line between two good ones of a list."""
    dice = random.Random(f"line {seed}")
    files, embeddings = _good()
    name = dice.choice(
        (*NAMES, *LINES, *(str(work / name) for name in ("link.png", "folder.png", "empty.png", "cut.png")))
    )
    scheme = dice.choice((*SCHEMES, *[""] * 5))
    line = scheme + "".join(dice.choice((letter, letter, letter, letter.upper())) for letter in name)
    line = line.replace("\0", "").strip() or "?"

    def case() -> str | None:
        for number, content in enumerate(files[:2]):
            (work / f"{number}.png").write_bytes(content)
        (work / "folder.png").mkdir(exist_ok=True)
        (work / "empty.png").write_bytes(b"")
        (work / "cut.png").write_bytes(files[2][:100])
        (work / "link.png").unlink(missing_ok=True)
        (work / "link.png").symlink_to(work / "link.png")
        text = f"{work / '0.png'}\n{line}\n{work / '1.png'}\n"
        (work / "list.txt").write_text(text, "utf-8", "surrogateescape" if "\ud800" not in line else "surrogatepass")
        rows = _embed(work / "list.txt", work)
        if [rows[0]["error"], rows[-1]["error"]] != [None, None]:
            return f"a good image has an error: {rows}"
        return _wrong_rows([rows[0], rows[-1]], {0: embeddings[0], 1: embeddings[1]}) or next(
            (f"{line!r} is an image" for row in rows[1:-1] if row["error"] is None), None
        )

    return case


def record_case(seed: int, work: Path) -> Case:
    """Damage a file of TFRecords."""
    dice = random.Random(f"record {seed}")
    files, embeddings = _good()

    def case() -> str | None:
        path = work / "a.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for content in files:
                writer.write(content)
        whole = path.read_bytes()
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            start = int(dice.random() * len(damaged))
            match dice.randrange(4):
                case 0:
                    damaged[start : start + 1] = bytes([dice.randrange(256)])
                case 1:
                    damaged[start : start + 8] = dice.choice((0, 1, 2**36, 2**40, 2**64 - 1)).to_bytes(8, "little")
                case 2:
                    del damaged[start : start + dice.randint(1, 40)]
                case 3:
                    damaged[start:start] = dice.randbytes(dice.randint(1, 40))
        path.write_bytes(damaged)
        rows = _embed(path, work)
        if damaged != whole and all(row["error"] is None for row in rows) and len(rows) == len(files):
            return "the damage was not noticed"
        return _wrong_rows(rows, dict(enumerate(embeddings)))

    return case


# ---- reports


def report_case(seed: int, work: Path) -> Case:
    """Write a report with hostile names of classes, files and the model."""
    dice = random.Random(f"report {seed}")
    labels = tuple(f"{dice.choice(NAMES)}{number}" for number in range(5))
    file_name = dice.choice(NAMES).replace("/", "_")[:60].replace("\0", "") + ".png"
    title = dice.choice(NAMES)

    def case() -> str | None:
        for old in work.glob("*.png"):
            old.unlink()
        picture = work / file_name
        Image.fromarray(np.asarray(image_kinds.photo(40, 32, seed=seed % 8))).save(picture, "PNG")
        named = built(num_layers=1, labels=labels)
        visualize.report(named, [picture], work / "report.html", title=title)
        document = Document((work / "report.html").read_text("utf-8"))
        handlers = [name for _, attributes in document.tags for name in attributes if name.startswith("on")]
        sources = [value for value in document.values("src") + document.values("href") if "alert" in value]
        if document.all("script") or handlers or sources:
            return f"injected: {document.all('script')} {handlers} {sources}"
        return None

    return case


# By area: what makes a case from its seed and a folder, and how many are a long run.
AREAS: dict[str, tuple[Callable[[int, Path], Case], int]] = {
    "folders": (folder_case, 2000),
    "lines": (line_case, 500),
    "records": (record_case, 300),
    "reports": (report_case, 100),
}


def outcomes(area: str, count: int, seed: int, work: Path) -> Iterator[tuple[int, str]]:
    """Run cases of an area; yield the seed and the outcome of each."""
    make, _ = AREAS[area]
    for number in range(seed, seed + count):
        yield number, outcome(make(number, work))


def megabytes() -> tuple[int, int]:
    """Return the largest memory of this process so far, and of the largest one that it started, in MB."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return tuple(resource.getrusage(kind).ru_maxrss // 1000 for kind in kinds)  # type: ignore[return-value]


def main() -> None:
    """Run the cases, print what fails and the counts, and end with status 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", choices=["all", *AREAS], default="all")
    parser.add_argument("--count", type=int, help="cases of each area; default: those of a long run")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each has its own")
    options = parser.parse_args()
    failures = 0
    for area in AREAS if options.area == "all" else [options.area]:
        count = AREAS[area][1] if options.count is None else options.count
        seen, start = Counter[str](), time.perf_counter()
        with tempfile.TemporaryDirectory() as work:
            list(outcomes(area, min(count, 20), options.seed, Path(work)))  # a normal run
            before = megabytes()
            for number, found in track(outcomes(area, count, options.seed, Path(work)), area, total=count):
                kind = found if found in ("accepted", "refused") else "failed"
                seen[kind] += 1
                if kind == "failed":
                    failures += 1
                    print(f"--area {area} --seed {number} --count 1:\n{found}", flush=True)
        print(f"{area}: {dict(seen)}, {time.perf_counter() - start:.0f} s, MB {before} -> {megabytes()}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
