"""Tasks: what a model's output means, and so how it is trained, evaluated, exported, compared and shown to people.

`of_model(model)` returns the task of a model. No other module knows whether the output is a class, a map or a feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from keras_vit.model.classification import Classification, Labels, Prediction, Tensors, softmax

if TYPE_CHECKING:
    from keras_vit.model.config import ViTConfig

__all__ = [
    "KINDS",
    "MAIN_OUTPUTS",
    "Classification",
    "Prediction",
    "Task",
    "from_config",
    "kind_of_labels",
    "of_model",
    "register",
    "softmax",
]

# Names of the outputs of all tasks. A file's main output is the first of these that it has.
MAIN_OUTPUTS = ("logits", "probabilities", "features", "depth", "classes")
# Tasks whose labels may be given as arrays. Each is called with the number of classes and their labels.
KINDS: list[type[Any]] = [Classification]
Kind = TypeVar("Kind", bound=type[Any])


class Task(Protocol):
    """Protocol for everything the package needs to know about the output of a model.

    A class of tasks in KINDS also has LABELS, `read_labels` and `count_classes`, as `Classification` has. In training,
    `targets` prepares the labels of a batch, and `losses` compares the output with them. In an evaluation `sums`
    returns what one batch adds; replicas and workers add these, and `means` divides at the end.
    """

    NAME: ClassVar[str]  # what the model returns, in words
    OBJECTIVES: ClassVar[tuple[str, ...]]  # of a recipe, which `losses` takes as `kind`; the first is the usual one

    @property
    def num_classes(self) -> int:
        """Number of classes of the labels; 0 without a head."""

    @property
    def labels(self) -> str | tuple[str, ...] | None:
        """Name of a list in zoo/labels, or the names of the classes; None if they have none."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that an exported file may have; the model itself returns the first."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `losses` returns beside the loss."""

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the numbers that `sums` returns: "count" and "unlabelled" are those of images, others are free."""

    def check_labels(self, split: str, labels: np.ndarray) -> None:
        """Raise a ValueError that names the split if labels, as `read_labels` returns them, are not of the classes."""

    def renumbered(self, label: Any, numbers: Sequence[int]) -> Any:
        """Return an example's label with a new number for each class; `num_classes` is that of the new numbers."""

    def check_output(self, shape: Any) -> None:
        """Raise a ValueError if the output of a model, of this shape, cannot be compared with labels."""

    def targets(self, labels: Any) -> Any:
        """Return a batch of a data set's labels as the tensor that `losses` and `sums` take."""

    def losses(self, output: Any, targets: Any, *, kind: str, label_smoothing: float = 0.0) -> tuple[Any, Tensors]:
        """Return the loss of every image and its further metrics, each float32 (batch,). `kind` is the recipe's."""

    def sums(self, output: Any, targets: Any, weights: Any) -> Any:
        """Return what a batch adds to an evaluation, float64, named by `sum_names`; `weights` are 0 for padding."""

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Turn the totals into metrics. The first decides which model of a run is the best: higher is better."""

    def by_class(self, totals: dict[str, float]) -> Mapping[str, Mapping[str, float]]:
        """Turn the totals into the metrics of each class by its name; {} if only the whole is measured."""

    def served_outputs(self, computed: Tensors, names: Sequence[str] | None, top: int) -> Tensors:
        """Return what a server answers, TensorFlow tensors, from the model's "features" and its output."""

    def exported_output(self, name: str, output: np.ndarray) -> np.ndarray:
        """Return what a file's output of this name, one of `outputs`, must be where the model returns `output`."""

    def agreement(self, name: str, expected: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which decisions of a file agree with its model's, and which agree or are near ties; bool (n,)."""

    def comparison(self, name: str, expected: np.ndarray, received: np.ndarray) -> dict[str, Any]:
        """Return fields of an export's report that this task adds or measures in another way."""

    def class_names(self, labels: Labels | Iterable[str] = None) -> list[str] | None:
        """Return the names of the classes in an exported file; None for the model's own. None if there are none."""

    def decode(self, output: Any, top: int) -> list[Any]:
        """Return what people read of the output for each image."""

    def image_logits(self, logits: np.ndarray) -> np.ndarray:
        """Return logits of whole images, (batch, classes), from the model's output."""

    def embedding_output(self) -> str:
        """Return which output embeds an image, "features" or "logits"; raise a ValueError if none does."""


def register(kind: Kind) -> Kind:
    """Add a class of tasks to KINDS, as a decorator."""
    KINDS.append(kind)
    return kind


def kind_of_labels(labels: np.ndarray) -> type[Any] | None:
    """Return the class of the task that has such labels, those of a whole split; None if no task has."""
    return next((kind for kind in KINDS if kind.read_labels(labels) is not None), None)


def of_model(model: Any) -> Task:
    """Return the task of a Keras model: its own `task`, or else the classification that its output's shape allows."""
    own: Task | None = getattr(model, "task", None)
    if own is not None:
        return own
    shape = getattr(model, "output_shape", None)
    shape = shape if isinstance(shape, tuple) else ()
    return Classification(num_classes=shape[-1] if len(shape) > 1 and shape[-1] else 0, is_pooled=len(shape) == 2)


def from_config(config: ViTConfig) -> Task:
    """Return the task of the VisionTransformers of a config."""
    return Classification(
        num_classes=config.num_classes,
        labels=config.labels,
        is_pooled=not config.is_unpooled,
        is_projection=config.projection_head,
        read_tokens=config.read_tokens if config.is_unpooled else None,
        probabilities=config.probabilities,
    )
