"""Find and read quantization modes: converters/exports/*.toml, or a user's own file.

Nothing here imports Keras, TensorFlow or the quantizer, so that `keras-vit` can list the modes at once.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from keras_vit._util import data_files
from keras_vit._util.checks import table_problems
from keras_vit._util.text import nearest
from keras_vit.export.litert.options import Cosine, Fraction, Norms, Patches
from keras_vit.export.litert.storage import FLOAT32, INT4, INT8, STORAGES, Storage, StorageName

FLOAT: Final = 32  # bits of tensors that a rule leaves as they are
WITH_KERNELS = {"FULLY_CONNECTED", "CONV_2D"}

Ratio = Annotated[float, "[1, inf)"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule of the quantizer for some operators. Of several rules that fit an operator, the last applies."""

    operators: tuple[str, ...]  # names in the LiteRT schema; "*" is all, with the file's input and outputs
    weights: Literal[4, 8, 32]  # bits of constant inputs; 32 leaves them as they are
    # Bits of the other inputs and outputs: 8 or 16, with fixed ranges from calibration images; 32 leaves them floats,
    # which integer kernels quantize row by row in every call.
    activations: Literal[8, 16, 32] = FLOAT
    names: str | None = None  # regular expression to find in the operator's name, as "block_0/mlp"; None fits all
    method: Literal["min_max", "gptq"] = "min_max"  # how a kernel is rounded: to the nearest, or by `gptq`
    block: Literal[32, 64, 128, 256] | None = None  # number of inputs that share a scale, of 4 bits; None: all

    @property
    def needs_calibration(self) -> bool:
        """True if it needs calibration images: for fixed ranges, or for GPTQ's statistics of a layer's inputs."""
        return self.activations != FLOAT or self.method == "gptq"

    @property
    def is_of_kernels(self) -> bool:
        """True if it says only how kernels are stored: such files are written without ai-edge-quantizer."""
        can_be_written = self.weights != 4 or "CONV_2D" not in self.operators
        return self.activations == FLOAT and can_be_written and WITH_KERNELS.issuperset(self.operators)

    @property
    def storage(self) -> Storage:
        """Storage of the kernels of the rule's operators."""
        return {4: dataclasses.replace(INT4, block=self.block), 8: INT8, FLOAT: FLOAT32}[self.weights]

    def fits(self, kind: str, name: str) -> bool:
        """Return whether it is for an operator of a kind in the schema and a name."""
        return bool({"*", kind}.intersection(self.operators) and re.search(self.names or "", f"{name};"))

    @property
    def quantizes(self) -> bool:
        """True if it changes operators, instead of leaving them as they are."""
        return min(self.weights, self.activations) < FLOAT


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """How outliers are found on a few images and made smaller, by SmoothQuant (arXiv 2211.10438)."""

    alpha: Fraction  # 0 leaves all in the activations, 1 moves all into the kernel; equation 4
    threshold: Ratio  # smoothing is applied where the largest channel exceeds the median one this many times
    # Channels of the residual stream above this many times the median one are scaled down; None leaves all. It is for
    # modes in which the stream, or what is added to it, has one fixed range for all channels.
    stream: Ratio | None = None


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Quantization mode: how a LiteRT file stores weights and computes with them."""

    name: str  # of the mode's file, without its suffix
    summary: str  # one line for users who choose
    devices: str  # the devices it is meant for
    least_cosine: Cosine  # lowest accepted cosine between the file's and the model's logits, on every image
    least_agreement: Fraction  # lowest accepted share of images with the same best class in both, or a near tie
    least_difference_cosine: Cosine = 0.9  # lowest accepted mean cosine between the differences of two images' logits
    storage: StorageName = "float32"  # of kernels in the written file; "float32" where there are rules
    patches: Patches = (
        "dense"  # how patches are embedded: "dense" is SPACE_TO_DEPTH and FULLY_CONNECTED, or "convolution"
    )
    tables: Literal["float32", "float16"] = "float32"  # how embeddings of positions are stored
    rules: tuple[Rule, ...] = ()  # applied to the written file, in this order
    smoothing: Smoothing | None = None
    gptq: bool = False  # whether GPTQ rounds the kernels of dense layers where there are calibration images
    norms: Norms = "float"  # how norms compute, see `litert.options`

    def rule(self, kind: str, name: str) -> Rule | None:
        """Return the rule that applies to an operator of a kind in the schema and a name."""
        return next((rule for rule in reversed(self.rules) if rule.fits(kind, name)), None)

    @property
    def uses_quantizer(self) -> bool:
        """True if the quantizer rewrites the written file."""
        return not all(rule.is_of_kernels for rule in self.rules)

    def storage_of(self, kind: str, name: str, *, few_rows: bool = False) -> Storage:
        """Return how an operator's kernel, or the table that it adds, is written; see `StorageRules`."""
        if kind == "ADD":
            return STORAGES[self.tables]
        fitting = [rule.storage for rule in self.rules if rule.fits(kind, name) and not self.uses_quantizer]
        return fitting[-1] if fitting else STORAGES[self.storage].storage_of(kind, name, few_rows=few_rows)

    def rounds(self, name: str) -> bool:
        """Return whether GPTQ rounds the kernel of a dense layer."""
        methods = [rule.method for rule in self.rules if rule.fits("FULLY_CONNECTED", name)]
        return methods[-1] == "gptq" if methods else self.gptq

    @property
    def needs_calibration(self) -> bool:
        """True if it needs calibration images."""
        return any(rule.needs_calibration for rule in self.rules)

    @property
    def bits(self) -> tuple[int, int]:
        """Fewest and most bits that a kernel may have."""
        if not self.rules:
            bits = STORAGES[self.storage].bits
            return bits, bits
        covered: set[str] = set()
        for rule in self.rules:
            if rule.names is None:
                covered |= WITH_KERNELS if "*" in rule.operators else set(rule.operators)
        of_rules = [rule.weights for rule in self.rules]
        return min(of_rules), max(of_rules) if covered >= WITH_KERNELS else FLOAT


