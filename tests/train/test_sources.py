"""Examples of folders, arrays and prepared data sets: their order, their shares, and damaged ones, which are named."""

import dataclasses
import functools
import io
import itertools
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath
from PIL import Image
from sklearn.datasets import load_sample_images

from keras_vit import digits
from keras_vit.model.config import Preprocessing
from keras_vit.model.task import Classification
from keras_vit.train.data import sources, tfds_source
from keras_vit.train.data.split import Order, RandomAccess, Split, is_decodable, positions
from keras_vit.train.data.tfds_source import RecordStream
from refusals import unrefused
from tiny_models import built

COUNT = 37  # examples of the prepared data sets: not a multiple of a batch
PHOTOS = [Image.fromarray(photo).resize((40, 30)) for photo in load_sample_images().images]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def encoded(photo: int = 0, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    PHOTOS[photo].save(file, kind)
    return file.getvalue()


class Tiny(tfds.core.GeneratorBasedBuilder):
    """A data set of images of one colour each; the attributes vary features, labels and splits."""

    name = "tiny"
    pkg_dir_path = epath.Path(__file__).parent
    VERSION = tfds.core.Version("2.1.0")

    feature: Any = tfds.features.ClassLabel(names=["even", "odd"])
    labels: Any = [number % 2 for number in range(COUNT)]
    images: Any = [np.full((4, 5, 3), number, np.uint8) for number in range(COUNT)]
    parts: tuple[str, ...] = ("train",)
    supervised: tuple[str, str] | None = None

    def _info(self) -> Any:
        features = {"image": tfds.features.Image(encoding_format="png"), "label": self.feature}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=self.supervised
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {part: self._generate_examples() for part in self.parts}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (image, label) in enumerate(zip(self.images, self.labels, strict=True)):
            yield number, {"image": image, "label": label}


def prepare(folder: Path, file_format: str = "tfrecord", shards: int = 4, **changes: Any) -> str:
    """Write a tiny data set and return its folder."""
    builder = type("Tiny", (Tiny,), {"__module__": __name__, **changes}, skip_registration=True)(data_dir=folder)
    config = tfds.download.DownloadConfig(num_shards=shards)
    builder.download_and_prepare(download_config=config, file_format=file_format)
    return os.fspath(builder.data_path)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write the same examples in both formats."""
    return {kind: prepare(tmp_path_factory.mktemp(kind), kind) for kind in ("tfrecord", "array_record")}


def sequential(folder: str, split: str = "train") -> Split:
    """Open a split as if its records were too large for memory, with a shuffle buffer of about five."""
    builder = tfds.builder_from_directory(folder)
    record_bytes = builder.info.dataset_size // COUNT
    request = sources.DataRequest(data=None, train_split=split)
    train = tfds_source.open_prepared(builder, request, memory=5 * record_bytes).train
    assert isinstance(train, RecordStream)
    return train


@pytest.fixture(params=["arrays", "in memory", "array_record", "sequential"])
def split(request: pytest.FixtureRequest, prepared: dict[str, str]) -> Split:
    """Open each kind of source."""
    if request.param == "arrays":
        arrays = (np.stack(Tiny.images), np.array(Tiny.labels))
        opened = sources.open_data({"train": arrays}).train
    elif request.param == "sequential":
        opened = sequential(prepared["tfrecord"])
    else:
        kind = request.param if request.param in prepared else "tfrecord"
        opened = sources.open_data(prepared[kind], train_split="train").train
    assert opened
    return opened


def pairs(examples: Iterable[Any], limit: int | None = None) -> list[tuple[int, int]]:
    """Return (position, index) of each of the first examples."""
    return [(int(each["position"]), int(each["index"])) for each in itertools.islice(examples, limit)]


def indices(order: Order, count: int, limit: int) -> np.ndarray:
    return np.array([int(index) for _, index in positions(order, count).take(limit)])


def test_every_epoch_and_seed_has_a_permutation_of_its_own() -> None:
    epochs = indices(Order(batch=8, seed=1), 100, 500).reshape(5, 100)
    np.testing.assert_array_equal(np.sort(epochs), np.broadcast_to(np.arange(100), (5, 100)))
    others = [indices(Order(batch=8, seed=seed), 100, 100) for seed in (2, 1 + 2**32, 2**64 - 1)]
    # Two random permutations of 100 agree at one place on average, and at 10 in one pair of ten million.
    assert all((one == other).sum() < 10 for one, other in itertools.combinations([*epochs, *others], 2))
    np.testing.assert_array_equal(indices(Order(batch=2, shuffle=False), 5, 12), np.arange(12) % 5)


def test_permutations_are_those_of_tensorflows_index_shuffle() -> None:
    # index_shuffle adds this constant before the two numbers of its seed.
    ours = indices(Order(batch=5, seed=498247692), COUNT, 2 * COUNT)
    theirs = [
        tf.random.experimental.index_shuffle(tf.constant(i, tf.int64), [0, epoch], COUNT - 1).numpy()
        for epoch in range(2)
        for i in range(COUNT)
    ]
    np.testing.assert_array_equal(ours, theirs)


def test_every_kind_of_source_gives_each_example_once_an_epoch_in_an_order_of_its_own(split: Split) -> None:
    both = np.reshape(pairs(split.examples(Order(batch=COUNT)), 2 * COUNT), (2, COUNT, 2))[..., 1]
    np.testing.assert_array_equal(np.sort(both), np.broadcast_to(np.arange(COUNT), (2, COUNT)))
    assert (both[0] != both[1]).any() and (both[0] != np.arange(COUNT)).any()
    for shards in (1, 3):
        read = [[at for _, at in pairs(split.iterate_once(shard=shard, shards=shards))] for shard in range(shards)]
        assert read == [list(range(shard, COUNT, shards)) for shard in range(shards)]


def test_workers_and_replicas_share_the_batch_of_one_and_go_on_where_they_were(split: Split) -> None:
    batch, batches = 8, 11  # more than two epochs
    whole = pairs(split.examples(Order(batch=batch, seed=5)), batches * batch)
    workers = [Order(batch=batch, seed=5, replicas=4, first_replica=first, local_replicas=2) for first in (0, 2)]
    halves = [pairs(split.examples(order), batches * batch // 2) for order in workers]
    joined = np.concatenate([np.reshape(half, (batches, batch // 2, 2)) for half in halves], axis=1)
    np.testing.assert_array_equal(joined.reshape(-1, 2), whole)
    np.testing.assert_array_equal([position for position, _ in whole], np.arange(batches * batch))
    later = Order(batch=batch, seed=5, start=5)  # in the second epoch
    assert pairs(split.examples(later), (batches - 5) * batch) == whole[5 * batch :]


def test_examples_are_the_same_whichever_way_they_are_read_and_can_be_renumbered(split: Split) -> None:
    found = {int(each["index"]): each for each in split.examples(Order(batch=1)).take(COUNT)}
    renumber = functools.partial(Classification(num_classes=5).renumbered, numbers=(3, 1))
    renumbered = dataclasses.replace(split, renumber=renumber)
    numbers = {int(each["index"]): int(each["label"]) for each in renumbered.examples(Order(batch=4)).take(COUNT)}
    for each, other in zip(split.iterate_once(), renumbered.iterate_once(), strict=True):
        number, image = int(each["index"]), each["image"]
        pixels = (tf.io.decode_png(image) if image.dtype == tf.string else image).numpy()
        assert pixels.shape == (4, 5, 3)
        assert int(each["label"]) == pixels[0, 0, 0] % 2  # the colour is the number of the example
        assert each["label"].dtype == tf.int64
        again = found[number]
        assert (again["image"].numpy() == image.numpy()).all() if image.dtype != tf.string else again["image"] == image
        assert again["label"] == each["label"]
        assert int(other["label"]) == numbers[number] == (3, 1)[int(each["label"])]


@pytest.mark.full
def test_a_stream_of_records_is_its_part_of_the_split_whatever_tensorflows_seed(prepared: dict[str, str]) -> None:
    part = sequential(prepared["tfrecord"], "train[10:30]")
    rest = sources.open_data(prepared["tfrecord"], train_split="train[10:30]").train
    assert rest
    streamed, looked_up = ([(int(e["index"]), e["image"].numpy()) for e in s.iterate_once()] for s in (part, rest))
    assert streamed == looked_up
    assert [index for index, _ in streamed] == list(range(20))
    runs = []
    for seed in (1, 2):
        tf.random.set_seed(seed)
        runs.append(pairs(sequential(prepared["tfrecord"]).examples(Order(batch=8)), COUNT))
    assert runs[0] == runs[1]


@pytest.mark.full
def test_a_damaged_image_in_a_file_of_records_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(encoded(kind="PNG")[:-40])
    images = [os.fspath(broken) if number == 7 else image for number, image in enumerate(Tiny.images)]
    train = sources.open_data(prepare(tmp_path / "set", images=images), train_split="train").training_split()
    stream = pairs(train.examples(Order(batch=1)), COUNT)
    # tensorflow-datasets shuffles the examples when it writes them, so the number is not 7.
    (number,) = (int(each["index"]) for each in train.iterate_once() if not is_decodable(each["image"]))
    place = [index for _, index in stream].index(number)
    assert train.first_bad(Order(batch=1), batches=place) is None
    assert train.first_bad(Order(batch=1), batches=place + 1) == f"example {number} of tiny train"


def test_digits_prepare_themselves_and_are_the_digits(cache: Path) -> None:
    data = sources.open_data("digits")
    assert (data.num_classes, data.class_names[3], data.multi_label) == (10, "3", False)
    assert data.train and data.evaluation
    assert (data.train.count, data.evaluation.count) == (1437, 360)
    expected = digits.load()
    theirs = {
        image.tobytes() + bytes([label])
        for image, label in zip(expected.test_images, expected.test_labels, strict=True)
    }
    ours = {
        tf.io.decode_png(e["image"]).numpy().tobytes() + bytes([int(e["label"])])
        for e in data.evaluation.iterate_once()
    }
    assert ours == theirs
    assert not list(cache.rglob("*incomplete*"))


def test_what_is_not_prepared_is_an_error_at_once(tmp_path: Path) -> None:
    cases = [
        ({"data": "cifar10"}, "tfds build cifar10 --data_dir="),
        ({"data": "imagenet2012:5.1.0"}, "tfds build imagenet2012:5.1.0"),
        ({"data": "cifer10"}, "cifar10"),
        ({"data": "tiny:9.9.9"}, "'tiny:9.9.9' is not prepared"),
        *(({"data": name}, "folder") for name in ("nowhere/at/all", "./nowhere", "~/nowhere", "")),
    ]
    assert not unrefused(functools.partial(sources.open_data, data_dir=tmp_path / "somewhere"), cases)


def test_a_prepared_set_is_opened_by_name_by_folder_and_from_above(prepared: dict[str, str]) -> None:
    folder = Path(prepared["tfrecord"])
    by_name = sources.open_data("tiny:2.1.0", data_dir=folder.parents[1], train_split="train")
    for data in (by_name, *(sources.open_data(each, train_split="train") for each in (folder, folder.parent))):
        assert (data.name, data.class_names, data.evaluation) == ("tiny/2.1.0", ("even", "odd"), None)
        assert data.train and data.train.count == COUNT
    cases = [({"train_split": "trian"}, "no split 'trian'"), ({"eval_split": "validation"}, "no split 'validation'")]
    assert not unrefused(functools.partial(sources.open_data, folder), cases)


def test_of_a_prepared_set_with_one_part_a_tenth_is_held_out_aloud(prepared: dict[str, str]) -> None:
    with pytest.warns(UserWarning, match="last tenth"):
        data = sources.open_data(prepared["tfrecord"])
    assert data.train and data.evaluation
    assert (data.train.count, data.evaluation.count) == (33, 4)
    images = [{e["image"].numpy() for e in each.iterate_once()} for each in (data.train, data.evaluation)]
    assert not images[0] & images[1]


def test_several_classes_an_image_are_rows_of_ones_and_zeros(tmp_path: Path) -> None:
    feature = tfds.features.Sequence(tfds.features.ClassLabel(num_classes=3))
    labels = [[number % 3] * (number % 2) + [2] * (number % 4 == 1) for number in range(COUNT)]
    folder = prepare(tmp_path, feature=feature, labels=labels, parts=("validation",), supervised=("image", "label"))
    data = sources.open_data(folder)
    assert data.multi_label and data.train is None and data.evaluation
    for example in data.evaluation.iterate_once():
        colour = int(tf.io.decode_png(example["image"])[0, 0, 0])
        np.testing.assert_array_equal(example["label"], [float(each in labels[colour]) for each in range(3)])
        assert example["label"].dtype == tf.float32


def test_a_set_that_is_not_for_classification_or_has_records_without_a_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not for classification"):
        sources.open_data(prepare(tmp_path / "numbers", feature=tfds.features.Scalar(np.int64)))
    folder = prepare(tmp_path / "classes", labels=[-1] * COUNT)
    train = sources.open_data(folder, train_split="train").training_split()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"label outside 0\.\.1: -1 in example 0 of tiny train"):
        list(train.iterate_once())
    assert_named(sequential(folder), Path("tiny-train.tfrecord-00000-of-00004"), ".*label outside 0..1: -1")


# ---- damaged files of records


def lengthen(file: Path) -> None:
    file.write_bytes(bytes.fromhex("0000000000010000aa3d6be6") + file.read_bytes())  # 2**40, a valid checksum


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-20] ^= 255
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a length beyond its end": (lengthen, "record 0 states a length of 1,099,511,627,776 bytes"),
    "a wrong checksum": (flip, "example 17 of the split cannot be read: corrupted record at"),
    "no records": (lambda file: file.write_bytes(b""), "has 0 records, and not 9 as the data set states"),
    "no file": (Path.unlink, "cannot be read: .*No such file"),
}


def assert_named(split: Split | None, file: Path, said: str) -> None:
    assert split
    order = Order(batch=1, shuffle=False)
    for read in (split.iterate_once, lambda: split.examples(order).take(COUNT)):
        with (
            pytest.raises(ValueError, match=rf"{file.name}'.* {said}"),
            split.naming_bad_image(order, batches=COUNT),
        ):
            list(read())


def test_a_damaged_file_of_records_is_one_error_that_names_it(prepared: dict[str, str], tmp_path: Path) -> None:
    for number, (change, said) in enumerate(DAMAGES.values()):
        folder = shutil.copytree(prepared["tfrecord"], tmp_path / str(number) / "tiny" / "2.1.0")
        [file] = Path(folder).glob("*.tfrecord-00001*")
        change(file)
        assert_named(sequential(str(folder)), file, said)
    folder = shutil.copytree(prepared["array_record"], tmp_path / "arrays" / "tiny" / "2.1.0")
    [file] = Path(folder).glob("*.array_record-00001*")
    file.write_bytes(b"abc")
    split = sources.open_data(folder, train_split="train").train
    assert_named(split, file, "example 9 of the split cannot be read: .*64KB")


# ---- folders


def fill(folder: Path, **classes: int) -> Path:
    """Write photos, the given number for each class."""
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number:04}.jpg").write_bytes(encoded(number % 2))
    return folder


def files(split: Split | None) -> list[str]:
    """Return the names "class/file" of the images of a split, in order."""
    assert isinstance(split, RandomAccess)
    return ["/".join(split.name_of(number).split("/")[-2:]) for number in range(split.count)]


def test_a_folder_with_parts_is_read_by_class_in_order_of_names(tmp_path: Path) -> None:
    fill(tmp_path / "train", zebra=2, ant=3)
    fill(tmp_path / "validation", zebra=1)
    for other in ("notes.txt", ".hidden.jpg", "UPPER.JPG", "grey.PnG"):
        kind = "PNG" if other.endswith("PnG") else "JPEG"
        (tmp_path / "train" / "zebra" / other).write_bytes(encoded(kind=kind))
    (tmp_path / "train" / ".cache").mkdir()
    with pytest.warns(UserWarning, match="that are not read: 1 .*train/zebra/notes.txt"):
        data = sources.open_data(tmp_path)
    assert data.class_names == ("ant", "zebra")
    zebras = ["0000.jpg", "0001.jpg", "UPPER.JPG", "grey.PnG"]
    assert files(data.train) == [f"ant/000{i}.jpg" for i in range(3)] + [f"zebra/{name}" for name in zebras]
    assert files(data.evaluation) == ["zebra/0000.jpg"]
    assert data.train and data.evaluation
    assert [int(each["label"]) for each in data.train.iterate_once()] == [0] * 3 + [1] * 4
    (example,) = data.evaluation.iterate_once()
    assert example["image"] == encoded() and int(example["label"]) == 1


def test_without_parts_a_tenth_is_held_out_and_stays_so_when_files_are_added(tmp_path: Path) -> None:
    fill(tmp_path, cat=300, dog=300)
    with pytest.warns(UserWarning, match="are held out, chosen by their names"):
        before = sources.open_data(tmp_path)
    fill(tmp_path, bird=200)
    with pytest.warns(UserWarning, match="held out"):
        after = sources.open_data(tmp_path)
    old, new = set(files(before.evaluation)), set(files(after.evaluation))
    assert old == {name for name in new if not name.startswith("bird")}
    assert not new & set(files(after.train))
    assert len(new) + len(files(after.train)) == 800
    assert abs(len(new) - 80) < 34  # four standard deviations of a binomial, sqrt(800 * .1 * .9) = 8.5


def test_folders_are_read_through_tensorflows_file_systems() -> None:
    for part, name in itertools.product(("train", "val"), ("a", "b")):
        tf.io.gfile.makedirs(f"ram://photos/{part}/{name}")
        with tf.io.gfile.GFile(f"ram://photos/{part}/{name}/0.jpg", "wb") as file:
            file.write(encoded())
    data = sources.open_data("ram://photos")
    assert data.train and data.train.count == 2
    assert [int(each["label"]) for each in data.train.iterate_once()] == [0, 1]


def test_folders_that_are_not_right_are_said_to_be(tmp_path: Path) -> None:
    for name in ("empty", "flat", "bare/train"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "flat" / "1.jpg").write_bytes(encoded())
    fill(tmp_path / "hollow", cat=2, dog=0)
    fill(tmp_path / "divided" / "train", cat=1)
    fill(tmp_path / "divided" / "val", cat=1, cow=1)
    cases = [
        ({"data": tmp_path / "empty"}, "holds no folders"),
        ({"data": tmp_path / "flat"}, "1 images, but no folders"),
        ({"data": tmp_path / "hollow"}, "dog"),
        ({"data": tmp_path / "divided"}, "classes that the training split lacks: cow"),
        ({"data": tmp_path / "bare"}, "No images are in"),
        ({"data": tmp_path / "divided", "eval_split": "half"}, "has no split 'half'. Received folders: train, val"),
    ]
    assert not unrefused(sources.open_data, cases)
    with pytest.warns(UserWarning, match="too few images"):
        data = sources.open_data(fill(tmp_path / "small", cat=1))
    assert data.train and data.train.count == 1 and data.evaluation is None


@pytest.fixture
def hundred(tmp_path: Path) -> Path:
    """Write 100 photos for training, number 50 truncated, and a damaged held-out one."""
    folder = tmp_path / "photos"
    fill(folder / "train", cat=50, dog=50)
    fill(folder / "val", dog=3)
    for name in ("train/dog/0000.jpg", "val/dog/0001.jpg"):
        (folder / name).write_bytes(encoded()[:-100])
    return folder


def test_a_damaged_file_is_left_out_and_the_next_stands_in_for_it(hundred: Path) -> None:
    train = sources.open_data(hundred).train
    assert train
    order = {"batch": 10, "seed": 4}
    whole = list(train.examples(Order(**order)).take(100))
    read = [int(each["index"]) for each in whole]
    expected = indices(Order(**order), 100, 100)
    np.testing.assert_array_equal(read, np.where(expected == 50, 51, expected))
    assert all(is_decodable(each["image"]) for each in whole)
    with pytest.warns(UserWarning, match=r"dog/0000.jpg is a damaged image: .*. Left out: 1 of 100."):
        train.warn_skipped()
    assert train.num_skipped == 1
    again = sources.open_data(hundred).train  # as after a restart
    assert again
    assert pairs(again.examples(Order(start=3, **order)), 70) == pairs(whole)[30:]
    parts = [Order(replicas=2, first_replica=number, **order) for number in range(2)]
    shares = [pairs(sources.open_data(hundred).training_split().examples(part), 50) for part in parts]
    assert sorted(shares[0] + shares[1]) == pairs(whole)  # as on two workers


def wait_for_checks() -> None:
    """Wait until no file is checked: TensorFlow deletes a stream with Python's lock held, for which checks wait."""
    while any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate()):
        time.sleep(0.01)


