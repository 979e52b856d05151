"""Read and write the config.json files of other programs: two functions for each program.

A reader returns the fields of ViTConfig (of TextConfig for a text tower) that an object states. It raises a
CheckpointError for a value that would change the model and that keras_vit does not know. A writer returns the object
for a config, and raises for a value that the program has no name for.
"""

import fnmatch
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from keras_vit._util import files
from keras_vit._util.checks import check_counts
from keras_vit._util.text import warn
from keras_vit.converters import json_timm as timm
from keras_vit.converters import json_towers as towers
from keras_vit.converters.config_json import (
    PROCESSOR,
    Fields,
    Json,
    JsonConfig,
    Keys,
    channel_values,
    check_keys,
    fraction,
    implied_fields,
    part,
    per_channel,
    read_keys,
    spell,
    write_keys,
)
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig

_SIDES = ("height", "width")
_PROCESSOR_KEYS = ("size", "crop_size", "do_center_crop", "image_mean", "image_std", "resample")
_MOST_PIXELS = 4096  # of a side to which images are resized before they are cropped

# ---- Hugging Face transformers

_ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_python": "gelu_erf",
    "quick_gelu": "gelu_quick",
    "swish": "silu",
    "hardswish": "hard_swish",
    **{name: name for name in ("relu", "relu6", "leaky_relu", "silu", "sigmoid", "tanh", "linear")},
}
_PILLOW = {2: "bilinear", 3: "bicubic", 0: "nearest", 1: "lanczos3"}  # Pillow's numbers
# Other values would prepare images in another way.
_PREPARED: dict[str, list[Any]] = {
    "do_resize": [True],
    "do_rescale": [True],
    "do_normalize": [True],
    "rescale_factor": [0.00392156862745098],
}
_PROCESSOR_FILE = {"preprocessor": PROCESSOR}
_SIZES: Keys = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
    "hidden_act": ("activation", _ACTIVATIONS),
    "layer_norm_eps": "norm_epsilon",
}
_IMAGE: Keys = {
    **_SIZES,
    "patch_size": "patch_size",
    "image_size": "image_size",
    "num_channels": "num_channels",
}
_DROPOUT: Keys = {"hidden_dropout_prob": "dropout_rate", "attention_probs_dropout_prob": "attention_dropout_rate"}
_VIT: Keys = {
    **_IMAGE,
    **_DROPOUT,
    "qkv_bias": "qkv_bias",
    "pooler_act": ("representation_activation", _ACTIVATIONS),
}
_DINOV2: Keys = {
    **{key: rule for key, rule in _IMAGE.items() if key != "intermediate_size"},
    **_DROPOUT,
    "qkv_bias": "qkv_bias",
    "use_swiglu_ffn": "gated_mlp",
    "layerscale_value": "layer_scale",
}
_DINOV2_REGISTERS: Keys = {**_DINOV2, "num_register_tokens": "num_registers"}
_PIXIO: Keys = {
    **{key: rule for key, rule in _VIT.items() if key not in ("intermediate_size", "pooler_act")},
    "n_cls_tokens": "num_class_tokens",
}
_DINOV3: Keys = {
    **_IMAGE,
    "attention_dropout": "attention_dropout_rate",
    "use_gated_mlp": "gated_mlp",
    "num_register_tokens": "num_registers",
    "rope_theta": "rotary_theta",
    "layerscale_value": "layer_scale",
}
_BEIT: Keys = {
    **_IMAGE,
    **_DROPOUT,
    "layer_scale_init_value": "layer_scale",
}
_AIMV2: Keys = {
    **{key: rule for key, rule in _IMAGE.items() if key != "layer_norm_eps"},
    "rms_norm_eps": "norm_epsilon",
    "attention_dropout": "attention_dropout_rate",
    "qkv_bias": "qkv_bias",
    "mlp_bias": "dense_bias",
    "is_native": ("position", {False: "learned"}),  # True: computed positions, for images of any size
}
_VISION: Keys = {**_IMAGE, "attention_dropout": "attention_dropout_rate"}


@functools.cache
def _classes() -> dict[str, Any]:
    return files.read_toml(files.data_folder("converters") / "transformers.toml")


def _class_fields(values: Json, kind: Any = None) -> Fields:
    """Look up what the class of a config.json has where keys are missing; {} if it names no class that is known."""
    kind, types = values.get("model_type", kind), _classes()["types"]
    is_known = any(fnmatch.fnmatchcase(str(kind), pattern) for pattern in types if pattern != "*")
    return implied_fields("model_type", kind, types) if is_known else {}


