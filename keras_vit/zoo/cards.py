"""Read and check model cards, the files zoo/*.toml, and find a card by any spelling of a name.

An invalid file is refused as a whole; one error lists everything that is wrong with it. Nothing here imports Keras.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from keras_vit._util.checks import check_texts, given, table_problems
from keras_vit._util.files import data_folder, read_toml
from keras_vit._util.text import nearest
from keras_vit.errors import CardError
from keras_vit.errors import UnknownModelError as UnknownModelError
from keras_vit.model import labels
from keras_vit.model.architectures import architecture_fields, canonical_name
from keras_vit.model.config import Preprocessing, ViTConfig, check_fields

NOT_PUBLISHED = "not published"
MOST_ROWS = 10  # weights of a card that are printed
# The name of a file of "How to train your ViT?" (arXiv 2106.10270): its model, the data it was trained on, and, after
# "--", the data and the resolution it was fine-tuned at.
_AUGREG = re.compile(
    r"(?P<model>\w+)-(?P<data>i1k|i21k)-\d+ep-lr_[\d.]+-aug_\w+-wd_[\d.]+-do_[\d.]+-sd_[\d.]+"
    r"(?:--(?P<tuned>\w+)-steps_\w+-lr_[\d.]+-res_(?P<size>\d+))?(?:\.npz)?",
    re.IGNORECASE,
)
_AUGREG_CLASSES = {
    "i1k": ("imagenet2012", 1000),
    "i21k": ("imagenet21k", 21843),
    "imagenet2012": ("imagenet2012", 1000),
}


@dataclass(frozen=True, kw_only=True)
class Paper:
    """The paper in which weights were published, by title and arXiv number."""

    title: str
    arxiv: str

    def __str__(self) -> str:
        return f"{self.title} (arXiv {self.arxiv})"


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One reported accuracy in percent at image_size pixels; source says who measured and published it."""

    dataset: str
    metric: str
    value: float
    image_size: int
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} % {self.metric}, {self.dataset} at {self.image_size} px [{self.source}]"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One file of published weights with the facts on its card; facts that the card does not state are None."""

    tag: str  # distinguishes the weights of one model
    architecture: str  # canonical name of the model
    file: str
    base: str  # prefix of `file`: a URL, or a folder inside zoo/
    image_size: int  # height and width in pixels that the position embeddings are for
    num_classes: int | None  # outputs of the head; None if only the file states it
    labels: str | None  # name of a list in zoo/labels
    # Fields of ViTConfig that differ from the architecture; all fields if the architecture is not official.
    config: Mapping[str, Any]
    preprocessing: Preprocessing
    paper: Paper
    license: str  # SPDX identifier, or the name of the publisher's own
    source: str  # publisher
    rank: int  # the lowest rank is the default of the model
    accuracy: tuple[Accuracy, ...] = ()
    notes: tuple[str, ...] = ()  # caveats
    templates: tuple[str, ...] = ()  # texts around the name of a class, "{}", in which `zoo.zero_shot` puts it
    tokenizer: str | None = None  # URL of the tokenizer of the text tower; None if it is in `text`, or there is none
    text: str | None = None  # file of the text tower, after `base`; None: it is in `file`
    terms: str | None = None  # address of terms that one must accept before the download
    parameters: int | None = None  # of the whole model
    gflops: float | None = None  # 1e9 operations for one image at image_size, two of a multiply-add
    sha256: str | None = None  # lower-case hexadecimal
    bytes: int | None = None  # exact size of the file
    size_mib: float | None = None  # approximate size

    @property
    def url(self) -> str | None:
        """URL of the file; None if it comes with the package."""
        return self.location if "://" in self.location else None

    @property
    def location(self) -> str:
        """URL, or the path of a file that comes with the package."""
        return self._place(self.file)

    @property
    def text_location(self) -> str | None:
        """URL or path of the file with the text tower; None without a text tower."""
        has_text = self.text or self.tokenizer
        return self._place(self.text or self.file) if has_text else None

    def _place(self, file: str) -> str:
        place = self.base + file
        return place if "://" in place else str(data_folder("zoo") / place)

    @property
    def facts(self) -> dict[str, Any]:
        """All fields of ViTConfig that the card states."""
        names = ("image_size", "num_classes", "labels", "preprocessing")
        return given(**{name: getattr(self, name) for name in names}) | dict(self.config)

    def base_config(self, **fields: Any) -> ViTConfig:
        """Config of the model without these weights: official, or the card's if it states all sizes."""
        if "hidden_size" in self.config:
            return ViTConfig(**self.facts).replace(**fields)
        return ViTConfig.from_name(self.architecture, **fields)

    def whole_config(self) -> ViTConfig:
        """Config of the published model; without a head if only the file states the number of classes."""
        facts = {"num_classes": 0} | self.facts
        return self.base_config(**facts)

    @property
    def size_words(self) -> str:
        """Size of the file as text."""
        if self.bytes:
            return f"{self.bytes:,} bytes"
        return f"{self.size_mib:,g} MiB" if self.size_mib else NOT_PUBLISHED

    @property
    def classes_words(self) -> str:
        """Number of classes as text."""
        return "as the file has it" if self.num_classes is None else f"{self.num_classes:,}"

    def __str__(self) -> str:
        rows = [
            ("file", self.base + self.file),
            ("size", self.size_words),
            ("sha256", self.sha256 or NOT_PUBLISHED),
            ("image", f"{self.image_size} x {self.image_size}"),
            ("classes", self.classes_words + (f" ({self.labels})" if self.labels else "")),
            *[("config", f"{name} = {value}") for name, value in self.config.items()],
            *[("accuracy", str(accuracy)) for accuracy in self.accuracy],
            *[("note", note) for note in self.notes],
            *[("template", template) for template in self.templates],
            ("paper", str(self.paper)),
            ("license", f"{self.license}, {self.source}"),
        ]
        if self.terms:
            rows.append(("terms", f"{self.terms} (accept_license=True, --accept-license)"))
        return "\n".join(f"{name:<9} {text}" for name, text in rows)


