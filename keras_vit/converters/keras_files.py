"""Read the config of a model saved as .keras; Keras deserialises nothing."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keras_vit.errors import CheckpointError


def check_keras_facts(**facts: Any) -> None:
    """Raise a ValueError if facts about a .keras file are given."""
    if stated := [f"{name}={value!r:.200}" for name, value in facts.items() if value is not None]:
        raise ValueError(f"A .keras file states everything itself. Received: {', '.join(stated)}")


@contextlib.contextmanager
def keras_errors(path: Path) -> Iterator[None]:
    """Replace errors of what a .keras file describes by a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: does not describe a valid model: {str(error)[:500]}") from error


def saved_arguments(values: Mapping[str, Any], kind: str = "VisionTransformer") -> dict[str, Any]:
    """Read the arguments of `from_config` in a .keras file's config.json; of a dtype policy only the name is used."""
    if values.get("registered_name") != f"keras_vit>{kind}":
        raise CheckpointError(
            f"does not contain a {kind}. Received: {values.get('class_name')!r:.100}; keras.saving.load_model opens it"
        )
    return plain_arguments(values.get("config"), kind)


def plain_arguments(stored: Any, kind: str) -> dict[str, Any]:
    """Check the saved result of a class's `get_config`, and replace the dtype policy by its name."""
    match stored:
        case {"config": dict(), "dtype": {"config": {"name": str(policy)}}, "name": str()}:
            return {**stored, "dtype": policy}
    raise CheckpointError(f"has a config.json that is not a {kind}'s")
