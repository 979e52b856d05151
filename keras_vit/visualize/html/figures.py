"""The ViT paper's figures from the arrays of this package, drawn by matplotlib without any state of its pyplot.

Every function gives a `matplotlib.figure.Figure` on a transparent ground in the light scheme's colours of `page`;
`page.svg` turns it into a drawing that follows the reader's scheme, `figure.savefig` into a file.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keras_vit._util.page import COLOURS
from keras_vit._util.text import install_command

TEXT, QUIET, LINE, ACCENT, OTHER, BAR = (
    COLOURS[name][0] for name in ("text", "quiet", "line", "accent", "other", "bar")
)
CHART = (4.4, 3.0)  # inches: on a phone it is 310 pixels wide, and a point is about a pixel
LETTERS = 11
MOST_MAPS = 16  # a side: more would be smaller than what a screen shows
MANY_TIMES = 20  # largest norm over the smallest from which on the axis is logarithmic
WARMEST = 8  # times the average patch: where a heat map's colours end
OPAQUE = 0.85  # there


def need_matplotlib() -> None:
    """Raises an ImportError that says what to install where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Pictures are drawn by matplotlib: {install_command('plots')}") from error


def distances(distance: np.ndarray) -> Any:
    """Mean attention distance by depth, a dot a head (paper, figure 7, right).

    Args:
        distance: float (layers, heads), pixels, as `attention_distance` gives it.
    """
    figure, axes = _chart("mean attention distance (pixels)")
    blocks = np.repeat(np.arange(1, len(distance) + 1), distance.shape[1])
    axes.scatter(blocks, distance.ravel(), s=26, color=ACCENT, alpha=0.75, linewidths=0)
    axes.set_ylim(0, 1.08 * max(float(distance.max()), 1e-6))
    return figure


def norms(token_norms: np.ndarray, *, prefix_tokens: int) -> Any:
    """The tokens' Euclidean norms by depth: the patches' range, the largest, and the tokens in front.

    Args:
        token_norms: float (layers, batch, tokens), as `visualize.token_norms` gives them.
        prefix_tokens: how many stand in front of the patches: class token, distillation token, registers.
    """
    figure, axes = _chart("norm of a token")
    blocks = np.arange(1, len(token_norms) + 1)
    patches = token_norms[:, :, prefix_tokens:].reshape(len(blocks), -1)
    low, middle, high = np.percentile(patches, (5, 50, 95), axis=1)
    axes.fill_between(blocks, low, high, color=BAR, alpha=0.8, linewidth=0, label="patches, 90 % of them")
    axes.plot(blocks, middle, color=ACCENT, linewidth=2, marker="o", markersize=4, label="patches, median")
    axes.plot(blocks, patches.max(axis=1), linestyle="", marker="^", color=QUIET, label="patches, largest")
    drawn = [patches]
    if prefix_tokens:
        front = token_norms[:, :, :prefix_tokens].mean(axis=1)
        name = "class token" if prefix_tokens == 1 else f"{prefix_tokens} tokens in front"
        lines = axes.plot(blocks, front, color=OTHER, linewidth=2, linestyle="--", marker="s", markersize=4)
        lines[0].set_label(name)
        drawn.append(front)
    if max(x.max() for x in drawn) > MANY_TIMES * max(min(x.min() for x in drawn), 1e-12):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=TEXT, fontsize=LETTERS - 2)
    return figure


def ranks(effective_rank: np.ndarray) -> Any:
    """The tokens' effective rank by depth.

    Args:
        effective_rank: float (layers,), as `visualize.effective_rank` gives it.
    """
    figure, axes = _chart("effective rank of the tokens")
    blocks = np.arange(1, len(effective_rank) + 1)
    axes.plot(blocks, effective_rank, color=ACCENT, linewidth=2, marker="o", markersize=5)
    axes.set_ylim(0, 1.08 * max(float(effective_rank.max()), 1e-6))
    return figure