def test_a_damaged_file_is_fatal_if_asked_and_a_folder_of_nothing_else_always(hundred: Path, tmp_path: Path) -> None:
    train = sources.open_data(hundred, on_bad_image="fail").training_split()
    order = Order(batch=8)
    with (
        pytest.raises(ValueError, match=r"train/dog/0000\.jpg is a damaged image: .*. Remove the file, or skip it"),
        train.naming_bad_image(order),
    ):
        list(train.examples(order).take(100))
    wait_for_checks()
    for path in fill(tmp_path / "none" / "train", cat=2).glob("*/*.jpg"):
        path.write_bytes(b"")
    train = sources.open_data(tmp_path / "none", train_split="train").training_split()
    with (
        pytest.raises(
            ValueError, match=f"None of the 2 images of {tmp_path}/none can be used. .*cat/.*is an empty file"
        ),
        train.naming_bad_image(order),
    ):
        list(train.examples(order).take(1))
    assert not pairs(train.iterate_once())
    wait_for_checks()


def test_damage_is_found_where_decoding_at_full_size_finds_it() -> None:
    random = np.random.default_rng(0)
    for whole in (encoded(kind="JPEG"), encoded(kind="PNG")):
        assert is_decodable(whole)
        for length in random.integers(1, len(whole), 40):
            try:
                readable = bool(tf.size(tf.io.decode_jpeg(whole[:length], channels=3)))
            except tf.errors.InvalidArgumentError:
                readable = False
            assert is_decodable(whole[:length]) == readable, length
    assert not is_decodable(encoded(kind="BMP")) and not is_decodable(encoded(kind="WEBP"))


