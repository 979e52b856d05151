"""Text towers give the outputs of transformers, open_clip and big_vision, and tokenizers their ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_vit import converters, text, zoo
from keras_vit.errors import CheckpointError
from marks import full_except
from reference_cases import arrays, distance
from text_cases import CASES, FOLDER, OUTPUTS, STRINGS, TOKENIZERS, TOWERS, small_encoder

QUICK = ("hf_clip_new_eos", "hf_siglip_text", "openclip_custom", "bv_siglip2")


@pytest.mark.parametrize("name", full_except(QUICK, TOWERS))
def test_a_text_tower_gives_the_official_outputs(name: str) -> None:
    encoder, reference, tolerance = (
        text.load(FOLDER / name),
        arrays(FOLDER / name / "reference.npz"),
        CASES[name]["tolerance"],
    )
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


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.filterwarnings("ignore:keras_vit. .* were cut:UserWarning")
def test_all_strings_get_the_official_ids(name: str) -> None:
    ids = text.Tokenizer.load(FOLDER / name)(STRINGS)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, arrays(FOLDER / name / "reference.npz")["input_ids"])


@pytest.mark.filterwarnings("ignore:keras_vit. .* were cut:UserWarning")
def test_a_vocabulary_and_merges_give_the_ids_of_a_tokenizer_json(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(FOLDER / "tok_clip" / name, tmp_path)
    ids = text.Tokenizer.load(tmp_path)(STRINGS)
    np.testing.assert_array_equal(ids, arrays(FOLDER / "tok_clip" / "reference.npz")["input_ids"])


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


@pytest.mark.parametrize("texts", [[], None, 7, ["cat", None], [b"cat"]])
def test_other_things_than_texts_are_refused(texts: object) -> None:
    with pytest.raises(ValueError, match="texts must be a string or a list of at least one string"):
        small_encoder().embed(texts)


def test_an_encoder_without_a_tokenizer_says_how_to_get_one() -> None:
    encoder = text.load(FOLDER / "hf_clip")
    with pytest.raises(ValueError, match=r"no tokenizer, because there was none beside its file.*tokenizer=folder"):
        encoder.embed("cat")


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"another model's.*\[120, 14\].*Received: \[790, 14\]"):
        text.load(FOLDER / "hf_clip", tokenizer=FOLDER / "tok_clip")
    with pytest.raises(ValueError, match=r"\[790, 16, 5\]. Received: \[790, 16, 789\]"):
        small_encoder(end_token=5)


def test_a_folder_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="holds no tokenizer, which is one of"):
        text.Tokenizer.load(FOLDER / "hf_clip")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": 3}', b"\x00" * 100, b"<html>"])
def test_a_damaged_tokenizer_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        text.Tokenizer.load(tmp_path, 77)


def test_a_file_without_a_config_needs_the_facts(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "hf_clip" / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match="do not say num_heads, activation"):
        text.load(tmp_path)
    encoder = text.load(tmp_path, config={"num_heads": 3, "activation": "gelu_quick"})
    assert encoder.config == text.load(FOLDER / "hf_clip").config


def test_a_config_of_metaclip_2_is_refused(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "hf_clip" / "model.safetensors", tmp_path)
    config = json.loads((FOLDER / "hf_clip" / "config.json").read_text())
    config["text_config"]["model_type"] = "metaclip_2_text_model"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="MetaCLIP 2 has another tokenizer"):
        text.load(tmp_path)


def test_the_image_tower_of_a_naflex_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="NaFlex model takes flat patches"):
        converters.load(FOLDER / "hf_siglip2_naflex")


def test_a_missing_and_a_foreign_tensor_are_both_named(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "hf_clip_text" / "model.safetensors")
    tensors["mystery"] = tensors.pop("final_layer_norm.bias")
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(FOLDER / "hf_clip_text" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*no tensor for encoder_norm/beta.*mystery is left over"):
        text.load(tmp_path)


def test_a_file_of_images_alone_has_no_text_tower(tmp_path: Path) -> None:
    path = converters.save(zoo.load("digits"), tmp_path / "digits.npz", format="google")
    with pytest.raises(CheckpointError, match="no format is known by its tensors"):
        text.load(path)


def test_an_encoder_is_not_quantized_by_keras() -> None:
    with pytest.raises(NotImplementedError, match="not for keras_vit's models"):
        small_encoder().quantize("int8")


def test_texts_that_are_no_valid_unicode_are_refused() -> None:
    with pytest.raises(ValueError, match=r"texts must be valid Unicode. Received: 'a \\ud800'"):
        small_encoder().embed(["cat", "a \ud800"])
