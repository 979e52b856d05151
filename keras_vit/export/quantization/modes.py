"""Ways to keep a model's weights in a LiteRT file: finds and reads converters/exports/*.toml, or a file of one's own.

A file that does not fit is refused as a whole, with all that is wrong with it in one error. Nothing here imports
Keras, TensorFlow or the quantizer.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_vit._util import data_files
from keras_vit._util.schema import NUMBER, misfits

STORAGES = {"float32": 32, "float16": 16, "int8": 8}  # how the writer keeps kernels, and its bits
METHODS = ("min_max", "octav", "gptq")  # how a kernel's scales and integers are found
FLOAT = 32  # bits of what a rule leaves alone
WEIGHTS, ACTIVATIONS = (4, 8, FLOAT), (8, 16, FLOAT)
HAVE_KERNELS = {"FULLY_CONNECTED", "CONV_2D"}

_RULE = {"operators": [str], "names?": str, "weights": int, "activations?": int, "method?": str}
_FILE = {
    "summary": str,
    "devices": str,
    "storage?": str,
    "least_cosine": NUMBER,
    "least_agreement": NUMBER,
    "rules?": [_RULE],
    "smoothing?": {"alpha": NUMBER, "threshold": NUMBER},
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the quantizer does to some operators; of several rules that fit an operator the last counts.

    Attributes:
        operators: as the LiteRT schema calls them; "*" is every one that can be quantized, with the image and the
            results.
        weights: bits of constant inputs, 4, 8, or 32 for those left as they are.
        activations: bits of the other inputs and outputs, 8 or 16, with ranges from calibration; 32: they are floats,
            which integer kernels quantize row by row while they run.
        names: a regular expression found in the operator's name, such as "block_0/mlp"; None fits all.
        method: one of `METHODS`.
    """

    operators: tuple[str, ...]
    weights: int
    activations: int = FLOAT
    names: str | None = None
    method: str = "min_max"

    @property
    def calibrated(self) -> bool:
        """Whether images are needed to apply it: for ranges, or for what GPTQ knows of a layer's inputs."""
        return self.activations != FLOAT or self.method == "gptq"

    @property
    def quantizes(self) -> bool:
        """Whether it does anything but leave operators as they are."""
        return min(self.weights, self.activations) < FLOAT


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """When and how far large activations are moved into the kernel that takes them (SmoothQuant, arXiv 2211.10438).

    Attributes:
        alpha: 0 leaves all in the activations, 1 moves all into the kernel; equation 4.
        threshold: ratio of the largest channel to the median one above which it is done.
    """

    alpha: float
    threshold: float


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to keep a model's weights in a file.

    Attributes:
        name: of the file without its suffix.
        summary: one line for whoever chooses.
        devices: what it is for.
        least_cosine: of its logits with the model's, on every image; below it a file is not kept.
        least_agreement: likewise the share of images with the same first class.
        storage: how kernels are written, one of `STORAGES`; with rules "float32".
        rules: what is done to the written file afterwards, in this order.
        smoothing: None for none.
    """

    name: str
    summary: str
    devices: str
    least_cosine: float
    least_agreement: float
    storage: str = "float32"
    rules: tuple[Rule, ...] = ()
    smoothing: Smoothing | None = None

    @property
    def quantizer(self) -> bool:
        """Whether the written file is given to the quantizer."""
        return bool(self.rules)

    @property
    def calibrated(self) -> bool:
        """Whether it needs calibration images."""
        return any(rule.calibrated for rule in self.rules)

    @property
    def bits(self) -> tuple[int, int]:
        """The fewest and the most bits that a kernel may have."""
        if not self.rules:
            return STORAGES[self.storage], STORAGES[self.storage]
        covered: set[str] = set()
        for rule in self.rules:
            if rule.names is None:
                covered |= HAVE_KERNELS if "*" in rule.operators else set(rule.operators)
        kinds = [rule.weights for rule in self.rules]
        return min(kinds), max(kinds) if covered >= HAVE_KERNELS else FLOAT


def mode(name_or_path: str | os.PathLike[str]) -> Mode:
    """One mode, of the package or from a file.

    Args:
        name_or_path: one of `modes()`, or a .toml file as converters/README.md describes it.

    Raises:
        ValueError: no mode has this name (offers the nearest), or the file is no mode (all that is wrong with it).
        FileNotFoundError: there is no such file.

    Example:
        >>> mode("int4").calibrated
        True
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise ValueError(f"quantize is one of {modes()}, or a .toml file of one's own. Received: {name_or_path!r}")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        if str(name_or_path) not in modes():
            raise ValueError(
                f"quantize is one of {modes()}, or a .toml file of one's own. Received: {os.fspath(name_or_path)!r}"
                + _nearest(str(name_or_path), modes())
            )
        path = _folder() / f"{name_or_path}.toml"
    elif not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. The package's own modes go by their names: {modes()}")
    return _read(path)