def load_mode(name_or_path: str | os.PathLike[str]) -> Mode:
    """Load a mode of the package by its name, or a .toml file as converters/README.md describes it."""
    accepted = f"quantize must be one of {mode_names()}, or a .toml file of your own"
    if not isinstance(name_or_path, str | os.PathLike):
        raise ValueError(f"{accepted}. Received: {name_or_path!r:.200}")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        name = os.fspath(name_or_path)
        if name not in mode_names():
            raise ValueError(f"{accepted}. Received: {name!r:.200}" + _nearest(name, mode_names()))
        path = _folder() / f"{name}.toml"
    elif not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. The modes of the package are given by name: {mode_names()}")
    return _read(path)


def mode_names() -> list[str]:
    """Return the names of the modes that come with the package."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def _folder() -> Path:
    return data_files.data_folder("converters") / "exports"


def _read(path: Path) -> Mode:
    table = data_files.read_toml(path)
    found = list(table_problems(table, Mode, path.name, given=["name"]))
    if found := found or list(_value_problems(table, path.name)):
        raise ValueError(f"{path} is not a valid quantization mode: " + "; ".join(found))
    smoothing = table.pop("smoothing", None)
    rules = [{**rule, "operators": tuple(rule["operators"])} for rule in table.pop("rules", [])]
    return Mode(
        name=path.stem,
        rules=tuple(Rule(**rule) for rule in rules),
        smoothing=None if smoothing is None else Smoothing(**smoothing),
        **table,
    )


def _value_problems(table: dict[str, Any], where: str) -> Iterator[str]:
    """Yield one sentence for each value of the right type that is not accepted."""
    storage, rules = table.get("storage", "float32"), table.get("rules", [])
    if rules and storage != "float32":
        yield f"{where}.storage must be 'float32' where there are rules, which need floats. Received: {storage!r:.200}"
    if any(rule.get("method") == "gptq" for rule in rules) and any("activations" in rule for rule in rules):
        yield f"{where}: rules with method 'gptq' and rules with activations do not go together"
    for index, rule in enumerate(rules):
        yield from _rule_problems(rule, f"{where}.rules[{index}]")


def _rule_problems(rule: dict[str, Any], where: str) -> Iterator[str]:
    if rule["weights"] == FLOAT and rule.get("activations", FLOAT) != FLOAT:
        yield f"{where} has integer activations and float weights, which no kernel multiplies"
    if not rule["operators"]:
        yield f"{where}.operators is empty; '*' means all"
    names = rule.get("names", "")
    if re.search(r"(?<!\\)\$", names):
        yield f"{where}.names must not have '$': a ';' follows each name; write ';' instead. Received: {names!r:.200}"
    if rule.get("block") and rule["weights"] != 4:
        yield f"{where}.block is for weights of 4 bits. Received: {rule['weights']} bits"
    if rule.get("method") == "gptq" and set(rule["operators"]) != {"FULLY_CONNECTED"}:
        yield f"{where}.method 'gptq' is for FULLY_CONNECTED. Received: {rule['operators']}"
    try:
        re.compile(names)
    except re.error as error:
        yield f"{where}.names is not a regular expression: {error}. Received: {rule['names']!r:.200}"


def _nearest(value: str, known: Iterable[str]) -> str:
    return "".join(f"; the nearest is {name!r}" for name in nearest(value, known))
