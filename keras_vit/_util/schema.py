"""Check the keys and types of a table read from TOML or JSON."""

from collections.abc import Iterator
from typing import Any

from keras_vit._util.text import suggestion

NUMBER = (int, float)
ANY = (object, bool)
TYPES: dict[str, Any] = {  # by name in a schema's file
    "text": str,
    "integer": int,
    "number": NUMBER,
    "boolean": bool,
    "table": dict,
    "list": list,
    "table or text": (dict, str),
    "any": ANY,
}
MAX_DEPTH = 32  # of tables in tables; deeper ones could exhaust Python's stack where they are printed or compared


def check_depth(value: Any, where: str) -> Any:
    """Return a value read from TOML or JSON, or raise a ValueError if it is nested too deeply."""
    inner = [value]
    for _ in range(MAX_DEPTH):
        tables = [list(outer.values()) if isinstance(outer, dict) else outer for outer in inner]
        inner = [item for table in tables if isinstance(table, list) for item in table]
    if inner:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} levels deep")
    return value


def problems(value: Any, schema: Any, where: str) -> Iterator[str]:
    """Compare a value read from TOML or JSON with its schema; yield one sentence with its place for each error.

    A schema is a type or a tuple of types, `[schema]` for a list, `{"*": schema}` for a table with any keys, or another
    dict for a table with exactly these keys, where a final "?" marks an optional one. `where` is the value's place,
    such as the file's path.
    """
    expected = dict if isinstance(schema, dict) else list if isinstance(schema, list) else schema
    kinds = expected if isinstance(expected, tuple) else (expected,)
    # In Python True is an int; in a table it is not a number.
    if not (bool in kinds if isinstance(value, bool) else isinstance(value, kinds)):
        names = " or ".join(_TOML_NAMES.get(kind) or f"a {kind.__name__}" for kind in kinds)
        yield f"{where} must be {names}. Received: {value!r:.200}"
    elif isinstance(schema, list):
        for index, item in enumerate(value):
            yield from problems(item, schema[0], f"{where}[{index}]")
    elif isinstance(schema, dict):
        yield from _table_problems(value, schema, where)


def _table_problems(table: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    known = {key.removesuffix("?"): kind for key, kind in schema.items()}
    for key, item in table.items():
        if key in known or "*" in known:
            yield from problems(item, known.get(key, known.get("*")), f"{where}.{key}")
        else:
            yield f"{where} has no key {key!r:.200}; {suggestion(key, known)}"
    for key in schema:
        if key not in table and key != "*" and not key.endswith("?"):
            yield f"{where} lacks the key {key!r:.200}"


_TOML_NAMES = {
    dict: "a table",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}
