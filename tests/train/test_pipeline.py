"""Batches for training and evaluation are the same in every run, and prepared as the model does it."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_vit.model import preprocess
from keras_vit.model.config import Preprocessing
from keras_vit.model.task import Classification
from keras_vit.train.data import augment, pipeline
from keras_vit.train.data.split import Order, RandomAccess, Split
from marks import full_except

SIZE = (16, 24)
OTHER = Preprocessing(
    resize="crop",
    interpolation="bicubic",
    antialias=True,
    crop_fraction=0.9,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)


def recipe(**changes: Any) -> Any:
    """Return the fields of a recipe that the pipeline reads, by default without random augmentation."""
    fields = {
        "crop": "resize",
        "crop_resize": None,
        "min_area": 0.05,
        "flip": False,
        "shift": 0.0,
        "randaugment_layers": 0,
        "randaugment_magnitude": 0.0,
        "mixup": 0.0,
    }
    return SimpleNamespace(**(fields | changes))


ALL = recipe(crop="inception", flip=True, shift=0.1, randaugment_layers=2, randaugment_magnitude=12.0, mixup=0.5)


def pictures(count: int, channels: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (30 + number, 40, channels), np.uint8) for number in range(count)]


def encoded(image: np.ndarray, kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image.squeeze()).save(file, kind)
    return file.getvalue()


def files(count: int = 10) -> Split:
    """Return alternating JPEG and PNG files, the last two grey; example i has class i % 4."""
    images = [*pictures(count - 2), *pictures(2, channels=1)]
    data = [encoded(image, ("jpeg", "png")[number % 2]) for number, image in enumerate(images)]
    return RandomAccess(
        name="files",
        count=count,
        make_reader=lambda: lambda index: {"image": tf.constant(data)[index], "label": index % 4},
    )


def arrays(images: np.ndarray, labels: Any) -> Split:
    labels = np.asarray(labels)
    return RandomAccess(
        name="arrays",
        count=len(images),
        make_reader=lambda: lambda index: {"image": tf.constant(images)[index], "label": tf.constant(labels)[index]},
    )


def training(
    split: Split,
    with_recipe: Any,
    take: int,
    channels: int = 3,
    preprocessing: Preprocessing = Preprocessing(),  # noqa: B008
    **changes: Any,
) -> list[dict[str, Any]]:
    how = {
        "model_input": pipeline.ModelInput(SIZE, channels, preprocessing),
        "task": Classification(num_classes=4),
        "order": Order(batch=4, seed=11),
    }
    stream = pipeline.training_batches(split, with_recipe, **(how | changes))
    assert stream.element_spec["image"].shape[0] == (changes.get("order") or how["order"]).replica_batch  # static
    return list(stream.take(take).as_numpy_iterator())


def evaluation(
    split: Split,
    batch_size: int = 4,
    channels: int = 3,
    preprocessing: Preprocessing = Preprocessing(),  # noqa: B008
    **changes: Any,
) -> list[dict[str, Any]]:
    how = {"model_input": pipeline.ModelInput(SIZE, channels, preprocessing), "task": Classification(num_classes=4)}
    return list(pipeline.evaluation_batches(split, batch_size=batch_size, **(how | changes)).as_numpy_iterator())


def assert_equal(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.fixture(autouse=True)
def few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave two operations of RandAugment: compiling all takes seconds, and test_augment.py tests them."""
    monkeypatch.setattr(augment, "OPERATIONS", {name: augment.OPERATIONS[name] for name in ("Rotate", "Solarize")})


# The same in every run


@pytest.mark.full
def test_batches_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    want = training(files(), ALL, 6)
    for calls in (1, 7):
        monkeypatch.setattr(tf.data, "AUTOTUNE", calls)
        assert_equal(training(files(), ALL, 6), want)


@pytest.mark.full
def test_a_stream_that_goes_on_is_the_one_that_never_stopped_and_another_seed_another() -> None:
    want = training(files(), ALL, 6)
    assert_equal(training(files(), ALL, 2, order=Order(batch=4, seed=11, start=4)), want[4:])  # in the second epoch
    first, epoch = training(files(2), recipe(crop="inception"), 2, order=Order(batch=2, seed=1, shuffle=False))
    largest = 2**64 - 1
    (other,) = training(files(2), recipe(crop="inception"), 1, order=Order(batch=2, seed=largest, shuffle=False))
    assert (first["image"] != epoch["image"]).any() and (first["image"] != other["image"]).any()


