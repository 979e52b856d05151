"""Measure every quantization mode on a trained DINOv2-S/14 and crops of real photos.

    python benchmarks/real_weights.py                      every mode, and TensorFlow's converter
    python benchmarks/real_weights.py dynamic int4         some
    python benchmarks/real_weights.py --size 518           at another resolution; 112 with --head
    python benchmarks/real_weights.py --head               with a head of four classes
    python benchmarks/real_weights.py --drawings FOLDER    accuracy on the pictures of few_photos.py, with --size 112
    python benchmarks/real_weights.py --peers PYTHON       OpenVINO and ONNX Runtime, in an environment with openvino,
                                                           nncf, onnx and onnxruntime

The cosines are those of the differences between the features of two images, file against Keras in float32: mean (least)
over all pairs of 36 crops, of two sets. Calibration images are 32 crops of other parts of the photos, or as many as
`--calibration` says. All files are timed alternately in one process, those of the peers in another, right after.
Weights and photos come with packages of `make test-real`.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import few_photos
import numpy as np
from edge_peers import to_tflite

import keras_vit
from keras_vit import train
from keras_vit._util.progress import timed
from keras_vit.export import modes
from keras_vit.export.exported import load_exported

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import dinov2_photos
from outlier_models import pair_cosines

CONVERTER = "converter"  # TensorFlow's, in the mode dynamic
CALIBRATED = "dynamic, images"  # the mode dynamic with calibration images
MODES = ("none", "float16", "dynamic", CALIBRATED, CONVERTER, "int4", "int8", "int16x8")
SEEDS = (1, 2)  # of the two sets
COUNT = 36  # crops of a set
SLOW = 1000  # milliseconds, of files that are timed once
PEERS = Path(__file__).with_name("real_weights_peers.py")


def main() -> None:
    """Print a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", default=MODES)
    parser.add_argument("--size", type=int, default=dinov2_photos.SIZE)
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--peers")
    parser.add_argument("--calibration", type=int, default=32, help="crops to calibrate on")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--drawings", type=Path, help="pictures that few_photos.py --render wrote")
    options = parser.parse_args()
    if options.drawings:
        on_drawings(options.drawings, options.modes, options.size)
        return
    draw = {"size": options.size, **({"photos": dinov2_photos.CLASSES} if options.head else {})}
    model = (dinov2_photos.with_head if options.head else dinov2_photos.load)(options.size)
    sets = [dinov2_photos.prepared(dinov2_photos.crops(COUNT, seed, **draw)) for seed in SEEDS]
    images = dinov2_photos.prepared(dinov2_photos.crops(options.calibration, 0, calibration=True, **draw))
    expected = [model.predict(shown, verbose=0) for shown in sets]
    print(f"{'':24}{'set 1':>17}{'set 2':>17}{'agree':>8}{'MB':>8}{'ms':>9}{'export s':>10}  own gate")
    with tempfile.TemporaryDirectory() as folder:
        rows = {mode: exported(model, mode, images, sets, Path(folder)) for mode in options.modes}
        times = timings([Path(folder) / f"{mode}.tflite" for mode in options.modes], sets[0][:1], options.rounds)
        for (mode, (received, seconds, gate)), time in zip(rows.items(), times, strict=True):
            size = (Path(folder) / f"{mode}.tflite").stat().st_size / 1e6
            print(row(mode, expected, received), f"{size:7.1f}{time:9.1f}{seconds:10.1f}  {gate}", flush=True)
        if options.peers:
            np.savez(Path(folder) / "images.npz", calibration=images, **{f"set{n}": x for n, x in enumerate(sets)})
            command = [options.peers, str(PEERS), str(dinov2_photos.folder() / "tokens.onnx"), folder]
            subprocess.run(command, check=True, capture_output=True, text=True)
            for path in sorted(Path(folder).glob("*.peer.npz")):
                found = np.load(path)
                received = [found[f"set{n}"] for n in range(len(sets))]
                print(
                    row(path.name.removesuffix(".peer.npz"), expected, received), f"{'':7}{found['milliseconds']:9.1f}"
                )


