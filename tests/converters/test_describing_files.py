"""What the files beside the weights say: each key is read, refused, or named in a warning."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_vit import converters
from keras_vit.dense.fields import depth_anything_fields
from keras_vit.errors import CheckpointError
from keras_vit.model.vision_transformer import VisionTransformer
from model_weights import assert_same_bits, values
from places import DATA, ROOT
from tiny_models import built, tiny

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
TIMM = {"activation": "gelu_erf", "layer_scale": 0.1}
FAMILY = {
    "huggingface": {"activation": "gelu_erf", "norm_epsilon": 1e-12},
    "huggingface_clip": {
        "pre_norm": True,
        "patch_bias": False,
        "activation": "gelu_quick",
        "norm_epsilon": 1e-5,
        "num_classes": 0,
    },
    "huggingface_siglip": {"classifier": "map", "position_prefix": False, "num_classes": 0},
}


def bare(model: VisionTransformer, folder: Path, format: str) -> Path:
    """Write a model as another program does, without keras_vit's note and without a file beside it."""
    written = converters.save(model, folder / "written", format=format)
    (folder / "bare").mkdir()
    save_file(load_file(written), folder / "bare" / "model.safetensors")
    return folder / "bare"


def describe(folder: Path, name: str, **said: Any) -> None:
    (folder / name).write_text(json.dumps(said))


