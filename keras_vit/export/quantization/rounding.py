"""Round the kernels of dense layers so that the layers' outputs on calibration images change least."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from keras_vit._util.progress import track
from keras_vit.export.litert.operators import RoundedDense
from keras_vit.export.litert.options import image_config
from keras_vit.export.quantization.calibration import FileGraph, check_images, observe, with_enlarged_parts
from keras_vit.export.quantization.gptq import DAMPING, gptq
from keras_vit.export.quantization.modes import Mode
from keras_vit.model.vision_transformer import VisionTransformer

NUM_SHOWN = 5  # layers
# Least weight of all tokens that the head reads, together, as a share of the number of all tokens. An error in one of
# the others reaches the head through attention alone.
FINAL_WEIGHT = 0.25


class Tokens(NamedTuple):
    """The tokens of a model; the first `final` ones are all that the last block computes, as a class token."""

    total: int
    final: int

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return those of a model; other models than a VisionTransformer may read all tokens."""
        config = image_config(model)
        is_whole = isinstance(model, VisionTransformer)
        return cls(config.num_tokens, config.num_final_tokens if is_whole else config.num_tokens)

    def weights(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the weight of each row of a layer's inputs in sums of squares, (rows, 1)."""
        weights = np.ones(shape[:-1], np.float32)
        if len(shape) == 3 and shape[1] == self.total:
            weights[:, : self.final] = max(1, FINAL_WEIGHT * self.total / self.final)
        return weights.reshape(-1, 1)


class _Sums(NamedTuple):
    """Sums over all rows x of a layer's inputs, with their weights."""

    rows: float
    sum: np.ndarray  # (inputs,)
    products: np.ndarray  # x.T @ x, (inputs, inputs)


def round_dense(
    source: str | os.PathLike[str], mode: Mode, images: Any, tokens: Tokens, *, progress: bool = False
) -> dict[str, RoundedDense]:
    """Return what replaces the weights of dense layers, by name.

    Kernels are rounded by GPTQ. The error that is left of the mean input goes to the bias.

    Args:
        source: a float32 file.
        mode: with rules for dense layers.
        images: calibration images, as the file takes them.
        tokens: of the model.
        progress: whether to show progress bars.
    """
    graph = FileGraph.read(np.memmap(source, np.uint8, "r"))
    images = check_images(graph, images, mode.name)
    dense = [operator for operator in graph.operators if operator.kind == "FULLY_CONNECTED"]
    layers = {
        layer: mode.storage_of(layer.kind, graph.name(layer)) for layer in dense if mode.rounds(graph.name(layer))
    }
    if any(storage.bits == 4 for storage in layers.values()):
        images = with_enlarged_parts(images)
    inputs = {graph.input_name(layer) for layer in layers}
    sums: dict[str, _Sums] = {}

    def update(name: str, values: np.ndarray) -> None:
        rows, weights = values.reshape(-1, values.shape[-1]), tokens.weights(values.shape)
        known, weighted = sums.get(name, _Sums(0, *np.zeros((2, 1), np.float32))), weights * rows
        count = known.rows + float(weights.sum())
        sums[name] = _Sums(count, known.sum + weighted.sum(axis=0), known.products + rows.T @ weighted)

    observe(source, graph, images, update, names=inputs, progress=progress)
    result = {}
    for layer, storage in track(layers.items(), "Rounding", show=progress):
        rows, total, products = sums[graph.input_name(layer)]
        mean = total / rows
        kernel, bias = graph.kernel(layer), graph.bias(layer)
        # Of fewer rows than inputs, as in a last block of one token, the products are known for these images alone: the
        # rounding would fit them, and no others.
        rounded = gptq(kernel, products, storage, damping=max(DAMPING, len(mean) / rows))
        error = kernel - rounded.floats()
        power, lost = (float(np.sum(one @ products * one)) for one in (kernel, error))
        noise = lost / power if power > 0 and rows >= len(mean) else 0.0
        result[graph.name(layer)] = RoundedDense(rounded, bias + error @ mean, noise)
    return result


def rounding_lines(rounded: Mapping[str, RoundedDense]) -> tuple[str, ...]:
    """Return lines of a report that name the layers whose outputs changed most."""
    worst = sorted(rounded, key=lambda name: rounded[name].noise, reverse=True)[:NUM_SHOWN]
    shown = [f"{name} {-10 * np.log10(rounded[name].noise):.0f} dB" for name in worst if rounded[name].noise > 0]
    return (f"least SQNR of outputs by rounded kernels: {', '.join(shown)}",) if shown else ()
