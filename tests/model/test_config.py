"""ViTConfig stores, derives and validates its fields."""

import dataclasses
import itertools
import json
from typing import Annotated, Any

import numpy as np
import pytest

from keras_vit import position
from keras_vit._util.checks import Checked
from keras_vit.model.architectures import HYBRIDS, SIZES
from keras_vit.model.config import POSITION_METHODS, Preprocessing, ViTConfig, check_fields
from keras_vit.model.vision_transformer import VisionTransformer
from tiny_models import FAMILIES, VARIANTS, tiny

CONFIGS = {
    **{name: tiny(**changes) for name, changes in (VARIANTS | FAMILIES).items()},
    "default": ViTConfig(),
    "labels": tiny(labels=["a", "b", "c", "d", "e"]),
    "preprocessing": tiny(preprocessing={"resize": "crop", "mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]}),
    **{name: ViTConfig.from_name(name) for name in HYBRIDS},
    **{size: ViTConfig.from_name(f"{size}/14") for size in SIZES},
}


def test_a_config_survives_its_dict_and_json_and_is_a_key() -> None:
    for config in CONFIGS.values():
        assert ViTConfig(**config.to_dict()) == config
        assert ViTConfig(**json.loads(json.dumps(config.to_dict()))) == config
        assert {config: 1}[ViTConfig(**config.to_dict())] == 1


def test_a_config_is_frozen() -> None:
    config = ViTConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        ViTConfig(224)  # type: ignore[misc]


def test_numpy_numbers_are_numbers() -> None:
    config = tiny(hidden_size=np.int64(32), image_size=(np.int32(32), np.uint8(32)), dropout_rate=np.float32(0.5))
    assert config == tiny(dropout_rate=0.5)
    assert ViTConfig(**json.loads(json.dumps(config.to_dict()))) == config


WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_size", "mlp_dim", "num_heads", "num_layers"), (0, 1.5, "8")),
    "num_channels": (0, None, True),
    **dict.fromkeys(("num_classes", "num_registers"), (-1, None, 2.0)),
    "representation_size": (0, "32"),
    **dict.fromkeys(("image_size", "patch_size"), (0, (32,), (32, 0), "32", None, (1, 2, 3))),
    **dict.fromkeys(("dropout_rate", "attention_dropout_rate"), (1, -0.1, "0", None)),
    "stochastic_depth": (1.0, float("nan")),
    "norm_epsilon": (-1e-6, "small", None, float("nan")),
    "layer_scale": (-1, "small"),
    "head_bias_init": (None, float("inf")),
    "classifier": ("cls", None, 3),
    "activation": ("gelu", None),
    **dict.fromkeys(("norm", "position", "position_method", "final_norm", "representation_activation"), ("x",)),
    "position_place": ("block", None),
    "resnet": (
        *(3, "R50", {"num_layers": (0,)}, {"num_layers": (2.5,)}, {"width_factor": 0.3}),
        *({"conv_epsilon_place": "x"}, {"groups": 0}, {"groups": 48}, {"stage_channels": (64,)}),
    ),
    "preprocessing": (
        *(3, {"resize": "stretch"}, {"interpolation": "cubic"}, {"crop_fraction": 0}, {"crop_fraction": 1.1}),
        *({"std": (0.0,)}, {"mean": (0.5, 0.4)}, {"bits": 7}, {"bits": 12, "range": (0, 1)}),
        *({"range": (1, 1)}, {"range": (1,)}, {"range": (0, np.nan)}),
        *({"mean": (), "std": ()}, {"mean": (0.5,) * 3, "std": (0.5,) * 2}),
    ),
}


@pytest.mark.parametrize(
    ("mean", "std"), [((0.485, 0.456, 0.406), (1.0,)), ((0.5,), (0.229, 0.224, 0.225)), ((0.1, 0.2, 0.3), (1, 1, 1))]
)
def test_a_mean_and_a_deviation_may_have_one_value_each_for_itself(mean: tuple[float, ...], std: Any) -> None:
    ours = tiny(preprocessing={"mean": mean, "std": std}).preprocessing
    assert (ours.mean, ours.std) == (mean * (3 // len(mean)), std * (3 // len(std)))


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field_is_one_error_that_names_it(field: str) -> None:
    for wrong in WRONG[field]:
        # For a nested config the error names the inner field.
        name = next(iter(wrong)) if isinstance(wrong, dict) else field
        with pytest.raises(ValueError, match=f"{name}.*Received: "):
            tiny(**{field: wrong})


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 5}, "hidden_size.*num_heads"),
    ({"class_token": False}, "class token"),
    ({"classifier": "token_unpooled", "class_token": False}, "class token"),
    ({"distilled": True, "classifier": "gap"}, "distilled"),
    ({"distilled": True, "num_class_tokens": 2}, "num_class_tokens above 1.*distilled=False"),
    ({"classifier": "gap", "num_class_tokens": 2}, "num_class_tokens above 1.*class_token=True"),
    ({"distilled": True, "representation_size": 32}, "distilled.*representation_size"),
    ({"distilled": True, "final_norm": "pooled"}, "distilled.*final_norm"),
    (
        {"norm": "rms", "mlp_norm": True, "attention_norm": True},
        "norm='rms' needs attention_norm=False, mlp_norm=False",
    ),
    ({"norm": "rms", "tokens_mlp_dim": 8}, "norm='rms' needs tokens_mlp_dim=None"),
    ({"norm": "rms", "classifier": "map"}, "norm='rms' with classifier='map' needs pool_mlp_dim=0"),
    ({"position": "sincos2d", "hidden_size": 30, "num_heads": 2}, "sincos2d"),
    ({"position": "sincos2d", "hidden_size": 4}, "sincos2d"),
    ({"position": "learned2d", "hidden_size": 33, "num_heads": 3}, "learned2d.*half.*33"),
    ({"position": "relative"}, "relative.*position_place"),
    ({"position": "none", "position_place": "blocks"}, "position='none'.*position_place='stem'"),
    ({"position": "sincos2d", "position_place": "shared"}, "position='sincos2d'.*position_place='stem'"),
    ({"position_place": "blocks", "position_prefix": False}, "position_place='blocks'.*position_prefix=True"),
    (
        {"position": "relative", "position_place": "shared", "position_prefix": False},
        "position_place='shared'.*position_prefix=True",
    ),
    ({"num_channels": 1, "preprocessing": {"mean": (0.5, 0.4, 0.5), "std": (0.5,)}}, "num_channels=1"),
    ({"image_size": (32, 7)}, "smaller than one patch.*8x8"),
    ({"patch_size": (8, 33)}, "smaller than one patch.*8x33"),
    ({"resnet": {}, "patch_size": 9}, "smaller than one patch.*36x36"),
]


