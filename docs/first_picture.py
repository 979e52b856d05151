"""Draw README's first picture: what DINOv2-S/14 sees in photos. Needs scikit-image and matplotlib.

python docs/first_picture.py MODEL [docs/images/patches.jpg]      MODEL: a folder of DINOv2-S/14, or its name

For each photo: the patches in the colours of their first three principal components, those of all photos together,
and the attention of the class token in the last block, the mean of its heads.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from skimage import data

from keras_vit import visualize, zoo
from keras_vit._util.html import COLOURS

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")
SIZE = 448  # pixels
TARGET = Path(__file__).parent / "images" / "patches.jpg"


def centre(photo: np.ndarray) -> np.ndarray:
    """Return the central square of a photo."""
    side = min(photo.shape[:2])
    top, left = ((length - side) // 2 for length in photo.shape[:2])
    return photo[top : top + side, left : left + side]


def components(tokens: np.ndarray) -> np.ndarray:
    """Return the first three principal components of patches (images, patches, width), each scaled to 0..1."""
    flat = tokens.reshape(-1, tokens.shape[-1]).astype(np.float64)
    directions = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)[2][:3]
    projected = (flat - flat.mean(axis=0)) @ directions.T
    low, high = np.percentile(projected, (2, 98), axis=0)
    return ((projected - low) / (high - low)).clip(0, 1).reshape(*tokens.shape[:2], 3)


def main() -> None:
    """Write the picture."""
    name, *target = sys.argv[1:]
    model = zoo.load(name, image_size=SIZE)
    photos = [centre(getattr(data, photo)()) for photo in PHOTOS]
    images = model.preprocess(photos)
    tokens = np.asarray(model.features(images, ["encoder_norm"])["encoder_norm"])
    colours = components(tokens[:, model.config.num_prefix_tokens :]).reshape(len(photos), *model.config.grid, 3)
    attention = visualize.class_attention(model, images)[-1].mean(axis=1)
    figure = Figure(figsize=(9, 6.9), layout="constrained", facecolor=COLOURS["card"][0])
    rows = (("photo", photos), ("patches", colours), ("attention", attention))
    for place, (title, pictures) in enumerate(rows):
        for number, picture in enumerate(pictures):
            axes = figure.add_subplot(len(rows), len(photos), place * len(photos) + number + 1)
            axes.imshow(picture, cmap="magma")
            axes.set(xticks=[], yticks=[], ylabel="" if number else title)
    figure.savefig(target[0] if target else TARGET, dpi=100, pil_kwargs={"quality": 82})


if __name__ == "__main__":
    main()