def filters(embedding_filters: np.ndarray) -> Any:
    """The patch embedding's principal components as small pictures (paper, figure 7, left).

    Args:
        embedding_filters: float (filters, height, width, channels), 0..1; one or three channels are shown as they
            are, of other numbers the mean.
    """
    count, height, width, channels = embedding_filters.shape
    if channels not in (1, 3):
        embedding_filters = embedding_filters.mean(axis=-1, keepdims=True)
    columns = min(7, count)
    rows = math.ceil(count / columns)
    tiles = np.zeros((rows * columns, height, width, 4))
    tiles[:count, ..., :3] = embedding_filters
    tiles[:count, ..., 3] = 1
    mosaic = _mosaic(tiles.reshape(rows, columns, height, width, 4), gap=max(1, width // 10))
    figure = _figure(CHART[0], CHART[0] * mosaic.shape[0] / mosaic.shape[1], layout="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(mosaic, interpolation="none", aspect="equal")
    axes.set_axis_off()
    return figure


def similarities(position_similarity: np.ndarray) -> Any:
    """How alike the position embeddings are: a map for each position, of all positions (paper, figure 7, centre).

    Args:
        position_similarity: float (rows, columns, rows, columns), cosine, as `visualize.position_similarity` gives
            it. Of more than MOST_MAPS rows or columns of maps, evenly spaced ones are drawn.
    """
    from matplotlib import colormaps

    rows, columns = (_some(side) for side in position_similarity.shape[:2])
    colours = colormaps["viridis"]((position_similarity[np.ix_(rows, columns)] + 1) / 2)
    height, width = position_similarity.shape[:2]
    gap = max(1, round(0.15 * max(height, width)))
    mosaic = _mosaic(colours, gap)
    ratio = mosaic.shape[0] / mosaic.shape[1]
    figure = _figure(CHART[0], 0.7 + 3.4 * ratio)
    axes, scale = figure.subplots(1, 2, width_ratios=(1, 0.04))
    axes.imshow(mosaic, interpolation="none", aspect="equal")
    _numbered(axes.xaxis, columns, width + gap, width)
    _numbered(axes.yaxis, rows, height + gap, height)
    _labelled(axes, "column of the patch", "row of the patch")
    _bare(axes)
    ramp = colormaps["viridis"](np.linspace(1, 0, 128))[:, None]
    scale.imshow(ramp, extent=(0, 1, -1, 1), aspect="auto", interpolation="none")
    scale.yaxis.tick_right()
    scale.set_xticks([])
    scale.set_yticks([-1, 0, 1])
    scale.set_title("cosine", color=QUIET, fontsize=LETTERS - 1)
    _bare(scale)
    return figure


def heat(weights: np.ndarray) -> np.ndarray:
    """A map of attention as a sheet to lay over its picture, a pixel a patch: the stronger, the warmer and denser.

    Colours mean the same in every map: nothing up to the average patch, the warmest from WARMEST times that on. A map
    scaled to its own range would show noise as structure.

    Args:
        weights: float (rows, columns), from 0.

    Returns:
        uint8 (rows, columns, 4): colour and opacity.
    """
    return _sheet(weights / max(float(weights.mean()), 1e-30))


def heat_scale() -> np.ndarray:
    """The colours of `heat`, from the average to WARMEST times that in equal factors: uint8 (1, 64, 4)."""
    return _sheet(np.geomspace(1, WARMEST, 64)[None])


def _sheet(times: np.ndarray) -> np.ndarray:
    from matplotlib import colormaps

    level = np.clip(np.log2(np.maximum(times, 1)) / np.log2(WARMEST), 0, 1)
    sheet = colormaps["inferno"](0.35 + 0.6 * level)
    sheet[..., 3] = OPAQUE * level**0.6  # more than proportional: twice the average is to be seen
    return np.rint(255 * sheet).astype(np.uint8)


def _chart(what: str) -> tuple[Any, Any]:
    """A figure and its one pair of axes, blocks to the right."""
    figure = _figure(*CHART)  # says what to install where matplotlib is missing
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    _labelled(axes, "block", what)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, labelsize=LETTERS - 1)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)
    return figure, axes


def _figure(width: float, height: float, layout: Any = "constrained") -> Any:
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def _labelled(axes: Any, to_the_right: str, upwards: str) -> None:
    axes.set_xlabel(to_the_right, color=TEXT, fontsize=LETTERS)
    axes.set_ylabel(upwards, color=TEXT, fontsize=LETTERS)


def _bare(axes: Any) -> None:
    """A picture's axes: numbers without ticks and frame."""
    axes.tick_params(colors=QUIET, labelsize=LETTERS - 2, length=0)
    axes.spines[:].set_visible(False)


def _numbered(axis: Any, places: np.ndarray, step: int, size: int) -> None:
    """Numbers, from 1, in front of at most eight of the mosaic's tiles."""
    shown = np.arange(0, len(places), math.ceil(len(places) / 8))
    axis.set_ticks(shown * step + (size - 1) / 2, [str(places[place] + 1) for place in shown])


def _some(count: int) -> np.ndarray:
    """Evenly spaced places out of 0..count-1, MOST_MAPS at most."""
    return np.unique(np.linspace(0, count - 1, min(count, MOST_MAPS)).round().astype(int))


def _mosaic(tiles: np.ndarray, gap: int) -> np.ndarray:
    """Tiles (rows, columns, height, width, 4) as one picture (height, width, 4), transparent between them."""
    rows, columns, height, width, channels = tiles.shape
    spaced = np.zeros((rows, columns, height + gap, width + gap, channels))
    spaced[:, :, :height, :width] = tiles
    joined = spaced.transpose(0, 2, 1, 3, 4).reshape(rows * (height + gap), columns * (width + gap), channels)
    return joined[:-gap, :-gap]
