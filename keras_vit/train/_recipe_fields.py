"""Types of recipe fields, and the checks that follow from them.

A field's annotation states its values: `Share` is a number in [0, 1), `Positive | None` a number above 0 or None.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from keras_vit._util.schema import NUMBER, misfits
from keras_vit.model.config import ViTConfig, check_fields

Count = Annotated[int, "[1, inf)"]
WholeNumber = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
NonNegative = Annotated[float, "[0, inf)"]
Share = Annotated[float, "[0, 1)"]
PositiveShare = Annotated[float, "(0, 1]"]

# Annotation -> kind in the notation of `schema.misfits`.
_KINDS: dict[Any, Any] = {float: NUMBER, tuple[str, ...]: [str], tuple[int, int]: list, Mapping[str, Any]: dict}
_OPTIONAL_CONFIG_FIELDS = {f.name for f in dataclasses.fields(ViTConfig) if str(f.type).endswith(" | None")}
# Fields of ViTConfig that a recipe's `config` may not set -> where their values come from.
_NOT_IN_CONFIG = {
    "image_size": "the recipe's image_size",
    "num_classes": "the number of classes of the data",
    "labels": "the class names of the data",
}


@dataclass(frozen=True)
class FieldRule:
    """Values that a field accepts."""

    kind: Any  # in the notation of `schema.misfits`
    is_optional: bool = False
    interval: str | None = None
    choices: tuple[Any, ...] = ()

    @classmethod
    def from_type(cls, hint: Any) -> FieldRule:
        """Read the annotation of a field, evaluated."""
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        is_optional = NoneType in members
        members = tuple(member for member in members if member is not NoneType)
        if len(members) > 1:
            rules = [cls.from_type(member) for member in members]
            kinds = [kind for rule in rules for kind in (rule.kind if isinstance(rule.kind, tuple) else (rule.kind,))]
            interval = next((rule.interval for rule in rules if rule.interval), None)
            return cls(tuple(kinds), is_optional, interval, tuple(choice for rule in rules for choice in rule.choices))
        if get_origin(members[0]) is Literal:
            choices = get_args(members[0])
            return cls(tuple({type(choice): None for choice in choices}), is_optional, choices=choices)
        plain, interval = get_args(members[0]) if get_origin(members[0]) is Annotated else (members[0], None)
        return cls(_KINDS.get(plain, plain), is_optional, interval)

    @property
    def is_float(self) -> bool:
        """Return whether whole numbers are converted to float."""
        return self.kind is NUMBER

    def misfits(self, value: Any, name: str) -> Iterator[str]:
        """Yield a sentence for each thing that is wrong with a value of the field called `name`."""
        if value is None and self.is_optional:
            return
        wrong = list(misfits(list(value) if isinstance(value, tuple) else value, self.kind, name))
        if wrong:
            yield from wrong
        elif self.interval and not isinstance(value, str):
            if not _is_inside(value, self.interval):
                yield f"{name} must be in {self.interval}. Received: {value!r}"
        elif self.choices and value not in self.choices:
            also = f", or a number in {self.interval}" if self.interval else ""
            yield f"{name} must be one of {list(self.choices)}{also}. Received: {value!r}"


def as_python(value: Any) -> Any:
    """Convert NumPy's numbers to Python's, lists to tuples, and "none" for an optional field of a config to None."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {
            name: None if name in _OPTIONAL_CONFIG_FIELDS and item == "none" else as_python(item)
            for name, item in value.items()
        }
    return tuple(as_python(item) for item in value) if isinstance(value, list | tuple) else value


def config_misfits(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each wrong field name in a recipe's config; ViTConfig checks the values later."""
    try:
        check_fields(config)
    except ValueError as error:
        yield f"config: {error}"
    for name in _NOT_IN_CONFIG.keys() & config.keys():
        yield f"config must not have {name}: it is {_NOT_IN_CONFIG[name]}. Received: {config[name]!r}"


def _is_inside(value: float, interval: str) -> bool:
    """Return whether a number lies in an interval such as "(0, 1]"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    return (
        math.isfinite(value)
        and (value >= low if interval[0] == "[" else value > low)
        and (value <= high if interval[-1] == "]" else value < high)
    )
