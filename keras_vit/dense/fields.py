"""Derive the fields of a MapConfig from what published models state: config files, names, shapes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit._util.checks import pair
from keras_vit._util.text import warn
from keras_vit.converters.config_json import read_object, read_processor
from keras_vit.converters.containers import Container
from keras_vit.dense.config import four_blocks, last_blocks
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ResNetConfig, ViTConfig

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PILLOW_BICUBIC: dict[str, Any] = {"interpolation": "bicubic", "antialias": True, "round_pixels": True}
# Part of a file's name -> greatest depth in metres.
_MAX_DEPTHS = {"hypersim": 20.0, "vkitti": 80.0, "nyu": 10.0, "kitti": 80.0}
_RELATIVE_NAME = re.compile(r"depth_anything(_v2)?_vit[a-z]\d*")  # of the authors' files of relative depth
_INTERPOLATIONS = {0: "nearest", 1: "lanczos3", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers

Fields = dict[str, Any]


def huggingface_fields(values: Mapping[str, Any], config: ViTConfig, *, labels: Any) -> Fields:
    """Read the fields of a MapConfig from the config.json of a DPT or a Depth Anything.

    Sources: transformers, models/dpt and models/depth_anything.
    """
    kind, backbone = values.get("model_type"), values.get("backbone_config") or {}
    if kind not in ("dpt", "depth_anything"):
        raise CheckpointError(f"is not read: its config.json must be of dpt or depth_anything. Received: {kind!r:.100}")
    is_hybrid = config.resnet is not None
    check_value(values, "neck_ignore_stages", ([0, 1] if is_hybrid else [], None))
    check_value(values, "head_in_index", (-1, None))
    check_value(values, "hidden_act", ("gelu", None))  # of the readout
    # Stage 0 of a backbone is the tokens in front of the first block.
    blocks = values.get("backbone_out_indices")
    if backbone and not is_hybrid:
        blocks = [i - 1 for i in backbone.get("out_indices", ())]
    if not isinstance(blocks, list) or not all(isinstance(i, int) and 0 <= i < config.num_layers for i in blocks):
        raise CheckpointError(
            f"has a config.json that does not say which blocks its head reads. Received: {str(blocks):.200}"
        )
    fields: Fields = {
        "blocks": ("stage_1", "stage_2", *blocks[2:]) if is_hybrid else tuple(blocks),
        "norm": bool(backbone) and not is_hybrid and backbone.get("apply_layernorm", True),
        "factors": tuple(values.get("reassemble_factors", (4, 2, 1, 0.5))),
        "labels": labels,
        "result": "bilinear"
        if labels or "DPTForSemanticSegmentation" in values.get("architectures", ())
        else "bicubic",
    }
    if kind == "dpt":
        sizes = {"fusion_size": "double", "head_size": "double"}
        return {**fields, **sizes, "readout": values.get("readout_type", "project")}
    is_metric = values.get("depth_estimation_type", "relative") == "metric"
    if not is_metric:
        check_value(values, "max_depth", (1, None))
        return {**fields, "activation": "relu"}
    return {**fields, "activation": "sigmoid", "max_depth": float(values.get("max_depth", 1))}


def read_eomt(container: Container, values: Mapping[str, Any]) -> Fields:
    """Check an EoMT's config.json and what masks its attention; return the config.json with its class's defaults.

    Source: transformers, models/eomt and models/eomt_dinov3.
    """
    check_value(values, "hidden_act", ("gelu", None))  # of the head too
    rotary = values.get("rope_parameters") or {}
    check_value(rotary, "rope_type", ("default", None))
    if "attn_mask_probs" not in container.headers or (container.read("attn_mask_probs") > 0).any():
        raise CheckpointError(
            "is read only with attn_mask_probs of 0, as a training leaves them: its blocks mask their attention else. "
            f"Received: {container.read('attn_mask_probs') if 'attn_mask_probs' in container.headers else 'none'}"
        )
    blocks = container.headers["attn_mask_probs"].shape[0]
    check_value(values, "num_blocks", (blocks, None))
    usual = {"layer_norm_eps": 1e-6, "num_attention_heads": 16, "image_size": 640, "num_blocks": blocks}
    return {**usual, **rotary, **values}


def eomt_processor(folder: Path, size: tuple[int, int]) -> tuple[Fields, Fields]:
    """Read the fields of Preprocessing and of a MapConfig from a preprocessor_config.json (EomtImageProcessor)."""
    values = read_processor(folder)
    for key in ("do_resize", "do_rescale", "do_normalize"):
        check_value(values, key, (True, None))
    check_value(values, "rescale_factor", (1 / 255, None))
    check_value(values, "resample", (2, None))  # Pillow's bilinear
    is_split = bool(values.get("do_split_image", False))
    sides = {"shortest_edge": size[0], "longest_edge": None if is_split else size[0]}
    stated = values.get("size") or sides
    if size[0] != size[1] or not isinstance(stated, Mapping) or {**dict.fromkeys(sides), **stated} != sides:
        raise CheckpointError(
            f"is read only with a preprocessor_config.json whose size is {sides}, as its config.json has image_size="
            f"{size} and do_split_image is {is_split}. Received: {str(stated):.200}"
        )
    means = {name: tuple(values.get(f"image_{name}", usual)) for name, usual in IMAGENET.items()}
    return {**PILLOW_BICUBIC, "interpolation": "bilinear", **means}, {"framing": "windows" if is_split else "fit"}


def bit_config(stated: Any) -> ResNetConfig:
    """Read the config of a hybrid's BiT beside its tensors (transformers, models/bit and models/dpt)."""
    usual: Fields = {"layer_type": "bottleneck", "global_padding": "SAME", "embedding_dynamic_padding": True}
    values: Mapping[str, Any] = stated if isinstance(stated, Mapping) else usual
    check_value(values, "layer_type", ("bottleneck",))
    check_value(values, "global_padding", ("SAME", "same"))
    check_value(values, "embedding_dynamic_padding", (True,))
    check_value(values, "output_stride", (32, None))
    try:
        epsilons: Fields = {"norm_epsilon": 1e-5, "conv_epsilon": 1e-8, "conv_epsilon_place": "variance"}
        return ResNetConfig(groups=values.get("num_groups", 32), **epsilons)
    except ValueError as error:
        raise CheckpointError(f"has a config.json that does not describe a BiT: {error!s:.300}") from error


