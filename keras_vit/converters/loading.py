"""Read checkpoints of every known format, and models saved as .keras, as a VisionTransformer."""

import collections
import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit._util.checks import given
from keras_vit.converters import assign
from keras_vit.converters.config_json import read_crop
from keras_vit.converters.containers import KerasContainer, read_keras_config
from keras_vit.converters.saving import save
from keras_vit.converters.source import (
    Checkpoint,
    check_keras_facts,
    check_size,
    find_weights,
    is_keras_file,
    keras_errors,
    open_checkpoint,
    saved_arguments,
    to_facts,
)
from keras_vit.errors import CheckpointError
from keras_vit.model import layers
from keras_vit.model.config import ViTConfig, check_resizable
from keras_vit.model.vision_transformer import VisionTransformer


def load(
    path: str | os.PathLike[str],
    *,
    config: ViTConfig | Mapping[str, Any] | None = None,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    patch_size: int | tuple[int, int] | None = None,
    format: str | None = None,
    dtype: Any = None,
    allow_nonfinite: bool = False,
) -> VisionTransformer:
    """Load a checkpoint as a model. The architecture is read from its tensors and from a config.json beside them.

    Args:
        path: a file, a folder with the weights and a config.json, a model saved as .keras, or the folder of a training
            run, which stands for the model.keras in it.
        config: facts about the *file* that it cannot state itself: `num_heads` if the format folds the heads (timm and
            Hugging Face without config.json), `classifier` "unpooled" or "token_unpooled", the `image_size` it was
            trained at if its grid is not square, `representation_size` None to leave out the file's pre_logits (and
            its head). A dict states the fields it names; a ViTConfig states every field, its defaults included.
        image_size: *wanted*, int or (height, width) in pixels; position embeddings are interpolated once.
        num_classes: *wanted*; if it differs from the file's, the head is new and zero; 0 means no head.
        patch_size: *wanted*, int or (height, width) in pixels; the kernel is resized as for `model.resized`.
        format: one of `formats()` or a path to a .toml table of your own; None recognises it.
        dtype: Keras dtype policy of the model, such as "mixed_bfloat16"; None is the global one.
        allow_nonfinite: accept NaN and infinities among the weights.

    Returns:
        The model. None of its weights is random.

    Raises:
        CheckpointError: the file is damaged, malicious or not a Vision Transformer.
        FileNotFoundError: there is no such file.
        ValueError: an argument is wrong.

    Example:

    >>> path = keras_vit.converters.save(keras_vit.zoo.load("digits"), "digits.npz", format="google")
    >>> keras_vit.converters.load(path, image_size=40).config.grid
    (10, 10)
    """
    changes = given(image_size=image_size, num_classes=num_classes, patch_size=patch_size)
    file = find_weights(path)
    if is_keras_file(file):
        check_keras_facts(config=config, format=format)
        return _load_keras(file, changes, dtype=dtype, allow_nonfinite=allow_nonfinite)
    with open_checkpoint(file, facts=to_facts(config), format=format, wanted_size=image_size) as checkpoint:
        model = build(checkpoint, changes, dtype=dtype, allow_nonfinite=allow_nonfinite)
        if image_size is None:
            _report_size(checkpoint)
        if other_parts := checkpoint.match.other_parts:
            groups = collections.Counter(name.partition(".")[0].partition("/")[0] for name in other_parts)
            listed = ", ".join(f"{name} ({count})" for name, count in sorted(groups.items()))
            warnings.warn(
                f"keras_vit: {file.name} has other parts than the image encoder, which are not read: {listed}",
                stacklevel=2,
            )
        return model


def _report_size(checkpoint: Checkpoint) -> None:
    """Warn if the processor beside a file crops images to another size; transformers then resizes the positions."""
    path, size = checkpoint.container.path, checkpoint.config.size
    crop = read_crop(path)
    if crop is not None and crop != size:
        warnings.warn(
            f"keras_vit: {path.parent.name}/{path.name} is loaded for images of {size[0]} x {size[1]} pixels, as its "
            f"position embeddings; its preprocessor_config.json crops {crop[0]} x {crop[1]}. Choose with "
            f"image_size={crop[0] if crop[0] == crop[1] else crop} (--image-size).",
            stacklevel=3,
        )


