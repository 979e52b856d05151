"""Read and write timm's config.json: VisionTransformer, Eva, Beit, VisionTransformerRelPos, MlpMixer, ResNetV2."""

import functools
import math
from typing import Any

from keras_vit._util import files
from keras_vit.converters.config_json import (
    Fields,
    Json,
    Keys,
    accept_any,
    accept_only,
    channel_values,
    check_keys,
    fraction,
    implied_fields,
    part,
    per_channel,
    read_keys,
    sides_of,
    spell,
    write_keys,
)
from keras_vit.errors import CheckpointError
from keras_vit.model.config import Preprocessing, ViTConfig

_POOLS = {"token": "token", "avg": "gap", "map": "map", "": "unpooled"}  # "" is written for "token_unpooled", too
_CROP_MODES = {"center": "crop", "squash": "squash"}
_INTERPOLATIONS = {
    "bilinear": "bilinear",
    "bicubic": "bicubic",
    "lanczos": "lanczos3",
    "nearest": "nearest",
    "box": "area",
}
_OPPOSITE = {True: False, False: True}
_FINAL_NORMS = {True: "pooled", False: "tokens"}
_GELUS = {"gelu": "gelu_erf", "gelu_tanh": "gelu_tanh", "quick_gelu": "gelu_quick"}
# Activations that have the same name here.
_PLAIN = {name: name for name in ("relu", "relu6", "leaky_relu", "silu", "sigmoid", "tanh")}
_TOP: Keys = {"num_classes": "num_classes", "num_features": "hidden_size", "global_pool": ("classifier", _POOLS)}
# Arguments of the classes ResNetV2, MlpMixer, of both VisionTransformer and Eva, and of these two alone.
_BIT_ARGS: Keys = {"num_classes": "num_classes", "in_chans": "num_channels", "global_pool": ("classifier", _POOLS)}
_MIXER_ARGS: Keys = {**_BIT_ARGS, "img_size": "image_size"}
_BOTH_ARGS: Keys = {
    **_MIXER_ARGS,
    "patch_size": "patch_size",
    "embed_dim": "hidden_size",
    "depth": "num_layers",
    "num_heads": "num_heads",
    "class_token": "class_token",
    "no_embed_class": ("position_prefix", _OPPOSITE),
    "qkv_bias": "qkv_bias",
    "init_values": "layer_scale",
}
_BEIT_ARGS: Keys = {
    **{key: rule for key, rule in _BOTH_ARGS.items() if key not in ("class_token", "no_embed_class")},
    "use_fc_norm": ("final_norm", _FINAL_NORMS),
}
_VIT_ARGS: Keys = {
    **_BOTH_ARGS,
    "reg_tokens": "num_registers",
    "pos_embed": ("position", {"learn": "learned", "none": "none", "": "none"}),
    "pre_norm": "pre_norm",
    "fc_norm": ("final_norm", _FINAL_NORMS),
    "pool_include_prefix": "pool_prefix",
    "act_layer": ("activation", {**_GELUS, "swish": "silu", "hard_swish": "hard_swish", **_PLAIN}),
}
_EVA_ARGS: Keys = {
    **_BOTH_ARGS,
    "num_reg_tokens": "num_registers",
    "use_fc_norm": ("final_norm", _FINAL_NORMS),
    "rope_temperature": "rotary_theta",
    "ref_feat_shape": ("rotary_grid", lambda value: value if isinstance(value, int) else _side(value)),
    "rope_rotate_half": ("rotary_interleaved", _OPPOSITE),
    "rope_grid_offset": "rotary_offset",
    "rope_grid_indexing": ("rotary_axes", {"ij": "yx", "xy": "xy"}),
    "use_pre_transformer_norm": "pre_norm",
    "attn_pool_num_heads": "pool_heads",
}
_ROPE_ARGS: Keys = {**_EVA_ARGS, "rope_type": ("rotary_learned", {"cat": False, "mixed": True})}
_RELPOS_ARGS: Keys = {
    **{key: rule for key, rule in _BOTH_ARGS.items() if key != "no_embed_class"},
    "fc_norm": ("final_norm", _FINAL_NORMS),
}
# Arguments of all classes without a field of ViTConfig, and the values that are read.
_OTHER_ARGS = {
    **accept_any("mlp_ratio num_blocks layers channels stem_chs width_factor"),  # the tensors tell
    **accept_any("scale_attn_norm scale_mlp_norm scale_attn_inner proj_bias"),
    **accept_any("qkv_fused swiglu_mlp swiglu_align_to scale_mlp use_abs_pos_emb attn_pool_mlp_ratio"),
    **accept_any("use_rel_pos_bias use_shared_rel_pos_bias head_init_scale shared_rel_pos rel_pos_dim"),
    "rel_pos_type": ["mlp", "bias"],
    **accept_any("drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate"),
    **accept_any("dynamic_img_size strict_img_size weight_init fix_init nlhb zero_init_last"),
    **accept_only(False, "qk_norm dynamic_img_pad stem_norm avg_down"),
    **accept_only(True, "use_rot_pos_emb preact"),
    "final_norm": [True, False],
    "use_post_transformer_norm": [True, False, None],
    "norm_layer": ["layernorm", "layer_norm", "LayerNorm", "layernormfp32"],
    "stem_type": ["fixed"],  # another one pads the pooling differently
    "bottle_ratio": [0.25],
    "output_stride": [32],
}


