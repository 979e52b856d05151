"""Every plain ViT of timm, by name: exact or refused, and without its config.json also assumed with a warning.

And the cards of timm's files, which say what timm says.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torch_peers
from keras_vit import converters, zoo
from keras_vit.converters import json_timm
from keras_vit.converters.config_json import channel_values, implied_fields
from keras_vit.errors import CheckpointError

pytestmark = [pytest.mark.torch, pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
MODULES = ("vision_transformer", "eva", "beit", "deit", "naflexvit", "vision_transformer_relpos")
LARGE = 1600  # width: their two blocks alone take gigabytes
EXACT = 239  # of 262 names; the others are of other architectures


def outcome(folder: Path, images: np.ndarray, wanted: np.ndarray, facts: dict[str, Any] | None) -> str:
    """Load the file that timm wrote and compare its outputs; a warning may say what was assumed."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = converters.load(folder, config=facts, image_size=images.shape[2:])
        found = np.asarray(model(images.transpose(0, 2, 3, 1)))
    except CheckpointError:
        return "refused"
    found, wanted = found.reshape(-1), wanted.reshape(-1)
    same = found.shape == wanted.shape and np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    return "exact" if same else "assumed" if any("is assumed" in str(each.message) for each in caught) else "wrong"


def test_a_name_implies_the_heads_of_its_model() -> None:
    timm, torch = torch_peers.import_timm(), torch_peers.import_torch()
    wrong = {}
    for name in [
        name for module in (*MODULES, "vision_transformer_hybrid") for name in timm.list_models(module=module)
    ]:
        try:
            implied = implied_fields("architecture", name, json_timm._names()).get("num_heads")
        except CheckpointError:  # it has other blocks
            continue
        with torch.device("meta"):
            heads = getattr(getattr(timm.create_model(name, depth=2).blocks[0], "attn", None), "num_heads", None)
        if implied is not None and heads not in (None, implied):
            wrong[name] = (implied, heads)
    assert wrong == {}


def test_no_name_of_timm_gives_other_numbers(tmp_path: Path) -> None:
    timm = torch_peers.import_timm()
    names = [name for module in MODULES for name in timm.list_models(module=module)]
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        model = timm.create_model(name, pretrained=False, depth=2) if "sapiens" not in name else None
        if model is None or getattr(model, "embed_dim", 0) > LARGE:
            continue
        model = torch_peers.randomised(model)
        timm.models.save_for_hf(model, tmp_path, safe_serialization=True, model_args={"depth": 2})
        images = np.random.default_rng(0).normal(size=(1, *model.pretrained_cfg["input_size"])).astype(np.float32)
        wanted = torch_peers.outputs(model, images.transpose(0, 2, 3, 1))
        complete = outcome(tmp_path, images, wanted, None)
        (tmp_path / "config.json").unlink()
        heads = getattr(getattr(model.blocks[0], "attn", None), "num_heads", None)
        found[name] = complete, outcome(tmp_path, images, wanted, {"num_heads": heads} if heads else None)
    assert {name: both for name, both in found.items() if "wrong" in both} == {}
    assert sum(complete == "exact" for complete, _ in found.values()) >= EXACT


def test_a_card_of_a_file_of_timm_says_what_timm_says() -> None:
    timm, torch = torch_peers.import_timm(), torch_peers.import_torch()
    rows = [row for name in zoo.names() for row in zoo.card(name).weights.values()]
    of_timm = [row for row in rows if (row.url or "").startswith(("hf://timm/", "hf://belfner/"))]
    wrong = {}
    for row in of_timm:
        repository = (row.url or "").removeprefix("hf://").rpartition("/")[0]
        published = timm.models.get_pretrained_cfg(name := repository.partition("/")[2])
        with torch.device("meta"):  # of the whole size: no number is computed
            model = timm.create_model(name, pretrained=False)
        config, blocks = row.whole_config(), getattr(model, "blocks", ())
        attention = getattr(blocks[0], "attn", None) if blocks else None
        ours = {
            "repository": repository.replace("_quickgelu", ""),  # timm's own code takes the other repository
            "parameters": row.parameters,
            "depth": config.num_layers,
            "num_heads": config.num_heads if attention else None,
            "num_classes": config.num_classes,
            "input_size": (3, *config.size),
            **{key: getattr(row.preprocessing, key) for key in ("interpolation", "resize", "crop_fraction")},
            **{key: channel_values(getattr(row.preprocessing, key)) for key in ("mean", "std")},
        }
        theirs = {
            "repository": published.hf_hub_id,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "depth": len(blocks),
            "num_heads": getattr(attention, "num_heads", None),
            "num_classes": published.num_classes,
            "input_size": published.input_size,
            "interpolation": published.interpolation,
            "resize": {"center": "crop"}.get(published.crop_mode, published.crop_mode),
            "crop_fraction": published.crop_pct,
            **{key: channel_values(getattr(published, key)) for key in ("mean", "std")},
        }
        implied = json_timm.read({"architecture": name}, {})
        differs = {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]}
        differs |= {
            key: (getattr(config, key), value) for key, value in implied.items() if getattr(config, key) != value
        }
        if differs:
            wrong[row.architecture, row.tag] = differs
    assert len(of_timm) > 100
    assert wrong == {}
