"""Read checkpoints of every known format, and models saved as .keras, as a VisionTransformer."""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit import position
from keras_vit._util.checks import given
from keras_vit._util.text import nearest, warn
from keras_vit.converters.config_json import check_keras_facts, keras_errors, read_crop, saved_arguments
from keras_vit.converters.containers import KerasContainer, find_weights, is_keras_file, read_keras_config
from keras_vit.converters.facts import to_facts
from keras_vit.converters.source import (
    Checkpoint,
    check_size,
    open_checkpoint,
)
from keras_vit.converters.table import (
    PATCHES,
    POSITION,
    PREFIX,
    Source,
    fold_heads,
    variable_shape,
    without_leading_ones,
)
from keras_vit.errors import CheckpointError
from keras_vit.model import layers
from keras_vit.model.config import Preprocessing, ViTConfig, check_resizable
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.model.vit import adapt_channels, image_kernel


def load(
    path: str | os.PathLike[str],
    *,
    config: ViTConfig | Mapping[str, Any] | None = None,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    patch_size: int | tuple[int, int] | None = None,
    num_channels: int | None = None,
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    format: str | None = None,
    which: str | None = None,
    dtype: Any = None,
    allow_nonfinite: bool = False,
) -> VisionTransformer:
    """Load a checkpoint as a model. The architecture is read from its tensors and from a config.json beside them.

    Args:
        path: a file, a folder with the weights and a config.json, a model saved as .keras, or the folder of a training
            run, which stands for the model.keras in it.
        config: facts about the *file* that it cannot state itself: `num_heads` if the format folds the heads (timm and
            Hugging Face without config.json), `classifier` "unpooled" or "token_unpooled", the `image_size` it was
            trained at if its grid is not square, `preprocessing` such as {"mean": [0.5], "std": [0.5]},
            `representation_size` None to leave out the file's pre_logits (and its head). A dict states the fields it
            names; a ViTConfig states every field, its defaults included.
        image_size: *wanted*, int or (height, width) in pixels; position embeddings are interpolated once.
        num_classes: *wanted*; if it differs from the file's, the head is new and zero; 0 means no head.
        patch_size: *wanted*, int or (height, width) in pixels; the kernel is resized as for `model.resized`.
        num_channels: *wanted*; the first kernel is adapted as for `model.with_config`.
        preprocessing: *wanted*; of a dict only the fields that it names differ from the file's, such as {"bits": 12}.
        format: one of `formats()` or a path to a .toml table of your own; None recognises it.
        which: the model that is meant, if the file has several: "ema" for averaged weights and "raw" for those beside
            them, or the key or module under which it stands, such as "teacher" or "student.backbone". None takes the
            one that the file's program takes, with a warning; if no program is known, the error lists the models.
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
    changes |= given(num_channels=num_channels, preprocessing=preprocessing)
    file = find_weights(path)
    if is_keras_file(file):
        check_keras_facts(config=config, format=format, which=which)
        return load_keras(file, changes, dtype=dtype, allow_nonfinite=allow_nonfinite)
    with open_checkpoint(
        file, facts=to_facts(config), format=format, which=which, wanted_size=image_size
    ) as checkpoint:
        return load_opened(checkpoint, changes, dtype=dtype, allow_nonfinite=allow_nonfinite)


def load_opened(
    checkpoint: Checkpoint, changes: Mapping[str, Any], *, dtype: Any = None, allow_nonfinite: bool = False
) -> VisionTransformer:
    """Load an open checkpoint as `load` does, and warn of all that the file does not say."""
    stated = {} if checkpoint.image_size is None else {"image_size": checkpoint.image_size}
    model = build(checkpoint, {**stated, **changes}, dtype=dtype, allow_nonfinite=allow_nonfinite)
    if "image_size" not in changes:
        _report_size(checkpoint)
    for text in checkpoint.told:
        warn(text)
    return model


def _report_size(checkpoint: Checkpoint) -> None:
    """Warn if the processor beside a file crops images to another size; transformers then resizes the positions."""
    path, size = checkpoint.container.path, checkpoint.config.size
    crop = read_crop(path)
    if crop is not None and crop != size:
        warn(
            f"keras_vit: {path.parent.name}/{path.name} is loaded for images of {size[0]} x {size[1]} pixels, as its "
            f"position embeddings; its preprocessor_config.json crops {crop[0]} x {crop[1]}. Choose with "
            f"image_size={crop[0] if crop[0] == crop[1] else crop} (--image-size)."
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
    leaves_out = config.representation_size is None and "pre_logits/kernel" in checkpoint.tensors.sources
    has_new_heads = leaves_out or config.num_classes != checkpoint.config.num_classes
    new_layers = ("head/", "head_distillation/") * has_new_heads + ("pre_logits/",) * leaves_out
    variables = {
        path: variable for path, variable in variables_by_path(model).items() if not path.startswith(new_layers)
    }
    check_tensors(checkpoint, variables, skip=new_layers)
    assign_tensors(checkpoint, model, variables, allow_nonfinite=allow_nonfinite)
    if "head/kernel" in variables and not np.any(variables["head/kernel"]):
        warn(
            f"keras_vit: the head of {checkpoint.container.path.name} is all zeros, as in Google's imagenet21k files: "
            "the logits mean nothing. Use the features, or num_classes= for a head to train."
        )
    return model


def variables_by_path(model: Any) -> dict[str, Any]:
    """Collect the variables of a model that a checkpoint holds, by path in the model: "block_0/norm1/gamma"."""
    variables = {}
    for layer in model.layers:
        for variable in layer.weights:  # without the state of dropout's random numbers
            variables[variable.path[variable.path.rindex(f"{layer.name}/") :]] = variable
    return variables


def check_tensors(checkpoint: Checkpoint, variables: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    """Raise a CheckpointError with every tensor that is missing, left over (unless in `skip`) or of another shape."""
    match = checkpoint.tensors
    problems = [text for path, variable in variables.items() if (text := _problem(checkpoint, path, variable))]
    unused = dict.fromkeys(
        source.tensor
        for path, source in match.sources.items()
        if path not in variables
        and 0 not in checkpoint.container.headers[source.tensor].shape  # no registers
        and not (skip and path.startswith(skip))
    )
    problems += [f"{name} is left over" for name in [*unused, *match.unknown]]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listed = "\n  ".join(problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else []))
        raise CheckpointError(
            f"{checkpoint.container.path} does not fit the model ({count}, nothing was loaded):\n  {listed}"
        )


def _problem(checkpoint: Checkpoint, path: str, variable: Any) -> str | None:
    """Describe why a variable cannot be read from a file; None if it can."""
    table, match = checkpoint.table, checkpoint.tensors
    shape = _shape_in_file(path, tuple(variable.shape), checkpoint.config)
    source = match.sources.get(path)
    if source is None:
        if table.is_zero_without_tensor(path, {source.tensor for source in match.sources.values()}):
            return None
        expected = table.tensor_of(path, checkpoint.config.to_dict())
        tensor = expected.tensor if expected else path
        similar = nearest(tensor, match.unknown, cutoff=0.5)
        hint = f" (the nearest is {similar[0]})" if similar and similar[0] != tensor else ""
        return f"no tensor for {path} {shape}, such as {tensor}{hint}"
    header = checkpoint.container.headers[source.tensor]
    if not _fits(header.shape, source, table.layout, shape):
        return f"{source.tensor} has shape {header.shape}, {path} expects {shape}"
    if not header.dtype.startswith(("float", "bfloat")):
        return f"{source.tensor} has type {header.dtype}, {path} expects floats"
    return None


def _reads_images(path: str, config: Any) -> bool:
    """Whether a path is of the kernel that reads the channels of images, which a text tower does not have."""
    return isinstance(config, ViTConfig) and path == image_kernel(config)


def _is_bias_table(path: str) -> bool:
    return path.startswith("relative_bias") and path.endswith("/table")


def _shape_in_file(path: str, shape: tuple[int, ...], file_config: ViTConfig) -> tuple[int, ...]:
    """Shape of a variable in the file, which may have another grid and another patch size."""
    if _reads_images(path, file_config):
        shape = (*shape[:2], file_config.num_channels, shape[3])
    if path == PATCHES:
        return (*file_config.patch, *shape[2:])
    if _is_bias_table(path):
        return (position.bias_rows(file_config.grid, file_config.num_prefix_tokens), shape[-1])
    if path != POSITION:
        return shape
    height, width = file_config.grid
    return (1, file_config.position_prefix_tokens + height * width, shape[-1])


def _fits(shape: tuple[int, ...], source: Source, layout: str, expected: tuple[int, ...]) -> bool:
    """Check whether a file's tensor of this shape becomes a variable of the expected shape."""
    _, count = source.row.part
    if count > 1 and (not shape or shape[0] % count):
        return False
    if layout == "torch":
        expected = fold_heads(expected, source.row)
    if source.row.rank is not None:
        expected = without_leading_ones(expected)
    return variable_shape(shape, source, layout) == expected


