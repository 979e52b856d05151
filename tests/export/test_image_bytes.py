"""A TensorFlow graph decodes good image files as Pillow does, and rejects bad ones."""

from __future__ import annotations

import functools
import io
import resource
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

import image_kinds
from keras_vit.export import server
from keras_vit.model import preprocess
from keras_vit.model.config import Preprocessing, ViTConfig
from marks import full_except
from tiny_models import tiny

FILES = tf.TensorSpec((None,), tf.string)
GOOD, BAD = image_kinds.good(), image_kinds.bad()
# preprocess divides by the deviation, the graph's compiler may multiply by its reciprocal; and preprocess rounds the
# sums of an antialiased resize once, TensorFlow each of them: 4e-7 was measured.
ROUNDING = 1e-6


@functools.cache
def graph(name: str, config: ViTConfig) -> Any:
    function = getattr(server, name)
    return tf.function(lambda files: function(files, config), input_signature=[FILES])


def as_pillow_reads(file: bytes, config: ViTConfig) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image:
        pixels = image_kinds.on_white(ImageOps.exif_transpose(image))
    shape = {"image_size": config.image_size, "num_channels": 3, "preprocessing": config.preprocessing}
    return preprocess.prepare(pixels, **shape)


@pytest.mark.parametrize("name", full_except(["decode"], ["decode", "decode_tolerant"]))
def test_a_file_is_resized_in_pillows_order(name: str) -> None:
    preprocessing = Preprocessing(interpolation="lanczos3", antialias=True, round_pixels=True)
    pictures = [
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (*sides, 3), np.uint8))
        for sides in ((57, 45), (45, 57), (90, 20), (38, 38))  # the first and the third lose more rows
    ]
    files = []
    for picture in pictures:
        picture.save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    made = graph(name, tiny(image_size=36, preprocessing=preprocessing))(tf.constant(files))
    want = [np.asarray(picture.resize((36, 36), Image.Resampling.LANCZOS)) / 127.5 - 1 for picture in pictures]
    np.testing.assert_allclose(made if name == "decode" else made[0], want, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("resize", full_except(["squash"], ["squash", "crop"]))
def test_a_good_file_is_what_pillow_reads(resize: str) -> None:
    for kind, file in GOOD.items():
        preprocessing = Preprocessing(resize=resize, antialias=resize == "crop", crop_fraction=0.9)
        if resize == "crop" and kind in ("wide", "high"):
            preprocessing = Preprocessing(resize=resize)
        config = tiny(preprocessing=preprocessing)
        received = graph("decode", config)(tf.constant([file]))
        np.testing.assert_allclose(received, as_pillow_reads(file, config), rtol=0, atol=ROUNDING, err_msg=kind)


def test_grey_models_see_the_grey_of_preprocess(tmp_path: Any) -> None:
    config = tiny(num_channels=1)
    (tmp_path / "x.png").write_bytes(GOOD["PNG"])
    shape = {"image_size": config.image_size, "num_channels": 1, "preprocessing": config.preprocessing}
    expected = preprocess.prepare(tmp_path / "x.png", **shape)
    received = graph("decode", config)(tf.constant([GOOD["PNG"]]))
    np.testing.assert_allclose(received, expected, rtol=0, atol=ROUNDING)


def test_a_batch_has_files_of_any_kind_and_size() -> None:
    config = tiny()
    together = graph("decode", config)(tf.constant(list(GOOD.values()))).numpy()
    alone = [graph("decode", config)(tf.constant([file])).numpy()[0] for file in GOOD.values()]
    np.testing.assert_array_equal(together, alone)


def test_an_empty_batch_is_an_empty_batch() -> None:
    nothing = tf.constant([], tf.string)
    assert graph("decode", tiny())(nothing).shape == (0, 32, 32, 3)
    images, valid = graph("decode_tolerant", tiny())(nothing)
    assert (images.shape, valid.shape) == ((0, 32, 32, 3), (0,))


def test_a_bad_file_fails_the_call_with_a_reason() -> None:
    for kind, (file, reason) in BAD.items():
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            graph("decode", tiny())(tf.constant([GOOD["PNG"], file]))
        assert reason in str(caught.value), kind


def test_a_tolerant_call_marks_the_bad_and_gives_the_good() -> None:
    config = tiny()
    files, wanted = [], []
    for good, (bad, _) in zip(GOOD.values(), BAD.values(), strict=False):
        files += [bad, good]
        wanted += [False, True]
    images, valid = graph("decode_tolerant", config)(tf.constant(files))
    assert valid.numpy().tolist() == wanted
    expected = graph("decode", config)(tf.constant(files[1::2]))
    np.testing.assert_allclose(images[1::2], expected, rtol=0, atol=ROUNDING)
    assert not np.any(images[::2])
    images, valid = graph("decode_tolerant", config)(tf.constant([file for file, _ in BAD.values()]))
    assert not np.any(valid) and not np.any(images)


def readable(file: bytes) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(file)) as image:
                return bool(image.convert("RGB").size)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False


@pytest.mark.full
def test_of_many_files_every_answer_is_pillows_or_a_refusal() -> None:
    config, random = tiny(), np.random.default_rng(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen: Counter[str] = Counter()
    for _ in range(20):
        kinds, files = zip(*(image_kinds.drawn(random) for _ in range(20)), strict=True)
        images, valid = (tensor.numpy() for tensor in graph("decode_tolerant", config)(tf.constant(files)))
        for kind, file, image, good in zip(kinds, files, images, valid, strict=True):
            # A damaged file that Pillow accepts may be refused; an intact JPEG or PNG must not be.
            if not readable(file):
                assert not good, kind
            elif kind.startswith(("JPEG", "PNG")) and not kind.endswith("damaged"):
                assert good, kind
            if good:
                # Pillow and libjpeg round CMYK differently: one of 255 levels, which are 2 / 255 apart.
                tolerance = ROUNDING + (2 / 255 if "CMYK" in kind else 0)
                np.testing.assert_allclose(image, as_pillow_reads(file, config)[0], rtol=0, atol=tolerance)
            seen["good" if good else "refused"] += 1
        whole = [file for file, good in zip(files, valid, strict=True) if good]
        strict = graph("decode", config)(tf.constant(whole))
        np.testing.assert_allclose(strict, images[valid], rtol=0, atol=ROUNDING)
    assert seen["good"] > 240 and seen["refused"] > 80
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


def test_a_file_that_claims_to_be_huge_takes_no_memory() -> None:
    bombs = [file for kind, (file, _) in BAD.items() if "claims" in kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for file in bombs:
        assert not np.any(graph("decode_tolerant", tiny())(tf.constant([file]))[1])
        with pytest.raises(tf.errors.InvalidArgumentError):
            graph("decode", tiny())(tf.constant([file]))
    # Decoded, the smallest of them had 400 MB; ru_maxrss is in kB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
