"""timm and transformers read our files and we read theirs, with the same outputs.

    python -m pip install "torch==2.13.0" "timm==1.0.31" "transformers==5.23.0"
    python -m pytest tests/converters/test_peers.py

If there is no torchvision for your build of PyTorch: pip install --no-deps timm, then huggingface_hub and pyyaml.
transformers 4.57.1 passes too. Without these packages the tests are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_families as families

import peer_cases as cases
import torch_peers as peers
from keras_vit import converters
from keras_vit.converters.containers import Header
from keras_vit.converters.facts import asked_for
from keras_vit.converters.source import tensor_fields
from keras_vit.converters.table import fields_of_rows, load_table
from keras_vit.errors import CheckpointError
from peer_cases import TOLERANCE
from reference_cases import distance
from tiny_models import built, prepared

pytestmark = [pytest.mark.torch, pytest.mark.peers]

CLASSIFIER, MODEL = "ViTForImageClassification", "ViTModel"
FOR_TIMM = [name for name in cases.OURS if name not in (*cases.REFUSED_BY_TIMM, *cases.WITHOUT_ENTRY_POINT)]
FOR_TRANSFORMERS = [name for name in cases.OURS if name not in cases.REFUSED_BY_TRANSFORMERS]


@pytest.mark.parametrize(("architecture", "changes"), cases.TIMM.values(), ids=cases.TIMM)
def test_what_timm_writes_is_read_and_comes_back(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    theirs = peers.saved_by_timm(tmp_path / "theirs", architecture, {**cases.ARGS, **changes})
    ours = converters.load(tmp_path / "theirs")
    images = prepared(ours.config)
    want = peers.outputs(theirs, images)
    assert distance(ours(images), want) < TOLERANCE
    converters.save(ours, tmp_path / "ours", format=converters.detect(tmp_path / "theirs"))
    assert distance(peers.outputs(peers.loaded_by_timm(tmp_path / "ours"), images), want) < TOLERANCE


@pytest.mark.parametrize(("kind", "changes"), cases.TRANSFORMERS.values(), ids=cases.TRANSFORMERS)
def test_what_transformers_writes_is_read_and_comes_back(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    theirs = peers.saved_by_transformers(tmp_path / "theirs", kind, {**cases.HF, **changes})
    ours = converters.load(tmp_path / "theirs")
    images = prepared(ours.config)
    want = peers.outputs(theirs, images)
    assert distance(ours(images), want) < TOLERANCE
    converters.save(ours, tmp_path / "ours", format="huggingface")
    assert distance(peers.outputs(peers.loaded_by_transformers(tmp_path / "ours", kind), images), want) < TOLERANCE


@pytest.mark.filterwarnings("ignore:keras_vit. .* has other parts:UserWarning")
@pytest.mark.parametrize("name", families.FILES)
def test_files_of_further_families_are_read_by_their_libraries_again(tmp_path: Path, name: str) -> None:
    images, want = families.wanted(families.arrays(families.FOLDER / name / "reference.npz"))
    converters.save(converters.load(families.FOLDER / name), tmp_path, format=families.format_of(name))
    config = json.loads((tmp_path / "config.json").read_text())
    if "architecture" in config:
        theirs = peers.loaded_by_timm(tmp_path)
    else:
        kind = config["architectures"][0]
        options = {"add_pooling_layer": False} if kind == MODEL else {}
        theirs = peers.loaded_by_transformers(tmp_path, kind, **options)
    assert distance(peers.outputs(theirs, images), want[:, 0] if want.ndim == 3 else want) < TOLERANCE


@pytest.mark.parametrize("name", FOR_TIMM)
def test_timm_reads_what_we_write(tmp_path: Path, name: str) -> None:
    model = built(**{**cases.ERF, **cases.OURS[name]})
    converters.save(model, tmp_path / "ours", format="timm")
    images = prepared(model.config)
    got = peers.outputs(peers.loaded_by_timm(tmp_path / "ours"), images)
    assert distance(got, np.asarray(model(images))) < TOLERANCE


@pytest.mark.parametrize("name", FOR_TRANSFORMERS)
def test_transformers_reads_what_we_write(tmp_path: Path, name: str) -> None:
    model = built(**{**cases.ERF, "norm_epsilon": 1e-12, **cases.OURS[name]})
    config = model.config
    converters.save(model, tmp_path / "ours", format="huggingface")
    kind = CLASSIFIER if config.num_classes else MODEL
    plain = not config.num_classes and config.representation_size is None
    options = {"add_pooling_layer": False} if plain else {}  # else its weights would be missing
    theirs = peers.loaded_by_transformers(tmp_path / "ours", kind, **options)
    images = prepared(config)
    assert distance(peers.outputs(theirs, images), np.asarray(model(images))) < TOLERANCE


def test_transformers_runs_a_dinov3_that_is_not_square(tmp_path: Path) -> None:
    rotary = {**cases.ERF, "layer_scale": 0.1, "num_classes": 0, "norm_epsilon": 1e-5, "image_size": (16, 48)}
    model = built(**{**families.FAMILIES["rotary"], **rotary})
    converters.save(model, tmp_path, format="huggingface_dinov3")
    images = prepared(model.config)
    theirs = peers.loaded_by_transformers(tmp_path, "DINOv3ViTModel")
    assert distance(peers.outputs(theirs, images), np.asarray(model(images))) < TOLERANCE


SIZES: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 4, "patch_size": 8, "img_size": (24, 40)}


@pytest.mark.parametrize(
    ("name", "arguments", "format"),
    [
        ("vit_pe_core_tiny_patch16_384", {"attn_pool_num_heads": 2, "attn_pool_mlp_ratio": 1.5}, "timm"),
        ("vit_pe_lang_large_patch14_448", {}, "timm_rope"),
        ("vit_pe_spatial_tiny_patch16_512", {"ref_feat_shape": 2, "num_reg_tokens": 1}, "timm"),
        ("vit_small_patch16_rope_224", {}, "timm_rope"),
        ("vit_base_patch16_rope_ape_224", {"rope_grid_offset": 0.5}, "timm_rope"),
    ],
)
def test_rotary_positions_of_timm_are_exact_at_every_size(
    name: str, arguments: dict[str, Any], format: str, tmp_path: Path
) -> None:
    timm = peers.import_timm()
    theirs = peers.randomised(timm.create_model(name, num_classes=5, **SIZES, **arguments))
    timm.models.save_for_hf(theirs, tmp_path / "theirs", safe_serialization=True, model_args=SIZES | arguments)
    ours = converters.load(tmp_path / "theirs")
    images = prepared(ours.config)
    assert distance(np.asarray(ours(images)), peers.outputs(theirs, images)) < TOLERANCE
    converters.save(ours, tmp_path / "ours", format=format)
    again = peers.loaded_by_timm(tmp_path / "ours")
    assert distance(peers.outputs(again, images), np.asarray(ours(images))) < TOLERANCE
    larger = ours.resized((48, 32))
    theirs.set_input_size((48, 32))
    images = prepared(larger.config)
    assert distance(np.asarray(larger(images)), peers.outputs(theirs, images)) < TOLERANCE


@pytest.mark.slow
def test_a_name_tells_what_the_tensors_of_timm_do_not() -> None:
    modules = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva")
    names = {name for module in modules for name in peers.import_timm().list_models(module=module)}
    for name in sorted(names):
        if "sapiens" not in name:  # they cannot be built with two blocks
            check_name(name)


def check_name(name: str) -> None:
    """Compare what is read from a name of timm with the model that timm builds.

    Raises:
        AssertionError: they differ.
    """
    with peers.import_torch().device("meta"):
        theirs = peers.import_timm().create_model(name, depth=2)
    headers = {key: Header(key, tuple(value.shape), "float32") for key, value in theirs.state_dict().items()}
    shapes = {key: header.shape for key, header in headers.items()}
    tables = [table for table in map(load_table, ("timm", "timm_eva", "timm_rope")) if table.find_places(shapes)]
    table = tables[0] if tables else load_table("timm")
    match = table.match(headers)
    if not tables or match.unknown or "encoder_norm/gamma" not in match.sources:
        return  # another kind of model, told by its tensors
    try:
        said = table.json.read({"architecture": name, "global_pool": theirs.global_pool})
    except CheckpointError:
        assert name in cases.NOT_READ or name.startswith(cases.NOT_READ_KINDS)
        return
    fields = {**tensor_fields(match.shapes), **said}
    assert not set(asked_for(table, fields, is_described=True)) - said.keys(), name  # else such a file is refused
    assert (getattr(theirs, "rope", None) is None) == (said.get("rotary_theta") is None), name
    said |= fields_of_rows(source.row for source in match.sources.values())
    block, pool = theirs.blocks[0], theirs.attn_pool
    norms = [block.norm1, block.norm2, *(module for module in (theirs.norm, theirs.fc_norm) if hasattr(module, "eps"))]
    activations = {"GELU": "gelu_erf", "GELUTanh": "gelu_tanh", "QuickGELU": "gelu_quick", "SiLU": "silu"}
    assert said.get("num_heads") in (block.attn.num_heads, None if name.startswith(("test_", "flexivit_")) else ()), (
        name
    )
    assert {said.get("norm_epsilon", table.config["norm_epsilon"])} == {norm.eps for norm in norms}, name
    assert said.get("activation", "gelu_erf") == activations[type(block.mlp.act).__name__], name
    heads = said.get("pool_heads") or block.attn.num_heads
    assert pool is None or (pool.num_heads, pool.norm.eps) == (heads, block.norm1.eps), name
