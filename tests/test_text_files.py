"""The LiteRT files of text towers compute what the towers do, and the zoo finds a text tower by its model's name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from keras_vit import text, zoo
from keras_vit._util import downloads
from keras_vit.converters import assign
from keras_vit.converters.containers import write_npz
from keras_vit.converters.table import load_table
from keras_vit.export.exported import load_exported
from marks import full_except
from text_cases import FOLDER, small_encoder

SIGLIP = {"causal": False, "pooling": "last", "projection_bias": True, "activation": "gelu_tanh", "norm_epsilon": 1e-6}
TOWERS = {
    "largest id": ("tok_clip", {}),
    "end token": ("tok_clip", {"end_token": 789, "activation": "gelu_erf", "layer_scale": 0.5}),
    "siglip": ("tok_siglip", SIGLIP),
    "siglip 2": ("tok_siglip2", SIGLIP | {"projection_size": 0, "projection_bias": False}),
    "first token": ("tok_clip", {"pooling": "first"}),
}


@pytest.mark.parametrize("name", full_except(["end token", "siglip"], TOWERS))
def test_a_float_file_gives_the_outputs_of_the_tower(name: str, tmp_path: Path) -> None:
    tokenizer, fields = TOWERS[name]
    encoder = small_encoder(tokenizer, **fields)
    report = text.tflite(encoder, tmp_path / "text.tflite", quantize="none")
    assert report.max_error <= 1e-5  # float32 noise is 6e-7
    assert report.difference_cosine is None or report.difference_cosine > 0.999999


@pytest.mark.parametrize(
    ("name", "mode"),
    full_except(
        [("largest id", "dynamic")],
        [(name, mode) for name in TOWERS for mode in ("dynamic", "float16") if name != "first token"],
    ),
)
def test_a_small_file_keeps_the_differences_between_texts(name: str, mode: str, tmp_path: Path) -> None:
    tokenizer, fields = TOWERS[name]
    encoder = small_encoder(tokenizer, **fields)
    report = text.tflite(encoder, tmp_path / "text.tflite", quantize=mode)
    assert report.difference_cosine is not None
    assert report.difference_cosine >= 0.995
    if mode == "dynamic" and encoder.config.vocab_size > 500:  # its table of tokens is int8 too
        assert report.bytes < 2.0 * encoder.count_params()


def test_an_app_gets_a_tokenizer_and_a_test_vector(tmp_path: Path) -> None:
    encoder, texts = small_encoder("tok_siglip2", **SIGLIP), ["A cat!", "the beach"]
    path = text.tflite(encoder, tmp_path / "text.tflite", quantize="none", texts=texts).path
    vector = json.loads((tmp_path / "text.test.json").read_text(encoding="utf-8"))
    assert {key: vector[key] for key in ("texts", "start_ids", "end_id", "pad_id", "cleaning")} == {
        "texts": texts,
        "start_ids": [],
        "end_id": 1,
        "pad_id": 0,
        "cleaning": "siglip2",
    }
    assert (tmp_path / "tokenizer.json").read_bytes() == (FOLDER / "tok_siglip2" / "tokenizer.json").read_bytes()
    file = load_exported(path)
    rows = [file.call(np.array([ids], np.int32))["features"][0] for ids in vector["ids"]]
    received = np.stack([row / np.linalg.norm(row) for row in rows])
    np.testing.assert_allclose(received, vector["embeddings"], atol=1e-5)
    with pytest.raises(FileExistsError, match="another model's tokenizer"):
        text.tflite(small_encoder("tok_clip"), path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["text.test.json", "text.tflite", "tokenizer.json"]


def test_modes_with_fixed_ranges_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be one of \['none', 'float16', 'dynamic'\]. Received: 'int8'"):
        text.tflite(small_encoder(), tmp_path / "text.tflite", quantize="int8")


def test_the_zoo_finds_the_text_tower_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = small_encoder("tok_siglip", logit_scale=2.0, logit_bias=-3.0, **SIGLIP)
    table = load_table("big_vision", "text")
    values = assign.variables_by_path(encoder) | {"logit_scale": np.float32(2.0), "logit_bias": np.float32(-3.0)}
    sources = {name: table.tensor_of(name, encoder.config.to_dict()) for name in values}
    files = {"npz": write_npz(tmp_path / "siglip.npz", assign.collect(values, sources, table))}
    files["model"] = Path(shutil.copy(FOLDER / "tok_siglip" / "spiece.model", tmp_path))
    fetched = []

    def fetch(source: str, **_: object) -> Path:
        fetched.append(source)
        return files[source.rpartition(".")[2]]

    monkeypatch.setattr(downloads, "fetch", fetch)
    found = zoo.text_encoder("SigLIP-B/16", weights="webli-i18n-256")
    assert found.config == encoder.config
    np.testing.assert_array_equal(found.embed("a cat"), encoder.embed("a cat"))
    assert fetched == [
        "gs://big_vision/siglip/webli_i18n_b16_256_66117334.npz",
        "hf://google/siglip-base-patch16-256-multilingual/spiece.model",
    ]


def test_a_model_without_a_text_tower_names_those_that_have_one() -> None:
    with pytest.raises(ValueError, match=r"ViT-B/16 has no text tower. Models that have one: \['CLIP-B/16'"):
        zoo.text_encoder("ViT-B/16")
