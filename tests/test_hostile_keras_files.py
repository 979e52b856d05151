"""Hostile and damaged .keras files are refused with one CheckpointError; nothing in them is run."""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

from forgery import DEFLATED, Member, archive, deflate, keras_archive
from keras_vit import converters
from model_weights import assert_same_bits, values

GOOD = Path(__file__).parent / "data" / "saved" / "model.keras"


def refuse(path: Path, match: str, **options: Any) -> None:
    """Check that a file is refused soon, in one short error that names it."""
    start = time.process_time()
    with pytest.raises(converters.CheckpointError, match=match) as caught:
        converters.load(path, **options)
    assert time.process_time() - start < 5
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 2500


def members() -> dict[str, bytes]:
    with zipfile.ZipFile(GOOD) as file:
        return {name: file.read(name) for name in file.namelist()}


def hdf5(change: Callable[[h5py.File], None]) -> bytes:
    """Return the good file's weights with a change."""
    memory = io.BytesIO(members()["model.weights.h5"])
    with h5py.File(memory, "a") as file:
        change(file)
    return memory.getvalue()


def test_the_file_that_is_changed_below_is_good(tmp_path: Path) -> None:
    same = converters.load(keras_archive(tmp_path / "vit.keras"))
    assert_same_bits(values(same), values(keras.saving.load_model(GOOD)))
    assert same.config == keras.saving.load_model(GOOD).config


@pytest.mark.parametrize(
    "model",
    [
        {"hidden_size": 100_000},
        {"mlp_dim": 10**9},
        {"mlp_dim": 20_000},
        {"hidden_size": 512, "mlp_dim": 512},
        {"num_layers": 10**9},
        {"num_layers": 200},
        {"num_classes": 10**12},
        {"num_classes": 200_000},
        {"num_registers": 10**12},
        {"representation_size": 10**11},
        {"num_channels": 10**9},
        {"image_size": [10**9, 10**9]},
        {"image_size": [10**9, 10**9], "position": "learned2d"},
        {"image_size": [10**600, 10**600], "position": "learned2d"},
        {"image_size": [10**5, 10**5], "position": "sincos2d"},
        {"image_size": [2048, 2048]},
        {"image_size": [4096, 4096], "position": "none"},
        {"image_size": [10**6, 10**6], "position": "none"},
        {"image_size": [10**5, 10**5], "position": "learned2d"},
        {"resnet": {"num_layers": [10**9]}, "patch_size": 1},
        {"resnet": {"num_layers": [1] * 10_000}, "patch_size": 1},
        {"resnet": {"width_factor": 1e308}},
        {"hidden_size": "16"},
        {"num_heads": 7},
        {"labels": 7},
        {"no_such_field": 1},
        {"preprocessing": {"mean": "abc"}},
    ],
    ids=lambda model: str(model)[:60],
)
def test_a_config_that_the_weights_cannot_fill_is_refused_before_anything_is_built(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keras_vit.converters.loading.VisionTransformer", None)
    refuse(keras_archive(tmp_path / "vit.keras", model=model), "describes? (?!.*NoneType)")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (b"", "is not valid JSON"),
        (b"[]", "a list, not an object"),
        (b"{", "is not valid JSON"),
        (b"[" * 1_000_000, "is not valid JSON"),
        (b'{"a": "' + b"x" * 20_000_000 + b'"}', "config.json of 20,000,009 bytes; the limit is"),
        (b'{"registered_name": "keras_vit>VisionTransformer"}', "not a VisionTransformer's"),
        (b'{"registered_name": "keras_vit>VisionTransformer", "config": {"config": {}}}', "not a VisionTransformer's"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_config_that_is_none_is_refused(config: bytes, reason: str, tmp_path: Path) -> None:
    refuse(keras_archive(tmp_path / "vit.keras", config=config), reason)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    engine_block = deflate(bytes(1 << 20))
    told = {"config.json": 4 * 10**9, "metadata.json": 1, "model.weights.h5": 1}
    data = archive(*(Member(name, engine_block, DEFLATED, size=size, checksum=0) for name, size in told.items()))
    (tmp_path / "vit.keras").write_bytes(data)
    refuse(tmp_path / "vit.keras", "bytes claim to unpack to 4000000002")
    refuse(keras_archive(tmp_path / "packed.keras", compression=zipfile.ZIP_DEFLATED), "has compressed weights")


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    data, path = GOOD.read_bytes(), tmp_path / "vit.keras"
    for length in (*range(0, len(data), 997), len(data) - 1):
        path.write_bytes(data[:length])
        refuse(path, "cut short|cannot be read")


def test_another_model_is_refused_and_its_code_not_run(tmp_path: Path) -> None:
    image = keras.Input((4,))
    keras.Model(image, keras.layers.Lambda(lambda x: x + 1)(image)).save(tmp_path / "lambda.keras")
    refuse(
        tmp_path / "lambda.keras",
        "does not contain a VisionTransformer. Received: 'Functional'; keras.saving.load_model",
    )
    code = json.loads(zipfile.ZipFile(tmp_path / "lambda.keras").read("config.json"))["config"]["layers"][1]
    good = json.loads(members()["config.json"])
    inside = {**good, "config": {**good["config"], "dtype": code}}  # where Keras would deserialise it
    refuse(
        keras_archive(tmp_path / "inside.keras", config=json.dumps(inside).encode()),
        "does not describe a valid model|not a VisionTransformer's",
    )
    refuse(keras_archive(tmp_path / "no.keras", registered_name="builtins>eval", class_name="eval"), "Received: 'eval'")
    # The registered name decides: a module and a class of other names are never imported.
    path = keras_archive(tmp_path / "elsewhere.keras", module="os", class_name="system")
    assert converters.load(path).config == converters.load(GOOD).config


def test_a_frozen_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    good = json.loads(members()["config.json"])
    for frozen in ([["no_such_layer", 0]], [["embedding", 10**9]], [[["embedding"], 0]], 7):
        changed = {**good, "config": {**good["config"], "frozen": frozen}}
        refuse(keras_archive(tmp_path / "vit.keras", config=json.dumps(changed).encode()), "does not describe")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"../../etc/cron.d/evil": b"x"}, "has a member '../../etc/cron.d/evil'; a .keras file"),
        ({"assets/vocabulary.txt": b"x"}, "has a member 'assets/vocabulary.txt'"),
        ({"model.weights.npz": b"x"}, "has a member 'model.weights.npz'"),
        ({"config.json": None}, "has no member 'config.json'"),
        ({"model.weights.h5": None}, "has no member 'model.weights.h5'"),
    ],
    ids=str,
)
def test_members_that_keras_does_not_write_are_refused(
    extra: dict[str, bytes | None], reason: str, tmp_path: Path
) -> None:
    found = {name: data for name, data in {**members(), **extra}.items() if data is not None}
    (tmp_path / "vit.keras").write_bytes(archive(*(Member(name, data) for name, data in found.items())))
    refuse(tmp_path / "vit.keras", reason)


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = [Member(name, data) for name, data in members().items()]
    (tmp_path / "vit.keras").write_bytes(archive(*twice, twice[-1]))
    refuse(tmp_path / "vit.keras", "has two members 'model.weights.h5'")


