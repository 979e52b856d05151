"""The reference cases as their users hold them, and each official output by its name in our model."""

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

# What a file and its config.json cannot say.
FACTS: dict[str, dict[str, Any]] = {
    "vit_unpooled": {"classifier": "unpooled"},
    "vit_token_unpooled": {"classifier": "token_unpooled"},
}
WANTED: dict[str, dict[str, Any]] = {
    "vit_not_multiple": {"image_size": (35, 38)},  # no multiple of the patch: the file only tells its grid
    "bv_gap_sincos": {"image_size": (32, 32)},  # no position embedding in the file
}
# Where an official output stands in our model: a name of `features`, or "layer:" and the layer that gives it.
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
    """A case's file; timm's hybrids, which are kept compressed, are written as timm does."""
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
    """A case as its users would load it: with nothing but the path, where the file says everything."""
    return converters.load(path_of(name, folder), config=FACTS.get(name), **WANTED.get(name, {}) | options)


def sizes(name: str) -> list[tuple[str, tuple[int, int]]]:
    """The other resolutions of a case: the prefix of their outputs, and (height, width)."""
    found = {match[0]: (int(match[1]), int(match[2])) for key in _shapes(name) if (match := _RESIZED.match(key))}
    return sorted(found.items())


def at(name: str, prefix: str) -> dict[str, np.ndarray]:
    """The official outputs at one resolution; the prefix is "" at the file's own."""
    outputs = reference.expected(name)
    if prefix:
        return {key.removeprefix(prefix): value for key, value in outputs.items() if key.startswith(prefix)}
    return {key: value for key, value in outputs.items() if not _RESIZED.match(key)}


def computed(model: Any, images: np.ndarray, names: list[str], case: str) -> dict[str, np.ndarray]:
    """The official outputs of a case, as our model computes them."""
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
    return model._intermediates[place]


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
