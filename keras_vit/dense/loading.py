"""Load dense models: published heads of DINOv2 and Depth Anything, and models that this package saved."""

import dataclasses
import fnmatch
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit._util import files
from keras_vit._util.checks import as_path, given
from keras_vit._util.text import warn
from keras_vit.converters import config_json, loading, source
from keras_vit.converters.config_json import check_folder, keras_errors, plain_arguments, read_object
from keras_vit.converters.containers import (
    Container,
    KerasContainer,
    find_weights,
    is_keras_file,
    open_files,
    read_keras_config,
)
from keras_vit.converters.facts import KnownFields
from keras_vit.converters.source import check_size
from keras_vit.converters.table import Table, fields_of_rows, load_table
from keras_vit.converters.wrappers import find_formats, find_model
from keras_vit.dense.config import MapConfig, fetch_card
from keras_vit.dense.fields import (
    IMAGENET,
    PILLOW_BICUBIC,
    bit_config,
    check_value,
    depth_anything_fields,
    dinov2_fields,
    eomt_processor,
    huggingface_fields,
    huggingface_processor,
    read_eomt,
)
from keras_vit.dense.model import DenseModel
from keras_vit.errors import CheckpointError
from keras_vit.model import layers
from keras_vit.model.config import Preprocessing, ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer


def load_stored(path: Path, changes: Mapping[str, Any], *, allow_nonfinite: bool = False) -> DenseModel:
    """Load a stored DenseModel; of the changes that a command may ask for, only `image_size` is possible."""
    if others := changes.keys() - {"image_size"}:
        raise ValueError(f"A DenseModel can change its image_size only. Received: {', '.join(sorted(others))}")
    file = find_weights(path)
    values = read_keras_config(file)
    if values.get("registered_name") != "keras_vit>DenseModel":
        raise CheckpointError(f"{file} does not contain a DenseModel")
    with keras_errors(file), KerasContainer(file) as weights:
        backbone = plain_arguments(values["config"]["backbone"], "DenseModel")
        config = ViTConfig(**backbone["config"])
        check_size(weights, config)
        _check_head_size(weights, MapConfig(**values["config"]["head"]), config)
        model = DenseModel.from_config({**values["config"], "backbone": backbone})
        loading.load_keras_weights(model, weights, allow_nonfinite=allow_nonfinite)
    return model.resized(changes["image_size"]) if changes else model


def _check_head_size(container: Container, head: MapConfig, config: ViTConfig) -> None:
    """Raise a CheckpointError if a head is larger than its whole file: a few bytes can describe one of any size."""
    held = sum(math.prod(header.shape) for header in container.headers.values() if header.bytes)
    width = config.hidden_size
    read = width * len(head.blocks)
    needed = read * (head.num_classes if head.output == "classes" else head.num_bins)
    if head.kind == "dpt":
        maps = zip(head.widths, head.factors, strict=True)
        neck = sum(width * (9 * head.fusion_width + width * math.ceil(max(factor, 1)) ** 2) for width, factor in maps)
        last = head.fusion_width * max(head.num_classes, head.head_width)
        needed = config.hidden_size * sum(head.widths) + neck + 9 * head.fusion_width**2 + last
    if head.kind == "queries":
        squares = 4 * (head.query_blocks + head.upsample.bit_length() - 1)
        needed = width * (head.num_classes + head.num_queries + squares * width)
    if needed > held:
        raise CheckpointError(f"describes a head of at least {min(needed, 10**18)} weights, but holds {held} numbers")


# Prefix of a backbone in the same file -> the table of its format, and the key of its config in config.json.
_BACKBONES = {
    "backbone.": ("huggingface_dinov2", "backbone_config"),
    "dpt.": ("huggingface", None),
    "pretrained.": ("meta_dinov2", None),
}
# Kind of an EoMT -> the table of its backbone, and how this spells the names of blocks.
_EOMT = {
    "eomt": ("huggingface_dinov2_registers", {"layers.": "encoder.layer."}),
    "eomt_dinov3": ("huggingface_dinov3", {"layers.": "layer."}),
}
_HEAD_SIZE = 64  # width of an attention head in every published DINOv2
_DEFAULT_HEADS = 12  # Dinov2Config's default, which a nested config omits
# Starts of the head's variables.
_HEAD_VARIABLES = (
    *("readout_", "reassemble_", "resize_", "neck_", "fusion_", "map_"),
    *("queries/", "mask_", "upscale_", "class_logits/"),
)
_UNUSED_VARIABLES = ("fusion_0_unit1",)  # files have it, but nothing is added to the coarsest map
# Tensor of an unsupported model -> the model.
_UNSUPPORTED = {
    "decode_head.query_embed.weight": "Mask2Former (DINOv2's and DINOv3's *_m2f heads)",
    "decode_head.transformer_decoder.*": "Mask2Former (DINOv2's and DINOv3's *_m2f heads)",
    "model.backbone.pretrained.*": "Depth Anything 3",
    "model.head.scratch.*": "Depth Anything 3",
    "decoder.reassemble_blocks.*": "the depth head of DINOv3 7B",
    "reassemble_blocks.*": "the depth head of DINOv3 7B",
    "dpt.encoder.layer.0.layer_scale*": "DPT on BEiT",
    "backbone.encoder.layer.0.attention.attention.relative_position*": "DPT on BEiT",
    "backbone.swin*": "DPT on Swin",
}


