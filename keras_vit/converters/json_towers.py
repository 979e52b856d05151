"""Read the config.json files of Keras Hub and the open_clip_config.json of open_clip."""

from typing import Any

import numpy as np

from keras_vit.converters import json_timm as timm
from keras_vit.converters.config_json import (
    Fields,
    Json,
    Keys,
    accept_any,
    accept_only,
    channel_values,
    check_keys,
    part,
    read_keys,
    sides_of,
)
from keras_vit.errors import CheckpointError

# ---- Keras Hub


def read_keras_hub(values: Json) -> Fields:
    """Read the config.json of Keras Hub's ViTBackbone, and the task.json and image_converter.json beside it."""
    keys: Keys = {
        "image_shape": ("image_size", lambda shape: sides_of(shape, 0)),
        "patch_size": "patch_size",
        "num_layers": "num_layers",
        "num_heads": "num_heads",
        "hidden_dim": "hidden_size",
        "mlp_dim": "mlp_dim",
        "dropout_rate": "dropout_rate",
        "attention_dropout": "attention_dropout_rate",
        "layer_norm_epsilon": "norm_epsilon",
        "use_class_token": "class_token",
        "use_patch_bias": "patch_bias",
        "use_mha_bias": "qkv_bias",
    }
    task, converter = part(values, "task"), part(values, "image_converter")
    return {
        **read_keys(part(values, "config"), keys, "config."),
        **read_keys(part(task, "config"), {"num_classes": "num_classes"}, "task.config."),
        **read_keys(task, {"config": ("classifier", _keras_hub_pooling)}, "task."),
        **read_keys(converter, {"config": ("preprocessing", _image_converter)}, "image_converter."),
    }


def _keras_hub_pooling(value: Any) -> str:
    """Read the pooling of a ViTImageClassifier."""
    pooling = value["pooling"]
    if pooling not in ("token", "gap"):
        raise ValueError("pooling must be token or gap")
    if pooling == "gap" and value["backbone"]["config"]["use_class_token"]:
        raise ValueError("its mean includes the class token, unlike keras_vit's")
    return str(pooling)


def _image_converter(value: Any) -> Fields:
    """Convert Keras Hub's ImageConverter, pixel * scale + offset for pixels of 0 to 255, to fields of Preprocessing."""
    if value["pad_to_aspect_ratio"]:
        raise ValueError("images are padded, which keras_vit does not do")
    scale = 255 * np.atleast_1d(np.float64(1 if value["scale"] is None else value["scale"]))
    offset = np.atleast_1d(np.float64(0 if value["offset"] is None else value["offset"]))
    with np.errstate(all="raise"):
        mean, std = np.broadcast_arrays(-offset / scale, 1 / scale)
    return {
        "resize": "crop" if value["crop_to_aspect_ratio"] else "squash",
        "interpolation": value["interpolation"],
        "antialias": value["antialias"],
        "mean": tuple(mean.tolist()),
        "std": tuple(std.tolist()),
    }


# ---- open_clip

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_APPROXIMATE: Keys = {"approximate": ("activation", {"tanh": "gelu_tanh", "none": "gelu_erf"})}
_QUICK_GELU: Keys = {"quick_gelu": ("activation", {True: "gelu_quick", False: "gelu_erf"})}