@dataclass(frozen=True)
class Card:
    """A model and its published weights.

    Args:
        name: canonical name, such as "ViT-B/16".
        weights: tag -> weights, the recommended ones first.

    Example:
        >>> card = keras_vit.zoo.card("digits")
        >>> card.default, card.weights["digits"].num_classes
        ('digits', 10)
    """

    name: str
    weights: Mapping[str, Weights]

    @property
    def default(self) -> str:
        """Tag of the recommended weights.

        Example:
            >>> keras_vit.zoo.card("H/14").default
            'imagenet21k'
        """
        return next(iter(self.weights))

    @property
    def family(self) -> str:
        """First part of the name, such as "DINOv2"; hybrids with a ResNet are in the family "ViT".

        Example:
            >>> keras_vit.zoo.card("R50+ViT-B/16").family
            'ViT'
        """
        return self.name.partition("-")[0].rpartition("+")[2]

    def __str__(self) -> str:
        """Weights in a line each."""
        rows = []
        for tag, own in self.weights.items():
            reported = [str(accuracy).partition(" [")[0] for accuracy in own.accuracy[:1]]
            rows.append("; ".join([f"  {tag}: {own.image_size} px", own.size_words, *reported, own.license]))
        title = f"{self.name}, published files: {len(rows)}. All of it: keras-vit show {self.name}"
        return "\n".join([title, *rows[:MOST_ROWS]])


# ---- from a name to a card


def card(name: str) -> Card:
    """Look up the card of a model: its published weights with files, accuracies and sources.

    Args:
        name: an architecture or a model of the zoo in any spelling, a repository of the Hugging Face Hub whose file is
            on the card ("timm/vit_base_patch14_dinov2.lvd142m"), one of the `aliases` in zoo/*.toml
            ("vit_base_patch16_224"), or an AugReg file.

    Returns:
        The card; for an AugReg file a card with that file alone.

    Raises:
        UnknownModelError: no card has this name; the message lists the nearest.
        ValueError: the name of an AugReg file begins with a model that there is not.

    Example:
        >>> list(keras_vit.zoo.card("b_16").weights)
        ['augreg-imagenet21k+imagenet2012', ...]
    """
    check_texts(name=name)
    if not name.isprintable():
        raise UnknownModelError(f"The name of a model must be one line of text. Received: {name!r:.200}")
    if single := _augreg_file(name):
        return Card(single.architecture, {single.tag: single})
    found = find_name(name)
    if found in all_cards():
        return all_cards()[found]
    by_spelling = names_by_spelling()
    close = nearest(name.casefold(), by_spelling, count=8, cutoff=0.4)
    models = list(dict.fromkeys(by_spelling[spelling] for spelling in close))[:4]
    offer = f"the nearest are {models}" if models else "keras_vit.zoo.names() (keras-vit list) has all"
    problem = f"{found} has no published weights" if found else "No model has this name"
    raise UnknownModelError(f"{problem}; {offer}. Received: {name!r:.200}")


