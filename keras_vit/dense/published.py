"""Read what the tensors of published models of maps do not say: the blocks of the head, and the framing of images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit.converters.config_json import read_object
from keras_vit.dense.config import four_blocks, last_blocks
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ResNetConfig, ViTConfig

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PILLOW_BICUBIC: dict[str, Any] = {"interpolation": "bicubic", "antialias": True, "round_pixels": True}
# Part of a file's name -> greatest depth in metres.
_DEPTHS = {"nyu": 10.0, "kitti": 80.0, "hypersim": 20.0, "vkitti": 80.0}
_INTERPOLATIONS = {0: "nearest", 1: "lanczos3", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers

Fields = dict[str, Any]


def huggingface_fields(values: Mapping[str, Any], config: ViTConfig, *, labels: Any) -> Fields:
    """Return the fields of a MapConfig that the config.json of a DPT or a Depth Anything states.

    Sources: transformers, models/dpt and models/depth_anything.
    """
    kind, backbone = values.get("model_type"), values.get("backbone_config") or {}
    if kind not in ("dpt", "depth_anything"):
        raise CheckpointError(f"is not read: its config.json must be of dpt or depth_anything. Received: {kind!r:.100}")
    is_hybrid = config.resnet is not None
    _check(values, "neck_ignore_stages", ([0, 1] if is_hybrid else [], None))
    _check(values, "head_in_index", (-1, None))
    _check(values, "hidden_act", ("gelu", None))  # of the readout
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
        _check(values, "max_depth", (1, None))
        return {**fields, "activation": "relu"}
    return {**fields, "activation": "sigmoid", "max_depth": float(values.get("max_depth", 1))}


def bit_config(stated: Any) -> ResNetConfig:
    """Return what the config of a hybrid's BiT states besides its tensors (transformers, models/bit and models/dpt)."""
    usual: Fields = {"layer_type": "bottleneck", "global_padding": "SAME", "embedding_dynamic_padding": True}
    values: Mapping[str, Any] = stated if isinstance(stated, Mapping) else usual
    _check(values, "layer_type", ("bottleneck",))
    _check(values, "global_padding", ("SAME", "same"))
    _check(values, "embedding_dynamic_padding", (True,))
    _check(values, "output_stride", (32, None))
    try:
        epsilons: Fields = {"norm_epsilon": 1e-5, "conv_epsilon": 1e-8, "conv_epsilon_place": "variance"}
        return ResNetConfig(groups=values.get("num_groups", 32), **epsilons)
    except ValueError as error:
        raise CheckpointError(f"has a config.json that does not describe a BiT: {error!s:.300}") from error


def huggingface_processor(folder: Path, size: tuple[int, int]) -> tuple[Fields, Fields]:
    """Return the fields of Preprocessing and of a MapConfig that a preprocessor_config.json states (DPTImageProcessor).

    Without one the sides are those of the model, and the rest is transformers' default.
    """
    path = folder / "preprocessor_config.json"
    values: Fields = read_object(path) if path.is_file() else {"size": {"height": size[0], "width": size[1]}}
    scale = 1.0 if values.get("do_rescale", True) else 255.0  # the mean is of pixels up to 255 then
    try:
        preparation = {
            **PILLOW_BICUBIC,
            "interpolation": _INTERPOLATIONS[values.get("resample", 3)],
            "mean": tuple(value / scale for value in values.get("image_mean", (0.5, 0.5, 0.5))),
            "std": tuple(value / scale for value in values.get("image_std", (0.5, 0.5, 0.5))),
        }
        stated = values.get("size", {"height": 384, "width": 384})
        sides = (stated, stated) if isinstance(stated, int) else (stated["height"], stated["width"])
        keeps = bool(values.get("keep_aspect_ratio", False))
        framing: Fields = {"size": sides, "framing": "keep" if keeps else "squash"}
        framing["multiple"] = int(values.get("ensure_multiple_of") or 1)
        if not values.get("do_resize", True):
            framing["framing"] = "none"
        if values.get("do_pad", False):
            framing["multiple"] = int(values.get("size_divisor") or 1)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"has a preprocessor_config.json that cannot be read: {error!s:.200}") from error
    return preparation, framing


def depth_anything_fields(path: Path, config: ViTConfig, stated: Mapping[str, Any]) -> Fields:
    """Return the fields of a MapConfig for an own .pth file of Depth Anything, whose name says its version.

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
    depth = stated.get("max_depth") or (_depth_of_name(path) if "metric" in name else None)
    framing = {"framing": "least", "multiple": 14, "size": (518, 518), "result": "bilinear-corners"}
    return {"blocks": blocks, "max_depth": depth, "activation": "sigmoid" if depth else "relu", **framing}


def dinov2_fields(path: Path, fields: Mapping[str, Any], inputs: int, config: ViTConfig) -> Fields:
    """Return the fields of a MapConfig for a head of DINOv2 whose dense layer reads `inputs` channels.

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
    common |= {"max_depth": _depth_of_name(path)}
    if fields["kind"] == "linear":
        blocks = (last - 1,) if inputs == 2 * width else four_blocks(last)
        return {**common, "blocks": blocks, "readout": "concat", "upsample": 4}
    sizes = {"fusion_size": "double", "head_size": "double"}
    return {**common, **sizes, "blocks": four_blocks(last), "readout": "project"}


def _depth_of_name(path: Path) -> float | None:
    """Return the greatest depth that a file's name says, or a config.json beside it."""
    for part, depth in _DEPTHS.items():
        if part in path.name.casefold():
            return depth
    beside = path.parent / "config.json"
    stated = read_object(beside).get("max_depth") if beside.is_file() else None
    return float(stated) if isinstance(stated, int | float) else None


def _check(values: Mapping[str, Any], key: str, accepted: tuple[Any, ...]) -> None:
    if values.get(key) not in accepted:
        raise CheckpointError(
            f"is read only with {key} {accepted[0]!r} in its config.json. Received: {values.get(key)!r:.200}"
        )