def load(
    path: str | os.PathLike[str],
    *,
    backbone: VisionTransformer | str | os.PathLike[str] | None = None,
    blocks: tuple[int, ...] | None = None,
    max_depth: float | None = None,
    which: str | None = None,
    allow_nonfinite: bool = False,
    accept_license: bool = False,
) -> DenseModel:
    """Load a model that returns a map for every image.

    | path | model |
    |---|---|
    | a name of `cards()` | published models on the Hugging Face Hub, which are downloaded once |
    | Hugging Face folder | DPT on a ViT, a hybrid or DINOv2, Depth Anything V1 and V2 (relative and metric), EoMT |
    | `depth_anything_*.pth` | Depth Anything V1 and V2, relative and metric |
    | `dinov2_*_head.pth` with a backbone | DINOv2's segmentation and depth heads (not Mask2Former) |
    | `.keras` | a DenseModel that was saved by `model.save` |

    Args:
        path: the file, a folder with the weights and a config.json, or a name.
        backbone: for a file that holds only a head, the VisionTransformer that it was trained on, or its file.
        blocks: numbers of the blocks that the head reads, from 0, where neither file nor its name says it.
        max_depth: greatest depth in metres, where neither file nor its name says it. Meta's linear NYU heads are read
            with the 10 m that they were trained with; the hub's code spreads their bins to 80 m.
        which: the model that is meant, if the file has several, as for `converters.load`.
        allow_nonfinite: accept NaN and infinities among the weights of a .keras file.
        accept_license: whether you accept the publisher's terms: Depth Anything V2 B and L are CC-BY-NC-4.0.

    Returns:
        The model: prepared images -> float32 depth (batch, rows, columns) or logits (batch, rows, columns, classes), at
        the size that the official head returns. An EoMT returns a dict: class_logits (batch, queries, classes + 1), of
        which the last is "none", and mask_logits (batch, rows, columns, queries).

    Raises:
        CheckpointError: the file is damaged, malicious, of another model, or does not fit the backbone.
        FileNotFoundError: there is no such file or name.
        LicenseError: the file has terms of its own, and accept_license is False.
        ValueError: a backbone is missing, or given for a file that has its own.

    Example:
        >>> model = keras_vit.dense.depth(keras_vit.zoo.load("digits"))
        >>> model.save("depth.keras")
        >>> keras_vit.dense.load("depth.keras").predict_maps(np.zeros((1, 50, 70, 3), "uint8"))[0].shape
        (50, 70)
    """
    name = as_path(path, "path")
    file = find_weights(name) if Path(name).exists() else fetch_card(name, accept_license=accept_license)[0]
    if is_keras_file(file):
        if backbone is not None:
            raise ValueError(
                "backbone is for a file that holds only a head. Received: a .keras file, which has its own"
            )
        return load_stored(file, {}, allow_nonfinite=allow_nonfinite)
    if isinstance(backbone, str | os.PathLike):
        backbone = _load_backbone(Path(backbone))
    stated = given(blocks=blocks, max_depth=max_depth)
    check_folder(file)
    with open_files(file) as container:
        head = _find_head_table(container, which)
        prefix = next((start for start in _BACKBONES if any(name.startswith(start) for name in container.headers)), "")
        try:
            if head.format == "eomt":
                return _load_eomt(container, head)
            if not prefix:
                return _load_head(container, head, backbone, stated)
            if backbone is not None:
                raise ValueError(f"backbone is for a file that holds only a head. {file} has its own")
            return _load_whole(container, head, prefix, stated)
        except CheckpointError as error:
            raise CheckpointError(f"{file} {str(error).removeprefix(f'{file} ')}") from error


