"""Image towers within files of other models of transformers, and what else its config.json may say: exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torch_peers
from keras_vit import converters

pytestmark = [pytest.mark.torch, pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    **{"image_size": 32, "patch_size": 8},
}
WORDS: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100},
}
Compute = Callable[[Any, Any], Any]


def towers(hf: Any) -> dict[str, tuple[Any, Compute]]:
    """Models of transformers with random weights, and what of each our model computes."""
    pair = {"vision_config": TOWER, "text_config": WORDS, "num_labels": 5}
    vit, labels = hf.ViTConfig(**TOWER), {"num_labels": 5}
    gpt = hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=100)
    flava = hf.FlavaConfig(image_config=TOWER, text_config=WORDS, multimodal_config=WORDS, hidden_size=32)
    gemma = hf.GemmaConfig(**WORDS, head_dim=16, num_key_value_heads=1)
    plain = hf.SiglipVisionConfig(**TOWER, vision_use_head=False)
    llava = hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(**TOWER), text_config=hf.LlamaConfig(**WORDS))
    paligemma = hf.PaliGemmaConfig(vision_config=plain, text_config=gemma, projection_dim=32)
    both = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, gpt)
    found: dict[str, tuple[Any, Compute]] = {
        "Pixio": (hf.PixioModel(hf.PixioConfig(**TOWER, mlp_ratio=2)), lambda m, x: m(x).pooler_output),
        "I-JEPA": (hf.IJepaModel(hf.IJepaConfig(**TOWER)), lambda m, x: m(x).last_hidden_state.mean(1)),
        "VisionEncoderDecoder": (hf.VisionEncoderDecoderModel(both), lambda m, x: m.encoder(x).pooler_output),
        "FLAVA": (hf.FlavaModel(flava), lambda m, x: m.image_model(x).pooler_output),
        "LLaVA": (hf.LlavaForConditionalGeneration(llava), lambda m, x: m.model.vision_tower(x).pooler_output),
        "AltCLIP": (
            hf.AltCLIPModel(hf.AltCLIPConfig(vision_config=TOWER, text_config=WORDS | {"project_dim": 32})),
            lambda m, x: m.get_image_features(x).pooler_output,
        ),
        "PaliGemma": (
            hf.PaliGemmaForConditionalGeneration(paligemma),
            lambda m, x: m.model.vision_tower(x).last_hidden_state.mean(1),
        ),
    }
    for name, model in {
        "I-JEPA's classifier": hf.IJepaForImageClassification(hf.IJepaConfig(**TOWER, **labels)),
        "CLIP's classifier": hf.CLIPForImageClassification(hf.CLIPConfig(**pair)),
        "MetaCLIP 2's classifier": hf.MetaClip2ForImageClassification(hf.MetaClip2Config(**pair)),
        "SigLIP's classifier": hf.SiglipForImageClassification(hf.SiglipConfig(**pair)),
        **{f"{count} channels": hf.ViTForImageClassification(hf.ViTConfig(**TOWER, **labels, num_channels=count))
           for count in (1, 2, 4)},
        **{act: hf.ViTForImageClassification(hf.ViTConfig(**TOWER, **labels, hidden_act=act))
           for act in ("relu", "silu", "tanh", "linear", "gelu_python_tanh", "quick_gelu")},
    }.items():  # fmt: skip
        found[name] = model, lambda m, x: m(x).logits
    return found


def test_a_tower_within_another_model_is_exact(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers")
    wrong = {}
    for name, (model, compute) in towers(hf).items():
        theirs = torch_peers.randomised(model).eval()
        theirs.save_pretrained(tmp_path / name)
        ours = converters.load(tmp_path / name)
        images = np.random.default_rng(0).normal(size=(2, 32, 32, ours.config.num_channels)).astype(np.float32)
        with torch.no_grad():
            want = compute(theirs, torch.tensor(images.transpose(0, 3, 1, 2))).numpy()
        difference = np.abs(np.asarray(ours(images)).reshape(want.shape) - want).max() / np.abs(want).max()
        if difference > 1e-5:
            wrong[name] = difference
    assert not wrong
