"""Parse JSON of other people's files."""

import json
from typing import Any

from keras_vit._util.checks import check_depth

MAX_JSON_BYTES = 10 << 20  # of a config.json; an id2label of 21,843 classes takes 1.5 MB


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise a ValueError if it is not valid or nested too deeply."""
    try:
        return check_depth(json.loads(text), "it")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {str(error)[:200]}") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; raise a ValueError if it is something else."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"is a {type(value).__name__}, not an object")
    return value