def on_drawings(drawings: Path, chosen: list[str], size: int) -> None:
    """Print the accuracy of each file on pictures of the style of the head's training, and of another one."""
    colour, black = few_photos.drawings(drawings)
    shown, judged = few_photos.drawn(colour, few_photos.HELD_OUT["drawings"], count=20, seed=0)
    some = np.random.default_rng(0).permutation(len(black[1]))[: few_photos.JUDGED]
    recipe = train.recipe("linear-probe", layers=8, image_size=size)
    model = train.run(recipe, model=dinov2_photos.folder(), data={"train": shown}, progress=False).model
    pictures, labels = zip(judged, (black[0][some], black[1][some]), strict=True)
    sets = [model.preprocess(images) for images in pictures]
    images, expected = model.preprocess(shown[0][::12]), [model.predict(part, verbose=0) for part in sets]
    print(f"{len(images)} calibration images; {' and '.join(str(len(each)) for each in labels)} pictures")
    print(f"{'':24}{'same style':>12}{'another':>9}{'same class':>12}{'MB':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for mode in chosen:
            received, _, _ = exported(model, mode, images, sets, Path(folder))
            found = [np.mean(got.argmax(-1) == known) for got, known in zip(received, labels, strict=True)]
            same = np.mean(np.concatenate(received).argmax(-1) == np.concatenate(expected).argmax(-1))
            megabytes = (Path(folder) / f"{mode}.tflite").stat().st_size / 1e6
            print(f"{mode:24}{found[0]:12.1%}{found[1]:9.1%}{same:12.1%}{megabytes:7.1f}", flush=True)


def exported(
    model: Any, mode: str, images: np.ndarray, sets: list[np.ndarray], folder: Path
) -> tuple[list[np.ndarray], float, str]:
    """Write a file; return what it computes for the sets, the seconds of the export and whether its gate accepts it."""
    given: dict[str, Any] = {"quantize": mode, "verify": sets[0]}
    if mode == CONVERTER:
        given.update(quantize="dynamic")
    elif mode == CALIBRATED:
        given.update(quantize="dynamic", calibration=images)
    elif modes.load_mode(mode).needs_calibration:
        given["calibration"] = images
    path = folder / f"{mode}.tflite"
    if mode == CONVERTER:
        _, seconds = timed(to_tflite, model, "dynamic", path)
    else:
        report = keras_vit.export.tflite(model, path, least_cosine=-1, least_agreement=0, **given)
        seconds = report.seconds or 0.0
        for line in report.rounding:
            print(f"# {mode}: {line}", file=sys.stderr, flush=True)
    try:
        keras_vit.export.verify(model, path, sets[0], mode=given["quantize"])
        gate = "accepts"
    except keras_vit.export.VerificationError as error:
        gate = str(error).partition(": ")[2].partition(". ")[0]
    run = keras_vit.export.runner(path)
    return [run(shown) for shown in sets], seconds, gate


def row(label: str, expected: list[np.ndarray], received: list[np.ndarray]) -> str:
    """Return the cosines of a file and the share of images with the same largest output."""
    cosines = (pair_cosines(want, got) for want, got in zip(expected, received, strict=True))
    agree = np.mean([want.argmax(-1) == got.argmax(-1) for want, got in zip(expected, received, strict=True)])
    return f"{label:24}" + "".join(f"{one.mean():9.5f} ({one.min():5.3f})" for one in cosines) + f"{agree:8.1%}"


def timings(paths: list[Path], image: np.ndarray, rounds: int) -> list[float]:
    """Return the median milliseconds of each file, which run by turns in a new order in each round."""
    files = [load_exported(path) for path in paths]
    random = np.random.default_rng(0)
    times: list[list[float]] = [[] for _ in files]
    for _ in range(rounds):
        for number in random.permutation(len(files)):
            if not times[number] or times[number][0] < SLOW:
                files[number].call(image)  # not timed: the caches hold the data of another file
                times[number].append(1000 * timed(files[number].call, image)[1])
    return [statistics.median(one) for one in times]


if __name__ == "__main__":
    main()
