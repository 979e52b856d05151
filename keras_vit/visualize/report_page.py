"""Write a report of a model and some images: one HTML file that needs no other file."""

import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from keras_vit._util import html
from keras_vit._util.checks import as_path, check_counts
from keras_vit._util.files import check_results, writing_result
from keras_vit._util.html import COLOURS
from keras_vit._util.progress import timed, track
from keras_vit._util.text import byte_size, needs_extra, scaled
from keras_vit.model.architectures import name_of
from keras_vit.model.classify import check_outputs, single_images
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize import attention, tokens, weights
from keras_vit.visualize._models import vision_transformer

with needs_extra("The report", "plots"):
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

LIGHT = {name: light for name, (light, _) in COLOURS.items()}
CHART = (4.4, 3.0)  # inches; a phone shows it 310 pixels wide, where a point is about a pixel
FONT_SIZE = 11
MAX_MAPS = 16  # in a row or column of maps: a screen has too few pixels for more
LOG_SCALE_RATIO = 20  # the axis of norms is logarithmic if the largest is more than this times the smallest
HOTTEST = 8  # times the average patch, where the colours of a heat map end
MAX_OPACITY = 0.85  # of the hottest colour


def draw_distances(distance: np.ndarray) -> Any:
    """Draw `attention_distance` (layers, heads), in pixels, by block (paper, figure 7, right)."""
    figure, axes = _new_chart("mean attention distance (pixels)")
    blocks = np.repeat(np.arange(1, len(distance) + 1), distance.shape[1])
    axes.scatter(blocks, distance.ravel(), s=26, color=LIGHT["accent"], alpha=0.75, linewidths=0)
    axes.set_ylim(0, 1.08 * max(float(distance.max()), 1e-6))
    return figure


def draw_norms(token_norms: np.ndarray, *, prefix_tokens: int) -> Any:
    """Draw `token_norms` by block: range and largest of the patches, and the mean of each prefix token."""
    figure, axes = _new_chart("norm of a token")
    blocks = np.arange(1, len(token_norms) + 1)
    patches = token_norms[:, :, prefix_tokens:].reshape(len(blocks), -1)
    low, middle, high = np.percentile(patches, (5, 50, 95), axis=1)
    axes.fill_between(blocks, low, high, color=LIGHT["bar"], alpha=0.8, linewidth=0, label="patches, 90 % of them")
    axes.plot(blocks, middle, color=LIGHT["accent"], linewidth=2, marker="o", markersize=4, label="patches, median")
    axes.plot(blocks, patches.max(axis=1), linestyle="", marker="^", color=LIGHT["quiet"], label="patches, largest")
    drawn = [patches]
    if prefix_tokens:
        front = token_norms[:, :, :prefix_tokens].mean(axis=1)
        name = "class token" if prefix_tokens == 1 else f"{prefix_tokens} prefix tokens"
        lines = axes.plot(blocks, front, color=LIGHT["other"], linewidth=2, linestyle="--", marker="s", markersize=4)
        lines[0].set_label(name)  # one entry in the legend for all of them
        drawn.append(front)
    if max(x.max() for x in drawn) > LOG_SCALE_RATIO * max(min(x.min() for x in drawn), 1e-12):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=LIGHT["text"], fontsize=FONT_SIZE - 2)
    return figure


def draw_ranks(effective_rank: np.ndarray) -> Any:
    """Draw `effective_rank` (layers,) by block."""
    figure, axes = _new_chart("effective rank of the tokens")
    blocks = np.arange(1, len(effective_rank) + 1)
    axes.plot(blocks, effective_rank, color=LIGHT["accent"], linewidth=2, marker="o", markersize=5)
    axes.set_ylim(0, 1.08 * max(float(effective_rank.max()), 1e-6))
    return figure


