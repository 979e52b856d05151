#!/usr/bin/env bash
# Guess: SSIM and PSNR of a batch are the means over its pictures.
# Fact: torchmetrics 1.9.0 without data_range takes SSIM's range from the whole batch: beside a picture of 0..200, the
# SSIM of another becomes 0.99999. PSNR pools the squared errors of all pictures: pictures of 40 and 6 dB give 9 dB,
# not 23.
# Why it matters: reconstructions of a masked autoencoder, or depth maps of several scenes, are judged by them;
# another batch size gives another result.
# Instead: data_range=1.0, and for PSNR dim=(1, 2, 3), reduction='elementwise_mean'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 torchmetrics==1.9.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
import torchmetrics
from torchmetrics.functional.image import structural_similarity_index_measure as ssim
from torchmetrics.image import PeakSignalNoiseRatio

print("torchmetrics", torchmetrics.__version__, "torch", torch.__version__)
torch.manual_seed(0)
target = torch.rand(1, 1, 64, 64) * 0.3
picture = (target + 0.05 * torch.randn_like(target)).clip(0, 1)
other = torch.rand(1, 1, 64, 64) * 200
alone = float(ssim(picture, target))
beside = float(ssim(torch.cat([picture, other]), torch.cat([target, other]), reduction="none")[0])
stated = ssim(torch.cat([picture, other]), torch.cat([target, other]), reduction="none", data_range=1.0)[0]
print(f"SSIM alone {alone:.5f}, beside a picture of 0..200 {beside:.5f}, with data_range=1 {float(stated):.5f}")
assert beside > 0.9999 > 0.99 > alone, "the range is not taken from the batch now"
zeros = torch.zeros(2, 1, 8, 8)
errors = torch.stack([torch.full((1, 8, 8), 0.01), torch.full((1, 8, 8), 0.5)])
pooled = float(PeakSignalNoiseRatio(data_range=1.0)(errors, zeros))
each = [float(PeakSignalNoiseRatio(data_range=1.0)(errors[i : i + 1], zeros[i : i + 1])) for i in range(2)]
mean = float(PeakSignalNoiseRatio(data_range=1.0, dim=(1, 2, 3), reduction="elementwise_mean")(errors, zeros))
print(f"PSNR of the batch {pooled:.2f}, of its pictures {each}, with dim {mean:.2f}")
assert pooled < 9.1 and abs(mean - sum(each) / 2) < 1e-3, "PSNR is a mean over pictures now"
PY