IMAGES = np.zeros((4, 6, 5, 3), np.uint8)


def test_arrays_that_do_not_fit_are_refused() -> None:
    wrong = [
        ({"train": (IMAGES, [0, 1, 2, 1]), "num_classes": 2}, "train label 2 of example 2 is outside 0..1"),
        ({"train": (IMAGES, [0, -1, 0, 1])}, "label -1 of example 1 is outside"),
        ({"train": (IMAGES, [0, 1, 0, 1]), "evaluation": (IMAGES, [0, 1, 5, 0])}, "evaluation label 5"),
        ({"train": (IMAGES, [0, 1, 0])}, "4 images and 3 labels"),
        ({"train": (IMAGES.astype(bool), [0, 1, 0, 1])}, "Received: bool"),
        ({"train": (IMAGES[0], [0, 1, 0, 1])}, "Received: uint8 (6, 5, 3)"),
        ({"train": (IMAGES, [0.5, 1, 0, 1])}, "Received: float64"),
        ({"train": (IMAGES[:0], [])}, "Received: uint8 (0, 6, 5, 3)"),
        ({"train": IMAGES}, "Expected train to be (images, labels)"),
        ({"test": (IMAGES, [0, 1, 0, 1])}, "Received keys: test"),
        ({}, "Received keys: none"),
        ({"train": (IMAGES, np.eye(4)), "num_classes": 5}, "labels of 5 classes"),
        ({"train": (IMAGES, np.eye(4)), "evaluation": (IMAGES, [0, 1, 2, 3])}, "labels of one kind"),
        ({"train": (IMAGES, [0, 1, 0, 1]), "num_classes": 2, "class_names": "abc"}, "contradict"),
    ]
    assert not unrefused(lambda **data: sources.open_data(data), wrong)
    options = [({"on_bad_image": "ignore"}, "on_bad_image must be"), ({"train_split": "train"}, "named splits")]
    assert not unrefused(functools.partial(sources.open_data, {"train": (IMAGES, [0, 1, 0, 1])}), options)