def _read_transformers(values: Json, keys: Keys) -> Fields:
    """Read the config.json of an image model, or of a model that has one inside."""
    preprocessor: Keys = {"preprocessor": ("preprocessing", _processor)}
    # Of a VisionEncoderDecoderModel, of FLAVA, of Depth Anything and others; a DPT hybrid has the config of its ResNet.
    kinds = ("encoder", "image_config", *(() if "hidden_size" in values else ("backbone_config",)))
    if inside := next((kind for kind in kinds if isinstance(values.get(kind), dict)), None):
        tower = values[inside]
        return {
            **_class_fields(tower, "vit"),
            **read_keys(tower, keys, f"{inside}."),
            **read_keys(values, preprocessor),
        }
    return {**_class_fields(values), **read_keys(values, {**keys, "id2label": ("labels", _labels), **preprocessor})}


def _labels(value: Any) -> tuple[str, ...] | None:
    """Read the labels in {"0": "cat", "1": "dog"}; None if they are only numbers."""
    labels = tuple(str(value[str(number)]) for number in range(len(value)))
    return None if all(label == f"LABEL_{number}" for number, label in enumerate(labels)) else labels


def _processor(values: Any) -> Fields:
    """Read the fields of Preprocessing in a preprocessor_config.json."""
    check_keys(values, _PREPARED, "preprocessor")
    known = _classes()["keys"]
    kind = str(values.get("image_processor_type") or values.get("feature_extractor_type") or "")
    family = _family(kind)
    used = {*known["ignored"], *_PREPARED, *_PROCESSOR_KEYS}
    others = {
        key: value
        for key, value in values.items()
        if value is not None and key not in used and value not in known["neutral"].get(key, ())
    }
    if kind and not family:
        others["image_processor_type"] = kind
    if others:
        listed = ", ".join(f"{key}={value!r:.60}" for key, value in others.items())
        warn(
            f"keras_vit: the file of the image processor says {listed}, which is not read: the pixels may differ from "
            "the program's that wrote it. Compare model.preprocess(image) with it, or state preprocessing in config="
        )
    if family:
        values = {"resample": family["filter"], **values}
    keys: Keys = {
        "image_mean": ("mean", channel_values),
        "image_std": ("std", channel_values),
        "resample": ("interpolation", _PILLOW),
    }
    return {**_processor_sizes(values, family), **read_keys(values, keys, "preprocessor.")}


def _family(kind: str) -> Mapping[str, Any]:
    """Look up what a class of image processors has where keys are missing; {} for an unknown one."""
    found: Mapping[str, Any] = _classes()["processors"].get(
        re.sub("(ImageProcessor(Fast)?|FeatureExtractor)$", "", kind), {}
    )
    return found


def _processor_sizes(values: Any, family: Mapping[str, Any]) -> Fields:
    size, crop = values.get("size"), values.get("crop_size")
    if not size:
        return {}
    stated = {"shortest_edge": size} if isinstance(size, int) else size
    keys = ("shortest_edge",) if "shortest_edge" in stated else _SIDES
    if not (sides := [stated[key] for key in keys if key in stated]):
        raise ValueError(f"a size has one of {_SIDES} or shortest_edge")
    check_counts(**dict(zip(keys, sides, strict=False)))
    if max(sides) > _MOST_PIXELS:
        raise ValueError(f"images are resized to at most {_MOST_PIXELS} pixels")
    named = {"resize": "squash" if keys is _SIDES else "crop"}
    # An old file has a single number: of the sides that its class means, or else that the format's table names.
    resize = named if stated is size else {key: family[key] for key in named if key in family}
    if not crop and values.get("do_center_crop", family.get("crops")):
        return resize  # a crop of a size that the file does not say
    cropped = sides
    if crop and values.get("do_center_crop", True):
        cropped = [crop, crop] if isinstance(crop, int) else [crop[key] for key in _SIDES]
        check_counts(crop_size=min(cropped))
        cropped = cropped if len(sides) == 2 else [min(cropped)]
    share = fraction(min(part / side for part, side in zip(cropped, sides, strict=True)))
    if any(math.floor(part / share + 1e-6) != side for part, side in zip(cropped, sides, strict=True)):
        raise ValueError("size and crop_size have the same aspect ratio")
    return {**resize, "crop_fraction": share}


