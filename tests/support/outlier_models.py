"""Models with the outliers that trained Vision Transformers have, and the score of a file on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_vit.model import preprocess
from keras_vit.model.config import ViTConfig
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


def standardise(model: VisionTransformer, random: np.random.Generator) -> VisionTransformer:
    """Give a model random weights under which the variance of activations stays near 1."""
    for variable in model.weights:
        shape = tuple(variable.shape)
        value = random.normal(size=shape)
        if variable.name == "gamma":
            value = 1 + 0.1 * value
        elif variable.name == "kernel":
            has_many_outputs = len(shape) == 3 and "/out/" not in variable.path  # query, key, value
            value /= np.sqrt(np.prod(shape) / (shape[1] * shape[2] if has_many_outputs else shape[-1]))
        elif len(shape) < 2 or variable.name == "bias" or "position" in variable.path:
            value *= 0.02
        variable.assign(value)
    return model


def plant(
    model: VisionTransformer, seed: int = 0, *, channel: float = 0, token: float = 0, gain: float = 1, block: int = 0
) -> VisionTransformer:
    """Give a model random weights with outliers.

    Args:
        model: any with learned positions and a head.
        seed: of the weights, and of the places of the outliers.
        channel: size of two channels of the residual stream in every token, one positive and one negative. The gains
            of the norms that read them are as much smaller.
        token: size of one channel of one token.
        gain: of four channels of each norm, where the others have one near 1.
        block: number of the block that writes the large channels; -1 is the position embedding.
    """
    random = np.random.default_rng(seed)
    standardise(model, random)
    positive, negative, huge, *gains = random.permutation(model.config.hidden_size)[:7]
    _add(model.get_layer("position").embedding, (0, random.integers(1, model.config.num_tokens), huge), token)
    first = model.get_layer("position").embedding if block < 0 else model.get_layer(f"block_{block}").mlp.dense2.bias
    _add(first, (..., positive), channel)
    _add(first, (..., negative), -channel)
    blocks = [model.get_layer(f"block_{number}") for number in range(model.config.num_layers)]
    norms = [norm for layer in blocks for norm in (layer.norm1, layer.norm2)] + [model.get_layer("encoder_norm")]
    for number, norm in enumerate(norms):
        values = np.array(norm.gamma)
        values[gains] *= gain
        if channel and number > 2 * block + 1:
            values[[positive, negative]] = 1 / channel
        norm.gamma.assign(values)
    return model


def _add(variable: Any, place: Any, value: float) -> None:
    values = np.array(variable)
    values[place] += value
    variable.assign(values)


def images(config: ViTConfig, count: int, seed: int = 5) -> np.ndarray:
    """Return squares of random colours under noise, unlike the images on which an export looks for outliers."""
    random = np.random.default_rng(seed)
    (height, width), channels = config.size, config.num_channels
    pictures = []
    for number in range(count):
        cells = 4 + number % 5
        coarse = random.uniform(size=(cells, cells, channels))
        rows, columns = (np.arange(side) * cells // side for side in (height, width))
        share = random.uniform(0.05, 0.5)
        noise = random.uniform(size=(height, width, channels))
        pictures.append((1 - share) * coarse[rows][:, columns] + share * noise)
    pixels = np.rint(255 * np.array(pictures)).astype(np.float32)
    return np.asarray(preprocess.normalize(pixels, config.preprocessing))


def pair_cosines(expected: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Return the cosine between differences of two images' outputs for every pair: what all share does not count."""
    first, second = np.triu_indices(len(expected), 1)
    x, y = (values.astype(np.float64)[first] - values[second] for values in (expected, received))
    return (x * y).sum(-1) / (np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1))


def score(expected: np.ndarray, received: np.ndarray) -> float:
    """Return the mean of `pair_cosines`."""
    return float(pair_cosines(expected, received).mean())
