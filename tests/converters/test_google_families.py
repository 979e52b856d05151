"""FlexiViT, MLP-Mixer, BiT and SigLIP files give the results of their official code; data/google_families has them."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import command_line
from keras_vit import ViTConfig, converters, export, position, visualize
from keras_vit.converters.containers import open_container
from keras_vit.converters.source import open_checkpoint
from keras_vit.model.config import ResNetConfig
from keras_vit.model.cost import count
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train.masked_patch import MaskedPatchModel
from model_weights import assert_same_bits, values
from places import DATA
from reference_cases import arrays, distance
from tiny_models import OTHERS, VARIANTS, built, prepared, tiny

FOLDER = DATA / "google_families"
CASES: dict[str, dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text())
FORMATS = {
    "bv_flexivit": "big_vision",
    "timm_flexivit": "timm",
    "bv_mixer": "mixer",
    "vit_mixer": "mixer",
    "timm_mixer": "timm_mixer",
    "bit_npz": "bit",
    "bv_bit_v1": "big_vision_bit",
    "timm_bit": "timm_bit",
    "bv_siglip2": "big_vision",
    "bv_siglip_head": "big_vision",
}
# Official output -> name of our feature.
FEATURES = {"pre_logits": "pre_logits", "encoded": "encoder_norm", "tokens": "block_1"}
# FlexiViT's model resizes its positions with antialias, big_vision's load() does not; timm has one way.
METHODS = {"r0": "bilinear-antialias", "r3": "bilinear-antialias", "load": "official"}

pytestmark = pytest.mark.filterwarnings("ignore:keras_vit. checkpoint.npz has other parts:UserWarning")


def path_of(name: str) -> Path:
    return FOLDER / name / CASES[name]["checkpoint"]


def expected(name: str) -> dict[str, np.ndarray]:
    return arrays(FOLDER / name / "outputs.npz")


@functools.cache
def loaded(name: str) -> Any:
    """Return the model of a file in float64; tests do not change it."""
    size = {"image_size": 48} if "bit" in name else {}  # a ResNet's file does not state its size
    return converters.load(path_of(name), dtype="float64", **size)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_gives_the_numbers_of_its_official_code_and_is_written_back(name: str, tmp_path: Path) -> None:
    assert converters.detect(path_of(name)) == FORMATS[name]
    want, model = expected(name), loaded(name)
    if "input" in want:  # else the official code ran it at other sizes only
        images = want["input"].astype(np.float64)
        got = model.features(images, [*(FEATURES[key] for key in FEATURES if key in want), model.feature_names[-1]])
        errors = {
            key: distance(np.reshape(got[FEATURES[key]], want[key].shape), want[key]) for key in want if key in FEATURES
        }
        assert max(errors.values()) <= CASES[name]["tolerance"], errors
        output = got[model.feature_names[-1]]
        assert distance(output, want["output"]) <= CASES[name]["tolerance"]
        assert distance(output, want["output_float64"]) <= CASES[name]["tolerance_float64"]
    path = converters.save(model, tmp_path / path_of(name).name, format=FORMATS[name])
    assert converters.read_config(path) == model.config
    with open_container(path) as written, open_container(path_of(name)) as official:
        ours, theirs = (
            {re.sub("^(params/)?(img/)?", "", key): key for key in file.headers} for file in (written, official)
        )
        stacked = {key for key in ours if name == "bv_siglip2" and "encoderblock_" in key}  # written one by one
        for key in ours.keys() - stacked:
            assert_same_bits({key: written.read(ours[key])}, {key: official.read(theirs[key])})
        left_out = {key.partition("/")[0] for key in theirs.keys() - ours.keys() if "encoderblock/" not in key}
        assert left_out == set(CASES[name].get("ignored", ()))


def test_a_text_tower_is_left_out_by_name() -> None:
    with pytest.warns(UserWarning, match=r"other parts .* not read: b \(1\), t \(1\), txt \(\d+\)"):
        converters.load(path_of("bv_siglip2"))
    with open_checkpoint(path_of("bv_siglip_head")) as checkpoint:
        assert {name.partition("/")[0] for name in checkpoint.tensors.other_parts} == {"b", "t", "txt"}


# ---- FlexiViT


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "targets" in case])
def test_patches_and_positions_are_resized_as_the_official_code_does(name: str) -> None:
    errors = {}
    for target in CASES[name]["targets"]:
        sizes = {key: np.broadcast_to(target[key], 2).tolist() for key in ("image_size", "patch_size")}
        method = METHODS.get(target["name"].partition("_")[0])
        want = {key: value for key, value in expected(name).items() if key.startswith(target["name"])}
        if method in (None, "official"):  # the method of the file
            model = converters.load(path_of(name), **sizes)
        else:
            model = loaded(name).resized(sizes["image_size"], method, patch_size=sizes["patch_size"])
        output = model(want[f"{target['name']}/input"])
        errors[target["name"]] = distance(output, want[f"{target['name']}/output"])
    assert max(errors.values()) <= CASES[name]["tolerance"], errors


def test_resized_patches_and_positions_are_those_of_big_vision() -> None:
    want = arrays(FOLDER / "patch_resize.npz")
    kernel, table = want.pop("kernel"), want.pop("positions").reshape(1, 49, 8)
    methods = {"grid": "bilinear-antialias", "load_grid": "official"}
    errors = {}
    for name, value in want.items():
        kind, _, text = name.partition("/")
        size = tuple(map(int, np.broadcast_to([int(side) for side in text.split("x")], 2)))
        if kind == "patch":
            got = position.resize_patches(kernel, size)
        else:
            got = position.resize(table, size, prefix_tokens=0, method=methods[kind]).reshape(value.shape)
        assert got.dtype == value.dtype
        errors[name] = distance(got, value)
    # TensorFlow builds the official resize matrix in float32: 1.2e-5 was measured for 30 pixels.
    assert max(errors.values()) <= 5e-5, errors


def test_a_kernel_sees_the_same_in_patches_that_were_enlarged() -> None:
    # The least-squares solution is exact when a patch grows: B has full column rank.
    random = np.random.default_rng(1)
    kernel, patch = random.normal(size=(4, 6, 2, 5)), random.normal(size=(4, 6, 2))
    assert np.array_equal(position.resize_patches(kernel, (4, 6)), kernel)
    for method in position.METHODS:
        matrices = [
            position._MATRICES["bicubic-antialias" if "cubic-anti" in method else "bilinear"](2 * n, n) for n in (4, 6)
        ]
        larger = np.einsum("hi,wj,ijc->hwc", *matrices, patch)
        token = np.einsum("hwc,hwcd->d", larger, position.resize_patches(kernel, (8, 12), method=method))
        assert np.allclose(token, np.einsum("hwc,hwcd->d", patch, kernel), rtol=0, atol=1e-12), method


def test_an_impossible_patch_size_is_one_clear_error() -> None:
    with pytest.raises(TypeError, match="floating-point numbers"):
        position.resize_patches(np.ones((4, 4, 3, 8), int), 2)
    with pytest.raises(ValueError, match=r"\(height, width, channels, hidden\)"):
        position.resize_patches(np.ones((4, 4, 3)), 2)
    for changes, size, text in (
        ({}, 0, "patch_size must be an integer >= 1"),
        ({}, (4, 4, 4), "patch_size must be an integer >= 1"),
        ({}, 33, "the image is smaller than one patch"),
        (VARIANTS["hybrid"], 2, "patch_size is fixed in a hybrid"),
        (VARIANTS["relative positions"], 4, "are not interpolated"),
    ):
        with pytest.raises(ValueError, match=text):
            built(**changes, num_layers=1).resized(patch_size=size)


def test_other_patches_from_memory_a_keras_file_and_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = built(num_registers=3, position_prefix=False, num_layers=1)
    model.save("model.keras")
    resized = model.resized(patch_size=(16, 8))
    assert resized.config.grid == (2, 4)
    assert_same_bits(values(converters.load("model.keras", patch_size=(16, 8))), values(resized))
    command_line.run("resize", "model.keras", "resized.keras", "32", "--patch-size", "16x8")
    assert_same_bits(values(converters.load("resized.keras")), values(resized))


def test_one_model_is_exported_with_fewer_tokens(tmp_path: Path) -> None:
    model = built(num_layers=1, mlp_dim=32)
    report = export.tflite(model, tmp_path / "fast.tflite", quantize="none", patch_size=16)  # verified with 4 patches
    assert report.cosine > 0.9999
    with pytest.raises(ValueError, match="tflite: .*smaller than one patch"):
        export.tflite(model, tmp_path / "none.tflite", patch_size=64)


# ---- MLP-Mixer

MIXER = OTHERS["mixer"]


def test_a_mixer_is_counted_and_resized_with_as_many_tokens() -> None:
    model = built(**MIXER, class_token=True, layer_scale=0.1, num_layers=1)  # the token MLP mixes the class token too
    counted = count(model.config)
    assert counted.parameters == model.count_params()
    assert counted.flops > counted.block_flops > 0
    assert model.resized(64, patch_size=16).config.grid == model.config.grid


def test_what_a_mixer_cannot_do_is_one_clear_error(tmp_path: Path) -> None:
    model = built(**MIXER, num_layers=1)
    with pytest.raises(ValueError, match=r"Attention maps need .*tokens_mlp_dim"):
        model.attention_maps(prepared(model.config))
    for options in ({"image_size": 64}, {"patch_size": 4}):
        with pytest.raises(ValueError, match="A token MLP has weights for 16 tokens: .* which give 64"):
            model.resized(**options)
    with pytest.raises(ValueError, match="A token MLP has weights for 16 tokens"):
        converters.load(path_of("vit_mixer"), image_size=64)
    with pytest.raises(ValueError, match="attention=True needs attention"):
        export.tflite(built(**MIXER, class_token=True, num_layers=1), tmp_path / "model.tflite", attention=True)
    with pytest.raises(ValueError, match="position='relative' needs attention"):
        ViTConfig(tokens_mlp_dim=8, position="relative", position_place="shared")
    with pytest.raises(ValueError, match="rotary_theta needs attention"):
        ViTConfig(tokens_mlp_dim=8, rotary_theta=100.0)
    for changes, format, error in (
        (MIXER | {"gated_mlp": True}, "mixer", "gated_mlp"),
        (MIXER | {"mlp_norm": True}, "mixer", "mlp_norm"),
        (MIXER, "google", "no place for an MLP over the tokens"),
        ({}, "mixer", "no place for attention: .*prefix/cls"),
    ):
        with pytest.raises(converters.CheckpointError, match=error):
            converters.save(built(**changes, num_layers=1), tmp_path / "model.npz", format=format)
    assert not list(tmp_path.iterdir())


# ---- BiT

BIT = {name: value for name, value in OTHERS["BiT"].items() if name != "resnet"}
RESNET = OTHERS["BiT"]["resnet"]


def test_the_arithmetic_of_a_resnet_is_that_of_its_layers() -> None:
    for resnet in (RESNET, RESNET | {"version": 1}, RESNET | {"stage_widths": (32, 64)}):
        model = VisionTransformer(tiny(**BIT, resnet=resnet))
        counted = count(model.config)
        assert counted.parameters == model.count_params()
        kernels = sum(weight.shape.num_elements() for weight in model.weights if weight.path.endswith("kernel"))
        assert counted.file_bytes["float32"] - counted.file_bytes["float16"] == 2 * kernels
        assert counted.flops > counted.block_flops == 0
        assert counted.activation_bytes > 0
        assert model.feature_names[-2:] == ["pre_logits", "logits"]


def test_a_resnet_takes_images_of_any_size(tmp_path: Path) -> None:
    model = built(**BIT | {"hidden_size": 128}, image_size=16, resnet=RESNET | {"num_layers": (1,)})
    model.save(tmp_path / "model.keras")
    again = converters.load(tmp_path / "model.keras", image_size=(40, 64))
    assert again.config.grid == (10, 16)
    assert_same_bits(values(again), values(model))


def test_what_a_resnet_cannot_do_is_one_clear_error(tmp_path: Path) -> None:
    model = built(**BIT, resnet=RESNET)
    for call in (model.attention_maps, functools.partial(visualize.class_attention, model)):
        with pytest.raises(ValueError, match=r"Attention maps need .* no blocks \(num_layers=0\)"):
            call(prepared(model.config))
    with pytest.raises(ValueError, match="Masked patch prediction"):
        MaskedPatchModel(model)
    with pytest.raises(converters.CheckpointError, match="no place for a ResNet of version 2"):
        converters.save(model, tmp_path / "model.npz", format="google")
    with pytest.raises(converters.CheckpointError, match="no place for a hybrid's ResNet"):
        converters.save(built(**BIT, resnet=RESNET | {"version": 1}), tmp_path / "model.npz", format="bit")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"needs hidden_size=256.* Received: hidden_size=64"):
        tiny(**BIT | {"hidden_size": 64}, resnet=RESNET)
    with pytest.raises(ValueError, match="num_layers=0"):
        tiny(num_layers=0)
    with pytest.raises(ValueError, match="version must be one of"):
        ResNetConfig(version=3)


def test_a_file_with_numbered_layers_is_read_like_the_published_ones(tmp_path: Path) -> None:
    tensors = {}
    for number, (name, value) in enumerate(arrays(path_of("bit_npz")).items()):
        for layer in ("group_norm", "standardized_conv2d"):
            name = name.replace(f"{layer}/", f"{layer}_{number}/")
        tensors[name] = value
    np.savez(tmp_path / "numbered.npz", **tensors)
    with open_checkpoint(tmp_path / "numbered.npz") as numbered, open_checkpoint(path_of("bit_npz")) as published:
        assert numbered.config == published.config
        assert numbered.tensors.sources.keys() == published.tensors.sources.keys()
        for variable, source in numbered.tensors.sources.items():
            same = published.container.read(published.tensors.sources[variable].tensor)
            assert np.array_equal(numbered.container.read(source.tensor), same)
