"""Further families of models: their files give the official outputs, and are written back as they were.

The cases in tests/data/families were written and run by timm 1.0.31 and transformers 5.23 and 5.24; manifest.json has
what each tests. Outputs are compared by the largest difference over the largest value.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_vit import Preprocessing, converters, visualize
from keras_vit.converters.table import load_table
from keras_vit.errors import CheckpointError
from keras_vit.export.server import model_function
from keras_vit.model.layers.position_variants import Rotary, RotaryFrequencies
from keras_vit.model.preprocess import is_height_first, prepare, size_before_crop
from keras_vit.train.planner import plan
from model_weights import assert_same_bits
from model_weights import values as weights_of
from places import DATA
from reference_cases import arrays, distance
from tiny_models import FAMILIES, built, prepared

FOLDER = DATA / "families"
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in json.loads((FOLDER / "manifest.json").read_text())}
FILES = [name for name, case in CASES.items() if "float32" in case]
PREPROCESS = [name for name in CASES if name.startswith("preprocess")]
# The reference's names of the model's output, the first that a case has.
OUTPUTS = ("logits", "image_features", "image_embeds", "output", "pooler_output", "last_hidden_state")
FORMATS = {
    "hf_aimv2": "huggingface_aimv2",
    "hf_clip": "huggingface_clip",
    "hf_siglip": "huggingface_siglip",
    "hf_deit": "huggingface_deit",
    "hf_dinov2_reg": "huggingface_dinov2_registers",
    "hf_dinov2": "huggingface_dinov2",
    "hf_dinov3": "huggingface_dinov3",
    "hf_mae": "huggingface",
    "hf_pixio": "huggingface_pixio",
    "timm_": "timm_eva",
}
OTHER_PARTS = pytest.mark.filterwarnings("ignore:keras_vit. .* has other parts:UserWarning")
pytestmark = OTHER_PARTS


def format_of(name: str) -> str:
    """Return the format of a case."""
    return next(format for start, format in FORMATS.items() if name.startswith(start))


def wanted(case: dict[str, np.ndarray], prefix: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return the images of a case and the official output, at the file's resolution or at another one."""
    images = case[f"{prefix}input_nhwc"]
    return images, next(case[prefix + key] for key in OUTPUTS if prefix + key in case)


