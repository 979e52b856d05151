"""Scale the values of pictures that are not bytes to pixels, 0 to 255, and refuse those whose range is not known.

Bytes state their range. Values of 16 bits in a file may have fewer (CT, X-ray: 10, 12 or 14 bits), and floats may have
any range: `Preprocessing.bits` or `Preprocessing.range` states it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_vit.model.config import Preprocessing

# Values of 16 bits that are all below this one use 14 bits or fewer, as cameras and scanners have them.
CLEAR = 1 << 14
WHERE = "in zoo.load, model.config.replace or a recipe's config"
HOW = f'preprocessing={{"bits": 12}} or {{"range": [black, white]}} {WHERE}'


def requirements(least: Any, most: Any, preprocessing: Preprocessing) -> Iterator[tuple[Any, str, Any]]:
    """List conditions of scaling values that are not bytes: whether it holds, the message if not, and a value for it.

    `least` and `most` are the extremes of a picture, NumPy's or TensorFlow's. Without `bits` and `range`, they are of
    a file of 16 bits.
    """
    limits = preprocessing.limits
    if limits is None:
        yield (
            (most == 0) | (most >= CLEAR),
            "has 16 bits and small values: it is dark, or has 10, 12 or 14 bits (CT, X-ray), and the file does not say "
            f'which. State preprocessing={{"bits": 12}}, or 16 for dark pictures, {WHERE}. Received: values up to',
            most,
        )
    elif preprocessing.bits is not None:
        stated = f"has values outside of 0 to {limits[1]:.0f}, which the model's bits={preprocessing.bits} state. "
        yield least >= 0, f"{stated}Received: values from", least
        yield most <= limits[1], f"{stated}Received: values up to", most
    else:
        stated = f"has no value in the model's range={limits}, and would be black or white. "
        yield most >= min(limits), f"{stated}Received: values up to", most
        yield least <= max(limits), f"{stated}Received: values from", least


def check_values(values: np.ndarray, preprocessing: Preprocessing) -> None:
    """Raise a ValueError, which begins with a verb, for values that are not bytes and cannot be scaled."""
    least, most = values.min(), values.max()
    if not (np.isfinite(least) and np.isfinite(most)):
        raise ValueError(f"has values that are not finite. Received: values from {least} to {most}")
    for holds, message, value in requirements(least, most, preprocessing):
        if not holds:
            raise ValueError(f"{message} {value:g}" if values.dtype.kind == "f" else f"{message} {value}")


def scale(values: Any, preprocessing: Preprocessing, clip: Callable[..., Any] = np.clip) -> Any:
    """Scale float32 values to pixels from 0 to 255, by the limits that are stated. `clip` may be TensorFlow's."""
    black, white = preprocessing.limits or (0, 255)
    return clip((values - np.float32(black)) * np.float32(255 / (white - black)), 0, 255)


def deep_pixels(values: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
    """Convert uint16 values of a file to pixels: uint8, the high bytes, or scaled float32 where limits are stated."""
    check_values(values, preprocessing)
    if preprocessing.limits is None:
        return (values >> 8).astype(np.uint8)
    scaled: np.ndarray = scale(values.astype(np.float32), preprocessing)
    return scaled
