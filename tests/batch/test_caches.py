"""What is kept from run to run is used only for what it was made of: features, vectors, checkpoints."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from command_line import run
from keras_vit import batch, train
from keras_vit.batch import compute
from keras_vit.model.config import Preprocessing
from keras_vit.model.vision_transformer import VisionTransformer
from tiny_models import randomised, tiny

SIZE, CLASSES = 16, ("c0", "c1")
QUERY = 21


def photo(seed: int) -> Image.Image:
    """Return noise whose mean depends on the seed, so that classes can be learned."""
    noise = np.random.default_rng(seed).integers(0, 99, (SIZE, SIZE, 3))
    return Image.fromarray((noise + 120 * (seed % 2)).astype(np.uint8))


def write_photos(folder: Path) -> Path:
    """Write two classes of six photos, all of the same size and at once."""
    for number in range(12):
        path = folder / CLASSES[number % 2] / f"{number:02}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(number).save(path)
    return folder


def replace(folder: Path) -> None:
    """Replace a photo by one of the same size and time."""
    path = folder / "c0" / "04.bmp"
    before = path.stat()
    Image.open(path).transpose(Image.Transpose.ROTATE_90).save(path)  # also the same sum of pixels
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def exchange(folder: Path) -> None:
    for before, after in (("c0", "c2"), ("c1", "c0"), ("c2", "c1")):
        (folder / before).rename(folder / after)


def keep(folder: Path) -> None:
    """Change nothing."""


class Change(NamedTuple):
    """What happens between two runs: to the photos, the model, and the arguments of the second run."""

    photos: Callable[[Path], Any] = keep
    model: Mapping[str, Any] = {}
    probe: Mapping[str, Any] = {}
    embed: Mapping[str, Any] = {}


CHANGES = {
    "nothing": Change(),
    "replaced": Change(replace),
    "moved": Change(lambda folder: (folder / "c0" / "04.bmp").rename(folder / "c1" / "04.bmp")),
    "classes exchanged": Change(exchange),
    "added": Change(lambda folder: photo(20).save(folder / "c0" / "20.bmp")),
    "removed": Change(lambda folder: (folder / "c0" / "04.bmp").unlink()),
    "touched": Change(lambda folder: (folder / "c0" / "04.bmp").touch()),
    "order": Change(lambda folder: (folder / "c0" / "00.bmp").rename(folder / "c0" / "99.bmp")),
    "labels": Change(lambda folder: (folder / "c0").rename(folder / "c3"), model={"labels": ("c3", "c1")}),
    "weights": Change(model={"seed": 1}),
    "preprocessing": Change(model={"preprocessing": Preprocessing(mean=(0.4,), std=(0.2,))}),
    "seed": Change(probe={"seed": 7}),
    "size": Change(model={"image_size": 24}, probe={"image_size": 24}),
    "values": Change(embed={"what": "features"}),
}


@functools.cache
def _model(seed: int, changes: tuple[tuple[str, Any], ...]) -> VisionTransformer:
    return randomised(VisionTransformer(tiny(num_layers=1, num_classes=2, **dict(changes))), seed)


def model(seed: int = 0, **changes: Any) -> VisionTransformer:
    return _model(seed, tuple({"image_size": SIZE, "labels": CLASSES, **changes}.items()))


def probe(place: Path, out: str, change: Change) -> list[np.ndarray]:
    """Return the head of a probe."""
    recipe = train.recipe("linear-probe", **{"image_size": SIZE, "batch_size": 8, **change.probe})
    options = {"model": model(**change.model), "data": place / "photos", "train_split": "all"}
    result = train.run(recipe, **options, out=place / out, progress=False)
    return [weight.numpy() for weight in result.model.weights if "head" in weight.path]


def embed(place: Path, out: str, change: Change) -> list[np.ndarray]:
    """Return the paths and the vectors."""
    network = model(**change.model)
    network.save(place / "model.keras")
    origin = {"model": str(place / "model.keras")}
    options = {"rows_per_file": 4, "dtype": "float32", "origin": origin, **change.embed}
    batch.embed(network, place / "photos", to=place / out, **options)
    table = pq.read_table(place / out)
    return [np.asarray(table["path"].to_pylist()), np.asarray(table[table.schema.names[1]].to_pylist())]


def search(place: Path, out: str, change: Change) -> list[np.ndarray]:
    """Return what a search finds, in the vectors of the folder if there is one, or else in new ones."""
    if not (place / out).exists():
        embed(place, out, change._replace(embed={}))
    model(**change.model).save(place / "model.keras")
    photo(QUERY).save(place / "query.png")
    found = json.loads(run("search", place / out, place / "query.png", "--json"))
    return [np.asarray([match["path"] for match in found]), np.asarray([match["score"] for match in found])]


def is_same(found: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    if [array.shape for array in found] != [array.shape for array in wanted]:
        return False
    close = [np.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True) if a.dtype.kind == "f"]
    return all(close) and all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True) if a.dtype.kind != "f")


def outcome(command: Callable[[Path, str, Change], list[np.ndarray]], change: Change, place: Path) -> str:
    """Run a command, change something, and run it again: tell whether what comes is that of a run in a new folder."""
    write_photos(place / "photos")
    command(place, "kept", Change())
    change.photos(place / "photos")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = command(place, "kept", change)
        except (ValueError, OSError) as error:
            return f"refused: {error}"
    said = " ".join(str(each.message) for each in told if not issubclass(each.category, DeprecationWarning))
    if is_same(found, command(place, "new", change)):
        return f"same: {said}"
    return (
        "warned"
        if command is search and ("other images than" in said or "images that have changed" in said)
        else "OTHER"
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_after_every_kind_of_change_the_result_is_that_of_a_new_run_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "Worker", functools.cache(compute.Worker))  # which traces its model
    outcomes = {}
    for command in (probe, embed, search):
        for name, change in CHANGES.items():
            has_effect = change.photos is not keep or change.model or getattr(change, command.__name__, {})
            if name != "nothing" and not has_effect:
                continue
            place = tmp_path / f"{command.__name__} {name}"
            place.mkdir()
            outcomes[command.__name__, name] = outcome(command, change, place)
    print("\n".join(f"{' '.join(case)}: {text:.200}" for case, text in outcomes.items()))
    assert [case for case, text in outcomes.items() if text == "OTHER"] == []
    unchanged = {outcomes[command.__name__, "nothing"] for command in (probe, embed, search)}
    assert unchanged == {"same: "}  # what was kept is used, without a word


@pytest.mark.full
def test_training_that_goes_on_with_other_labels_says_so(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (16, SIZE, SIZE, 3), np.uint8)
    recipe = train.recipe("digits", steps=2, batch_size=8, image_size=SIZE, xla=False)

    def fit(labels: np.ndarray) -> None:
        train.run(recipe, model=tiny(num_layers=1), data={"train": (images, labels)}, out=tmp_path, progress=False)

    fit(np.arange(16) % 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(np.arange(16) % 5)
    with pytest.warns(UserWarning, match="not those of the run before: training goes on with the data as they are now"):
        fit(np.arange(16)[::-1] % 5)
