"""The functions of docs/load-and-convert.md convert the weights of other packages bit by bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import doc_blocks
from keras_vit import converters
from keras_vit.model.vision_transformer import VisionTransformer
from model_weights import assert_same_bits, values
from tiny_models import built

PAGE = (doc_blocks.ROOT / "docs" / "load-and-convert.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Return the functions of the page."""
    found: dict[str, Any] = {"np": np}
    for code in doc_blocks.blocks(PAGE, "python"):
        if "\ndef " in f"\n{code}":
            exec(code, found)
    return found


def test_the_weights_of_tfvit_come_over(page: dict[str, Any], tmp_path: Path) -> None:
    model = built(activation="gelu_erf")
    path = converters.save(model, tmp_path / "theirs", format="huggingface")
    (tmp_path / "mine").mkdir()
    shutil.copy(path.with_name("config.json"), tmp_path / "mine")
    tensors = page["torch_names"](as_tfvit(load_file(path)))
    assert tensors.keys() == load_file(path).keys()
    save_file(tensors, tmp_path / "mine" / "model.safetensors")
    assert_same_bits(values(converters.load(tmp_path / "mine")), values(model))


def as_tfvit(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Return the tensors of a Hugging Face file with the names and axes of transformers' modeling_tf_vit.py."""
    for name, array in tensors.items():
        *parts, last = name.replace("layer.", "layer_._").split(".")
        if last in ("weight", "bias"):
            kinds = {"weight": "gamma", "bias": "beta"} if "layernorm" in parts[-1] else {"weight": "kernel"}
            last = kinds.get(last, last)
        axes = {4: (2, 3, 1, 0), 2: (1, 0)}.get(array.ndim) if last == "kernel" else None
        path = "/".join(["tf_vi_t_for_image_classification", *parts, last])
        yield f"{path}:0", array if axes is None else array.transpose(axes)


@pytest.mark.parametrize("changes", [{}, {"representation_size": 24}], ids=["plain", "pre_logits"])
def test_the_weights_of_vit_keras_come_over(page: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    model = built(activation="gelu_erf", **changes)
    np.savez(tmp_path / "mine.npz", **page["official"](as_vit_keras(model)))
    again = converters.load(tmp_path / "mine.npz", config={"activation": "gelu_erf"})
    assert_same_bits(values(again), values(model))
    assert again.config == model.config


def as_vit_keras(model: VisionTransformer) -> SimpleNamespace:
    """Return a model's weights in fake layers with the names and shapes of vit-keras' vit.py and layers.py."""
    arrays, width = values(model), model.config.hidden_size

    def layer(path: str, *parts: str, name: str = "") -> SimpleNamespace:
        found = [arrays[f"{path}/{part}"] for part in parts]
        return SimpleNamespace(name=name, get_weights=lambda: found)

    def dense(path: str) -> SimpleNamespace:
        kernel, bias = arrays[f"{path}/kernel"], arrays[f"{path}/bias"]
        return SimpleNamespace(get_weights=lambda: [kernel.reshape(width, width), bias.reshape(width)])

    def block(path: str) -> SimpleNamespace:
        inner = {f"{part}_dense": dense(f"{path}/attention/{part}") for part in ("query", "key", "value")}
        out, heads = dense(f"{path}/attention/out"), model.config.num_heads
        return SimpleNamespace(
            name=path,
            att=SimpleNamespace(num_heads=heads, combine_heads=out, **inner),
            layernorm1=layer(f"{path}/norm1", "gamma", "beta"),
            layernorm2=layer(f"{path}/norm2", "gamma", "beta"),
            mlpblock=layer(f"{path}/mlp", "dense1/kernel", "dense1/bias", "dense2/kernel", "dense2/bias"),
        )

    heads = [name for name in ("pre_logits", "head") if f"{name}/kernel" in arrays]
    return SimpleNamespace(
        layers=[
            layer("embedding", "kernel", "bias", name="embedding"),
            layer("prefix", "cls", name="class_token"),
            layer("position", "embedding", name="Transformer/posembed_input"),
            *(block(f"block_{i}") for i in range(model.config.num_layers)),
            layer("encoder_norm", "gamma", "beta", name="Transformer/encoder_norm"),
            *(layer(name, "kernel", "bias", name=name) for name in heads),
        ]
    )
