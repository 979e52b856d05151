"""Collect the entries of the gallery, one for each file of published weights, from the cards and `zoo.table`."""

import functools
import re
from dataclasses import dataclass

from keras_vit import zoo
from keras_vit.converters import expressible
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count
from keras_vit.zoo.cards import Accuracy, Weights

# The measure that the table and the plot compare. The cards show other measures too.
DATASET, METRIC = "imagenet2012", "top-1"
MIB = 2**20
FIRST = "ViT-S/16"  # the model that README.md recommends for a first try


@dataclass(frozen=True, kw_only=True)
class Point:
    """A file's reported top-1 accuracy on ImageNet-1k without further training, and the operations it takes."""

    accuracy: Accuracy
    gflops: float  # for one image of the accuracy's size; a multiply-add counts as two


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of published weights."""

    rank: int  # index of the model: the one to try first, then the others in the order of `zoo.names`
    family: str
    weights: Weights
    config: ViTConfig  # of the model as `zoo.load` loads it
    is_default: bool  # whether `zoo.load` takes the file if no weights are named
    parameters: int
    gflops: float  # for one image of the weights' own size; a multiply-add counts as two
    kernel_bytes: dict[str, int]  # size of the weights by the dtype of their kernels
    load: str  # the line of Python that loads the file
    formats: dict[str, bool]  # result of `expressible.formats_of`

    @property
    def name(self) -> str:
        """The model's name."""
        return self.weights.architecture

    @property
    def model_anchor(self) -> str:
        """The id of the model's card in the page."""
        return _anchor(self.name)

    @property
    def anchor(self) -> str:
        """The id of these weights in the page."""
        return f"{self.model_anchor}.{_anchor(self.weights.tag)}"

    @property
    def is_hybrid(self) -> bool:
        """Return whether the patches are taken from a ResNet's feature map."""
        return self.config.resnet is not None and self.config.num_layers > 0

    @property
    def file_bytes(self) -> int | None:
        """Size of the published file, computed from MiB if its exact size is not published; None if unknown."""
        return self.weights.bytes or (round(self.weights.size_mib * MIB) if self.weights.size_mib else None)

    @functools.cached_property
    def point(self) -> Point | None:
        """The first reported top-1 accuracy on ImageNet-1k; None if there is none."""
        for accuracy in self.weights.accuracy:
            if (accuracy.dataset, accuracy.metric) == (DATASET, METRIC):
                measured = self.config.replace(image_size=accuracy.image_size)
                return Point(accuracy=accuracy, gflops=count(measured).flops / 1e9)
        return None

    @property
    def search_text(self) -> str:
        """The text to search, in lower case: spellings of the name, tag, file, labels, paper, licence and formats."""
        weights, short_name = self.weights, self.name.replace("ViT-", "")
        names = [name.replace("/", sign) for name in (self.name, short_name) for sign in "/_-"]
        fields = [weights.tag, weights.file, weights.labels or "", str(weights.paper), weights.licence, weights.source]
        measures = [f"{accuracy.dataset} {accuracy.metric}" for accuracy in weights.accuracy]
        measures += ["ImageNet-1k"] if self.point else []
        kind = "hybrid resnet" if self.is_hybrid else "pure"
        return " ".join([*names, *fields, *measures, kind, *self.formats]).casefold()


def entries() -> list[Entry]:
    """Return an entry for each file of the zoo, in the order of `rank`, each model's recommended weights first."""
    rows = {(row["name"], row["weights"]): row for row in zoo.table()}
    found = []
    for rank, name in enumerate(sorted(zoo.names(), key=lambda name: name != FIRST)):
        for tag, weights in zoo.card(name).weights.items():
            row, config = rows[name, tag], weights.whole_config()
            entry = Entry(
                rank=rank,
                family=row["family"],
                weights=weights,
                config=config,
                is_default=row["default"],
                parameters=row["parameters"],
                gflops=row["gflops"],
                kernel_bytes={precision: row[f"bytes_{precision}"] for precision in ("float32", "float16", "int8")},
                load=row["load"],
                formats=expressible.formats_of(config),
            )
            found.append(entry)
    return found


def _anchor(text: str) -> str:
    """Return text as a part of an HTML id: "R50+ViT-B/16" becomes "R50-ViT-B-16"."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", re.sub(r"\+(?!\w)", "plus", text)).strip("-")