def _link(file: h5py.File) -> None:
    file["layers/link"] = h5py.ExternalLink("/etc/passwd", "/")


def _drop(file: h5py.File) -> None:
    del file["layers/encoder_block/mlp"]


def _reshape(file: h5py.File) -> None:
    del file["layers/prefix_tokens/vars/0"]
    file["layers/prefix_tokens/vars/0"] = np.zeros((1, 1, 7), np.float32)


def _poison(file: h5py.File) -> None:
    file["layers/prefix_tokens/vars/0"][0, 0, 3] = np.nan


def _pack(file: h5py.File) -> None:
    file.create_dataset("layers/packed", data=np.zeros(10_000), compression="gzip")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_link, "links of the newer kind|neither a group nor an array|is a link"),
        (_pack, "not contiguous|packed by a filter"),
        (_drop, "its weights do not fit the model"),
        (_reshape, "its weights do not fit the model"),
        (_poison, "vars/0 holds values that are not finite; allow_nonfinite=True reads them"),
    ],
)
def test_the_weights_inside_pass_the_checks_of_a_weights_file(
    change: Callable[[h5py.File], None], reason: str, tmp_path: Path
) -> None:
    refuse(keras_archive(tmp_path / "vit.keras", weights=hdf5(change)), reason)


def test_weights_that_are_not_finite_are_read_when_asked_for(tmp_path: Path) -> None:
    path = keras_archive(tmp_path / "vit.keras", weights=hdf5(_poison))
    assert (
        sum(np.count_nonzero(np.isnan(value)) for value in values(converters.load(path, allow_nonfinite=True)).values())
        == 1
    )


@pytest.mark.parametrize("weights", [b"", b"\x89HDF\r\n\x1a\n", members()["model.weights.h5"][:60_000]], ids=len)
def test_weights_that_are_cut_short_inside_a_whole_archive_are_refused(weights: bytes, tmp_path: Path) -> None:
    refuse(keras_archive(tmp_path / "vit.keras", weights=weights), "cut short|not write|cannot be read|at byte")
