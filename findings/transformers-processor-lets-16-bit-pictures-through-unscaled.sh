#!/usr/bin/env bash
# Guess: an image processor scales a uint16 picture to 0..1, or refuses it, whichever of its two back ends is used.
# Fact: transformers 5.24.0 with torchvision (the default) divides every integer by 255, so a 16 bit picture becomes
# 0..257; ViTImageProcessorPil raises. The indices of a palette PNG and the 0 and 1 of a black and white one are
# divided by 255 too, in both.
# Why it matters: microscopy, X-ray and depth pictures reach the ViT 257 times too bright, and it answers with full
# confidence.
# Instead: convert to uint8, or set rescale_factor=1 / 65535; picture.convert('RGB') for palettes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 pillow==13.0.0 torch==2.14.1 torchvision==0.29.1 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import transformers
from PIL import Image
from transformers import ViTImageProcessor, ViTImageProcessorPil

print("transformers", transformers.__version__)
settings = {"size": {"height": 32, "width": 32}, "do_normalize": False}
wide = np.full((64, 64, 3), 65535, np.uint16)
white = Image.new("1", (64, 64), 1)


def largest(kind, picture):
    try:
        return float(np.asarray(kind(**settings)(picture, return_tensors="np")["pixel_values"]).max())
    except ValueError as error:
        return f"ValueError: {str(error)[:60]}..."


found = {}
for kind in (ViTImageProcessor, ViTImageProcessorPil):
    for name, picture in (("uint16", wide), ("bytes", (wide // 257).astype(np.uint8)), ("black and white", white)):
        found[kind.__name__, name] = largest(kind, picture)
        print(f"{kind.__name__}, white of {name}: {found[kind.__name__, name]}")
assert found["ViTImageProcessor", "uint16"] == 257, "16 bits are scaled or refused now"
assert isinstance(found["ViTImageProcessorPil", "uint16"], str)
assert found["ViTImageProcessor", "bytes"] == found["ViTImageProcessorPil", "bytes"] == 1
assert found["ViTImageProcessor", "black and white"] < 0.004 > found["ViTImageProcessorPil", "black and white"]
PY
