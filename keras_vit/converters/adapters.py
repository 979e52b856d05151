"""Merge an adapter of peft, LoRA, DoRA or rsLoRA, into the tensors of the model that it is beside, or inside of.

Sources: peft, tuners/lora/layer.py (get_delta_weight, merge), tuners/lora/dora.py, utils/save_and_load.py.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_vit.converters.config_json import ADAPTER, read_object
from keras_vit.converters.containers import Container, Header, open_container
from keras_vit.converters.table import MatchedTensors, Table
from keras_vit.errors import CheckpointError

FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_PARTS = ("", "lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
# Layer, part, name of the adapter (in memory, not in an adapter's own file), and tensor of the part.
_PART = re.compile(r"(.*)\.(lora_\w+?)(?:\.(?!weight$|bias$)([^.]+))?(?:\.(weight|bias))?")
FACTS = ("lora_alpha", "use_rslora")  # what a caller can state of an adapter inside of a file
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


class Adapter(NamedTuple):
    """An adapter: the updates of the base by the names of its tensors, and its adapter_config.json."""

    updates: dict[str, Update]
    config: Mapping[str, Any]
    told: str = ""  # what is assumed of it


def find_adapter(container: Container, stated: Mapping[str, Any]) -> Adapter | None:
    """Find the adapter in an open file, whose tensors are taken out, or in the files beside it; None without one.

    An adapter_config.json beside the file, or the caller (`FACTS`), says how an adapter inside is scaled.
    """
    path = container.path.parent / ADAPTER
    config = read_object(path) if path.is_file() else {}
    inside = [name for name in container.headers if ".lora_" in name]
    if not (inside or config):
        return None
    for key, accepted in _PLAIN.items() if config else ():
        if config.get(key) not in accepted:
            raise CheckpointError(
                f"has an adapter of peft beside it: {key} is read only as one of {accepted}. Received: "
                f"{config.get(key)!r:.200}; merge it with model.merge_and_unload()"
            )
    if not inside:
        return Adapter(_read_beside(container), config)
    if "lora_alpha" not in (config := {**config, **stated}):
        raise CheckpointError(
            f"has an adapter of peft (LoRA) inside, such as {inside[0]}, and no tensor says how it is scaled: put its "
            f"{ADAPTER} beside the file, or pass config={{'lora_alpha': ...}} (--config lora_alpha=...), or save "
            "model.merge_and_unload() in peft"
        )
    updates = _read_updates(container, inside)
    container.select({name: name for name in container.headers if name not in inside})
    rule = "" if "use_rslora" in config else "alpha / rank (use_rslora=False is assumed)"
    return Adapter(updates, config, f"its LoRA is merged, times {rule}" if rule else "")


def _read_beside(container: Container) -> dict[str, Update]:
    folder = container.path.parent
    if (file := next((folder / name for name in FILES if (folder / name).is_file()), None)) is None:
        raise CheckpointError(
            f"has an {ADAPTER} beside it and none of {FILES}: put the adapter there, or remove the file"
        )
    with open_container(file) as adapter:
        return _read_updates(adapter, adapter.headers)


def adapted(container: Container, table: Table, tensors: MatchedTensors, adapter: Adapter) -> Container:
    """Merge an adapter into the tensors of an open file as they are read."""
    updates, config, _ = adapter
    found = _names_of_base(table, updates, tensors)
    for name, base in found.items():  # of a base with one tensor for several layers of the adapter's
        if (shape := _shape(updates[name])) != container.headers[base].shape:
            raise CheckpointError(
                f"has an adapter of peft for {name} of shape {shape}, and {base} has shape "
                f"{container.headers[base].shape}: merge it with model.merge_and_unload()"
            )
    try:
        return AdaptedContainer(
            container,
            {base: updates[name]._replace(factor=scale(updates[name], config)) for name, base in found.items()},
        )
    except (ArithmeticError, LookupError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(f"has an adapter of peft whose config cannot be read: {error!s:.200}") from error


def _read_updates(container: Container, names: Iterable[str]) -> dict[str, Update]:
    """Read the tensors of an adapter: name of a tensor of the base -> its update."""
    updates: dict[str, Update] = {}
    adapters: set[str] = set()
    for name in names:
        if ".original_module." in name:  # the base's own, beside modules_to_save
            continue
        layer, kind, adapter, end = name.removeprefix(_PREFIX), "", "", ""
        if found := _PART.fullmatch(layer):
            layer, kind, adapter, end = found.groups(default="")
        adapters.add(adapter)
        layer = layer.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        part = kind if kind in ("", _PARTS[-1]) else f"{kind}.{end}"
        if part not in _PARTS:
            raise CheckpointError(f"has an adapter of peft, of which {name} is not read")
        tensor = f"{layer}.weight" if part else layer
        updates.setdefault(tensor, Update(layer, {})).parts[part] = container.read(name).astype(np.float32)
    if len(several := sorted(filter(None, adapters))) > 1:
        raise CheckpointError(f"has several adapters of peft, {several}: merge those that you use")
    if incomplete := [
        name for name, update in updates.items() if not ({*_PARTS[1:3]} <= {*update.parts} or "" in update.parts)
    ]:
        raise CheckpointError(f"has an adapter of peft that lacks a part of {incomplete[0]}")
    return updates


def _shape(update: Update) -> tuple[int, ...]:
    parts = update.parts
    return parts[""].shape if "" in parts else (len(parts[_PARTS[2]]), *parts[_PARTS[1]].shape[1:])


def _names_of_base(table: Table, updates: Mapping[str, Update], tensors: MatchedTensors) -> dict[str, str]:
    """Find the names in the base of tensors that may have those of another version of their program."""
    headers = {name: Header(name, _shape(update), "float32") for name, update in updates.items()}
    unknown: list[str] = []
    for prefix in table.names.own_prefixes:
        match = table.match(headers, prefix)
        lacks = [source.tensor for variable, source in match.sources.items() if variable not in tensors.sources]
        unknown = [*match.unknown, *match.other_parts, *lacks]
        if not unknown:
            return {source.tensor: tensors.sources[variable].tensor for variable, source in match.sources.items()}
    raise CheckpointError(f"has an adapter of peft for tensors that it does not have: {str(unknown)[:300]}")
