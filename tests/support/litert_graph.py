"""Write and run single parts of a LiteRT graph."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit.export.litert import metadata
from keras_vit.export.litert.builder import Builder, Tensor
from keras_vit.export.litert.operators import FLOAT32, Operators, Storage
from keras_vit.export.litert.plan import FilePlan
from keras_vit.export.modes import Options, load_mode
from tiny_models import tiny

interpreter = pytest.importorskip("ai_edge_litert.interpreter")

Layers = Callable[[Operators], tuple[Tensor, Tensor]]  # names of the input and the output


def plan(**changes: Any) -> FilePlan:
    """Plan of a file with checked options."""
    options = Options(**changes)
    options.check(tiny())
    return options.plan(load_mode("none"))


def written(layers: Layers, path: Path, storage: Storage = FLOAT32) -> Any:
    """Return the interpreter of a file with these layers."""
    builder = Builder()
    image, output = layers(Operators(builder, storage))
    builder.signature({"image": image}, {"output": output})
    builder.write(path)
    return interpreter.Interpreter(str(path), num_threads=1)


def run(graph: Any, images: np.ndarray) -> np.ndarray:
    """Return the output of a file; if its batch size is open, it is that of the images."""
    (image,), (output,) = graph.get_input_details(), graph.get_output_details()
    if -1 in image["shape_signature"]:
        graph.resize_tensor_input(image["index"], images.shape, strict=True)
    graph.allocate_tensors()
    graph.set_tensor(image["index"], images)
    graph.invoke()
    return graph.get_tensor(output["index"])


def read_labels(path: str | os.PathLike[str]) -> list[str]:
    """Return the labels in a file, an empty list where it has none."""
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        return archive.read(metadata.LABELS).decode().splitlines() if metadata.LABELS in archive.namelist() else []
