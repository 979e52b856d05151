"""Draw the figures of the ViT paper from the arrays of this package, with matplotlib but without pyplot's state.

Each function returns a `matplotlib.figure.Figure` with a transparent background, in the colours of the light scheme.
`_util.html.svg` turns it into a drawing that follows the reader's colour scheme; `figure.savefig` writes it to a file.
"""

import math
from typing import Any

import numpy as np

from keras_vit._util.html import COLOURS
from keras_vit._util.text import install_command

try:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as missing:
    raise ImportError(f"The report needs matplotlib: {install_command('plots')}") from missing

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
    """Return attention (rows, columns) as uint8 (rows, columns, 4); a colour means the same in every map."""
    return _heat_colours(times_average(weights))


def times_average(weights: np.ndarray) -> np.ndarray:
    """Return weights divided by their mean; zeros stay zeros."""
    return weights / max(float(weights.mean()), 1e-30)


def heat_scale() -> np.ndarray:
    """Return the colours of `heat` from the average to HOTTEST times that, in equal ratios: uint8 (1, 64, 4)."""
    return _heat_colours(np.geomspace(1, HOTTEST, 64)[None])


def _heat_colours(times: np.ndarray) -> np.ndarray:
    level = np.clip(np.log2(np.maximum(times, 1)) / np.log2(HOTTEST), 0, 1)
    colours = colormaps["inferno"](0.35 + 0.6 * level)
    colours[..., 3] = MAX_OPACITY * level**0.6  # a power below 1, so that twice the average is visible
    return np.rint(255 * colours).astype(np.uint8)


def _new_chart(label: str) -> tuple[Any, Any]:
    """Return a figure and its axes, with blocks from left to right."""
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
    """Return tiles (rows, columns, height, width, 4) as one picture (height, width, 4), transparent between tiles."""
    rows, columns, height, width, channels = tiles.shape
    spaced = np.zeros((rows, columns, height + gap, width + gap, channels))
    spaced[:, :, :height, :width] = tiles
    joined = spaced.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), channels)
    return joined[:-gap, :-gap]