# Kinds of models in which transformers takes a square root of the number of patches, or computes a square of the side.
_SQUARE = (
    "aimv2_vision_model",
    "beit",
    "dinov2",
    "dinov2_with_registers",
    "clip_vision_model",
    "siglip",
    "siglip_vision_model",
    "pixio",
)


def _write_transformers(config: ViTConfig, keys: Keys, kind: str, name: str, processor: str, **others: Any) -> Fields:
    """Write the config.json of a class of transformers, with its preprocessor_config.json and its labels."""
    if kind in _SQUARE and len({*config.size}) > 1:
        raise CheckpointError(
            f"config.json cannot express image_size={config.size}: transformers runs {name} on square images alone. "
            "Write another format, such as timm, or model.resized(image_size) with one number first"
        )
    ours = config.preprocessing
    sides = [math.floor(side / ours.crop_fraction + 1e-6) for side in config.size]
    height_width = dict(zip(_SIDES, sides, strict=True))
    crop = {"do_center_crop": True, "crop_size": dict(zip(_SIDES, config.size, strict=True))}
    whole = {"do_center_crop": False} if _family(processor).get("crops") else {}
    prepared = {
        "image_processor_type": processor,
        **{key: value for key, (value,) in _PREPARED.items()},
        "size": {"shortest_edge": min(sides)} if ours.resize == "crop" else height_width,
        **(whole if ours.resize == "squash" and ours.crop_fraction == 1 else crop),
        "image_mean": per_channel(ours.mean, config),
        "image_std": per_channel(ours.std, config),
        "resample": spell("preprocessing.interpolation", ours.interpolation, _PILLOW),
    }
    stated = {"model_type": kind, "dtype": "float32", **write_keys(config, keys), **others}
    return {"architectures": [name], **stated, "preprocessor": prepared}


def _write_labels(config: ViTConfig) -> Fields:
    from keras_vit.model import labels

    if not config.num_classes:
        return {}
    names = [label for _, label in labels.names(config.labels, config.num_classes)] if config.labels else None
    texts = names or [f"LABEL_{number}" for number in range(config.num_classes)]
    numbers = {label: number for number, label in enumerate(texts)}
    return {"id2label": {str(number): label for number, label in enumerate(texts)}, "label2id": numbers}


def read_vit(values: Json) -> Fields:
    """Read the config.json of ViTModel, DeiTModel, IJepaModel and of their classifiers."""
    return _read_transformers(values, _VIT)


def write_vit(config: ViTConfig, kind: str = "ViT") -> Fields:
    """Write the config.json of ViTModel, of ViTForImageClassification, or of their like of another `kind`."""
    processor = "ViTImageProcessor" if kind == "IJepa" else f"{kind}ImageProcessor"
    others = {"encoder_stride": 16, "initializer_range": 0.02, **_write_labels(config)}
    if config.representation_size:
        others["pooler_output_size"] = config.representation_size
    name = f"{kind}ForImageClassification" if config.num_classes else f"{kind}Model"
    name += "WithTeacher" if config.distilled else ""
    return _write_transformers(config, _VIT, kind.lower(), name, processor, **others)


def read_beit(values: Json) -> Fields:
    """Read the config.json of BeitModel, Data2VecVisionModel and of their classifiers."""
    return _read_transformers(values, _BEIT)


def write_beit(config: ViTConfig) -> Fields:
    """Write the config.json of BeitModel or of its classifier."""
    others: Fields = {
        "layer_scale_init_value": 0.0,
        "use_mean_pooling": config.final_norm == "pooled",
        "use_absolute_position_embeddings": config.position == "learned",
        "use_relative_position_bias": config.relative_bias == "blocks",
        "use_shared_relative_position_bias": config.relative_bias == "shared",
        **write_keys(config, {"layer_scale_init_value": "layer_scale"}),
    }
    name = f"Beit{'ForImageClassification' if config.num_classes else 'Model'}"
    return _write_transformers(config, _BEIT, "beit", name, "BeitImageProcessor", **others, **_write_labels(config))


def _with_ratio(kind: str, name: str, keys: Keys) -> JsonConfig:
    """Reader and writer of the config.json of a `kind` of models whose MLP has a ratio, and of their classifiers."""

    def write(config: ViTConfig) -> Fields:
        others = {"mlp_ratio": _whole_ratio(config), "initializer_range": 0.02, **_write_labels(config)}
        if kind == "dinov2":
            others["use_mask_token"] = False  # it is for masked pre-training and not kept
        whole_name = name + ("ForImageClassification" if config.num_classes else "Model")
        return _write_transformers(config, keys, kind, whole_name, "BitImageProcessor", **others)

    return JsonConfig(functools.partial(_read_transformers, keys=keys), write, _PROCESSOR_FILE)


