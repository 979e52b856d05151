"""Models with the outliers that trained Vision Transformers have, and the score of a file on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_vit.export.check import samples
from keras_vit.model.vision_transformer import VisionTransformer

# Kind: residual channels near +-this in every token, a token with one such channel, and the gain of four channels.
KINDS: dict[str, dict[str, float]] = {
    "none": {},
    "channel 60": {"channel": 60},
    "channel 250": {"channel": 250},
    "gain 8": {"gain": 8},
    "token 300": {"token": 300},
    "both 120": {"channel": 120, "gain": 6},
}


def plant(
    model: VisionTransformer, seed: int = 0, *, channel: float = 0, token: float = 0, gain: float = 1
) -> VisionTransformer:
    """Give a model random weights with outliers.

    Args:
        model: any with learned positions.
        seed: of the weights, and of the places of the outliers.
        channel: size of two channels of the residual stream in every token, one positive and one negative. The gains
            of the norms that read them are as much smaller.
        token: size of one channel of one token.
        gain: of four channels of each norm, where the others have one near 1.
    """
    random = np.random.default_rng(seed)
    for variable in model.weights:
        shape = tuple(variable.shape)
        if variable.name == "gamma":
            value = 1 + 0.1 * random.normal(size=shape)
        elif len(shape) < 2 or variable.name == "bias":
            value = 0.02 * random.normal(size=shape)
        elif variable.path.endswith("/kernel"):
            outputs = shape[-1] if "/out/" in variable.path or len(shape) != 3 else shape[1] * shape[2]
            value = random.normal(size=shape) / np.sqrt(np.prod(shape) / outputs)
        else:
            value = 0.02 * random.normal(size=shape) if "position" in variable.path else random.normal(size=shape)
        variable.assign(value)
    width = model.config.hidden_size
    positive, negative, huge, *gains = random.permutation(width)[:7]
    table = np.array(model.get_layer("position").embedding)
    table[..., positive] += channel
    table[..., negative] -= channel
    table[:, random.integers(1, table.shape[1]), huge] += token
    model.get_layer("position").embedding.assign(table)
    blocks = [model.get_layer(f"block_{number}") for number in range(model.config.num_layers)]
    for norm in [*(norm for block in blocks for norm in (block.norm1, block.norm2)), model.get_layer("encoder_norm")]:
        values = np.array(norm.gamma)
        values[gains] *= gain
        if channel:
            values[[positive, negative]] /= channel
        norm.gamma.assign(values)
    return model


def images(config: Any, count: int, seed: int = 5) -> np.ndarray:
    """Return images between smooth patterns and noise, unlike those that an export measures itself."""
    random = np.random.default_rng(seed)
    (height, width), channels = config.size, config.num_channels
    pictures = []
    for number in range(count):
        cells = 4 + number % 5
        coarse = random.uniform(size=(cells, cells, channels))
        rows, columns = (np.arange(side) * cells // side for side in (height, width))
        detail = random.uniform(size=(height, width, channels))
        share = random.uniform(0.05, 0.5)
        pictures.append((1 - share) * coarse[rows][:, columns] + share * detail)
    return samples.normalize(np.rint(255 * np.array(pictures)), config.preprocessing)


def score(expected: np.ndarray, received: np.ndarray) -> float:
    """Return the mean cosine between differences of two images' logits: what all images share does not count."""
    first, second = np.triu_indices(len(expected), 1)
    x, y = (values.astype(np.float64)[first] - values[second] for values in (expected, received))
    return float(np.mean((x * y).sum(-1) / (np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1))))
