"""In which checkpoint formats a model can be written, told from its config and the tables: no model is built.

`converters.save` decides by a model's tensors; tests/test_gallery.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_vit.converters.table import JsonFields, Table, lookup
from keras_vit.converters.tables import formats, load_table
from keras_vit.model.config import ViTConfig

# A variable that only a model has in which the field is set.
_VARIABLES = {
    "class_token": "prefix/cls",
    "distilled": "prefix/distillation",
    "num_registers": "prefix/registers",
    "resnet": "root/conv/kernel",
    "representation_size": "pre_logits/kernel",
    "layer_scale": "block_0/scale1/gamma",
    "pre_norm": "pre_norm/gamma",
    "num_classes": "head/kernel",
}
_POSITIONS = {
    ("learned", "stem"): "position/embedding",
    ("learned", "blocks"): "position_0/embedding",
    ("learned2d", "stem"): "position/x_embedding",
    ("learned2d", "blocks"): "position_0/x_embedding",
    ("relative", "blocks"): "position_0/relative_embedding",
}
_GELUS = ("gelu_tanh", "gelu_erf", "gelu_quick")


def writable(config: ViTConfig) -> dict[str, bool]:
    """The formats that `converters.save` writes such a model in.

    Args:
        config: of the model.

    Returns:
        format -> whether it says all there is to say. Where it does not, the file converts with a warning: other
        readers' logits differ from the fourth digit or so (another GELU or epsilon).
    """
    verdicts = {name: _verdict(config, load_table(name)) for name in formats()}
    return {name: exact for name, exact in verdicts.items() if exact is not None}


def _verdict(config: ViTConfig, table: Table) -> bool | None:
    """Whether a format says all of a model; None where it cannot hold it."""
    fields = config.to_dict()
    if not table.writable or not _has_places(fields, table):
        return None
    if any(all(lookup(fields, name) == value for name, value in facts.items()) for facts in table.refused):
        return None
    told = {**table.config, "classifier": _classifier(fields)}
    differing = {name for name, meant in told.items() if not _means(fields, name, meant, table)}
    if differing - {"activation", "norm_epsilon", "resnet"}:
        return None
    if "activation" in differing and not {fields["activation"], table.config["activation"]} <= set(_GELUS):
        return None
    return not differing


def _has_places(fields: Mapping[str, Any], table: Table) -> bool:
    """Whether the format has a tensor for everything that the model is made of."""
    variables = [variable for field, variable in _VARIABLES.items() if fields[field] not in (None, False, 0)]
    variables += ["pool/probe"] if fields["classifier"] == "map" else []
    place = fields["position"], fields["position_place"]
    if place[1] == "shared":  # one variable for all blocks, which no format has
        return False
    variables += [_POSITIONS[place]] if place in _POSITIONS else []
    sources = [table.tensor_of(variable, fields) for variable in variables]
    written = {source.tensor for source in sources if source}
    return all(source is not None and source.row.unless not in written for source in sources)


def _classifier(fields: Mapping[str, Any]) -> str:
    """How a reader pools who sees the tensors alone; whether a head is applied to every token, none can see."""
    if fields["classifier"] == "map":
        return "map"
    seen = "token" if fields["class_token"] else "gap"
    unseen = {"token": "token_unpooled", "gap": "unpooled"}[seen]
    return unseen if fields["classifier"] == unseen else seen


def _means(fields: Mapping[str, Any], name: str, meant: Any, table: Table) -> bool:
    """Whether a reader of the format takes a field for what it is."""
    if name == "position_prefix":  # the rows of the embedding are moved when it is written
        return True
    if name == "representation_activation" and not fields["representation_size"]:
        return True
    if name == "resnet":
        ours = fields["resnet"]
        known = ("norm_epsilon", "conv_epsilon", "conv_epsilon_place")
        return ours is None or all(ours[part] == getattr(meant, part) for part in known)
    absent = [facts[name] for facts in table.without.values() if name in facts]  # told by a tensor that is not there
    return bool(
        fields[name] == meant
        or (table.json is not None and _is_stated(fields[name], name, table.json))
        or (fields["position"] != "learned" and fields[name] in absent)
    )


def _is_stated(value: Any, name: str, said: JsonFields) -> bool:
    """Whether the config.json beside the tensors has a place for a field and a word for its value."""
    if name not in {rule.split("|")[0].strip() for rule in said.fields.values()}:
        return False
    spelled = said.values.get(name, {}).values()
    known = [meant for one in spelled for meant in (one if isinstance(one, list) else [one])]
    return not known or value in known