def draw_filters(embedding_filters: np.ndarray) -> Any:
    """Draw `embedding_filters`, 0..1, as small pictures (paper, figure 7, left); grey unless of three channels."""
    count, height, width, channels = embedding_filters.shape
    if channels not in (1, 3):
        embedding_filters = embedding_filters.mean(axis=-1, keepdims=True)
    columns = min(7, count)
    rows = math.ceil(count / columns)
    tiles = np.zeros((rows * columns, height, width, 4))
    tiles[:count, ..., :3] = embedding_filters
    tiles[:count, ..., 3] = 1
    mosaic = _mosaic(tiles.reshape(rows, columns, height, width, 4), gap=max(1, width // 10))
    figure = Figure(figsize=(CHART[0], CHART[0] * mosaic.shape[0] / mosaic.shape[1]))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(mosaic, interpolation="none", aspect="equal")
    axes.set_axis_off()
    return figure


def draw_similarities(position_similarity: np.ndarray) -> Any:
    """Draw `position_similarity` for at most MAX_MAPS rows and columns of patches (paper, figure 7, centre)."""
    height, width = position_similarity.shape[:2]
    rows, columns = (  # evenly spaced
        np.unique(np.linspace(0, side - 1, min(side, MAX_MAPS)).round().astype(int)) for side in (height, width)
    )
    colours = colormaps["viridis"]((position_similarity[np.ix_(rows, columns)] + 1) / 2)
    gap = max(1, round(0.15 * max(height, width)))
    mosaic = _mosaic(colours, gap)
    ratio = mosaic.shape[0] / mosaic.shape[1]
    figure = Figure(figsize=(CHART[0], 0.7 + 3.4 * ratio), layout="constrained")
    axes, scale = figure.subplots(1, 2, width_ratios=(1, 0.04))
    axes.imshow(mosaic, interpolation="none", aspect="equal")
    _number_tiles(axes.xaxis, columns, width + gap, width)
    _number_tiles(axes.yaxis, rows, height + gap, height)
    _label_axes(axes, "column of the patch", "row of the patch")
    _hide_frame(axes)
    ramp = colormaps["viridis"](np.linspace(1, 0, 128))[:, None]
    scale.imshow(ramp, extent=(0, 1, -1, 1), aspect="auto", interpolation="none")
    scale.yaxis.tick_right()
    scale.set_xticks([])
    scale.set_yticks([-1, 0, 1])
    scale.set_title("cosine", color=LIGHT["quiet"], fontsize=FONT_SIZE - 1)
    _hide_frame(scale)
    return figure


def heat(weights: np.ndarray) -> np.ndarray:
    """Colour attention (rows, columns) as uint8 (rows, columns, 4); a colour means the same in every map."""
    return _heat_colours(times_average(weights))


def times_average(weights: np.ndarray) -> np.ndarray:
    """Divide weights by their mean; zeros stay zeros."""
    return weights / max(float(weights.mean()), 1e-30)


def heat_scale() -> np.ndarray:
    """Colours of `heat` from the average to HOTTEST times that, in equal ratios: uint8 (1, 64, 4)."""
    return _heat_colours(np.geomspace(1, HOTTEST, 64)[None])


def _heat_colours(times: np.ndarray) -> np.ndarray:
    level = np.clip(np.log2(np.maximum(times, 1)) / np.log2(HOTTEST), 0, 1)
    colours = colormaps["inferno"](0.35 + 0.6 * level)
    colours[..., 3] = MAX_OPACITY * level**0.6  # a power below 1, so that twice the average is visible
    return np.rint(255 * colours).astype(np.uint8)


def _new_chart(label: str) -> tuple[Any, Any]:
    """Create a figure and its axes, with blocks from left to right."""
    figure = Figure(figsize=CHART, layout="constrained")
    axes = figure.subplots()
    _label_axes(axes, "block", label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=LIGHT["quiet"], labelsize=FONT_SIZE - 1)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LIGHT["line"])
    return figure, axes


def _label_axes(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, color=LIGHT["text"], fontsize=FONT_SIZE)
    axes.set_ylabel(y, color=LIGHT["text"], fontsize=FONT_SIZE)


def _hide_frame(axes: Any) -> None:
    """Leave only the numbers of the axes: no ticks, no frame."""
    axes.tick_params(colors=LIGHT["quiet"], labelsize=FONT_SIZE - 2, length=0)
    axes.spines[:].set_visible(False)


def _number_tiles(axis: Any, indices: np.ndarray, step: int, size: int) -> None:
    """Number at most eight of the mosaic's tiles along an axis, from 1."""
    shown = np.arange(0, len(indices), math.ceil(len(indices) / 8))
    axis.set_ticks(shown * step + (size - 1) / 2, [str(indices[number] + 1) for number in shown])


def _mosaic(tiles: np.ndarray, gap: int) -> np.ndarray:
    """Join tiles (rows, columns, height, width, 4) to one picture (height, width, 4), transparent between tiles."""
    rows, columns, height, width, channels = tiles.shape
    spaced = np.zeros((rows, columns, height + gap, width + gap, channels))
    spaced[:, :, :height, :width] = tiles
    joined = spaced.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), channels)
    return joined[:-gap, :-gap]


