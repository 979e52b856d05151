"""Resolve a name, a path or a URL, and load the model: fetch the file, open it, check its architecture, build."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from keras_vit._util.checks import as_path, given
from keras_vit._util.text import warn
from keras_vit.errors import CheckpointError, UnknownModelError
from keras_vit.model import labels
from keras_vit.model.architectures import canonical_name
from keras_vit.model.config import Preprocessing, ViTConfig, check_fields
from keras_vit.zoo.cards import Card, Weights, alias, card, select

if TYPE_CHECKING:
    from keras_vit.converters.source import Checkpoint
    from keras_vit.dense.model import DenseModel
    from keras_vit.model.vision_transformer import VisionTransformer

# Endings that only files have. AugReg names may end in .npz too.
_FILE_SUFFIXES = (
    ".keras",
    ".npz",
    ".safetensors",
    ".h5",
    ".hdf5",
    ".pth",
    ".pth.tar",
    ".pt",
    ".bin",
    ".ckpt",
    ".tflite",
    ".onnx",
)
_NAME_WITH_SLASH = re.compile(r"[^/]+/\d\w*")  # "ViT-B/16", or almost
_CONFIG_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
# Fields of ViTConfig that `converters.load` changes.
_FILE_CHANGES = ("image_size", "num_classes", "patch_size", "num_channels", "preprocessing")
# The fields in which a file must agree with the name that it is loaded by.
_ARCHITECTURE_FIELDS = ("patch_size", "hidden_size", "mlp_dim", "num_heads", "num_layers", "tokens_mlp_dim")


def load(
    name: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = "default",
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    which: str | None = None,
    dtype: Any = None,
    accept_license: bool = False,
    **config_changes: Any,
) -> VisionTransformer:
    """Load a model of the zoo, with pretrained or random weights, or a file, a folder or a URL.

    Published weights are downloaded once, verified and kept in the cache folder (`KERAS_VIT_CACHE`).

    Args:
        name: "ViT-B/16", "B_16", "R50+ViT-B/16", "DINOv2-B/14", "digits", or the name of an AugReg file. A name of timm
            or Hugging Face that the cards know ("facebook/dinov2-base", "vit_base_patch16_224") stands for its own
            weights. Or the path or URL of a checkpoint, or the folder of a training run, as for `converters.load`:
            "./digits" is a file, "digits" a name.
        weights: of a name: "default" (the card's recommended file), a tag of the card ("imagenet21k", "sam", ...), a
            path or URL (https, gs, hf, file) of a checkpoint in any known format, or None for random weights.
        image_size: int or (height, width) in pixels. None takes the size that the weights were trained at, or 224
            without weights. Position embeddings are interpolated once, with the official method.
        num_classes: number of outputs of the head. If it differs from the weights', the head is new and zero; 0 builds
            a model without a head.
        which: the model that is meant, if a file has several, such as "ema" or "teacher": as for `converters.load`.
        dtype: Keras dtype policy, such as "mixed_bfloat16"; logits are float32 under every policy.
        accept_license: whether you accept the terms of a publisher who has terms of its own, such as DINOv3's. A card
            has their address. Without it such a file is not downloaded.
        **config_changes: other fields of ViTConfig, such as dropout_rate. patch_size resizes the patches' kernel, as
            `model.resized` does; num_channels adapts the first kernel, as `model.with_config` does. Of a dict
            preprocessing={"bits": 12} only the fields that it names differ. representation_size=None leaves out the
            pre_logits layer of the imagenet21k files, as the official fine-tuning does.

    Returns:
        The model. None of its weights are random unless weights=None or the head is new.

    Raises:
        UnknownModelError: no card has this name; the message lists the nearest.
        ValueError: unknown weights or fields, weights of another architecture, or `weights` beside a file.
        FileNotFoundError: the path does not exist.
        LicenseError: the file has terms of its own, and accept_license is False.
        DownloadError: the file could not be downloaded completely and verified.
        CheckpointError: the file is damaged or does not contain such a model.

    Example:
        >>> model = keras_vit.zoo.load("digits", image_size=48, num_classes=3)
        >>> model(np.zeros((2, 48, 48, 3), "float32")).shape
        TensorShape([2, 3])
    """
    if "config" in config_changes:
        raise ValueError(
            "config has what a file does not state: converters.load(path, config=...) takes it. zoo.load takes fields "
            f"by their names, such as dropout_rate=0.1. Received: config={config_changes['config']!r:.200}"
        )
    check_fields(config_changes)
    changes = given(image_size=image_size, num_classes=num_classes) | config_changes
    default = "default" if weights == "default" else None
    resolved = resolve(name, None if weights == "default" else weights, default=default)
    if resolved.is_file and weights is None:
        raise ValueError(
            f"weights=None builds a model's name with random weights. Received: the file {name!r}. For its "
            f"architecture: VisionTransformer(converters.read_config({name!r}))"
        )
    return load_resolved(replace(resolved, accept_license=accept_license), changes, which=which, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """The model that a name, a path or a URL stands for."""

    source: str | None  # path or URL of the weights; None for random weights
    name: str | None = None  # canonical; None for a file without a name, whose architecture is read from it
    expected_config: ViTConfig | None = None  # of the name: random weights take it, a file must agree with it
    defaults: Mapping[str, Any] = field(default_factory=dict)  # fields of the card, for a file that does not state them
    published: Weights | None = None  # the published weights whose file `source` is
    accept_license: bool = False  # whether the user accepts the publisher's own terms

    @property
    def is_file(self) -> bool:
        """Whether the model is given by its file alone."""
        return self.name is None


def kind_of(text: str) -> Literal["path", "file name", "word"]:
    """Tell by the characters of a text whether it is a path, looks like one, or is the name of a model or a tag.

    A URL is a "path", and so is what begins with "/", "." or "~", ends with "/" or contains a backslash: no name has
    these. A "file name" ends as a checkpoint does, or has a slash where no model's name has one ("runs/mine"). Any
    other text is a "word".
    """
    if "://" in text or text.startswith(("/", ".", "~")) or text.endswith("/") or "\\" in text:
        return "path"
    has_folder = "/" in text and not _NAME_WITH_SLASH.fullmatch(text)
    return "file name" if has_folder or text.casefold().endswith(_FILE_SUFFIXES) else "word"


def resolve(
    spec: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None, *, default: str | None = "default"
) -> ResolvedModel:
    """Find the model that a name, path or URL stands for, as all commands and `train.run` do.

    A path is a file, whether it exists or not (see `kind_of`). A model's name comes before a file of that name:
    "digits" is the model, "./digits" the file. A file or folder that exists comes before the name of an AugReg file
    (.npz) and that of another package. Any other text is a file if it exists or looks like one.

    `weights` are for names: a tag, a path or a URL; None takes `default`, which is "default" (recommended) or None
    (random); "none" is None. Errors are those of `load`; it is `fetch_source` that raises a FileNotFoundError.
    """
    if isinstance(weights, str) and weights.casefold() == "none":  # of a command line
        weights = default = None
    if isinstance(spec, str) and kind_of(spec) != "path":
        found = _find_card(spec)
        if not _is_file(spec, found):
            return _choose_weights(spec, found, default if weights is None else weights)
    if weights is not None:
        raise ValueError(
            f"weights are for a model's name. Received: weights={weights!r:.200} and the file {spec!r:.200}"
        )
    return ResolvedModel(source=as_path(spec, "the model"))


def _find_card(spec: str) -> Card | ValueError:
    """Find the card of a text that is no path; return the error that says that there is none."""
    if not spec.strip():
        raise UnknownModelError(f"Expected the name of a model, a path or a URL. Received: {spec!r:.200}")
    try:
        return card(spec)
    except UnknownModelError as error:
        if Path(spec).suffix and not _exists(spec):
            return UnknownModelError(f"There is no file {spec!r:.200}, and no {str(error).removeprefix('No ')}")
        return error
    except ValueError as error:  # almost the name of an AugReg file
        return error


def _is_file(spec: str, found: Card | ValueError) -> bool:
    """Decide whether a text that is no path is a file."""
    looks_like_file = kind_of(spec) == "file name"
    if isinstance(found, UnknownModelError) and looks_like_file and spec.isprintable():  # one with a newline is no path
        return True
    # The name of an AugReg file may end in .npz, and that of another package may be a folder's.
    return _exists(spec) and (not isinstance(found, Card) or looks_like_file or alias(spec) is not None)


def _choose_weights(name: str, found: Card | ValueError, weights: str | os.PathLike[str] | None) -> ResolvedModel:
    """Resolve a name with a tag, a path or URL, or None for random weights."""
    _, of_alias = alias(name) or (None, "default")
    weights = of_alias if weights == "default" else weights
    source = None if weights is None else as_path(weights, "weights")
    if isinstance(found, Card):
        tag = weights if isinstance(weights, str) and _is_tag(weights, found) else None
        return _weights_of_card(found, tag, source, of_alias if of_alias in found.weights else "default")
    has_tag = isinstance(weights, str) and _is_tag(weights)
    if not isinstance(found, UnknownModelError) or has_tag or not name.isprintable():
        raise found
    architecture = canonical_name(name)  # raises an error that lists the nearest architectures
    return ResolvedModel(source=source, name=architecture, expected_config=ViTConfig.from_name(architecture))


def _weights_of_card(known: Card, tag: str | None, source: str | None, usual: str) -> ResolvedModel:
    """Resolve a tag of a card, or a file, or random weights, which have what the card says of the `usual` tag."""
    row = select(known, usual if tag is None else tag)
    source = source if tag is None else row.location
    published = row if source == row.location else None
    return ResolvedModel(
        source=source,
        name=known.name,
        expected_config=row.whole_config() if published else row.base_config(),
        defaults={
            "preprocessing": row.preprocessing,
            **given(labels=row.labels, position_method=row.config.get("position_method")),
        },
        published=published,
    )


def _is_tag(weights: str, known: Card | None = None) -> bool:
    """Tell a tag from a path or URL. A tag of the card is one even if a file has its name; no tag has a slash."""
    if weights == "default" or (known and weights in known.weights):
        return True
    return kind_of(weights) == "word" and not ("/" in weights or Path(weights).suffix or (weights and _exists(weights)))


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # longer than the name of a file
        return False


def load_resolved(
    resolved: ResolvedModel, changes: Mapping[str, Any] | None = None, *, dtype: Any = None, **how: Any
) -> VisionTransformer:
    """Load the model that `resolve` found; a model of maps is a CheckpointError. `how` is as for `open_model`."""
    with open_model(resolved, changes, **how) as opened:
        if opened.has_maps:
            raise CheckpointError(f"{resolved.source} has a model of maps: keras_vit.dense.load opens it")
        return opened.load(dtype)


def load_any(
    resolved: ResolvedModel, changes: Mapping[str, Any] | None = None, *, dtype: Any = None, **how: Any
) -> VisionTransformer | DenseModel:
    """Load the model that `resolve` found, also one of maps, which keeps its dtype. `how` is as for `open_model`."""
    with open_model(resolved, changes, **how) as opened:
        return opened.load(dtype)


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A model whose headers are read, and not yet its weights. TensorFlow starts with `load`."""

    config: ViTConfig  # of what `load` returns, or of its backbone
    load: Callable[[Any], Any]  # dtype -> VisionTransformer, or a DenseModel if it `has_maps`
    has_maps: bool = False


@contextlib.contextmanager
def open_model(
    resolved: ResolvedModel,
    changes: Mapping[str, Any] | None = None,
    *,
    which: str | None = None,
    **file_facts: Any,
) -> Iterator[OpenModel]:
    """Fetch and open what `resolve` found, once, for a `with` statement.

    `changes` are fields of ViTConfig; for a file, those of `_FILE_CHANGES` alone. Only a file takes
    `file_facts`, the config and format of `converters.load`. Errors are those of `load` or, for a file, of
    `converters.load`.
    """
    changes, expected = dict(changes or {}), resolved.expected_config
    if expected is not None:
        _check_no_facts(resolved, file_facts)
    elif others := sorted(changes.keys() - {*_FILE_CHANGES}):
        raise ValueError(
            f"A file is loaded with another {', '.join(_FILE_CHANGES)} only. Received: {others}. For other fields: "
            "model.with_config(model.config.replace(...))"
        )
    if expected is not None and resolved.source is None:
        _check_no_facts(resolved, {"which": which})
        config = _random_config(expected, changes)
        yield OpenModel(config=config, load=functools.partial(_create, config))
        return
    from keras_vit.converters.containers import find_weights, is_keras_file
    from keras_vit.converters.facts import to_facts
    from keras_vit.converters.source import open_checkpoint

    file = find_weights(fetch_source(resolved))
    with contextlib.ExitStack() as stack:
        if is_keras_file(file):
            opened = _open_keras(file, changes, which=which, **file_facts)
        else:
            checkpoint = stack.enter_context(
                open_checkpoint(
                    file,
                    facts=to_facts(file_facts.get("config")),
                    format=file_facts.get("format"),
                    which=which,
                    expected=None if expected is None else vars(expected),
                    wanted_size=changes.get("image_size"),
                )
            )
            load = functools.partial(_load_checkpoint, resolved, checkpoint, changes)
            opened = OpenModel(config=checkpoint.written, load=load)
        if expected is not None:
            _check_architecture(file, opened.config, expected)
        yield replace(opened, config=opened.config.replace(**changes))


def _create(config: ViTConfig, dtype: Any) -> VisionTransformer:
    from keras_vit.model.vision_transformer import VisionTransformer

    return VisionTransformer(config, dtype=dtype)


def _open_keras(file: Path, changes: Mapping[str, Any], **file_facts: Any) -> OpenModel:
    """Read the config of a .keras file, which states everything itself."""
    from keras_vit.converters.config_json import check_keras_facts
    from keras_vit.converters.source import read_keras_model

    check_keras_facts(**file_facts)
    config, has_maps = read_keras_model(file)
    load = functools.partial(_load_maps if has_maps else _load_keras, file, changes)
    return OpenModel(config=config, load=load, has_maps=has_maps)


def _load_maps(file: Path, changes: Mapping[str, Any], dtype: Any) -> DenseModel:
    from keras_vit.dense.loading import load_stored

    del dtype
    return load_stored(file, changes)


def _load_keras(file: Path, changes: Mapping[str, Any], dtype: Any) -> VisionTransformer:
    from keras_vit.converters.loading import load_keras

    return load_keras(file, changes, dtype=dtype)


def _load_checkpoint(
    resolved: ResolvedModel, checkpoint: Checkpoint, changes: Mapping[str, Any], dtype: Any
) -> VisionTransformer:
    from keras_vit.converters.facts import merge_fields
    from keras_vit.converters.loading import build, load_opened

    if resolved.is_file:
        return load_opened(checkpoint, changes, dtype=dtype)
    # Of a published file that nothing describes, the card knows better than its format's defaults.
    is_described = checkpoint.known.is_described or resolved.published is None
    stated, wanted_config = checkpoint.config.preprocessing, checkpoint.config.replace(**changes)
    unstated = _unstated(resolved.defaults, wanted_config, stated, is_described=is_described)
    for text in checkpoint.told if resolved.published is None else ():
        warn(text)
    return build(checkpoint, merge_fields(unstated, changes), dtype=dtype)


def _check_no_facts(resolved: ResolvedModel, file_facts: Mapping[str, Any]) -> None:
    if stated := given(**file_facts):
        raise ValueError(f"{resolved.name} is a model of the zoo: {list(stated)} describe a file. Received: {stated}")


def _random_config(config: ViTConfig, changes: Mapping[str, Any]) -> ViTConfig:
    # Without weights a changed classifier decides whether there is a class token.
    fields = {"class_token": None} | dict(changes)
    return config.replace(**fields)


def fetch_source(resolved: ResolvedModel) -> Path:
    """Fetch the weights and what describes them, and return the weights' local path; errors as `fetch_files`."""
    return fetch_files(resolved)[0]


def fetch_files(resolved: ResolvedModel) -> list[Path]:
    """Fetch the weights and the files beside them; return their local paths, the weights' first.

    Errors are those of `_util.downloads.fetch`, and LicenseError.
    """
    from keras_vit._util.downloads import check_license, fetch_with

    source, row = resolved.source or "", resolved.published
    if row is None:
        return fetch_with(source, _CONFIG_FILES)
    name = f"{resolved.name}, weights {row.tag!r},"
    check_license(source, name, row.license, row.terms, is_accepted=resolved.accept_license)
    # Published files of the hub need theirs: it has what the tensors do not show, such as the activation.
    return fetch_with(source, _CONFIG_FILES, needed="config.json", sha256=row.sha256)


def _check_architecture(path: Path, config: ViTConfig, expected: ViTConfig) -> None:
    """Raise a ValueError if a file's architecture is not that of the name it is loaded by."""
    wrong = [
        f"{field} {getattr(config, field)} instead of {getattr(expected, field)}"
        for field in _ARCHITECTURE_FIELDS
        if getattr(config, field) != getattr(expected, field)
    ]
    units, expected_units = (c.resnet.num_layers if c.resnet else None for c in (config, expected))
    if units != expected_units:
        wrong.append(f"a ResNet of {units} units instead of {expected_units}")
    if wrong:
        raise ValueError(
            f"{path} contains another architecture: {', '.join(wrong)}. Load it by its own architecture's name, or "
            "with keras_vit.converters.load, which reads the architecture from the file."
        )


def _unstated(
    defaults: Mapping[str, Any], config: ViTConfig, stated: Preprocessing, *, is_described: bool
) -> dict[str, Any]:
    """Select the card's defaults that the file's config does not state itself."""
    unstated = dict(defaults)
    if is_described:
        unstated.pop("position_method", None)
    if is_described and stated != Preprocessing():
        unstated.pop("preprocessing", None)
    # A list of another length belongs to other classes.
    names = unstated.get("labels")
    if names and (config.labels is not None or len(labels.read(names)) != config.num_classes):
        del unstated["labels"]
    return unstated
