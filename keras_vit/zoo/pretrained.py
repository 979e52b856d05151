"""Resolve a name, a path or a URL, and load the model: fetch the file, open it, check its architecture, build."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.errors import FileUnavailableError, UnknownModel
from keras_vit.model.config import Preprocessing, ViTConfig, check_fields
from keras_vit.zoo.cards import Weights
from keras_vit.zoo.catalogue import card, select

if TYPE_CHECKING:
    from keras_vit.model.vision_transformer import VisionTransformer

# Endings that only files have. AugReg names may end in .npz too.
_FILE_SUFFIXES = (".keras", ".npz", ".safetensors", ".h5", ".pth", ".pt", ".bin")
_REMOTE_SAFETENSORS = re.compile(r"(?P<folder>(?:https?|gs|hf)://.+/)[^/]+\.safetensors(?P<revision>@[^#]+)?(?:#.*)?")
_CONFIG_FILES = ("config.json", "preprocessor_config.json")
# The fields in which a file must agree with the name that it is loaded by.
_ARCHITECTURE_FIELDS = ("patch_size", "hidden_size", "mlp_dim", "num_heads", "num_layers")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The model that a name, a path or a URL stands for."""

    source: str | None  # path or URL of the weights; None for random weights
    name: str | None = None  # None for a file without a name, whose architecture is read from it
    card: Weights | None = None  # the published weights; the recommended ones if `source` is the user's own file

    @property
    def is_file(self) -> bool:
        """Whether this is a file without a name."""
        return self.name is None

    @property
    def is_published(self) -> bool:
        """Whether the weights are the card's own file."""
        return self.card is not None and self.source == self.card.location

    def config(self, **changes: Any) -> ViTConfig:
        """Return the config of the name: the official one at 224 pixels, or the card's if it states all sizes."""
        if self.card is not None and self.card.states_architecture:
            return ViTConfig(**self.card.facts).replace(**changes)
        return ViTConfig.from_name(self.card.architecture if self.card else self.name or "", **changes)


def resolve(
    spec: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None, *, default: str | None = "default"
) -> Choice:
    """Find the model that a name, path or URL stands for, as all commands and `train.run` do.

    A name of the zoo is the zoo's model even if a file or folder of that name exists: "./digits" is the file. Any other
    existing path is a file, and so is any name with the suffix of a checkpoint. `weights` are for names: a tag, a path
    or a URL; None takes `default`, which is "default" (recommended) or None (random). Errors are those of `load`.
    """
    if not _is_file(spec):
        return resolve_name(str(spec), default if weights is None else weights)
    if weights is not None:
        raise ValueError(f"weights are for a model's name. Received: weights={weights!r} and the file {spec!r}")
    return Choice(source=os.fspath(spec))


def resolve_name(name: str, weights: str | os.PathLike[str] | None) -> Choice:
    """Find the weights of a name; arguments and errors as for `load`."""
    path = None if weights is None else os.fspath(weights)
    try:
        known = card(name)
    except UnknownModel:
        if not _is_own(weights, ["default"]):
            raise
        ViTConfig.from_name(name)  # raises an error that lists the nearest architectures
        return Choice(source=path, name=name)
    if _is_own(weights, ["default", *known.weights]):
        return Choice(source=path, name=known.name, card=select(known))
    row = select(known, path or "")
    return Choice(source=row.location, name=known.name, card=row)


def _is_file(spec: str | os.PathLike[str]) -> bool:
    if not isinstance(spec, str) or "://" in spec:
        return True
    exists, has_suffix = bool(spec) and Path(spec).exists(), spec.casefold().endswith(_FILE_SUFFIXES)
    if exists == has_suffix:
        return exists
    try:
        card(spec)
    except UnknownModel:
        return True
    except ValueError:  # almost the name of an AugReg file; if there is no such file, the caller gets this error
        return exists
    return False


def _is_own(weights: str | os.PathLike[str] | None, tags: list[str]) -> bool:
    """Return whether weights are random, a path or a URL. A tag stays a tag if a file has its name."""
    if not isinstance(weights, str):
        return True
    path = Path(weights)
    return weights not in tags and ("/" in weights or os.sep in weights or bool(path.suffix) or path.exists())