def modes() -> list[str]:
    """The names of the modes that come with the package."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def _folder() -> Path:
    return data_files.folder("converters") / "exports"


def _read(path: Path) -> Mode:
    table = data_files.read_toml(path)
    wrong = list(misfits(table, _FILE, path.name)) or list(_senseless(table, path.name))
    if wrong:
        raise ValueError(f"{path} is no way to quantize: " + "; ".join(wrong))
    smoothing = table.pop("smoothing", None)
    rules = [{**rule, "operators": tuple(rule["operators"])} for rule in table.pop("rules", [])]
    return Mode(
        name=path.stem,
        rules=tuple(Rule(**rule) for rule in rules),
        smoothing=None if smoothing is None else Smoothing(**smoothing),
        **table,
    )


def _senseless(table: dict[str, Any], where: str) -> Iterator[str]:
    """One sentence for each value that has the right type and no meaning."""
    storage, rules = table.get("storage", "float32"), table.get("rules", [])
    yield from _not_among(storage, STORAGES, f"{where}.storage")
    if rules and storage != "float32":
        yield f"{where}.storage is 'float32' where there are rules: the quantizer takes floats. Received: {storage!r}"
    for key, least, most in (("least_cosine", -1, 1), ("least_agreement", 0, 1)):
        if not least <= table[key] <= most:
            yield f"{where}.{key} is from {least} to {most}. Received: {table[key]!r}"
    if "smoothing" in table:
        alpha, threshold = (table["smoothing"][key] for key in ("alpha", "threshold"))
        if not 0 <= alpha <= 1:
            yield f"{where}.smoothing.alpha is from 0 to 1. Received: {alpha!r}"
        if not threshold >= 1:
            yield f"{where}.smoothing.threshold is 1 or more. Received: {threshold!r}"
    for index, rule in enumerate(rules):
        yield from _senseless_rule(rule, f"{where}.rules[{index}]")


def _senseless_rule(rule: dict[str, Any], where: str) -> Iterator[str]:
    yield from _not_among(rule["weights"], WEIGHTS, f"{where}.weights")
    yield from _not_among(rule.get("activations", FLOAT), ACTIVATIONS, f"{where}.activations")
    yield from _not_among(rule.get("method", "min_max"), METHODS, f"{where}.method")
    if rule["weights"] == FLOAT and rule.get("activations", FLOAT) != FLOAT:
        yield f"{where} has integer activations and float weights, which no kernel multiplies"
    if not rule["operators"]:
        yield f"{where}.operators is empty; '*' means all"
    try:
        re.compile(rule.get("names", ""))
    except re.error as error:
        yield f"{where}.names is no regular expression: {error}. Received: {rule['names']!r}"


def _not_among(value: Any, known: Any, where: str) -> Iterator[str]:
    if value not in known:
        yield f"{where} is one of {list(known)}. Received: {value!r}" + _nearest(str(value), map(str, known))


def _nearest(value: str, known: Any) -> str:
    found = difflib.get_close_matches(value, list(known), n=1)
    return f"; the nearest is {found[0]!r}" if found else ""
