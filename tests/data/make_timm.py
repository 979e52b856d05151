"""Writes tests/data/timm: tiny models of timm 1.0.31 as on the hub, and what timm computes with them.

    python tests/data/make_timm.py

Weights are float16 (timm computed with the same values in float32), images are those of `tiny_models.prepared`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "timm"
sys.path.append(str(FOLDER.parents[1] / "support"))

import torch_peers as peers  # noqa: E402
from peer_cases import TIMM  # noqa: E402
from tiny_models import prepared, tiny  # noqa: E402

KEPT = (
    "distilled",
    "attention pooling beside tokens",
    "mean beside a class token",
    "mean, norm before",
    "registers without positions",
    "class token without position",
    "quick GELU",
    "pre-norm",
    "LayerScale",
    "wide image",
    "no positions",
    "CLIP with quick GELU",
    "BEiT",
    "BEiT of one table",
    "BEiT-3",
    "EVA-02 CLIP",
    "AIMv2",
    "relative biases of one MLP",
    "relative biases of tables",
)
SMALL: dict[str, Any] = {"embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 1.0, "in_chans": 1, "num_classes": 3}


def main() -> None:
    """Writes the folders of all cases and their outputs."""
    outputs = {}
    for name in KEPT:
        architecture, changes = TIMM[name]
        size = changes.get("img_size", 32)
        args = {"img_size": size, "patch_size": 8, **SMALL, **changes}
        folder = FOLDER / name.replace(",", "").replace(" ", "_")
        model = peers.saved_by_timm(folder, architecture, args, half=True)
        save_file({key: value.half() for key, value in model.state_dict().items()}, folder / "model.safetensors")
        outputs[folder.name] = peers.outputs(model, prepared(tiny(image_size=size, num_channels=args["in_chans"])))
    np.savez_compressed(FOLDER / "outputs.npz", **outputs)


if __name__ == "__main__":
    main()