def load(
    name: str,
    *,
    weights: str | os.PathLike[str] | None = "default",
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    dtype: Any = None,
    **config_changes: Any,
) -> VisionTransformer:
    """Load a model of the zoo, with pretrained or random weights.

    Published weights are downloaded once, verified and kept in the cache folder (`KERAS_VIT_CACHE`).

    Args:
        name: "ViT-B/16", "B_16", "R50+ViT-B/16", "R26+S/32", "digits", or the name of an AugReg file.
        weights: "default" (the card's recommended file), a tag of the card ("imagenet21k", "sam", ...), a path or URL
            (https, gs, hf, file) of a checkpoint in any known format, or None for random weights.
        image_size: int or (height, width) in pixels. None takes the size that the weights were trained at, or 224
            without weights. Position embeddings are interpolated once, with the official method.
        num_classes: number of outputs of the head. If it differs from the weights', the head is new and zero; 0 builds
            a model without a head.
        dtype: Keras dtype policy, such as "mixed_bfloat16"; logits are float32 under every policy.
        **config_changes: other fields of ViTConfig, such as dropout_rate. representation_size=None leaves out the
            pre_logits layer of the imagenet21k files, as the official fine-tuning does.

    Returns:
        The model. None of its weights are random unless weights=None or the head is new.

    Raises:
        UnknownModel: no card has this name; the message lists the nearest.
        ValueError: unknown weights or fields, or weights of another architecture.
        FileNotFoundError: the path does not exist.
        DownloadError: the file could not be downloaded completely and verified.
        CheckpointError: the file is damaged or holds no such model.

    Example:
        >>> model = keras_vit.zoo.load("digits", image_size=48, num_classes=3)
        >>> model(np.zeros((2, 48, 48, 3), "float32")).shape
        TensorShape([2, 3])
    """
    check_fields(config_changes)
    wanted = {"image_size": image_size, "num_classes": num_classes}
    changes = {field: value for field, value in wanted.items() if value is not None} | config_changes
    return load_choice(resolve_name(name, weights), changes, dtype=dtype)


def load_choice(
    choice: Choice, changes: Mapping[str, Any] | None = None, *, dtype: Any = None, **file_facts: Any
) -> VisionTransformer:
    """Load the model that `resolve` found. Errors are those of `load` or, for a file, of `converters.load`.

    `changes` are fields of ViTConfig; for a file, image_size and num_classes alone. Only a file takes `file_facts`, the
    config and format of `converters.load`.
    """
    changes = dict(changes or {})
    if choice.is_file:
        from keras_vit import converters

        return converters.load(fetch_source(choice), **changes, **file_facts, dtype=dtype)
    stated = {name: value for name, value in file_facts.items() if value is not None}
    if stated:
        raise ValueError(f"{choice.name} is a model of the zoo: {list(stated)} describe a file. Received: {stated}")
    if choice.source is None:
        from keras_vit.model.vision_transformer import VisionTransformer

        return VisionTransformer(choice.config(**changes), dtype=dtype)
    return _build(fetch_source(choice), choice, changes, dtype)


def fetch_source(choice: Choice) -> Path:
    """Return the local path of the weights. Errors are those of `_util.download.fetch`.

    A remote .safetensors file is fetched together with the config files beside it, if there are any.
    """
    from keras_vit._util.download import fetch

    source = choice.source or ""
    if choice.card is not None and choice.is_published:
        return fetch(source, sha256=choice.card.sha256, size=choice.card.bytes)
    path = fetch(source)
    if match := _REMOTE_SAFETENSORS.fullmatch(source):
        for name in _CONFIG_FILES:
            with contextlib.suppress(FileUnavailableError):
                fetch(f"{match['folder']}{name}{match['revision'] or ''}")
    return path


def _build(path: Path, choice: Choice, changes: dict[str, Any], dtype: Any) -> VisionTransformer:
    from keras_vit.converters import build
    from keras_vit.converters.source import open_checkpoint

    expected = choice.config()
    with open_checkpoint(path, num_heads=expected.num_heads, wanted_size=changes.get("image_size")) as checkpoint:
        _check_architecture(path, checkpoint.config, expected)
        defaults = _card_defaults(choice.card, checkpoint.config.replace(**changes))
        return build(checkpoint, defaults | changes, dtype=dtype)


def _card_defaults(row: Weights | None, config: ViTConfig) -> dict[str, Any]:
    """Return the preprocessing and the labels that a card states, for a file that does not state them itself."""
    from keras_vit.model import labels

    defaults: dict[str, Any] = {}
    if row is not None and config.preprocessing == Preprocessing():
        defaults["preprocessing"] = row.preprocessing
    # A list of another length belongs to other classes.
    if row is not None and row.labels and config.labels is None and len(labels.read(row.labels)) == config.num_classes:
        defaults["labels"] = row.labels
    return defaults


def _check_architecture(path: Path, config: ViTConfig, expected: ViTConfig) -> None:
    """Raise a ValueError if a file's architecture is not that of the name it is loaded by."""
    wrong = [
        f"{field} {getattr(config, field)} instead of {getattr(expected, field)}"
        for field in _ARCHITECTURE_FIELDS
        if getattr(config, field) != getattr(expected, field)
    ]
    units = [each.resnet.num_layers if each.resnet else None for each in (config, expected)]
    if units[0] != units[1]:
        wrong.append(f"a ResNet of {units[0]} units instead of {units[1]}")
    if wrong:
        raise ValueError(
            f"{path} holds another architecture: {', '.join(wrong)}. Load it by the name of its own architecture, or "
            "with keras_vit.converters.load, which reads the architecture from the file."
        )
