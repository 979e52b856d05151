"""Every format gives the results of its own code, at its own resolution and at others."""

from __future__ import annotations

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


KINDS = {
    "official_npz": "google",
    "official_npz_interpolation": "google",
    "big_vision_npz": "big_vision",
    "hf_vit": "huggingface",
    "timm_vit": "timm",
}


def misses(model: Any, want: dict[str, np.ndarray], name: str, bound: float) -> dict[str, float]:
    """Return the official outputs that our model misses, with the error of each."""
    images = want.pop("input" if "input" in want else "input_nhwc")
    got = computed(model, images, list(want), name)
    errors = {output: reference.distance(got[output].reshape(value.shape), value) for output, value in want.items()}
    return {output: error for output, error in errors.items() if not error <= bound}


def facts_of(name: str) -> dict[str, Any] | None:
    """Return what the official code told of a case: it loaded this one into a model without pre_logits."""
    return {"representation_size": None} if name == "interp_prelogits_drop" else None


@pytest.mark.parametrize("name", CASES)
def test_a_path_is_enough_for_every_number_of_the_official_code(name: str, tmp_path: Path) -> None:
    path, bound = path_of(name, tmp_path), reference.tolerance(name)
    assert converters.detect(path) == KINDS[reference.CASES[name]["kind"]]
    if own := at(name, ""):
        assert not misses(load(name, tmp_path), own, name, bound)
    for prefix, size in sizes(name):
        want = at(name, prefix)
        want.pop("logits_load_pretrained", None)  # a new head is zero, which test_converters.py shows
        model = converters.load(path, image_size=size, config=facts_of(name))
        table = want.pop("posemb", want.pop("pos_embed", None))
        if table is not None:
            assert reference.distance(values(model)["position/embedding"], table) <= bound
        assert not misses(model, want, name, bound), prefix


@pytest.mark.parametrize("name", reference.of_kind("official_npz") + reference.of_kind("big_vision_npz"))
def test_google_and_big_vision_are_met_in_float64(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path, dtype="float64")
    want = reference.expected(name, float64=True)
    images = reference.expected(name)["input"].astype(np.float64)
    # Cases without a bound: big_vision's attention pooling computes in float32 there.
    assert not misses(model, {"input": images, **want}, name, reference.tolerance(name, float64=True) or 1e-6)


@pytest.mark.parametrize("name", reference.of_kind("official_npz_interpolation"))
def test_google_is_met_at_other_resolutions_in_float64(name: str) -> None:
    for prefix, size in sizes(name):
        exact = {key: value for key, value in reference.expected(name, float64=True).items() if key.startswith(prefix)}
        assert exact
        model = converters.load(reference.checkpoint(name), image_size=size, config=facts_of(name), dtype="float64")
        want = {"input": at(name, prefix)["input"].astype(np.float64)}
        want |= {key.removeprefix(prefix): value for key, value in exact.items()}
        # SciPy interpolates float32 embeddings in float64 and rounds the result to float32, and so do we.
        assert not misses(model, want, name, reference.tolerance(name, float64=True)), prefix


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
@pytest.mark.parametrize("source", ["google", "huggingface", "timm"])
def test_a_file_in_another_format_remembers_the_method_of_its_weights(source: str, tmp_path: Path) -> None:
    path = reference.checkpoint(OF_A_FORMAT[source])
    direct = converters.load(path, image_size=(24, 56))
    for target in METHODS:
        (tmp_path / target).mkdir()
        detour = converters.load(
            converters.convert(path, tmp_path / target / "file", format=target), image_size=(24, 56)
        )
        assert detour.config.position_method == METHODS[source]
        assert_same_bits(values(detour), values(direct))


# ---- recognising formats


def test_an_unknown_file_is_described(tmp_path: Path) -> None:
    path = tmp_path / "detr.safetensors"
    save_file({"backbone.0.body.conv1.weight": np.zeros((2, 2), np.float32), "query": np.zeros(1)}, path)
    with pytest.raises(converters.CheckpointError, match=r"no format is known.*2 tensors.*backbone\.0\.body") as caught:
        converters.detect(path)
    assert all(text in str(caught.value) for text in (str(path), *METHODS))


def test_two_formats_in_one_file_are_told_apart_by_nobody(tmp_path: Path) -> None:
    both = reference.arrays(reference.checkpoint("vit_token"))
    with open_container(reference.checkpoint("timm_token")) as other:
        both |= {name: other.read(name) for name in other.headers}
    np.savez(tmp_path / "both.npz", **both)  # type: ignore[arg-type]
    with pytest.raises(converters.CheckpointError, match="more than one format.*google.*timm"):
        converters.detect(tmp_path / "both.npz")
    with pytest.raises(converters.CheckpointError, match="left over"):  # the other half fits no variable
        converters.load(tmp_path / "both.npz", format="google")


@pytest.mark.parametrize("name", ["hf_cls_v4", "timm_token", "timm_reg"])
def test_heads_that_no_tensor_tells_are_asked_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(reference.checkpoint(name).read_bytes())
    with pytest.raises(converters.CheckpointError, match=r"pass config=\{'num_heads'"):
        converters.load(path)
    told = {"num_heads": 4} | ({"position_prefix": False} if name == "timm_reg" else {})
    want = converters.load(reference.checkpoint(name))
    assert_same_bits(values(converters.load(path, config=told)), values(want))


def test_what_was_told_wins_over_config_json_and_both_over_the_table(tmp_path: Path) -> None:
    path = converters.save(built(activation="gelu_erf", norm_epsilon=1e-12), tmp_path / "model", format="huggingface")
    assert converters.read_config(path.parent) == converters.read_config(path)
    assert converters.read_config(path).activation == "gelu_erf"
    assert converters.read_config(path, config={"activation": "gelu_tanh"}).activation == "gelu_tanh"
