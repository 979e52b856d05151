"""Train a linear segmenter on the patches of a real DINOv2-S/14, and on those of random weights, and compare them.

python benchmarks/subject_masks.py CHECKPOINT [FOLDER]

CHECKPOINT is the Hugging Face folder of facebook/dinov2-small. The classes are "background" and "subject". Three photos
are for training, in 40 random squares each, and three others for the evaluation, whole. Five masks are polygons and
ellipses that were drawn by hand; that of the flower is a rule: pixels with 40 more red than blue.
Writes FOLDER/train, FOLDER/val and FOLDER/masks.jpg, and prints the table of both evaluations.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib import cbook
from PIL import Image, ImageDraw, ImageFilter
from skimage import data
from sklearn.datasets import load_sample_image

from keras_vit import VisionTransformer, converters, dense, train

SIDE = 224
SQUARES = 40  # of each training photo
TRAIN, EVALUATION = ("astronaut", "cat", "pagoda"), ("coffee", "flower", "admiral")
# Corners (x, y) of the subject as percentages of the sides of the photo; for coffee, boxes of two ellipses.
DRAWN = {
    "astronaut": (44, 3, 31, 12, 30, 21, 36, 28, 24, 32, 22, 46, 12, 50, 6, 60, 5, 74, 5, 100, 100, 100, 100, 89)
    + (96, 76, 87, 69, 76, 67, 72, 68, 70, 58, 66, 50, 58, 46, 58, 34, 49, 29, 55, 26, 59, 18, 57, 11, 53, 5),
    "cat": (9, 0, 6, 16, 8, 37, 6, 49, 2, 59, 0, 69, 0, 100, 37, 100, 62, 94, 73, 78, 81, 51, 81, 35, 79, 22, 84, 18)
    + (88, 0),
    "pagoda": (32, 7, 38, 20, 50, 28, 48, 33, 51, 40, 50, 45, 51, 53, 51, 59, 55, 63, 54, 76, 57, 80, 52, 88, 47, 99)
    + (31, 90, 11, 82, 12, 76, 11, 74, 12, 63, 11, 59, 14, 55, 13, 42, 15, 32, 15, 26, 24, 16, 29, 13),
    "coffee": (13, 18, 80, 97, 29, 3, 71, 52),
    "admiral": (51, 3, 35, 10, 30, 21, 32, 29, 30, 35, 35, 50, 39, 53, 36, 56, 17, 62, 9, 67, 2, 100, 100, 100, 99, 67)
    + (92, 62, 72, 57, 65, 52, 72, 39, 73, 32, 72, 22, 70, 10, 60, 4),
}


def photos() -> dict[str, Image.Image]:
    """Return the photos: of scikit-image, scikit-learn and Matplotlib."""
    admiral = Image.open(cbook.get_sample_data("grace_hopper.jpg")).convert("RGB")
    arrays = {"astronaut": data.astronaut(), "cat": data.chelsea(), "coffee": data.coffee()}
    arrays |= {"pagoda": load_sample_image("china.jpg"), "flower": load_sample_image("flower.jpg")}
    return {name: Image.fromarray(array) for name, array in arrays.items()} | {"admiral": admiral}


def mask(name: str, photo: Image.Image) -> Image.Image:
    """Return the mask of a photo: 0 for the background, 1 for the subject."""
    if name not in DRAWN:
        red, _, blue = np.moveaxis(np.asarray(photo, int), -1, 0)
        return Image.fromarray((red > blue + 40).astype(np.uint8)).filter(ImageFilter.MedianFilter(9))
    empty = Image.new("L", photo.size)
    numbers = np.array(DRAWN[name]).reshape(-1, 2) / 100 * photo.size
    if name == "coffee":
        for box in numbers.reshape(-1, 4):
            ImageDraw.Draw(empty).ellipse(box.tolist(), fill=1)
    else:
        ImageDraw.Draw(empty).polygon(numbers.ravel().tolist(), fill=1)
    return empty


def write_folder(folder: Path) -> None:
    """Write the photos and masks as train.run takes them."""
    draw = np.random.default_rng(0)
    for name, photo in photos().items():
        part = folder / ("train" if name in TRAIN else "val")
        for kind in ("images", "masks"):
            (part / kind).mkdir(parents=True, exist_ok=True)
        pair = {"images": (photo, "jpg", Image.Resampling.BICUBIC), "masks": (mask(name, photo), "png", 0)}
        boxes = [(0, 0, *photo.size)]
        if name in TRAIN:
            sides = draw.uniform(0.5, 1, SQUARES) * min(photo.size)
            corners = draw.uniform(size=(SQUARES, 2)) * (np.array(photo.size) - sides[:, None])
            boxes = [(x, y, x + side, y + side) for (x, y), side in zip(corners, sides, strict=True)]
        for number, box in enumerate(boxes):
            for kind, (picture, suffix, method) in pair.items():
                size = (SIDE, SIDE) if name in TRAIN else picture.size
                picture.resize(size, method, box=box).save(part / kind / f"{name}-{number:02}.{suffix}", quality=95)
    (folder / "classes.txt").write_text("background\nsubject\n", encoding="utf-8")


def overlay(photo: Image.Image, subject: np.ndarray) -> Image.Image:
    """Return a photo whose background is darkened, 240 pixels high."""
    shares = np.where(subject[..., None] > 0, 1.0, 0.25)
    picture = Image.fromarray((np.asarray(photo) * shares).astype(np.uint8))
    return picture.resize((round(picture.width * 240 / picture.height), 240))


def main() -> None:
    """Write the data, train both models, print their evaluations, draw the picture."""
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "subject-masks")
    write_folder(folder)
    trained = converters.load(sys.argv[1], image_size=SIDE)
    models = {"DINOv2-S/14": trained, "random weights": VisionTransformer(trained.config)}
    rows = [[overlay(photo, np.asarray(mask(name, photo))) for name, photo in photos().items() if name in EVALUATION]]
    for name, model in models.items():
        result = train.run("segment-folder", model=model, data=folder, changes={"steps": 150}, progress=False)
        assert isinstance(result.model, dense.DenseModel)
        print(f"{name}: {train.evaluate(result.model, folder, split='val')}", flush=True)
        shown = [photo for photo_name, photo in photos().items() if photo_name in EVALUATION]
        maps = result.model.predict_maps([np.asarray(photo) for photo in shown])
        rows.append([overlay(photo, each) for photo, each in zip(shown, maps, strict=True)])
    sheet = Image.new("RGB", (sum(each.width for each in rows[0]), 240 * len(rows)))
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            sheet.paste(picture, (sum(each.width for each in pictures[:column]), 240 * row))
    sheet.save(folder / "masks.jpg", quality=85)


if __name__ == "__main__":
    main()
