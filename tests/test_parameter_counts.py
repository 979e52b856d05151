"""The exact number of parameters of every official model, as in the published files."""

import functools

import pytest

from keras_vit.model import layers as vit
from keras_vit.model.config import ViTConfig
from keras_vit.model.sizes import SIZES
from keras_vit.model.vision_transformer import VisionTransformer

# name: with 1000 classes at 224 pixels, without the head, with 1000 classes at 384 pixels
OFFICIAL = {
    "ViT-Ti_16": (5_717_416, 5_524_416, 5_790_376),
    "ViT-S_32": (22_878_952, 22_493_952, 22_915_432),
    "ViT-S_16": (22_050_664, 21_665_664, 22_196_584),
    "ViT-B_32": (88_224_232, 87_455_232, 88_297_192),
    "ViT-B_16": (86_567_656, 85_798_656, 86_859_496),
    "ViT-B_8": (86_576_872, 85_807_872, 87_744_232),
    "ViT-L_32": (306_535_400, 305_510_400, 306_632_680),
    "ViT-L_16": (304_326_632, 303_301_632, 304_715_752),
    "ViT-H_14": (632_045_800, 630_764_800, 632_651_240),
    "R+ViT-Ti_16": (6_337_704, 6_144_704, 6_355_944),
    "R26+ViT-S_32": (36_431_912, 36_046_912, 36_468_392),
    "R26+ViT-B_32": (101_383_976, 100_614_976, 101_456_936),
    "R50+ViT-B_16": (98_659_112, 97_890_112, 98_950_952),
    "R50+ViT-L_32": (328_994_856, 327_969_856, 329_092_136),
}
GSAM = {"ViT-S_16": 22_049_896, "ViT-B_16": 86_566_120, "ViT-S_32": 22_878_184, "ViT-B_32": 88_222_696}
COLUMNS = {"224": ({"image_size": 224}, 0), "headless": ({"num_classes": 0}, 1), "384": ({"image_size": 384}, 2)}


def built_count(config: ViTConfig) -> int:
    with vit.uninitialized():
        return VisionTransformer(config).count_params()


@functools.cache
def of_one_block(name: str) -> int:
    config = ViTConfig.from_name(name, resnet=None, patch_size=16, num_classes=0, image_size=32)
    return built_count(config.replace(num_layers=2)) - built_count(config.replace(num_layers=1))


def count(name: str, **changes: int | str) -> int:
    """Count a model's parameters from one block, because all blocks are equal and large models need gigabytes."""
    config = ViTConfig.from_name(name, **changes)
    return built_count(config.replace(num_layers=1)) + (config.num_layers - 1) * of_one_block(name)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.filterwarnings("ignore:keras_vit. images of 384x384 pixels are no multiple of the 14x14:UserWarning")
def test_an_official_model_has_its_number_of_parameters(name: str, column: str) -> None:
    changes, index = COLUMNS[column]
    assert count(name, **changes) == OFFICIAL[name][index]


@pytest.mark.parametrize("name", GSAM)
def test_a_gsam_model_has_its_number_of_parameters(name: str) -> None:
    assert count(name, classifier="gap") == GSAM[name]


@pytest.mark.parametrize("name", ["ViT-B_16", "R26+ViT-S_32"])
def test_counting_blocks_is_counting_the_whole_model(name: str) -> None:
    assert built_count(ViTConfig.from_name(name)) == OFFICIAL[name][0]


@pytest.mark.parametrize("size", SIZES)
def test_a_big_vision_size_has_the_sum_of_its_matrices(size: str) -> None:
    hidden, mlp, _, _ = SIZES[size]
    attention, norms = 4 * hidden * (hidden + 1), 3 * 2 * hidden
    perceptron = (hidden + 1) * mlp + (mlp + 1) * hidden
    patches, class_token, positions = (16 * 16 * 3 + 1) * hidden, hidden, 5 * hidden
    config = ViTConfig.from_name(f"{size}/16", image_size=32, num_classes=0, num_layers=1)
    assert built_count(config) == attention + norms + perceptron + patches + class_token + positions
