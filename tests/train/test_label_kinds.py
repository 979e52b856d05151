"""Labels as people have them: kinds x values x dtypes x sources. Each case is right, told in a warning, or asked for.

A case begins with the classes that are meant, and writes them as people do. It is right if they are read without a
word, told if a warning names what was met, and asked for if an error names the option or what is accepted. What is left
is silently wrong, and there must be none.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow_datasets as tfds
from etils import epath
from PIL import Image

from keras_vit import dense, train
from keras_vit.train import label_check
from keras_vit.train.data.sources import open_data
from keras_vit.train.data.split import Data, Order
from keras_vit.train.label_check import check_held_out, check_training
from tiny_models import built

COUNT, SIDE, IGNORED = 6, 8, 255
OPTIONS = ("mask_values", "num_classes", "class_names", "classes.txt", "objective", "Expected")
WORDS = {"masks", "none", "balanced", "class"}  # one of which a warning about labels has
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
# Names of encodings -> the value in masks of each class; colours have three.
VALUES: dict[str, tuple[Any, ...]] = {
    "numbers": (0, 1, 2, 3),
    "0 and 255": (0, 255),
    "0, 128 and 255": (0, 128, 255),
    "0 and 65535": (0, 65535),
    "far apart": (0, 15, 90),
    "from 1": (1, 2, 3, 4),
    "colours": ((0, 0, 0), RED, GREEN),
    "no black": (RED, GREEN, BLUE),
    "white on black": ((0, 0, 0), (255, 255, 255)),
}


class Case(NamedTuple):
    """Labels that are meant, and how they are written."""

    source: str  # "arrays", "folder" or "records"
    kind: str  # name in VALUES, or how classes of images are written
    dtype: str  # of arrays, or Pillow's mode of files
    classes: int  # that are meant; 1 for labels that are all the same
    ignores: bool = False  # whether some pixels have 255 and do not count
    names: int | None = None  # number of names that the user gives
    evaluates: bool = False  # whether the data are evaluated only
    objective: str = "softmax"

    def meant(self) -> np.ndarray:
        """Return the classes that are meant: (images,), or maps with 255 for pixels that do not count."""
        if self.kind not in VALUES:
            return np.arange(COUNT) % self.classes
        maps = np.arange(COUNT * SIDE * SIDE).reshape(COUNT, SIDE, SIDE) // SIDE % self.classes
        if self.ignores:
            maps[:, :, 0] = IGNORED
        return maps

    def written(self) -> np.ndarray:
        """Return the labels as arrays have them."""
        meant = self.meant()
        if self.kind in VALUES:
            table = np.array(VALUES[self.kind])
            values = np.where(
                (meant == IGNORED).reshape(meant.shape + (1,) * (table.ndim - 1)), 255, table[meant % 255]
            )
            return values.astype(self.dtype if self.source == "arrays" else np.int64)
        rows = np.eye(max(2, self.classes))[meant]
        labels = {"(n,)": meant, "(n, 1)": meant[:, None], "one-hot": rows, "from 1 (n,)": meant + 1}
        return labels.get(self.kind, 2 * meant - 1).astype(self.dtype if self.source == "arrays" else np.int64)


def array_cases() -> Iterator[Case]:
    for kind, dtype, classes, names, objective in itertools.product(
        ("(n,)", "(n, 1)", "one-hot", "from 1 (n,)", "-1 and 1"),
        ("int64", "uint8", "bool", "float32"),
        (1, 2, 3),
        (None, 2, 4),
        ("softmax", "sigmoid"),
    ):
        fits = classes < 3 and kind in ("(n,)", "(n, 1)", "one-hot") if dtype == "bool" else True
        if fits and not (kind == "-1 and 1" and (classes != 2 or dtype == "uint8")):
            yield Case("arrays", kind, dtype, classes, names=names, objective=objective)
    for kind, dtype, classes, ignores, names, evaluates in itertools.product(
        VALUES, ("uint8", "uint16", "int64", "bool", "float32"), (1, 2, 3), (False, True), (None, 2, 3), (False, True)
    ):
        largest = max(map(np.max, VALUES[kind][:classes]))
        fits = classes <= len(VALUES[kind]) and largest <= {"uint8": 255, "bool": 1}.get(dtype, 65535)
        if fits and not (dtype == "bool" and ignores):
            yield Case("arrays", kind, dtype, classes, ignores, names, evaluates)


def folder_cases() -> Iterator[Case]:
    for classes in (1, 2, 3):
        yield Case("folder", "(n,)", "JPEG", classes)
    modes = {"numbers": "1LP", "0 and 65535": "U", "colours": "CA", "no black": "C", "white on black": "CA"}
    names_of_modes = {"1": "1", "L": "L", "P": "P", "U": "I;16", "C": "RGB", "A": "RGBA"}
    for kind, classes, ignores, names in itertools.product(VALUES, (1, 2, 3), (False, True), (None, 2, 3)):
        for mode in modes.get(kind, "LPU"):
            fits = classes <= len(VALUES[kind]) and not (mode == "1" and (classes > 2 or ignores))
            if fits:
                yield Case("folder", kind, names_of_modes[mode], classes, ignores, names)


def record_cases() -> Iterator[Case]:
    for classes in (1, 2):
        yield Case("records", "(n,)", "int64", classes)
    for kind, names in itertools.product(("numbers", "0 and 255", "0, 128 and 255", "far apart"), (None, 2, 3)):
        for ignores in (False, True):
            classes = min(len(VALUES[kind]), 3)
            yield Case("records", kind, "uint8", classes, ignores, names)
    yield Case("records", "0 and 65535", "uint16", 2)


def names_of(case: Case) -> list[str] | None:
    return [f"name{number}" for number in range(case.names)] if case.names else None


def write_folder(case: Case, folder: Path) -> Path:
    """Write a folder with train/ and val/, and classes.txt."""
    image, mode = np.full((SIDE, SIDE, 3), 80, np.uint8), case.dtype
    for split in ("train", "val"):
        for number, label in enumerate(case.written()):
            if case.kind not in VALUES:
                path = folder / split / f"class{label}" / f"{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(path)
                continue
            for name in ("images", "masks"):
                (folder / split / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / split / "images" / f"{number}.jpg")
            path = folder / split / "masks" / f"{number}.png"
            if mode in ("RGB", "RGBA"):
                Image.fromarray(label.astype(np.uint8)).convert(mode).save(path)
            elif mode == "I;16":
                Image.fromarray(label.astype(np.uint16)).save(path)
            else:
                picture = Image.fromarray((label > 0).astype(bool) if mode == "1" else label.astype(np.uint8))
                if mode == "P":
                    picture = Image.fromarray(label.astype(np.uint8), "P")
                    picture.putpalette(list(range(255, -1, -1)) * 3)
                picture.save(path)
    if names := names_of(case):
        (folder / "classes.txt").write_text("\n".join(names))
    return folder


class Records(tfds.core.GeneratorBasedBuilder):
    """A data set of a case."""

    name = "records"
    pkg_dir_path = epath.Path(__file__).parent
    VERSION = tfds.core.Version("1.0.0")
    case: Any = None

    def _info(self) -> Any:
        case, image = self.case, tfds.features.Image(shape=(SIDE, SIDE, 3), encoding_format="png")
        if case.kind not in VALUES:
            features = {"image": image, "label": tfds.features.ClassLabel(num_classes=max(2, case.classes))}
        else:
            options = {"names": names_of(case)} if case.names else {}
            kind = tfds.features.LabeledImage if case.names else tfds.features.Image
            options |= {"labels": options.pop("names")} if case.names else {}
            mask = kind(shape=(SIDE, SIDE, 1), dtype=np.dtype(case.dtype), encoding_format="png", **options)
            features = {"image": image, "segmentation_mask": mask}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(), "validation": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        image = np.full((SIDE, SIDE, 3), 80, np.uint8)
        for number, label in enumerate(self.case.written()):
            if self.case.kind in VALUES:
                yield number, {"image": image, "segmentation_mask": label.astype(self.case.dtype)[..., None]}
            else:
                yield number, {"image": image, "label": int(label)}


def opened(case: Case, folder: Path, **options: Any) -> Data:
    """Write the labels of a case, open them, and check them as a run or an evaluation does."""
    options["has_single_class"] = case.objective == "sigmoid"
    if case.source == "arrays":
        images, names = np.zeros((COUNT, SIDE, SIDE, 3), np.uint8), names_of(case)
        parts = ("evaluation",) if case.evaluates else ("train", "evaluation")
        source: Any = {part: (images, case.written()) for part in parts} | ({"class_names": names} if names else {})
    elif case.source == "folder":
        source = write_folder(case, folder)
    else:
        builder = type("Records", (Records,), {"__module__": __name__, "case": case}, skip_registration=True)(
            data_dir=folder
        )
        tfds.disable_progress_bar()
        builder.download_and_prepare(file_format="array_record" if case.ignores else "tfrecord")
        source = str(builder.data_path)
    data = open_data(source, training=not case.evaluates, **options)
    is_map = case.kind in VALUES
    recipe = train.recipe("segment-folder" if is_map else "finetune-digits", objective=case.objective)
    if case.evaluates:
        check_held_out(data)
    else:
        check_training(data, recipe)
    if recipe.objective not in data.task.OBJECTIVES:  # as `prepare.check_task` says
        raise ValueError(f"objective must be one of {data.task.OBJECTIVES}")
    return data


def as_meant(case: Case, data: Data) -> bool:
    """Compare the labels that a training reads with the classes that are meant."""
    split = data.evaluation if case.evaluates else data.training_split()
    assert split
    with split.naming_bad_image(Order(batch=1, shuffle=False), batches=COUNT):
        labels = np.stack([np.asarray(example["label"]) for example in split.iterate_once()])
    if labels.ndim == 2:  # a one for each class
        labels = labels[:, 0] if labels.shape[1] == 1 else labels.argmax(axis=1)
    found, meant = (
        sorted(each.tolist() for each in array) for array in (labels, case.meant())
    )  # records have an order
    return found == meant


def outcome(case: Case, folder: Path, **options: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            data = opened(case, folder, **options)
            is_right = as_meant(case, data)
        except ValueError as error:
            return "asked for" if any(option in str(error) for option in OPTIONS) else f"unclear: {error}"
        told = [text for text in (str(one.message) for one in caught) if WORDS & set(text.replace(":", "").split())]
    counted = case.meant()[case.meant() != IGNORED]
    if told:
        return "told"
    return "right" if is_right and len(np.unique(counted)) > 1 else "silently wrong"


def run_cases(cases: list[Case], folder: Path) -> collections.Counter[tuple[str, str]]:
    """Classify cases, check that none is silently wrong, and that `mask_values` answers what is asked for."""
    table: collections.Counter[tuple[str, str]] = collections.Counter()
    wrong = []
    for number, case in enumerate(cases):
        found = outcome(case, folder / str(number))
        table[case.source, found.partition(":")[0]] += 1
        if found.startswith(("silently", "unclear")):
            wrong.append((case, found))
        if found == "asked for" and case.kind in VALUES and case.dtype != "float32" and case.classes > 1:
            values = VALUES[case.kind][: case.classes]
            texts = ["#" + bytes(value).hex() if isinstance(value, tuple) else value for value in values]
            if case.names in (None, case.classes) and not (case.ignores and 255 in values):
                answered = outcome(case, folder / f"{number} answered", mask_values=texts)
                expected = {"right", "told"} if case.ignores else {"right"}
                if answered not in expected:
                    wrong.append((case, f"with mask_values {texts}: {answered}"))
    for (source, found), count in sorted(table.items()):
        print(f"{source:8} {found:16} {count}")
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong)
    return table


def test_labels_of_a_few_kinds_are_right_told_or_asked_for(tmp_path: Path) -> None:
    cases = [*array_cases()][::37] + [*folder_cases()][::15] + [*record_cases()][3:4]
    table = run_cases(cases, tmp_path)
    assert {found for _, found in table} == {"right", "told", "asked for"}


def test_of_many_records_some_labels_are_read_and_the_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_check, "MOST_LABELS", 1)
    with pytest.warns(UserWarning, match=r"labels of the 1 of 6 training images leave nothing to learn.*100.0%"):
        opened(Case("records", "(n,)", "int64", 2), tmp_path)
    monkeypatch.setattr(label_check, "MOST_LABELS", 5)
    data = open_data(tmp_path / "records" / "1.0.0")
    assert check_training(data, train.recipe("digits")).startswith(
        "labels of 5 of 6 images: 2 of 2 classes occur, 2 to"
    )


def test_maps_without_a_distance_are_refused_and_too_far_ones_told() -> None:
    images, depth = np.zeros((4, SIDE, SIDE, 3), np.uint8), np.zeros((4, SIDE, SIDE))
    recipe = train.recipe("depth-folder", max_depth=10)
    with pytest.raises(ValueError, match=r"no pixel of the 4 training maps has a distance. Expected: metres.*: none"):
        check_training(open_data({"train": (images, depth)}), recipe)
    with pytest.raises(ValueError, match=r"has a distance below max_depth=10 m.*Received: distances up to 4,000 m"):
        check_training(open_data({"train": (images, depth + 4000)}), recipe)
    depth[:, :4] = 3
    depth[0, :2] = 12.5  # 16 of 128 pixels
    with pytest.warns(UserWarning, match=r"distances beyond max_depth=10 m do not count: 12.5% of those"):
        line = check_training(open_data({"train": (images, depth)}), recipe)
    assert line == "labels of 4 maps: up to 13 m, 50.0% of the pixels"
    floats = {"train": (images, (depth > 0).astype(float))}
    with pytest.raises(ValueError, match="Maps of floats are distances: pass classes as integers"):
        train.run("segment-folder", model=built(), data=floats, changes={"steps": 1}, progress=False)


def test_a_model_is_not_measured_on_masks_without_a_pixel_that_counts() -> None:
    images, masks = np.zeros((4, 32, 32, 3), np.uint8), np.full((4, 32, 32), IGNORED, np.uint8)
    model = dense.segmenter(built(), 2)
    with pytest.raises(ValueError, match="no pixel of the 4 held-out masks counts. Received: 255: 100.0%"):
        train.evaluate(model, {"evaluation": (images, masks)})
    masks[:, 8:] = 0
    with pytest.warns(UserWarning, match="values 0, 255 of the masks are read as two classes"):
        found = train.evaluate(model, {"evaluation": (images, masks)})
    stated = train.evaluate(model, {"evaluation": (images, masks // 255)})
    assert found.metrics == stated.metrics and found.mean_iou < 1
    with pytest.raises(ValueError, match="mask_values are for masks of classes. Received: arrays, a class for every"):
        train.evaluate(model, {"evaluation": (images, np.arange(4))}, mask_values=(0, 255))


def test_what_mask_values_may_be() -> None:
    images, masks = np.zeros((4, SIDE, SIDE, 3), np.uint8), np.zeros((4, SIDE, SIDE), np.uint8)
    for wrong in ((0,), "0", (0, 0), "0,black", "0,#ff00", (-1, 0), 255, (0, 70_000), (0, 1.5)):
        with pytest.raises(ValueError, match="mask_values must be the values of 2 to 255 classes, all different"):
            open_data({"train": (images, masks)}, mask_values=wrong)
    with pytest.raises(ValueError, match="arrays has 3 classes. Expected as many mask_values. Received: 2: 0, #0000ff"):
        open_data({"train": (images, masks), "num_classes": 3}, mask_values="0,#0000FF")
    with pytest.raises(ValueError, match=r"train masks must have the values 7, 9 of classes.*Received: 0. Say which"):
        open_data({"train": (images, masks)}, mask_values=(7, 9))


@pytest.mark.full
@pytest.mark.parametrize("source", ["arrays", "folder", "records"])
def test_no_labels_are_silently_wrong(source: str, tmp_path: Path) -> None:
    cases = [*{"arrays": array_cases, "folder": folder_cases, "records": record_cases}[source]()]
    table = run_cases(cases, tmp_path)
    assert sum(table.values()) == len(cases) >= {"arrays": 400, "folder": 90, "records": 20}[source]
    assert {found for _, found in table} == {"right", "told", "asked for"}