# What the classes have where neither their entry point nor an argument says it.
BLOCKS: Fields = {"activation": "gelu_erf", "norm_epsilon": 1e-6, "pool_heads": None, "pool_prefix": False}
_ROTARY: Fields = {"rotary_grid": None, "rotary_interleaved": False, "rotary_offset": 0.0, "rotary_axes": "yx"}
VIT: Fields = {**BLOCKS, **_ROTARY, "rotary_theta": None, "position_method": "bicubic-antialias"}
AIMV2: Fields = {**VIT, "activation": "silu", "norm_epsilon": 1e-5}
EVA: Fields = {**BLOCKS, **_ROTARY, "final_norm": "tokens"}  # its entry points say whether it is rotary


def _side(value: Any) -> int:
    if len(value) != 2 or value[0] != value[1]:
        raise ValueError("both sides are equal")
    return int(value[0])


@functools.cache
def _names() -> dict[str, Any]:
    return files.read_toml(files.data_folder("converters") / "timm_names.toml")


def read(values: Json, defaults: Fields | None = None) -> Fields:
    """Read the config.json of a model of timm: its class's defaults, what its entry point implies, its arguments."""
    arguments, prepared = part(values, "model_args"), part(values, "pretrained_cfg")
    is_old = "architecture" in values and "pretrained_cfg" not in values  # timm 0.5 and 0.6 have its keys on top
    prepared = values if is_old else prepared
    keys = {**_VIT_ARGS, **_ROPE_ARGS}
    check_keys(arguments, _OTHER_ARGS, "model_args", keys)
    preparation: Keys = {
        "mean": ("mean", channel_values),
        "std": ("std", channel_values),
        "crop_mode": ("resize", _CROP_MODES),
        "crop_pct": ("crop_fraction", fraction),
        "interpolation": ("interpolation", _INTERPOLATIONS),
    }
    preprocessing = read_keys(prepared, preparation, "pretrained_cfg.")
    if preprocessing:
        preprocessing = {"resize": "crop", **preprocessing}  # timm's default
    described: Fields = {
        **read_keys(values if is_old else {}, {"labels": ("labels", _labels)}),
        **read_keys(prepared, {"label_names": ("labels", _labels)}, "pretrained_cfg."),
        **read_keys(values, {"label_names": ("labels", _labels)}),
        **({"preprocessing": preprocessing} if preprocessing else {}),
    }
    if "architecture" not in values:  # the other keys mean different things in different classes
        return described
    size: Keys = {"input_size": ("image_size", lambda shape: sides_of(shape, 1))}
    implied = implied_fields("architecture", values["architecture"], _names())
    top = read_keys(values, _TOP)
    if arguments.get("pool_include_prefix") and top.get("classifier", "token") != "map":
        raise CheckpointError("config.json: model_args.pool_include_prefix is read only with attention pooling")
    fields: Fields = {
        **implied,
        **top,
        **read_keys(prepared, size, "pretrained_cfg."),
        **read_keys(arguments, keys, "model_args."),
        **described,
        **_absent_norm(arguments),
    }
    if "rope_type" in arguments and "rotary_axes" not in implied:  # DINOv3 and EVA-02 have further arguments
        raise CheckpointError("config.json: model_args.rope_type is read of RoPE-ViTs and Perception Encoders alone")
    if fields.get("rotary_learned"):  # numbers of patches, whatever the other arguments say
        if not fields["rotary_interleaved"]:
            raise CheckpointError("config.json: model_args.rope_rotate_half is not read with rope_type='mixed'")
        fields |= {"rotary_grid": 0, "rotary_offset": 0.0}
    pools_all = "rotary_theta" in implied and fields.get("classifier") == "map"  # Eva's attention pools all tokens
    usual = VIT if defaults is None else defaults
    return {**usual, **({"pool_prefix": True} if pools_all else {}), **fields}


def _labels(value: Any) -> tuple[str, ...]:
    """Read the names of classes in a list, or in {"0": "cat", "1": "dog"}."""
    names = value if isinstance(value, list) else [value[str(number)] for number in range(len(value))]
    return tuple(str(name) for name in names)