MAX_IMAGES = 16
PICTURE_SIDE = 448  # pixels of a picture's longer side on the page
NUM_TIMED_CALLS = 5
FLOP_UNITS = (" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP")
PAPER = "Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021 (arXiv 2010.11929)"


def report(
    model: Any,
    images: Any,
    path: str | os.PathLike[str],
    *,
    top: int = 5,
    title: str | None = None,
    card: Any = None,
    exports: Sequence[Any] = (),
    progress: bool = False,
) -> Path:
    """Write a report of a model and some images as one HTML file without links to other files. Needs matplotlib.

    It shows predictions, attention over the images, figures 6 and 7 of the paper (arXiv 2010.11929), norms and rank
    of the tokens, and the logit lens; the card and the exported files if they are given. Sections that do not apply to
    the model give the reason instead. Of a model that contains a VisionTransformer, only that part is shown.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: 1 to 16 images as `model.classify` takes them: paths, PIL images, arrays of 0..255, or a list of these.
        path: the .html file to write. An existing file is replaced when the new one is complete.
        top: number of classes to name for each image, from 1.
        title: heading of the page; None uses the model's name, or its architecture's if it has none.
        card: information on the weights: `zoo.card(name)` or other text, or a dict of names and values.
        exports: an `export.Report`, or its dict, for each file exported from this model.
        progress: whether to show a bar on standard error.

    Returns:
        The path.

    Raises:
        ImportError: if matplotlib is not installed.
        FileNotFoundError: if an image or the folder of `path` does not exist.
        FileExistsError: if there is a file at `path` that is no earlier report.
        ValueError: if an image cannot be read, if there are none or too many, if `top` is below 1, or if the model
            computes NaN or infinity.

    Example:
        >>> from keras_vit import digits
        >>> model = keras_vit.zoo.load("digits")
        >>> keras_vit.visualize.report(model, digits.load().test_images[:1], "report.html").name
        'report.html'
    """
    target = Path(as_path(path, "path"))
    if target.is_dir():
        raise ValueError(f"path must be the .html file to write. Received: the folder {str(target)!r}")
    check_results([target])
    check_counts(top=top)
    inner = vision_transformer(model)
    names, prepared = _prepare(inner, images)
    page = _render(
        _collect(inner, prepared, top, progress=progress),
        names=names,
        title=title or (name_of(inner.config) if inner.name == "vit" else inner.name),
        part_of=None if model is inner else repr(model.name),
        card=card,
        card_lines=[] if isinstance(card, Mapping) else [(line, _indent(line)) for line in str(card).splitlines()],
        exports=[_model_row(inner, prepared[:1]), *map(_export_row, exports)] if exports else [],
    )
    with writing_result(target) as file:
        file.write(page.encode())
    return target


def _prepare(model: VisionTransformer, images: Any) -> tuple[list[str], np.ndarray]:
    items = list(single_images(images))
    if not 0 < len(items) <= MAX_IMAGES:
        raise ValueError(f"A report shows 1 to {MAX_IMAGES} images. Received: {len(items)}")
    names = [item if isinstance(item, str | os.PathLike) else f"image {i}" for i, item in enumerate(items, 1)]
    return _names(list(map(PurePath, names))), np.concatenate([model.preprocess(item) for item in items])


def _names(paths: Sequence[PurePath]) -> list[str]:
    """Shortest end of each path that no other path has: "x.jpg", or "a/x.jpg" beside "b/x.jpg"."""
    ends = [[str(PurePath(*path.parts[-n:])) for n in range(1, len(path.parts) + 1)] for path in paths]
    count = Counter(end for path_ends in ends for end in path_ends)
    unique = (next((end for end in path_ends if count[end] == 1), None) for path_ends in ends)
    return [name or f"{path}, image {number}" for number, (name, path) in enumerate(zip(unique, paths, strict=True), 1)]


