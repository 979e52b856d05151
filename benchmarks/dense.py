"""Compare LiteRT files of a DPT on a ViT-S/14 at 518 pixels with those of TensorFlow's converter, and with an EoMT's.

    python benchmarks/dense.py [CHECKPOINT]

CHECKPOINT is the backbone, such as the folder of facebook/dinov2-small; without it, weights are random, as those of the
head always are. Times are medians of one image; the files take turns. "pixels" is the share of pixels whose best class
is the model's, or of an EoMT that of cells on the same side of a mask's edge, on built-in images; memory is the peak of
the export.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from edge_peers import to_tflite

import keras_vit
from keras_vit import converters, dense, export
from keras_vit._util.progress import timed
from keras_vit.export import samples
from keras_vit.export.exported import load_exported
from keras_vit.export.report import measure_resources

CLASSES, SIZE, THREADS, ROUNDS = 21, 518, 2, 5
QUERIES, QUERY_BLOCKS = 100, 3


def build(checkpoint: str | None, head: str) -> dense.DenseModel:
    """Return the segmenter, "dpt" or "eomt"; the statistics of its batch normalizations are random too."""
    if checkpoint:
        backbone = converters.load(checkpoint, image_size=SIZE)
    else:
        config = keras_vit.ViTConfig.from_name("S/14", image_size=SIZE, num_classes=0)
        backbone = keras_vit.VisionTransformer(config)
    if head == "eomt":
        last = backbone.config.num_layers - QUERY_BLOCKS - 1
        fields = {"kind": "queries", "output": "segments", "framing": "fit", "blocks": (last,)}
        fields |= {"num_queries": QUERIES, "query_blocks": QUERY_BLOCKS, "upsample": 4, "num_classes": CLASSES}
        return dense.DenseModel(backbone, dense.MapConfig(**fields))
    model = dense.segmenter(backbone, CLASSES, head="dpt")
    draw = np.random.default_rng(0)
    for variable in model.weights:
        if variable.path.endswith(("moving_mean", "beta")):
            variable.assign(draw.normal(scale=0.1, size=variable.shape))
    return model


def decide(outputs: Any) -> np.ndarray:
    """Best class of every pixel, or the cells of each mask of an EoMT."""
    arrays = list(outputs.values()) if isinstance(outputs, dict) else [outputs]
    (maps,) = (values for values in arrays if values.ndim == 4)
    return maps > 0 if len(arrays) > 1 else maps.argmax(axis=-1)


def compare(model: dense.DenseModel, head: str) -> None:
    """Write and run the files of a model, and print their rows."""
    images = samples.images(model.config, 2)
    expected = decide(model.predict_on_batch(images))
    rows: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("none", "dynamic"):
            path = Path(folder) / f"{mode}.tflite"
            options: dict[str, Any] = {"quantize": mode, "verify": images, "threads": THREADS}
            report = export.tflite(model, path, least_cosine=0, least_agreement=0, **options)
            rows[path.stem] = [report.seconds, (report.peak_bytes or 0) / 2**20, report.bytes / 2**20]
            if head == "eomt":
                continue
            path = path.with_stem(f"{mode}-converter")
            with measure_resources() as used:
                to_tflite(model, mode, path)
            rows[path.stem] = [used.seconds, (used.peak_bytes or 0) / 2**20, path.stat().st_size / 2**20]
        files = {name: load_exported(Path(folder) / f"{name}.tflite", THREADS) for name in rows}
        right = {}
        for name, file in files.items():
            right[name] = (np.concatenate([decide(file.call(image[None])) for image in images]) == expected).mean()
        times: dict[str, list[float]] = {name: [] for name in files}
        for _ in range(ROUNDS):
            for name, file in files.items():
                times[name].append(1000 * timed(file.call, images[:1])[1])
    for name, (seconds, peak, size) in rows.items():
        median = statistics.median(times[name])
        print(f"{f'{head}-{name}':25} {median:8.0f} {right[name]:9.4%} {seconds:8.1f} {peak:9.0f} {size:9.1f}")


def main() -> None:
    """Print a table of both heads."""
    warnings.simplefilter("ignore")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {THREADS} threads")
    print(f"{'file':25} {'ms':>8} {'pixels':>9} {'seconds':>8} {'MiB peak':>9} {'MiB file':>9}")
    for head in ("dpt", "eomt"):
        compare(build(sys.argv[1] if sys.argv[1:] else None, head), head)


if __name__ == "__main__":
    main()