def test_fields_that_contradict_each_other_are_refused() -> None:
    for changes, named in CONTRADICTIONS:
        with pytest.raises(ValueError, match=named):
            tiny(**changes)


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        tiny(hidden_size=0, num_classes=-1, activation="x", dropout_rate=2)
    assert all(name in str(caught.value) for name in ("hidden_size", "num_classes", "activation", "dropout_rate"))


def test_an_unknown_field_is_refused_with_the_nearest() -> None:
    for refuse in (check_fields, lambda d: ViTConfig().replace(**d), lambda d: ViTConfig.from_name("B/16", **d)):
        with pytest.raises(ValueError, match=r"hiden_size.*'hidden_size'"):
            refuse({"hiden_size": 3})
    with pytest.raises(TypeError, match="hiden_size"):
        ViTConfig(**{"hiden_size": 3})


def test_replace_changes_only_what_it_is_told() -> None:
    changed = ViTConfig.from_name("B/16").replace(image_size=(384, 256))
    assert changed.to_dict() == {**ViTConfig.from_name("B/16").to_dict(), "image_size": (384, 256)}


def test_prefix_tokens_are_counted() -> None:
    for changes, prefix, rows in (
        ({}, 1, 1),
        ({"classifier": "gap"}, 0, 0),
        ({"classifier": "gap", "class_token": True}, 1, 1),
        ({"classifier": "token_unpooled"}, 1, 1),
        ({"classifier": "map", "num_registers": 4}, 4, 4),
        ({"distilled": True, "num_registers": 4}, 6, 6),
        ({"num_registers": 4, "position_prefix": False}, 5, 0),
        ({"num_class_tokens": 8, "num_registers": 4}, 12, 12),
    ):
        config = tiny(**changes)
        tokens = (config.num_prefix_tokens, config.position_prefix_tokens, config.num_tokens)
        assert tokens == (prefix, rows, prefix + 16)


def test_official_models_have_their_grid() -> None:
    for name, image_size, grid, stride in (
        ("ViT-B/16", 224, (14, 14), (16, 16)),
        ("ViT-H/14", 384, (27, 27), (14, 14)),  # 378 pixels are used
        ("R+ViT-Ti/16", 224, (7, 7), (32, 32)),  # named /16, but has stride 32
        ("R50+ViT-B/16", (384, 250), (24, 16), (16, 16)),  # SAME padding rounds up
        ("R26+ViT-S/32", 225, (8, 8), (32, 32)),
        ("R50+ViT-L/32", 384, (12, 12), (32, 32)),
    ):
        config = ViTConfig.from_name(name, image_size=image_size)
        assert (config.grid, config.stride) == (grid, stride)


def test_the_grid_is_the_number_of_tokens_that_come_out() -> None:
    for changes, image_size in itertools.product(
        ({}, VARIANTS["hybrid"], VARIANTS["stem only"]), ((33, 47), (64, 31), (35, 35))
    ):
        config = tiny(**changes, image_size=image_size)
        model = VisionTransformer(config)
        assert model.intermediates["tokens"].shape[1] == config.num_tokens


def test_the_default_preprocessing_is_the_official_evaluation() -> None:
    assert Preprocessing() == Preprocessing(
        resize="squash", interpolation="bilinear", antialias=False, mean=(0.5,), std=(0.5,)
    )


def test_the_position_methods_are_those_of_the_position_module() -> None:
    assert POSITION_METHODS == position.METHODS


def test_a_pooling_that_nobody_wrote_is_an_error_and_not_another_pooling() -> None:
    config = ViTConfig(image_size=32, patch_size=8, num_registers=2)
    object.__setattr__(config, "classifier", "registers")  # as if it were in the Literal
    for name in ("feature_parts", "reads_class_token", "read_tokens"):
        with pytest.raises((AssertionError, KeyError), match="registers"):
            getattr(config, name)


def test_lists_of_a_fixed_length_are_checked_item_by_item() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Limits(Checked):
        levels: tuple[float, Annotated[float, "(0, 1]"]] | None = None

    assert Limits(levels=[0, 1]).levels == (0.0, 1.0) and type(Limits(levels=(0, 1)).levels[0]) is float
    assert Limits().levels is None
    for levels, words in (
        ((1, 1, 1), "must be a list of 2"),
        ((1,), "must be a list of 2"),
        (("a", 1), r"levels\[0\] must be"),
        ((0, 2), r"levels\[1\] must be in \(0, 1\]"),
        ((True, 1), r"levels\[0\] must be"),
    ):
        with pytest.raises(ValueError, match=words):
            Limits(levels=levels)