def assign_tensors(
    checkpoint: Checkpoint, model: Any, variables: Mapping[str, Any], *, allow_nonfinite: bool = False
) -> None:
    """Read every variable of a model from a file, at the model's sizes; after an error the model must not be used."""
    # The parts of a tensor (timm's qkv) are assigned one after the other: read it once.
    read = functools.lru_cache(maxsize=1)(checkpoint.container.read)
    positions = checkpoint.tensors.sources.get(POSITION)
    for path, variable in variables.items():
        source = checkpoint.tensors.sources.get(path)
        if source is None:  # zero without a tensor, as `check_tensors` found
            variable.assign(np.zeros(variable.shape))
            continue
        shape = _shape_in_file(path, tuple(variable.shape), checkpoint.config)
        value = to_variable(read(source.tensor), source, checkpoint.table.layout, shape)
        if path == PREFIX[0] and positions is not None and positions.row.folds_class_row:
            value = value + checkpoint.container.read(positions.tensor).reshape(-1, shape[-1])[:1]
        if not allow_nonfinite and not is_finite(value):
            raise CheckpointError(
                f"{checkpoint.container.path}: {source.tensor} holds values that are not finite; "
                "allow_nonfinite=True reads them"
            )
        variable.assign(_resized(path, value, checkpoint, model.config))