def huggingface_processor(folder: Path, size: tuple[int, int]) -> tuple[Fields, Fields]:
    """Read the fields of Preprocessing and of a MapConfig from a preprocessor_config.json (DPTImageProcessor).

    Without one the sides are those of the model, and the rest is transformers' default.
    """
    values = read_processor(folder) or {"size": {"height": size[0], "width": size[1]}}
    scale = 1.0 if values.get("do_rescale", True) else 255.0  # the mean is of pixels up to 255 then
    try:
        preparation = {
            **PILLOW_BICUBIC,
            "interpolation": _INTERPOLATIONS[values.get("resample", 3)],
            "mean": tuple(value / scale for value in values.get("image_mean", (0.5, 0.5, 0.5))),
            "std": tuple(value / scale for value in values.get("image_std", (0.5, 0.5, 0.5))),
        }
        stated = values.get("size", {"height": 384, "width": 384})
        sides = pair(stated if isinstance(stated, int) else (stated["height"], stated["width"]), "size")
        keeps = bool(values.get("keep_aspect_ratio", False))
        framing: Fields = {"size": sides, "framing": "keep" if keeps else "squash"}
        framing["multiple"] = pair(values.get("ensure_multiple_of") or 1, "ensure_multiple_of")[0]
        if not values.get("do_resize", True):
            framing["framing"] = "none"
        if values.get("do_pad", False):
            framing["multiple"] = pair(values.get("size_divisor") or 1, "size_divisor")[0]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"has a preprocessor_config.json that cannot be read: {error!s:.200}") from error
    return preparation, framing