def output(model: Any, images: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return what a case compares: the model's output, or all tokens."""
    found = model(images) if want.ndim == 2 else model.features(images, ["encoder_norm"])["encoder_norm"]
    return np.asarray(found)


def plain(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors that are read, without the prefix that the two versions of transformers differ in."""
    ignored = ("text_", "logit_", "decoder.")
    return {
        key.removeprefix("vision_model.").removeprefix("vit."): value
        for key, value in tensors.items()
        if not key.startswith(ignored) and not key.endswith(("mask_token", "position_ids"))
    }


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_the_official_outputs_and_is_written_back_with_the_same_tensors(name: str, tmp_path: Path) -> None:
    assert converters.detect(FOLDER / name) == format_of(name)
    model, case = converters.load(FOLDER / name), arrays(FOLDER / name / "reference.npz")
    for prefix in ("", *(f"{target}/" for target in CASES[name]["targets"])):
        images, want = wanted(case, prefix)
        resized = model.resized(images.shape[1:3]) if prefix else model
        assert distance(output(resized, images, want), want) <= CASES[name]["float32"], prefix
    if CASES[name]["float64"]:
        images, exact = case["input_nhwc"].astype(np.float64), arrays(FOLDER / name / "reference_f64.npz")
        want = next(exact[key] for key in OUTPUTS if key in exact)
        double = converters.load(FOLDER / name, dtype="float64")
        assert distance(output(double, images, want), want) <= CASES[name]["float64"]

    converters.save(model, tmp_path / "again", format=format_of(name))
    before, after = (plain(load_file(path / "model.safetensors")) for path in (FOLDER / name, tmp_path / "again"))
    if model.config.num_registers and format_of(name).startswith("huggingface_dinov2"):
        # the class token's row is folded
        prefix = next(key for key in before if key.endswith("cls_token")).removesuffix("cls_token")
        table = before[f"{prefix}position_embeddings"].copy()
        before[f"{prefix}cls_token"] = before[f"{prefix}cls_token"] + table[:, :1]
        table[:, 0] = 0
        before[f"{prefix}position_embeddings"] = table
    assert_same_bits(after, before)
    again = converters.load(tmp_path / "again")
    images = prepared(model.config)
    np.testing.assert_array_equal(np.asarray(again(images)), np.asarray(model(images)))
    assert again.config == model.config
    assert_same_meaning(FOLDER / name / "config.json", tmp_path / "again" / "config.json")


# What the official classes read from config.json, beside the sizes, must be what they wrote.
MEANING = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size", "image_size"),
    *("layer_norm_eps", "mlp_ratio", "use_swiglu_ffn", "use_gated_mlp", "num_register_tokens", "rope_theta"),
    *("rms_norm_eps", "use_head"),
    *("query_bias", "key_bias", "value_bias", "vision_use_head", "architecture", "num_classes", "global_pool"),
)


def assert_same_meaning(before: Path, after: Path) -> None:
    old, new = (json.loads(path.read_text()) for path in (before, after))
    old, new = ({**values, **values.get("vision_config", {})} for values in (old, new))
    if "architecture" in old:  # a size that timm does not have is written with the smallest name of its kind
        old["architecture"] = new["architecture"]
    assert {key: new.get(key) for key in MEANING if key in old} == {key: old[key] for key in MEANING if key in old}


def test_tensors_of_other_parts_are_named() -> None:
    for name, first in (("hf_clip_full", "logit_scale"), ("hf_mae_pretraining", "decoder")):
        with pytest.warns(UserWarning, match=f"other parts than the model, which are not read: .*{first}"):
            converters.load(FOLDER / name)


# ---- preprocessing


def preprocessing_of(name: str) -> Preprocessing:
    """Return the preprocessing that a format reads from the files of a case."""
    source = {"hf": f"huggingface_{name.rpartition('_')[2]}", "timm": "timm", "bv": "big_vision"}[name.split("_")[1]]
    table = load_table(source)
    values = {"pretrained_cfg": CASES[name]["config"]}
    if source.startswith("huggingface"):
        values = {"preprocessor": json.loads((FOLDER / name / "preprocessor_config.json").read_text())}
    fields = {} if table.json is None else table.json.read(values).get("preprocessing", {})
    return dataclasses.replace(table.defaults.get("preprocessing", Preprocessing()), **fields)


@pytest.mark.parametrize("name", PREPROCESS)
def test_preprocessing_is_the_official_one(name: str) -> None:
    case, found = arrays(FOLDER / name / "reference.npz"), preprocessing_of(name)
    for number in range(2):
        image = case[f"image_{number}"]
        received = prepare(image, image_size=(32, 32), num_channels=3, preprocessing=found)[0]
        byte, steps = CASES[name]["one_byte_step"], 1
        if f"output_pil_{number}" in case:
            np.testing.assert_allclose(received, case[f"output_pil_{number}"], rtol=0, atol=1e-3 * byte)
            # torchvision begins with the width even where Pillow 13 does not.
            steps = 3 if is_height_first(image.shape, size_before_crop((32, 32), found)) else 1
        # big_vision truncates to bytes, which keras_vit does not; others differ in few pixels, by one.
        assert np.abs(received - case[f"output_{number}"]).max() <= 1.0001 * steps * byte


def test_sizes_of_the_preprocessing_come_back(tmp_path: Path) -> None:
    keys = ("size", "crop_size", "do_center_crop", "image_mean", "image_std", "resample", "image_processor_type")
    for name in ("hf_deit", "hf_dinov2", "hf_clip_full", "hf_siglip_full"):
        converters.save(converters.load(FOLDER / name), tmp_path / name, format=format_of(name))
        files = [path / "preprocessor_config.json" for path in (FOLDER / name, tmp_path / name)]
        old, new = (json.loads(path.read_text()) for path in files)
        assert {key: new.get(key) for key in keys} == {key: old.get(key) for key in keys}, name


PROCESSORS: list[tuple[str, dict[str, Any], dict[str, Any] | str]] = [
    # Old files have single numbers, which DeiT's processor takes for both sides and CLIP's for the shorter one.
    ("huggingface_deit", {"size": 256, "crop_size": 224}, {"resize": "squash", "crop_fraction": 0.875}),
    ("huggingface_clip", {"size": 256, "crop_size": 224}, {"resize": "crop", "crop_fraction": 0.875}),
    ("huggingface_dinov2", {"size": {"height": 32, "width": 32}}, {"resize": "squash", "crop_fraction": 1.0}),
    (
        "huggingface_dinov2",
        {"size": {"shortest_edge": 36}, "crop_size": {"height": 48, "width": 32}},
        {"resize": "crop", "crop_fraction": 32 / 36},
    ),
    (
        "huggingface_deit",
        {"size": {"height": 40, "width": 60}, "crop_size": {"height": 32, "width": 32}},
        "size and crop_size have the same aspect ratio",
    ),
    ("huggingface_siglip", {"rescale_factor": 1 / 127.5}, "rescale_factor is read only as"),
]


def test_a_processors_sizes_are_those_of_its_class() -> None:
    for format, values, want in PROCESSORS:
        table = load_table(format)
        if isinstance(want, str):
            with pytest.raises(CheckpointError, match=want):
                table.json.read({"preprocessor": values})
            continue
        read = table.json.read({"preprocessor": values})["preprocessing"]
        found = dataclasses.replace(table.defaults["preprocessing"], **read)
        assert {name: getattr(found, name) for name in want} == want


# ---- files without a config.json, and names of other writers


def test_values_that_transformers_leaves_out_of_a_nested_config_are_its_defaults() -> None:
    for kind, gelu, epsilon in (("siglip", "gelu_tanh", 1e-6), ("clip", "gelu_quick", 1e-5)):
        values = {"vision_config": {"model_type": f"{kind}_vision_model"}}  # google/siglip-base-patch16-224 has no more
        read = load_table(f"huggingface_{kind}").json.read(values)
        assert read == {"num_heads": 12, "activation": gelu, "norm_epsilon": epsilon}


def test_tensors_that_change_nothing_are_not_needed(tmp_path: Path) -> None:
    # A SiglipForImageClassification whose config has vision_use_head: the pooling is in the file, and is not used.
    tensors = load_file(FOLDER / "hf_siglip_cls" / "model.safetensors")
    pooling = load_file(FOLDER / "hf_siglip_vision" / "model.safetensors")
    pooling = {f"vision_model.{key}": value for key, value in pooling.items() if key.startswith("head.")}
    assert len(pooling) == 11
    save_file(tensors | pooling, tmp_path / "model.safetensors")
    shutil.copy(FOLDER / "hf_siglip_cls" / "config.json", tmp_path)
    images, want = wanted(arrays(FOLDER / "hf_siglip_cls" / "reference.npz"))
    assert distance(converters.load(tmp_path)(images), want) <= CASES["hf_siglip_cls"]["float32"]


def test_a_dinov3_without_registers_or_with_key_biases_comes_back(tmp_path: Path) -> None:
    # DINOv3ViTConfig() has no registers: its files have a tensor for none of them.
    rotary = FAMILIES["rotary"] | {"layer_scale": 0.1, "num_classes": 0, "norm_epsilon": 1e-5, "activation": "gelu_erf"}
    model = built(**rotary | {"num_registers": 0, "key_bias": True})
    converters.save(model, tmp_path, format="huggingface_dinov3")
    tensors = load_file(tmp_path / "model.safetensors")
    assert "layer.0.attention.k_proj.bias" in tensors
    none = np.zeros((1, 0, model.config.hidden_size), np.float32)
    save_file(tensors | {"embeddings.register_tokens": none}, tmp_path / "model.safetensors")
    images = prepared(model.config)
    np.testing.assert_array_equal(np.asarray(converters.load(tmp_path)(images)), np.asarray(model(images)))


def split(name: str, folder: Path) -> list[str]:
    """Write a case as three files and return their names."""
    tensors = list(load_file(FOLDER / name / "model.safetensors").items())
    files = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        save_file(dict(tensors[number::3]), folder / file)
    shutil.copy(FOLDER / name / "config.json", folder)
    return files


@pytest.mark.parametrize("name", ["hf_dinov2", "hf_siglip_vision"])
def test_a_checkpoint_in_several_files_is_one_and_each_is_needed(name: str, tmp_path: Path) -> None:
    files = split(name, tmp_path)
    images, want = wanted(arrays(FOLDER / name / "reference.npz"))
    for path in (tmp_path, tmp_path / files[1]):  # any of the files stands for all
        assert distance(converters.load(path)(images), want) <= CASES[name]["float32"]
    for lost, file in enumerate(files):
        (tmp_path / file).rename(tmp_path / "lost")
        for path in (tmp_path, tmp_path / files[lost - 1]):
            with pytest.raises(CheckpointError, match=f"lacks 1 of the 3 files of this checkpoint: '{file}'"):
                converters.load(path)
        (tmp_path / "lost").rename(tmp_path / file)


def test_a_whole_file_beside_one_in_parts_is_read_with_a_warning(tmp_path: Path) -> None:
    files = split("hf_dinov2", tmp_path)
    tensors = load_file(FOLDER / "hf_dinov2" / "model.safetensors")
    save_file({name: np.zeros_like(array) for name, array in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=rf"holds model.safetensors, which is read, and another .*{files[0]}"):
        model = converters.load(tmp_path)
    assert not any(array.any() for array in model.get_weights())
    images, want = wanted(arrays(FOLDER / "hf_dinov2" / "reference.npz"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*another checkpoint in several files")
        assert distance(converters.load(tmp_path / files[0])(images), want) <= CASES["hf_dinov2"]["float32"]


def test_a_file_that_only_the_index_names_is_missed(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "hf_siglip_vision" / "model.safetensors")
    head = {name: tensors.pop(name) for name in list(tensors) if "head." in name}
    save_file(tensors, tmp_path / "a.safetensors")
    shutil.copy(FOLDER / "hf_siglip_vision" / "config.json", tmp_path)
    weight_map = dict.fromkeys(head, "b.safetensors") | dict.fromkeys(tensors, "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 files of this checkpoint: 'b\.safetensors'"):
        converters.load(tmp_path)


def test_metas_own_names_of_dinov2_are_read(tmp_path: Path) -> None:
    # Renamed from Hugging Face's case by the table in transformers' conversion script.
    tensors = load_file(FOLDER / "hf_dinov2_reg" / "model.safetensors")
    renamed = {"mask_token": tensors["embeddings.mask_token"], "register_tokens": tensors["embeddings.register_tokens"]}
    renamed |= {"cls_token": tensors["embeddings.cls_token"], "pos_embed": tensors["embeddings.position_embeddings"]}
    for kind in ("weight", "bias"):
        renamed[f"patch_embed.proj.{kind}"] = tensors[f"embeddings.patch_embeddings.projection.{kind}"]
        renamed[f"norm.{kind}"] = tensors[f"layernorm.{kind}"]
    for i in range(2):
        layer = f"encoder.layer.{i}."
        for kind in ("weight", "bias"):
            parts = [tensors[f"{layer}attention.attention.{part}.{kind}"] for part in ("query", "key", "value")]
            renamed[f"blocks.{i}.attn.qkv.{kind}"] = np.concatenate(parts)
            renamed[f"blocks.{i}.attn.proj.{kind}"] = tensors[f"{layer}attention.output.dense.{kind}"]
            for part in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                renamed[f"blocks.{i}.{part}.{kind}"] = tensors[f"{layer}{part}.{kind}"]
        for number in (1, 2):
            renamed[f"blocks.{i}.ls{number}.gamma"] = tensors[f"{layer}layer_scale{number}.lambda1"]
    save_file(renamed, tmp_path / "dinov2.safetensors")
    model = converters.load(tmp_path / "dinov2.safetensors", config={"num_heads": 4})
    images, want = wanted(arrays(FOLDER / "hf_dinov2_reg" / "reference.npz"))
    assert distance(np.asarray(model(images)), want) <= CASES["hf_dinov2_reg"]["float32"]
    # With the head "linear4" of torch.hub's classifiers: class tokens of the last four blocks, mean of the last one's.
    for i in range(2):
        blocks = {name: array for name, array in renamed.items() if name.startswith(f"blocks.{i}.")}
        renamed |= {name.replace(f"blocks.{i}.", f"blocks.{i + 2}."): array for name, array in blocks.items()}
    random = np.random.default_rng(0)
    head = {"weight": random.normal(size=(3, 5 * 32)).astype("f4"), "bias": random.normal(size=3).astype("f4")}
    together = {f"backbone.{name}": array for name, array in renamed.items()}
    save_file(together | {f"linear_head.{name}": array for name, array in head.items()}, tmp_path / "lc.safetensors")
    model = converters.load(tmp_path / "lc.safetensors", config={"num_heads": 4})
    tokens = model.features(images)
    normed = [np.asarray(model.get_layer("encoder_norm")(tokens[f"block_{i}"])) for i in range(4)]
    read = [*(x[:, 0] for x in normed), normed[3][:, 1 + model.config.num_registers :].mean(axis=1)]
    want = np.concatenate(read, axis=1) @ head["weight"].T + head["bias"]
    assert distance(np.asarray(model(images)), want) < 1e-5  # measured: 3e-7
    assert (model.config.classifier, model.config.token_blocks, model.config.mean_blocks) == ("token_gap", 4, 1)
    written = load_file(converters.save(model, tmp_path / "written.safetensors", format="meta_dinov2"))
    again = {f"linear_head.{name}": array for name, array in head.items()} | together
    again["backbone.mask_token"] = np.zeros((1, 32), np.float32)  # for training alone: it is not kept
    assert written.keys() == again.keys()
    assert all(
        np.array_equal(written[name], array)
        for name, array in again.items()
        if name.split(".")[1] not in ("pos_embed", "cls_token")
    )
    np.testing.assert_array_equal(converters.load(tmp_path / "written.safetensors")(images), model(images))


def test_rotary_positions_are_not_guessed(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "timm_eva02" / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match="timm_eva format, whose tensors do not say rotary_theta"):
        converters.load(tmp_path / "model.safetensors", config={"num_heads": 4})


def test_a_packed_gate_is_told_from_a_plain_mlp_by_its_shape(tmp_path: Path) -> None:
    model = converters.load(FOLDER / "hf_dinov2_swiglu")
    converters.save(model, tmp_path / "timm", format="timm")
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    assert config["architecture"] == "vit_giant_patch14_dinov2"
    assert int(24 * config["model_args"]["mlp_ratio"]) == 128  # timm's width is that of both halves
    moved = converters.load(tmp_path / "timm")
    assert (moved.config.gated_mlp, moved.config.mlp_dim, moved.config.activation) == (True, 64, "silu")
    np.testing.assert_array_equal(*(np.asarray(one(prepared(model.config))) for one in (moved, model)))


SQUARE: dict[str, dict[str, Any]] = {
    "dinov2": {"layer_scale": 0.1, "activation": "gelu_erf"},
    "dinov2_registers": {"layer_scale": 0.1, "activation": "gelu_erf", "num_registers": 2},
    "clip": {"pre_norm": True, "patch_bias": False, "activation": "gelu_quick"},
    "siglip": {"classifier": "map", "class_token": False, "activation": "gelu_tanh"},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("timm", {"key_bias": False}, "one tensor for several variables.*qkv.bias"),
    ("google", {"key_bias": False}, "key_bias=False"),
    ("google", {"classifier": "unpooled", "class_token": True}, "classifier='unpooled'"),
    ("timm", {"classifier": "unpooled", "class_token": True}, "classifier='unpooled' with class_token=True"),
    ("huggingface", {"gated_mlp": True}, "gated MLP"),
    ("huggingface", {"rotary_theta": 100.0}, "rotary_theta=100.0"),
    ("huggingface", {"classifier": "token_gap"}, "classifier='token_gap'"),
    ("huggingface_dinov2", {"classifier": "gap", "layer_scale": 0.1, "mean_blocks": 2, "num_layers": 2}, "head/kernel"),
    ("timm", {"token_blocks": 2, "num_layers": 2}, "token_blocks=2"),
    ("google", {"token_blocks": 2, "num_layers": 2}, "token_blocks=2"),
    *(
        (
            f"huggingface_{kind}",
            {"num_classes": 0, "image_size": (16, 48), **fields},
            r"cannot express image_size=\(16, 48\).*square images alone.*timm",
        )
        for kind, fields in SQUARE.items()
    ),
    ("huggingface_deit", {}, "num_registers=0"),
    ("huggingface_deit", {"distilled": True, "num_classes": 0}, "num_classes=0"),
    ("huggingface_dinov2", {"layer_scale": 0.1}, "head/kernel"),
    (
        "huggingface_dinov2",
        {"num_classes": 0, "activation": "gelu_erf"},
        "have .*layer_scale1.lambda1.* not be recognised",
    ),
    ("huggingface_clip", {"pre_norm": True, "patch_bias": False}, "head/bias.* unless they are zero"),
    ("huggingface_siglip", {"classifier": "map", "position_prefix": False}, "attention pooling"),
    ("timm_eva", FAMILIES["class token and mean"], "key/bias"),
]


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    for format, changes, error in REFUSED:
        with pytest.raises(CheckpointError, match=error):
            converters.save(built(**{"num_layers": 1} | changes), tmp_path / "model", format=format)
    assert not list(tmp_path.rglob("*.safetensors"))


# ---- what every model can do


@pytest.mark.full
@pytest.mark.parametrize("kind", [*FAMILIES][::2])
def test_models_are_saved_served_and_planned(kind: str, tmp_path: Path) -> None:
    model = built(**FAMILIES[kind])
    images = prepared(model.config)
    want = np.asarray(model(images))
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(np.asarray(converters.load(tmp_path / "model.keras")(images)), want)
    assert distance(np.asarray(model_function(model)(images)["logits"]), want) < 1e-6  # its last block is shorter
    for weights in model.attention_maps(images):
        np.testing.assert_allclose(np.asarray(weights).sum(axis=-1), 1, atol=1e-5)
    assert model.resized((48, 32))(prepared(model.config.replace(image_size=(48, 32)))).shape == want.shape
    assert plan(model.config, batch_size=2)
    report = visualize.report(model, np.zeros((1, 32, 32, 3), np.uint8), tmp_path / "report.html").read_text()
    assert ("rotary positions" in report) == (model.config.rotary_theta is not None)


def test_rotary_positions_turn_pairs_of_patches_alike() -> None:
    # With equal tokens everywhere, a score depends on the offset of two patches alone; tokens in front are not turned.
    model = built("float64", **FAMILIES["rotary"] | {"num_layers": 1, "num_registers": 0})
    attention = model.get_layer("block_0").attention
    x = np.broadcast_to(np.random.default_rng(0).normal(size=32), (1, 17, 32))
    weights = np.log(np.asarray(attention.weights_of(x, x)))[0]
    scores = weights[:, 1:, 1:] - np.diagonal(weights, axis1=1, axis2=2)[:, 1:, None]  # beside the score of offset 0
    scores = scores.reshape(4, 4, 4, 4, 4)
    np.testing.assert_allclose(scores[:, 0, 0, 1, 2], scores[:, 2, 1, 3, 3], atol=1e-9)
    assert np.abs(scores[:, 0, 0, 0, 1] - scores[:, 0, 0, 1, 0]).max() > 1e-3


def test_a_tower_within_a_pair_is_read(tmp_path: Path) -> None:
    model = built(num_layers=2, activation="gelu_erf", norm_epsilon=1e-12, num_classes=0, classifier="token")
    converters.save(model, tmp_path / "plain", format="huggingface")
    plain = tmp_path / "plain"
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    for prefix, inside in (("encoder.", "encoder"), ("image_model.", "image_config")):
        folder = tmp_path / inside
        folder.mkdir()
        save_file(
            {prefix + name: value for name, value in tensors.items()} | {"decoder.lm_head.weight": np.zeros(1)},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps({inside: config}))
        prepares = {
            "image_mean": [0.1, 0.2, 0.3],
            "image_std": [0.4, 0.5, 0.6],
            "resample": 3,
            "size": {"shortest_edge": 40},
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(prepares))
        with pytest.warns(UserWarning, match="has other parts"):
            found = converters.load(folder)
        ours = found.config.preprocessing
        assert (ours.mean, ours.std, ours.interpolation) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic")
        x = prepared(model.config)
        np.testing.assert_allclose(found(x), model(x), atol=1e-6)


@pytest.mark.parametrize(
    ("grid", "offset", "axes"), [(3, 1.0, "xy"), (0, 0.0, "xy"), (3, 0.5, "yx"), (None, 1.0, "yx")]
)
def test_rotary_positions_turn_each_pair_by_its_coordinate(grid: int | None, offset: float, axes: Any) -> None:
    # arXiv 2104.09864, equation 34, with one coordinate for each half of the pairs, as complex numbers.
    rotary = Rotary((2, 5), 1, 100.0, trained_grid=grid, interleaved=True, offset=offset, axes=axes)
    x = np.random.default_rng(0).normal(size=(1, 1, 11, 8))
    want = x[0, 0, :, ::2] + 1j * x[0, 0, :, 1::2]
    for row in range(2):
        for column in range(5):
            places = []
            for number, side in ((row, 2), (column, 5)):
                centred = 2 * np.pi * (2 * (number + offset + 0.5) / side - 1)
                places.append(centred if grid is None else (number + offset) * (grid or side) / side)
            first, second = places[::-1] if axes == "xy" else places
            angles = [first, first / 10, second, second / 10]  # 100 ** (-1 / 2) is a tenth
            want[1 + 5 * row + column] *= np.exp(1j * np.array(angles))
    found = np.asarray(rotary.turn(keras.ops.convert_to_tensor(x)))[0, 0]
    np.testing.assert_allclose(found[:, ::2] + 1j * found[:, 1::2], want, atol=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
def test_learned_rotary_positions_turn_each_pair_by_both_coordinates(interleaved: bool) -> None:
    # arXiv 2403.13298, equation 14, as complex numbers; test_peers_torch compares with timm.
    rotary = Rotary((2, 3), 1, 10.0, trained_grid=0, interleaved=interleaved, axes="xy", block=1)
    layer = RotaryFrequencies(dataclasses.asdict(rotary), num_layers=2, num_heads=2, head_size=8, dtype="float64")
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 2, 7, 8))
    layer(x)  # builds it
    first = np.asarray(layer.frequencies)
    np.testing.assert_allclose(np.hypot(*first), np.broadcast_to([1, 10**-0.5, 1, 10**-0.5], (2, 2, 4)), rtol=1e-6)
    layer.frequencies.assign(random.normal(size=first.shape))
    frequencies, tables = np.asarray(layer.frequencies)[:, 1], layer(x)
    pairs = (slice(None, None, 2), slice(1, None, 2)) if interleaved else (slice(4), slice(4, None))
    want = x[0, ..., pairs[0]] + 1j * x[0, ..., pairs[1]]
    for row in range(2):
        for column in range(3):
            want[:, 1 + 3 * row + column] *= np.exp(1j * (column * frequencies[0] + row * frequencies[1]))
    for tokens in (7, 3):  # of the last block, the first ones
        found = np.asarray(rotary.turn(keras.ops.convert_to_tensor(x[:, :, :tokens]), tables))[0]
        np.testing.assert_allclose(found[..., pairs[0]] + 1j * found[..., pairs[1]], want[:, :tokens], atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "format"),
    [("Perception Encoder", "timm"), ("RoPE-ViT", "timm_rope"), ("learned rotary positions", "timm_rope")],
)
def test_rotary_positions_of_timm_come_back_and_are_asked_for(kind: str, format: str, tmp_path: Path) -> None:
    model = built(**FAMILIES[kind], image_size=(24, 40))
    path = converters.save(model, tmp_path / "file", format=format)
    assert converters.load(path).config == model.config
    tensors = load_file(path)
    (bare := tmp_path / "bare").mkdir()
    save_file(tensors, bare / "model.safetensors")
    told = {"num_heads": 4, "image_size": (24, 40), "activation": "gelu_erf"}
    told["position_prefix"] = model.config.position_prefix
    with pytest.raises(CheckpointError, match="rotary_theta"):
        converters.load(bare, config=told)
    shutil.copy(path.parent / "config.json", bare)  # without the note that keras_vit adds
    assert_same_bits(weights_of(converters.load(bare, image_size=(24, 40))), weights_of(model))


def test_what_timm_has_no_argument_for_is_not_written(tmp_path: Path) -> None:
    for kind, format, changes, said in (
        ("Perception Encoder", "timm", {"pool_prefix": False}, "pool_prefix=False"),
        ("Perception Encoder", "timm", {"rotary_grid": None}, "rotary_grid=None"),
        ("Perception Encoder", "timm", {"gated_mlp": True, "activation": "silu", "pool_mlp_dim": None}, "rotary_theta"),
        ("Perception Encoder", "timm_rope", {}, "would not be recognised"),
        ("Perception Encoder", "big_vision", {"pre_norm": False, "patch_bias": True}, "rotary_theta"),
        ("RoPE-ViT", "timm_rope", {"gated_mlp": True, "activation": "silu"}, "gated_mlp=True"),
        ("learned rotary positions", "timm_rope", {"rotary_offset": 1.0}, "rotary_offset=1.0"),
        ("learned rotary positions", "timm_rope", {"rotary_grid": 3}, "rotary_grid=3"),
        ("learned rotary positions", "timm_rope", {"rotary_interleaved": False}, "rope_rotate_half"),
        ("RoPE-ViT", "timm", {"layer_scale": None, "rotary_learned": True}, "rotary_learned"),
        ("RoPE-ViT", "huggingface_dinov3", {"num_classes": 0}, "rotary_axes='xy'"),
        ("AIMv2", "timm_aimv2", {}, "pool_mlp_dim=0"),
        ("AIMv2", "timm_aimv2", {"classifier": "gap", "dense_bias": True}, "dense_bias=True"),
        ("AIMv2", "huggingface_aimv2", {}, "no classifier: num_classes=0"),
        ("AIMv2", "huggingface_aimv2", {"num_classes": 0, "qkv_bias": True}, "qkv_bias=True with dense_bias=False"),
        ("AIMv2", "timm", {"classifier": "gap", "gated_mlp": False, "patch_norm": False}, "norm='rms'"),
    ):
        with pytest.raises(CheckpointError, match=said):
            converters.save(built(**FAMILIES[kind] | changes), tmp_path / "ours", format=format)
    model = built(classifier="map", pool_mlp_dim=40)
    for format, said in {"timm": "an MLP of mlp_dim", "big_vision": "pool_mlp_dim=40"}.items():
        with pytest.raises(CheckpointError, match=said):
            converters.save(model, tmp_path / "ours", format=format)


# transformers, models/dinov3_vit/convert_dinov3_vit_to_hf.py: Meta's names -> names there.
META_DINOV3 = {
    "cls_token": "embeddings.cls_token",
    "storage_tokens": "embeddings.register_tokens",
    "mask_token": "embeddings.mask_token",
    "patch_embed.proj": "embeddings.patch_embeddings",
    "blocks.": "layer.",
    "attn.proj": "attention.o_proj",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.up_proj",
    "mlp.w3": "mlp.down_proj",
}


def test_metas_own_dinov3_gives_the_numbers_of_transformers(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "hf_dinov3_gated" / "model.safetensors")
    meta = {}
    for name, value in tensors.items():
        for theirs, ours in META_DINOV3.items():
            name = name.replace(ours, theirs)  # noqa: PLW2901
        meta[name] = value
    for block in {name.partition(".attention.")[0] for name in meta if ".attention." in name}:
        parts = [meta.pop(f"{block}.attention.{letter}_proj.weight") for letter in "qkv"]
        meta[f"{block}.attn.qkv.weight"] = np.concatenate(parts)
        query, value = (meta.pop(f"{block}.attention.{letter}_proj.bias") for letter in "qv")
        # The key's part of the bias is masked when it is used, whatever it is.
        meta[f"{block}.attn.qkv.bias"] = np.concatenate([query, np.full_like(query, 9), value])
        meta[f"{block}.attn.qkv.bias_mask"] = np.concatenate([np.ones_like(query), 0 * query, np.ones_like(query)])
    meta["rope_embed.periods"] = np.ones(2, np.float32)
    save_file(meta, tmp_path / "dinov3_vits16plus_pretrain.safetensors")
    case = arrays(FOLDER / "hf_dinov3_gated" / "reference.npz")
    images, output = wanted(case)
    path = tmp_path / "dinov3_vits16plus_pretrain.safetensors"
    assert converters.detect(path) == "meta_dinov3"
    with pytest.raises(CheckpointError, match=r"do not say num_heads, .* pass config=\{'num_heads': \.\.\.\}"):
        converters.load(path)
    heads = converters.read_config(FOLDER / "hf_dinov3_gated").num_heads
    with pytest.warns(UserWarning, match="classifier='token', preprocessing=.* is assumed"):
        model = converters.load(path, config={"num_heads": heads}, image_size=images.shape[1:3])
    same = converters.load(FOLDER / "hf_dinov3_gated", image_size=images.shape[1:3])
    assert_same_bits(weights_of(model), weights_of(same))
    assert distance(model(images), output) < 1e-5