def _augreg_file(name: str) -> Weights | None:
    """Find the weights of an AugReg file's name, with its name as tag if no card recommends it."""
    match = _AUGREG.fullmatch(name)
    if match is None:
        return None
    architecture = canonical_name(match["model"])
    model = re.sub(r"[/+]", "_", architecture.replace("ViT-", ""))
    stem = model + name[match.end("model") :].casefold().removesuffix(".npz")
    family = next(family for family in families() if family.table["base"].endswith("/augreg/"))
    for weights in family.weights:
        if weights.file == f"{stem}.npz":
            return weights
    labels, num_classes = _AUGREG_CLASSES.get((match["tuned"] or match["data"]).casefold(), (None, None))
    stated = {"rank": 1, "image_size": int(match["size"] or 224), "labels": labels, "num_classes": num_classes}
    return make_weights(family.table, stem, architecture, stated, {"file": f"{stem}.npz"})


def find_name(name: str) -> str | None:
    """Find the model or architecture of a name, in any spelling and with any separators."""
    known = names_by_spelling()
    with contextlib.suppress(ValueError):
        return known.get(name.casefold()) or known.get(_joined(name)) or canonical_name(name)
    return None


def alias(name: str) -> tuple[str, str] | None:
    """Find the model, and the tag or URL of its weights, by the name of another package."""
    return _aliases().get(name.casefold())


def select(model: Card, weights: str = "default") -> Weights:
    """Select the weights with a tag ("default": the recommended ones); an unknown tag raises a ValueError."""
    tag = model.default if weights == "default" else weights
    if tag not in model.weights:
        raise ValueError(f"{model.name} has the weights {list(model.weights)}. Received: weights={weights!r:.200}")
    return model.weights[tag]


def names_by_spelling() -> dict[str, str]:
    """Collect all known spellings of the names of models, in lower case."""
    known = {spelling: model for spelling, (model, _) in _aliases().items() if model in all_cards()}
    return known | {spelling: name for name in all_cards() for spelling in _spellings(name)}


@functools.cache
def _aliases() -> dict[str, tuple[str, str]]:
    """Collect the repositories of the cards' files, for those of timm also without "timm/", and the cards' aliases."""
    found: dict[str, tuple[str, str]] = {}
    for family in families():
        for row in family.weights:
            if hub := re.fullmatch(r"hf://((?:timm/)?(.+?))/[^/]+", row.url or ""):
                found |= dict.fromkeys(map(str.casefold, hub.groups()), (row.architecture, row.tag))
        for name, stated in family.table.get("aliases", {}).items():
            found[name.casefold()] = stated["model"], stated["weights"]
    return found


def _spellings(name: str) -> list[str]:
    short = name.replace("ViT-", "")
    plain = [spelling.replace("/", "_") for spelling in (name, short)]
    return [spelling.casefold() for spelling in (name, short, *plain, plain[1].replace("+", "_"), _joined(name))]


def _joined(name: str) -> str:
    return re.sub(r"[-_/ ]", "", name).casefold()


@functools.cache
def all_cards() -> dict[str, Card]:
    """Read the cards of all models, once."""
    return gather([weights for family in families() for weights in family.weights])


def gather(rows: Sequence[Weights]) -> dict[str, Card]:
    """Group weights into one card per model; a tag or rank that a model has twice raises a CardError."""
    grouped: dict[str, dict[str, Weights]] = {}
    for weights in sorted(rows, key=lambda weights: weights.rank):
        model = grouped.setdefault(weights.architecture, {})
        for other in model.values():
            if weights.tag == other.tag or weights.rank == other.rank:
                raise CardError(
                    f"{weights.architecture} lists two weight files with the same tag or rank: "
                    + " and ".join(f"{w.base}{w.file} (tag {w.tag!r}, rank {w.rank})" for w in (other, weights))
                )
        model[weights.tag] = weights
    return {name: Card(name, model) for name, model in grouped.items()}


# ---- from a file to its rows


class _Row(TypedDict):
    """The keys of a file of weights."""

    file: str
    text: NotRequired[str]
    tokenizer: NotRequired[str]
    num_classes: NotRequired[int]
    parameters: NotRequired[int]
    gflops: NotRequired[float]
    preprocessing: NotRequired[dict[str, Any]]
    image_size: NotRequired[int]
    config: NotRequired[dict[str, Any]]
    notes: NotRequired[list[str]]
    size_mib: NotRequired[float]
    bytes: NotRequired[int]
    sha256: NotRequired[str]


class _Accuracy(TypedDict):
    """The keys of a kind of measurement; `values` has one for each model."""

    dataset: str
    metric: str
    image_size: int
    source: str
    values: dict[str, float]


class _Tag(TypedDict):
    """The keys of all files of weights with one tag."""

    labels: NotRequired[str]
    num_classes: NotRequired[int]
    rank: int
    image_size: int
    config: NotRequired[dict[str, Any]]
    preprocessing: NotRequired[dict[str, Any]]
    notes: NotRequired[list[str]]
    tokenizer: NotRequired[str]
    files: dict[str, _Row]
    accuracy: NotRequired[list[_Accuracy]]


