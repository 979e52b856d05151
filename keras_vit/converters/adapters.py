"""Merge an adapter of peft, LoRA, DoRA or rsLoRA, into the tensors of the model beside it.

Sources: peft, tuners/lora/layer.py (get_delta_weight, merge), tuners/lora/dora.py, utils/save_and_load.py.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_vit.converters.config_json import ADAPTER, read_object
from keras_vit.converters.containers import Container, Header, open_container
from keras_vit.converters.table import MatchedTensors, Table
from keras_vit.errors import CheckpointError

FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_PARTS = ("", "lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
# Keys of an adapter_config.json whose other values compute something else.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "fan_in_fan_out": (False, None),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "layer_replication", "megatron_config"), (None,)),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "velora_config"), (None, [])),
    **dict.fromkeys(("lora_bias", "use_bdlora", "use_qalora"), (False, None)),
    **dict.fromkeys(("kasa_config", "monteclora_config"), (None,)),
}


class Update(NamedTuple):
    """Update of a tensor of the base by an adapter."""

    module: str  # the name of its layer
    parts: dict[str, np.ndarray]  # "lora_A.weight" and the like; "" replaces the tensor
    factor: float = 1.0


class AdaptedContainer(Container):
    """An open file whose tensors are merged with those of an adapter when they are read."""

    def __init__(self, base: Container, updates: Mapping[str, Update]) -> None:
        self.path, self.headers, self.metadata = base.path, base.headers, base.metadata
        self._base, self._updates = base, updates

    def read(self, name: str) -> np.ndarray:
        """Read a tensor of the base with the adapter's update."""
        values, update = self._base.read(name), self._updates.get(name)
        return values if update is None else merge(values.astype(np.float32), update)

    def _read_headers(self, size: int) -> None:
        """The base has read its own."""

    def _read_tensor(self, header: Header) -> np.ndarray:
        return self.read(header.name)


def merge(values: np.ndarray, update: Update) -> np.ndarray:
    """Add an update of low rank to a kernel (out, in, ...); DoRA's magnitudes are the lengths of its rows."""
    parts = update.parts
    if "" in parts:
        return parts[""]
    down, up = parts["lora_A.weight"], parts["lora_B.weight"]
    rows = values.reshape(len(values), -1) + update.factor * (up.reshape(len(up), -1) @ down.reshape(len(down), -1))
    if (lengths := parts.get("lora_magnitude_vector")) is not None:
        rows *= (lengths.reshape(-1) / np.linalg.norm(rows, axis=1))[:, None]
    return rows.reshape(values.shape)


def scale(update: Update, config: Mapping[str, Any]) -> float:
    """Compute the factor of an update: alpha / rank, or alpha / sqrt(rank) in rsLoRA."""
    if "lora_A.weight" not in update.parts:
        return 1.0
    rank, patterns = len(update.parts["lora_A.weight"]), config.get("alpha_pattern") or {}
    key = next((key for key in patterns if re.fullmatch(rf"(.*\.)?({key})", update.module)), None)
    alpha = float(config["lora_alpha"] if key is None else patterns[key])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def adapted(container: Container, table: Table, tensors: MatchedTensors) -> Container:
    """Merge the adapter beside an open file into its tensors as they are read; the file itself if there is none."""
    folder = container.path.parent
    if not (folder / ADAPTER).is_file():
        return container
    config = read_object(folder / ADAPTER)
    for key, accepted in _PLAIN.items():
        if config.get(key) not in accepted:
            raise CheckpointError(
                f"has an adapter of peft beside it: {key} is read only as one of {accepted}. Received: "
                f"{config.get(key)!r:.200}; merge it with model.merge_and_unload()"
            )
    if (file := next((folder / name for name in FILES if (folder / name).is_file()), None)) is None:
        raise CheckpointError(
            f"has an {ADAPTER} beside it and none of {FILES}: put the adapter there, or remove the file"
        )
    with open_container(file) as adapter:
        updates = _read_updates(adapter)
    found = _names_of_base(table, updates, tensors)
    try:
        return AdaptedContainer(
            container,
            {base: updates[name]._replace(factor=scale(updates[name], config)) for name, base in found.items()},
        )
    except (ArithmeticError, LookupError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(f"has an {ADAPTER} beside it that cannot be read: {error!s:.200}") from error


def _read_updates(adapter: Container) -> dict[str, Update]:
    """Read an adapter: name of a tensor of the base -> its update."""
    updates: dict[str, Update] = {}
    for name in adapter.headers:
        if ".original_module." in name:  # the base's own, beside modules_to_save
            continue
        layer, found, part = name.removeprefix(_PREFIX).partition(".lora_")
        layer = layer.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        part = found[1:] + part
        if part not in _PARTS:
            raise CheckpointError(f"has an adapter of peft beside it, of which {name} is not read")
        tensor = f"{layer}.weight" if part else layer
        updates.setdefault(tensor, Update(layer, {})).parts[part] = adapter.read(name).astype(np.float32)
    if incomplete := [
        name for name, update in updates.items() if not ({*_PARTS[1:3]} <= {*update.parts} or "" in update.parts)
    ]:
        raise CheckpointError(f"has an adapter of peft beside it that lacks a part of {incomplete[0]}")
    return updates


def _names_of_base(table: Table, updates: Mapping[str, Update], tensors: MatchedTensors) -> dict[str, str]:
    """Find the names in the base of tensors that may have those of another version of their program."""
    headers = {}
    for name, update in updates.items():
        parts = update.parts
        shape = parts[""].shape if "" in parts else (len(parts[_PARTS[2]]), *parts[_PARTS[1]].shape[1:])
        headers[name] = Header(name, shape, "float32")
    unknown: list[str] = []
    for prefix in table.names.prefixes:
        names = dataclasses.replace(table.names, prefixes=(prefix,))
        match = dataclasses.replace(table, detect=(), detect_absent=(), names=names).match(headers)
        lacks = [source.tensor for variable, source in match.sources.items() if variable not in tensors.sources]
        unknown = [*match.unknown, *lacks]
        if not unknown:
            return {source.tensor: tensors.sources[variable].tensor for variable, source in match.sources.items()}
    raise CheckpointError(f"has an adapter of peft beside it for tensors that it does not have: {str(unknown)[:300]}")
