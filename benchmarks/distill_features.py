"""Teach ViT-Ti/16 at 112 px the features of a trained DINOv2-S/14 at 224 px, from a few photos without labels.

    python benchmarks/distill_features.py WEIGHTS PHOTOS [--minutes 20] [--rounds 15] [--out FOLDER]

WEIGHTS is a folder with the weights of DINOv2-S/14. PHOTOS has the folders `train` and `test` of image files. The
student learns from crops of the first. It is judged before and after, beside our LiteRT files of the teacher, on other
crops of the first and on crops of the second, by the cosine of the differences of two crops' features with the
teacher's, and by how often the nearest of all other crops is of the same photo. A student's features come through a
linear map that is fitted to the teacher's on crops of `train`. Milliseconds are medians of interleaved rounds of LiteRT
on two threads.
"""

import argparse
import datetime
import itertools
import os
import platform
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import LeaveOneGroupOut

from keras_vit import ViTConfig, converters, export, train
from keras_vit.model.vision_transformer import VisionTransformer

STUDENT = ViTConfig.from_name("Ti/16", image_size=112, num_classes=0)
CROPS = 24  # of each photo
PENALTIES = np.logspace(-6, 1, 8)  # of linear maps, as shares of the power of the features


def crops(folder: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return square crops, of 0.4 to all of the shorter side, uint8 (n, 256, 256, 3), and their photos' numbers."""
    random = np.random.default_rng(seed)
    images, photos = [], []
    for number, path in enumerate(sorted(folder.iterdir())):
        with Image.open(path) as photo:
            for _ in range(CROPS):
                side = int(random.uniform(0.4, 1) * min(photo.size))
                left, top = (int(random.integers(0, length - side + 1)) for length in photo.size)
                box = (left, top, left + side, top + side)
                images.append(np.asarray(photo.convert("RGB").resize((256, 256), Image.Resampling.BICUBIC, box)))
                photos.append(number)
    return np.stack(images), np.array(photos)


def features(model: VisionTransformer, images: np.ndarray) -> np.ndarray:
    """Return the model's features of images."""
    return model.predict(model.preprocess(images), batch_size=24, verbose=0)


def judge(found: np.ndarray, expected: np.ndarray, photos: np.ndarray) -> tuple[float, float]:
    """Return the mean cosine of differences of all pairs, and the share of crops whose nearest is of the same photo."""
    first, second = np.triu_indices(len(found), 1)
    ours, theirs = found[first] - found[second], expected[first] - expected[second]
    cosines = (ours * theirs).sum(-1) / (np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1))
    unit = found / np.linalg.norm(found, axis=-1, keepdims=True)
    similarity = unit @ unit.T - 2 * np.eye(len(unit))
    return float(cosines.mean()), float((photos[similarity.argmax(-1)] == photos).mean())


