"""Types of the fields of dataclasses, and the checks that follow from them.

A field's annotation states its values: `Share` is a number in [0, 1), `Positive | None` a number above 0 or None.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from keras_vit._util.schema import NUMBER, problems

Count = Annotated[int, "[1, inf)"]
WholeNumber = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
NonNegative = Annotated[float, "[0, inf)"]
Share = Annotated[float, "[0, 1)"]
PositiveShare = Annotated[float, "(0, 1]"]

# Annotation -> kind in the notation of `schema.problems`.
_KINDS: dict[Any, Any] = {
    float: NUMBER,
    tuple[str, ...]: [str],
    tuple[int, ...]: [int],
    tuple[int | str, ...]: [(int, str)],
    tuple[float, ...]: [NUMBER],
    tuple[int, int]: list,
    Mapping[str, Any]: dict,
}


@dataclass(frozen=True)
class FieldRule:
    """Values that a field accepts."""

    kind: Any  # in the notation of `schema.problems`
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
            kinds = [list if isinstance(kind, list) else kind for kind in kinds]
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

    def problems(self, value: Any, name: str) -> Iterator[str]:
        """Yield a sentence for each thing that is wrong with a value of the field called `name`."""
        if value is None and self.is_optional:
            return
        wrong = list(problems(list(value) if isinstance(value, tuple) else value, self.kind, name))
        if self.kind is int and self.interval and self.interval.endswith(", inf)"):
            if wrong or not _is_inside(value, self.interval):
                yield f"{name} must be an integer >= {self.interval[1:-6]}. Received: {value!r:.200}"
        elif wrong:
            yield from wrong
        elif self.interval and not isinstance(value, str):
            if not _is_inside(value, self.interval):
                yield f"{name} must be in {self.interval}. Received: {value!r:.200}"
        elif self.choices and value not in self.choices:
            also = f", or a number in {self.interval}" if self.interval else ""
            yield f"{name} must be one of {list(self.choices)}{also}. Received: {value!r:.200}"


@functools.cache
def field_rules(cls: type) -> dict[str, FieldRule]:
    """Return the rule of each annotated field of a dataclass, by name, in order."""
    hints = get_type_hints(cls, include_extras=True)
    return {one.name: FieldRule.from_type(hints[one.name]) for one in dataclasses.fields(cls)}


def field_problems(instance: Any) -> Iterator[str]:
    """Yield a sentence for each field of a dataclass instance whose value its annotation does not accept."""
    for name, rule in field_rules(instance.__class__).items():
        yield from rule.problems(getattr(instance, name), name)


def option(default: Any, help: str, **how: Any) -> Any:
    """Describe a field that is an option of a command: its default, the text of `--help`, and `flag` or `is_size`."""
    return dataclasses.field(default=default, metadata={"help": help, **how})


def option_names(cls: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that `option` describes."""
    return tuple(field.name for field in dataclasses.fields(cls) if "help" in field.metadata)


def as_python(value: Any) -> Any:
    """Convert NumPy's numbers to Python's, and lists to tuples."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: as_python(item) for name, item in value.items()}
    return tuple(as_python(item) for item in value) if isinstance(value, list | tuple) else value


def _is_inside(value: float, interval: str) -> bool:
    """Return whether a number lies in an interval such as "(0, 1]"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    return (
        math.isfinite(value)
        and (value >= low if interval[0] == "[" else value > low)
        and (value <= high if interval[-1] == "]" else value < high)
    )
