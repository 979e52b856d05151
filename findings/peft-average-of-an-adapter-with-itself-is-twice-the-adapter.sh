#!/usr/bin/env bash
# Guess: add_weighted_adapter with weights 0.5 and 0.5 and combination_type='linear' averages the updates of two LoRA
# adapters.
# Fact: peft 0.21.2 adds sqrt(weight) times each A and each B, and multiplies the sums. An adapter averaged with
# itself acts twice as strongly, and two different ones get cross terms as large as the average itself.
# Why it matters: a 'model soup' of fine-tuned ViTs, or the average over seeds, is another model; its accuracy falls
# and the adapters are blamed.
# Instead: combination_type='cat', which is exact (its rank is the sum of the ranks), or average the merged weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 transformers==5.24.0 peft==0.21.2
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os

os.environ["HF_HUB_OFFLINE"] = "1"
import peft
import torch

print("peft", peft.__version__, "torch", torch.__version__)
torch.manual_seed(0)
block = torch.nn.Sequential(torch.nn.Linear(64, 192))


def config():
    return peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False)


model = peft.get_peft_model(block, config(), adapter_name="first")
model.add_adapter("second", config())
layer = model.base_model.model[0]
delta = {name: layer.get_delta_weight(name).detach() for name in ("first", "second")}
mean = (delta["first"] + delta["second"]) / 2
ratio, error = {}, {}
for kind in ("linear", "cat"):
    model.add_weighted_adapter(["first", "first"], [0.5, 0.5], f"{kind}-same", combination_type=kind)
    model.add_weighted_adapter(["first", "second"], [0.5, 0.5], f"{kind}-mean", combination_type=kind)
    ratio[kind] = float(layer.get_delta_weight(f"{kind}-same").norm() / delta["first"].norm())
    error[kind] = float((layer.get_delta_weight(f"{kind}-mean") - mean).norm() / mean.norm())
    print(f"{kind}: the average of one with itself is {ratio[kind]:.2f} of it; error of the average of two {error[kind]:.1e}")
assert abs(ratio["linear"] - 2) < 1e-3 and error["linear"] > 0.5, "linear is an average now"
assert abs(ratio["cat"] - 1) < 1e-3 and error["cat"] < 1e-3
PY
