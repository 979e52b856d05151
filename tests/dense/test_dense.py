"""Models that return maps: features, heads and official checkpoints, compared with the official code's outputs."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image

import dense_cases
from dense_cases import FEATURES, MAPS, TOLERANCES, expected, padded
from keras_vit import VisionTransformer, converters, dense, errors, visualize
from keras_vit.dense import loading
from keras_vit.dense.framing import framed_size, to_image
from keras_vit.model import preprocess
from marks import full_except
from reference_cases import distance
from tiny_models import randomised, tiny

STAGES = {"hf_dinov2_reg_backbone": ["tokens", 1, 3]}  # stage 0 of Hugging Face's backbones precedes the first block
# Output of the official model -> outputs of its post-processing.
OUTPUTS = ("predicted_depth", "head_output", "logits")


@pytest.mark.parametrize("name", full_except(["timm_features_siglip"], FEATURES))
def test_feature_maps_are_the_official_ones_at_every_size(name: str) -> None:
    outputs = expected(name)
    model = converters.load(dense_cases.FOLDER / name / "model.safetensors")
    for size in dense_cases.sizes(outputs):
        images = outputs[f"{size}input_nhwc"]
        resized = model.resized(images.shape[1:3])
        for kind, norm in (("feature_maps", True), ("norm", True), ("raw", False)):
            places = sorted(key for key in outputs if key.startswith(f"{size}{kind}/"))
            blocks = STAGES.get(name) or [int(key.rpartition("/")[2]) for key in places]
            for place, got in zip(
                places, resized.feature_maps(images, blocks, norm=norm) if places else (), strict=True
            ):
                assert distance(got, outputs[place]) <= TOLERANCES[name], place


@pytest.mark.parametrize("name", full_except(["hf_depth_anything"], MAPS))
def test_maps_are_the_official_ones_at_every_size_and_when_saved(name: str, tmp_path: Path) -> None:
    outputs = expected(name)
    model = dense_cases.load(name)
    model.save(tmp_path / "model.keras")
    again = dense.load(tmp_path / "model.keras")
    for variable, other in zip(model.backbone.variables, again.backbone.variables, strict=True):
        np.testing.assert_array_equal(variable, other)  # also those that the head does not read
    for size in dense_cases.sizes(outputs):
        images = padded(outputs[f"{size}input_nhwc"], model)
        maps = np.asarray(again.resized(images.shape[1:3])(images))
        (place,) = (size + one for one in OUTPUTS if size + one in outputs)
        assert distance(maps, outputs[place].reshape(maps.shape)) <= TOLERANCES[name]
        _check_results(name, model, maps, {key: x for key, x in outputs.items() if _is_result(key, size)})


def test_each_map_of_the_neck_is_the_official_one() -> None:
    model = dense_cases.load("hf_dpt_hybrid")  # whose first two maps are those of the ResNet's stages
    outputs = expected("hf_dpt_hybrid")
    layers = {"reassemble": ["stage_1_unit_1", "stage_2_unit_1", "reassemble_2", "resize_3"]}
    layers |= {"conv": [f"neck_{i}" for i in range(4)], "fused": [f"fusion_{i}_enlarged" for i in range(4)]}
    tensors = {
        f"neck/{part}_{i}": model.get_layer(name).output for part in layers for i, name in enumerate(layers[part])
    }
    maps = keras.Model(model.inputs[0], tensors)(outputs["input_nhwc"][:1])
    assert maps.keys() == {key for key in outputs if key.startswith("neck/")}
    for key, got in maps.items():
        assert distance(got, outputs[key]) <= TOLERANCES["hf_dpt_hybrid"], key


def test_a_hybrid_with_another_number_of_groups_is_not_written_where_it_cannot_be_read(tmp_path: Path) -> None:
    model = VisionTransformer(tiny(resnet={"num_layers": (1,), "groups": 16}, patch_size=1))
    with pytest.raises(errors.CheckpointError, match="cannot express.*'groups': 16"):
        converters.save(model, tmp_path, format="timm")


def _is_result(key: str, size: str) -> bool:
    is_of_size = key.startswith(size or ("post_", "depth", "segmentation"))
    return is_of_size and key.removeprefix(size).startswith(("post_", "depth", "segmentation"))


def _check_results(name: str, model: dense.DenseModel, maps: np.ndarray, results: dict[str, np.ndarray]) -> None:
    """Compare maps at the images' sizes with those of the official post-processing."""
    for key, want in results.items():
        want = want[..., 0] if key.split("/")[-1].startswith("depth") else want
        if want.ndim != 3:  # the logits at the image's size, whose best classes are compared
            continue
        got = np.stack([to_image(one, model.head, want.shape[1:]) for one in maps])
        if model.head.output == "classes":
            np.testing.assert_array_equal(got, want, err_msg=key)
        else:
            assert distance(got, want) <= TOLERANCES[name], key


