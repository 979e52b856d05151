"""Every kind of image file and every mode of Pillow gives the same pixels in every way, or one clear error."""

from __future__ import annotations

import contextlib
import io
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import image_kinds
import image_table
from file_server import FileServer, Served
from keras_vit.errors import DownloadError
from keras_vit.model import images, pillow, preprocess
from keras_vit.model.config import Preprocessing
from keras_vit.model.preprocess import prepare

pytest_plugins = ["download_fixtures"]
PHOTO = image_kinds.photo()
ALPHA = Image.fromarray(np.tile(np.arange(60, dtype=np.uint8) * 4, (45, 1)))


def test_a_path_an_object_and_bytes_give_the_same_pixels() -> None:
    wrong = {}
    for name, kind in image_table.kinds().items():
        pixels = [each for each in image_table.received(kind) if not isinstance(each, str)]
        wrong[name] = [way for way, each in enumerate(pixels) if not np.array_equal(each, image_table.expected(kind))]
    assert {name: ways for name, ways in wrong.items() if ways} == {}


def test_the_table_of_image_files_is_up_to_date() -> None:
    page = image_table.PAGE.read_text(encoding="utf-8")
    table = page.split(image_table.START)[1].split(image_table.END)[0]
    assert table == image_table.rendered(), "run python tests/support/image_table.py"


def decoded(image: Any, channels: int = 3) -> np.ndarray:
    ((array,),) = preprocess.to_arrays(image, channels, Preprocessing())
    return np.asarray(array)


def with_alpha(mode: str) -> Image.Image:
    image = PHOTO.convert(mode)
    image.putalpha(ALPHA)
    return image


MODES = {
    "1": lambda: PHOTO.convert("1"),
    "L": lambda: PHOTO.convert("L"),
    "LA": lambda: with_alpha("L"),
    "La": lambda: with_alpha("L").convert("La"),
    "P": lambda: PHOTO.quantize(16),
    "PA": lambda: PHOTO.quantize(16).convert("PA"),
    "RGBA": lambda: with_alpha("RGB"),
    "RGBX": lambda: PHOTO.convert("RGBX"),
    "RGBa": lambda: with_alpha("RGB").convert("RGBa"),
    "YCbCr": lambda: PHOTO.convert("YCbCr"),
    "LAB": lambda: Image.new("LAB", (60, 45), (120, 130, 140)),
    "HSV": lambda: PHOTO.convert("HSV"),
    "I": lambda: PHOTO.convert("L").convert("I"),
    "F": lambda: PHOTO.convert("L").convert("F"),
    **{
        mode: lambda mode=mode, order=order: Image.frombytes(
            mode, (60, 45), (np.asarray(PHOTO.convert("L"), np.uint16) * 256 + 200).astype(order + "u2").tobytes()
        )
        for mode, order in {"I;16": "<", "I;16L": "<", "I;16B": ">", "I;16N": "="}.items()
    },
}


def test_every_mode_of_pillow_is_read() -> None:
    for mode, image_of_mode in MODES.items():
        image = image_of_mode()
        assert image.mode == mode
        if mode.startswith("I"):
            expected = np.repeat(np.asarray(PHOTO.convert("L"))[..., None], 3, axis=-1)
        else:
            rgb = {"La": "LA", "RGBa": "RGBA"}.get(mode)
            expected = image_kinds.on_white(image.convert(rgb) if rgb else image)
        np.testing.assert_array_equal(decoded(image), expected, err_msg=mode)
        assert decoded(image, 1).shape == (45, 60, 1)


def test_values_that_are_no_pixels_are_an_error_that_names_the_mode() -> None:
    values = {"I": [np.int32([[0, 256]]), np.int32([[-1, 5]])]}
    values["F"] = [np.float32([[0, high]]) for high in (300, 0.5, np.nan)]
    for mode, arrays in values.items():
        for array in arrays:
            image = Image.fromarray(array)
            assert image.mode == mode
            with pytest.raises(ValueError, match=rf"mode {mode}, .*0 to 255"):
                decoded(image)


def test_a_16_bit_png_that_an_old_pillow_opens_as_i_is_read_as_the_path_is() -> None:
    image = Image.fromarray(np.int32([[0, 255, 256, 65_535]]))
    image.format = "PNG"
    np.testing.assert_array_equal(decoded(image)[..., 0], [[0, 0, 1, 255]])


def test_a_grey_model_sees_the_same_grey_of_every_file_and_object(tmp_path: Path) -> None:
    path = tmp_path / "photo"
    files = {kind: image_kinds.encoded(PHOTO, kind) for kind in ("JPEG", "PNG", "BMP", "WEBP")}
    files["CMYK"] = image_kinds.encoded(PHOTO.convert("CMYK"), "JPEG")
    for kind, file in files.items():
        path.write_bytes(file)
        grey = decoded(path, 1)
        np.testing.assert_array_equal(grey, tf.image.rgb_to_grayscale(decoded(path)), err_msg=kind)
        np.testing.assert_array_equal(decoded(Image.open(path), 1), grey, err_msg=kind)
    with pytest.raises(ValueError, match="4 channels: pass arrays"):
        decoded(path, 4)


