"""Every format gives the results of its own code, at its own resolution and at others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy import ndimage

import reference_cases as reference
from format_cases import FACTS, at, computed, load, path_of, sizes
from keras_vit import converters, position
from keras_vit._util import files
from keras_vit.converters.containers import open_container
from keras_vit.converters.table import load_table
from marks import full_except
from model_weights import assert_same_bits, values
from tiny_models import built

CASES = list(reference.CASES)
ONE_SIZE, RESIZED = reference.of_kind("official_npz"), reference.of_kind("official_npz_interpolation")
BIG_VISION = reference.of_kind("big_vision_npz")
IN_FLOAT64 = [*ONE_SIZE[::2], *BIG_VISION[::2]]
OF_A_FORMAT = {"google": "vit_token", "big_vision": "bv_tok_rep", "huggingface": "hf_cls_v5", "timm": "timm_token"}
METHODS = {"google": "official", "big_vision": "official", "huggingface": "bicubic", "timm": "bicubic-antialias"}

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
    """Return what the official code told of a case: the size, and that it loaded one without pre_logits."""
    size = {"image_size": reference.CASES[name]["image_size"]} if name in RESIZED else {}
    return {"representation_size": None, **size} if name == "interp_prelogits_drop" else size


@pytest.mark.parametrize("name", full_except([name for name in CASES if name != "hybrid_r50"], CASES))
def test_a_path_is_enough_for_every_number_of_the_official_code(name: str, tmp_path: Path) -> None:
    path, bound = path_of(name, tmp_path), reference.tolerance(name)
    assert converters.detect(path) == KINDS[reference.CASES[name]["kind"]]
    if own := at(name, ""):
        assert not misses(load(name, tmp_path), own, name, bound)
    for prefix, size in sizes(name):
        want = at(name, prefix)
        want.pop("logits_load_pretrained", None)  # a new head is zero, as a test below shows
        model = converters.load(path, image_size=size, config=facts_of(name))
        table = want.pop("posemb", want.pop("pos_embed", None))
        if table is not None:
            assert reference.distance(values(model)["position/embedding"], table) <= bound
        assert not misses(model, want, name, bound), prefix


@pytest.mark.parametrize("name", full_except(IN_FLOAT64, ONE_SIZE + BIG_VISION))
def test_google_and_big_vision_are_met_in_float64(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path, dtype="float64")
    want = reference.expected(name, float64=True)
    images = reference.expected(name)["input"].astype(np.float64)
    # Cases without a bound: big_vision's attention pooling computes in float32 there.
    assert not misses(model, {"input": images, **want}, name, reference.tolerance(name, float64=True) or 1e-6)


@pytest.mark.parametrize("name", RESIZED)
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
    size = {"image_size": model.config.size}
    for larger in (converters.load(path, config=size, image_size=(48, 40)), model.resized((48, 40))):
        assert larger.config.position_method == METHODS[format]
        assert np.array_equal(values(larger)["position/embedding"], want)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras").resized((48, 40))
    assert np.array_equal(values(again)["position/embedding"], want)
    (tmp_path / "out").mkdir()
    name = f"file.{load_table(format).container}"
    converted = converters.convert(path, tmp_path / "out" / name, format=format, config=size, image_size=(48, 40))
    assert np.array_equal(values(converters.load(converted))["position/embedding"], want)


@pytest.mark.filterwarnings("ignore:keras_vit. .* files do not say:UserWarning")
@pytest.mark.parametrize("source", full_except(["google"], ["google", "huggingface", "timm"]))
def test_a_file_in_another_format_remembers_the_method_of_its_weights(source: str, tmp_path: Path) -> None:
    path = reference.checkpoint(OF_A_FORMAT[source])
    direct = converters.load(path, config={"image_size": 32}, image_size=(24, 56))
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
    assert all(text in str(caught.value) for text in (str(path), "converters.formats()"))


# Names of timm's and transformers' files.
OTHER_FAMILIES = {
    r"Keras 2 saved, .*tf_model.h5 .*docs/load-and-convert.md, From Hugging Face's TFViT": [
        "vit/vit/embeddings/cls_token:0"
    ],
    "PathoDuet": ["blocks.0.attn.qkv.weight", "cls_token", "patch_embed.proj.weight", "pretext_token"],
    "Swin": ["layers.0.blocks.1.attn.relative_position_bias_table", "layers.0.downsample.reduction.weight"],
    "Swin Transformer": ["swinv2.encoder.layers.0.blocks.0.attention.self.continuous_position_bias_mlp.0.weight"],
    "CoAtNet": ["stages.2.blocks.0.attn.rel_pos.relative_position_bias_table", "stages.0.blocks.0.conv1_1x1.weight"],
    "SAM": ["vision_encoder.layers.0.attn.rel_pos_h", "vision_encoder.neck.conv1.weight"],
    "ConvNeXt": ["convnext.encoder.stages.0.layers.0.dwconv.weight"],
    "LeViT": ["stages.0.blocks.0.attn.attention_biases"],
    r"NVIDIA's own format .*vit_\*_radio_\*": ["radio_model.model.patch_generator.cls_token.token"],
    "language model": ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"],
    "BERT": ["bert.embeddings.word_embeddings.weight", "bert.encoder.layer.0.output.dense.weight"],
    "BatchNorm": ["bn1.running_mean", "layer1.0.conv1.weight"],
}


def test_another_family_is_named_by_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for family, names in OTHER_FAMILIES.items():
        save_file({name: np.zeros(1, np.float32) for name in names}, path)
        with pytest.raises(converters.CheckpointError, match=f"those of an? .*{family}.*does not have it") as caught:
            converters.load(path)
        assert len(str(caught.value)) < 600 + len(str(path))


def test_several_class_tokens_in_a_format_of_one_are_refused(tmp_path: Path) -> None:
    tensors = load_file(reference.checkpoint("timm_token"))
    save_file(tensors | {"cls_token": tensors["cls_token"].repeat(8, axis=1)}, tmp_path / "model.safetensors")
    with pytest.raises(converters.CheckpointError, match="has several class tokens, and timm files have one: Pixio"):
        converters.load(tmp_path / "model.safetensors", config={"num_heads": 4})


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


# ---- heads and grids of Google's files


def test_a_new_head_is_zero_as_the_official_fine_tuning_leaves_it() -> None:
    for name in RESIZED:
        want, target = reference.expected(name), reference.CASES[name]["targets"][0]["name"]
        images = want[f"{target}/input"]
        model = converters.load(reference.checkpoint(name), image_size=images.shape[1:3], num_classes=3)
        assert not want[f"{target}/logits_load_pretrained"].any()
        assert not np.asarray(model(images)).any()
        assert model.output_shape == (None, 3)


def test_a_file_with_a_grid_that_is_not_square_is_read_when_its_size_is_told(tmp_path: Path) -> None:
    model = built(image_size=(16, 48))
    path = converters.save(model, tmp_path / "noted.npz", format="google")
    assert_same_bits(values(converters.load(path)), values(model))  # the file states its size
    np.savez(tmp_path / "wide.npz", **reference.arrays(path))
    path = tmp_path / "wide.npz"  # as others write it
    with pytest.raises(converters.CheckpointError, match="does not fill a square grid"):
        converters.load(path)
    again = converters.load(path, config={"image_size": (16, 48)})
    assert_same_bits(values(again), values(model))
    larger = converters.load(path, config={"image_size": (16, 48)}, image_size=(32, 32))
    table = values(model)["position/embedding"][0, 1:].reshape(2, 6, -1)
    want = ndimage.zoom(table, (2, 4 / 6, 1), order=1).reshape(16, -1)
    np.testing.assert_allclose(values(larger)["position/embedding"][0, 1:], want, rtol=0, atol=3e-7)


def test_the_head_is_kept_left_out_or_new_as_wanted() -> None:
    path = reference.checkpoint("vit_token")
    assert_same_bits(values(converters.load(path, num_classes=7)), values(converters.load(path)))
    want = reference.expected("vit_token")
    model = converters.load(path, num_classes=0)
    assert "head/kernel" not in values(model)
    assert reference.distance(model(want["input"]), want["pre_logits"]) <= reference.tolerance("vit_token")
    path = reference.checkpoint("vit_headless")
    new = values(converters.load(path, num_classes=9))
    assert new["head/kernel"].shape == (32, 9)
    assert not new.pop("head/kernel").any()
    assert not new.pop("head/bias").any()
    assert_same_bits(new, values(converters.load(path)))


def test_leaving_pre_logits_out_resets_the_head() -> None:
    path = reference.checkpoint("vit_prelogits")
    whole = values(converters.load(path))
    model = converters.load(path, config={"representation_size": None})
    rest = values(model)
    assert model.config.num_classes == 7
    assert not rest.pop("head/kernel").any()
    assert not rest.pop("head/bias").any()
    assert_same_bits(rest, {name: value for name, value in whole.items() if not name.startswith(("head/", "pre_log"))})


def test_a_head_of_zeros_is_said_once_and_read(tmp_path: Path) -> None:
    model = built()
    model.get_layer("head").kernel.assign(np.zeros((32, 5)))
    model.get_layer("head").bias.assign(np.zeros(5))
    path = converters.save(model, tmp_path / "ViT-B_16.npz", format="google")
    with pytest.warns(UserWarning, match="^keras_vit: the head of ViT-B_16.npz is all zeros") as seen:
        loaded = converters.load(path)
    assert_same_bits(values(loaded), values(model))
    assert [one.filename for one in seen] == [__file__]  # the warning shows the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converters.load(path, num_classes=3)  # a new head is zero on purpose


# ---- names and axes of tensors


NUMBERS = {
    "linen": ("LayerNorm_0", "LayerNorm_1", "Attention_0", "MlpBlock_0"),
    "scrambled": ("LayerNorm_3", "LayerNorm_7", "Attention_12", "MlpBlock_4"),
    "9 before 10": ("LayerNorm_9", "LayerNorm_10", "Attention_5", "MlpBlock_8"),
}


def test_children_of_a_block_are_numbered_in_any_way(tmp_path: Path) -> None:
    path = reference.checkpoint("vit_token")
    for case, numbers in NUMBERS.items():
        tensors = {}
        for name, value in reference.arrays(path).items():
            olds = ("LayerNorm_0", "LayerNorm_2", "Attention_1", "MlpBlock_3")
            used = [pair for pair in zip(olds, numbers, strict=True) if pair[0] in name and "encoderblock_" in name]
            tensors[name.replace(*used[0]) if used else name] = value
        assert tensors.keys() != reference.arrays(path).keys()
        np.savez(tmp_path / f"{case}.npz", **tensors)
        assert_same_bits(values(converters.load(tmp_path / f"{case}.npz")), values(converters.load(path)))


def test_blocks_are_ordered_by_number(tmp_path: Path) -> None:
    model = built(num_layers=12)
    path = converters.save(model, tmp_path / "deep.npz", format="google")
    tensors = reference.arrays(path)
    np.savez(tmp_path / "sorted.npz", **{name: tensors[name] for name in sorted(tensors)})  # 0, 1, 10, 11, 2 ...
    assert_same_bits(values(converters.load(tmp_path / "sorted.npz")), values(model))


def published(name: str) -> dict[str, np.ndarray]:
    """Return a case's tensors under the published names."""
    if name == "vit_token_linen":
        return reference.arrays(reference.checkpoint("vit_token"))
    tensors = reference.arrays(reference.checkpoint(name))
    prefix = reference.CASES[name]["prefix"] or ""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


