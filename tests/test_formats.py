"""Every format gives the results of its own code, at its own resolution and at others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import reference_cases as reference
from format_cases import at, computed, load, path_of, sizes
from keras_vit import converters, position
from keras_vit.converters.containers import open_container
from keras_vit.converters.table import load_table
from marks import full_except
from model_weights import assert_same_bits, values
from tiny_models import built

CASES = list(reference.CASES)
RESIZED = [(name, prefix, size) for name in CASES for prefix, size in sizes(name)]
OF_A_FORMAT = {"google": "vit_token", "big_vision": "bv_tok_rep", "huggingface": "hf_cls_v5", "timm": "timm_token"}
METHODS = {
    "google": "official",
    "big_vision": "official",
    "huggingface": "bicubic",
    "timm": "bicubic-antialias",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:keras_vit. images of 35x38:UserWarning"),
    pytest.mark.filterwarnings("ignore:keras_vit. the head of checkpoint.npz is all zeros:UserWarning"),
]


def kind(name: str) -> str:
    return str(reference.CASES[name]["kind"])


def misses(model: Any, want: dict[str, np.ndarray], name: str, bound: float) -> dict[str, float]:
    """Return the official outputs that our model misses, with the error of each."""
    images = want.pop("input" if "input" in want else "input_nhwc")
    got = computed(model, images, list(want), name)
    errors = {output: reference.distance(got[output].reshape(value.shape), value) for output, value in want.items()}
    return {output: error for output, error in errors.items() if not error <= bound}


@pytest.mark.parametrize("name", CASES)
def test_a_path_is_enough_for_every_number_of_the_official_code(name: str, tmp_path: Path) -> None:
    prefix, size = ("", None) if at(name, "") else sizes(name)[0]
    want = at(name, prefix)
    for key in ("posemb", "logits_load_pretrained"):  # tested below, and a new head is zero
        want.pop(key, None)
    options: dict[str, Any] = {"image_size": size} if size else {}
    if name == "interp_prelogits_drop":  # the official code loaded it into a model without pre_logits
        options |= {"config": {"representation_size": None}}
    model = converters.load(path_of(name, tmp_path), **options) if options else load(name, tmp_path)
    assert not misses(model, want, name, reference.tolerance(name))


@pytest.mark.parametrize(("name", "prefix", "size"), RESIZED)
def test_other_resolutions_are_interpolated_as_the_formats_own_code_does(
    name: str, prefix: str, size: tuple[int, int], tmp_path: Path
) -> None:
    want = at(name, prefix)
    want.pop("logits_load_pretrained", None)  # a new head is zero
    facts = {"representation_size": None} if name == "interp_prelogits_drop" else None
    model = converters.load(path_of(name, tmp_path), image_size=size, config=facts)
    bound = reference.tolerance(name)
    table = want.pop("posemb", want.pop("pos_embed", None))
    if table is not None:
        assert reference.distance(values(model)["position/embedding"], table) <= bound
    assert not misses(model, want, name, bound)


@pytest.mark.parametrize("name", reference.of_kind("official_npz") + reference.of_kind("big_vision_npz"))
def test_google_and_big_vision_are_met_in_float64(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path, dtype="float64")
    want = reference.expected(name, float64=True)
    images = reference.expected(name)["input"].astype(np.float64)
    # Cases without a bound: big_vision's attention pooling computes in float32 there.
    assert not misses(model, {"input": images, **want}, name, reference.tolerance(name, float64=True) or 1e-6)


@pytest.mark.parametrize(
    ("name", "prefix", "size"), [row for row in RESIZED if row[0] in reference.of_kind("official_npz_interpolation")]
)
def test_google_is_met_at_other_resolutions_in_float64(name: str, prefix: str, size: tuple[int, int]) -> None:
    exact = {key: value for key, value in reference.expected(name, float64=True).items() if key.startswith(prefix)}
    want = {key.removeprefix(prefix): value for key, value in exact.items()}
    facts = {"representation_size": None} if name == "interp_prelogits_drop" else None
    model = converters.load(reference.checkpoint(name), image_size=size, config=facts, dtype="float64")
    images = at(name, prefix)["input"].astype(np.float64)
    assert want
    # SciPy interpolates float32 embeddings in float64 and rounds the result to float32, and so do we.
    assert not misses(model, {"input": images, **want}, name, reference.tolerance(name, float64=True))


# ---- the method of interpolation


@pytest.mark.parametrize("format", full_except(["google"], METHODS))
def test_the_method_is_the_formats_own_wherever_the_model_goes(format: str, tmp_path: Path) -> None:
    path = reference.checkpoint(OF_A_FORMAT[format])
    model = converters.load(path)
    prefix = model.config.position_prefix_tokens
    want = position.resize(values(model)["position/embedding"], (6, 5), prefix_tokens=prefix, method=METHODS[format])
    for larger in (converters.load(path, image_size=(48, 40)), model.resized((48, 40))):
        assert larger.config.position_method == METHODS[format]
        assert np.array_equal(values(larger)["position/embedding"], want)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras").resized((48, 40))
    assert np.array_equal(values(again)["position/embedding"], want)
    (tmp_path / "out").mkdir()
    name = f"file.{load_table(format).container}"
    converted = converters.convert(path, tmp_path / "out" / name, format=format, image_size=(48, 40))
    assert np.array_equal(values(converters.load(converted))["position/embedding"], want)


@pytest.mark.filterwarnings("ignore:keras_vit. .* files do not say:UserWarning")
@pytest.mark.parametrize("target", METHODS)
@pytest.mark.parametrize("source", ["google", "huggingface", "timm"])
def test_a_file_in_another_format_remembers_the_method_of_its_weights(source: str, target: str, tmp_path: Path) -> None:
    path = reference.checkpoint(OF_A_FORMAT[source])
    direct = converters.load(path, image_size=(24, 56))
    detour = converters.load(converters.convert(path, tmp_path / "file", format=target), image_size=(24, 56))
    assert detour.config.position_method == METHODS[source]
    assert_same_bits(values(detour), values(direct))


# ---- recognising formats


@pytest.mark.parametrize("name", CASES)
def test_the_format_is_recognised_by_its_tensors(name: str, tmp_path: Path) -> None:
    of_kind = {"official_npz": "google", "official_npz_interpolation": "google", "big_vision_npz": "big_vision"}
    expected = of_kind | {"hf_vit": "huggingface", "timm_vit": "timm"}
    assert converters.detect(path_of(name, tmp_path)) == expected[kind(name)]
    assert converters.detect(path_of(name, tmp_path)) in converters.formats()


def test_an_unknown_file_is_described(tmp_path: Path) -> None:
    path = tmp_path / "detr.safetensors"
    save_file({"backbone.0.body.conv1.weight": np.zeros((2, 2), np.float32), "query": np.zeros(1)}, path)
    with pytest.raises(converters.CheckpointError, match=r"no format is known.*2 tensors.*backbone\.0\.body") as caught:
        converters.detect(path)
    assert str(path) in str(caught.value)
    for format in METHODS:
        assert format in str(caught.value)


def test_two_formats_in_one_file_are_told_apart_by_nobody(tmp_path: Path) -> None:
    both = reference.arrays(reference.checkpoint("vit_token"))
    with open_container(reference.checkpoint("timm_token")) as other:
        both |= {name: other.read(name) for name in other.headers}
    np.savez(tmp_path / "both.npz", **both)  # type: ignore[arg-type]
    with pytest.raises(converters.CheckpointError, match="more than one format.*google.*timm"):
        converters.detect(tmp_path / "both.npz")
    with pytest.raises(
        converters.CheckpointError, match=r"left over"
    ):  # and the other half of the tensors fits no variable
        converters.load(tmp_path / "both.npz", format="google")


@pytest.mark.parametrize("name", ["hf_cls_v4", "hf_cls_newlayout_v5", "timm_token", "timm_reg"])
def test_heads_that_no_tensor_tells_are_asked_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(reference.checkpoint(name).read_bytes())
    with pytest.raises(converters.CheckpointError, match=r"pass config=\{'num_heads'"):
        converters.load(path)
    told = {"num_heads": 4} | ({"position_prefix": False} if name == "timm_reg" else {})
    want = converters.load(reference.checkpoint(name))
    assert_same_bits(values(converters.load(path, config=told)), values(want))


@pytest.mark.parametrize("name", ["hf_cls_v5", "timm_gap_fcnorm"])
def test_a_folder_is_read_by_its_config_and_weights(name: str) -> None:
    path = reference.checkpoint(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert converters.load(path.parent / "").config == converters.load(path).config


def test_what_was_told_wins_over_config_json_and_both_over_the_table(tmp_path: Path) -> None:
    path = converters.save(built(activation="gelu_erf", norm_epsilon=1e-12), tmp_path / "model", format="huggingface")
    assert converters.read_config(path).activation == "gelu_erf"
    assert converters.read_config(path, config={"activation": "gelu_tanh"}).activation == "gelu_tanh"
