"""The reference cases as files of users, and the name in our model of each official output."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
from safetensors.numpy import save_file

import reference_cases as reference
from keras_vit import converters

# Facts that a file and its config.json cannot state.
FACTS: dict[str, dict[str, Any]] = {
    "vit_unpooled": {"classifier": "unpooled"},
    "vit_token_unpooled": {"classifier": "token_unpooled"},
}
WANTED: dict[str, dict[str, Any]] = {
    "vit_not_multiple": {"image_size": (35, 38)},  # not a multiple of the patch: the file only tells its grid
    "bv_gap_sincos": {"image_size": (32, 32)},  # no position embedding in the file
}
# Official output -> its place in our model: a name of `features`, or "layer:" and a layer's name.
_OUTPUTS = {
    r"grid/(embedding|stem)": "embedding",
    r"resnet/block(\d+)": "stage_{0}",
    r"tokens/(posembed|embed)": "tokens",
    r"tokens/with_posemb": "layer:position",
    r"tokens/block_0?(\d+)": "block_{0}",
    r"tokens/encoder_norm|encoded|last_hidden_state": "encoder_norm",
    r"head_input": "layer:pool",
    r"pre_logits|pooler_output": "pre_logits",
    r"logits|logits_with_checkpoint_head|output": "output",
}
_RESIZED = re.compile(r"(?:t\d|resized)_(\d+)x(\d+)/")


def path_of(name: str, folder: Path) -> Path:
    """Return a case's file; timm's hybrids are stored compressed and are written as timm does."""
    path = reference.checkpoint(name)
    if path.name != "state_dict.npz":
        return path
    written = folder / name / "model.safetensors"
    if not written.exists():
        written.parent.mkdir()
        save_file(reference.arrays(path), written, metadata={"format": "pt"})
        shutil.copy(path.parent / "config.json", written.parent)
    return written


def load(name: str, folder: Path, **options: Any) -> Any:
    """Load a case as its users do: with the path alone, if the file states everything."""
    return converters.load(path_of(name, folder), config=FACTS.get(name), **WANTED.get(name, {}) | options)


def sizes(name: str) -> list[tuple[str, tuple[int, int]]]:
    """Return the other resolutions of a case: the prefix of their outputs, and (height, width)."""
    found = {match[0]: (int(match[1]), int(match[2])) for key in _shapes(name) if (match := _RESIZED.match(key))}
    return sorted(found.items())


def at(name: str, prefix: str) -> dict[str, np.ndarray]:
    """Return the official outputs at one resolution; the prefix of the file's own is ""."""
    outputs = reference.expected(name)
    if prefix:
        return {key.removeprefix(prefix): value for key, value in outputs.items() if key.startswith(prefix)}
    return {key: value for key, value in outputs.items() if not _RESIZED.match(key)}


def computed(model: Any, images: np.ndarray, names: list[str], case: str) -> dict[str, np.ndarray]:
    """Compute the official outputs of a case with our model."""
    ours = {name: _tensor(model, name, case) for name in names}
    found = keras.Model(model.inputs[0], ours)(images)
    return {name: keras.ops.convert_to_numpy(value) for name, value in found.items()}


def _tensor(model: Any, name: str, case: str) -> Any:
    place = _place(model, name, case)
    if place == "output":
        return model.outputs[0]
    if place == "gn_root":
        root = model.get_layer("root")
        return root.gn(root.conv(model.inputs[0]))
    if place.startswith("layer:"):
        return model.get_layer(place.removeprefix("layer:")).output
    return model.intermediates[place]


def _place(model: Any, name: str, case: str) -> str:
    kind, version = reference.CASES[case]["kind"], case.rpartition("_")[2]
    last_block = f"block_{model.config.num_layers - 1}"
    if name == "features":  # the output of a headless model (vit_jax), or the tokens before pooling (timm)
        norms_tokens = model.config.final_norm == "tokens"
        return "output" if kind.startswith("official") else "encoder_norm" if norms_tokens else last_block
    if name == "resnet/gn_root":
        return "gn_root"
    if found := re.fullmatch(r"hidden_states/0?(\d+)", name):  # transformers 4 norms the last
        blocks = [f"block_{i}" for i in range(model.config.num_layers)]
        return ["tokens", *blocks[:-1], "encoder_norm" if version == "v4" else last_block][int(found[1])]
    for pattern, place in _OUTPUTS.items():
        if found := re.fullmatch(pattern, name):
            return place.format(*found.groups())
    raise KeyError(name)


def _shapes(name: str) -> dict[str, Any]:
    return dict(reference.CASES[name]["outputs"])