def depth_anything_fields(path: Path, config: ViTConfig, stated: Mapping[str, Any]) -> Fields:
    """Derive the fields of a MapConfig from the name of a Depth Anything .pth file, which says its version.

    Sources: Depth-Anything-V2/depth_anything_v2/dpt.py, Depth-Anything/depth_anything/dpt.py.
    """
    name = path.name.casefold()
    if "v2" in name:
        blocks = four_blocks(config.num_layers)
    elif "blocks" in stated or name.startswith("depth_anything_vit"):
        blocks = last_blocks(config.num_layers)
    else:
        raise CheckpointError(
            "does not say whether it is Depth Anything V1 or V2, nor does its name: pass blocks=(2, 5, 8, 11) for V2 "
            f"(4 11 17 23 for L), the last four for V1. Received: {path.name!r:.200}"
        )
    depth = stated.get("max_depth") or _depth_from_name(path)
    if depth is None and "metric" in name:
        raise CheckpointError(
            "does not say its greatest depth, and its name says that it is metric: pass max_depth= in metres (20 for "
            f"Hypersim and indoors, 80 for VKITTI and outdoors). Received: {path.name!r:.200}"
        )
    if depth is None and not _RELATIVE_NAME.fullmatch(path.stem.casefold()):
        warn(
            f"keras_vit: {path.name} does not say whether its depth is metric, nor does its name: max_depth=None is "
            "assumed, relative depth, in which larger is nearer. Pass max_depth= in metres if it is metric"
        )
    framing = {"framing": "least", "multiple": 14, "size": (518, 518), "result": "bilinear-corners"}
    return {"blocks": blocks, "max_depth": depth, "activation": "sigmoid" if depth else "relu", **framing}


def dinov2_fields(path: Path, fields: Mapping[str, Any], inputs: int, config: ViTConfig) -> Fields:
    """Derive the fields of a MapConfig for a head of DINOv2 whose dense layer reads `inputs` channels.

    Sources: dinov2/hub/depthers.py and hub/depth, dinov2/eval/segmentation.
    """
    width, last = config.hidden_size, config.num_layers
    if inputs % width or inputs > 8 * width or last < 4:
        raise CheckpointError(
            f"does not fit the backbone, which is {width} wide. Received: a head of {inputs} channels"
        )
    if fields["output"] == "classes":
        framing = {"framing": "short", "size": (512, 512), "multiple": config.patch[0]}
        return {"blocks": tuple(range(last - inputs // width, last)), **framing}
    common: Fields = {"norm": False, "framing": "none", "multiple": config.patch[0], "min_depth": 0.001}
    common |= {"max_depth": _depth_from_name(path)}
    if fields["kind"] == "linear":
        blocks = (last - 1,) if inputs == 2 * width else four_blocks(last)
        return {**common, "blocks": blocks, "readout": "concat", "upsample": 4}
    sizes = {"fusion_size": "double", "head_size": "double"}
    return {**common, **sizes, "blocks": four_blocks(last), "readout": "project"}


def _depth_from_name(path: Path) -> float | None:
    """Find the greatest depth in a file's name, or in a config.json beside it."""
    for part, depth in _MAX_DEPTHS.items():
        if part in path.name.casefold():
            return depth
    beside = path.parent / "config.json"
    stated = read_object(beside).get("max_depth") if beside.is_file() else None
    return float(stated) if isinstance(stated, int | float) else None


def check_value(values: Mapping[str, Any], key: str, accepted: tuple[Any, ...]) -> None:
    """Raise a CheckpointError if a config.json has a value that is not accepted; None is a missing key."""
    if values.get(key) not in accepted:
        raise CheckpointError(
            f"is read only with {key} {accepted[0]!r} in its config.json. Received: {values.get(key)!r:.200}"
        )