def read_open_clip(values: Json) -> Fields:
    """Read the image tower of an open_clip_config.json."""
    model = part(values, "model_cfg")
    tower = part(model, "vision_cfg")
    keys: Keys = {
        "image_size": "image_size",
        "patch_size": "patch_size",
        "width": "hidden_size",
        "layers": "num_layers",
        "pool_type": ("classifier", {"tok": "token", "avg": "gap"}),
        "final_ln_after_pool": ("final_norm", {True: "pooled", False: "tokens"}),
    }
    others = {
        **accept_any("head_width ls_init_value mlp_ratio no_ln_pre patch_dropout output_tokens pos_embed_type"),
        **accept_any("attn_pooler_queries attn_pooler_heads norm_kwargs act_kwargs"),
        **accept_only(False, "attentional_pool qk_norm scaled_cosine_attn scale_heads scale_attn_inner scale_attn"),
        **accept_only(False, "scale_fc"),
        "block_type": [None, "default"],
    }
    check_keys(tower, others, "model_cfg.vision_cfg", keys)
    preprocessing = _open_clip_preprocessing(values)
    norm, gelu = part(tower, "norm_kwargs"), part(tower, "act_kwargs")
    check_keys(norm, {}, "model_cfg.vision_cfg.norm_kwargs", {"eps": "norm_epsilon"})
    check_keys(gelu, {}, "model_cfg.vision_cfg.act_kwargs", _APPROXIMATE)
    return {
        "activation": "gelu_erf",
        "norm_epsilon": 1e-5,
        "classifier": "token",
        "final_norm": "tokens",
        # open_clip/model.py
        **read_keys(
            model, {"vision_cfg": ("num_heads", lambda it: it["width"] // it.get("head_width", 64))}, "model_cfg."
        ),
        **read_keys(model, _QUICK_GELU, "model_cfg."),
        **read_keys(tower, keys, "model_cfg.vision_cfg."),
        **read_keys(norm, {"eps": "norm_epsilon"}, "model_cfg.vision_cfg.norm_kwargs."),
        **read_keys(gelu, _APPROXIMATE, "model_cfg.vision_cfg.act_kwargs."),
        "preprocessing": preprocessing,
    }


def _open_clip_preprocessing(values: Json) -> Fields:
    """Read the preprocess_cfg of an open_clip_config.json over open_clip's defaults (open_clip/transform.py)."""
    keys: Keys = {
        "mean": ("mean", channel_values),
        "std": ("std", channel_values),
        "interpolation": ("interpolation", {name: name for name in ("bilinear", "bicubic")}),
        "resize_mode": ("resize", {"shortest": "crop", "squash": "squash"}),
    }
    # Pillow's filters; a whole crop, of which torchvision rounds the corner as the table open_clip says.
    pipeline: Fields = {"crop_fraction": 1.0, "crop_rounding": "down", "round_pixels": True, "antialias": True}
    usual: Fields = {"mean": _CLIP_MEAN, "std": _CLIP_STD, "resize": "crop", "interpolation": "bicubic"}
    return {**pipeline, **usual, **read_keys(part(values, "preprocess_cfg"), keys, "preprocess_cfg.")}


def read_open_clip_timm(values: Json, defaults: Fields = timm.VIT) -> Fields:
    """Read the image tower of an open_clip_config.json that is a model of timm (open_clip/timm_model.py)."""
    tower = part(part(values, "model_cfg"), "vision_cfg")
    name, pool, head = tower.get("timm_model_name"), tower.get("timm_pool", "avg"), tower.get("timm_proj", "linear")
    if name is None:
        return {}
    if head == "mlp":
        raise CheckpointError(
            "open_clip_config.json: model_cfg.vision_cfg.timm_proj 'mlp' is a head of two layers behind the model of "
            "timm, visual.head.mlp.*, which is not read. Where open_clip is installed, this saves the model in front "
            "of it: timm.models.save_for_hf(model.visual.trunk, 'folder', safe_serialization=True)"
        )
    architecture = {"architecture": name, **({"global_pool": pool} if pool else {})}
    return {
        **timm.read(architecture, defaults),
        **read_keys(tower, {"image_size": "image_size"}, "model_cfg.vision_cfg."),
        "projection_head": True,
        "preprocessing": _open_clip_preprocessing(values),
    }


def read_open_clip_text(values: Json) -> Fields:
    """Read the text tower of an open_clip_config.json."""
    model = part(values, "model_cfg")
    tower, place = part(model, "text_cfg"), "model_cfg.text_cfg"
    keys: Keys = {
        "context_length": "max_length",
        "vocab_size": "vocab_size",
        "width": "hidden_size",
        "heads": "num_heads",
        "layers": "num_layers",
        "pool_type": ("pooling", {"argmax": "end", "eos": "end", "last": "last", "first": "first"}),
        "eos_id": "end_token",
        "no_causal_mask": ("causal", {True: False, False: True}),
    }
    others = {
        **accept_any("act_kwargs hf_tokenizer_name ls_init_value mlp_ratio norm_kwargs output_tokens pad_id proj_bias"),
        **accept_any("tokenizer_kwargs"),
        **accept_only(False, "embed_cls final_ln_after_pool"),
        "proj_type": ["linear", "none"],
    }
    check_keys(tower, others, place, keys)
    return {
        "num_heads": 8,
        "activation": "gelu_erf",
        **read_keys(model, {"embed_dim": "projection_size", **_QUICK_GELU}, "model_cfg."),
        **read_keys(tower, keys, f"{place}."),
        **read_keys(part(tower, "norm_kwargs"), {"eps": "norm_epsilon"}, f"{place}.norm_kwargs."),
        **read_keys(part(tower, "act_kwargs"), _APPROXIMATE, f"{place}.act_kwargs."),
    }
