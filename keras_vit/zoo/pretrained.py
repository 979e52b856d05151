"""A model by its name, with the weights its authors published: what `zoo.load` is, and what training begins from."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit._util.download import fetch
from keras_vit.errors import FileUnavailableError, UnknownModel
from keras_vit.model.config import Preprocessing, ViTConfig, check_fields
from keras_vit.zoo.cards import Weights
from keras_vit.zoo.catalogue import card, find

if TYPE_CHECKING:
    from keras_vit.model.vision_transformer import VisionTransformer

# What a name promises of the weights that are loaded under it.
_ARCHITECTURE = ("patch_size", "hidden_size", "mlp_dim", "num_heads", "num_layers")


def load(
    name: str,
    *,
    weights: str | os.PathLike[str] | None = "default",
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    dtype: Any = None,
    **config_changes: Any,
) -> VisionTransformer:
    """Loads a model of the zoo.

    Args:
        name: "ViT-B/16", "B_16", "R50+ViT-B/16", "R26+S/32", "digits", or the name of an AugReg file.
        weights: "default" (the card's recommended file), a tag of the card ("imagenet21k", "sam", ...), a path or URL
            (https, gs, hf, file) of a checkpoint in any known format, or None for random ones.
        image_size: int or (height, width); None is what the weights were trained at, 224 without weights. Position
            embeddings are interpolated once, the official way.
        num_classes: where it differs from the weights', the head is new and zero; 0 is no head.
        dtype: Keras dtype policy, such as "mixed_bfloat16".
        **config_changes: other fields of ViTConfig, such as dropout_rate; representation_size=None leaves the
            pre_logits layer of the imagenet21k files out, as the official fine-tuning does.

    Returns:
        the model; nothing in it is random unless weights=None.

    Raises:
        ValueError: for an unknown name, tag or field, with the nearest; or weights of another architecture.
        FileNotFoundError: for a path that is not there.
        DownloadError: where the file cannot be had whole.
        CheckpointError: where the file is damaged or no such model.
    """
    check_fields(config_changes)
    wanted = {"image_size": image_size, "num_classes": num_classes}
    changes = {field: value for field, value in wanted.items() if value is not None} | config_changes
    if weights is None:
        from keras_vit.model.vision_transformer import VisionTransformer

        return VisionTransformer(_named(name, **changes), dtype=dtype)
    if _is_file(weights, name):
        path, row = _fetched(os.fspath(weights)), _row(name)
    else:
        row = find(name, str(weights))
        path = fetch(row.location, sha256=row.sha256, size=row.bytes)
    return _open(path, _named(name), row, changes, dtype)


def _is_file(weights: str | os.PathLike[str], name: str) -> bool:
    """Whether weights is a path or URL. A tag stays one though a file has its name: "./sam" is the file."""
    if not isinstance(weights, str) or "/" in weights or os.sep in weights or Path(weights).suffix:
        return True
    is_tag = weights == "default" or (_row(name) is not None and weights in card(name).weights)
    return not is_tag and Path(weights).exists()


def _fetched(source: str) -> Path:
    """A path or URL as a local file or folder; the config.json beside a remote file comes along, where there is one."""
    if Path(source).is_dir():
        return Path(source)
    path = fetch(source)
    found = re.fullmatch(r"((?:https?|gs|hf)://.+/)[^/]+\.safetensors(@[^#]+)?(?:#.*)?", source)
    if found:
        folder, revision = found[1], found[2] or ""
        for name in ("config.json", "preprocessor_config.json"):
            with contextlib.suppress(FileUnavailableError):
                fetch(f"{folder}{name}{revision}")
    return path


def _row(name: str) -> Weights | None:
    """The card's recommended weights; None where the architecture has none."""
    try:
        return find(name)
    except UnknownModel:
        ViTConfig.from_name(name)  # where it is no architecture either, this says so
        return None


def _named(name: str, **changes: Any) -> ViTConfig:
    """The config that a name stands for, at 224 pixels and 1000 classes or as the card of a model of our own says."""
    row = _row(name)
    if row is None or "hidden_size" not in row.config:
        return ViTConfig.from_name(row.architecture if row else name, **changes)
    return ViTConfig(**row.facts).replace(**changes)


def _open(path: Path, named: ViTConfig, row: Weights | None, changes: dict[str, Any], dtype: Any) -> VisionTransformer:
    from keras_vit.converters import build
    from keras_vit.converters.source import opened

    with opened(path, num_heads=named.num_heads, wanted_size=changes.get("image_size")) as checkpoint:
        _refuse_another(path, checkpoint.config, named)
        wanted = checkpoint.config.replace(**changes)
        return build(checkpoint, _by_card(row, wanted) | changes, dtype=dtype)


def _by_card(row: Weights | None, config: ViTConfig) -> dict[str, Any]:
    """What a card knows of a file that does not say it: how images are prepared, what the classes are called."""
    from keras_vit.model import labels

    known: dict[str, Any] = {}
    if row is not None and config.preprocessing == Preprocessing():
        known["preprocessing"] = row.preprocessing
    # A list of another length is of other classes.
    if row is not None and row.labels and config.labels is None and len(labels.read(row.labels)) == config.num_classes:
        known["labels"] = row.labels
    return known


def _refuse_another(path: Path, config: ViTConfig, named: ViTConfig) -> None:
    """Raise where a file holds another architecture than the name it was asked for by."""
    wrong = [
        f"{field} {getattr(config, field)} instead of {getattr(named, field)}"
        for field in _ARCHITECTURE
        if getattr(config, field) != getattr(named, field)
    ]
    stems = [c.resnet.num_layers if c.resnet else None for c in (config, named)]
    if stems[0] != stems[1]:
        wrong.append(f"a ResNet of {stems[0]} units instead of {stems[1]}")
    if wrong:
        raise ValueError(
            f"{path} holds another architecture: {', '.join(wrong)}. Load it by its own name, or whatever it is "
            "by keras_vit.converters.load"
        )
