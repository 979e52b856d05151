#!/usr/bin/env bash
# Guess: a tensor that the runtime accepts is read by its strides, so a picture permuted from (height, width, channel)
# gives what the contiguous copy gives; otherwise an error is raised.
# Fact: executorch 1.5.1 takes the bytes of a channels-last tensor for those of a contiguous one, says nothing and
# returns other numbers. permute(2, 0, 1)[None] of a NumPy picture is such a tensor. Other strides raise, with a text
# that allows channels-last.
# Why it matters: every check with torch.randn passes, and every real picture that was decoded by Pillow or OpenCV is
# scrambled on its way into the ViT.
# Instead: x.contiguous() before execute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 executorch==1.5.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import importlib.metadata
import logging

import numpy as np
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime

logging.disable(logging.WARNING)
print("executorch", importlib.metadata.version("executorch"), "torch", torch.__version__)
torch.manual_seed(0)
patches = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Flatten(), torch.nn.Linear(128, 5)).eval()
program = torch.export.export(patches, (torch.randn(1, 3, 16, 16),))
with open("patches.pte", "wb") as file:
    file.write(to_edge_transform_and_lower(program).to_executorch().buffer)
forward = Runtime.get().load_program("patches.pte").load_method("forward")
picture = np.random.default_rng(0).normal(size=(16, 16, 3)).astype(np.float32)
permuted = torch.from_numpy(picture).permute(2, 0, 1)[None]
assert permuted.is_contiguous(memory_format=torch.channels_last) and not permuted.is_contiguous()
with torch.no_grad():
    expected = patches(permuted)
right = float((forward.execute([permuted.contiguous()])[0] - expected).abs().max())
wrong = float((forward.execute([permuted])[0] - expected).abs().max())
print(f"largest logit {expected.abs().max():.2f}; error of the contiguous copy {right:.1e}, of the permuted picture {wrong:.2f}")
assert right < 1e-4
assert wrong > 0.1, "the strides are heeded now"
PY
