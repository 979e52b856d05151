"""Configure heads for segmentation and depth, and list the published models."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Self

from keras_vit._util import files
from keras_vit._util.checks import Count, NonNegative, Positive, WholeNumber
from keras_vit._util.text import nearest
from keras_vit.model.config import Group, label_conflicts

# Fusion width and the widths of the four maps for each hidden_size, as in Depth Anything (arXiv 2406.09414). Other
# sizes get the shares of the hidden_size that "small" has.
DPT_WIDTHS = {
    384: (64, (48, 96, 192, 384)),
    768: (128, (96, 192, 384, 768)),
    1024: (256, (256, 512, 1024, 1024)),
    1536: (384, (1536, 1536, 1536, 1536)),
}


MOST_BLOCKS = 64  # that a head reads


@dataclass(frozen=True, kw_only=True)
class MapConfig(Group):
    """A head that returns a map for every image. Frozen.

    Args:
        kind: "linear", a dense layer for every cell, "dpt", the decoder of DPT (arXiv 2103.13413), or "queries", the
            learned tokens of EoMT (arXiv 2503.19108).
        output: "classes" for logits of `num_classes`, "depth" for one number, "segments" for masks with a class each.
        blocks: numbers of the backbone's blocks whose tokens are read, from 0; four for "dpt", which takes the map of a
            stage of a hybrid's ResNet, such as "stage_1", as it is.
        norm: whether the backbone's final norm is applied to them.
        readout: use of the class token: "ignore", "add" (to every patch), "concat" (behind every patch), or
            "project" ("concat" and a dense layer with GELU).
        num_classes: number of classes; 0 for depth.
        labels: name of a list in zoo/labels, or the names of the classes.
        batch_norm: whether there is batch normalization: in front of a linear head, in all residual units of "dpt".
        upsample: factor by which a linear head enlarges its map, or "queries" the map of patches: then a power of two.
        num_queries: learned tokens of "queries"; each becomes a mask and its class.
        query_blocks: blocks of "queries" behind the backbone, which see these tokens too.
        num_bins: number of depth bins of a linear head.
        widths: channels of the four maps of "dpt", from fine to coarse.
        factors: by which they are enlarged, from fine to coarse; 0.5 halves.
        fusion_width: channels of the maps that are added up.
        residual_bias: whether the convolutions of the residual units have a bias.
        fusion_size: size of each sum: "double", or "next" for that of the next finer map.
        projection: whether a 3x3 convolution with ReLU follows the last sum.
        head_width: channels in front of the last dense layer of depth.
        head_size: size of the result: "double", or "image" for that of all patches in pixels.
        activation: of depth: "relu", "sigmoid" or "linear".
        min_depth: added to the result of "dpt"; the nearest bin of a linear head; the least depth of a map.
        max_depth: factor of the result of a sigmoid; the farthest bin of a linear head; the greatest depth of a map.
            None for relative depth, which is larger the nearer.
        framing: how `predict_maps` brings an image to the model: "squash" to `size`, "keep" the aspect ratio and change
            the scale least (Hugging Face), "least" to sides of at least `size`, "short" to a shorter side of that, or
            "none". Sides are rounded to `multiple`; with "short" and "none" zeros are added around the image instead.
            For "queries": "fit" into the model's square, black below or at the right, or "windows" of it.
        size: (height, width) in pixels for `framing`; None for the model's own.
        multiple: see `framing`.
        result: interpolation of a map to its image's size: "bilinear", "bilinear-corners" (the centres of the corners
            aligned) or "bicubic".

    Raises:
        ValueError: fields are wrong or contradict each other; one message names all of them.

    Example:
        >>> head = keras_vit.dense.MapConfig(blocks=(2, 3), num_classes=5, batch_norm=True)
        >>> keras_vit.dense.MapConfig(**head.to_dict()) == head, head.replace(blocks=(3,)).blocks
        (True, (3,))
    """

    kind: Literal["linear", "dpt", "queries"] = "linear"
    output: Literal["classes", "depth", "segments"] = "classes"
    blocks: tuple[int | str, ...] = ()
    norm: bool = True
    readout: Literal["ignore", "add", "concat", "project"] = "ignore"
    num_classes: WholeNumber = 0
    labels: str | tuple[str, ...] | None = None
    batch_norm: bool = False
    upsample: WholeNumber = 1
    num_queries: WholeNumber = 0
    query_blocks: WholeNumber = 0
    num_bins: WholeNumber = 256
    widths: tuple[int, ...] = ()
    factors: tuple[float, ...] = (4, 2, 1, 0.5)
    fusion_width: WholeNumber = 0
    residual_bias: bool = True
    fusion_size: Literal["double", "next"] = "next"
    projection: bool = False
    head_width: WholeNumber = 32
    head_size: Literal["double", "image"] = "image"
    activation: Literal["relu", "sigmoid", "linear"] = "relu"
    min_depth: NonNegative = 0.0
    max_depth: Positive | None = None
    framing: Literal["squash", "keep", "least", "short", "none", "fit", "windows"] = "squash"
    size: tuple[int, int] | None = None
    multiple: Count = 1
    result: Literal["bilinear", "bilinear-corners", "bicubic"] = "bilinear"

    def _conflicts(self) -> Iterator[str]:
        if (self.output == "depth") == (self.num_classes > 0):
            yield f"output={self.output!r} needs num_classes {'= 0' if self.output == 'depth' else '>= 1'}. " + (
                f"Received: {self.num_classes}"
            )
        if isinstance(self.labels, tuple) and len(self.labels) != self.num_classes:
            yield f"labels must name num_classes={self.num_classes} classes. Received: {len(self.labels)} names"
        yield from label_conflicts(self.labels)
        if self.kind == "dpt" and not len(self.blocks) == len(self.widths) == len(self.factors) == 4:
            yield f"kind='dpt' needs four blocks and four widths. Received: {self.blocks} and {self.widths}"
        if self.kind == "linear" and self.output == "depth" and self.max_depth is None:
            yield "kind='linear' with output='depth' needs max_depth, that of the farthest bin. Received: None"
        is_queries = self.kind == "queries"
        if {is_queries} != {self.output == "segments", self.framing in ("fit", "windows"), self.num_queries > 0}:
            yield (
                "kind='queries' goes with output='segments', framing='fit' or 'windows', and num_queries >= 1. "
                f"Received: {self.kind!r}, {self.output!r}, {self.framing!r}, {self.num_queries}"
            )
        if is_queries and (self.upsample.bit_count() != 1 or not self.query_blocks or len(self.blocks) != 1):
            yield (
                "kind='queries' needs upsample = a power of two, query_blocks >= 1, and one number in blocks. "
                f"Received: {self.upsample}, {self.query_blocks} and {self.blocks}"
            )
        if not 0 < len(self.blocks) <= MOST_BLOCKS:
            yield f"blocks must have 1 to {MOST_BLOCKS} numbers. Received: {len(self.blocks)}"

    def replace(self, **changes: Any) -> Self:
        """Copy the config with some fields changed.

        Args:
            **changes: fields and their new values.

        Raises:
            ValueError: a field is wrong.
        """
        return replace(self, **changes)


def four_blocks(num_layers: int) -> tuple[int, ...]:
    """Choose the blocks that DINOv2's and Depth Anything V2's decoders read: 2 5 8 11, 4 11 17 23, 9 19 29 39.

    For other depths they are the last of each quarter.
    """
    last_blocks(num_layers)  # raises if there are fewer
    return {24: (4, 11, 17, 23)}.get(num_layers, tuple((i + 1) * num_layers // 4 - 1 for i in range(4)))


def last_blocks(num_layers: int) -> tuple[int, ...]:
    """Choose the last four blocks."""
    if num_layers < 4:
        raise ValueError(f"backbone must have four blocks for this head. Received: {num_layers}")
    return tuple(range(num_layers - 4, num_layers))


def dpt_widths(hidden_size: int) -> dict[str, Any]:
    """Choose `fusion_width` and `widths` of a DPT head for a backbone of this width."""
    scaled = [max(1, hidden_size * share // 8) for share in (1, 2, 4, 8)]
    fusion, widths = DPT_WIDTHS.get(hidden_size, (max(4, hidden_size // 6), tuple(scaled)))
    return {"fusion_width": fusion, "widths": widths}


@dataclass(frozen=True, kw_only=True)
class MapCard:
    """A published DenseModel: a repository on the Hugging Face Hub.

    Args:
        name: by which `dense.load` finds it.
        repository: on the Hugging Face Hub.
        license: SPDX identifier.
        paper: arXiv number.
        source: publisher.
        terms: address of terms that one must accept before the download; None for a free license.

    Example:
        >>> keras_vit.dense.cards()["DPT-L"].repository
        'Intel/dpt-large'
    """

    name: str
    repository: str
    license: str
    paper: str
    source: str
    terms: str | None = None


def cards() -> dict[str, MapCard]:
    """List the cards of all published dense models, by name.

    Example:
        >>> keras_vit.dense.cards()["Depth-Anything-V2-B"].license
        'CC-BY-NC-4.0'
    """
    found = {}
    for path in sorted((files.data_folder("zoo") / "dense").glob("*.toml")):
        raw = files.read_toml(path)
        for name, fields in raw["models"].items():
            (paper,) = (number for pattern, number in raw["papers"].items() if fnmatchcase(name, pattern))
            found[name] = MapCard(name=name, paper=paper, source=raw["source"], **fields)
    return found


def fetch_card(name: str, *, accept_license: bool) -> list[Path]:
    """Fetch the files of a published model; return their paths, the weights' first. Errors as `dense.load`."""
    from keras_vit._util.downloads import check_license, fetch

    known = cards()
    if name not in known:
        raise FileNotFoundError(
            f"There is no file or folder {name!r:.200}, nor a model; the nearest: {nearest(name, known)}"
        )
    card = known[name]
    folder = f"hf://{card.repository}/"
    check_license(f"{folder}model.safetensors", name, card.license, card.terms, is_accepted=accept_license)
    beside = [fetch(folder + file) for file in ("config.json", "preprocessor_config.json")]
    return [fetch(f"{folder}model.safetensors"), *beside]
