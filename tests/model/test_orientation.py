"""Photos are turned by their EXIF orientation, alike for paths, Pillow objects, graphs and training."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from keras_vit.model import images, pillow, preprocess
from keras_vit.model.config import Preprocessing
from keras_vit.model.task import Classification
from keras_vit.train.data import augment, pipeline, sources
from keras_vit.train.data.split import Order

pytestmark = pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning", "ignore:Truncated File Read:UserWarning")
samples = pytest.importorskip("sklearn.datasets").load_sample_images()
PHOTO = Image.fromarray(samples.images[0]).resize((64, 48))
ORIENTATIONS = range(1, 9)


def tag(orientation: int, order: str = ">") -> bytes:
    """Return EXIF bytes with another tag and the orientation, big-endian (">") or little-endian ("<")."""
    exif = Image.Exif()
    exif.endian = order
    exif[0x010F], exif[0x0112] = "a maker", orientation
    return exif.tobytes()


def encoded(image: Image.Image, kind: str, exif: bytes | None = None) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({} if exif is None else {"exif": exif}))
    return buffer.getvalue()


in_graph = tf.function(pipeline.decode, input_signature=[tf.TensorSpec((), tf.string)])  # as training decodes


def decoded(file: bytes, folder: Path) -> np.ndarray:
    """Return the pixels of a file, after a check that path, Pillow object and graph agree."""
    path = folder / "photo"
    path.write_bytes(file)
    pixels = preprocess.decode(path)
    np.testing.assert_array_equal(pillow.pillow_pixels(Image.open(path)), pixels)
    np.testing.assert_array_equal(in_graph(file), pixels)
    return pixels


def by_pillow(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(ImageOps.exif_transpose(image))


def test_every_orientation_is_turned_as_pillow_turns_it(tmp_path: Path) -> None:
    for order in "><":
        for orientation in ORIENTATIONS:
            file = encoded(PHOTO, "JPEG", tag(orientation, order))
            got = decoded(file, tmp_path)
            np.testing.assert_array_equal(got, by_pillow(file), err_msg=f"{order}{orientation}")


def test_files_that_only_pillow_reads_are_turned_too(tmp_path: Path) -> None:
    path = tmp_path / "photo"
    for kind in ("WEBP", "TIFF"):
        path.write_bytes(encoded(PHOTO, kind, tag(6)))
        expected = by_pillow(path.read_bytes())
        assert expected.shape == (64, 48, 3)
        np.testing.assert_array_equal(preprocess.decode(path), expected)
        np.testing.assert_array_equal(pillow.pillow_pixels(Image.open(path)), expected)


def test_an_object_that_is_upright_already_is_not_turned_again() -> None:
    image = Image.open(io.BytesIO(encoded(PHOTO, "JPEG", tag(6))))
    upright = ImageOps.exif_transpose(image)
    np.testing.assert_array_equal(pillow.pillow_pixels(upright), np.asarray(upright))
    np.testing.assert_array_equal(pillow.pillow_pixels(image.convert("RGB")), np.asarray(upright))


def with_segment(content: bytes, code: int = 0xE1) -> bytes:
    """Return a JPEG with one more segment at its start."""
    file = encoded(PHOTO, "JPEG")
    return file[:2] + struct.pack(">BBH", 0xFF, code, 2 + len(content)) + content + file[2:]


SIX = tag(6)  # b"Exif\0\0", then TIFF bytes
BLOCK = SIX[6:]
ENTRY = BLOCK.index(struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0))
LONG_SIX = struct.pack(">HHII", 274, 4, 1, 6)  # as a number of four bytes
TURNED = {
    "many entries that are not there": with_segment(SIX[:14] + b"\xff\xff" + SIX[16:]),
    "a number of four bytes": with_segment(SIX.replace(struct.pack(">HHIHH", 274, 3, 1, 6, 0), LONG_SIX)),
    "after padding": with_segment(SIX)[:2] + b"\xff\xff\xff" + with_segment(SIX)[2:],
}
NOT_TURNED = {
    "in a comment": with_segment(SIX, 0xFE),
    "in another segment": with_segment(SIX, 0xE2),
    "behind the image": encoded(PHOTO, "JPEG") + with_segment(SIX)[2:],
    "XMP": with_segment(b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'),
    "after other segments": with_segment(b"x" * 60_000, 0xE2)[:-2] + b"\xff\xd9",
    "of a PNG": encoded(PHOTO, "PNG", SIX),
}
DAMAGED = {
    "empty": b"Exif\0\0",
    "no byte order": SIX[:6] + b"XX" + BLOCK[2:],
    "directory behind the end": SIX[:6] + BLOCK[:4] + b"\x7f\xff\xff\xff" + BLOCK[8:],
    "directory before the start": SIX[:6] + BLOCK[:4] + b"\xff\xff\xff\xff" + BLOCK[8:],
    "cut in the entry": SIX[: 6 + ENTRY + 9],
    "orientation 0": tag(0),
    "orientation 9": tag(9),
    "orientation 65535": tag(65_535),
    "two values": SIX.replace(struct.pack(">HHI", 0x0112, 3, 1), struct.pack(">HHI", 0x0112, 3, 2)),
    "text": SIX.replace(struct.pack(">HHI", 0x0112, 3, 1), struct.pack(">HHI", 0x0112, 2, 1)),
    "only in the second directory": b"Exif\0\0II*\0\x08\0\0\0\0\0\x0e\0\0\0" + BLOCK[ENTRY - 2 :],
}


def test_the_tag_counts_where_it_belongs_and_damage_turns_nothing(tmp_path: Path) -> None:
    cases = NOT_TURNED | {name: with_segment(content) for name, content in DAMAGED.items()} | TURNED
    turned = [name for name, file in cases.items() if decoded(file, tmp_path).shape == (64, 48, 3)]
    assert turned == list(TURNED)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write upright photos without a tag, and the same ones as a turned camera stores them."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(10):
        image = Image.fromarray(samples.images[number % 2]).crop((9 * number, number, 9 * number + 75, number + 50))
        image.save(buffer := io.BytesIO(), "JPEG", subsampling=0, exif=tag(number % 8 + 1))  # crops decode exactly
        with Image.open(buffer) as stored:
            upright = encoded(ImageOps.exif_transpose(stored), "PNG")
        for name, file in (("upright", upright), ("turned", buffer.getvalue())):
            path = folder / name / "test" / str(number) / "photo.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(file)
    return folder / "upright", folder / "turned"


def test_an_inception_crop_is_one_of_the_upright_photo() -> None:
    for orientation in ORIENTATIONS:
        file = tf.constant(encoded(PHOTO, "JPEG", tag(orientation)))
        upright = images.decode_image(file)
        for number in range(4):
            of_file, of_pixels = (augment.inception_crop(x, (3, number), min_area=0.1).numpy() for x in (file, upright))
            assert of_file.shape == of_pixels.shape
            # Chroma upsampling has no neighbours at the edge of a part of a JPEG, so only the border may differ.
            np.testing.assert_array_equal(of_file[2:-2, 2:-2], of_pixels[2:-2, 2:-2], err_msg=str(orientation))


@pytest.mark.full
@pytest.mark.parametrize("crop", ["inception", "random", "resize", "none"])
def test_training_batches_of_turned_photos_are_those_of_upright_ones(photos: Any, crop: str) -> None:
    recipe: Any = SimpleNamespace(
        crop=crop, crop_resize=None, min_area=0.1, flip=True, shift=0.1, randaugment_layers=0, mixup=0.2
    )
    how = {"model_input": pipeline.ModelInput((16, 24), 3, Preprocessing()), "task": Classification(num_classes=10)}
    batches = []
    for folder in photos:
        split = sources.open_data(folder, train_split="test").train
        assert split is not None
        stream = pipeline.training_batches(split, recipe, order=Order(batch=8, seed=1), **how)
        batches.append([batch["image"].numpy() for batch in stream.take(3)])
    np.testing.assert_array_equal(*batches)
