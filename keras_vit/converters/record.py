"""What this package notes in the files it writes, for itself: fields of the config that the format has no place for.

Other readers pass over it: it stands in a .safetensors file's metadata and in a .npz file's archive comment.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig, check_fields

KEY = "keras_vit"
EMPTY_ROWS = "keras_vit_empty_rows"  # the format wants position embeddings for prefix tokens, and the model had none
LONGEST = 60_000  # a zip comment has two bytes for its length; long lists of labels do not fit and are left out


def note(config: ViTConfig, understood: ViTConfig, unsaid: Collection[str] = ()) -> dict[str, str]:
    """The metadata to write: every field in which the model differs from what a reader would understand.

    Args:
        config: of the model.
        understood: what the file's tensors and its format alone tell.
        unsaid: fields that they do not tell, and that `understood` was told.
    """
    ours, theirs = config.to_dict(), understood.to_dict()
    differing = {name: value for name, value in ours.items() if value != theirs[name] or name in unsaid}
    text = json.dumps(differing)
    if len(text) > LONGEST:
        text = json.dumps({name: value for name, value in differing.items() if name != "labels"})
    return {KEY: text} if differing else {}


def noted(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The fields that a file's metadata notes.

    Raises:
        CheckpointError: where the note is damaged.
    """
    if KEY not in metadata:
        return {}
    try:
        fields = dict(json.loads(metadata[KEY]).items())
        check_fields(fields)
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"has a damaged note of its config: {str(error)[:200]}") from error
    return fields