def test_arrays_may_have_several_classes_an_image() -> None:
    data = sources.open_data({"train": (IMAGES, np.tri(4, dtype=int)), "class_names": ["a", "b", "c", "d"]})
    assert data.multi_label and data.class_names == ("a", "b", "c", "d") and data.train
    np.testing.assert_array_equal([each["label"] for each in data.train.iterate_once()], np.tri(4))


def test_grey_arrays_without_a_last_axis_are_asked_for_it() -> None:
    images, labels = np.zeros((6, 8, 8), np.uint8), np.arange(6) % 2
    with pytest.raises(ValueError, match=r"images\[\.\.\., None\]"):
        sources.open_data({"train": (images, labels)})
    with pytest.raises(ValueError, match=r"images\[\.\.\., None\]"):
        built().preprocess(images)


def test_a_folder_for_a_model_of_other_channels_says_what_files_have(hundred: Path) -> None:
    split = sources.open_data(hundred).training_split()
    with pytest.raises(ValueError, match=r"1 channel \(grey\) or 3 \(colour\).* takes 10 channels: pass arrays"):
        split.expect(10, Preprocessing())


def test_held_out_images_that_are_trained_on_are_counted() -> None:
    images, labels = np.arange(6 * 64, dtype=np.uint16).reshape(6, 8, 8, 1), np.arange(6) % 2
    other = images[2:].copy()
    other[0, 0, 0] += 1  # of which three are as in training
    with pytest.warns(UserWarning, match="3 of the 4 held-out images are training images"):
        sources.open_data({"train": (images, labels), "evaluation": (other, labels[2:])})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sources.open_data({"train": (images[:2], labels[:2]), "evaluation": (images[2:], labels[2:])})
