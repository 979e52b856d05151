"""Write a text tower, alone or with its image tower, as a checkpoint of another package."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit import converters
from keras_vit.converters import assign, config_json
from keras_vit.converters.containers import open_container
from keras_vit.converters.saving import writable_table, write
from keras_vit.converters.table import OWN_PREFIX, Table
from keras_vit.errors import CheckpointError
from keras_vit.model.config.text import TextConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.text.encoder import TextEncoder
from keras_vit.text.loading import SCALES, infer

_NOT_IN_FILES = {"dropout_rate", "attention_dropout_rate", "layer_scale", *SCALES}
_TOWERS = {"big_vision": ("params/", "params/img/")}  # start of the image tower's names alone, and in a pair


def save(
    encoder: TextEncoder, path: str | os.PathLike[str], *, format: str, image: VisionTransformer | None = None
) -> Path:
    """Write a text tower as a checkpoint, with its tokenizer beside a Hugging Face one.

    Args:
        encoder: a TextEncoder.
        path: the file, or for Hugging Face the folder (a name without suffix).
        format: "huggingface_clip", "huggingface_siglip" or "big_vision".
        image: the image tower of the pair, whose file has both towers then. Without it a Hugging Face file has no
            logit_scale and logit_bias.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: the format cannot express a tower; nothing is written.
        TypeError, ValueError: `encoder` is no text encoder.

    Example:
        >>> config = keras_vit.text.TextConfig(vocab_size=9, hidden_size=16, num_layers=1, num_heads=2, mlp_dim=8)
        >>> encoder = keras_vit.text.TextEncoder(config)
        >>> keras_vit.text.save(encoder, "text", format="huggingface_clip").name
        'model.safetensors'
    """
    if not isinstance(encoder, TextEncoder):
        raise TypeError(f"The model must be a TextEncoder. Received: {type(encoder).__name__}")
    table, config = writable_table(format, "text"), encoder.config
    values: dict[str, Any] = assign.merge_lora(encoder, assign.variables_by_path(encoder))
    if image is not None or table.layout == "keras":
        scales = {name: getattr(config, name) for name in SCALES}
        values |= {name: np.array(value, np.float32) for name, value in scales.items() if value is not None}
    sources = {name: source for name in values if (source := table.tensor_of(name, config.to_dict()))}
    if missing := sorted(values.keys() - sources.keys()):
        raise CheckpointError(f"The {format} format has no place for {missing}")
    json_values: Any = None if table.json is None else config_json.to_json(config, table.json)
    _check_expressible(config, values, table, json_values)
    tensors = dict(assign.collect(values, sources, table))
    with tempfile.TemporaryDirectory() as folder:
        metadata: dict[str, str] = {}
        if image is not None:
            alone = converters.save(image, Path(folder) / f"image.{table.container}", format=format)
            start, start_in_pair = _TOWERS.get(format, ("", ""))
            with open_container(alone) as container:
                metadata = dict(container.metadata)
                for name in container.headers:
                    is_own = name.startswith(OWN_PREFIX)
                    renamed = name if is_own else start_in_pair + name.removeprefix(start)
                    tensors[renamed] = container.read(name)
        if image is not None and json_values is not None and table.json is not None:
            vision = config_json.read_object(alone.with_name("config.json"))
            shared = {key: json_values[key] for key in ("projection_dim", "dtype") if key in json_values}
            json_values = {**shared, **table.json.pair, "text_config": json_values, "vision_config": vision}
        written = write(Path(path), table, tensors.items(), metadata, json_values)
        if json_values is not None:
            for file in Path(folder).glob("preprocessor_config.json"):
                shutil.copy(file, written.parent)
            if encoder.tokenizer is not None:
                (written.parent / encoder.tokenizer.file_name).write_bytes(encoder.tokenizer.model)
    return written


def _check_expressible(config: TextConfig, values: dict[str, Any], table: Table, json_values: Any) -> None:
    """Raise a CheckpointError if a reader of the file would build another text tower."""
    json_fields = config_json.to_fields(json_values, table.json) if table.json else {}
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    ours, theirs = config.to_dict(), infer(shapes, table, json_fields, {}).to_dict()
    wrong = [
        f"{name}={value!r} (it means {theirs[name]!r})"
        for name, value in ours.items()
        if name not in _NOT_IN_FILES and value != theirs[name]
    ]
    if wrong:
        raise CheckpointError(f"The {table.format} format cannot express " + ", ".join(wrong))
