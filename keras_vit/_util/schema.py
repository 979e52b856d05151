"""What a table of data may hold, and every way in which one does not."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

NUMBER = (int, float)


def misfits(value: Any, schema: Any, where: str) -> Iterator[str]:
    """Compare a value read from a data file with what it may be.

    Args:
        value: as TOML or JSON gives it.
        schema: a type, or several in a tuple; `[schema]` is a list of such; `{"*": schema}` a table with keys
            of any name; any other dict a table of exactly these keys, those that end in "?" may be left out.
        where: the value's place, such as the path of its file; keys are joined to it by a dot.

    Yields:
        One sentence for each thing that is wrong, naming its place.
    """
    expected = dict if isinstance(schema, dict) else list if isinstance(schema, list) else schema
    if not _is(value, expected):
        names = " or ".join(_TOML_NAMES[kind] for kind in (expected if isinstance(expected, tuple) else (expected,)))
        yield f"{where} must be {names}. Received: {value!r}"
    elif isinstance(schema, list):
        for index, item in enumerate(value):
            yield from misfits(item, schema[0], f"{where}[{index}]")
    elif isinstance(schema, dict):
        yield from _table_misfits(value, schema, where)


def _table_misfits(table: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    known = {key.removesuffix("?"): kind for key, kind in schema.items()}
    for key, item in table.items():
        if key in known or "*" in known:
            yield from misfits(item, known.get(key, known.get("*")), f"{where}.{key}")
        else:
            nearest = difflib.get_close_matches(key, known, n=1)
            offer = f"the nearest is {nearest[0]!r}" if nearest else f"its keys are {sorted(known)}"
            yield f"{where} has no key {key!r}; {offer}"
    for key in schema:
        if key not in table and key != "*" and not key.endswith("?"):
            yield f"{where} lacks the key {key!r}"


_TOML_NAMES = {
    dict: "a table",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def _is(value: Any, expected: type | tuple[type, ...]) -> bool:
    # To Python true is the number 1; to whoever writes a table it is not.
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return bool in kinds if isinstance(value, bool) else isinstance(value, kinds)