def to_variable(tensor: np.ndarray, source: Source, layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a file's tensor to a variable of this shape; a view if possible."""
    row = source.row
    if source.layer is not None:
        tensor = tensor[source.layer]
    index, count = row.part
    if count > 1:
        size = tensor.shape[0] // count
        tensor = tensor[index * size : (index + 1) * size]
    if row.folds_class_row:
        tensor = tensor[..., 1:, :]
    if layout == "torch" and row.is_kernel:
        tensor = tensor.transpose(row.torch_axes(tensor.ndim))
    return tensor.reshape(shape)


def is_finite(value: np.ndarray) -> bool:
    """Check that every number is finite."""
    # A sum needs no temporary array. It may overflow although every value is finite; then each value is checked.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(value.sum()) or np.isfinite(value).all())


def as_array(variable: Any) -> np.ndarray:
    """Convert a variable, or an array, to float32."""
    # Not Keras' convert_to_numpy, which raises NumPy's deprecation of copies of a variable.
    return np.asarray(variable).astype(np.float32, copy=False)


def _resized(path: str, value: np.ndarray, checkpoint: Checkpoint, config: ViTConfig) -> np.ndarray:
    """Resize a file's value to the model's sizes; the position embedding loses zero rows that were added."""
    if path == PATCHES and value.shape[:2] != config.patch:
        value = position.resize_patches(value, config.patch, method=config.position_method)
    if _reads_images(path, config):
        return adapt_channels(value, config.num_channels)
    if _is_bias_table(path):
        return position.resize_bias(value, config.grid, checkpoint.config.grid, method=config.position_method)
    if path != POSITION:
        return value
    source_grid = checkpoint.config.grid
    if source_grid != config.grid:
        prefix, method = checkpoint.config.position_prefix_tokens, config.position_method
        value = position.resize(value, config.grid, source_grid=source_grid, prefix_tokens=prefix, method=method)
    if not checkpoint.has_zero_rows:
        return value
    count = config.num_prefix_tokens
    if np.any(value[:, :count]):
        raise CheckpointError(f"notes that the first {count} rows of its position embedding are zero, and they are not")
    return value[:, count:]


# ---- models saved as .keras


def load_keras(
    path: Path, changes: Mapping[str, Any], *, dtype: Any = None, allow_nonfinite: bool = False
) -> VisionTransformer:
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
        if not is_finite(as_array(variable)):
            raise CheckpointError(
                f"its {variable.path} holds values that are not finite; allow_nonfinite=True reads them"
            )
