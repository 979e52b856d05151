"""Check arguments, the fields of dataclasses, and tables read from TOML or JSON.

An annotation says which values are accepted: `Share` is a number in [0, 1), `Positive | None` a number above 0 or None,
`Literal["a", "b"]` one of two, `tuple[str, ...]` a list of texts. A table has the keys of a dataclass or a TypedDict.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from keras_vit._util.text import nearest, suggestion

Count = Annotated[int, "[1, inf)"]
WholeNumber = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
NonNegative = Annotated[float, "[0, inf)"]
Share = Annotated[float, "[0, 1)"]
PositiveShare = Annotated[float, "(0, 1]"]
MAX_DEPTH = 32  # of tables in tables; deeper ones could exhaust Python's stack where they are printed or compared
# Names of types in messages.
_NAMES = {dict: "a table", list: "a list", str: "text", bool: "true or false", int: "an integer", float: "a number"}


@dataclass(frozen=True)
class Rule:
    """Values that an annotation accepts."""

    kinds: tuple[type, ...]
    is_optional: bool = False  # None is accepted, and a key of a table may be missing
    interval: str | None = None
    choices: tuple[Any, ...] = ()
    item: Any = None  # annotation of what a list or a table with any keys has; None accepts everything
    items: tuple[Any, ...] = ()  # annotations of a list of so many items
    table: Any = None  # dataclass or TypedDict with the keys of a table

    @classmethod
    def from_type(cls, hint: Any) -> Rule:
        """Read an evaluated annotation."""
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        rules = [cls._from_member(member) for member in members if member is not NoneType]
        if len(rules) == 1:
            return dataclasses.replace(rules[0], is_optional=NoneType in members)
        return cls(
            tuple(kind for rule in rules for kind in rule.kinds),
            is_optional=NoneType in members,
            interval=next((rule.interval for rule in rules if rule.interval), None),
            choices=tuple(choice for rule in rules for choice in rule.choices),
            item=next((rule.item for rule in rules if rule.item), None),
            items=next((rule.items for rule in rules if rule.items), ()),
        )

    @classmethod
    def _from_member(cls, hint: Any) -> Rule:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is NotRequired:
            return cls.from_type(*arguments)
        if origin is Literal:
            return cls(tuple({type(choice): None for choice in arguments}), choices=arguments)
        if origin is Annotated:
            return dataclasses.replace(cls.from_type(arguments[0]), interval=arguments[1])
        if origin is tuple:
            return cls((list,), item=arguments[0]) if arguments[1:] == (...,) else cls((list,), items=arguments)
        if origin is list:
            return cls((list,), item=arguments[0])
        if origin in (dict, Mapping):
            return cls((dict,), item=arguments[1])
        if is_typeddict(hint):
            return cls((dict,), table=hint)
        if dataclasses.is_dataclass(hint):
            return cls((dict, hint), table=hint)  # type: ignore[arg-type]
        return cls({float: (int, float), Any: (object, bool)}.get(hint, (hint,)))

    @property
    def is_float(self) -> bool:
        """Whether whole numbers are converted to float."""
        return self.kinds == (int, float)

    def problems(self, value: Any, where: str) -> Iterator[str]:
        """Describe each error of a value in a sentence; `where` is its name or place."""
        if value is None and self.is_optional:
            return
        value = list(value) if isinstance(value, tuple) else value
        received = f"Received: {value!r:.200}"
        # In Python True is an int; here it is not a number.
        is_kind = bool in self.kinds if isinstance(value, bool) else isinstance(value, self.kinds)
        if self.kinds == (int,) and self.interval and self.interval.endswith(", inf)"):
            if not is_kind or not _is_inside(value, self.interval):
                yield f"{where} must be an integer >= {self.interval[1:-6]}. {received}"
        elif not is_kind:
            names = dict.fromkeys(_NAMES.get(kind) or f"a {kind.__name__}" for kind in self.kinds)
            yield f"{where} must be {' or '.join(names)}. {received}"
        elif self.table is not None and isinstance(value, dict):
            yield from table_problems(value, self.table, where)
        elif self.items and isinstance(value, list):
            if len(value) != len(self.items):
                yield f"{where} must be a list of {len(self.items)}. {received}"
            for index, (hint, item) in enumerate(zip(self.items, value, strict=False)):
                yield from Rule.from_type(hint).problems(item, f"{where}[{index}]")
        elif self.item is not None and isinstance(value, dict | list):
            items = {f"{where}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {}
            items |= {f"{where}[{index}]": item for index, item in enumerate(value) if isinstance(value, list)}
            for place, item in items.items():
                yield from Rule.from_type(self.item).problems(item, place)
        elif self.interval and not isinstance(value, str):
            if not _is_inside(value, self.interval):
                yield f"{where} must be in {self.interval}. {received}"
        elif self.choices and value not in self.choices:
            also = f", or a number in {self.interval}" if self.interval else ""
            near = "".join(f"; the nearest is {name!r}" for name in nearest(str(value), map(str, self.choices)))
            yield f"{where} must be one of {list(self.choices)}{also}. {received}{near}"


@functools.cache
def field_rules(cls: type) -> dict[str, Rule]:
    """Read the rules of the annotated fields of a dataclass or TypedDict, by name, in order."""
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else list(hints)
    return {name: Rule.from_type(hints[name]) for name in names}


@functools.cache
def _required(cls: Any) -> list[str]:
    if is_typeddict(cls):
        hints = get_type_hints(cls, include_extras=True)
        return [name for name, hint in hints.items() if get_origin(hint) is not NotRequired]
    missing = dataclasses.MISSING
    return [
        field.name for field in dataclasses.fields(cls) if field.default is missing and field.default_factory is missing
    ]


def table_problems(table: Any, cls: Any, where: str, *, given: Collection[str] = ()) -> Iterator[str]:
    """Compare a table read from TOML or JSON with the fields of a dataclass or TypedDict.

    Yield a sentence for each error with its place, which begins with `where`, such as the file's name. Fields that are
    `given` by the caller are no keys of the table.
    """
    if not isinstance(table, dict):
        yield f"{where} must be a table. Received: {table!r:.200}"
        return
    rules = {name: rule for name, rule in field_rules(cls).items() if name not in given}
    for key, item in table.items():
        if key in rules:
            yield from rules[key].problems(item, f"{where}.{key}")
        else:
            yield f"{where} has no key {key!r:.200}; {suggestion(key, rules)}"
    for key in _required(cls):
        if key in rules and key not in table:
            yield f"{where} lacks the key {key!r:.200}"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Base of frozen dataclasses that convert and check their values: one ValueError reports every invalid field."""

    def __post_init__(self) -> None:
        cls: Any = type(self)  # Any: mypy takes no dataclass for hashable
        rules = field_rules(cls)
        for name in rules:
            self._set(name, as_python(getattr(self, name)))  # JSON has no NumPy numbers
        self._convert()
        wrong = [problem for name, rule in rules.items() for problem in rule.problems(getattr(self, name), name)]
        if wrong := wrong or list(self._conflicts()):
            raise ValueError(f"{self._title()}: " + "; ".join(wrong))
        for name, rule in rules.items():
            value = getattr(self, name)
            if rule.is_float and value is not None:
                self._set(name, float(value))
            elif isinstance(value, tuple):
                hints = rule.items or (rule.item,) * len(value)
                floats = [hint is not None and Rule.from_type(hint).is_float for hint in hints]
                pairs = zip(value, floats, strict=True)
                self._set(name, tuple(float(item) if is_float else item for item, is_float in pairs))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def _title(self) -> str:
        """Name the object in the error."""
        return type(self).__name__

    def _convert(self) -> None:
        """Convert other spellings of values, before they are checked."""

    def _conflicts(self) -> Iterator[str]:
        """Describe each combination of values that is not accepted in a sentence."""
        yield from ()


