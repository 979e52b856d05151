"""Store fields that a format has no place for in a note in the file, so that keras_vit reads back the same model.

The note is in a .safetensors file's metadata or in an .npz file's archive comment, where other readers ignore it.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from keras_vit._util.untrusted import parse_object
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig, check_fields

KEY = "keras_vit"
ZERO_ROWS_KEY = "keras_vit_empty_rows"  # position rows of zeros were added, because the format has them
_MAX_LENGTH = 60_000  # a zip comment holds 65,535 bytes; longer lists of labels are left out


def to_metadata(config: ViTConfig, inferred_config: ViTConfig, missing_fields: Collection[str] = ()) -> dict[str, str]:
    """Return the metadata to write: every field in which the model differs from the config that a reader infers.

    `missing_fields` are fields that a reader cannot infer: they are noted even where both configs agree.
    """
    ours, theirs = config.to_dict(), inferred_config.to_dict()
    fields = {name: value for name, value in ours.items() if value != theirs[name] or name in missing_fields}
    text = json.dumps(fields)
    if len(text) > _MAX_LENGTH:
        text = json.dumps({name: value for name, value in fields.items() if name != "labels"})
    return {KEY: text} if fields else {}


def from_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of ViTConfig that a file's metadata note; raise a CheckpointError if the note is damaged."""
    if KEY not in metadata:
        return {}
    try:
        fields = parse_object(metadata[KEY])
        check_fields(fields)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"has a damaged note of its config: {str(error)[:200]}") from error
    return fields
