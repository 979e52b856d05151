"""Write the maps and pictures of `keras-vit predict` for a model of maps, and summarise each image."""

import colorsys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.text import abbreviated

GOLDEN = 0.618  # share of the circle between the hues of two classes: neighbours are never alike
COLOUR = 0.5  # its share in an overlay
MOST_METRES = 65  # that 16 bits hold in millimetres; farther models get 256 values per metre, as KITTI
# Colours from the least to the largest distance: the near is warm.
NEAR_TO_FAR = ((255, 240, 150), (250, 150, 60), (190, 50, 100), (80, 20, 120), (10, 10, 60))


def map_each(model: Any, files: list[str], *, to: Path | None, top: int) -> Iterator[Any]:
    """Yield the decoded map of each image, or why it cannot be read; write maps and pictures of them into `to`."""
    from keras_vit.model.classify import IMAGE_ERRORS

    names = [Path(file).stem for file in files]
    if to is not None:
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"--to needs images of different names. Received several: {abbreviated(repeated)}")
        to.mkdir(parents=True, exist_ok=True)
    for file, name in zip(files, names, strict=True):
        try:
            yield _write(model, file, to and to / name, top)
        except IMAGE_ERRORS as error:
            yield error


def _write(model: Any, file: str, path: Path | None, top: int) -> Any:
    from keras_vit.model import preprocess

    pixels = preprocess.decode(file)
    [found] = model.predict_maps(pixels)
    if found.dtype.kind == "f":
        scale = _depth_scale(model.task.max_depth, found)
        values, kind = np.rint(found * scale).clip(0, 65535).astype(np.uint16), "coloured"
        picture = _depth_colours(found)
        result = {**model.task.decode(found[None], top)[0], "values_per_unit": scale}
    else:
        values, kind = found.astype(np.uint8), "overlay"
        hues = (number * GOLDEN % 1 for number in range(model.task.num_classes))
        colours = 255 * np.array([colorsys.hsv_to_rgb(hue, 0.7, 0.95) for hue in hues])
        picture = (COLOUR * colours[found] + (1 - COLOUR) * pixels).astype(np.uint8)
        result = model.task.shares(found[None], top)[0]
    if path is not None:
        write_png(path.with_name(f"{path.name}.png"), values[..., None])
        write_png(path.with_name(f"{path.name}-{kind}.png"), picture)
    return result


def _depth_scale(max_depth: float | None, found: np.ndarray) -> float:
    """Return the values per metre of a PNG file; of a relative map, those per unit that use all 16 bits."""
    if max_depth is None:
        return 65535 / max(float(found.max()), 1e-6)
    return 1000.0 if max_depth <= MOST_METRES else 256.0


def _depth_colours(found: np.ndarray) -> np.ndarray:
    """Return a picture of a map of depth in colours, from its least to its largest value."""
    shares = (found - found.min()) / max(float(np.ptp(found)), 1e-6)
    places = np.linspace(0, 1, len(NEAR_TO_FAR))
    channels = [np.interp(shares, places, channel) for channel in zip(*NEAR_TO_FAR, strict=True)]
    return np.stack(channels, axis=-1).astype(np.uint8)


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 or uint16 (height, width, channels) as a PNG file, complete or not at all."""
    import tensorflow as tf

    from keras_vit._util.atomic import replacing

    with replacing(path) as file:
        file.write(tf.io.encode_png(pixels).numpy())