def build(
    checkpoint: Checkpoint, changes: Mapping[str, Any], *, dtype: Any = None, allow_nonfinite: bool = False
) -> VisionTransformer:
    """Build the model of an open checkpoint, with some fields of its config changed.

    Args:
        checkpoint: from `keras_vit.converters.source.open_checkpoint`.
        changes: fields of its config and their new values.
        dtype: Keras dtype policy of the model; None is the global one.
        allow_nonfinite: accept NaN and infinities among the weights.

    Raises:
        CheckpointError: the tensors are damaged or do not fit the model.
        ValueError: a change is wrong.
    """
    config = checkpoint.written.replace(**changes)
    check_resizable(checkpoint.config, config)
    with layers.uninitialized():
        model = VisionTransformer(config, dtype=dtype)
    # Not read from the file: heads of another width, or heads after pre_logits that are left out.
    leaves_out = config.representation_size is None and "pre_logits/kernel" in checkpoint.match.sources
    has_new_heads = leaves_out or config.num_classes != checkpoint.config.num_classes
    new_layers = ("head/", "head_distillation/") * has_new_heads + ("pre_logits/",) * leaves_out
    variables = {
        path: variable for path, variable in assign.variables_by_path(model).items() if not path.startswith(new_layers)
    }
    assign.check(checkpoint, variables, skip=new_layers)
    assign.assign(checkpoint, model, variables, allow_nonfinite=allow_nonfinite)
    if "head/kernel" in variables and not np.any(variables["head/kernel"]):
        warnings.warn(
            f"keras_vit: the head of {checkpoint.container.path.name} is all zeros, as in Google's imagenet21k files: "
            "the logits mean nothing. Use the features, or num_classes= for a head to train.",
            stacklevel=3,
        )
    return model


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    patch_size: int | tuple[int, int] | None = None,
    config: ViTConfig | Mapping[str, Any] | None = None,
    source_format: str | None = None,
) -> Path:
    """Convert a checkpoint to another format, image size, patch size or number of classes: `load` and `save` in one.

    Args:
        source: the checkpoint to read, a file or a folder.
        path: the file to write, or a folder, as for `save`.
        format: the format to write, one of `formats()` or a path to a .toml table of your own.
        image_size: wanted, int or (height, width) in pixels; None is the file's.
        num_classes: wanted; if it differs from the file's, the head is new and zero; 0 means no head.
        patch_size: wanted, int or (height, width) in pixels; None is the file's.
        config: facts about the source that it cannot state itself, as for `load`.
        source_format: format of the source; None recognises it.

    Returns:
        The path of the file that was written.

    Raises:
        CheckpointError: the source is damaged, malicious or not a Vision Transformer, or the format cannot express it.
        FileNotFoundError: there is no such file.
        ValueError: an argument is wrong.

    Example:

    >>> path = keras_vit.converters.save(keras_vit.zoo.load("digits"), "digits.npz", format="google")
    >>> keras_vit.converters.convert(path, "digits", format="huggingface").name
    'model.safetensors'
    """
    wanted: dict[str, Any] = {"image_size": image_size, "num_classes": num_classes, "patch_size": patch_size}
    model = load(source, config=config, format=source_format, **wanted)
    return save(model, path, format=format)


def _load_keras(path: Path, changes: Mapping[str, Any], *, dtype: Any, allow_nonfinite: bool) -> VisionTransformer:
    """Load a model saved as .keras, with some fields of its config changed."""
    with open_keras(path, "VisionTransformer") as (arguments, weights):
        check_size(weights, ViTConfig(**arguments["config"]))
        with layers.uninitialized():
            model = VisionTransformer.from_config(arguments)
        load_keras_weights(model, weights, allow_nonfinite=allow_nonfinite)
    config = model.config.replace(**changes)
    return model if config == model.config and dtype is None else model.with_config(config, dtype=dtype)


@contextlib.contextmanager
def open_keras(path: Path, kind: str) -> Iterator[tuple[dict[str, Any], KerasContainer]]:
    """Open a .keras file of a class: the arguments of `from_config`, and the weights. Keras deserialises nothing."""
    with keras_errors(path):
        arguments = saved_arguments(read_keras_config(path), kind)
        with KerasContainer(path) as weights:
            yield arguments, weights


def load_keras_weights(model: keras.Model, weights: KerasContainer, *, allow_nonfinite: bool) -> None:
    """Load the weights of a .keras file; after an error the model must not be used."""
    try:
        with warnings.catch_warnings():  # Keras only warns about some layers that it cannot find in the file
            warnings.filterwarnings("error", message="Skipping nested container")
            model.load_weights(weights.weights_path)
    except (ValueError, UserWarning) as error:
        raise CheckpointError(f"its weights do not fit the model: {str(error)[:500]}") from error
    for variable in () if allow_nonfinite else model.weights:
        if not assign.is_finite(assign.as_array(variable)):
            raise CheckpointError(
                f"its {variable.path} holds values that are not finite; allow_nonfinite=True reads them"
            )