@pytest.mark.full
def test_an_image_of_any_size_gets_a_map_of_its_size(tmp_path: Path) -> None:
    model = dense_cases.load("hf_depth_anything")
    pixels = np.random.default_rng(0).integers(0, 255, (60, 91, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    [depth] = model.predict_maps(tmp_path / "photo.png")
    assert depth.shape == (60, 91)
    # The aspect ratio is kept, the sides are multiples of 14, Pillow resizes.
    assert framed_size((60, 91), model.head, (70, 70)) == (70, 112)
    resized = np.asarray(Image.fromarray(pixels).resize((112, 70), Image.Resampling.BICUBIC), np.float32)
    prepared = (resized / 255 - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
    output = np.asarray(model.resized((70, 112))(prepared[None]))[0]
    np.testing.assert_allclose(depth, to_image(output, model.head, (60, 91)), atol=1e-4 * output.max())


def test_images_are_framed_as_by_the_official_processors() -> None:
    # 640x480 in the official code of Depth Anything V2 is 518x686; transformers resizes to the scale nearer to 1.
    expected: dict[tuple[Any, tuple[int, int]], tuple[int, int]] = {
        ("least", (480, 640)): (518, 686),
        ("least", (1000, 333)): (1554, 518),
        ("keep", (480, 640)): (518, 686),
        ("keep", (2000, 1000)): (1036, 518),
        ("squash", (480, 640)): (518, 518),
        ("none", (480, 640)): (480, 640),
    }
    received = {}
    for framing, sides in expected:
        multiple = 1 if framing == "none" else 14
        head = dense.MapConfig(num_classes=2, blocks=(0,), framing=framing, multiple=multiple)
        received[framing, sides] = framed_size(sides, head, (518, 518))
    assert received == expected


def test_a_hybrid_with_another_resnet_is_refused(tmp_path: Path) -> None:
    shutil.copytree(dense_cases.FOLDER / "hf_dpt_hybrid", tmp_path, dirs_exist_ok=True)
    original = (tmp_path / "config.json").read_text()
    for name, value, said in (
        ("layer_type", "preactivation", "layer_type 'bottleneck'"),
        ("embedding_dynamic_padding", False, "embedding_dynamic_padding True"),
        ("num_groups", 0, "groups"),
    ):
        values = json.loads(original)
        values["backbone_config"][name] = value
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(errors.CheckpointError, match=said):
            dense.load(tmp_path)


FORGED_HEADS: list[dict[str, Any]] = [
    {"num_classes": 10**7},
    {"output": "depth", "num_classes": 0, "max_depth": 9.0, "num_bins": 10**7},
    {"blocks": [1] * 20_000},
    *({"kind": "dpt", "blocks": [0, 0, 1, 1], **sizes} for sizes in (
        {"widths": [8] * 4, "fusion_width": 2000},
        {"widths": [6000] * 4, "fusion_width": 8},
        {"widths": [8] * 4, "fusion_width": 8, "factors": [4000, 1, 1, 1]},
    )),
]  # fmt: skip


def test_a_small_file_cannot_describe_a_large_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense.segmenter(VisionTransformer(tiny()), 3).save(tmp_path / "good.keras")
    monkeypatch.setattr(loading.DenseModel, "from_config", lambda *_: pytest.fail("it should not be built"))
    for changes in FORGED_HEADS:
        bad = tmp_path / "bad.keras"
        with zipfile.ZipFile(tmp_path / "good.keras") as good, zipfile.ZipFile(bad, "w") as archive:
            for name in good.namelist():
                values = json.loads(good.read(name)) if name == "config.json" else None
                if values is not None:
                    values["config"]["head"] |= changes
                archive.writestr(name, good.read(name) if values is None else json.dumps(values))
        said = "describes a head of at least|blocks must have 1 to 64"
        with pytest.raises(errors.CheckpointError, match=said) as caught:
            dense.load(bad)
        assert len(str(caught.value)) < 400 + len(str(bad))


def test_a_processor_cannot_ask_for_any_memory_or_be_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense.segmenter(VisionTransformer(tiny()), 3)
    monkeypatch.setattr(preprocess, "prepare", lambda *_args, **_options: pytest.fail("nothing should be resized"))
    for fields in ({"size": (100_000, 100_000)}, {"framing": "none", "multiple": 10**9}):
        large = dense.DenseModel(model.backbone, model.head.replace(**fields))
        with pytest.raises(ValueError, match="would be resized to|patches"):
            large.predict_maps(np.zeros((32, 32, 3), np.uint8))


def test_the_numbers_of_a_processor_are_numbers(tmp_path: Path) -> None:
    for values in ({"size": "a"}, {"size": 1e400}, {"size": {"height": 3.5, "width": 4}}, {"ensure_multiple_of": "x"},
                   {"do_pad": True, "size_divisor": 1.5}):  # fmt: skip
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
        with pytest.raises(errors.CheckpointError, match="preprocessor_config"):
            loading.huggingface_processor(tmp_path, (32, 32))


def test_only_the_name_of_a_stored_policy_is_used(tmp_path: Path) -> None:
    dense.segmenter(VisionTransformer(tiny()), 3).save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as good, zipfile.ZipFile(tmp_path / "bad.keras", "w") as bad:
        values = json.loads(good.read("config.json"))
        values["config"]["backbone"]["dtype"] |= {"module": "os", "class_name": "system", "registered_name": None}
        for name in good.namelist():
            bad.writestr(name, json.dumps(values) if name == "config.json" else good.read(name))
    assert dense.load(tmp_path / "bad.keras").layers[1].compute_dtype == "float32"


def test_a_decoder_goes_from_even_to_odd_grids() -> None:
    model = dense_cases.load("hf_dpt_vit_add")  # 3 x 3 patches: a map of 4 cells is fitted to one of 3
    again = model.resized(64).resized(48)
    for name in model.head_layers:
        for value, other in zip(model.get_layer(name).weights, again.get_layer(name).weights, strict=True):
            np.testing.assert_array_equal(value, other)


def test_a_classifier_becomes_a_segmenter_without_losing_its_own_head() -> None:
    classifier = randomised(VisionTransformer(tiny(num_classes=5)))
    before = [np.array(each) for each in classifier.weights]
    model = dense.segmenter(classifier, 3, labels=["sky", "sea", "land"])
    for layer in model.layers:
        layer.set_weights([value + 1 for value in layer.get_weights()])
    for weight, value in zip(classifier.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)
    assert model.task.class_names() == ["sky", "sea", "land"]


def test_wrong_arguments_are_named() -> None:
    model, images = VisionTransformer(tiny()), np.zeros((1, 16, 16, 3))
    several, added = (
        VisionTransformer(tiny(num_class_tokens=2)),
        dense.MapConfig(num_classes=3, blocks=(1,), readout="add"),
    )
    calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
        ("head must be one of", dense.segmenter, (model, 3), {"head": "unet"}),
        ("num_classes >= 1", dense.segmenter, (model, 0), {}),
        ("max_depth", dense.depth, (model,), {"head": "linear"}),
        ("max_depth", dense.depth, (model,), {"head": "linear", "max_depth": -1}),
        ("backbone", dense.segmenter, ("ViT-B/16", 3), {}),
        ("labels must name", dense.segmenter, (model, 3), {"labels": ["one"]}),
        ("all strings. Received: 5", dense.segmenter, (model, 3), {"labels": 5}),
        *(
            ("all strings. Received", dense.segmenter, (model, 2), {"labels": [name, "b"]})
            for name in (1, None, b"a", 0.5)
        ),
        ("valid Unicode", dense.segmenter, (model, 2), {"labels": ["\ud800", "b"]}),
        (r"labels\[1\] must be text. Received: 2", dense.MapConfig, (), {"labels": ["a", 2], "num_classes": 2}),
        (r"labels\[0\] must be text. Received: 1", model.config.replace, (), {"labels": [1, 2]}),
        ("features needs at least one image", model.feature_maps, (images[:0],), {}),
        ("at least one image", dense.segmenter(model, 3).predict_maps, ([],), {}),
        ("blocks must be", model.feature_maps, (images,), {"blocks": [99]}),
        ("blocks must be", model.feature_maps, (images,), {"blocks": -1}),
        ("readout='add' needs a single class token", dense.DenseModel, (several, added), {}),
    ]
    for message, function, arguments, options in calls:
        with pytest.raises(ValueError, match=message):
            function(*arguments, **options)


def test_published_files_with_terms_are_downloaded_only_if_one_accepts_them() -> None:
    with pytest.raises(errors.LicenseError, match=r"CC-BY-NC-4.0.*accept_license=True"):
        dense.load("Depth-Anything-V2-B")
    free = {card.name for card in dense.cards().values() if card.terms is None}
    assert {"Depth-Anything-V2-S", "Depth-Anything-V1-L", "DPT-L"} <= free
    assert not any("V2-B" in name or "V2-L" in name for name in free)
    with pytest.raises(FileNotFoundError, match="Depth-Anything-V2-S"):
        dense.load("Depth-Anything-V2-Small")


def test_models_that_are_not_read_are_named(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    for name, message in {
        "model.backbone.pretrained.cls_token": "Depth Anything 3",
        "decode_head.query_embed.weight": "Mask2Former",
        "reassemble_blocks.projects.0.conv.weight": "DINOv3 7B",
        "encoder.weight": "is no DPT",
    }.items():
        save_file({name: np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
        with pytest.raises(errors.CheckpointError, match=message):
            dense.load(tmp_path)


def test_a_head_alone_needs_a_backbone_and_a_whole_file_refuses_one() -> None:
    backbone = VisionTransformer(tiny())
    (head,) = (dense_cases.FOLDER / "dinov2_seg_ms").glob("*_head.safetensors")
    with pytest.raises(ValueError, match="pass backbone="):
        dense.load(head)
    with pytest.raises(errors.CheckpointError, match="does not fit the backbone"):
        dense.load(head, backbone=backbone)
    with pytest.raises(ValueError, match="has its own"):
        dense.load(dense_cases.FOLDER / "hf_dpt_seg", backbone=backbone)


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    model = randomised(VisionTransformer(tiny(num_layers=2)))
    images = np.random.default_rng(3).uniform(-1, 1, (3, 32, 32, 3)).astype(np.float32)
    colours, foreground = visualize.patch_components(model, images)
    patches = np.concatenate(model.feature_maps(images)).reshape(-1, 32).astype(np.float64)
    left, values, _ = np.linalg.svd(patches - patches.mean(axis=0), full_matrices=False)
    scores = (left * values)[:, :3]
    inside = foreground.ravel()
    assert inside.any()
    assert not inside.all()
    for channel in range(3):
        # A colour is a component, cut at the ends of its range.
        sign = np.sign(np.corrcoef(colours.reshape(-1, 3)[:, channel], scores[:, channel])[0, 1])
        score = sign * scores[:, channel]
        low, high = np.quantile(score[inside], (0.01, 0.99))
        want = np.clip((score - low) / (high - low), 0, 1)
        np.testing.assert_allclose(colours.reshape(-1, 3)[:, channel], want, atol=1e-5)
        if channel == 0:
            np.testing.assert_array_equal(inside, score > 0)