def _absent_norm(arguments: Json) -> Fields:
    """Read that a model has no final norm: from an argument of VisionTransformer, or two of Eva."""
    before, after = arguments.get("use_post_transformer_norm"), arguments.get("use_fc_norm")
    if before is not None and (after is None or (before and after)):
        raise CheckpointError(
            "config.json: model_args.use_post_transformer_norm is read only with use_fc_norm, of which at most one is "
            f"true. Received: {before!r:.200} and {after!r:.200}"
        )
    is_absent = before is after is False or arguments.get("final_norm") is False
    return {"final_norm": "none"} if is_absent else {}


def _write_timm(config: ViTConfig, keys: Keys, name: str, first: str, head: Any = "head", **arguments: Any) -> Fields:
    """Write the config.json of a class of timm: an entry point, and all arguments that its size may lack."""
    ours: Preprocessing = config.preprocessing
    model = config.replace(classifier="unpooled") if config.is_unpooled else config
    if config.final_norm == "none":
        absent = {"use_post_transformer_norm": False, "use_fc_norm": False}
        absent = absent if "use_fc_norm" in keys else {"final_norm": False}
        model, arguments = model.replace(final_norm="tokens"), {**arguments, **absent}
    return {
        "architecture": name,
        **write_keys(model, _TOP),
        "model_args": {**write_keys(model, keys), **arguments},
        "pretrained_cfg": {
            "first_conv": first,
            "classifier": head,
            "input_size": [config.num_channels, *config.size],
            "mean": per_channel(ours.mean, config),
            "std": per_channel(ours.std, config),
            "crop_mode": spell("preprocessing.resize", ours.resize, _CROP_MODES),
            "crop_pct": ours.crop_fraction,
            "interpolation": spell("preprocessing.interpolation", ours.interpolation, _INTERPOLATIONS),
        },
    }


def _ratio(width: int, config: ViTConfig) -> float:
    """Find a ratio r with int(r * hidden_size) == width, as timm computes the width of an MLP."""
    ratio = width / config.hidden_size
    return ratio if int(config.hidden_size * ratio) == width else math.nextafter(ratio, math.inf)


_HYBRIDS = {  # stages of a ResNet of width 64 -> entry point
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1408: "giant", 1664: "gigantic"}


def write_vit(config: ViTConfig) -> Fields:
    """Write the config.json of timm's VisionTransformer. Its entry point has the width, and its arguments the rest."""
    size, resnet, first = _SIZES.get(config.hidden_size), config.resnet, "patch_embed.proj"
    if config.rotary_theta is not None and not (resnet or config.distilled or config.gated_mlp):
        return write_rope(config)
    if config.has_map_head and config.pool_mlp_dim is not None:
        received = f"Received: pool_mlp_dim={config.pool_mlp_dim}, mlp_dim={config.mlp_dim}"
        raise CheckpointError(f"timm's VisionTransformer has attention pooling with an MLP of mlp_dim. {received}")
    if resnet:
        name = _HYBRIDS.get(resnet.num_layers) if resnet.width_factor == 1 else None
        first = f"patch_embed.backbone.{'stem.' if resnet.num_layers else ''}conv" if name else first
    elif config.distilled:
        name = f"deit_{size if size in ('small', 'base') else 'tiny'}_distilled_patch16_224"
    elif config.gated_mlp:
        name = "vit_giant_patch14_dinov2"
    elif config.attention_norm:
        name = f"beit3_{size if size in ('base', 'large') else 'base'}_patch16_224"
    elif config.norm_epsilon == 1e-5:
        name = f"vit_{size}_patch14_clip_224" if size in ("large", "huge") else "vit_base_patch16_clip_224"
    else:
        name = f"vit_{size or 'base'}_patch{14 if size in ('huge', 'giant', 'gigantic') else 16}_224"
    head = ["head", "head_dist"] if config.distilled and not resnet else "head"
    arguments: Fields = {"mlp_ratio": _ratio(config.mlp_dim * (1 + config.gated_mlp), config)}
    if config.attention_norm or config.mlp_norm:  # earlier versions of timm do not know these arguments
        arguments |= {"scale_attn_norm": config.attention_norm, "scale_mlp_norm": config.mlp_norm}
    # timm has no entry point of other hybrids.
    return _write_timm(config, _VIT_ARGS, name or "vit_hybrid", first, head, **arguments)


def write_aimv2(config: ViTConfig) -> Fields:
    """Write the config.json of timm's VisionTransformer as an AIMv2, whose norms and MLPs its entry points have."""
    size = {1536: "huge", 2048: "1b", 3072: "3b"}.get(config.hidden_size, "large")
    ratio = _ratio(config.mlp_dim, config)
    return _write_timm(config, _VIT_ARGS, f"aimv2_{size}_patch14_224", "patch_embed.proj", mlp_ratio=ratio)