@pytest.mark.full
def test_replicas_share_out_the_batch_of_one() -> None:
    alone = recipe(crop="inception", flip=True, shift=0.1)  # mixup mixes examples of one replica only
    (whole,) = training(files(), alone, 1)
    parts = [
        training(files(), alone, 1, order=Order(batch=4, seed=11, replicas=2, first_replica=replica))[0]
        for replica in (0, 1)
    ]
    for name in ("image", "label"):
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), whole[name])
    mixed = recipe(flip=True, mixup=0.5)
    both = training(files(), mixed, 4, order=Order(batch=4, seed=11, replicas=2, local_replicas=2))
    second = training(files(), mixed, 2, order=Order(batch=4, seed=11, replicas=2, first_replica=1))
    assert_equal(both[1::2], second)  # with mixup too


# Prepared as the model does it


def test_without_a_crop_training_sees_what_evaluation_and_the_model_see() -> None:
    images = np.stack([image[:30] for image in pictures(4)])
    order = Order(batch=4, shuffle=False)
    for chosen in (Preprocessing(), OTHER):
        (seen,) = training(arrays(images, range(4)), recipe(crop="none"), 1, preprocessing=chosen, order=order)
        (evaluated,) = evaluation(arrays(images, range(4)), preprocessing=chosen)
        own = preprocess.prepare(list(images), image_size=SIZE, num_channels=3, preprocessing=chosen)
        # TensorFlow rounds each sum of an antialiased resize to float32, NumPy once: 2e-6 was measured.
        np.testing.assert_allclose(evaluated["image"], own, rtol=0, atol=4e-6)
        np.testing.assert_array_equal(seen["image"], evaluated["image"])
        assert seen["image"].dtype == np.float32 and seen["label"].dtype == np.float32


def test_resizing_is_the_official_one_whatever_the_models() -> None:
    split = arrays(pictures(1)[0][None], [0])
    (seen,) = training(split, recipe(), 1, preprocessing=OTHER, order=Order(batch=1))
    want = (tf.image.resize(pictures(1)[0], SIZE) / 255 - OTHER.mean) / OTHER.std
    np.testing.assert_allclose(seen["image"][0], want, rtol=1e-5, atol=1e-5)  # scaled by 255 before resizing


def test_files_are_evaluated_as_the_model_reads_them(tmp_path: Any) -> None:
    split, paths = files(4), []
    for example in split.iterate_once():
        paths.append(tmp_path / str(int(example["index"])))
        paths[-1].write_bytes(example["image"].numpy())
    for channels in (1, 3):
        want = preprocess.prepare(paths, image_size=SIZE, num_channels=channels, preprocessing=Preprocessing())
        np.testing.assert_array_equal(evaluation(split, channels=channels)[0]["image"], want)


CROPS = [("inception", 3), ("random", 3), ("resize", 1), ("none", 1)]


@pytest.mark.parametrize(("crop", "channels"), full_except([("inception", 3)], CROPS))
def test_every_crop_takes_files_and_arrays_of_any_channels(crop: str, channels: int) -> None:
    own = recipe(**(vars(ALL) | {"crop": crop, "randaugment_layers": 2 * (crop == "inception")}))
    for split in (files(), arrays(pictures(1)[0][None], [0]), arrays(pictures(1, channels=1)[0][None], [0])):
        (batch,) = training(split, own, 1, channels)
        assert batch["image"].shape == (4, *SIZE, channels) and np.ptp(batch["image"]) > 0.1
        assert abs(batch["image"]).max() <= 1 + 1e-6  # mixing two pixels of -1 rounds


def test_a_random_crop_is_a_part_of_the_larger_image() -> None:
    image = pictures(1)[0]
    batches = training(arrays(image[None], [0]), recipe(crop="random", crop_resize=27), 5, order=Order(batch=1))
    larger = (tf.image.resize(image, (18, 27)).numpy() - 127.5) / 127.5
    windows = np.lib.stride_tricks.sliding_window_view(larger, (*SIZE, 3)).reshape(-1, *SIZE, 3)
    # Equal up to float32 rounding, because the larger image was resized by the same operation.
    places = [np.flatnonzero(np.abs(windows - batch["image"][0]).max(axis=(1, 2, 3)) < 1e-6) for batch in batches]
    assert [len(found) for found in places] == [1] * 5 and len({int(found[0]) for found in places}) > 1