def _whole_ratio(config: ViTConfig) -> int:
    """Compute Dinov2Config.mlp_ratio, an integer; a SwiGLU is 2/3 as wide, rounded up to a multiple of 8."""
    width = config.mlp_dim
    for ratio in range(1, 2 + 3 * width // config.hidden_size):
        full = ratio * config.hidden_size
        if width == ((int(full * 2 / 3) + 7) // 8 * 8 if config.gated_mlp else full):
            return ratio
    raise CheckpointError(f"config.json cannot express mlp_dim={width}: mlp_ratio must be an integer")


def read_dinov3(values: Json) -> Fields:
    """Read the config.json of DINOv3ViTModel."""
    return _read_transformers(values, _DINOV3)


def write_dinov3(config: ViTConfig) -> Fields:
    """Write the config.json of DINOv3ViTModel."""
    query, key = config.qkv_bias, config.qkv_bias and config.key_bias
    others = {"query_bias": query, "value_bias": query, "key_bias": key, "initializer_range": 0.02}
    others |= _write_labels(config)
    return _write_transformers(config, _DINOV3, "dinov3_vit", "DINOv3ViTModel", "DINOv3ViTImageProcessor", **others)


def _read_tower(values: Json, inside: str, keys: Keys, names: Mapping[str, Fields | str]) -> Fields:
    """Read a tower of a pair, or the config.json of a tower alone. A nested config lacks its class's defaults."""
    tower = part(values, inside) if inside in values else values
    return {
        **implied_fields(f"{inside}.model_type", tower.get("model_type"), names),
        **read_keys(tower, keys, f"{inside}."),
    }


def read_vision(values: Json, tower_keys: Keys = _VISION) -> Fields:
    """Read the config.json of CLIP, SigLIP and AIMv2 vision models, and of their pairs and classifiers."""
    tower = part(values, "vision_config") if "vision_config" in values else values
    keys: Keys = {"preprocessor": ("preprocessing", _processor), "id2label": ("labels", _labels)}
    fields = {**_class_fields(tower, values.get("model_type")), **read_keys(tower, tower_keys, "vision_config.")}
    if tower.get("model_type") == "siglip2_vision_model":  # of any grid; its positions are those of a square
        fields |= read_keys(
            tower, {"num_patches": ("image_size", lambda count: math.isqrt(count) * tower["patch_size"])}
        )
    return {**fields, **read_keys(values, keys)}


def write_clip(config: ViTConfig) -> Fields:
    """Write the config.json of CLIPVisionModel or CLIPVisionModelWithProjection."""
    name, others = "CLIPVisionModel", {}
    if config.num_classes:
        name, others = "CLIPVisionModelWithProjection", {"projection_dim": config.num_classes}
    return _write_transformers(config, _VISION, "clip_vision_model", name, "CLIPImageProcessor", **others)


def write_siglip(config: ViTConfig) -> Fields:
    """Write the config.json of SiglipVisionModel or SiglipForImageClassification."""
    kind, name, labels = "siglip_vision_model", "SiglipVisionModel", _write_labels(config)
    if config.has_map_head or not config.num_classes:
        others = {"vision_use_head": config.has_map_head, **labels}
        return _write_transformers(config, _VISION, kind, name, "SiglipImageProcessor", **others)
    vision = {"model_type": kind, **write_keys(config, _VISION), "vision_use_head": False}
    name, others = "SiglipForImageClassification", {"vision_config": vision, **labels}
    return _write_transformers(config, {}, "siglip", name, "SiglipImageProcessor", **others)


def write_aimv2(config: ViTConfig) -> Fields:
    """Write the config.json of Aimv2VisionModel."""
    if config.num_classes:
        received = f"num_classes={config.num_classes}"
        raise CheckpointError(f"transformers' Aimv2VisionModel has no classifier: num_classes=0. Received: {received}")
    kind, name, others = "aimv2_vision_model", "Aimv2VisionModel", {"use_head": config.has_map_head}
    return _write_transformers(config, _AIMV2, kind, name, "CLIPImageProcessor", **others)


_TEXT: Keys = {**_SIZES, "vocab_size": "vocab_size", "max_position_embeddings": "max_length"}


def read_clip_text(values: Json) -> Fields:
    """Read the config.json of CLIPTextModel, CLIPTextModelWithProjection and CLIPModel."""
    names: dict[str, Fields | str] = {
        "clip_text_model": {"num_heads": 8, "end_token": 49407, "activation": "gelu_quick"},
        "metaclip_2*": "MetaCLIP 2 has another tokenizer, XLM-RoBERTa's",
    }
    # Configs with the end token 2, a word, take the largest id in a text (transformers/models/clip/modeling_clip.py).
    end: Keys = {"eos_token_id": ("end_token", lambda value: None if value == 2 else value)}
    return _read_tower(values, "text_config", {**_TEXT, **end}, names)


def read_siglip_text(values: Json) -> Fields:
    """Read the config.json of SiglipTextModel and SiglipModel, whose ids of special tokens are copied from CLIP."""
    defaults: Fields = {"num_heads": 12, "activation": "gelu_tanh"}
    names = {"siglip_text_model": defaults, "siglip2_text_model": defaults}
    return _read_tower(values, "text_config", {**_TEXT, "projection_size": "projection_size"}, names)


# Pairs of open_clip with a tower of timm.
_OPEN_CLIP = {"open_clip_config.json": towers.read_open_clip_timm}
_OPEN_CLIP_EVA = {"open_clip_config.json": functools.partial(towers.read_open_clip_timm, defaults=timm.EVA)}
# Name, as in `json` of a format's table -> its functions.
JSON_CONFIGS: Mapping[str, JsonConfig] = {
    "huggingface": JsonConfig(read_vit, write_vit, _PROCESSOR_FILE),
    "huggingface_aimv2": JsonConfig(functools.partial(read_vision, tower_keys=_AIMV2), write_aimv2, _PROCESSOR_FILE),
    "huggingface_beit": JsonConfig(read_beit, write_beit, _PROCESSOR_FILE),
    "huggingface_deit": JsonConfig(read_vit, functools.partial(write_vit, kind="DeiT"), _PROCESSOR_FILE),
    "huggingface_ijepa": JsonConfig(read_vit, functools.partial(write_vit, kind="IJepa"), _PROCESSOR_FILE),
    "huggingface_dinov2": _with_ratio("dinov2", "Dinov2", _DINOV2),
    "huggingface_dinov2_registers": _with_ratio("dinov2_with_registers", "Dinov2WithRegisters", _DINOV2_REGISTERS),
    "huggingface_pixio": _with_ratio("pixio", "Pixio", _PIXIO),
    "huggingface_dinov3": JsonConfig(read_dinov3, write_dinov3, _PROCESSOR_FILE),
    "huggingface_clip": JsonConfig(read_vision, write_clip, _PROCESSOR_FILE),
    "huggingface_siglip": JsonConfig(read_vision, write_siglip, _PROCESSOR_FILE),
    "huggingface_clip_text": JsonConfig(read_clip_text),
    "huggingface_siglip_text": JsonConfig(read_siglip_text),
    "keras_hub": JsonConfig(
        towers.read_keras_hub, None, {"task": "task.json", "image_converter": "image_converter.json"}
    ),
    "open_clip": JsonConfig(towers.read_open_clip, file="open_clip_config.json"),
    "open_clip_text": JsonConfig(towers.read_open_clip_text, file="open_clip_config.json"),
    "timm": JsonConfig(timm.read, timm.write_vit, others=_OPEN_CLIP),
    "timm_aimv2": JsonConfig(functools.partial(timm.read, defaults=timm.AIMV2), timm.write_aimv2),
    "timm_beit": JsonConfig(timm.read, timm.write_beit, others=_OPEN_CLIP),
    "timm_bit": JsonConfig(functools.partial(timm.read, defaults={}), timm.write_bit),
    "timm_eva": JsonConfig(functools.partial(timm.read, defaults=timm.EVA), timm.write_eva, others=_OPEN_CLIP_EVA),
    "timm_naflex": JsonConfig(timm.read, None, is_resized=True),
    "timm_rope": JsonConfig(functools.partial(timm.read, defaults=timm.EVA), timm.write_rope, others=_OPEN_CLIP_EVA),
    "timm_mixer": JsonConfig(functools.partial(timm.read, defaults=timm.BLOCKS), timm.write_mixer),
    "timm_relpos": JsonConfig(timm.read, timm.write_relpos, others=_OPEN_CLIP),
}
