"""Compare the classes that the samples for Android and browsers find with those of the model: python samples.py.

The weights are a trained DINOv2-S/14 at 112 px, with a linear head for the left and the right half of ten photos; it is
fitted anew for each family's preparation, on crops of the upper parts of the photos, and judged on 300 of the lower
parts. "before" is what the samples did until November 2026: Android scaled with `createScaledBitmap` (emulated:
bilinear without antialias, whole pixels) to -1..1; the page did the same in floats with the file's mean and deviation.
Weights and photos come with packages of `make test-real`. Needs Node.js for the page.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image
from sklearn.linear_model import LogisticRegression

from keras_vit import converters, export
from keras_vit.model.vision_transformer import VisionTransformer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "export"))
import test_samples

import dinov2_photos

SIZE = (112, 112)
PHOTOS = [name for name in dinov2_photos.PHOTOS if name not in ("camera.png", "coins.png", "grace_hopper.jpg")]
KINDS = ("portrait", "landscape", "small")


def crops(count: int, seed: int, *, upper: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Return crops, in turn portrait, landscape and small, and their classes."""
    random, images = np.random.default_rng(seed), []
    classes = random.integers(0, 2 * len(PHOTOS), count)
    for number, photo_half in enumerate(classes):
        photo = np.array(Image.open(dinov2_photos._photo(PHOTOS[photo_half // 2])).convert("RGB"))
        photo = np.array_split(photo, 2, axis=1)[photo_half % 2]
        rows = round(0.6 * len(photo))
        photo = photo[:rows] if upper else photo[-rows:]
        shares = ((1, 0.55), (0.45, 1), (0.7, 0.7))[number % 3]
        shares = shares * random.uniform(0.7, 1, 2)
        height, width = (round(share * min(photo.shape[:2])) for share in shares)
        top, left = random.integers(len(photo) - height + 1), random.integers(photo.shape[1] - width + 1)
        crop = photo[top : top + height, left : left + width]
        if number % 3 == 2:
            crop = np.array(Image.fromarray(crop).resize((64, 48), Image.Resampling.BICUBIC))
        images.append(crop)
    return images, classes


def squashed(images: list[np.ndarray]) -> np.ndarray:
    """Return images of the model's size, resized as both samples did before."""
    return np.stack([tf.image.resize(image, SIZE).numpy() for image in images])


def main() -> None:
    """Print a table."""
    train, train_classes = crops(900, 1, upper=True)
    images, classes = crops(300, 2, upper=False)
    for kind, example in zip(KINDS, range(3), strict=True):
        heights, widths = zip(*(image.shape[:2] for image in images[example::3]), strict=True)
        print(f"{kind}: {min(heights)} to {max(heights)} x {min(widths)} to {max(widths)} pixels")
    test_samples.SIZE = SIZE
    for family in ("Google", "DINOv2", "CLIP"):
        body = trained(family, num_classes=0)
        fitted = LogisticRegression(max_iter=2000).fit(body.predict(body.preprocess(train), verbose=0), train_classes)
        model = trained(family, num_classes=len(fitted.classes_))
        model.get_layer("head").set_weights([fitted.coef_.T, fitted.intercept_])
        compare(family, model, images, classes)


def trained(family: str, *, num_classes: int) -> VisionTransformer:
    """Return the trained model with the preparation of a family."""
    loaded = converters.load(dinov2_photos.folder(), image_size=SIZE, num_classes=num_classes)
    model = VisionTransformer(loaded.config.replace(preprocessing=test_samples.FAMILIES[family]))
    model.set_weights(loaded.get_weights())
    return model


def serve(model: VisionTransformer, images: list[np.ndarray], folder: str) -> np.ndarray:
    """Return the classes that a server finds in image files, which the clients send as they are."""
    export.saved_model(model, f"{folder}/1")
    answer = tf.saved_model.load(f"{folder}/1").signatures["serving_default"]
    files = [tf.io.encode_png(image) for image in images]
    parts = [answer(image_bytes=tf.stack(files[i : i + 10])) for i in range(0, len(files), 10)]
    return np.concatenate([part["probabilities"] for part in parts]).argmax(-1)


def compare(family: str, model: VisionTransformer, images: list[np.ndarray], classes: np.ndarray) -> None:
    """Print a line for each way to prepare."""
    pixels, preprocessing = squashed(images), model.config.preprocessing
    mean, std = (255 * np.array(each, np.float32) for each in (preprocessing.mean, preprocessing.std))
    with tempfile.TemporaryDirectory() as folder:
        prepared = {
            "preprocess": model.preprocess(images),
            "Android, before": np.round(pixels) / 127.5 - 1,
            "Android": test_samples.on_android(model.config, images, Path(folder)),
            "browser, before": (pixels - mean) / std,
            "browser": test_samples.in_browser(model.config, images, Path(folder)),
        }
        served = serve(model, images, folder)
    found = {name: model.predict(each, verbose=0).argmax(-1) for name, each in prepared.items()} | {"server": served}
    for name, each in found.items():
        is_same, right = each == found["preprocess"], np.mean(each == classes)
        kinds = "  ".join(f"{kind} {is_same[i::3].mean():6.1%}" for i, kind in enumerate(KINDS))
        line = f"{family:7} {name:15} right {right:6.1%}  same {is_same.mean():6.1%}  {kinds}"
        if name in prepared:
            line += f"  pixels {test_samples.pixel_error(model.config, prepared[name], images):8.4f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