def _load_backbone(path: Path) -> VisionTransformer:
    """Load a backbone; Meta's files do not say the number of heads."""
    facts = {}
    if source.detect(path) == "meta_dinov2":
        facts["num_heads"] = max(1, source.read_config(path, num_heads=1).hidden_size // _HEAD_SIZE)
    return loading.load(path, config=facts)


def _find_head_table(container: Container, which: str | None) -> Table:
    """Find the table of the file's head; raise a CheckpointError for other models."""
    for pattern, model in _UNSUPPORTED.items():
        if fnmatch.filter(container.headers, pattern):
            raise CheckpointError(f"{container.path} is not read: it belongs to {model}")
    folder = files.data_folder("converters") / "checkpoints" / "dense"
    tables = [load_table(str(path)) for path in sorted(folder.glob("*.toml"))]
    if not find_formats(container, tables):
        names = sorted(container.headers)
        raise CheckpointError(
            f"{container.path} is no DPT, Depth Anything or head of DINOv2. Received {len(names)} tensors: "
            f"{str(names[:5])[:500]}. converters.load reads models without a map."
        )
    found = find_model(container, tables, which)
    if found.told:
        warn(f"keras_vit: {container.path.name}: {found.told}")
    if found.other_parts:
        warn(source.describe_other_parts(container.path, found.other_parts))
    return found.table


def _load_head(
    container: Container, table: Table, backbone: VisionTransformer | None, stated: Mapping[str, Any]
) -> DenseModel:
    """Load a file that holds only a head."""
    if backbone is None:
        raise ValueError(
            f"{container.path} holds only a head: pass backbone=, the VisionTransformer that it was trained on, or "
            'its file, such as "dinov2_vits14_pretrain.pth"'
        )
    tensors = table.match(container.headers)
    shapes = tensors.shapes
    fields = _fields_of_tensors(shapes)
    inputs = shapes.get("map_logits/kernel", shapes.get("map_bins/kernel", (0,)))[0]
    fields |= dinov2_fields(container.path, fields, inputs, backbone.config)
    model = DenseModel(backbone, MapConfig(**{**fields, **stated}))
    _assign(source.Checkpoint(container, table, tensors, model.config), model, reads_backbone=False)
    return model


def _load_whole(container: Container, head: Table, prefix: str, stated: Mapping[str, Any]) -> DenseModel:
    """Load a file that holds a head and its backbone."""
    name, inside = _BACKBONES[prefix]
    table = _add_head_rows(load_table(name), head)
    tensors = table.match(container.headers, prefix)
    shapes = tensors.shapes
    values = config_json.read_object(beside) if (beside := container.path.parent / "config.json").is_file() else {}
    if prefix != "pretrained." and not values:
        raise CheckpointError("needs the config.json of its folder, which says which blocks the head reads")
    own = values.get(inside) if inside else values
    width = shapes.get("encoder_norm/gamma", (0,))[0]
    heads = _DEFAULT_HEADS if values else width // _HEAD_SIZE
    known_fields = KnownFields(
        row_fields=fields_of_rows(tensor.row for tensor in tensors.sources.values()),
        json_fields=_json_fields(values, own, table),
        expected={"num_heads": heads} if heads else {},
    )
    config = source.infer(
        {path: shape for path, shape in shapes.items() if not path.startswith(_HEAD_VARIABLES)}, table, known_fields
    )
    source.check_size(container, config)
    fields = _fields_of_tensors(shapes)
    if prefix == "pretrained.":
        fields |= depth_anything_fields(container.path, config, stated)
        preparation = {**PILLOW_BICUBIC, **IMAGENET}
    else:
        fields |= huggingface_fields(values, config, labels=known_fields.json_fields.get("labels"))
        preparation, framing = huggingface_processor(container.path.parent, config.size)
        fields |= framing
    if prefix == "dpt.":
        config = config.replace(position_method="bilinear")
    config = config.replace(classifier="gap", num_classes=0, preprocessing=Preprocessing(**preparation))
    with layers.uninitialized():
        model = DenseModel(VisionTransformer(config), MapConfig(**{**fields, **stated}))
    _assign(source.Checkpoint(container, table, tensors, config), model, reads_backbone=True)
    return model


def _load_eomt(container: Container, head: Table) -> DenseModel:
    """Load an EoMT, whose last blocks belong to the head."""
    folder = container.path.parent
    stated = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    check_value(stated, "model_type", tuple(_EOMT))
    name, spelled = _EOMT[stated["model_type"]]
    table = _add_head_rows(load_table(name), head)
    table = dataclasses.replace(table, names=dataclasses.replace(table.names, spelled=spelled))
    tensors = table.match(container.headers)
    values, shapes = read_eomt(container, stated), tensors.shapes
    known_fields = KnownFields(
        row_fields=fields_of_rows(tensor.row for tensor in tensors.sources.values()),
        json_fields=_json_fields(values, values, table),
    )
    config = source.infer(
        {path: shape for path, shape in shapes.items() if not path.startswith(_HEAD_VARIABLES)}, table, known_fields
    )
    source.check_size(container, config)
    blocks, last = values["num_blocks"], config.num_layers - values["num_blocks"] - 1
    if last < 0:
        raise CheckpointError(f"is read only with blocks in front of the {blocks} that see its queries. Received: none")
    preparation, framing = eomt_processor(folder, config.size)
    config = config.replace(
        num_layers=last + 1, classifier="gap", num_classes=0, preprocessing=Preprocessing(**preparation)
    )
    fields = MapConfig(
        kind="queries",
        output="segments",
        blocks=(last,),
        num_queries=container.headers["query.weight"].shape[0],
        query_blocks=blocks,
        num_classes=shapes["class_logits/kernel"][-1] - 1,
        upsample=2 ** len({path.split("/")[0] for path in shapes if path.endswith("_cells/kernel")}),
        labels=known_fields.json_fields.get("labels"),
        **framing,
    )
    with layers.uninitialized():
        model = DenseModel(VisionTransformer(config), fields)
    _assign(source.Checkpoint(container, table, tensors, config), model, reads_backbone=True)
    return model


def _json_fields(values: Mapping[str, Any], own: Any, table: Table) -> dict[str, Any]:
    """Read the fields of ViTConfig from a config.json; `own` is the part of the backbone."""
    fields = table.json.read(own) if isinstance(own, dict) and table.json else {}
    if values.get("is_hybrid"):
        fields.pop("patch_size", None)  # that of the ResNet and the patches together
        fields["resnet"] = bit_config(values.get("backbone_config"))
    return fields


def _add_head_rows(table: Table, head: Table) -> Table:
    """Add the rows of a head to the table of a backbone, with and without its prefix."""
    names = dataclasses.replace(table.names, ignore=(*table.names.ignore, *head.names.ignore))
    rows = (dataclasses.replace(row, tensor=f"/{row.tensor}") for row in head.rows)
    return dataclasses.replace(table, names=names, rows=(*table.rows, *head.rows, *rows))


def _fields_of_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Derive the fields of a MapConfig from the shapes of a file's tensors."""
    classes = shapes.get("map_logits/kernel", (0, 0))[-1]
    fields: dict[str, Any] = {"output": "classes" if classes else "depth", "num_classes": classes}
    if "neck_0/kernel" not in shapes:
        bins = shapes.get("map_bins/kernel", (0, 0))[-1]
        return {**fields, "kind": "linear", "batch_norm": "map_norm/gamma" in shapes, "num_bins": bins}
    return {
        **fields,
        "kind": "dpt",
        "widths": tuple(shapes.get(f"neck_{i}/kernel", (0, 0))[-2] for i in range(4)),
        "fusion_width": shapes["neck_0/kernel"][-1],
        "head_width": shapes.get("map_conv2/kernel", (32,))[-1],
        "batch_norm": "fusion_1_unit1_norm1/gamma" in shapes,
        "residual_bias": "fusion_1_unit1_conv1/bias" in shapes,
        "projection": "map_projection/kernel" in shapes,
        "readout": "project" if "readout_3/kernel" in shapes else "ignore",
    }


def _assign(checkpoint: source.Checkpoint, model: DenseModel, *, reads_backbone: bool) -> None:
    """Read the weights of the head, and of the whole backbone."""
    backbone = loading.variables_by_path(model.backbone)
    head = {path: value for path, value in loading.variables_by_path(model).items() if path not in backbone}
    variables = {**backbone, **head} if reads_backbone else head
    # What is beside the backbone is the head's.
    unknown = [*checkpoint.tensors.unknown, *checkpoint.tensors.other_parts]
    checkpoint = checkpoint._replace(tensors=dataclasses.replace(checkpoint.tensors, unknown=unknown, other_parts=[]))
    loading.check_tensors(checkpoint, variables, skip=_UNUSED_VARIABLES)
    loading.assign_tensors(checkpoint, model, variables)
