"""Read checkpoints of models that return maps: DPT, Depth Anything, and DINOv2's heads."""

import dataclasses
import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit._util import data_files
from keras_vit._util.checks import as_path, given
from keras_vit.converters import assign, config_json, infer, layout, loading, source
from keras_vit.converters.containers import Container
from keras_vit.converters.table import Marks, Table, fields_of_rows, load_table
from keras_vit.dense import published
from keras_vit.dense.catalogue import fetch_card
from keras_vit.dense.config import MapConfig
from keras_vit.dense.model import DenseModel
from keras_vit.dense.stored import load_stored, read_backbone_config
from keras_vit.errors import CheckpointError
from keras_vit.model import layers
from keras_vit.model.config import Preprocessing
from keras_vit.model.vision_transformer import VisionTransformer

# Prefix of a backbone in the same file -> the table of its format, and the key of its config in config.json.
_BACKBONES = {
    "backbone.": ("huggingface_dinov2", "backbone_config"),
    "dpt.": ("huggingface", None),
    "pretrained.": ("meta_dinov2", None),
}
_HEAD_SIZE = 64  # width of an attention head in every published DINOv2
_JSON_HEADS = 12  # Dinov2Config's default, which a nested config omits
_HEAD = ("readout_", "reassemble_", "resize_", "neck_", "fusion_", "map_")  # starts of the head's variables
_UNUSED = ("fusion_0_unit1",)  # files have it, but nothing is added to the coarsest map
# Tensor that other models have -> what it belongs to.
_REFUSED = {
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
    accept_licence: bool = False,
) -> DenseModel:
    """Load a model that returns a map for every image.

    | path | model |
    |---|---|
    | a name of `cards()` | published models on the Hugging Face Hub, which are downloaded once |
    | Hugging Face folder | DPT on a ViT, a hybrid or DINOv2, Depth Anything V1 and V2 (relative and metric) |
    | `depth_anything_*.pth` | Depth Anything V1 and V2, relative and metric |
    | `dinov2_*_head.pth` with a backbone | DINOv2's segmentation and depth heads (not Mask2Former) |
    | `.keras` | a DenseModel that was saved by `model.save` |

    Args:
        path: the file, a folder with the weights and a config.json, or a name.
        backbone: for a file that holds only a head, the VisionTransformer that it was trained on, or its file.
        blocks: numbers of the blocks that the head reads, from 0, where neither file nor its name says it.
        max_depth: greatest depth in metres, where neither file nor its name says it. Meta's linear NYU heads are read
            with the 10 m that they were trained with; the hub's code spreads their bins to 80 m.
        accept_licence: whether you accept the publisher's terms: Depth Anything V2 B and L are CC-BY-NC-4.0.

    Returns:
        The model: prepared images -> float32 depth (batch, rows, columns) or logits (batch, rows, columns, classes), at
        the size that the official head returns.

    Raises:
        CheckpointError: the file is damaged, malicious, of another model, or does not fit the backbone.
        FileNotFoundError: there is no such file or name.
        LicenceError: the file has terms of its own, and accept_licence is False.
        ValueError: a backbone is missing, or given for a file that has its own.

    Example:
        >>> model = keras_vit.dense.depth(keras_vit.zoo.load("digits"))
        >>> model.save("depth.keras")
        >>> keras_vit.dense.load("depth.keras").predict_maps(np.zeros((1, 50, 70, 3), "uint8"))[0].shape
        (50, 70)
    """
    name = as_path(path, "path")
    file = source.find_weights(name) if Path(name).exists() else fetch_card(name, accept_licence=accept_licence)
    if source.is_keras_file(file):
        return _load_keras(file, backbone)
    if isinstance(backbone, str | os.PathLike):
        backbone = _load_backbone(Path(backbone))
    stated = given(blocks=blocks, max_depth=max_depth)
    with source.open_files(file) as container:
        head = _recognise(container)
        prefix = next((start for start in _BACKBONES if any(name.startswith(start) for name in container.headers)), "")
        try:
            if not prefix:
                return _load_head(container, head, backbone, stated)
            if backbone is not None:
                raise ValueError(f"backbone is for a file that holds only a head. {file} has its own")
            return _load_whole(container, head, prefix, stated)
        except CheckpointError as error:
            raise CheckpointError(f"{file} {str(error).removeprefix(f'{file} ')}") from error


def _load_keras(file: Path, backbone: Any) -> DenseModel:
    if backbone is not None:
        raise ValueError("backbone is for a file that holds only a head. Received: a .keras file, which has its own")
    if read_backbone_config(file) is None:
        raise CheckpointError(f"{file} does not contain a DenseModel")
    return load_stored(file, {})


