"""What the READMEs say is so: the table of features is true, and their examples run."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import doc_blocks
import feature_table
from keras_vit import converters
from keras_vit.converters.table import load_table
from model_weights import assert_same_bits, values
from tiny_models import VARIANTS, built

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.split(feature_table.START)[1].split(feature_table.END)[0]
HEADER, _, *ROWS = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in TABLE.splitlines()]
HEADER = HEADER[-len(converters.formats()) :]
CELLS = {(row[0], format): cell for row in ROWS for format, cell in zip(HEADER, row[1:], strict=True)}

# A model that has the feature and nothing else that is unusual.
MODELS: dict[str, dict[str, Any]] = {
    "class token": {},
    "ResNet hybrids": VARIANTS["hybrid"],
    "pre_logits, no head": {"representation_size": 24, "num_classes": 0},
    "pre_logits and a head": {"representation_size": 24},
    "attention pooling (map)": {"classifier": "map", "position_prefix": False},
    "registers": {"num_registers": 2},
    "LayerScale": {"layer_scale": 0.1},
    "pre-norm (CLIP)": {"pre_norm": True, "patch_bias": False},
    "distillation token": {"distilled": True},
    "2-D positions": {"position": "learned2d"},
    "relative positions": {"position": "relative", "position_place": "blocks"},
    "positions at every block": {"position_place": "blocks"},
    "no class token (gap)": {"classifier": "gap"},
    "norm after pooling (fc_norm)": {"classifier": "gap", "class_token": True, "final_norm": "pooled"},
    "no qkv bias": {"qkv_bias": False},
    "sin-cos positions": {"position": "sincos2d", "classifier": "gap"},
    "GELU: tanh": {"activation": "gelu_tanh"},
    "GELU: erf": {"activation": "gelu_erf"},
    "GELU: quick": {"activation": "gelu_quick"},
}


def in_the_numbers_of(format: str, model: dict[str, Any]) -> dict[str, Any]:
    """The model with the epsilons and the GELU that the format means, so that only the feature is in question."""
    table = load_table(format)
    own = {name: table.meaning.config[name] for name in ("activation", "norm_epsilon") if name in table.meaning.config}
    numerics = table.meaning.config.get("resnet")
    if numerics and "resnet" in model:
        names = ("norm_epsilon", "conv_epsilon", "conv_epsilon_place")
        model = model | {"resnet": model["resnet"] | {name: getattr(numerics, name) for name in names}}
    return own | model


def test_the_table_of_features_is_the_tables_of_formats() -> None:
    assert feature_table.rendered() == TABLE, "run python tests/feature_table.py"
    assert {row[0] for row in ROWS[1:]} == MODELS.keys()


@pytest.mark.parametrize("format", [name for name in HEADER if load_table(name).writable])
@pytest.mark.parametrize("feature", MODELS)
def test_each_cell_of_the_table_is_true(feature: str, format: str, tmp_path: Path) -> None:
    model = built(**in_the_numbers_of(format, MODELS[feature]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="keras_vit: ")
        try:
            converters.save(model, tmp_path / "file", format=format)
            outcome = "yes"
        except (converters.CheckpointError, UserWarning):
            outcome = "-"
    assert CELLS[feature, format] == outcome


@pytest.mark.parametrize("format", HEADER)
def test_what_is_said_to_be_written_is_written(format: str) -> None:
    assert CELLS["read / written", format] == ("both" if load_table(format).writable else "read")


def test_the_made_up_format_works_from_any_path(tmp_path: Path) -> None:
    text = (ROOT / "converters" / "README.md").read_text(encoding="utf-8")
    acme = tmp_path / "formats of mine" / "acme.toml"
    acme.parent.mkdir()
    acme.write_text(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0], encoding="utf-8")
    model = built(activation="gelu_erf", norm_epsilon=1e-5)
    path = converters.save(model, tmp_path / "model.safetensors", format=str(acme))
    again = converters.load(path, format=str(acme))
    assert_same_bits(values(again), values(model))
    assert again.config == model.config
    with pytest.raises(converters.CheckpointError, match="acme format has no place for registers"):
        converters.save(built(num_registers=1), tmp_path / "other.safetensors", format=str(acme))
    with pytest.raises(converters.CheckpointError, match="no format is known"):
        converters.load(path)


def test_the_made_up_formats_own_files_need_their_heads_told(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    text = (ROOT / "converters" / "README.md").read_text(encoding="utf-8")
    acme = tmp_path / "acme.toml"
    acme.write_text(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0], encoding="utf-8")
    model = built(activation="gelu_erf", norm_epsilon=1e-5)
    path = converters.save(model, tmp_path / "model.safetensors", format=str(acme))
    save_file(load_file(path), path)  # as acme's own code would write it
    with pytest.raises(converters.CheckpointError, match="num_heads"):
        converters.load(path, format=str(acme))
    assert_same_bits(values(converters.load(path, format=str(acme), config={"num_heads": 4})), values(model))


def test_the_python_of_the_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    # All 200 steps are the demo's.
    quick = doc_blocks.script(README).replace('"finetune-digits")', '"finetune-digits", steps=3, xla=False)')
    proof = "\nassert len(maps) == larger.config.num_layers and result.model.config.image_size == (48, 48)\n"
    printed = doc_blocks.run(quick + proof, tmp_path)
    assert "accuracy" in printed and printed.count("cosine") == 2
    for path in ("report.html", "runs/digits/model.keras", "digits.tflite", "models/digits/1/saved_model.pb"):
        assert (tmp_path / path).is_file()
