"""What the gallery shows: one entry for every file of published weights, gathered from the cards and `zoo.table`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keras_vit import zoo
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import forward_flops
from keras_vit.zoo.cards import Accuracy, Weights
from keras_vit.zoo.gallery import formats

# The one measure by which models are ranked and plotted. Other figures stand on the cards.
DATASET, METRIC = "imagenet2012", "top-1"
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Point:
    """A place in the plot: top-1 accuracy on ImageNet-1k of the file as it is.

    Attributes:
        accuracy: as reported.
        gflops: of one image of the size that it was measured at, a multiply-add counted as two.
    """

    accuracy: Accuracy
    gflops: float


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of published weights.

    Attributes:
        rank: of the model among all, in the natural order of names.
        weights: all that the card says of it.
        config: of the model as it is loaded.
        default: whether `zoo.load` takes it where no weights are named.
        parameters: exact.
        gflops: of one image of the weights' own size, a multiply-add counted as two.
        stored: bytes of the weights by the precision of their kernels: "float32", "float16", "int8".
        load: the line of Python that loads it.
        formats: as `formats.writable` tells.
    """

    rank: int
    weights: Weights
    config: ViTConfig
    default: bool
    parameters: int
    gflops: float
    stored: dict[str, int]
    load: str
    formats: dict[str, bool]

    @property
    def name(self) -> str:
        """Of the model."""
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
    def hybrid(self) -> bool:
        """Whether a ResNet makes the tokens."""
        return self.config.resnet is not None

    @property
    def file_mib(self) -> float | None:
        """Size of the published file, None where it is not known."""
        return self.weights.bytes / MIB if self.weights.bytes else self.weights.size_mib

    @property
    def point(self) -> Point | None:
        """The file's top-1 accuracy on ImageNet-1k, the first where several are reported; None without."""
        for accuracy in self.weights.accuracy:
            if (accuracy.dataset, accuracy.metric) == (DATASET, METRIC):
                measured = self.config.replace(image_size=accuracy.image_size)
                return Point(accuracy=accuracy, gflops=forward_flops(measured) / 1e9)
        return None

    @property
    def words(self) -> str:
        """What a search looks through, in lower case: spellings of the name, tag, file, labels, paper, licence."""
        weights, short = self.weights, self.name.replace("ViT-", "")
        spelled = [spelling.replace("/", sign) for spelling in (self.name, short) for sign in "/_-"]
        said = [weights.tag, weights.file, weights.labels or "", str(weights.paper), weights.licence, weights.source]
        said += [f"{accuracy.dataset} {accuracy.metric}" for accuracy in weights.accuracy]
        said += ["ImageNet-1k"] if self.point else []
        return " ".join([*spelled, *said, "hybrid resnet" if self.hybrid else "pure", *self.formats]).casefold()


def entries() -> list[Entry]:
    """Every file of the zoo's cards: models in natural order, each with its recommended weights first."""
    rows = {(row["name"], row["weights"]): row for row in zoo.table()}
    found = []
    for rank, name in enumerate(zoo.names()):
        for tag, weights in zoo.card(name).weights.items():
            row, config = rows[name, tag], weights.whole_config()
            entry = Entry(
                rank=rank,
                weights=weights,
                config=config,
                default=row["default"],
                parameters=row["parameters"],
                gflops=row["gflops"],
                stored={precision: row[f"bytes_{precision}"] for precision in ("float32", "float16", "int8")},
                load=row["load"],
                formats=formats.writable(config),
            )
            found.append(entry)
    return found


def _anchor(text: str) -> str:
    """The text as a part of an address: "R50+ViT-B/16" -> "R50-ViT-B-16"."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")