class _Alias(TypedDict):
    """The keys of a name of another package."""

    model: str
    weights: str


class _File(TypedDict):
    """The keys of a file zoo/*.toml."""

    title: str
    license: str
    terms: NotRequired[str]
    source: str
    base: str
    notes: NotRequired[list[str]]
    templates: NotRequired[list[str]]
    config: NotRequired[dict[str, Any]]
    paper: Paper
    preprocessing: dict[str, Any]
    models: NotRequired[dict[str, dict[str, Any]]]
    weights: dict[str, _Tag]
    aliases: NotRequired[dict[str, _Alias]]


class Family(NamedTuple):
    """The content of one file zoo/*.toml: its table, and one row for each file of weights."""

    table: Mapping[str, Any]
    weights: tuple[Weights, ...]


@functools.cache
def families() -> tuple[Family, ...]:
    """Read all files zoo/*.toml, once."""
    return tuple(read_family(path) for path in sorted(data_folder("zoo").glob("*.toml")))


def read_family(path: str | Path) -> Family:
    """Read and check a .toml file of cards (zoo/README.md); one CardError lists everything that is wrong."""
    table = read_toml(path)
    where = Path(path).name
    wrong = list(table_problems(table, _File, where))
    rows: list[Weights] = []
    places: dict[str, list[str]] = {}  # error -> its rows; an error in all rows is listed once
    if not wrong:
        wrong += _accuracy_problems(table, where)
        for tag, stated in table["weights"].items():
            for architecture, row in stated["files"].items():
                try:
                    rows.append(make_weights(table, tag, architecture, stated, row))
                    _check_weights(rows[-1], own=architecture in table.get("models", {}))
                except (TypeError, ValueError) as error:
                    places.setdefault(str(error), []).append(f"weights.{tag}.files.{architecture}")
    wrong += [f"{where}.{', '.join(found)}: {error}" for error, found in places.items()]
    if wrong:
        raise CardError(f"{path} is not a valid model card: " + "; ".join(wrong))
    return Family(table=table, weights=tuple(rows))


def _accuracy_problems(family: Mapping[str, Any], where: str) -> Iterator[str]:
    for tag, stated in family["weights"].items():
        for index, entry in enumerate(stated.get("accuracy", [])):
            place = f"{where}.weights.{tag}.accuracy[{index}].values"
            for name in sorted(set(entry["values"]) - set(stated["files"])):
                yield f"{place} names {name!r:.200}, which has no file in {where}.weights.{tag}.files"


def make_weights(
    family: Mapping[str, Any], tag: str, architecture: str, stated: Mapping[str, Any], row: Mapping[str, Any]
) -> Weights:
    """Make one row from the table `family`, the facts `stated` for all files with the tag, and the file's own `row`."""
    reported = [
        Accuracy(value=entry["values"][architecture], **{k: v for k, v in entry.items() if k != "values"})
        for entry in stated.get("accuracy", [])
        if architecture in entry["values"]
    ]
    tables = [family, stated, row]  # what a later one states takes precedence
    # A model that is not official states its sizes; its key "architecture" stands for all official fields.
    own = dict(family.get("models", {}).get(architecture, {}))
    sizes = architecture_fields(own.pop("architecture")) | {"dropout_rate": 0.0} if "architecture" in own else {}
    merged = {"num_classes": None, "labels": None, **family, **stated, **row}
    made: dict[str, Any] = {
        "tag": tag,
        "architecture": architecture,
        "config": sizes | own | _merged("config", tables),
        "preprocessing": Preprocessing(**_merged("preprocessing", tables)),
        "paper": Paper(**family["paper"]),
        "accuracy": tuple(reported),
        "notes": (*row.get("notes", ()), *stated.get("notes", ()), *family.get("notes", ())),
        "templates": tuple(family.get("templates", ())),
    }
    return Weights(**{field.name: merged[field.name] for field in fields(Weights) if field.name in merged} | made)


def _merged(key: str, tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for table in tables for name, value in table.get(key, {}).items()}


def _check_weights(weights: Weights, *, own: bool) -> None:
    name = weights.architecture
    if not own and name != canonical_name(name):
        raise ValueError(f"a card must use the canonical name {canonical_name(name)!r}. Received: {name!r:.200}")
    check_fields(weights.facts)
    weights.whole_config()
    if weights.labels is not None and weights.labels not in labels.lists():
        raise ValueError(
            f"labels must be one of {labels.lists()}, the files of zoo/labels. Received: {weights.labels!r:.200}"
        )
    if weights.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", weights.sha256):
        raise ValueError(f"sha256 must be 64 digits of 0-9 and a-f. Received: {weights.sha256!r:.200}")