def _collect(model: VisionTransformer, images: np.ndarray, top: int, *, progress: bool) -> dict[str, Any]:
    """Compute what a report shows of a model and prepared images; raise a ValueError for NaN or infinity."""
    config = model.config
    norms = tokens.token_norms(model, images)
    check_outputs(norms)
    functions: dict[str, Any] = {"rank": tokens.effective_rank, "components": tokens.patch_components}
    if config.has_attention:
        functions["rollout"] = attention.attention_rollout
        functions["attention"] = attention.class_attention  # (layers, batch, heads, rows, columns)
        functions["distance"] = attention.attention_distance
    if config.num_classes and config.num_read_blocks == 1:
        functions["lens"] = tokens.logit_lens
    items = track(functions.items(), "Computing", show=progress)
    data: dict[str, Any] = {name: function(model, images) for name, function in items}
    colours, foreground = data["components"]
    lens = data.get("lens")
    logits = lens[-1] if lens is not None else model.predict(images, verbose=0) if config.num_classes else None
    for values in (lens, logits):
        if values is not None:
            check_outputs(values, are_logits=True)
    return data | {
        "config": config,
        "parameters": model.count_params(),
        "pictures": [undo_preprocessing(config, image) for image in images],
        "colours": np.rint(255 * np.concatenate([colours, foreground[..., None]], axis=-1)).astype(np.uint8),
        "filters": weights.embedding_filters(model),
        "similarity": weights.position_similarity(model) if weights.has_position_embedding(config) else None,
        "norms": norms,
        "predictions": None if logits is None else model.decode_predictions(logits, top),
        "leaders": None if lens is None else [[best for [best] in model.decode_predictions(x, 1)] for x in lens],
    }


def undo_preprocessing(config: ViTConfig, image: np.ndarray) -> np.ndarray:
    """Convert a prepared image to the uint8 picture that the model sees; grey unless it has three channels."""
    shares = image * np.array(config.preprocessing.std) + np.array(config.preprocessing.mean)
    pixels = np.rint(255 * np.clip(shares, 0, 1))
    return (pixels if pixels.shape[-1] == 3 else np.rint(pixels.mean(axis=-1))).astype(np.uint8)


def _render(data: dict[str, Any], **values: Any) -> str:
    """Fill the template with the data of `_collect` and other values."""
    filters = {"data_uri": html.data_uri, "heat": heat, "svg": html.svg, "times_average": times_average}
    charts = {
        "distance": draw_distances(data["distance"]) if "distance" in data else None,
        "filters": draw_filters(data["filters"]),
        "similarity": None if data["similarity"] is None else draw_similarities(data["similarity"]),
        "norms": draw_norms(data["norms"], prefix_tokens=data["config"].num_prefix_tokens),
        "rank": draw_ranks(data["rank"]),
    }
    template = html.environment(**filters).get_template("report.html")
    return template.render(
        data=data,
        flops=scaled(count(data["config"]).flops, 1000, FLOP_UNITS),
        pictures=[html.data_uri(html.thumbnail(picture, PICTURE_SIDE)) for picture in data["pictures"]],
        charts=charts,
        heat_scale=heat_scale(),
        hottest=HOTTEST,
        paper=PAPER,
        **values,
    )


def _indent(line: str) -> int:
    """Column at which the second part of a line of two columns begins, at most 16; 0 for other lines."""
    first_column = re.match(r" *\S+ {2,}", line)
    return min(first_column.end(), 16) if first_column else 0


def _model_row(model: VisionTransformer, image: np.ndarray) -> tuple[Any, ...]:
    size = sum(np.asarray(weight).nbytes for weight in model.weights)
    model.predict_on_batch(image)  # the first call compiles
    milliseconds = 1000 * statistics.median(timed(model.predict_on_batch, image)[1] for _ in range(NUM_TIMED_CALLS))
    return ("this model", "Keras", byte_size(size), None, None, None, f"{milliseconds:.2f}")


def _export_row(export: Any) -> tuple[Any, ...]:
    fields = export if isinstance(export, Mapping) else export.to_dict()
    path = Path(fields["path"])
    kind = "TFLite" if path.suffix == ".tflite" else "SavedModel"
    return (
        path.name if path.suffix else "/".join(path.parts[-2:]),
        kind if fields.get("mode") in (None, "none") else f"{kind}, {fields['mode']}",
        byte_size(fields["bytes"]),
        f"{fields['cosine']:.6f}",
        "equal" if fields["sqnr"] is None else f"{fields['sqnr']:.1f}",
        f"{fields['agreement']:.1%}",
        f"{fields['milliseconds']:.2f}",
    )