def as_python(value: Any) -> Any:
    """Convert NumPy's numbers to Python's, and lists to tuples."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: as_python(item) for name, item in value.items()}
    return tuple(as_python(item) for item in value) if isinstance(value, list | tuple) else value


def json_able(value: Any) -> Any:
    """Replace numbers that JSON does not have, NaN and infinity, by None in dictionaries and lists of any depth."""
    if isinstance(value, Mapping):
        return {name: json_able(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_able(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_depth(value: Any, where: str) -> Any:
    """Raise a ValueError if a value read from TOML or JSON is nested too deeply, else return it."""
    inner = [value]
    for _ in range(MAX_DEPTH):
        tables = [list(outer.values()) if isinstance(outer, dict) else outer for outer in inner]
        inner = [item for table in tables if isinstance(table, list) for item in table]
    if inner:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} levels deep")
    return value


def _is_inside(value: float, interval: str) -> bool:
    """Check whether a number is in an interval such as "(0, 1]"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    return (
        math.isfinite(value)
        and (value >= low if interval[0] == "[" else value > low)
        and (value <= high if interval[-1] == "]" else value < high)
    )


def is_count(value: Any, *, least: int) -> bool:
    """Check for an integer of at least `least`; NumPy's integers are accepted, booleans are not."""
    return not isinstance(value, bool) and hasattr(value, "__index__") and int(value) >= least


def check_counts(**counts: Any) -> None:
    """Raise a ValueError for a value that is not an integer >= 1."""
    for name, value in counts.items():
        if not is_count(value, least=1):
            raise ValueError(f"{name} must be an integer >= 1. Received: {value!r:.200}")


def check_texts(**texts: Any) -> None:
    """Raise a ValueError for a value that is not a string."""
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} must be a string. Received: {text!r:.200}")


def as_path(value: Any, name: str) -> str:
    """Convert a path or URL to a string, ~ expanded; raise a ValueError for a name that no file can have."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise ValueError(f"{name} must be a string or a pathlib.Path. Received: {value!r:.200}")
    if "://" not in path:
        try:
            expand_home(path).stat()
        except ValueError as error:  # no home, a null character, a lone surrogate
            raise ValueError(f"{name} must be a path: {str(error)[:200]}. Received: {path!r:.200}") from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise ValueError(f"{name} must be a path: it is too long. Received: {path!r:.200}") from None
    return os.fspath(expand_home(path)) if path.startswith("~") else path


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Expand a leading ~ of a path; raise a ValueError where there is no home directory, as in some containers."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{os.fspath(path)!r:.200} begins with ~, and this user has no home directory: give the whole path, or set "
            "HOME"
        ) from None


def as_list(value: Any) -> list[Any]:
    """Put a value that is no list into one."""
    return value if isinstance(value, list) else [value]


def given(**arguments: Any) -> dict[str, Any]:
    """Select the arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise a ValueError that lists the known values if `value` is not one of them."""
    if value not in known:
        raise ValueError(f"{name} must be one of {list(known)}. Received: {value!r:.200}")


def pair(value: Any, name: str) -> tuple[int, int]:
    """Convert an int or (height, width) to (height, width), or raise a ValueError."""
    sides = (value, value) if is_count(value, least=1) else value
    if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(is_count(side, least=1) for side in sides):
        raise ValueError(f"{name} must be an integer >= 1 or (height, width). Received: {value!r:.200}")
    return int(sides[0]), int(sides[1])
