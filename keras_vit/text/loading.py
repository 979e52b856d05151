"""Read the text tower of a checkpoint, with its tokenizer, as a TextEncoder."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from keras_vit._util.text import warn
from keras_vit.converters.config_json import check_folder, check_json, check_keras_facts, read_beside
from keras_vit.converters.containers import Container, find_weights, is_keras_file, open_files
from keras_vit.converters.facts import asked_for, check_asked
from keras_vit.converters.loading import (
    assign_tensors,
    check_tensors,
    load_keras_weights,
    open_keras,
    variables_by_path,
)
from keras_vit.converters.source import (
    Checkpoint,
    Shapes,
    find_num_heads,
    tables_of,
)
from keras_vit.converters.table import MAX_LAYERS, Table
from keras_vit.converters.wrappers import find_model
from keras_vit.errors import CheckpointError
from keras_vit.model import layers
from keras_vit.model.config import TextConfig, ViTConfig, check_fields
from keras_vit.model.tokenizer import Tokenizer, find_tokenizer, import_libraries
from keras_vit.text.encoder import TextEncoder

SCALES = ("logit_scale", "logit_bias")  # numbers that a pair of towers shares: fields of TextConfig, not variables


def load(
    path: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    config: Mapping[str, Any] | None = None,
    format: str | None = None,
    which: str | None = None,
    dtype: Any = None,
    allow_nonfinite: bool = False,
) -> TextEncoder:
    """Load the text tower of CLIP, SigLIP or SigLIP 2, of a pair or alone, from a file or a folder.

    Args:
        path: a file, or a folder with the weights: of Hugging Face (CLIPModel, CLIPTextModel,
            CLIPTextModelWithProjection, SiglipModel, SiglipTextModel), open_clip, big_vision (.npz), or a text encoder
            saved as .keras.
        tokenizer: a Tokenizer, or the folder or file of one. None takes the tokenizer beside the weights; without one,
            the encoder takes ids only.
        config: facts about the file that it cannot state itself, such as `num_heads`, where there is no config.json.
        format: name of a table in converters/checkpoints/text; None recognises it.
        which: the model that is meant, if the file has several, as for `converters.load`.
        dtype: Keras dtype policy of the model; None is the global one.
        allow_nonfinite: accept NaN and infinities among the weights.

    Raises:
        CheckpointError: the file is damaged, malicious, or has no text tower that is known.
        FileNotFoundError: there is no such file.
        ValueError: an argument is wrong, or the tokenizer belongs to another model.
        ImportError: there is a tokenizer, but the packages of the extra "text" are missing.

    Example:
        >>> config = keras_vit.text.TextConfig(vocab_size=9, hidden_size=16, num_layers=1, num_heads=2, mlp_dim=8)
        >>> keras_vit.text.TextEncoder(config).save("text.keras")
        >>> keras_vit.text.load("text.keras").config == config
        True
    """
    try:
        file = find_weights(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. A model of the zoo by its name: keras_vit.zoo.text_encoder(name)") from None
    if is_keras_file(file):
        check_keras_facts(config=config, format=format, which=which, tokenizer=tokenizer)
        return _load_keras(file, dtype, allow_nonfinite=allow_nonfinite)
    check_folder(file)
    with open_files(file) as container:
        model = find_model(container, tables_of(format, "text"), which, is_format_known=format is not None)
        table = model.table
        tensors = table.match(container.headers, model.prefix)
        scales = {name: tensors.sources.pop(name) for name in SCALES if name in tensors.sources}
        try:
            json_fields = {} if table.json is None else read_beside(file, table.json)
            numbers = {name: _number(container, source.tensor) for name, source in scales.items()}
            found = infer(tensors.shapes, table, json_fields, {**numbers, **(config or {})})
        except CheckpointError as error:
            raise CheckpointError(f"{file} {error}") from error
        source = find_tokenizer(file.parent) if tokenizer is None else tokenizer
        if not isinstance(source, Tokenizer | None):
            source = Tokenizer.load(source, found.max_length)
        with layers.uninitialized():
            encoder = TextEncoder(found, source, dtype=dtype)
        variables = variables_by_path(encoder)
        checkpoint = Checkpoint(container, table, tensors, cast(ViTConfig, found))  # no field is read
        check_tensors(checkpoint, variables)
        assign_tensors(checkpoint, encoder, variables, allow_nonfinite=allow_nonfinite)
        if model.told:
            warn(f"keras_vit: {file.name}: {model.told}")
    return encoder


def _number(container: Container, name: str) -> float:
    """Read a tensor of one number."""
    if math.prod(container.headers[name].shape) != 1:
        raise CheckpointError(f"has {name} of shape {container.headers[name].shape}; it must be one number")
    return float(container.read(name).reshape(()).astype(np.float32))


def infer(shapes: Shapes, table: Table, json_fields: Mapping[str, Any], facts: Mapping[str, Any]) -> TextConfig:
    """Infer the config of a file from the shapes that its tensors have as variables, and from stated fields."""
    check_fields(facts, TextConfig)
    for name, rank in {"tokens/embedding": 2, "tokens/positions": 2, "block_0/mlp/dense1/kernel": 2}.items():
        if len(shapes.get(name, ())) != rank:
            received = shapes.get(name, "no tensor for it")
            raise CheckpointError(
                f"is not a text tower in {table.format} format: {name} must have {rank} axes. Received: {received}"
            )
    head = shapes.get("head/kernel", (0,))
    known = {
        "vocab_size": shapes["tokens/embedding"][0],
        "max_length": shapes["tokens/positions"][0],
        "hidden_size": shapes["tokens/embedding"][1],
        "num_layers": len({name.split("/")[0] for name in shapes if name.startswith("block_")}),
        "mlp_dim": shapes["block_0/mlp/dense1/kernel"][-1],
        "projection_size": head[-1],
        "projection_bias": "head/bias" in shapes,
        "layer_scale": 1.0 if "block_0/scale1/gamma" in shapes else None,
    }
    check_json(json_fields, known)
    stated = {**json_fields, **facts}
    check_asked(table, stated, asked_for(table, known))
    heads = find_num_heads(shapes, table, stated.get("num_heads"), None)
    try:
        return TextConfig(**{**table.defaults, **table.config, **stated, **known, "num_heads": heads})
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"does not describe a valid text tower: {str(error)[:500]}") from error


def _load_keras(path: Path, dtype: Any, *, allow_nonfinite: bool) -> TextEncoder:
    """Load a text encoder saved as .keras."""
    with open_keras(path, "TextEncoder") as (arguments, weights):
        _check_size(weights, TextConfig(**arguments["config"]))
        if dtype is not None:
            arguments["dtype"] = dtype
        with layers.uninitialized():
            encoder = TextEncoder.from_config(arguments)
        if any(name.endswith("/tokenizer") for name in weights.headers):
            import_libraries()  # Keras would take the error for one of the file
        load_keras_weights(encoder, weights, allow_nonfinite=allow_nonfinite)
    return encoder


def _check_size(weights: Container, config: TextConfig) -> None:
    """Raise if a text tower is much larger than its file, which may state any size."""
    held = sum(math.prod(header.shape) for header in weights.headers.values())
    tables = (config.vocab_size + config.max_length + config.projection_size) * config.hidden_size
    blocks = config.num_layers * config.hidden_size * (4 * config.hidden_size + 2 * config.mlp_dim)
    if config.num_layers > MAX_LAYERS or tables + blocks > held:
        raise CheckpointError(f"describes a text tower of {tables + blocks} weights, but holds {held} numbers")