def write_eva(config: ViTConfig) -> Fields:
    """Write the config.json of timm's Eva."""
    arguments: Fields = {"mlp_ratio": _ratio(config.mlp_dim, config)}
    if config.rotary_grid:
        arguments["ref_feat_shape"] = [config.rotary_grid] * 2
    if config.rotary_interleaved:
        name = "eva02_base_patch14_448" if config.mlp_norm else "eva02_tiny_patch14_336"
        name = "eva02_base_patch16_clip_224" if config.attention_norm else name
    else:
        name = f"vit_small{'_plus' if config.gated_mlp else ''}_patch16_dinov3{'_qkvb' if config.qkv_bias else ''}"
        arguments |= {"swiglu_align_to": 1} if config.gated_mlp else {}
    return _write_timm(config, _EVA_ARGS, name, "patch_embed.proj", **arguments)


def write_rope(config: ViTConfig) -> Fields:
    """Write the config.json of timm's Eva with AttentionRope: a RoPE-ViT, or a Perception Encoder (other grids)."""
    arguments: Fields = {
        "mlp_ratio": _ratio(config.mlp_dim, config),
        "attn_pool_mlp_ratio": _ratio(config.pool_mlp_dim or config.mlp_dim, config),
        "use_abs_pos_emb": config.position == "learned",
        "init_values": config.layer_scale,  # without one, too
    }
    name = "vit_pe_core_base_patch16_224" if config.rotary_grid else "vit_base_patch16_rope_224"
    if config.rotary_grid:
        arguments["ref_feat_shape"] = [config.rotary_grid] * 2
    if config.has_map_head:
        arguments["attn_pool_num_heads"] = config.pool_heads or config.num_heads
    if config.final_norm != "none":
        arguments["use_post_transformer_norm"] = config.final_norm == "tokens"
    return _write_timm(config, _ROPE_ARGS, name, "patch_embed.proj", **arguments)


def write_beit(config: ViTConfig) -> Fields:
    """Write the config.json of timm's Beit."""
    arguments: Fields = {
        "mlp_ratio": _ratio(config.mlp_dim, config),
        "use_abs_pos_emb": config.position == "learned",
        "use_rel_pos_bias": config.relative_bias == "blocks",
        "use_shared_rel_pos_bias": config.relative_bias == "shared",
    }
    size = "large" if config.hidden_size == 1024 else "base"
    return _write_timm(config, _BEIT_ARGS, f"beit_{size}_patch16_224", "patch_embed.proj", **arguments)


def write_relpos(config: ViTConfig) -> Fields:
    """Write the config.json of timm's VisionTransformerRelPos."""
    arguments: Fields = {
        "mlp_ratio": _ratio(config.mlp_dim, config),
        "rel_pos_type": "bias" if config.relative_bias_mlp_dim is None else "mlp",
        "shared_rel_pos": config.relative_bias == "shared",
    }
    if config.relative_bias_mlp_dim is not None:
        arguments["rel_pos_dim"] = config.relative_bias_mlp_dim
    if config.layer_scale is None:
        arguments["init_values"] = 0  # its default is not None
    size = {384: "small", 512: "medium"}.get(config.hidden_size, "base")
    return _write_timm(config, _RELPOS_ARGS, f"vit_relpos_{size}_patch16_224", "patch_embed.proj", **arguments)


def write_mixer(config: ViTConfig) -> Fields:
    """Write the config.json of timm's MlpMixer, whose entry points refuse arguments for width, depth and patch."""
    size = {(512, 8): "s", (768, 12): "b", (1024, 24): "l"}.get((config.hidden_size, config.num_layers))
    name = f"mixer_{size}{32 if config.patch == (32, 32) else 16}_224" if size else "mixer_b16_224"
    ratios = [_ratio(width, config) for width in (config.tokens_mlp_dim or 0, config.mlp_dim)]
    return _write_timm(config, _MIXER_ARGS, name, "stem.proj", mlp_ratio=ratios)


# Stages -> depth in the name, and width factors.
_BITS: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {
    (3, 4, 6, 3): ("50", (1, 3)),
    (3, 4, 23, 3): ("101", (1, 3)),
    (3, 8, 36, 3): ("152", (2, 4)),
}


def write_bit(config: ViTConfig) -> Fields:
    """Write the config.json of timm's ResNetV2, whose entry points have all arguments of their architecture."""
    name, resnet = "resnetv2", config.resnet
    if resnet and not resnet.stage_widths and resnet.num_layers in _BITS:
        depth, factors = _BITS[resnet.num_layers]
        name = f"resnetv2_{depth}x{resnet.width_factor:.0f}_bit" if resnet.width_factor in factors else name
    return _write_timm(config, _BIT_ARGS, name, "stem.conv", "head.fc")
