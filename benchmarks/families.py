"""Compare the exported files of further families with ViT-B/16's: milliseconds, megabytes, cosine.

    python benchmarks/families.py --out benchmarks/results/families.txt      B sizes, ten minutes on two cores
    python benchmarks/families.py --models ViT-B/16 BEiT-B/16 PE-Core-B/16 RADIO-B/16 RoPEViT-S/16 \
        --modes none dynamic int8 --out benchmarks/results/families_modes.txt
    python benchmarks/families.py --gpu --rounds 1 ...     on a GPU as well; accelerators.py has one in software

Models are those of the zoo, with the options of their cards, at 224 pixels and with random weights. The figure beside
the time is the mean cosine of the differences of two images' outputs, the file's against Keras' in float32. `ratio` is
the time over the first model's in the same mode, `gpu` the cosine there and the operators it takes, of how many. Files
are timed in one process, in a new random order in each round; `ms` is the median.
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import keras_vit
from keras_vit import VisionTransformer, zoo
from keras_vit.export import modes, samples
from keras_vit.export.accelerators import run_on_gpu
from keras_vit.model.cost import count

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from outlier_models import images, score, standardise

MODELS = ("ViT-B/16", "DINOv2-B/14", "SigLIP-B/16", "CLIP-B/16", "DINOv3-B/16", "Mixer-B/16", "BiT-R50x1")
THREADS, SHOWN, CALIBRATION = 2, 8, 8
ON_GPU = 3  # images; software takes seconds for one


def main() -> None:
    """Write a row for each model and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=["dynamic"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--gpu", action="store_true", help="run each file on a GPU too")
    parser.add_argument("--layers", type=int, help="blocks of each model, fewer for a GPU in software")
    parser.add_argument("--out", type=Path, help="a file for the table as well")
    options = parser.parse_args()
    rows: dict[tuple[str, str], tuple[Any, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            rows |= exported(name, options, Path(folder))
        times = timed({key: row[-1] for key, row in rows.items()}, options.rounds)
    lines = [f"one image a call, {THREADS} threads, {options.rounds} rounds in one process; random weights"]
    head = f"{'model':14}{'mode':9}{'parameters':>13}{'GFLOP':>8}{'ms':>9}{'ratio':>9}{'MB':>8}{'cosine':>9}"
    lines.append(head + "  gpu" * options.gpu)
    for mode, name in itertools.product(options.modes, options.models):
        parameters, flops, megabytes, cosine, on_gpu, _ = rows[name, mode]
        median, first = np.median(times[name, mode]), np.median(times[options.models[0], mode])
        lines.append(
            f"{name:14}{mode:9}{parameters:13,}{flops:8.1f}{median:9.2f}"
            f"{median / first:9.2f}{megabytes:8.1f}{cosine:9.4f}{on_gpu}"
        )
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", "utf-8")


def exported(name: str, options: argparse.Namespace, folder: Path) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Export a model in each mode; return its figures and a function that runs the file once, by (name, mode)."""
    from ai_edge_litert.interpreter import Interpreter

    config = zoo.load(name, weights=None, image_size=224).config
    config = config.replace(num_layers=options.layers or config.num_layers)
    model = standardise(VisionTransformer(config), np.random.default_rng(0))
    shown = np.concatenate([samples.images(config, 8)[4:], images(config, SHOWN - 4)])
    wanted, figures = model.predict_on_batch(shown), (model.count_params(), count(config).flops / 1e9)
    found: dict[tuple[str, str], tuple[Any, ...]] = {}
    for mode in options.modes:
        path = folder / f"{name.replace('/', '-')}-{mode}.tflite"
        given = {"calibration": images(config, CALIBRATION)} if modes.load_mode(mode).needs_calibration else {}
        report = keras_vit.export.tflite(
            model, path, quantize=mode, verify=shown[:1], least_cosine=-1, least_agreement=0, **given
        )
        interpreter = Interpreter(str(path), num_threads=THREADS)
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], shown[:1])
        cosine = score(wanted, keras_vit.export.runner(path)(shown))
        on_gpu = measured_on_gpu(path, shown, wanted) if options.gpu else ""
        found[name, mode] = (*figures, report.bytes / 1e6, cosine, on_gpu, interpreter.invoke)
    return found


def measured_on_gpu(path: Path, shown: np.ndarray, wanted: np.ndarray) -> str:
    """Return the cell of a file: cosine, and operators taken."""
    run, accelerated = run_on_gpu(path, shown[:ON_GPU])
    [outputs] = run.outputs.values()
    return f"  {score(wanted[:ON_GPU], outputs):.4f} {accelerated.taken}/{accelerated.of}"


def timed(runs: dict[tuple[str, str], Any], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return the milliseconds of every call."""
    random, times = np.random.default_rng(0), {key: [] for key in runs}
    for _ in range(rounds):
        for key in random.permutation(list(runs)).tolist():
            start = time.perf_counter()
            runs[tuple(key)]()
            times[tuple(key)].append(1000 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    main()
