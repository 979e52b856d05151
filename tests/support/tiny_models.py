"""Small models that are built quickly, one for each option of a config."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer

TINY: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "mlp_dim": 64,
    "num_heads": 4,
    "num_layers": 2,
    "num_classes": 5,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "pure": {},
    "hybrid": {"resnet": {"num_layers": (1, 1), "width_factor": 0.5}, "patch_size": 1},
    "stem only": {"resnet": {"width_factor": 0.5}, "patch_size": 2},
    "gap": {"classifier": "gap"},
    "map": {"classifier": "map", "position_prefix": False},
    "unpooled": {"classifier": "unpooled"},
    "token unpooled": {"classifier": "token_unpooled"},
    "headless": {"num_classes": 0},
    "representation": {"representation_size": 24},
    "registers": {"num_registers": 3, "position_prefix": False},
    "distilled": {"distilled": True},
    "layer scale": {"layer_scale": 0.1},
    "pre-norm": {"pre_norm": True, "patch_bias": False, "activation": "gelu_quick"},
    "no final norm": {"final_norm": "none", "num_registers": 2},
    "norm after the mean": {"classifier": "gap", "class_token": True, "final_norm": "pooled"},
    "no biases": {"qkv_bias": False},
    "sincos": {"position": "sincos2d", "classifier": "gap"},
    "grey": {"num_channels": 1},
    "2-D positions": {"position": "learned2d"},
    "positions at every block": {"position_place": "blocks"},
    "shared positions": {"position_place": "shared"},
    "2-D positions at every block": {"position": "learned2d", "position_place": "blocks"},
    "relative positions": {"position": "relative", "position_place": "blocks"},
    "normalized": {"normalize_features": True},
    "shared relative positions": {"position": "relative", "position_place": "shared"},
}

# Parts of families beside the plain Vision Transformer.
FAMILIES: dict[str, dict[str, Any]] = {
    "rotary": {"position": "none", "rotary_theta": 100.0, "key_bias": False, "num_registers": 2},
    "rotary beside learned positions, gated, normed": {
        "rotary_theta": 10000.0,
        "rotary_grid": 16,
        "rotary_interleaved": True,
        "gated_mlp": True,
        "attention_norm": True,
        "mlp_norm": True,
        "activation": "silu",
    },
    "Perception Encoder": {
        **{"rotary_theta": 10000.0, "rotary_grid": 3, "rotary_interleaved": True, "rotary_offset": 1.0},
        **{"rotary_axes": "xy", "pre_norm": True, "patch_bias": False, "classifier": "map", "class_token": True},
        **{"pool_heads": 2, "pool_mlp_dim": 40, "pool_prefix": True, "activation": "gelu_erf", "norm_epsilon": 1e-5},
    },
    "RoPE-ViT": {
        **{"rotary_theta": 100.0, "rotary_grid": 0, "rotary_interleaved": True, "rotary_axes": "xy"},
        **{"position": "none", "layer_scale": 0.1, "activation": "gelu_erf"},
    },
    "learned rotary positions": {
        **{"rotary_theta": 10.0, "rotary_learned": True, "rotary_grid": 0, "rotary_interleaved": True},
        **{"rotary_axes": "xy", "layer_scale": 0.1, "activation": "gelu_erf", "position_prefix": False},
    },
    "AIMv2": {
        **{"norm": "rms", "patch_norm": True, "qkv_bias": False, "dense_bias": False, "gated_mlp": True},
        **{"activation": "silu", "norm_epsilon": 1e-5, "classifier": "map", "pool_mlp_dim": 0},
    },
    "relative biases": {
        **{"position": "none", "relative_bias": "blocks", "key_bias": False, "layer_scale": 0.1},
        **{"classifier": "gap", "class_token": True, "final_norm": "pooled"},
    },
    "relative biases of one MLP": {"relative_bias": "shared", "relative_bias_mlp_dim": 8, "num_registers": 2},
    "class token and mean": {"classifier": "token_gap", "num_registers": 2, "position_prefix": False},
    "several class tokens": {"num_class_tokens": 3, "num_registers": 1},
    "several blocks": {"token_blocks": 2, "mean_blocks": 2, "num_registers": 2},
}
_RESNET = {"num_layers": (2, 1), "width_factor": 0.5, "version": 2}
# Without attention.
OTHERS: dict[str, dict[str, Any]] = {
    "mixer": {"tokens_mlp_dim": 24, "classifier": "gap", "position": "none"},
    "mixer with a class token": {"tokens_mlp_dim": 24, "layer_scale": 0.1},
    "BiT": {
        **{"num_layers": 0, "hidden_size": 256, "patch_size": 1, "num_heads": 1, "mlp_dim": 1},
        **{"classifier": "gap", "position": "none", "resnet": _RESNET},
    },
}


def tiny(**changes: Any) -> ViTConfig:
    """Return a config with two blocks of width 32, for images of 32 pixels."""
    return ViTConfig(**{**TINY, **changes})


def randomised(model: VisionTransformer, seed: int = 0) -> VisionTransformer:
    """Give every weight a random value, none of them zero or one, so that each weight changes the outputs."""
    random = np.random.default_rng(seed)
    for variable in model.weights:
        variable.assign(random.normal(scale=0.3, size=variable.shape))
    return model


def built(dtype: str | None = None, **changes: Any) -> VisionTransformer:
    """Return a tiny model with random weights."""
    return randomised(VisionTransformer(tiny(**changes), dtype=dtype))


def prepared(config: ViTConfig, batch: int = 2, seed: int = 1) -> np.ndarray:
    """Return random images for the config's model, float32 in [-1, 1]."""
    shape = (batch, *np.broadcast_to(config.image_size, 2), config.num_channels)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
