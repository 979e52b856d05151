#!/usr/bin/env bash
# Guess: LoRA with target_modules='all-linear' on torchvision's ViT trains every adapter that it makes, and merging
# does not change the outputs.
# Fact: torch.nn.MultiheadAttention reads out_proj.weight and never calls out_proj. The adapters that peft 0.21.2
# puts there get no gradient and change no output; merge_and_unload adds them to the weight, and then the output
# changes. open_clip and torchvision have such layers.
# Why it matters: adapters that are not at zero (loaded, or init_lora_weights='gaussian' with B set) are silent
# before merging and act after it; a part of the rank budget learns nothing.
# Instead: target_modules with the attention module itself ('self_attention'), which peft handles, and check after
# one step that every adapter has a gradient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 torchvision==0.29.1 peft==0.21.2 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import copy
import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
import peft
import torch
import torchvision

print("peft", peft.__version__, "torch", torch.__version__, "torchvision", torchvision.__version__)
torch.manual_seed(0)
vit = torchvision.models.VisionTransformer(
    image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5
).eval()
torch.nn.init.normal_(vit.heads.head.weight)
pictures = torch.randn(2, 3, 32, 32)


def adapted(targets):
    config = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(vit), config)


model = adapted("all-linear")
model(pictures).square().sum().backward()
silent = sorted({name.split(".lora_")[0] for name, p in model.named_parameters() if "lora_" in name and p.grad is None})
print("adapters without a gradient:", *silent, sep="\n  ")
assert len(silent) == 2 and all(name.endswith("self_attention.out_proj") for name in silent), "they learn now"
only = adapted(["out_proj"]).eval()
with torch.no_grad():
    expected = vit(pictures)
    before = float((only(pictures) - expected).abs().max())
    after = float((only.merge_and_unload()(pictures) - expected).abs().max())
print(f"adapters of random numbers on out_proj change the output by {before:.1e}, after merging by {after:.1f}")
assert before < 1e-4 and after > 0.1, "the adapters act before merging now"
PY
