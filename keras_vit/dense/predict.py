"""Maps for images of any size: frame an image for a model, and bring its map back to the image's own size."""

import math

import numpy as np

from keras_vit import position
from keras_vit.dense.config import MapConfig
from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig
from keras_vit.model.maps import neighbours

Size = tuple[int, int]  # height, width

MAX_PATCHES = 1 << 14  # of an image that is not resized: attention to so many takes 1 GiB for each head
_ROWS = 64  # of a map of classes that are enlarged at a time


def frame(pixels: np.ndarray, head: MapConfig, config: ViTConfig) -> np.ndarray:
    """Return an image of 0..255 as float32 (1, height, width, channels), resized and padded as `head.framing` says."""
    size = framed_size(pixels.shape[:2], head, head.size or config.size)
    prepared: np.ndarray = preprocess.prepare(
        pixels, image_size=size, num_channels=config.num_channels, preprocessing=config.preprocessing
    )
    if head.framing in ("short", "none"):
        added = [-side % head.multiple for side in size]
        around = [(count // 2, count - count // 2) for count in added]
        prepared = np.pad(prepared, ((0, 0), *around, (0, 0)))
    patches = math.prod(config.grid_of(prepared.shape[1:3]))
    if patches > MAX_PATCHES:
        raise ValueError(
            f"The model takes images at their own size, up to {MAX_PATCHES:,} patches: make the image smaller. "
            f"Received: {pixels.shape[0]}x{pixels.shape[1]} pixels, {patches:,} patches"
        )
    return prepared


def framed_size(sides: Size, head: MapConfig, size: Size) -> Size:
    """Return the size to which an image of these sides is resized.

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


def to_image(output: np.ndarray, head: MapConfig, size: Size) -> np.ndarray:
    """Return a model's map at the size of its image: class numbers, uint8 or int32, or depth, float32."""
    if head.output == "classes":
        return _best_classes(output, size)
    depth = output.astype(np.float32)[..., None]
    if head.kind == "linear" or head.min_depth:
        depth = np.clip(depth, head.min_depth, head.max_depth)
    if head.result == "bicubic":
        flat = depth.reshape(1, -1, 1)
        resized = position.resize(flat, size, source_grid=depth.shape[:2], prefix_tokens=0, method="bicubic")
        return resized.reshape(size)
    corners = head.result == "bilinear-corners"
    return _along(_along(depth, 0, size[0], corners), 1, size[1], corners)[..., 0]


def _best_classes(logits: np.ndarray, size: Size) -> np.ndarray:
    """Return the best class of each pixel, a few rows at a time: logits at the image's size would fill the memory."""
    wide = _along(logits.astype(np.float32), 1, size[1], False)
    first, share = neighbours(size[0], len(wide), align_corners=False)
    dtype = np.uint8 if logits.shape[-1] <= 256 else np.int32
    parts = [
        _mix(wide, 0, first[start : start + _ROWS], share[start : start + _ROWS]).argmax(axis=-1).astype(dtype)
        for start in range(0, size[0], _ROWS)
    ]
    return np.concatenate(parts)


def _along(x: np.ndarray, axis: int, new: int, align_corners: bool) -> np.ndarray:
    return _mix(x, axis, *neighbours(new, x.shape[axis], align_corners=align_corners))


def _mix(x: np.ndarray, axis: int, first: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Interpolate between the cells `first` and those that follow them along an axis."""
    weights = share.astype(np.float32).reshape(-1, *(1,) * (x.ndim - 1 - axis))
    low, high = np.take(x, first, axis), np.take(x, np.minimum(first + 1, x.shape[axis] - 1), axis)
    mixed: np.ndarray = low + (high - low) * weights
    return mixed
