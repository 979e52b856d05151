"""Text towers give the outputs of transformers, open_clip and big_vision, tokenizers their ids, LiteRT files ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from keras_vit import converters, text, zoo
from keras_vit._util import downloads
from keras_vit.converters import loading
from keras_vit.converters.saving import collect, write_npz
from keras_vit.converters.table import load_table
from keras_vit.errors import CheckpointError
from keras_vit.export.exported import load_exported
from marks import full_except
from reference_cases import arrays, distance
from text_cases import CASES, EXPORTED, FOLDER, OUTPUTS, SIGLIP, STRINGS, TOKENIZERS, TOWERS, small_encoder

QUICK = ("hf_clip_new_eos", "hf_siglip_text", "openclip_custom", "bv_siglip2")


@pytest.mark.parametrize("name", full_except(QUICK, TOWERS))
def test_a_text_tower_gives_the_official_outputs(name: str) -> None:
    encoder, reference = text.load(FOLDER / name), arrays(FOLDER / name / "reference.npz")
    tolerance = CASES[name]["tolerance"]
    wanted = next(reference[key] for key in OUTPUTS if key in reference)
    assert distance(encoder(reference["input_ids"]), wanted) <= tolerance
    for kind in ("short", "odd"):
        if f"{kind}/input_ids" in reference:
            wanted = next(reference[key] for part in OUTPUTS if (key := kind + part[4:]) in reference)
            assert distance(encoder(reference[f"{kind}/input_ids"]), wanted) <= tolerance


@pytest.mark.parametrize("name", full_except(["hf_clip", "bv_lit"], TOWERS))
def test_every_block_gives_the_official_hidden_states(name: str) -> None:
    encoder, reference = text.load(FOLDER / name), arrays(FOLDER / name / "reference.npz")
    names = ["tokens", *(f"block_{i}" for i in range(encoder.config.num_layers)), "encoder_norm"]
    found = encoder.features(reference["input_ids"], names)
    official = {f"text/hidden_states/{i:02}": name for i, name in enumerate(names[:-1])}
    official |= {f"text/block{i:02}": f"block_{i}" for i in range(encoder.config.num_layers)}
    official |= {"text/last_hidden_state": "encoder_norm"}
    compared = [key for key in official if key in reference]
    assert len(compared) > encoder.config.num_layers
    for key in compared:
        assert distance(found[official[key]], reference[key]) <= CASES[name]["tolerance"], key


@pytest.mark.parametrize("name", full_except(["hf_clip"], TOWERS))
def test_float64_gives_the_official_float64_outputs(name: str) -> None:
    reference = arrays(FOLDER / name / "reference.npz")
    encoder = text.load(FOLDER / name, dtype="float64")
    assert distance(encoder(reference["input_ids"]), reference["float64"]) <= CASES[name]["tolerance_float64"]


@pytest.mark.filterwarnings("ignore:keras_vit. .* were cut:UserWarning")
def test_all_strings_get_the_official_ids(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):  # instead of a tokenizer.json
        shutil.copy(FOLDER / "tok_clip" / name, tmp_path)
    folders = [(name, FOLDER / name) for name in TOKENIZERS] + [("tok_clip", tmp_path)]
    for name, folder in folders:
        ids = text.Tokenizer.load(folder)(STRINGS)
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, arrays(FOLDER / name / "reference.npz")["input_ids"], err_msg=name)


@pytest.mark.filterwarnings("ignore:keras_vit. .* were cut:UserWarning")
def test_the_vocabulary_of_openai_gives_the_official_ids() -> None:
    folder = FOLDER / "tok_clip_real"
    if not (folder / "tokenizer.json").exists():
        pytest.skip("needs the tokenizer.json of openai/clip-vit-base-patch16 in tests/data/text/tok_clip_real")
    ids = text.Tokenizer.load(folder, 77)(STRINGS)
    np.testing.assert_array_equal(ids, arrays(folder / "reference.npz")["input_ids"])


@pytest.mark.parametrize("name", full_except(["tok_siglip"], TOKENIZERS))
def test_a_saved_encoder_has_its_tokenizer_inside(name: str, tmp_path: Path) -> None:
    encoder = small_encoder(name, logit_scale=4.6, activation="gelu_erf")
    wanted = encoder.embed(["a cat on the beach", ""])
    np.testing.assert_allclose(np.linalg.norm(wanted, axis=1), 1, rtol=1e-6)
    encoder.save(tmp_path / "text.keras")
    again, by_keras = text.load(tmp_path / "text.keras"), keras.saving.load_model(tmp_path / "text.keras")
    assert again.config == by_keras.config == encoder.config
    for loaded in (again, by_keras, zoo.text_encoder(tmp_path / "text.keras")):
        np.testing.assert_array_equal(loaded.embed(["a cat on the beach", ""]), wanted)


def test_texts_that_are_cut_say_so_once_and_end_with_the_end_token() -> None:
    encoder = small_encoder()
    with pytest.warns(UserWarning, match="2 of 3 texts are longer than 16 tokens and were cut") as warned:
        ids = encoder.tokenize(["cat " * 400, "dog", "a" * 10_000])
    assert len(warned) == 1
    assert ids.shape == (3, 16)
    assert (ids[[0, 2], -1] == 789).all()


def test_other_things_than_texts_are_refused() -> None:
    encoder = small_encoder()
    for texts in ([], None, 7, ["cat", None], [b"cat"]):
        with pytest.raises(ValueError, match="texts must be a string or a list"):
            encoder.embed(texts)
    with pytest.raises(ValueError, match="texts must be valid Unicode"):
        encoder.embed(["cat", "a \ud800"])
    with pytest.raises(NotImplementedError, match="not for keras_vit's models"):
        encoder.quantize("int8")


@pytest.mark.parametrize("number", [-1, -7, 10_000])
def test_ids_that_no_token_has_are_refused(number: int) -> None:
    encoder = small_encoder()
    ids = encoder.tokenize(["cat"])
    ids[0, 1] = number
    for call in (encoder, lambda values: encoder.features(values, ["tokens"])):
        with pytest.raises(ValueError, match=rf"from 0 to {encoder.config.vocab_size - 1}\. Received: .*{number}"):
            call(ids)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):  # a compiled function cannot say more
        encoder.predict(ids, verbose=0)


def test_a_missing_foreign_or_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer.*tokenizer=folder"):
        text.load(FOLDER / "hf_clip").embed("cat")
    with pytest.raises(ValueError, match=r"\[120, 14\].*\[790, 14\]"):
        text.load(FOLDER / "hf_clip", tokenizer=FOLDER / "tok_clip")
    with pytest.raises(ValueError, match=r"\[790, 16, 5\].*\[790, 16, 789\]"):
        small_encoder(end_token=5)
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        text.Tokenizer.load(FOLDER / "hf_clip")
    for content in (b"", b"{}", b'{"model": 3}', b"\x00" * 100, b"<html>"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            text.Tokenizer.load(tmp_path, 77)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Removed", "invert": False}
# What a tokenizer.json or its tokenizer_config.json may not have: it gives other ids, takes any memory or any time.
FORGED_PARTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 30}}, {}),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, {}),
    ({"normalizer": REPLACE | {"content": "a" * 1000}}, {}),
    ({"normalizer": "NFC"}, {}),
    ({"pre_tokenizer": SPLIT}, {}),
    ({"pre_tokenizer": SPLIT | {"pattern": {"Regex": "a+a+a+b"}}}, {}),
    ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, {}),
    ({"model": {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "<|startoftext|>": 1}, "unk_token": "?"}}, {}),
    ({"model": {"type": "BPE", "dropout": 0.5, "vocab": {}, "merges": []}}, {}),
    *(({}, {"pad_token": padding}) for padding in (1.5, [1], 10**30, 10**9, -1, True, "<nothing>")),
    ({}, {"padding_side": 5}),
]


def test_parts_of_no_known_family_are_refused(tmp_path: Path) -> None:
    whole = json.loads((FOLDER / "tok_clip" / "tokenizer.json").read_text())
    for changes, config in FORGED_PARTS:
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | changes))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError) as caught:
            text.Tokenizer.load(tmp_path, 77)
        assert len(str(caught.value)) < 500 + len(str(tmp_path)), changes
        assert "5" in str(caught.value) or config != {"padding_side": 5}
    # A token far behind the others: the ids of the text tower end before.
    whole["model"]["vocab"]["far"] = 10**6
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    (tmp_path / "tokenizer_config.json").unlink()
    assert text.Tokenizer.load(tmp_path, 77).vocab_size == 10**6 + 1  # which no tower has


def test_a_sentencepiece_model_of_another_family_is_refused(tmp_path: Path) -> None:
    import sentencepiece

    for end in ("<eos>", "</s>"):
        (tmp_path / "words.txt").write_text("a photo of a cat\na photo of a dog\n" * 50)
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "words.txt"),
            model_prefix=str(tmp_path / "spiece"),
            vocab_size=40,
            hard_vocab_limit=False,
            eos_piece=end,
            minloglevel=2,
        )
        if end == "</s>":
            assert text.Tokenizer.load(tmp_path, 16)(["a cat"]).shape == (1, 16)
        else:
            with pytest.raises(CheckpointError, match="without the token '</s>'"):
                text.Tokenizer.load(tmp_path, 16)


def test_white_space_takes_linear_time() -> None:
    tokenizer = text.Tokenizer.load(FOLDER / "tok_siglip", 16)
    spaces = "a" + " " * 2_000_000 + "b"  # quadratic: hours
    np.testing.assert_array_equal(tokenizer([spaces]), tokenizer(["a b"]))


def test_a_file_without_a_config_needs_the_facts(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "hf_clip" / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match="do not say num_heads, activation"):
        text.load(tmp_path)
    encoder = text.load(tmp_path, config={"num_heads": 3, "activation": "gelu_quick"})
    assert encoder.config == text.load(FOLDER / "hf_clip").config


def test_models_that_are_not_read_are_named(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "hf_clip" / "model.safetensors", tmp_path)
    config = json.loads((FOLDER / "hf_clip" / "config.json").read_text())
    config["text_config"]["model_type"] = "metaclip_2_text_model"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="MetaCLIP 2"):
        text.load(tmp_path)
    path = converters.save(zoo.load("digits"), tmp_path / "digits.npz", format="google")
    with pytest.raises(CheckpointError, match="no format is known by its tensors"):
        text.load(path)


def test_a_missing_and_a_foreign_tensor_are_both_named(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "hf_clip_text" / "model.safetensors")
    tensors["mystery"] = tensors.pop("final_layer_norm.bias")
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(FOLDER / "hf_clip_text" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*no tensor for encoder_norm/beta.*mystery is left over"):
        text.load(tmp_path)


# LiteRT files


@pytest.mark.parametrize("name", full_except(["end token", "siglip"], EXPORTED))
def test_a_float_file_gives_the_outputs_of_the_tower(name: str, tmp_path: Path) -> None:
    tokenizer, fields = EXPORTED[name]
    report = text.tflite(small_encoder(tokenizer, **fields), tmp_path / "text.tflite", quantize="none")
    # A causal tower's first token is the same for all texts, so that nothing can be compared.
    assert report.is_constant == (name == "first token")
    assert report.is_constant or report.max_error <= 1e-5  # float32 noise is 6e-7
    assert report.difference_cosine is None or report.difference_cosine > 0.999999


@pytest.mark.parametrize("mode", ["dynamic", "float16"])
@pytest.mark.parametrize("name", full_except(["largest id"], list(EXPORTED)[:-1]))
def test_a_small_file_keeps_the_differences_between_texts(name: str, mode: str, tmp_path: Path) -> None:
    tokenizer, fields = EXPORTED[name]
    encoder = small_encoder(tokenizer, **fields)
    report = text.tflite(encoder, tmp_path / "text.tflite", quantize=mode)
    assert report.difference_cosine is not None
    assert report.difference_cosine >= {"dynamic": 0.995, "float16": 0.99999}[mode]  # float16: 1 - 3e-7 was measured
    if mode == "dynamic" and encoder.config.vocab_size > 500:  # its table of tokens is int8 too
        assert report.bytes < 2.0 * encoder.count_params()
    with pytest.raises(ValueError, match="'dynamic'.*'int8'"):  # there are no fixed ranges
        text.tflite(encoder, tmp_path / "text.tflite", quantize="int8")


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


@pytest.mark.parametrize("texts", [["a"], "abc", ["a", "a"]])
def test_a_file_is_not_compared_on_one_text(texts: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="texts must be two or more that have different ids"):
        text.tflite(small_encoder(), tmp_path / "text.tflite", texts=texts)
    assert not list(tmp_path.iterdir())


def test_the_zoo_finds_the_text_tower_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = small_encoder("tok_siglip", logit_scale=2.0, logit_bias=-3.0, **SIGLIP)
    table = load_table("big_vision", "text")
    values = loading.variables_by_path(encoder) | {"logit_scale": np.float32(2.0), "logit_bias": np.float32(-3.0)}
    sources = {name: table.tensor_of(name, encoder.config.to_dict()) for name in values}
    files = {"npz": write_npz(tmp_path / "siglip.npz", collect(values, sources, table))}
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
    with pytest.raises(ValueError, match="ViT-B/16 has no text tower.*CLIP-B/16"):
        zoo.text_encoder("ViT-B/16")
