"""Compare the exported `dynamic` files of further families with ViT-B/16's: milliseconds, megabytes, cosine.

    python benchmarks/families.py --out benchmarks/results/families.txt      B sizes, ten minutes on two cores
    python benchmarks/families.py --models DINOv3-B/16 Mixer-B/16            some models

Weights are random. The figure beside the time is the mean cosine of the differences of two images' outputs, the file's
against Keras' in float32. `ratio` is the time over the first model's. Files are timed in one process, in a new random
order in each round; `ms` is the median.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import keras_vit
from keras_vit import VisionTransformer, ViTConfig
from keras_vit.export import samples
from keras_vit.model.cost import count

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from outlier_models import images, score, standardise

_DINO: dict[str, Any] = {"activation": "gelu_erf", "num_classes": 0, "layer_scale": 1.0}
_CLIP = {"pre_norm": True, "patch_bias": False, "activation": "gelu_quick", "norm_epsilon": 1e-5, "num_classes": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # name: architecture, what is different; all for images of 224 pixels
    "ViT-B/16": ("B/16", {}),
    "DINOv2-B/14": ("B/14", _DINO),
    "SigLIP-B/16": ("B/16", {"classifier": "map", "num_classes": 0}),
    "CLIP-B/16": ("B/16", _CLIP),
    "DINOv3-B/16": (
        "B/16",
        {
            **_DINO,
            "position": "none",
            "rotary_theta": 100.0,
            "num_registers": 4,
            "key_bias": False,
            "norm_epsilon": 1e-5,
        },
    ),
    "Mixer-B/16": ("Mixer-B/16", {}),
    "BiT-R50x1": ("BiT-R50x1", {}),
}
THREADS, SHOWN = 2, 8


def main() -> None:
    """Write a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="a file for the table as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: exported(name, Path(folder) / f"{index}.tflite") for index, name in enumerate(options.models)}
        times = timed({name: run for name, (_, run) in rows.items()}, options.rounds)
    lines = [f"dynamic, one image a call, {THREADS} threads, {options.rounds} rounds in one process; random weights"]
    lines.append(f"{'model':14}{'parameters':>13}{'GFLOP':>8}{'ms':>9}{'ratio':>9}{'MB':>8}{'cosine':>9}")
    for name, (text, _) in rows.items():
        parameters, flops, megabytes, cosine = text
        median, first = np.median(times[name]), np.median(times[options.models[0]])
        lines.append(
            f"{name:14}{parameters:13,}{flops:8.1f}{median:9.2f}{median / first:9.2f}{megabytes:8.1f}{cosine:9.4f}"
        )
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", "utf-8")


def exported(name: str, path: Path) -> tuple[tuple[Any, ...], Any]:
    """Export a model; return its figures, and a function that runs the file once."""
    from ai_edge_litert.interpreter import Interpreter

    architecture, changes = MODELS[name]
    config = ViTConfig.from_name(architecture, **{"image_size": 224, **changes})
    model = standardise(VisionTransformer(config), np.random.default_rng(0))
    shown = np.concatenate([samples.images(config, 8)[4:], images(config, SHOWN - 4)])
    report = keras_vit.export.tflite(model, path, verify=shown[:1], least_cosine=-1, least_agreement=0)
    cosine = score(model.predict_on_batch(shown), keras_vit.export.runner(path)(shown))
    interpreter = Interpreter(str(path), num_threads=THREADS)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], shown[:1])
    figures = (model.count_params(), count(config).flops / 1e9, report.bytes / 1e6, cosine)
    return figures, interpreter.invoke


def timed(runs: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of every call."""
    random, times = np.random.default_rng(0), {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.permutation(list(runs)).tolist():
            start = time.perf_counter()
            runs[name]()
            times[name].append(1000 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    main()
