"""Intermediate results of a Vision Transformer as maps: the tokens of patches, and the stages of a ResNet."""

from collections.abc import Iterable
from typing import Any

import keras

from keras_vit._util.checks import is_count
from keras_vit.model.config import ViTConfig
from keras_vit.model.layers import PatchMap

Blocks = int | Iterable[int | str] | None


def map_names(config: ViTConfig, blocks: Blocks) -> list[str]:
    """Return the names of the intermediate results that `VisionTransformer.feature_maps` turns into maps."""
    stages = range(1, 1 + len(config.resnet.num_layers)) if config.resnet else range(0)
    numbered = [f"block_{i}" for i in range(config.num_layers)] or [f"stage_{i}" for i in stages]
    named = [*numbered, "tokens", *(f"stage_{i}" for i in stages), *(["root"] if stages else [])]
    count: Any = 1 if blocks is None else blocks
    if is_count(count, least=1):
        chosen: list[Any] = list(range(len(numbered)))[-int(count) :]
        is_known = int(count) <= len(numbered)
    else:
        chosen = list(blocks) if isinstance(blocks, Iterable) and not isinstance(blocks, str) else []
        is_known = bool(chosen) and all(
            one in named if isinstance(one, str) else is_count(one, least=0) and one < len(numbered) for one in chosen
        )
    if not is_known:
        raise ValueError(
            f"blocks must be a number of last blocks from 1 to {len(numbered)}, or a list of numbers from 0 to "
            f"{len(numbered) - 1} and of names in {named}. Received: {blocks!r:.200}"
        )
    return [one if isinstance(one, str) else numbered[one] for one in chosen]


def to_map(model: Any, name: str, tensor: Any, *, norm: bool, class_token: str = "drop") -> Any:
    """Return an intermediate result of a VisionTransformer as a map, (batch, rows, columns, width).

    With `norm` the tokens pass the final LayerNorm first, if the model has it in front of the pooling, and the last
    stage of a BiT its norm and ReLU.
    """
    config = model.config
    if len(tensor.shape) == 4:
        is_last = name == f"stage_{len(config.resnet.num_layers)}" and config.resnet.version == 2
        return model.get_layer("resnet")(model.get_layer("resnet_norm")(tensor)) if norm and is_last else tensor
    if norm and config.num_layers and config.final_norm == "tokens":
        tensor = model.get_layer("encoder_norm")(tensor)
    options = {"name": f"map_{name}", "dtype": keras.backend.standardize_dtype(tensor.dtype)}
    return PatchMap(config.grid, prefix_tokens=config.num_prefix_tokens, class_token=class_token, **options)(tensor)
