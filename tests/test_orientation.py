"""Photos are turned by their EXIF orientation, alike in Python, SavedModels, training, evaluation and commands."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

import command_line
from keras_vit import export, train, zoo
from keras_vit.model import images, preprocess
from keras_vit.model.config import Preprocessing
from keras_vit.model.task import Classification
from keras_vit.train.data import augment, pipeline, sources
from keras_vit.train.data.split import Order
from marks import full_except
from tiny_models import built

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


def test_the_graph_has_no_slices_that_the_layout_optimizer_gives_up_at() -> None:
    graphs = [images._parse_orientation.get_concrete_function().graph.as_graph_def()]
    functions = [each.node_def for graph in graphs for each in graph.library.function]
    for nodes in (*(graph.node for graph in graphs), *functions):
        values = {node.name: tf.make_ndarray(node.attr["value"].tensor) for node in nodes if node.op == "Const"}
        sliced = [node.input for node in nodes if node.op == "StridedSlice"]
        steps = [values.get(inputs[3].split(":")[0]) for inputs in sliced if inputs[0].split(":")[0] in values]
        assert not [step for step in steps if step is not None and (step < 0).any()]


in_graph = tf.function(pipeline.decode, input_signature=[tf.TensorSpec((), tf.string)])  # as training decodes


def decoded(file: bytes, folder: Path) -> np.ndarray:
    """Return the pixels of a file, after a check that path, Pillow object and graph agree."""
    path = folder / "photo"
    path.write_bytes(file)
    pixels = preprocess.decode(path)
    np.testing.assert_array_equal(images.pillow_pixels(Image.open(path)), pixels)
    np.testing.assert_array_equal(in_graph(file), pixels)
    return pixels


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("order", "><")
def test_every_orientation_is_turned_as_pillow_turns_it(order: str, orientation: int, tmp_path: Path) -> None:
    file = encoded(PHOTO, "JPEG", tag(orientation, order))
    with Image.open(io.BytesIO(file)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(decoded(file, tmp_path), expected)


@pytest.mark.parametrize("kind", ["WEBP", "TIFF"])
def test_files_that_only_pillow_reads_are_turned_too(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "photo"
    path.write_bytes(encoded(PHOTO, kind, tag(6)))
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    assert expected.shape == (64, 48, 3)
    for image in (path, Image.open(path)):
        np.testing.assert_array_equal(preprocess._arrays(image, 3)[0], expected)


def test_an_object_that_is_upright_already_is_not_turned_again() -> None:
    image = Image.open(io.BytesIO(encoded(PHOTO, "JPEG", tag(6))))
    upright = ImageOps.exif_transpose(image)
    np.testing.assert_array_equal(images.pillow_pixels(upright), np.asarray(upright))
    np.testing.assert_array_equal(images.pillow_pixels(image.convert("RGB")), np.asarray(upright))


def with_segment(content: bytes, code: int = 0xE1) -> bytes:
    """Return a JPEG with one more segment at its start."""
    file = encoded(PHOTO, "JPEG")
    return file[:2] + struct.pack(">BBH", 0xFF, code, 2 + len(content)) + content + file[2:]


SIX = tag(6)  # b"Exif\0\0", then TIFF bytes
BLOCK = SIX[6:]
ENTRY = BLOCK.index(struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0))
LONG_SIX = struct.pack(">HHII", 274, 4, 1, 6)  # as a number of four bytes
NOT_TURNED = {
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


@pytest.mark.parametrize("damage", NOT_TURNED)
def test_damaged_exif_turns_nothing(damage: str, tmp_path: Path) -> None:
    assert decoded(with_segment(NOT_TURNED[damage]), tmp_path).shape == (48, 64, 3)


@pytest.mark.parametrize(
    ("case", "file", "turned"),
    [
        ("in a comment", with_segment(SIX, 0xFE), False),
        ("in another segment", with_segment(SIX, 0xE2), False),
        ("behind the image", encoded(PHOTO, "JPEG") + with_segment(SIX)[2:], False),
        ("XMP", with_segment(b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'), False),
        ("many entries that are not there", with_segment(SIX[:14] + b"\xff\xff" + SIX[16:]), True),
        ("after other segments", with_segment(b"x" * 60_000, 0xE2)[:-2] + b"\xff\xd9", False),
        ("of four bytes", with_segment(SIX.replace(struct.pack(">HHIHH", 274, 3, 1, 6, 0), LONG_SIX)), True),
        ("after padding", with_segment(SIX)[:2] + b"\xff\xff\xff" + with_segment(SIX)[2:], True),
    ],
)
def test_the_tag_counts_where_it_belongs(case: str, file: bytes, turned: bool, tmp_path: Path) -> None:
    assert decoded(file, tmp_path).shape == ((64, 48, 3) if turned else (48, 64, 3))


def test_the_orientation_of_a_png_is_not_read_anywhere(tmp_path: Path) -> None:
    assert decoded(encoded(PHOTO, "PNG", SIX), tmp_path).shape == (48, 64, 3)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write upright photos without a tag, and the same ones as a turned camera stores them."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(10):  # a class for each: those of the model of digits
        image = Image.fromarray(samples.images[number % 2]).crop((9 * number, number, 9 * number + 75, number + 50))
        image.save(buffer := io.BytesIO(), "JPEG", subsampling=0, exif=tag(number % 8 + 1))  # crops decode exactly
        with Image.open(buffer) as stored:
            upright = encoded(ImageOps.exif_transpose(stored), "PNG")
        for name, file in (("upright", upright), ("turned", buffer.getvalue())):
            path = folder / name / "test" / str(number) / "photo.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(file)
    return folder / "upright", folder / "turned"


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_an_inception_crop_is_one_of_the_upright_photo(orientation: int) -> None:
    file = tf.constant(encoded(PHOTO, "JPEG", tag(orientation)))
    upright = images.decode_image(file)
    for number in range(4):
        of_file, of_pixels = (augment.inception_crop(x, (3, number), min_area=0.1).numpy() for x in (file, upright))
        assert of_file.shape == of_pixels.shape
        # Chroma upsampling has no neighbours at the edge of a part of a JPEG, so only the border may differ.
        np.testing.assert_array_equal(of_file[2:-2, 2:-2], of_pixels[2:-2, 2:-2])


@pytest.mark.parametrize("crop", full_except(["inception"], ["inception", "random", "resize", "none"]))
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


@pytest.mark.full
def test_evaluation_and_commands_answer_alike_for_turned_and_upright_photos(photos: Any) -> None:
    measured = [train.evaluate(zoo.load("digits"), folder, split="test") for folder in photos]
    assert measured[0].loss == measured[1].loss and measured[0].count == 10
    answers = []
    for folder in photos:
        printed = command_line.run("evaluate", "digits", "--data", folder, "--split", "test", "--json")
        ranked = json.loads(command_line.run("predict", "digits", *sorted(folder.glob("test/*/*.png")), "--json"))
        answers.append((json.loads(printed)["loss"], [each["predictions"] for each in ranked]))
    assert answers[0] == answers[1] and len(answers[0][1]) == 10


def test_a_saved_model_answers_alike_for_turned_and_upright_photos(photos: Any, tmp_path: Path) -> None:
    model = built(num_layers=1)
    export.saved_model(model, tmp_path / "1", warmup=())
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    files = [tf.constant([path.read_bytes() for path in sorted(folder.glob("test/*/*.png"))]) for folder in photos]
    for name in ("serving_default", "tolerant", "features"):
        upright, turned = (signatures[name](image_bytes=each) for each in files)
        for output in upright:
            np.testing.assert_array_equal(turned[output], upright[output])
    expected = model(model.preprocess(sorted(photos[1].glob("test/*/*.png"))))
    received = signatures["serving_default"](image_bytes=files[1])["probabilities"]
    np.testing.assert_allclose(received, tf.nn.softmax(expected), atol=1e-5)  # float32 noise
