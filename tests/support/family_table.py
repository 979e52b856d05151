"""Write the table of families into docs/load-and-convert.md, from the cards and the tables of formats.

python tests/support/family_table.py
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

from keras_vit import ViTConfig, zoo
from keras_vit.converters.saving import plan_file, written_config
from keras_vit.converters.table import formats, load_table
from keras_vit.errors import CheckpointError
from keras_vit.model.cost import symbolic_model
from places import ROOT

PAGE = ROOT / "docs" / "load-and-convert.md"
START = "<!-- families: written by tests/support/family_table.py, checked by make test-full -->\n"
END = "<!-- /families -->"
# Formats that are only read, of which a model does not show whether it could be in such a file.
READ_ONLY = {"DINOv3": {"meta_dinov3"}, "ViT": {"keras_hub"}}
HEADER = ("family", "models", "read from", "written to")


@functools.cache
def configs() -> dict[str, list[ViTConfig]]:
    """Return small configs of each family, one for each kind of model on its cards."""
    found: dict[str, list[ViTConfig]] = {}
    for family, names in itertools.groupby(zoo.names(), lambda name: zoo.card(name).family):
        rows = [row for name in names for row in zoo.card(name).weights.values()]
        smaller = [small(row.whole_config()) for row in rows if row.tag != "digits"]
        found[family] = [config for index, config in enumerate(smaller) if config not in smaller[:index]]
    return found


def small(config: ViTConfig) -> ViTConfig:
    """Return a config of the same kind with small sizes."""
    sizes: dict[str, Any] = {"hidden_size": 32, "mlp_dim": 64, "num_heads": 4, "num_layers": 2, "patch_size": 8}
    if config.resnet:
        stages = config.resnet.num_layers[:2] and (1, 1)
        resnet = {**config.to_dict()["resnet"], "num_layers": stages, "width_factor": 0.5}
        sizes |= {"resnet": resnet, "patch_size": 1 if stages else 2}
        sizes |= {} if config.num_layers else {"hidden_size": 256, "mlp_dim": 1, "num_layers": 0, "num_heads": 1}
    stride = config.replace(**sizes, image_size=64).stride[0]
    sizes |= {"image_size": 4 * stride, "dropout_rate": 0.0, "preprocessing": {}}
    sizes |= {"num_classes": 5} if config.num_classes else {}
    sizes |= {"representation_size": 24} if config.representation_size else {}
    return config.replace(**sizes, labels=None, **({"tokens_mlp_dim": 16} if config.tokens_mlp_dim else {}))


@functools.cache
def _shapes(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    return {v.path: tuple(v.shape) for v in symbolic_model(config).variables if "seed_generator" not in v.path}


@functools.cache
def _inexact(config: ViTConfig, format: str) -> tuple[str, ...] | None:
    """Return the fields that a format cannot state and that change only the last digits of a model's outputs.

    None if the format cannot hold the model. One block stands for all: they have the same variables.
    """
    sample = config.replace(num_layers=min(config.num_layers, 1))
    table = load_table(format)
    with contextlib.suppress(CheckpointError):
        written = written_config(sample, table, _shapes(sample))
        return plan_file(written, _shapes(written), table).inexact
    return None


def _writable() -> list[str]:
    return [name for name in formats() if load_table(name).writable]


def formats_of(config: ViTConfig) -> dict[str, bool]:
    """Return the formats that can hold a model, and whether other readers compute the same logits in all digits."""
    found = {name: _inexact(config, name) for name in _writable()}
    return {name: not inexact for name, inexact in found.items() if inexact is not None}


def read_from(family: str) -> list[str]:
    """Return the formats that such models are read from: a ResNet's epsilon may be the format's own."""
    found = set(READ_ONLY.get(family, ()))
    for config, name in itertools.product(configs()[family], _writable()):
        inexact = _inexact(config, name)
        if inexact is not None and all(text.startswith("resnet=") for text in inexact):
            found.add(name)
    return sorted(found)


def written_to(family: str) -> list[str]:
    """Return the formats that such models are written to without a difference."""
    return sorted({name for config in configs()[family] for name, exact in formats_of(config).items() if exact})


@functools.cache
def rows() -> dict[str, dict[str, Any]]:
    """Return the cells of each family by their columns."""
    return {
        family: {
            "models": str(sum(zoo.card(name).family == family for name in zoo.names())),
            "read from": read_from(family),
            "written to": written_to(family),
        }
        for family in configs()
    }


def rendered() -> str:
    """Return the table in Markdown."""
    lines = [HEADER, ["---"] * len(HEADER)]
    for family, cells in rows().items():
        texts = [cell if isinstance(cell, str) else ", ".join(f"`{name}`" for name in cell) for cell in cells.values()]
        lines.append([family, *texts[:2], "the same" if texts[1] == texts[2] else texts[2]])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(before + START + rendered() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