@pytest.mark.filterwarnings("ignore:keras_vit. images of 35x38")
@pytest.mark.parametrize(
    "names",
    [
        ["vit_token_linen", "vit_prelogits", "hybrid_stem_only"],
        pytest.param(ONE_SIZE + RESIZED, marks=pytest.mark.full, id="all"),
    ],
)
def test_saving_what_was_loaded_gives_the_published_tensors_to_the_bit(names: list[str], tmp_path: Path) -> None:
    for name in names:
        path = converters.save(load(name, tmp_path), tmp_path / f"{name}.npz", format="google")
        assert_same_bits(reference.arrays(path), published(name))
        again = converters.load(path, config=FACTS.get(name))
        assert_same_bits(values(again), values(converters.load(reference.checkpoint(name), config=FACTS.get(name))))
    assert len(list(tmp_path.iterdir())) == len(names)


def test_group_norm_has_four_axes_as_published_or_one_as_flax_saves_it_today(tmp_path: Path) -> None:
    path = reference.checkpoint("hybrid_stem_only")
    tensors = reference.arrays(converters.save(converters.load(path), tmp_path / "saved.npz", format="google"))
    norms = {name for name in tensors if "gn_" in name}
    assert norms
    assert all(tensors[name].shape[:3] == (1, 1, 1) and tensors[name].ndim == 4 for name in norms)
    flat = {name: value.reshape(-1) if name in norms else value for name, value in tensors.items()}
    np.savez(tmp_path / "flat.npz", **flat)
    assert_same_bits(values(converters.load(tmp_path / "flat.npz")), values(converters.load(path)))


def test_other_precisions_are_written_as_float32(tmp_path: Path) -> None:
    path = reference.checkpoint("vit_token")
    double = converters.load(path, dtype="float64")
    assert double(reference.expected("vit_token")["input"]).dtype == "float64"
    saved = converters.save(double, tmp_path / "saved.npz", format="google")
    assert_same_bits(reference.arrays(saved), reference.arrays(path))


def test_a_table_of_ones_own_reads_and_writes(tmp_path: Path) -> None:
    text = (files.data_folder("converters") / "checkpoints" / "google.toml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.toml"
    mine.write_text(text.replace('"google"', '"mine"').replace("Transformer/encoder_norm/", "Transformer/last/"))
    model = built()
    path = converters.save(model, tmp_path / "mine.npz", format=str(mine))
    assert "Transformer/last/scale" in reference.arrays(path)
    assert_same_bits(values(converters.load(path, format=str(mine))), values(model))
