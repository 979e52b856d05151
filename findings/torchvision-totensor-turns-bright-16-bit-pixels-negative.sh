#!/usr/bin/env bash
# Guess: ToTensor of a 16 bit grey PNG (Pillow's mode I;16) gives the numbers of the file, or divides them by 65,535.
# Fact: torchvision 0.29.1 returns int16: from 32,768 on they are negative, and nothing is scaled. v2.ToImage of the
# same picture is uint16, and v2.ToDtype(float32, scale=True) after it is right. From 8 to 16 bits ToDtype(scale=True)
# multiplies by 256, so white becomes 65,280.
# Why it matters: depth in millimetres beyond 32.8 m and bright X-rays change their sign, and Normalize takes them
# after .float().
# Instead: v2.ToImage() and v2.ToDtype(torch.float32, scale=True); to 16 bits multiply by 257.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 pillow==13.0.0 torch==2.14.1 torchvision==0.29.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

print("torchvision", torchvision.__version__, "torch", torch.__version__, "pillow", PIL.__version__)
depth = np.array([[0, 1000, 32767], [32768, 40000, 65535]], np.uint16)
Image.fromarray(depth).save("depth.png")
picture = Image.open("depth.png")
old = transforms.ToTensor()(picture)
new = v2.ToImage()(picture)
scaled = v2.ToDtype(torch.float32, scale=True)(new)
print("mode", picture.mode, "stored", depth.ravel().tolist())
print("ToTensor", old.dtype, old.flatten().tolist())
print("v2.ToImage", new.dtype, new.to(torch.int32).flatten().tolist(), "scaled", scaled.flatten().tolist())
assert old.dtype == torch.int16 and old.flatten().tolist() == [0, 1000, 32767, -32768, -25536, -1], "it is right now"
assert new.dtype == torch.uint16 and np.allclose(scaled.numpy()[0], depth / 65535)
wide = v2.functional.to_dtype(torch.tensor([[[0, 128, 255]]], dtype=torch.uint8), torch.uint16, scale=True)
print("bytes 0, 128, 255 as 16 bits", wide.to(torch.int32).flatten().tolist())
assert wide.to(torch.int32).flatten().tolist() == [0, 32768, 65280], "white is 65,535 now"
PY