def loaded(path: Path, **options: Any) -> tuple[VisionTransformer, str]:
    """Load a file; return the model, and what warnings said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = converters.load(path, **options)
    return model, "\n".join(str(each.message) for each in caught)


def beside(folder: Path) -> dict[str, Any]:
    """Read the config.json that keras_vit wrote."""
    found: dict[str, Any] = json.loads((folder / "written" / "config.json").read_text())
    return found


@pytest.mark.parametrize("format", FAMILY)
def test_the_processors_of_transformers_5_are_in_one_file(format: str, tmp_path: Path) -> None:
    folder = bare(built(**FAMILY[format]), tmp_path, format)
    describe(folder, "config.json", **beside(tmp_path))
    image = json.loads((tmp_path / "written" / "preprocessor_config.json").read_text())
    image |= {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "resample": 0,
        "data_format": "channels_first",
    }
    describe(folder, "processor_config.json", image_processor=image, processor_class="CLIPProcessor")
    found, said = loaded(folder)
    ours = found.config.preprocessing
    assert (ours.mean, ours.std, ours.interpolation) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "nearest")
    assert not said
    # As transformers reads them: the file of all processors counts before the other, unless it has none of images.
    describe(folder, "preprocessor_config.json", **image | {"image_mean": [0.9, 0.9, 0.9]})
    assert loaded(folder)[0].config.preprocessing.mean == (0.1, 0.2, 0.3)
    describe(folder, "processor_config.json", processor_class="CLIPProcessor")
    assert loaded(folder)[0].config.preprocessing.mean[0] == 0.9


def test_a_config_json_of_old_timm_has_its_keys_on_top(tmp_path: Path) -> None:
    model = built(**TIMM, num_classes=3)
    folder = bare(model, tmp_path, "timm")
    old = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "num_features": 32, "input_size": [3, 32, 32]}
    old |= {key: list(value) for key, value in IMAGENET.items()} | {"crop_pct": 0.875, "interpolation": "bilinear"}
    describe(folder, "config.json", **old, first_conv="patch_embed.proj", labels=["a", "b", "c"])
    found, said = loaded(folder, config={"num_heads": 4})
    ours = found.config.preprocessing
    assert {"mean": ours.mean, "std": ours.std} == IMAGENET
    assert (ours.crop_fraction, ours.interpolation, ours.resize) == (0.875, "bilinear", "crop")
    assert found.config.labels == ("a", "b", "c")
    assert "classifier='token'" in said  # which these files do not say
    assert "preprocessing" not in said


@pytest.mark.parametrize("place", ["top", "pretrained_cfg"])
@pytest.mark.parametrize("names", [["cat", "dog", "owl"], {"0": "cat", "1": "dog", "2": "owl"}])
def test_the_labels_of_timm_are_read(place: str, names: Any, tmp_path: Path) -> None:
    folder = bare(built(**TIMM, num_classes=3), tmp_path, "timm")
    said = beside(tmp_path)
    labels = {"label_names": names, "label_descriptions": {"cat": "a small tiger"}}
    said["pretrained_cfg"] |= labels if place == "pretrained_cfg" else {"label_names": None}
    describe(folder, "config.json", **said, **labels if place == "top" else {})
    assert loaded(folder)[0].config.labels == ("cat", "dog", "owl")


def test_names_of_classes_that_are_too_few_are_not_taken_and_that_is_said(tmp_path: Path) -> None:
    folder = bare(built(**TIMM, num_classes=3), tmp_path, "timm")
    stated = beside(tmp_path)
    del stated["pretrained_cfg"]
    describe(folder, "config.json", **stated, label_names=["cat", "dog"])
    found, said = loaded(folder)
    assert found.config.labels is None
    assert "preprocessing={" in said  # what is assumed besides is said too
    assert "2 names of classes are stated for its 3 classes, and none is taken: ['cat', 'dog']" in said


def test_a_tower_of_timm_is_described_by_open_clip(tmp_path: Path) -> None:
    model = built(**TIMM, hidden_size=48, mlp_dim=96, num_heads=3, num_classes=16)
    folder = bare(model, tmp_path, "timm")
    tensors = {f"visual.trunk.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    save_file(tensors | {"logit_scale": np.ones((), "f4")}, folder / "open_clip_model.safetensors")
    tower = {"timm_model_name": "vit_tiny_patch16_224", "image_size": 32, "timm_pool": "token", "timm_proj": None}
    prepared = {"mean": CLIP["mean"], "std": CLIP["std"], "resize_mode": "squash"}
    describe(folder, "open_clip_config.json", model_cfg={"vision_cfg": tower}, preprocess_cfg=prepared)
    found, said = loaded(folder)
    assert (found.config.num_heads, found.config.projection_head) == (3, True)
    ours = found.config.preprocessing
    assert {"mean": ours.mean, "std": ours.std} == CLIP
    assert (ours.resize, ours.crop_fraction, ours.interpolation, ours.round_pixels) == ("squash", 1.0, "bicubic", True)
    assert "assumed" not in said
    assert_same_bits(values(found), values(model))
    describe(folder, "open_clip_config.json", model_cfg={"vision_cfg": tower | {"timm_proj": "mlp"}})
    with pytest.raises(CheckpointError, match=r"timm_proj 'mlp' is a head of two layers.*save_for_hf\(model\.visual\."):
        converters.load(folder)


@pytest.mark.parametrize("has_bias", [False, True])
def test_open_clips_own_projection_behind_a_tower_of_timm_is_the_head(tmp_path: Path, *, has_bias: bool) -> None:
    # BiomedCLIP, whose text tower is a BERT: open_clip/timm_model.py, forward: head(trunk(x)), one dense layer.
    model = built(**TIMM, hidden_size=48, mlp_dim=96, num_heads=3, num_classes=16)
    folder = bare(model, tmp_path, "timm")
    tensors = {f"visual.trunk.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    tensors["visual.head.proj.weight"] = tensors.pop("visual.trunk.head.weight")
    bias = tensors.pop("visual.trunk.head.bias")
    if has_bias:  # timm_proj_bias
        tensors["visual.head.proj.bias"] = bias
    (folder / "model.safetensors").unlink()
    save_file(tensors | {"text.proj.0.weight": np.ones(3, "f4")}, folder / "open_clip_model.safetensors")
    tower = {"timm_model_name": "vit_tiny_patch16_224", "image_size": 32, "timm_pool": "", "timm_proj": "linear"}
    text = {"hf_model_name": "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract", "hf_proj_type": "mlp"}
    describe(folder, "open_clip_config.json", model_cfg={"embed_dim": 16, "vision_cfg": tower, "text_cfg": text})
    found, said = loaded(folder)
    assert found.config.projection_head and "text (1)" in said
    wanted = values(model)
    assert_same_bits(values(found), wanted if has_bias else wanted | {"head/bias": np.zeros(16, "f4")})


@pytest.mark.parametrize(
    "others",
    [
        {"crop_pct": 0.9},
        {"include_top": True},
        {"do_flip_channel_order": True},
        {"rescale_offset": True},
        {"image_processor_type": "LevitImageProcessor"},
        {"something_new": 3},
    ],
)
def test_a_key_that_may_change_pixels_is_named(others: dict[str, Any], tmp_path: Path) -> None:
    model = built(**FAMILY["huggingface"])
    path = converters.save(model, tmp_path / "model", format="huggingface")
    prepared = json.loads((path.parent / "preprocessor_config.json").read_text())
    assert not loaded(path)[1]
    neutral = {"include_top": False, "do_pad": False, "do_convert_rgb": None, "processor_class": "CLIPProcessor"}
    describe(path.parent, "preprocessor_config.json", **prepared | neutral)
    assert not loaded(path)[1]
    describe(path.parent, "preprocessor_config.json", **prepared | others)
    [(key, value)] = others.items()
    assert f"{key}={value!r}" in loaded(path)[1]


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes load_in_4bit"),
        ({"load_in_8bit": True}, "bitsandbytes load_in_8bit"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "torchao"),
    ],
)
def test_quantized_weights_are_named(stated: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = bare(built(**FAMILY["huggingface"]), tmp_path, "huggingface")
    describe(folder, "config.json", **beside(tmp_path), quantization_config=stated)
    save_file({"packed": np.zeros((4, 1), "u1")}, folder / "model.safetensors")  # no format has these tensors
    with pytest.raises(CheckpointError, match=f"quantized by {named}"):
        converters.load(folder)


def test_what_no_file_says_of_an_image_is_named(tmp_path: Path) -> None:
    folder = bare(built(**FAMILY["huggingface"]), tmp_path, "huggingface")
    facts: dict[str, Any] = {"num_heads": 4, "activation": "gelu_erf", "norm_epsilon": 1e-12, "image_size": 32}
    shutil.copy(tmp_path / "written" / "config.json", folder)
    for config in (None, facts):  # with its config.json, and without
        said = loaded(folder, config=config)[1]
        for text in ("'mean': (0.5,)", "'std': (0.5,)", "'crop_fraction': 1.0", "'interpolation': 'bilinear'"):
            assert text in said
        (folder / "config.json").unlink(missing_ok=True)
    prepared = {**IMAGENET, "crop_fraction": 0.9, "interpolation": "bicubic", "resize": "crop"}
    found, said = loaded(folder, config=facts | {"preprocessing": prepared})
    assert not said
    assert found.config.preprocessing.crop_fraction == 0.9
    # One fact of the caller leaves the others to the file.
    shutil.copy(tmp_path / "written" / "config.json", folder)
    shutil.copy(tmp_path / "written" / "preprocessor_config.json", folder)
    ours = loaded(folder, config={"preprocessing": {"mean": (0.1,)}})[0].config.preprocessing
    assert (ours.mean, ours.std) == ((0.1,), (0.5,))


# ---- the grid of the positions


def test_a_grid_that_can_be_a_square_or_not_is_asked_for(tmp_path: Path) -> None:
    for format, rows, columns, options in (
        ("timm", 2, 8, TIMM),  # 16 patches, as 4 x 4
        ("timm", 3, 5, TIMM),  # 15 and the class token: 16
        ("meta_dinov2", 2, 8, TIMM | {"num_classes": 0}),
        ("google", 2, 8, {}),
        ("big_vision", 2, 8, {"position_prefix": False}),
    ):
        size = (rows * 8, columns * 8)
        model = built(**options, image_size=size)
        (tmp_path / format / str(rows)).mkdir(parents=True, exist_ok=True)
        path = tmp_path / format / str(rows)
        if format in ("google", "big_vision"):
            file = converters.save(model, path / "written.npz", format=format)
            with np.load(file) as tensors:
                np.savez(path / "file.npz", **tensors)
            path /= "file.npz"
        else:
            file = converters.save(model, path / "written.safetensors", format=format)
            save_file(load_file(file), path / "file.safetensors")
            path /= "file.safetensors"
        facts: dict[str, Any] = {"num_heads": 4} if "z" not in path.suffix else {}
        with pytest.raises(CheckpointError, match=r"does not say the grid.*'image_size': \(height, width\)"):
            converters.load(path, config=facts, image_size=size)
        found = converters.load(path, config=facts | {"image_size": size}, image_size=size)
        assert found.config.grid == (rows, columns)
        assert_same_bits(values(found), values(model))
        if facts:
            said = loaded(path, config=facts)[1]
            assert "image_size=(32, 32)" in said
            assert format != "timm" or f"position_prefix={rows != 3}" in said
        assert not loaded(file)[1]  # keras_vit's own has a note of it


# ---- depth


def test_a_name_says_whether_depth_is_metric_or_a_warning_says_what_is_assumed() -> None:
    def read(name: str, **stated: Any) -> tuple[float | None, str, str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fields = depth_anything_fields(Path(name), tiny(num_layers=4), stated)
        return fields["max_depth"], fields["activation"], "".join(str(each.message) for each in caught)

    for name in ("depth_anything_v2_vits.pth", "depth_anything_vitl14.pth"):
        assert read(name) == (None, "relu", "")
    for name in ("depth_anything_v2_metric_hypersim_vits.pth", "hypersim_v2.pth"):
        assert read(name) == (20.0, "sigmoid", "")
    assert read("depth_anything_v2_metric_vkitti_vitl.pth")[0] == 80.0
    assert read("my_v2.pth", max_depth=5.0) == (5.0, "sigmoid", "")
    depth, _, said = read("my_v2.pth")
    assert depth is None
    assert "max_depth=None is assumed, relative depth" in said
    with pytest.raises(CheckpointError, match="name says that it is metric: pass max_depth="):
        read("my_metric_v2.pth")


# ---- Meta's Perception Encoders in open_clip's names


def test_a_file_in_the_names_of_open_clip_without_a_last_norm_may_be_rotary(tmp_path: Path) -> None:
    width, names = 32, {"ln_pre.weight": 32, "ln_pre.bias": 32, "class_embedding": 32}
    shapes: dict[str, Any] = {name: (size,) for name, size in names.items()}
    shapes |= {"conv1.weight": (width, 3, 8, 8), "positional_embedding": (17, width)}
    for i in range(2):
        block = f"transformer.resblocks.{i}"
        shapes |= {f"{block}.{name}": (width,) for norm in (1, 2) for name in (f"ln_{norm}.weight", f"ln_{norm}.bias")}
        shapes |= {f"{block}.attn.in_proj_weight": (96, width), f"{block}.attn.in_proj_bias": (96,)}
        shapes |= {f"{block}.attn.out_proj.weight": (width, width), f"{block}.attn.out_proj.bias": (width,)}
        shapes |= {f"{block}.mlp.c_fc.weight": (64, width), f"{block}.mlp.c_fc.bias": (64,)}
        shapes |= {f"{block}.mlp.c_proj.weight": (width, 64), f"{block}.mlp.c_proj.bias": (width,)}
    random = np.random.default_rng(0)
    file = tmp_path / "pe.safetensors"
    save_file({f"visual.{name}": random.normal(size=shape).astype("f4") for name, shape in shapes.items()}, file)
    rotary = {
        "rotary_theta": 1e4,
        "rotary_grid": 4,
        "rotary_interleaved": True,
        "rotary_offset": 1.0,
        "rotary_axes": "xy",
    }
    facts = {"num_heads": 4, "activation": "gelu_erf"}
    with pytest.raises(CheckpointError) as error:
        converters.load(file, config=facts)
    assert all(f"'{name}': ..." in str(error.value) for name in ("classifier", *rotary))
    found, said = loaded(file, config={**facts, **rotary, "classifier": "token"})
    assert (found.config.rotary_theta, found.config.final_norm) == (1e4, "none")
    assert "norm_epsilon=1e-05" in said


@pytest.mark.parametrize("format", ["timm", "huggingface", "huggingface_clip"])
def test_a_config_json_of_another_image_size_is_named_with_both_numbers(format: str, tmp_path: Path) -> None:
    options = FAMILY.get(format, TIMM)
    folder = bare(built(**options, image_size=32, patch_size=8), tmp_path, format)
    text = json.dumps(beside(tmp_path)).replace("32, 32]", "64, 64]").replace('"image_size": 32', '"image_size": 64')
    (folder / "config.json").write_text(text.replace('"img_size": 32', '"img_size": 64'))
    match = r"model\.safetensors has 17 positions, but its config\.json says image_size .*64.*, of 64 patches: it desc"
    with pytest.raises(CheckpointError, match=match):
        converters.load(folder)
    found, _ = loaded(folder, config={"image_size": 32})
    assert found.config.size == (32, 32)


@pytest.mark.parametrize("kind", ["DINOV2Backbone", "DeiTBackbone"])
def test_another_class_of_keras_hub_is_named_before_its_weights_are_opened(kind: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "keras_hub" / "classifier", tmp_path / "preset")
    said = json.loads((tmp_path / "preset" / "config.json").read_text())
    describe(tmp_path / "preset", "config.json", **said | {"class_name": kind, "registered_name": f"keras_hub>{kind}"})
    with pytest.raises(CheckpointError, match=rf"config\.json describes a {kind} of Keras Hub, .* zoo\.load\("):
        converters.load(tmp_path / "preset")


def test_a_folder_of_transformers_for_tensorflow_leads_to_the_page_that_converts_it(tmp_path: Path) -> None:
    describe(tmp_path, "config.json", model_type="vit")
    with h5py.File(tmp_path / "tf_model.h5", "w") as file:
        file["vit/vit/embeddings/cls_token:0"] = np.zeros((1, 1, 8))
    with pytest.raises(
        CheckpointError, match=r"tf_model\.h5: its tensors are those of .* Keras 2 .*load-and-convert\.md"
    ):
        converters.load(tmp_path)
    page = (ROOT / "docs" / "load-and-convert.md").read_text(encoding="utf-8")
    assert "### From Hugging Face's TFViT" in page
