"""Adapters of peft beside the model that they were trained on are merged: LoRA, DoRA, rsLoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import torch_peers
from keras_vit import converters
from keras_vit.errors import CheckpointError
from model_weights import values
from tiny_models import built

LAYER = "block_1/mlp/dense1/kernel"  # (32, 64)
NAMES = {  # of its layer in transformers 4 and 5, and of another
    4: ("vit.encoder.layer.1.intermediate.dense", "vit.encoder.layer.0.attention.attention.query"),
    5: ("vit.layers.1.mlp.fc1", "vit.layers.0.attention.q_proj"),
}


def base(folder: Path) -> dict[str, np.ndarray]:
    """Write a ViT as transformers does, and return its weights."""
    model = built(activation="gelu_erf", norm_epsilon=1e-12)
    converters.save(model, folder, format="huggingface")
    return values(model)


def adapter(folder: Path, version: int = 4, dora: bool = False, **config: Any) -> dict[str, np.ndarray]:
    """Write an adapter for two layers, and a new bias of the head; return its tensors."""
    random = np.random.default_rng(0)
    tensors = {"base_model.model.classifier.bias": random.normal(size=5)}
    for layer, width in zip(NAMES[version], (64, 32), strict=True):
        start = f"base_model.model.{layer}.lora_"
        tensors |= {f"{start}A.weight": random.normal(size=(4, 32)), f"{start}B.weight": random.normal(size=(width, 4))}
        if dora:
            tensors[f"{start}magnitude_vector"] = random.uniform(1, 2, width)
    tensors = {name: value.astype("f4") for name, value in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "lora_alpha": 6, "r": 4, "base_model_name_or_path": "google/vit", **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return tensors


@pytest.mark.parametrize("version", NAMES)
@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({}, 6 / 4),
        ({"use_rslora": True}, 6 / 2),
        ({"alpha_pattern": {"fc1": 2, "intermediate.dense": 2}}, 2 / 4),
        ({"use_dora": True}, 6 / 4),
    ],
)
def test_an_adapter_is_merged_into_its_base(
    config: dict[str, Any], factor: float, version: int, tmp_path: Path
) -> None:
    before = base(tmp_path)
    tensors = adapter(tmp_path, version, dora=bool(config.get("use_dora")), **config)
    found = values(converters.load(tmp_path))
    down, up = (tensors[f"base_model.model.{NAMES[version][0]}.lora_{part}.weight"] for part in "AB")
    want = before[LAYER].T.astype("f8") + factor * up.astype("f8") @ down
    if config.get("use_dora"):
        lengths = tensors[f"base_model.model.{NAMES[version][0]}.lora_magnitude_vector"]
        want *= (lengths / np.linalg.norm(want, axis=1))[:, None]
    np.testing.assert_allclose(found[LAYER], want.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["head/bias"], tensors["base_model.model.classifier.bias"])
    changed = {name for name, value in found.items() if not np.array_equal(value, before[name])}
    assert changed == {LAYER, "block_0/attention/query/kernel", "head/bias"}


def test_an_adapter_that_cannot_be_merged_is_named(tmp_path: Path) -> None:
    base(tmp_path)
    tensors = adapter(tmp_path, use_qalora=True)
    with pytest.raises(CheckpointError, match=r"adapter of peft beside it: use_qalora.*Received: True"):
        converters.load(tmp_path)
    adapter(tmp_path)
    save_file({**tensors, "base_model.model.vit.other.bias": np.zeros(3, "f4")}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"for tensors that it does not have: .*other\.bias"):
        converters.load(tmp_path)
    wide = {f"base_model.model.{NAMES[4][0]}.lora_B.weight": np.zeros((60, 4), "f4")}
    save_file({**tensors, **wide}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"of shape \(60, 32\), and .* has shape \(64, 32\)"):
        converters.load(tmp_path)
    del tensors[f"base_model.model.{NAMES[4][0]}.lora_B.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="lacks a part of vit.encoder.layer.1"):
        converters.load(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="adapter_config.json beside it and none of"):
        converters.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    adapter(tmp_path)
    with pytest.raises(CheckpointError, match=r"adapter of peft alone: .* the folder of its base, 'google/vit'"):
        converters.load(tmp_path)


def test_lora_inside_a_file_is_named(tmp_path: Path) -> None:
    base(tmp_path)
    inside = {f"base_model.model.{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()}
    inside |= {"base_model.model.vit.lora_A.default.weight": np.zeros((4, 32), "f4")}
    save_file(inside, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"peft \(LoRA\) inside.*'lora_alpha': .*merge_and_unload"):
        converters.load(tmp_path)


@pytest.mark.torch
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True, "rank_pattern": {"fc1": 2}}])
def test_an_adapter_has_the_outputs_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    torch, peft = torch_peers.import_torch(), pytest.importorskip("peft")
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("f4")
    for name, model in {
        "vit": hf.ViTForImageClassification(hf.ViTConfig(**sizes, intermediate_size=64, num_labels=3)),
        "clip": hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**sizes, intermediate_size=64, projection_dim=8)),
    }.items():
        torch_peers.randomised(model).save_pretrained(tmp_path / name)
        theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options))
        with torch.no_grad():
            for value in theirs.parameters():
                value.add_(torch.randn(value.shape) * 0.3 * value.requires_grad)
        theirs.eval()
        theirs.save_pretrained(tmp_path / name)
        with torch.no_grad():
            want = theirs(torch.tensor(images.transpose(0, 3, 1, 2)))[0].numpy()
        got = np.asarray(converters.load(tmp_path / name)(images))
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), name
