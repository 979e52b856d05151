"""The architecture of a checkpoint, from the shapes of its tensors."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints.errors import CheckpointError
from keras_vit.checkpoints.table import Table
from keras_vit.config import ResNetConfig, ViTConfig, check_fields, pair

Shapes = Mapping[str, tuple[int, ...]]

_NEEDED = {"embedding/kernel": 4, "block_0/mlp/dense1/kernel": 2, "block_0/attention/query/kernel": (2, 3)}
_LAYER_SCALE = 1e-5  # no file states where its scales started; the usual value


def infer(shapes: Shapes, table: Table, facts: Mapping[str, Any]) -> ViTConfig:
    """The config a file was trained with.

    Args:
        shapes: of the file's tensors as variables, the heads apart where the file keeps them so.
        table: of the format: what the format means where the tensors do not say.
        facts: what the caller knows of the file, such as num_heads; they go before everything else.

    Raises:
        CheckpointError: where the tensors are no Vision Transformer's, or something must be told.
    """
    check_fields(facts)
    for name, rank in _NEEDED.items():
        ranks = rank if isinstance(rank, tuple) else (rank,)
        if name not in shapes or len(shapes[name]) not in ranks or 0 in shapes[name]:
            raise CheckpointError(
                f"is no Vision Transformer in {table.format} format: {name} would have {rank} axes. "
                f"Received: {shapes.get(name, 'no tensor for it')}"
            )
    fields = {**table.config, **table.defaults, **_from_tensors(shapes), **facts}
    fields["num_heads"] = _num_heads(shapes, table, facts.get("num_heads"))
    fields["resnet"] = _resnet(shapes, fields.get("resnet"))
    fields["image_size"] = facts.get("image_size") or _image_size(shapes, fields)
    try:
        return ViTConfig(**fields)
    except ValueError as error:
        raise CheckpointError(f"describes no model that can be built: {error}") from error


def _from_tensors(shapes: Shapes) -> dict[str, Any]:
    height, width, channels, hidden_size = shapes["embedding/kernel"]
    class_token = "prefix/cls" in shapes
    return {
        "patch_size": (height, width),
        "hidden_size": hidden_size,
        "mlp_dim": shapes["block_0/mlp/dense1/kernel"][-1],
        "num_layers": len({name.split("/")[0] for name in shapes if name.startswith("block_")}),
        "num_classes": _last(shapes, "head/kernel", 0),
        "representation_size": _last(shapes, "pre_logits/kernel", None),
        "num_channels": shapes["root/conv/kernel"][-2] if "root/conv/kernel" in shapes else channels,
        "classifier": "map" if "pool/probe" in shapes else "token" if class_token else "gap",
        "class_token": class_token,
        "distilled": "prefix/distillation" in shapes,
        "num_registers": shapes["prefix/registers"][-2] if "prefix/registers" in shapes else 0,
        "patch_bias": "embedding/bias" in shapes,
        "qkv_bias": "block_0/attention/query/bias" in shapes,
        "pre_norm": "pre_norm/gamma" in shapes,
        "layer_scale": _LAYER_SCALE if "block_0/scale1/gamma" in shapes else None,
    }


def _last(shapes: Shapes, name: str, otherwise: int | None) -> int | None:
    return shapes[name][-1] if shapes.get(name) else otherwise


def _num_heads(shapes: Shapes, table: Table, told: int | None) -> int:
    kernel = shapes["block_0/attention/query/kernel"]
    found = kernel[1] if len(kernel) == 3 else told
    if found is None:
        raise CheckpointError(
            f"is in {table.format} format, which does not say how many attention heads there are "
            f"(the width is {kernel[0]}): pass config={{'num_heads': ...}}"
        )
    if told not in (None, found):
        raise CheckpointError(f"has {found} attention heads. Received: num_heads={told}")
    return found


def _resnet(shapes: Shapes, numerics: ResNetConfig | None) -> ResNetConfig | None:
    if len(shapes.get("root/conv/kernel", ())) != 4:
        return None
    stages: dict[int, set[int]] = {}
    for name in shapes:
        unit = re.match(r"stage_(\d+)_unit_(\d+)/", name)
        if unit:
            stages.setdefault(int(unit[1]), set()).add(int(unit[2]))
    num_layers = tuple(len(stages[stage]) for stage in sorted(stages))
    width_factor = shapes["root/conv/kernel"][-1] / 64
    return dataclasses.replace(numerics or ResNetConfig(), num_layers=num_layers, width_factor=width_factor)


def _image_size(shapes: Shapes, fields: Mapping[str, Any]) -> tuple[int, int]:
    """The size of a square image that fills the position embedding."""
    if "position/embedding" not in shapes:
        raise CheckpointError(
            "has no position embedding to tell its resolution: pass config={'image_size': ...}"
        )
    probe = ViTConfig(**{**fields, "image_size": 2**20})
    tokens = math.prod(shapes["position/embedding"][:-1]) - probe.position_prefix_tokens
    side = math.isqrt(max(tokens, 0))
    if side < 1 or side * side != tokens:
        raise CheckpointError(
            f"its position embedding {shapes['position/embedding']} fills no square grid: "
            "pass config={'image_size': (height, width)} as it was trained"
        )
    height, width = pair(probe.stride, "stride")
    return side * height, side * width
