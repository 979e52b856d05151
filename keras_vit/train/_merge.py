"""Change fields of a recipe together with those that depend on them: steps, epochs and warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXCLUSIVE = (("steps", "epochs"), ("warmup_steps", "warmup_fraction"))


def merge_fields(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with some of them changed, by the rules of `Recipe.replace`."""
    merged = {**fields, **changes}
    for pair_of_fields in _EXCLUSIVE:
        for one, other in (pair_of_fields, pair_of_fields[::-1]):
            if changes.get(one) is not None and other not in changes:
                merged.pop(other, None)
    if not changes.keys() & {"warmup_steps", "warmup_fraction"}:
        merged |= _scaled_warmup(fields, changes)
    if all(isinstance(layer.get("config"), Mapping) for layer in (fields, changes)):
        merged["config"] = {**fields["config"], **changes["config"]}
    return merged


def _scaled_warmup(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the warm-up of a run whose length is changed: its share of the steps does not grow."""
    warmup, steps, epochs = (fields.get(name) for name in ("warmup_steps", "steps", "epochs"))
    new_steps, new_epochs = changes.get("steps"), changes.get("epochs")
    if not isinstance(warmup, int) or not all(isinstance(n, int | float | None) for n in (new_steps, new_epochs)):
        return {}  # `Recipe` reports values of other types
    if steps and (new_epochs or (new_steps and new_steps < steps)):
        return {"warmup_steps": None, "warmup_fraction": warmup / steps}
    if epochs and new_epochs and new_epochs < epochs:
        return {"warmup_steps": round(warmup * new_epochs / epochs)}
    if epochs and new_steps:  # without the data the steps of these epochs are not known
        return {"warmup_steps": min(warmup, int(new_steps) // 5)}
    return {}