def test_grey_in_blocks_is_tensorflows(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.asarray(PHOTO)
    expected = tf.image.rgb_to_grayscale(pixels)
    for module in (images, pillow):
        for block in (1000, 45 * 60):
            monkeypatch.setattr(module, "BLOCK", block)
            np.testing.assert_array_equal(module.to_grey(pixels), expected)
        np.testing.assert_array_equal(module.to_grey(np.stack([pixels] * 2)), tf.stack([expected] * 2))


# What a file is, if it is no image


def test_a_file_that_is_no_image_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    starts = {b"": "an empty file", b"\0\0\0\x18ftypheic": "HEIC", b"<svg/>": "text, such as SVG", b"nothing": "format"}
    for start, says in starts.items():
        path.write_bytes(start)
        with pytest.raises(ValueError, match=rf"x\.jpg' is .*{says}"):
            decoded(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"x\.jpg' is not a regular file"):
        decoded(path)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["BMP", "TIFF", "GIF", "WEBP", "PNG", "JPEG"])
def test_a_damaged_file_is_an_image_or_a_value_error(kind: str, tmp_path: Path) -> None:
    random, path = np.random.default_rng(0), tmp_path / "x"
    file = image_kinds.encoded(image_kinds.photo(16, 12), kind)
    for _ in range(25):
        content = bytearray(file)
        for place in random.integers(0, min(len(file), 200), 3):
            content[place] = random.integers(256)
        path.write_bytes(content)
        given: list[Any] = [path]
        with contextlib.suppress(Exception):  # of Pillow, in the user's own call
            given.append(Image.open(io.BytesIO(bytes(content))))
        for image in given:
            try:
                assert decoded(image).dtype == np.uint8
            except ValueError as error:
                assert "function_node" not in str(error) and "Op:" not in str(error)  # noqa: PT017 - both are right


def test_errors_of_pillows_readers_are_value_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.bmp"
    PHOTO.save(path)

    def fail(*_: Any) -> None:
        raise OverflowError("Python int too large to convert to C long")

    monkeypatch.setattr(Image.Image, "load", fail)
    with pytest.raises(ValueError, match=r"x\.bmp' is a damaged image"):
        decoded(path)
    with pytest.raises(ValueError, match="The Pillow image is a damaged image"):
        decoded(Image.new("RGB", (3, 3)))


# URLs


def test_an_image_of_a_web_server_is_downloaded_once(server: FileServer, cache: Path) -> None:
    file = image_kinds.encoded(PHOTO, "PNG")
    server.files["/a/photo.png"] = Served(file)
    for _ in range(2):
        np.testing.assert_array_equal(decoded(f"{server.url}/a/photo.png"), np.asarray(PHOTO))
    assert len(server.requests) == 1
    assert [path.read_bytes() for path in cache.rglob("photo.png")] == [file]


def test_a_page_instead_of_an_image_is_named_and_not_kept(server: FileServer, cache: Path) -> None:
    server.files["/photo.jpg"] = Served(b"<html>log in</html>")
    server.files["/text.jpg"] = Served(b"<svg/>")
    with pytest.raises(DownloadError, match=r"http://.*/photo\.jpg .*: it is a web page"):
        decoded(f"{server.url}/photo.jpg")
    with pytest.raises(ValueError, match=r"http://.*/text\.jpg is text, such as SVG or HTML"):
        decoded(f"{server.url}/text.jpg")
    assert not list(cache.rglob("*.jpg"))


# Limits


def test_the_limit_of_pixels_is_the_same_for_every_format(tmp_path: Path) -> None:
    path = tmp_path / "x"
    cases = [(kind, 10_000, 5_001) for kind in ("PNG", "GIF", "TIFF")]  # a GIF has no sides above 65,535
    cases += [(kind, *sides) for kind in ("PNG", "TIFF") for sides in ((70_000, 2), (2, 70_000))]
    for kind, width, height in cases:
        path.write_bytes(image_kinds.encoded(Image.new("L", (width, height)), kind))
        with Image.open(path) as image:
            for given in (path, image):
                with pytest.raises(ValueError, match=rf"50,000,000 pixels.*{height} x {width}"):
                    decoded(given)
    head = image_kinds.encoded(PHOTO, "BMP")  # above Pillow's own limit
    path.write_bytes(head[:18] + (30_000).to_bytes(4, "little") * 2 + head[26:])
    with pytest.raises(ValueError, match="50,000,000 pixels"):
        decoded(path)


def peak() -> int:
    """Return the largest memory of the process so far, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.full
def test_the_largest_photo_of_a_grey_model_takes_little_memory(tmp_path: Path) -> None:
    path, plain = tmp_path / "large.png", image_table.Preprocessing(antialias=True)
    path.write_bytes(image_kinds.encoded(Image.new("L", (10_000, 5_000)), "PNG"))
    before = peak()
    prepare(path, image_size=(224, 224), num_channels=1, preprocessing=plain)
    # 150 MB in colour, 50 MB in grey, and copies: 700 MB. Converted in one piece it were 1,840 MB.
    assert peak() - before < 1_000_000


def test_a_crop_of_a_thread_takes_little_memory() -> None:
    before, plain = peak(), image_table.Preprocessing(resize="crop", antialias=True, crop_fraction=0.9)
    for shape in ((2, 60_000), (60_000, 2), (1, 9_000)):
        image = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
        prepared = prepare(image, image_size=(224, 224), num_channels=3, preprocessing=plain)
        assert prepared.shape == (1, 224, 224, 3)
    assert peak() - before < 200_000  # whole, 3 GB and more