def _load_backbone(path: Path) -> VisionTransformer:
    """Load a backbone; Meta's files do not say the number of heads."""
    facts = {}
    if source.detect(path) == "meta_dinov2":
        facts["num_heads"] = max(1, source.read_config(path, num_heads=1).hidden_size // _HEAD_SIZE)
    return loading.load(path, config=facts)


def _recognise(container: Container) -> Table:
    """Return the table of the file's head; raise a CheckpointError for other models."""
    for pattern, what in _REFUSED.items():
        if fnmatch.filter(container.headers, pattern):
            raise CheckpointError(f"{container.path} is not read: it belongs to {what}")
    folder = data_files.data_folder("converters") / "checkpoints" / "dense"
    tables = [load_table(str(path)) for path in sorted(folder.glob("*.toml"))]
    for table in tables:
        if table.find_prefix(container.headers) is not None:
            return table
    names = sorted(container.headers)
    raise CheckpointError(
        f"{container.path} is no DPT, Depth Anything or head of DINOv2. Received {len(names)} tensors: "
        f"{str(names[:5])[:500]}. converters.load reads models without a map."
    )


def _load_head(
    container: Container, table: Table, backbone: VisionTransformer | None, stated: Mapping[str, Any]
) -> DenseModel:
    """Load a file that holds only a head."""
    if backbone is None:
        raise ValueError(
            f"{container.path} holds only a head: pass backbone=, the VisionTransformer that it was trained on, or "
            'its file, such as "dinov2_vits14_pretrain.pth"'
        )
    match = table.match(container.headers)
    shapes = layout.variable_shapes(container.headers, match, table.layout)
    fields = _fields_of_tensors(shapes)
    inputs = shapes.get("map_logits/kernel", shapes.get("map_bins/kernel", (0,)))[0]
    fields |= published.dinov2_fields(container.path, fields, inputs, backbone.config)
    model = DenseModel(backbone, MapConfig(**{**fields, **stated}))
    _assign(source.Checkpoint(container, table, match, model.config), model, reads_backbone=False)
    return model


def _load_whole(container: Container, head: Table, prefix: str, stated: Mapping[str, Any]) -> DenseModel:
    """Load a file that holds a head and its backbone."""
    name, inside = _BACKBONES[prefix]
    table = _with_prefix(load_table(name), prefix, head)
    match = table.match(container.headers)
    shapes = layout.variable_shapes(container.headers, match, table.layout)
    values = config_json.read_object(beside) if (beside := container.path.parent / "config.json").is_file() else {}
    if prefix != "pretrained." and not values:
        raise CheckpointError("needs the config.json of its folder, which says which blocks the head reads")
    own = values.get(inside) if inside else values
    width = shapes.get("encoder_norm/gamma", (0,))[0]
    heads = _JSON_HEADS if values else width // _HEAD_SIZE
    hints = infer.Hints(
        row_fields=fields_of_rows(each.row for each in match.sources.values()),
        json_fields=_json_fields(values, own, table),
        num_heads=heads or None,
    )
    config = infer.infer({path: shape for path, shape in shapes.items() if not path.startswith(_HEAD)}, table, hints)
    source.check_size(container, config)
    fields = _fields_of_tensors(shapes)
    if prefix == "pretrained.":
        fields |= published.depth_anything_fields(container.path, config, stated)
        preparation = {**published.PILLOW_BICUBIC, **published.IMAGENET}
    else:
        fields |= published.huggingface_fields(values, config, labels=hints.json_fields.get("labels"))
        preparation, framing = published.huggingface_processor(container.path.parent, config.size)
        fields |= framing
    if prefix == "dpt.":
        config = config.replace(position_method="bilinear")
    config = config.replace(classifier="gap", num_classes=0, preprocessing=Preprocessing(**preparation))
    with layers.uninitialized():
        model = DenseModel(VisionTransformer(config), MapConfig(**{**fields, **stated}))
    _assign(source.Checkpoint(container, table, match, config), model, reads_backbone=True)
    return model


def _json_fields(values: Mapping[str, Any], own: Any, table: Table) -> dict[str, Any]:
    """Return the fields of ViTConfig that a config.json states; `own` is the part of the backbone."""
    fields = table.json.read(own) if isinstance(own, dict) and table.json else {}
    if values.get("is_hybrid"):
        fields.pop("patch_size", None)  # that of the ResNet and the patches together
        fields["resnet"] = published.bit_config(values.get("backbone_config"))
    return fields


def _with_prefix(table: Table, prefix: str, head: Table) -> Table:
    """Return the table of a backbone whose names have a prefix, with the rows of a head."""
    names = dataclasses.replace(table.names, prefixes=(prefix,), ignore=(*table.names.ignore, *head.names.ignore))
    return dataclasses.replace(table, marks=Marks(), names=names, rows=(*table.rows, *head.rows))


def _fields_of_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of a MapConfig that follow from the shapes of a file's tensors."""
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
    backbone = assign.variables_by_path(model.backbone)
    head = {path: value for path, value in assign.variables_by_path(model).items() if path not in backbone}
    variables = {**backbone, **head} if reads_backbone else head
    assign.check(checkpoint, variables, skip=_UNUSED)
    assign.assign(checkpoint, model, variables)