def test_a_shift_lets_the_prepared_black_in() -> None:
    white = arrays(np.full((1, 8, 8, 3), 255, np.uint8), [0])
    (batch,) = training(white, recipe(shift=0.25), 1, preprocessing=OTHER, order=Order(batch=16))
    black, light = ((np.array(value) - OTHER.mean) / OTHER.std for value in (0.0, 1.0))
    for channel in range(3):
        values = batch["image"][..., channel]
        is_black, is_light = np.isclose(values, black[channel]), np.isclose(values, light[channel])
        assert (is_black ^ is_light).all() and is_black.any() and is_light.mean() > 0.5


def test_mixup_mixes_images_and_labels_by_the_same_share() -> None:
    split = arrays(np.stack([np.full((8, 8, 3), value, np.uint8) for value in (0, 80, 160, 240)]), range(4))
    order = Order(batch=4, shuffle=False)
    shares = []
    for batch in training(split, recipe(mixup=0.8), 4, order=order):
        mixed, label = (batch["image"][:, 0, 0, 0] + 1) * 127.5, batch["label"]
        np.testing.assert_allclose(label @ [0, 80, 160, 240], mixed, atol=1e-3)  # of values up to 240 in float32
        np.testing.assert_allclose(label.sum(axis=1), 1, rtol=1e-6)
        assert (label.argmax(axis=1) == range(4)).all() and ((label > 0).sum(axis=1) == 2).all()
        assert (np.roll(label, (-1, -1), axis=(0, 1)) == label).all()  # one share, and the row before, for all
        shares.append(label.max())
    assert len(set(shares)) == 4  # each batch draws new numbers


# Labels


def test_labels_and_crops_that_do_not_fit_are_errors() -> None:
    image = np.zeros((1, 8, 8, 3), np.uint8)
    for label, message in ((4, "not below the number of classes"), (-1, "below 0")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            training(arrays(image, [label]), recipe(), 1)
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            evaluation(arrays(image, [label]))
    with pytest.raises(ValueError, match=r"4 classes.*rows of 5"):
        training(arrays(image, np.zeros((1, 5), np.float32)), recipe(), 1)
    with pytest.raises(ValueError, match=r"\(16, 24\).*Received: 23"):
        training(files(), recipe(crop="random", crop_resize=23), 1)


# Evaluation


@pytest.mark.parametrize(("batch_size", "shards"), full_except([(5, 3)], [(3, 1), (16, 1), (5, 3)]))
def test_evaluation_counts_every_example_once_in_batches_of_one_size(batch_size: int, shards: int) -> None:
    per_shard = [evaluation(files(), batch_size, shard=(number, shards)) for number in range(shards)]
    assert len({len(batches) for batches in per_shard}) == 1  # workers take the same number of steps
    everything = [batch for batches in per_shard for batch in batches]
    assert all(batch["image"].shape == (batch_size, *SIZE, 3) for batch in everything)
    images, labels, weights = (
        np.concatenate([each[key] for each in everything]) for key in ("image", "label", "weight")
    )
    counted = weights == 1
    assert counted.sum() == 10 and (weights[~counted] == 0).all() and (labels[~counted] == 0).all()
    alone = evaluation(files(), 1)
    assert {image.tobytes() for image in images[counted]} == {batch["image"].tobytes() for batch in alone}


def test_evaluation_reads_only_the_chosen_examples_and_rows_of_labels_stay_as_they_are() -> None:
    everything = evaluation(files(), 1)
    (batch,) = evaluation(files(), 4, only=np.array([7, 2, 9]))
    assert batch["weight"].tolist() == [1, 1, 1, 0]
    for row, index in enumerate((2, 7, 9)):  # in the split's order
        np.testing.assert_array_equal(batch["image"][row], everything[index]["image"][0])
    rows = np.array([[1, 0, 1, 0], [0, 0, 0, 0]], np.float32)
    split = arrays(np.zeros((2, 8, 8, 3), np.uint8), rows)
    (batch,) = training(split, recipe(), 1, order=Order(batch=2, shuffle=False))
    np.testing.assert_array_equal(batch["label"], rows)
    np.testing.assert_array_equal(evaluation(split, batch_size=2)[0]["label"], rows)
