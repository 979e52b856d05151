"""Write tests/data/eomt: four tiny random EoMTs by transformers, their outputs, and the segments that it finds.

    python -m pip install torch torchvision transformers==5.24.0
    python tests/data/make_eomt.py tests/data/eomt

Images are resized by Pillow, as keras_vit does it; torchvision's pixels differ by one of 255 here and there.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.eomt.image_processing_pil_eomt import EomtImageProcessorPil

SIDE = 32
# Kind of the backbone and number of upscalings -> a seed for which images have several segments.
CASES = {("eomt", 1): 7, ("eomt", 2): 14, ("eomt_dinov3", 1): 7, ("eomt_dinov3", 2): 19}
FIT = {"size": {"shortest_edge": SIDE, "longest_edge": SIDE}, "do_pad": True}
WINDOWS = {"size": {"shortest_edge": SIDE, "longest_edge": None}, "do_split_image": True}
STUFF = (0, 1, 2)
SPREADS = {"query.weight": 1.5, "class_predictor": 1.1, "conv2": 0.4, "mask_head": 0.6, "embeddings": 0.5}


def build(kind: str, upscalings: int, seed: int, *, hidden_size: int = 16) -> Any:
    """Build a random model whose queries have different classes, and masks of which a sixth is above 0."""
    torch.manual_seed(seed)
    names = ("Eomt", {"mlp_ratio": 2}) if kind == "eomt" else ("EomtDinov3", {"intermediate_size": 2 * hidden_size})
    config = getattr(transformers, f"{names[0]}Config")(
        hidden_size=hidden_size,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_blocks=2,
        num_queries=8,
        num_register_tokens=2,
        image_size=SIDE,
        patch_size=4 * upscalings,
        num_upscale_blocks=upscalings,
        id2label=dict(enumerate(["sky", "sea", "land", "tree", "road"])),
        **names[1],
    )
    model = getattr(transformers, f"{names[0]}ForUniversalSegmentation")(config)
    with torch.no_grad():
        for name, values in model.named_parameters():
            spread = next((spread for part, spread in SPREADS.items() if part in name), None)
            if "lambda1" in name:
                values.uniform_(0.3, 1)
            elif "norm" in name or name.endswith("bias"):
                values.normal_(float("norm" in name and name.endswith("weight")), 0.2)
            elif spread is not None:
                values.normal_(0, spread * (16 / hidden_size) ** 0.5)
        model.class_predictor.bias[-1] -= 2
        model.attn_mask_probs.zero_()
        shift = model.upscale_block.block[-1].layernorm2d.bias.normal_(0, 1)
        images = torch.from_numpy(prepared()).permute(0, 3, 1, 2)
        for _ in range(3):
            high = model.eval()(images).masks_queries_logits.quantile(0.85)
            model.mask_head.fc3.bias -= high * shift / (shift**2).sum()
    return model


def prepared() -> np.ndarray:
    """Two prepared images."""
    return np.random.default_rng(3).normal(size=(2, SIDE, SIDE, 3)).astype("float32")


def pictures(count: int) -> list[np.ndarray]:
    """Waves with a disc, at several aspect ratios."""
    drawn = []
    for i in range(count):
        draw = np.random.default_rng(i)
        height, width = [(40, 56), (64, 30), (33, 97), (32, 32), (100, 41), (20, 25)][i % 6]
        y, x = np.mgrid[:height, :width]
        waves = [np.sin(x / draw.uniform(3, 9) + channel) + np.cos(y / draw.uniform(3, 9)) for channel in range(3)]
        picture = 60 * np.stack(waves, axis=-1) + 128
        row, column, radius = draw.uniform(0, height), draw.uniform(0, width), draw.uniform(5, 15)
        picture[(y - row) ** 2 + (x - column) ** 2 < radius**2] = draw.uniform(0, 255, 3)
        drawn.append(picture.clip(0, 255).astype("uint8"))
    return drawn


@torch.no_grad()
def outputs(model: Any) -> dict[str, np.ndarray]:
    """Outputs for the prepared images, with the queries of the masks last."""
    found = model(torch.from_numpy(prepared()).permute(0, 3, 1, 2))
    masks = found.masks_queries_logits.permute(0, 2, 3, 1)
    return {"class_logits": found.class_queries_logits.numpy(), "mask_logits": masks.numpy()}


@torch.no_grad()
def segments(model: Any, drawn: list[np.ndarray], threshold: float = 0.5) -> dict[str, np.ndarray]:
    """Results of the three tasks: "0/panoptic/ids", numbers from 0 and -1 for none, and "0/panoptic/rows"."""
    fit, split = EomtImageProcessorPil(**FIT), EomtImageProcessorPil(**WINDOWS)
    results = {}
    for i, picture in enumerate(drawn):
        sizes = {"target_sizes": [picture.shape[:2]]}
        found = model(fit(picture, return_tensors="pt")["pixel_values"])
        options = {**sizes, "threshold": threshold}
        kinds = {
            "panoptic": fit.post_process_panoptic_segmentation(found, **options),
            "stuff": fit.post_process_panoptic_segmentation(found, **options, stuff_classes=list(STUFF)),
            "instance": fit.post_process_instance_segmentation(found, **options),
        }
        for kind, [result] in kinds.items():
            rows = [(row["label_id"], row["score"]) for row in result["segments_info"]]
            results[f"{i}/{kind}/rows"] = np.array(rows, "float32").reshape(-1, 2)
            results[f"{i}/{kind}/ids"] = result["segmentation"].numpy().astype("int8")
        inputs = split(picture, return_tensors="pt")
        found = model(inputs["pixel_values"])
        found.patch_offsets = inputs["patch_offsets"]
        results[f"{i}/semantic/ids"] = (
            split.post_process_semantic_segmentation(found, **sizes)[0].numpy().astype("int8")
        )
    return results


def main(folder: Path, count: int = 3) -> None:
    """Write the folders."""
    drawn = pictures(count)
    for (kind, upscalings), seed in CASES.items():
        model = build(kind, upscalings, seed)
        path = folder / f"{kind}_{upscalings}"
        model.save_pretrained(path)
        EomtImageProcessorPil(**FIT).save_pretrained(path)
        found = segments(model, drawn)
        print(
            path, [len(found[f"{i}/{kind}/rows"]) for i in range(count) for kind in ("panoptic", "stuff", "instance")]
        )
        np.savez_compressed(path / "reference.npz", **outputs(model), **found)
    arrays = {"prepared": prepared(), **{str(i): picture for i, picture in enumerate(drawn)}}
    np.savez_compressed(folder / "images.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