def mapped(fit: np.ndarray, target: np.ndarray, photos: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Map features linearly to the teacher's: ridge regression on the training photos.

    The penalty is the one that is best for photos left out: with the crops of ten photos a small one fits these alone.
    """
    penalties = PENALTIES * np.square(fit - fit.mean(0)).sum()
    left_out = LeaveOneGroupOut().split(fit, groups=photos)
    ridge = RidgeCV(penalties, scoring="neg_mean_squared_error", cv=left_out)
    return ridge.fit(fit, target).predict(found)


def milliseconds(files: dict[str, Path], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each file, in interleaved rounds."""
    from ai_edge_litert.interpreter import Interpreter

    times: dict[str, list[float]] = {name: [] for name in files}
    runners = {name: Interpreter(str(path), num_threads=2) for name, path in files.items()}
    for runner in runners.values():
        runner.allocate_tensors()
    for number in range(rounds + 1):
        for name, runner in runners.items():
            start = time.perf_counter()
            runner.invoke()
            times[name] += [1000 * (time.perf_counter() - start)] if number else []
    return {name: statistics.median(each) for name, each in times.items()}


def distilled(teacher: VisionTransformer, photos: Path, minutes: float, out: Path | None) -> tuple[train.Result, float]:
    """Train the student for about so many minutes; return the run, and its minutes."""
    fields: dict[str, Any] = {
        "epochs": None,
        "batch_size": 16,
        "accumulation": 1,
        "learning_rate": 1e-3,
        "log_steps": 20,
    }

    def run(steps: int, out: Path | None = None) -> tuple[train.Result, float]:
        recipe = train.recipe("distill-features", steps=steps, **fields)
        start = time.monotonic()
        result = train.run(recipe, model=STUDENT, teacher=teacher, data=photos, out=out, progress=False)
        return result, (time.monotonic() - start) / 60

    short, long = (run(steps)[1] for steps in (4, 24))
    return run(max(20, round(20 * minutes / (long - short))), out)


def main() -> None:
    """Train the student, export the teacher, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--minutes", type=float, default=20, help="of training (20)")
    parser.add_argument("--rounds", type=int, default=15, help="of measuring times (15)")
    parser.add_argument("--out", type=Path, help="folder of the student's run")
    options = parser.parse_args()
    teacher = converters.load(options.weights, image_size=224)
    fit_images, photos = crops(options.photos / "train", 0)
    sets = {"learned photos": crops(options.photos / "train", 2), "other photos": crops(options.photos / "test", 1)}
    shown = np.concatenate([images for images, _ in sets.values()])
    fit_target, target = features(teacher, fit_images), features(teacher, shown)
    keras.utils.set_random_seed(0)
    result, minutes = distilled(teacher, options.photos / "train", options.minutes, options.out)

    def of_student(student: VisionTransformer, values: np.ndarray) -> np.ndarray:
        return mapped(features(student, fit_images), fit_target, photos, values)

    untrained = VisionTransformer(STUDENT)
    found = {
        "S/14, the teacher": target,
        "Ti/16, random weights": of_student(untrained, features(untrained, shown)),
        "Ti/16, distilled": of_student(result.model, features(result.model, shown)),
    }
    with tempfile.TemporaryDirectory() as folder:
        exported = {
            "S/14, the teacher": (teacher, "none"),
            "S/14 dynamic": (teacher, "dynamic"),
            "S/14 int8": (teacher, "int8"),
            "Ti/16, distilled": (result.model, "none"),
            "Ti/16, distilled, dynamic": (result.model, "dynamic"),
        }
        files = {}
        for number, (name, (model, mode)) in enumerate(exported.items()):
            files[name] = Path(folder) / f"{number}.tflite"
            calibration = model.preprocess(fit_images[::9]) if mode != "none" else None
            # Measured below; no file is refused here.
            lenient = {"verify": model.preprocess(shown[:8]), "least_cosine": -1.0, "least_agreement": 0.0}
            export.tflite(model, files[name], quantize=mode, calibration=calibration, **lenient)
            if name not in found:
                run = export.runner(files[name])
                values = np.concatenate([run(model.preprocess(image)) for image in shown])
                found[name] = values if model is teacher else of_student(model, values)
        times = milliseconds(files, options.rounds)
        sizes = {name: path.stat().st_size / 1e6 for name, path in files.items()}
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(
        f"Features of DINOv2-S/14 (224 px) for Ti/16 (112 px): {result.steps} steps of 16 views, {minutes:.1f} minutes"
    )
    print(f"{datetime.date.today()}, {cpu[1] if cpu else 'CPU unknown'}, {os.cpu_count()} CPUs")
    print(f"Python {platform.python_version()}, keras {keras.__version__}, tensorflow {tf.__version__}")
    print("Cosine of differences, and the share of crops whose nearest is of the same photo:\n")
    print(f"{'':28}" + "".join(f"{name:>20}" for name in sets) + f"{'ms':>8}{'MB':>8}")
    bounds = np.cumsum([len(images) for images, _ in sets.values()])[:-1]
    for name in itertools.chain(found, files.keys() - found.keys()):
        parts = zip(np.split(found[name], bounds), np.split(target, bounds), sets.values(), strict=True)
        judged = (judge(ours, theirs, of_photos) for ours, theirs, (_, of_photos) in parts)
        cost = f"{times[name]:8.1f}{sizes[name]:8.1f}" if name in times else ""
        print(f"{name:28}" + "".join(f"{cosine:12.4f}{same:8.4f}" for cosine, same in judged) + cost)


if __name__ == "__main__":
    main()
