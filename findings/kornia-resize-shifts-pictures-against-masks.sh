#!/usr/bin/env bash
# Guess: kornia.augmentation.Resize and kornia.geometry.resize sample at the same places, and a mask moves with its
# picture.
# Fact: kornia 0.9.0: the augmentations (Resize, RandomResizedCrop, SmallestMaxSize) align the corner pixels,
# kornia.geometry.resize and torch align the edges. From 64 to 16 columns, column 0 is that of 0 instead of 1.5; the
# mask in the same AugmentationSequential takes column 2.
# Why it matters: masks are shifted by up to two pixels of the larger picture, more at the left than at the right,
# and training differs from serving with any other resize.
# Instead: kornia.geometry.resize for both, or Resize(..., align_corners=False) with antialias=True for the
# pictures.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 torch==2.14.1 kornia==0.9.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings

warnings.simplefilter("ignore")
import kornia
import torch

print("kornia", kornia.__version__, "torch", torch.__version__)
columns = torch.arange(64.0).reshape(1, 1, 1, 64).repeat(1, 1, 64, 1)
both = kornia.augmentation.AugmentationSequential(kornia.augmentation.Resize((16, 16)), data_keys=["input", "mask"])
picture, mask = both(columns, columns)
by_function = kornia.geometry.resize(columns, (16, 16))
by_torch = torch.nn.functional.interpolate(columns, (16, 16), mode="bilinear")
rows = {"augmentation": picture, "its mask": mask, "geometry.resize": by_function, "torch": by_torch}
rows = {name: value[0, 0, 0].tolist() for name, value in rows.items()}
for name, row in rows.items():
    print(f"{name}: first columns {[round(v, 1) for v in row[:3]]}, last {row[-1]:.1f}")
assert torch.equal(by_function, by_torch) and rows["torch"][0] == 1.5
assert abs(rows["augmentation"][0]) < 1e-3 and abs(rows["augmentation"][-1] - 63) < 1e-3, "edges are aligned now"
assert rows["its mask"][0] == 2 and rows["its mask"][-1] == 62, "the mask is sampled otherwise now"
edges = kornia.augmentation.Resize((16, 16), align_corners=False)(columns)
assert abs(float(edges[0, 0, 0, 0]) - 1.5) < 1e-3
PY
