"""Find the numbers of a model: parameters, operations, memory and file sizes; and hashes of its config and weights.

The numbers of the zoo's models are kept with their cards, in zoo/numbers.json, and reading them starts neither Keras
nor TensorFlow. Those of other configs are counted.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keras_vit._util import data_files
from keras_vit.model.config import ViTConfig
from keras_vit.model.parts import Numbers, Part

_NOT_COUNTED = {"labels", "preprocessing", "position_method", "norm_epsilon", "head_bias_init"}
_NOT_COUNTED |= {"dropout_rate", "attention_dropout_rate", "stochastic_depth"}


def numbers(config: ViTConfig) -> Numbers:
    """Return the numbers of a config's model: those kept with the cards, or else counted, which starts Keras."""
    if (known := _known().get(fingerprint(config))) is not None:
        return _from_json(known)
    from keras_vit.model.cost import count

    return count(config)


def fingerprint(config: ViTConfig) -> str:
    """Return a short name for the fields of a config on which its numbers depend, equal for equal fields."""
    fields, defaults = config.to_dict(), ViTConfig().to_dict()
    changed = {name: fields[name] for name in fields.keys() - _NOT_COUNTED if fields[name] != defaults[name]}
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:16]


def hash_weights(weights: Iterable[Any], start: str = "") -> str:
    """Return the SHA-256 of a text and the values of weights."""
    import numpy as np

    digest = hashlib.sha256(start.encode())
    for weight in weights:
        digest.update(np.asarray(weight).tobytes())
    return digest.hexdigest()


def to_json(found: Numbers) -> dict[str, Any]:
    """Return numbers as zoo/numbers.json has them; each part is a list of its fields."""
    return {**vars(found), "parts": [list(dataclasses.astuple(part)) for part in found.parts]}


def _from_json(stored: dict[str, Any]) -> Numbers:
    parts = (
        Part(name, copies, tuple(output), parameters, flops)
        for name, copies, output, parameters, flops in stored["parts"]
    )
    return Numbers(**{**stored, "parts": tuple(parts)})


def path() -> Path:
    """Return the path of the file with the numbers of the zoo's models."""
    return data_files.folder("zoo") / "numbers.json"


@functools.cache
def _known() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = json.loads(path().read_text(encoding="utf-8"))
    return known
