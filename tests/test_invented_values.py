"""Whatever translates a model refuses a value that it does not know: LiteRT writers, checkpoint formats, cost."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import VisionTransformer, converters, export
from keras_vit.converters import saving
from keras_vit.converters.loading import variables_by_path
from keras_vit.converters.table import POSITION, PREFIX, Table, formats, load_table
from keras_vit.errors import CheckpointError
from keras_vit.export.litert import head, writer
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.images import add_image_input
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.plan import FilePlan
from keras_vit.model import cost
from keras_vit.model.config import ViTConfig
from model_weights import assert_same_bits, values
from tiny_models import FAMILIES, OTHERS, TINY, VARIANTS, built, tiny

INVENTED = "invented"
# How tables are resized to another size: it changes nothing in a model of one size.
NOT_WRITTEN = {("PositionEmbedding", "method"), ("RelativeBias", "method")}
assert head.WRITERS


def texts(owner: Any) -> set[str]:
    """Return the fields of a layer or a config whose value is a text."""
    fields = owner.to_dict() if isinstance(owner, ViTConfig) else owner.__dict__
    return {name for name in writer.HONOURED[type(owner)] if isinstance(fields.get(name), str)}


def owners(model: VisionTransformer) -> list[Any]:
    """Return the layers of a model and the configs in them, as far as LiteRT writers declare their fields."""
    parts = [part for layer in model.layers for part in layer._flatten_layers()]
    configs = [value for part in parts for value in vars(part).values() if dataclasses.is_dataclass(value)]
    return [one for one in (*parts, *configs) if type(one) in writer.HONOURED]


@pytest.mark.parametrize("kind", ["pure", "hybrid", "map", "sincos", "2-D positions", "Perception Encoder", "mixer"])
def test_litert_writers_refuse_it(kind: str) -> None:
    config = tiny(**(VARIANTS | FAMILIES | OTHERS)[kind])
    names = {(type(one).__name__, name) for one in owners(VisionTransformer(config)) for name in texts(one)}
    names = {(owner, name) for owner, name in names if (owner, name) not in NOT_WRITTEN}
    assert names
    for name in {name for _, name in names}:
        model = VisionTransformer(config)
        for one in owners(model):
            if name in texts(one):
                object.__setattr__(one, name, INVENTED)
        with pytest.raises(ValueError, match=f"{name}='{INVENTED}'"):
            writer.check_layers(model.layers)


def test_a_new_activation_of_the_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(representation_size=24)
    monkeypatch.setattr(model.get_layer("pre_logits"), "activation", squared_relu)
    with pytest.raises(ValueError, match=r"no LiteRT writer for the layer 'pre_logits' with the activation"):
        export.tflite(model, tmp_path / "a.tflite", quantize="none")
    assert not list(tmp_path.iterdir())


def squared_relu(x: Any) -> Any:
    return x * x * (x > 0)


@pytest.mark.parametrize("name", ["interpolation", "resize", "crop_rounding"])
def test_files_of_pixels_refuse_it(name: str) -> None:
    config = ViTConfig(**TINY)
    object.__setattr__(config.preprocessing, name, INVENTED)
    options = FilePlan(input_dtype="uint8", source_size=(48, 48), resize="exact")
    with pytest.raises(ValueError, match=INVENTED):
        add_image_input(Operators(Builder()), config, options)


@pytest.mark.parametrize("name", ["activation", "representation_activation"])
def test_cost_refuses_it(name: str) -> None:
    config = tiny(representation_size=24)
    object.__setattr__(config, name, INVENTED)
    with pytest.raises(TypeError, match=f"cost of the activation '{INVENTED}'"):
        cost.count(config)


# Fields that change nothing in a model without the part that they are for.
UNUSED = {"position_method": True, "rotary_axes": "rotary_theta", "representation_activation": "representation_size"}


@pytest.mark.full
def test_formats_refuse_it() -> None:
    models = [VisionTransformer(tiny(**changes)) for changes in (VARIANTS | FAMILIES | OTHERS).values()]
    written = set()
    for table in filter(lambda table: table.writable, map(load_table, formats())):
        for model in models:
            try:
                plan(model, model.config, table)
            except CheckpointError:
                continue
            written.add(table.format)
            for name, value in model.config.to_dict().items():
                is_used = name not in UNUSED or getattr(model.config, str(UNUSED[name]), None) is not None
                if isinstance(value, str) and is_used:
                    config = model.config.replace()
                    object.__setattr__(config, name, INVENTED)
                    with pytest.raises(ValueError, match=f"{name}.*{INVENTED}"):
                        plan(model, config, table)
    assert len(written) > 12


def plan(model: VisionTransformer, config: ViTConfig, table: Table) -> None:
    """Plan a file of a model, as if it had another config."""
    variables = variables_by_path(model)
    written = saving.written_config(config, table, variables)
    moved = {}
    if written != config:
        arrays = {name: np.asarray(variables[name]) for name in (POSITION, *PREFIX) if name in variables}
        moved = saving.move_prefix_rows(arrays, written.position_prefix)
    saving.plan_file(written, {name: tuple(v.shape) for name, v in (variables | moved).items()}, table)


def test_a_table_that_would_not_read_what_it_writes_is_refused(tmp_path: Path) -> None:
    model = built()
    target = tmp_path / "model.safetensors"
    table = tmp_path / "mine.toml"
    table.write_text('base = "timm"\nformat = "mine"\n[spelled]\n"norm1." = "norm2."\n')
    with pytest.raises(CheckpointError, match="would not read what it writes: 'blocks.0.norm1.weight' for"):
        converters.save(model, target, format=table)
    assert not target.exists()
    table = tmp_path / "prefixed.toml"
    table.write_text('base = "timm"\nformat = "prefixed"\njson = ""\nwrite_prefix = "net."\n')
    again = converters.load(converters.save(model, target, format=table), format=table)
    assert_same_bits(values(again), values(model))


def test_save_raises_no_warning_of_numpy(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        converters.save(built(), tmp_path / "a.npz", format="google")
