"""Round the kernels of dense layers so that the layers' outputs on calibration images change least."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_vit._util.progress import track
from keras_vit.export.litert.operators import RoundedDense
from keras_vit.export.quantization.calibration import FileGraph, check_images, observe
from keras_vit.export.quantization.gptq import DAMPING, gptq
from keras_vit.export.quantization.modes import Mode

NUM_SHOWN = 5  # layers


class _Sums(NamedTuple):
    """Sums over all rows x of a layer's inputs."""

    rows: int
    sum: np.ndarray  # (inputs,)
    products: np.ndarray  # x.T @ x, (inputs, inputs)


def round_dense(
    source: str | os.PathLike[str], mode: Mode, images: Any, *, progress: bool = False
) -> dict[str, RoundedDense]:
    """Return what replaces the weights of dense layers, by name.

    Kernels are rounded by GPTQ. The error that is left of the mean input goes to the bias.

    Args:
        source: a float32 file.
        mode: with rules for dense layers.
        images: calibration images, as the file takes them.
        progress: whether to show progress bars.
    """
    graph = FileGraph.read(np.memmap(source, np.uint8, "r"))
    images = check_images(graph, images, mode.name)
    dense = [operator for operator in graph.operators if operator.kind == "FULLY_CONNECTED"]
    layers = {
        layer: mode.storage_of(layer.kind, graph.name(layer)) for layer in dense if mode.rounds(graph.name(layer))
    }
    inputs = {graph.input_name(layer) for layer in layers}
    sums: dict[str, _Sums] = {}

    def update(name: str, values: np.ndarray) -> None:
        rows = values.reshape(-1, values.shape[-1])
        known = sums.get(name, _Sums(0, *np.zeros((2, 1), np.float32)))
        sums[name] = _Sums(known.rows + len(rows), known.sum + rows.sum(axis=0), known.products + rows.T @ rows)

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


def lines(rounded: Mapping[str, RoundedDense]) -> tuple[str, ...]:
    """Return lines of a report that name the layers whose outputs changed most."""
    worst = sorted(rounded, key=lambda name: rounded[name].noise, reverse=True)[:NUM_SHOWN]
    shown = [f"{name} {-10 * np.log10(rounded[name].noise):.0f} dB" for name in worst if rounded[name].noise > 0]
    return (f"least SQNR of outputs by rounded kernels: {', '.join(shown)}",) if shown else ()
