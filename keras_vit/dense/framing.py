"""From images of any size to a model's input, and from its outputs to maps and segments of the images' own sizes.

Nothing here needs Keras: exported files are run without it.
"""

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit import position
from keras_vit.dense.segments import (
    Row,
    SegmentMap,
    Size,
    Window,
    class_scores,
    describe,
    find_segments,
    fitted_size,
    segment_task,
    windows,
)
from keras_vit.model import preprocess
from keras_vit.model.classify import check_outputs
from keras_vit.model.config import ViTConfig
from keras_vit.model.resizing import interpolate, neighbours, resize_axis

if TYPE_CHECKING:
    from keras_vit.dense.config import MapConfig

Run = Callable[[np.ndarray], Any]  # from prepared images (batch, height, width, channels) to a model's outputs

MAX_PATCHES = 1 << 14  # of an image that is not resized: attention to so many takes 1 GiB for each head
_ROWS = 64  # of a map of classes that are enlarged at a time


def frame(pixels: np.ndarray, head: "MapConfig", config: ViTConfig) -> np.ndarray:
    """Resize and pad an image of 0..255 as `head.framing` says: float32 (1, height, width, channels)."""
    size = framed_size(pixels.shape[:2], head, head.size or config.size)
    if not all(size):
        raise ValueError(
            f"The image is too long and narrow: resized to {size[0]}x{size[1]}, it would have no pixels for a model of "
            f"{config.size[0]}x{config.size[1]}. Received: {pixels.shape[0]}x{pixels.shape[1]} pixels"
        )
    is_padded = head.framing in ("short", "none")
    added = [-side % head.multiple if is_padded else 0 for side in size]
    patches = math.prod(config.grid_of((size[0] + added[0], size[1] + added[1])))
    if patches > MAX_PATCHES:  # before any memory is taken
        raise ValueError(
            f"The model takes images of up to {MAX_PATCHES:,} patches, and this one would be resized to "
            f"{size[0]}x{size[1]} pixels. Received: {pixels.shape[0]}x{pixels.shape[1]} pixels, {patches:,} patches"
        )
    prepared = preprocess.prepare_pixels(
        pixels[None], image_size=size, num_channels=config.num_channels, preprocessing=config.preprocessing
    )
    if is_padded:
        around = [(count // 2, count - count // 2) for count in added]
        prepared = np.pad(prepared, ((0, 0), *around, (0, 0)))
    return prepared


def framed_size(sides: Size, head: "MapConfig", size: Size) -> Size:
    """Compute the size to which an image of these sides is resized.

    Sources: transformers' get_resize_output_image_size (models/dpt), MiDaS' Resize (depth_anything/util/transform.py).
    """
    scales = [wanted / side for wanted, side in zip(size, sides, strict=True)]
    match head.framing:
        case "none":
            return sides
        case "keep":
            scales = [min(reversed(scales), key=lambda scale: abs(1 - scale))] * 2
        case "least":
            scales = [max(scales)] * 2
        case "fit" | "windows":
            return fitted_size(sides, size[0], size[0] if head.framing == "fit" else None)
        case "short":
            scale = size[0] / min(sides)
            return (math.floor(sides[0] * scale + 0.5), math.floor(sides[1] * scale + 0.5))
    step = head.multiple
    least = size if head.framing == "least" else (0, 0)
    rounded = [max(1, round(side * scale / step)) * step for side, scale in zip(sides, scales, strict=True)]
    height, width = (
        math.ceil(side * scale / step) * step if new < smallest else new
        for new, side, scale, smallest in zip(rounded, sides, scales, least, strict=True)
    )
    return height, width


def to_image(output: np.ndarray, head: "MapConfig", size: Size) -> np.ndarray:
    """Resize a model's map to the size of its image: class numbers, uint8 or int32, or depth, float32."""
    if head.output != "depth":
        return _best_classes(output, size)
    depth = output.astype(np.float32)[..., None]
    if head.kind == "linear" or head.min_depth:
        depth = np.clip(depth, head.min_depth, head.max_depth)
    if head.result == "bicubic":
        flat = depth.reshape(1, -1, 1)
        resized = position.resize(flat, size, source_grid=depth.shape[:2], prefix_tokens=0, method="bicubic")
        return resized.reshape(size)
    corners = head.result == "bilinear-corners"
    wide = resize_axis(depth, 0, size[0], align_corners=corners)
    return resize_axis(wide, 1, size[1], align_corners=corners)[..., 0]


def _best_classes(logits: np.ndarray, size: Size) -> np.ndarray:
    """Find the best class of each pixel, a few rows at a time: logits at the image's size would fill the memory."""
    wide = resize_axis(logits.astype(np.float32), 1, size[1])
    first, share = neighbours(size[0], len(wide), align_corners=False)
    dtype = np.uint8 if logits.shape[-1] <= 256 else np.int32
    parts = [
        interpolate(wide, 0, first[start : start + _ROWS], share[start : start + _ROWS]).argmax(axis=-1).astype(dtype)
        for start in range(0, size[0], _ROWS)
    ]
    return np.concatenate(parts)


def repeat(classes: np.ndarray, size: Size) -> np.ndarray:
    """Resize a map of class numbers to the nearest cells' numbers."""
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(int) for new, old in zip(size, classes.shape, strict=True)
    )
    return classes[np.ix_(rows, columns)]


def run_windows(pixels: np.ndarray, head: "MapConfig", config: ViTConfig, run: Run) -> tuple[list[Window], Size]:
    """Run an EoMT on the squares of one image; also the size to which the image is resized before it is cut."""
    if config.size[0] != config.size[1]:
        raise ValueError(f"An EoMT finds segments in squares. Received: a model of {config.size} pixels")
    prepared = frame(pixels, head, config)[0]
    black = frame(np.zeros_like(pixels[:1, :1]), head, config)[0, 0, 0]
    parts = []
    for part in windows(prepared, config.size[0], black):
        output = run(part.pixels[None])
        for values in output.values():
            check_outputs(values)
        parts.append(part._replace(classes=output["class_logits"][0], masks=output["mask_logits"][0]))
    return parts, prepared.shape[:2]


def segment_image(
    pixels: np.ndarray,
    head: "MapConfig",
    config: ViTConfig,
    run: Run,
    *,
    names: list[str] | None,
    task: str | None,
    threshold: float,
    stuff_classes: Collection[int],
) -> SegmentMap:
    """Find the segments of one image (height, width, channels); see `DenseModel.predict_segments`."""
    chosen = segment_task(task, head.framing)
    whole: Size = pixels.shape[:2]
    parts, size = run_windows(pixels, head, config, run)
    if chosen == "semantic":
        best = to_image(class_scores(parts, size), head, whole)
        labels, numbers = np.unique(best, return_inverse=True)
        ids = numbers.reshape(whole).astype(np.int32) + 1
        rows: list[Row] = [(int(label), None) for label in labels]
    else:
        options: Any = {"task": chosen, "threshold": threshold, "stuff_classes": stuff_classes}
        ids, rows = find_segments(parts[0].classes, parts[0].masks, (config.size, size, whole), **options)
    return describe(ids, rows, names)
