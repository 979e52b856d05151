"""Pictures whose values are not bytes: 16 bits of which fewer are used, floats, windows; in every way to a model."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from PIL import Image

import image_kinds
from keras_vit import Preprocessing, batch, converters, dense, digits, export, train, zoo
from keras_vit.batch._search import write_contact_sheet
from keras_vit.batch.folder import find_folder
from keras_vit.export import server
from keras_vit.model import images, pillow
from keras_vit.train.data import sources
from keras_vit.train.data.pipeline import ModelInput, evaluation_batches
from marks import full_except
from tiny_models import built

SIDE = 32  # of the tiny models: nothing is resized
TWELVE = np.random.default_rng(0).integers(0, 4096, (SIDE, SIDE)).astype(np.uint16)
TWELVE[0, :2] = 0, 4095
ROUNDING = 2e-6  # of numbers from -1 to 1: a few units of the last place of float32


def tiff(values: np.ndarray, photometric: int, *, extra: int = 0) -> bytes:
    """Return a TIFF of values (height, width) or (height, width, channels), with a tag that Pillow does not write."""
    height, width, channels = (*values.shape, 1)[:3]
    bits = [8 * values.dtype.itemsize] * channels
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    end = 8 + len(data)
    tags = [(256, 3, [width]), (257, 3, [height]), (258, 3, bits), (259, 3, [1]), (262, 3, [photometric])]
    tags += [(273, 4, [8]), (277, 3, [channels]), (278, 3, [height]), (279, 4, [len(data)])]
    if added := channels - (1 if photometric < 2 else 3):  # channels beside the colours
        tags += [(338, 3, [extra] * added)]
    place, rows, more = end + 2 + 12 * len(tags) + 4, b"", b""
    for tag, kind, numbers in tags:
        content = b"".join(struct.pack("<H" if kind == 3 else "<I", number) for number in numbers)
        if len(content) > 4:
            content, more = struct.pack("<I", place + len(more)), more + content
        rows += struct.pack("<HHI", tag, kind, len(numbers)) + content.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", end) + data + struct.pack("<H", len(tags)) + rows + bytes(4) + more


def coloured_png(values: np.ndarray, opacity: int | None = None) -> bytes:
    """Return a PNG of 16 bits and three channels, or four."""
    planes = [values] * 3 + ([] if opacity is None else [np.full_like(values, opacity)])
    rows = np.stack(planes, axis=-1).astype(">u2")
    return image_kinds.png(SIDE, SIDE, 16, 2 if opacity is None else 6, b"".join(b"\0" + row.tobytes() for row in rows))


def grey(values: np.ndarray, kind: str) -> bytes:
    return image_kinds.encoded(Image.fromarray(values), kind)


PNGS = {
    "grey PNG": grey(TWELVE, "PNG"),
    "PNG": coloured_png(TWELVE),
    "opaque PNG": coloured_png(TWELVE, 65535),
}
FILES = {**PNGS, "TIFF": grey(TWELVE, "TIFF"), "inverted TIFF": tiff(4095 - TWELVE, 0)}


def stating(**fields: Any) -> Any:
    """Return a model with these fields of its preprocessing."""
    model = built()
    return model.with_config(model.config.replace(preprocessing=fields))


def wanted(values: np.ndarray, black: float, white: float) -> np.ndarray:
    """Return prepared images (height, width, 3), computed in float64."""
    shares = np.clip((values.astype(np.float64) - black) / (white - black), 0, 1)
    return np.repeat(2 * shares[..., None] - 1, 3, axis=-1)


@pytest.mark.parametrize("name", FILES)
def test_unused_bits_are_refused_until_they_are_stated(name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(FILES[name])
    for each in (path, Image.open(path)):
        with pytest.raises(ValueError, match=r"16 bits.*(4095|15)$"):  # of colours Pillow gives the high bytes
            built().preprocess(each)
    got = stating(bits=12).preprocess(path)[0]
    np.testing.assert_allclose(got, wanted(TWELVE, 0, 4095), rtol=0, atol=ROUNDING)
    loaded = Image.open(path)
    if loaded.mode.startswith("I"):  # of others Pillow has lost the low bytes
        np.testing.assert_array_equal(stating(bits=12).preprocess(loaded)[0], got)
    else:
        with pytest.raises(ValueError, match="high bytes only"):
            stating(bits=12).preprocess(loaded)


def test_colours_of_16_bits_in_a_tiff_are_read_if_their_high_bytes_say_all() -> None:
    colours = np.repeat(TWELVE[..., None], 3, axis=-1)
    with pytest.raises(ValueError, match=r"high bytes only.*up to 15$"):
        pillow.decode_with_pillow(tiff(colours, 2))
    np.testing.assert_array_equal(pillow.decode_with_pillow(tiff(16 * colours, 2)), colours >> 4)


@pytest.mark.parametrize(("channels", "photometric", "colours"), [(2, 1, 1), (4, 2, 3), (5, 2, 3)])
def test_bands_of_a_tiff_that_pillow_leaves_out_are_refused(channels: int, photometric: int, colours: int) -> None:
    bands = np.full((SIDE, SIDE, channels), 255, np.uint8)
    with pytest.raises(ValueError, match=f"has {channels} channels, of which Pillow reads {colours}: .*pass an array"):
        pillow.decode_with_pillow(tiff(bands, photometric))


def test_a_fourth_band_that_a_tiff_calls_opacity_is_told_or_refused() -> None:
    bands = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 4)).astype(np.uint8)
    with pytest.warns(UserWarning, match="last channel is opacity"):
        read = pillow.decode_with_pillow(tiff(bands, 2, extra=2))
    np.testing.assert_array_equal(read, pillow.on_white(bands))
    with pytest.raises(ValueError, match="high bytes up to 15"), pytest.warns(UserWarning, match="opacity"):
        pillow.decode_with_pillow(tiff(np.repeat(TWELVE[..., None], 4, axis=-1), 2, extra=2))


def test_a_tiff_of_several_pages_is_told() -> None:
    first, second = (Image.fromarray(np.full((SIDE, SIDE), level, np.uint8)) for level in (10, 20))
    stream = io.BytesIO()
    first.save(stream, "TIFF", save_all=True, append_images=[second])
    with pytest.warns(UserWarning, match="several pages: the first is read"):
        assert (pillow.decode_with_pillow(stream.getvalue()) == 10).all()


def test_what_uses_the_high_bits_or_is_black_needs_no_statement() -> None:
    bright = (TWELVE * 16).astype(np.uint16)
    for values in (bright, np.zeros_like(bright), np.where(bright > 0, 0, 1 << 14).astype(np.uint16)):
        want = np.repeat((values >> 8)[..., None], 3, axis=-1)
        for file in (grey(values, "PNG"), coloured_png(values), grey(values, "TIFF")):
            read = images.decode_image if pillow.is_jpeg_or_png(file) else pillow.decode_with_pillow
            np.testing.assert_array_equal(read(file), want)
    np.testing.assert_array_equal(
        pillow.decode_with_pillow(tiff(65535 - bright, 0)), images.decode_image(grey(bright, "PNG"))
    )


def test_arrays_and_tensors_are_scaled_and_bytes_are_not() -> None:
    model, colours = stating(bits=12), np.repeat(TWELVE[..., None], 3, axis=-1)
    want = wanted(TWELVE, 0, 4095)
    for array in (colours, colours.astype(np.int32), colours.astype(np.float64), TWELVE, colours[None]):
        np.testing.assert_allclose(model.preprocess(array)[0], want, rtol=0, atol=ROUNDING)
    stream = tf.data.Dataset.from_tensor_slices(colours[None]).map(model.preprocess)
    np.testing.assert_allclose(next(iter(stream)), want, rtol=0, atol=ROUNDING)
    photo = np.asarray(image_kinds.photo())
    np.testing.assert_array_equal(model.preprocess(photo), built().preprocess(photo))
    jpeg = image_kinds.encoded(image_kinds.photo(), "JPEG")
    np.testing.assert_array_equal(images.decode_image(jpeg, Preprocessing(bits=12)), images.decode_image(jpeg))


def test_a_range_is_a_window_and_may_be_inverted() -> None:
    hounsfield = TWELVE.astype(np.int32) - 1024
    for array in (hounsfield, hounsfield.astype(np.float32), Image.fromarray(hounsfield)):
        got = stating(range=(-160, 240)).preprocess(array)[0]
        np.testing.assert_allclose(got, wanted(hounsfield, -160, 240), rtol=0, atol=ROUNDING)
    got = stating(range=(4095, 0)).preprocess(TWELVE)[0]
    np.testing.assert_allclose(got, wanted(TWELVE, 4095, 0), rtol=0, atol=ROUNDING)
    got = stating(range=(0, 1)).preprocess(Image.fromarray((TWELVE / 4095).astype(np.float32)))[0]
    np.testing.assert_allclose(got, wanted(TWELVE, 0, 4095), rtol=0, atol=ROUNDING)


def test_what_contradicts_the_statement_is_refused() -> None:
    for fields, values, message in (
        ({"bits": 10}, TWELVE, "bits=10.*up to 4095"),
        ({"bits": 12}, TWELVE.astype(np.int32) - 1, "from -1"),
        ({"range": (5000, 6000)}, TWELVE, "no value in the model's range.*up to 4095"),
        ({"range": (0, 1)}, TWELVE + 2.0, "no value in the model's range.*from 2"),
        ({"range": (0, 1)}, np.where(TWELVE > 0, np.nan, 0.5), "not finite"),
        ({}, TWELVE, 'State what other values mean.*"bits": 12'),
        ({}, TWELVE / 4095, '"range": .0, 1.'),
    ):
        with pytest.raises(ValueError, match=message):
            stating(**fields).preprocess(values)


def test_the_graph_of_a_server_reads_and_refuses_the_same() -> None:
    files = tf.constant(list(PNGS.values()))
    model, plain = stating(bits=12), built()
    decoded = tf.function(server.decode)(files, model.config)
    for got in decoded.numpy():
        np.testing.assert_allclose(got, wanted(TWELVE, 0, 4095), rtol=0, atol=ROUNDING)
    with pytest.raises(tf.errors.InvalidArgumentError, match="16 bits and small values"):
        tf.function(server.decode)(files, plain.config)
    bright = grey(16 * TWELVE, "PNG")
    _, valid = tf.function(server.decode_tolerant)(tf.constant([bright, *PNGS.values()]), plain.config)
    assert valid.numpy().tolist() == [True, False, False, False]
    with pytest.raises(tf.errors.InvalidArgumentError, match="bits=12"):
        tf.function(server.decode)(tf.constant([bright]), model.config)


def test_the_statement_is_part_of_the_model(tmp_path: Path) -> None:
    model = zoo.load("digits", preprocessing={"bits": 12})
    assert model.config.preprocessing == Preprocessing(**{**vars(zoo.load("digits").config.preprocessing), "bits": 12})
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.config == model.config == zoo.load(tmp_path / "model.keras").config
    assert zoo.load(tmp_path / "model.keras", preprocessing={"bits": 14}).config.preprocessing.bits == 14
    for name in ("google", "timm", "huggingface"):
        path = converters.save(model, tmp_path / f"{name}.npz" if name == "google" else tmp_path / name, format=name)
        assert converters.load(path).config.preprocessing.bits == 12
    export.tflite(model, tmp_path / "model.tflite", verify=digits.load().test_images[:4])
    with zipfile.ZipFile(tmp_path / "model.tflite") as archive:
        assert json.loads(archive.read("preprocessing.json"))["bits"] == 12


# ---- data sets

NAMES = zoo.load("digits").task.class_names() or []


@pytest.fixture(scope="module")
def twelve_bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """Return a folder of digits of 12 bits, half of them TIFFs, and the same as arrays with their classes."""
    data = digits.load()
    values = np.rint(data.test_images[:40, ..., :1] * (4095 / 255)).astype(np.uint16)
    labels = data.test_labels[:40]
    folder = tmp_path_factory.mktemp("twelve")
    for number, (image, label) in enumerate(zip(values, labels, strict=True)):
        path = folder / NAMES[label] / f"{number:02}.{'png' if number % 2 else 'tif'}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image[..., 0]).save(path)
    return folder, values, labels


def test_a_data_set_is_refused_once_and_read_when_stated(twelve_bits: tuple[Path, np.ndarray, np.ndarray]) -> None:
    folder, values, labels = twelve_bits
    model, names = zoo.load("digits"), NAMES
    arrays = {"evaluation": (values, labels), "class_names": names}
    for data in (str(folder), arrays):
        with pytest.raises(ValueError, match='preprocessing={"bits": 12}') as caught:
            train.evaluate(model, data)
        assert str(caught.value).count("Received") == 1
    stated = model.with_config(model.config.replace(preprocessing={"bits": 12}))
    bytes_of = np.rint(values * (255 / 4095)).astype(np.uint8)
    want = train.evaluate(model, {**arrays, "evaluation": (bytes_of, labels)}).metrics
    for data in (str(folder), arrays):
        got = train.evaluate(stated, data).metrics
        # An eighth of a grey level on average moves the loss by less than a thousandth.
        assert got["top1"] == want["top1"] and abs(got["loss"] - want["loss"]) < 1e-3


def test_the_pictures_of_mistakes_are_shown(twelve_bits: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    folder, values, labels = twelve_bits
    model = zoo.load("digits", preprocessing={"bits": 12})
    wrong = {"evaluation": (np.repeat(values, 3, axis=-1), (labels + 1) % 10), "class_names": NAMES}
    train.examine(model, wrong).write(tmp_path / "arrays")
    model.get_layer("head").bias.assign([50.0] + 9 * [0.0])
    train.examine(model, str(folder)).write(tmp_path / "files")
    for name in ("arrays", "files"):
        assert "data:image/png" in (tmp_path / name / "examination.html").read_text(encoding="utf-8")


def test_training_reads_what_preprocess_reads(twelve_bits: tuple[Path, np.ndarray, np.ndarray]) -> None:
    folder, values, labels = twelve_bits
    model = zoo.load("digits", preprocessing={"bits": 12})
    split = sources.open_data(str(folder), training=False).evaluation
    assert split is not None
    task = sources.open_data(str(folder), training=False).task
    batches = evaluation_batches(split, batch_size=40, model_input=ModelInput.from_model(model), task=task)
    files = sorted(folder.rglob("*.*"))
    np.testing.assert_array_equal(next(iter(batches))["image"], model.preprocess(files))
    recipe = train.recipe("finetune-digits", steps=1, batch_size=8, xla=False)
    train.run(recipe, model=model, data={"train": (values, labels)}, progress=False)
    with pytest.raises(ValueError, match="small values"):
        train.run(recipe, model="digits", data=str(folder), train_split="all", progress=False)


@pytest.mark.parametrize("crop", full_except(["inception"], ["inception", "random", "none"]))
def test_a_recipe_states_the_values_of_files(crop: str, twelve_bits: tuple[Path, np.ndarray, np.ndarray]) -> None:
    stated: Any = {"config": {"preprocessing": {"bits": 12}}, "crop": crop}
    recipe = train.recipe("finetune-digits", steps=1, batch_size=8, xla=False, **stated)
    result = train.run(recipe, model="digits", data=str(twelve_bits[0]), train_split="all", progress=False)
    assert result.model.config.preprocessing.bits == 12 and result.steps == 1


def test_embeddings_of_a_folder(twelve_bits: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    folder, _, _ = twelve_bits
    model = zoo.load("digits")
    assert batch.embed(model, str(folder), to=tmp_path / "refused").errors == 40
    stated = model.with_config(model.config.replace(preprocessing={"bits": 12}))
    assert batch.embed(stated, str(folder), to=tmp_path / "read", dtype="float32").errors == 0
    table = pq.read_table(tmp_path / "read")
    got = np.stack(table["embeddings"].to_pylist())
    want = stated.embed(table["path"].to_pylist())
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)  # float16 in the file
    record = find_folder(tmp_path / "read")
    matches = batch.search(record.path, got[:1], top=3)[0]
    write_contact_sheet(tmp_path / "found.html", "digits", record, matches, stated.config.preprocessing)
    assert (tmp_path / "found.html").read_text(encoding="utf-8").count("data:image/png") == 3


# ---- maps


@pytest.mark.parametrize("stated", [{"bits": 12}, {"range": (0, 4095)}, {"range": (-4095, 0)}])
def test_maps_are_those_of_the_same_picture_in_bytes(stated: dict[str, Any], tmp_path: Path) -> None:
    levels = np.random.default_rng(0).integers(0, 16, (40, 60, 3))
    pixels, deep = (17 * levels).astype(np.uint8), (273 * levels).astype(np.uint16)  # 255 and 4,095 are 15 times these
    numbers = deep.astype(np.float32) + np.float32(stated.get("range", (0, 0))[0])
    backbone = built(num_classes=0)
    model = dense.segmenter(backbone, num_classes=5)
    for weights in model.trainable_weights:
        weights.assign(np.random.default_rng(1).normal(scale=0.3, size=weights.shape))
    same = dense.segmenter(backbone.with_config(backbone.config.replace(preprocessing=stated)), num_classes=5)
    same.set_weights(model.get_weights())
    [expected], [found] = model.predict_maps(pixels), same.predict_maps(numbers)
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(found, expected)
    for number, one in enumerate((model, same)):
        export.tflite(one, tmp_path / f"{number}.tflite", quantize="none", least_cosine=-1, least_agreement=0)
    files = [export.load(tmp_path / f"{number}.tflite") for number in range(2)]
    [expected], [found] = files[0].predict_maps(pixels), files[1].predict_maps(numbers)
    np.testing.assert_array_equal(found, expected)
