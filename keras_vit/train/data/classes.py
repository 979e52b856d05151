"""Give the classes of a data set the numbers that they have in a model, by comparing their names."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence

from keras_vit.model.labels import match_classes, names
from keras_vit.model.task import Task
from keras_vit.train.data.split import Data


def are_comparable(labels: str | tuple[str, ...] | None, num_classes: int, class_names: Sequence[str] | None) -> bool:
    """Return whether model and data both have names of their classes. A model's numbers are names of numbers only."""
    if not labels or not class_names:
        return False
    return labels != tuple(map(str, range(num_classes))) or not set(labels).isdisjoint(class_names)


def check_kind(data: Data, task: Task) -> None:
    """Raise a ValueError if a data set has labels of another task than a model."""
    if task.NAME != data.task.NAME:
        raise ValueError(
            f"{data.name} has {data.task.NAME}, and the model returns {task.NAME}. For maps a model needs a head: "
            "keras_vit.dense.segmenter(model, num_classes) or depth(model), or a recipe that names one, such as "
            "segment-folder or depth-folder; for classes of images, pass a model without such a head"
        )


def match_data(data: Data, labels: str | tuple[str, ...] | None, num_classes: int) -> Data:
    """Return a data set whose labels are numbers of a model's classes, of which it may have some only.

    Without names of both (`labels` None) there is nothing to compare but the number of classes. Data with classes that
    the model does not have are a ValueError.
    """
    if not labels or not are_comparable(labels, num_classes, data.class_names):
        if data.num_classes != num_classes:
            raise ValueError(
                f"The model has {num_classes} classes and {data.name} has {data.num_classes}: evaluate weights that"
                f" were trained for its classes, or load the model with num_classes={data.num_classes} and train the"
                " head"
            )
        _warn_numbers(data)
        return data
    numbers = match_classes(labels, num_classes, data.class_names, data.name)
    if numbers == list(range(num_classes)):
        return data
    own_names = dict(zip(numbers, data.class_names, strict=True))
    class_names = [own_names.get(number, label) for number, (_, label) in enumerate(names(labels, num_classes))]
    data = dataclasses.replace(data, num_classes=num_classes, class_names=tuple(class_names))
    renumber = functools.partial(data.task.renumbered, numbers=tuple(numbers))
    train, evaluation = (
        split and dataclasses.replace(split, renumber=renumber) for split in (data.train, data.evaluation)
    )
    return dataclasses.replace(data, train=train, evaluation=evaluation)


def _warn_numbers(data: Data) -> None:
    """Warn of folders called 10 and 2 in the order of text, because the model does not say which order it has."""
    found = list(data.class_names)
    if all(map(str.isdecimal, found)) and sorted(found, key=int) != found:
        warnings.warn(
            f"The model has no class names, and those of {data.name} are numbers in the order of text:"
            f" {', '.join(found[:3])}, ... are the classes 0, 1, 2, ... For the order of numbers, rename 2 to 02.",
            stacklevel=4,
        )
