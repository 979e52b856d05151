"""A file whose config.json is lost gives the same numbers, or an error asks for what no tensor tells."""

from __future__ import annotations

import itertools
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import converters
from keras_vit.errors import CheckpointError
from places import DATA
from tiny_models import FAMILIES, OTHERS, VARIANTS, built, prepared

FOLDERS = [path.parent for path in sorted(DATA.glob("*/*/config.json")) if path.parents[1].name != "text"]
ASKED, ASSUMED = re.compile(r"'(\w+)': "), re.compile(r"(\w+)=")
FORMATS = (
    "timm",
    "timm_beit",
    "timm_eva",
    "timm_relpos",
    "timm_rope",
    "huggingface",
    "huggingface_beit",
    "huggingface_clip",
    "huggingface_siglip",
    "huggingface_dinov2",
    "huggingface_ijepa",
    "huggingface_pixio",
)


def answered(path: Path, config: Any) -> tuple[Any, list[str]]:
    """Load a file, and state what each error asks for; return the model or None, and what was asked or said."""
    facts: dict[str, Any] = {}
    said: list[str] = []
    for _ in range(5):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = converters.load(path, config=facts, image_size=config.image_size)
            assumed = [ASSUMED.findall(str(each.message)) for each in caught if "is assumed" in str(each.message)]
            names = [name for found in assumed for name in found]
            if not names:
                return model, said
            said += names  # a warning names them: stated, there is none
            facts |= {name: getattr(config, name) for name in names}
        except CheckpointError as error:
            names = ASKED.findall(str(error)) if "pass config=" in str(error) else []
            if not names:
                return None, [*said, str(error)]
            said += names
            facts |= {name: getattr(config, name) for name in names}
    return None, said


def outcome(folder: Path, tmp_path: Path) -> str:
    """Load a file without its config.json: "exact" with what it asked for, "refused", or what is wrong."""
    try:
        model = converters.load(folder)
    except CheckpointError:
        return "refused"  # with it, too
    bare = tmp_path / folder.name
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.json", "*.npz"))
    found, said = answered(bare, model.config)
    if found is None:
        return "refused"
    x = prepared(model.config)
    different = not np.allclose(np.asarray(found(x)), np.asarray(model(x)), rtol=1e-4, atol=1e-4)
    return f"other numbers, after {said}" if different else "exact"


@pytest.mark.full
def test_a_reference_without_its_config_json_is_exact_or_asked_for(tmp_path: Path) -> None:
    found = {str(folder): outcome(folder, tmp_path) for folder in FOLDERS if not (folder / "checkpoint.npz").exists()}
    assert {name: said for name, said in found.items() if said not in ("exact", "refused")} == {}
    assert list(found.values()).count("exact") >= 49


@pytest.mark.full
def test_a_built_model_without_its_config_json_is_exact_or_asked_for(tmp_path: Path) -> None:
    kinds = {"pure": {}, **VARIANTS, **FAMILIES, **OTHERS, "GELU": {"activation": "gelu_quick", "norm_epsilon": 1e-3}}
    found = {}
    models = {name: built(**{"num_layers": 2, **fields}) for name, fields in kinds.items()}
    for (name, model), format in itertools.product(models.items(), FORMATS):
        folder = tmp_path / f"{name} {format}"
        try:
            with warnings.catch_warnings(action="ignore"):
                converters.save(model, folder, format=format)
        except CheckpointError:
            continue
        found[folder.name] = outcome(folder, tmp_path / "bare")
    assert {name: said for name, said in found.items() if said not in ("exact", "refused")} == {}
    assert list(found.values()).count("exact") >= 25
