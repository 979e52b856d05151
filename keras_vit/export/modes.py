"""Options of a .tflite file, and quantization modes: converters/exports/*.toml, or a user's own file.

Nothing here imports Keras, TensorFlow or the quantizer, so that `keras-vit` can list the modes at once.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from keras_vit._util import files
from keras_vit._util.checks import Count, as_python, field_rules, given, pair, table_problems
from keras_vit._util.fields import documented, option, option_names
from keras_vit._util.text import nearest
from keras_vit.export.litert.operators import (
    FLOAT32,
    INT4,
    INT8,
    STORAGES,
    Storage,
    StorageName,
)
from keras_vit.export.litert.plan import FilePlan, Norms, Patches
from keras_vit.model.config import ViTConfig
from keras_vit.model.task import Task, from_config

Cosine = Annotated[float, "[-1, 1]"]
Fraction = Annotated[float, "[0, 1]"]
Ratio = Annotated[float, "[1, inf)"]
Decibels = Annotated[float, "(-inf, inf)"]

FLOAT_BITS: Final = 32  # bits of tensors that a rule leaves as they are
KERNEL_OPERATORS = {"FULLY_CONNECTED", "CONV_2D"}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule of the quantizer for some operators. Of several rules that fit an operator, the last applies."""

    operators: tuple[str, ...]  # names in the LiteRT schema; "*" is all, with the file's input and outputs
    weights: Literal[4, 8, 32]  # bits of constant inputs; 32 leaves them as they are
    # Bits of the other inputs and outputs: 8 or 16, with fixed ranges from calibration images; 32 leaves them floats,
    # which integer kernels quantize row by row in every call.
    activations: Literal[8, 16, 32] = FLOAT_BITS
    names: str | None = None  # regular expression to find in the operator's name, as "block_0/mlp"; None fits all
    method: Literal["min_max", "gptq"] = "min_max"  # how a kernel is rounded: to the nearest, or by `gptq`
    last_third: bool = False  # only for operators of the last third of the blocks; there may be none

    @property
    def needs_calibration(self) -> bool:
        """True if it needs calibration images: for fixed ranges, or for GPTQ's statistics of a layer's inputs."""
        return self.activations != FLOAT_BITS or self.method == "gptq"

    @property
    def only_stores_kernels(self) -> bool:
        """True if it says only how kernels are stored: such files are written without litert-quantizer."""
        can_be_written = self.weights != 4 or "CONV_2D" not in self.operators
        return self.activations == FLOAT_BITS and can_be_written and KERNEL_OPERATORS.issuperset(self.operators)

    @property
    def storage(self) -> Storage:
        """Storage of the kernels of the rule's operators."""
        return {4: INT4, 8: INT8, FLOAT_BITS: FLOAT32}[self.weights]

    def fits(self, kind: str, name: str) -> bool:
        """True if the rule applies to an operator of a kind (its name in the schema) and a name."""
        return bool({"*", kind}.intersection(self.operators) and re.search(self.names or "", f"{name};"))

    @property
    def quantizes(self) -> bool:
        """True if it changes operators, instead of leaving them as they are."""
        return min(self.weights, self.activations) < FLOAT_BITS


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """Parameters of SmoothQuant (arXiv 2211.10438), which makes outliers smaller."""

    alpha: Fraction  # 0 leaves all in the activations, 1 moves all into the kernel; equation 4
    threshold: Ratio  # smoothing is applied where the largest channel exceeds the median one this many times
    # Channels of the residual stream above this many times the median one are scaled down; None leaves all. It is for
    # modes in which the stream, or a tensor added to it, has one fixed range for all channels.
    stream: Ratio | None = None


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Quantization mode: how a LiteRT file stores weights and computes with them."""

    name: str  # of the mode's file, without its suffix
    summary: str  # one line for users who choose
    devices: str  # the devices it is meant for
    least_cosine: Cosine  # lowest accepted mean cosine between the file's and the model's logits
    least_agreement: Fraction  # lowest accepted share of images with the same best class in both, or a near tie
    least_difference_cosine: Cosine = 0.9  # lowest accepted mean cosine between the differences of two images' logits
    # Cosines do not see a factor. Where these two are None, they follow from least_cosine: see `implied_sqnr`.
    least_sqnr: Decibels | None = None  # lowest accepted ratio of the outputs' power to that of their errors
    # Lowest accepted ratio, either way, of the sizes of the file's and the model's differences between images.
    least_scale: Fraction | None = None
    storage: StorageName = "float32"  # of kernels in the written file; "float32" where there are rules
    patches: Patches = (
        "dense"  # how patches are embedded: "dense" is SPACE_TO_DEPTH and FULLY_CONNECTED, or "convolution"
    )
    tables: Literal["float32", "float16"] = "float32"  # how positions and relative biases are stored
    rules: tuple[Rule, ...] = ()  # applied to the written file, in this order
    smoothing: Smoothing | None = None
    gptq: bool = False  # whether GPTQ rounds the kernels of dense layers where there are calibration images
    norms: Norms = "float"  # how norms compute

    @property
    def thresholds(self) -> dict[str, float]:
        """Least values of a report, by name: cosine, difference_cosine, agreement, sqnr in dB, scale."""
        return {
            "cosine": self.least_cosine,
            "difference_cosine": self.least_difference_cosine,
            "agreement": self.least_agreement,
            "sqnr": implied_sqnr(self.least_cosine) if self.least_sqnr is None else self.least_sqnr,
            "scale": implied_scale(self.least_cosine) if self.least_scale is None else self.least_scale,
        }

    def for_blocks(self, count: int) -> "Mode":
        """Return the mode for a model of `count` blocks: names of rules for the last third have its numbers."""
        numbers = "|".join(map(str, range(count - count // 3, count)))
        rules = [
            dataclasses.replace(rule, names=f"block_({numbers})/.*({rule.names or ''})") if rule.last_third else rule
            for rule in self.rules
            if numbers or not rule.last_third
        ]
        return dataclasses.replace(self, rules=tuple(rules))

    def rule(self, kind: str, name: str) -> Rule | None:
        """Find the rule that applies to an operator of a kind in the schema and a name."""
        return next((rule for rule in reversed(self.rules) if rule.fits(kind, name)), None)

    @property
    def uses_quantizer(self) -> bool:
        """True if the quantizer rewrites the written file."""
        return not all(rule.only_stores_kernels for rule in self.rules)

    def storage_of(self, kind: str, name: str, *, few_rows: bool = False) -> Storage:
        """Storage of an operator's kernel, or of the table that an ADD adds; see `StorageRules`."""
        if kind == "ADD":
            return STORAGES[self.tables]
        fitting = [rule.storage for rule in self.rules if rule.fits(kind, name) and not self.uses_quantizer]
        return fitting[-1] if fitting else STORAGES[self.storage].storage_of(kind, name, few_rows=few_rows)

    def rounds(self, name: str) -> bool:
        """True if GPTQ rounds the kernel of a dense layer."""
        methods = [rule.method for rule in self.rules if rule.fits("FULLY_CONNECTED", name)]
        return methods[-1] == "gptq" if methods else self.gptq

    @property
    def needs_calibration(self) -> bool:
        """True if it needs calibration images."""
        return any(rule.needs_calibration for rule in self.rules)

    @property
    def has_int16(self) -> bool:
        """True if activations have 16 bits."""
        return any(rule.activations == 16 for rule in self.rules)

    @property
    def kernel_bits(self) -> tuple[int, int]:
        """Fewest and most bits that a kernel may have."""
        if not self.rules:
            bits = STORAGES[self.storage].bits
            return bits, bits
        covered: set[str] = set()
        for rule in self.rules:
            if rule.names is None:
                covered |= KERNEL_OPERATORS if "*" in rule.operators else set(rule.operators)
        of_rules = [rule.weights for rule in self.rules]
        return min(of_rules), max(of_rules) if covered >= KERNEL_OPERATORS else FLOAT_BITS


def implied_sqnr(cosine: float) -> float:
    """SQNR in dB of outputs that have this cosine with the model's and their length; any will do for 0 or less."""
    if cosine <= 0:
        return -math.inf
    return math.inf if cosine == 1 else -10 * math.log10(2 * (1 - cosine))


def implied_scale(cosine: float) -> float:
    """Least scale of outputs whose errors are as large as those of `implied_sqnr`; any will do for 0 or less."""
    return -math.inf if cosine <= 0 else 1 - math.sqrt(2 * (1 - cosine))


def load_mode(name_or_path: str | os.PathLike[str]) -> Mode:
    """Load a mode of the package by its name, or a .toml file as converters/README.md describes it."""
    accepted = f"quantize must be one of {mode_names()}, or a .toml file of your own"
    if not isinstance(name_or_path, str | os.PathLike):
        raise ValueError(f"{accepted}. Received: {name_or_path!r:.200}")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        name = os.fspath(name_or_path)
        if name not in mode_names():
            known = "".join(f"; the nearest is {mode!r}" for mode in nearest(name, mode_names()))
            raise ValueError(f"{accepted}. Received: {name!r:.200}{known}")
        path = _folder() / f"{name}.toml"
    elif not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. The modes of the package are given by name: {mode_names()}")
    return _parse_mode(path)


def mode_names() -> list[str]:
    """Names of the modes that come with the package."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def _folder() -> Path:
    return files.data_folder("converters") / "exports"


def _parse_mode(path: Path) -> Mode:
    table = files.read_toml(path)
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
    if rule["weights"] == FLOAT_BITS and rule.get("activations", FLOAT_BITS) != FLOAT_BITS:
        yield f"{where} has integer activations and float weights, which no kernel multiplies"
    if not rule["operators"]:
        yield f"{where}.operators is empty; '*' means all"
    names = rule.get("names", "")
    if re.search(r"(?<!\\)\$", names):
        yield f"{where}.names must not have '$': a ';' follows each name; write ';' instead. Received: {names!r:.200}"
    if rule.get("method") == "gptq" and set(rule["operators"]) != {"FULLY_CONNECTED"}:
        yield f"{where}.method 'gptq' is for FULLY_CONNECTED. Received: {rule['operators']}"
    try:
        re.compile(names)
    except re.error as error:
        yield f"{where}.names is not a regular expression: {error}. Received: {rule['names']!r:.200}"


# ---- devices


@dataclass(frozen=True, kw_only=True)
class Device:
    """Default options of files for a kind of processor, and what it cannot run. Sources: docs/phone-and-browser.md."""

    quantize: str  # the mode that is taken unless another is given
    why: str  # why this mode, and who measured it
    patches: Patches = "dense"
    int16: str | None = None  # what it does with activations of 16 bits, if it cannot run them
    batches: str | None = None  # what it does with several images in a call, if it cannot run them
    instead: str = ""  # modes to take in place of one that it cannot run

    def problem(self, *, has_int16: bool) -> str | None:
        """Say why it cannot run a mode, or a file, and what to take instead; None if it can."""
        return f"{self.int16}. Take {self.instead}" if has_int16 and self.int16 else None


# Images are float32 on all of them: no measurement speaks for pixels on one of them.
DEVICES = {
    "cpu": Device(
        quantize="dynamic",
        why="a quarter of the size, and measured here on x86 the fastest mode; phones were not measured. "
        "quantize='int4' is half of that, for downloads",
    ),
    "gpu": Device(
        quantize="float16",
        why="LiteRT's GPU accelerator takes the whole file, run here on a GPU in software; Qualcomm names it for older "
        "runtimes. quantize='dynamic' is the other choice",
        int16="no operator of LiteRT's GPU accelerator takes int16",
        batches="LiteRT 2.3.0's GPU accelerator computes SPACE_TO_DEPTH and PAD of more images wrong",
        instead="quantize='float16' or 'dynamic'",
    ),
    "npu": Device(
        quantize="float16",
        why="Qualcomm measured ViT-B/16 on a Galaxy S25: 4.75 ms with all of the accuracy, and 7.36 ms with 2.8 points "
        "less in int8. The other choice is quantize='int16x8', which was not measured as a .tflite file",
        patches="convolution",  # MediaTek's and Intel's compilers do not take SPACE_TO_DEPTH
    ),
}
DeviceName = Literal["cpu", "gpu", "npu"]


# ---- options of a file


@documented
@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `export.tflite` and `keras-vit export`, as users give them; `plan` says what follows from them."""

    quantize: Any = option(None)
    """Mode ("none", "float16", "dynamic", "int8", "int16x8" or "int4") or a .toml file of your own; by default the
    device's, or "dynamic". converters/README.md describes the files.
    """
    device: DeviceName | None = option(None)
    """Processor, "cpu", "gpu" or "npu" (Qualcomm's), for which mode and patches are chosen. What it cannot run is
    refused. `Report.device` says what was chosen and why. None leaves both to the mode.
    """
    batch: Count | None = option(1)
    """Images in a call; any number with 0 on the command line, None in Python."""
    image_size: Any = option(None, is_size=True)
    """Pixels, if others than the model's. Position embeddings are interpolated."""
    patch_size: Any = option(None, is_size=True)
    """Pixels of a patch, if others than the model's, as for `model.resized`."""
    input_dtype: Literal["float32", "uint8"] = option("float32", flag="--input")
    """Kind of images: "float32" (prepared), or "uint8" (pixels from 0 to 255, which the file scales itself)."""
    source_size: Any = option(None, is_size=True)
    """Pixels of the images that the file resizes itself. Needs uint8 images."""
    resize: Literal["exact", "builtin"] = option("exact")
    """Resize method: "exact" as `model.preprocess`, or "builtin", the runtime's bilinear kernel."""
    output: Literal["logits", "probabilities", "classes"] = option("logits")
    """Kind of output: "logits" or "probabilities", of a DenseModel "logits" or "classes". Classes are uint8 (batch,
    height, width), the best of every pixel at the image's size. Depth is always "depth".
    """
    attention: bool = option(False)
    """Whether to add the output `attention` (batch, heads, patches), the class token's in the last block. Of several
    class tokens it is the mean.
    """
    patches: Patches | None = option(None)
    """How patches are embedded: "dense" or "convolution"; by default as mode and device need it. "dense" is
    SPACE_TO_DEPTH and a dense layer, "convolution" CONV_2D, for NPUs without SPACE_TO_DEPTH. Patches that are not
    square or do not cover the image are convolutions.
    """
    labels: Any = option(None)
    """Class names, which apps read from the file: a list of zoo/labels, or a file with one in each line; by default the
    model's. Python takes the names, too.
    """
    least_cosine: Cosine | None = option(None)
    """Least mean cosine similarity with the model, also of differences between images; by default the mode's. With
    fewer than 10 classes and 16 or more images of yours, a quantized file may have 0.9 if it agrees with the model.
    """
    least_agreement: Fraction | None = option(None)
    """Least share of images with the same best class or a near tie, 0 to 1; by default the mode's."""
    threads: Count = option(2)
    """Threads on which the file is timed."""

    @property
    def target(self) -> Device | None:
        """The entry of DEVICES for `device`; None without a device."""
        return DEVICES.get(self.device) if isinstance(self.device, str) else None

    @property
    def mode_name(self) -> Any:
        """The mode that is given, else the device's, else "dynamic"."""
        if self.quantize is None:
            return "dynamic" if self.target is None else self.target.quantize
        return self.quantize

    def chosen_patches(self, mode: Mode) -> Patches:
        """How patches are embedded: as is given, else by a convolution if the mode or the device needs one."""
        return self.patches or (self.target.patches if self.target and mode.patches == "dense" else mode.patches)

    def device_line(self, mode: Mode) -> str | None:
        """Say which mode, input and patches were chosen for the device, and why."""
        if self.target is None:
            return None
        stated = "" if self.quantize is None else f" (given; by default {self.target.quantize})"
        chosen = f"{mode.name}{stated}, {self.input_dtype} images, {self.chosen_patches(mode)} patches"
        return f"for {self.device}: {chosen}. {self.target.quantize}: {self.target.why}"

    @property
    def source_sides(self) -> tuple[int, int] | None:
        """`source_size` as (height, width)."""
        return None if self.source_size is None else pair(self.source_size, "source_size")

    @property
    def sizes(self) -> dict[str, Any]:
        """`image_size` and `patch_size`, if given."""
        return given(image_size=self.image_size, patch_size=self.patch_size)

    @property
    def least(self) -> dict[str, Any]:
        """The thresholds, as `export.verify` takes them."""
        return {"least_cosine": self.least_cosine, "least_agreement": self.least_agreement}

    def plan(self, mode: Mode, *, class_names: Sequence[str] | None = None) -> FilePlan:
        """Plan the file of a mode that `load_mode` read. Names, outliers and rounded kernels depend on the model."""
        return FilePlan(
            batch=self.batch,
            input_dtype=self.input_dtype,
            source_size=self.source_sides,
            resize=self.resize,
            output=self.output,
            attention=self.attention,
            patches=self.chosen_patches(mode),
            class_names=class_names,
            storage=mode,
            norms=mode.norms,
        )

    def check(self, config: ViTConfig) -> None:
        """Raise one ValueError with everything that is wrong with the options or impossible for the model."""
        problems = [*self.problems(), *self.device_problems(load_mode(self.mode_name))]
        if problems := [*problems, *self.model_problems(config, from_config(config))]:
            raise ValueError("Options: " + "; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each option that is wrong for every model."""
        rules = field_rules(Options)
        for name in option_names(Options):
            yield from rules[name].problems(as_python(getattr(self, name)), name)
        try:
            _ = self.source_sides
        except ValueError as error:
            yield str(error)

    def device_problems(self, mode: Mode) -> Iterator[str]:
        """Yield one sentence for each option that the device cannot run."""
        if self.target is None:
            return
        if problem := self.target.problem(has_int16=mode.has_int16):
            yield f"quantize={mode.name!r} does not run with device={self.device!r}: {problem}"
        if self.target.batches and self.batch != 1:
            yield f"device={self.device!r} needs batch=1: {self.target.batches}. Received: {self.batch}"

    def model_problems(self, config: ViTConfig, task: Task) -> Iterator[str]:
        """Yield one sentence for each option that a file of this model cannot have."""
        if self.source_size is not None and self.input_dtype != "uint8":
            yield (
                "source_size needs input_dtype='uint8' (--input uint8): only pixels are resized. "
                f"Received: {self.input_dtype!r}"
            )
        sides = (self.source_size,) * 2 if isinstance(self.source_size, int) else as_python(self.source_size)
        if sides == config.size and config.preprocessing.crop_fraction < 1:
            yield (
                "source_size must not be the model's own image_size, of which files take pixels that are cut already: "
                f"leave it out, or state the size of whole images. Received: {sides}"
            )
        if self.output == "probabilities" and self.output not in task.outputs:
            received = f"num_classes={config.num_classes}, projection_head={config.projection_head}"
            yield f"output='probabilities' needs a head for classes. Received: a model of {received}"
        if self.output == "classes" and self.output not in task.outputs:
            yield f"output='classes' needs a model with a class for every pixel. Received: outputs {list(task.outputs)}"
        if self.attention and not (config.class_token and config.has_attention):
            received = "class token" if config.has_attention else "attention"
            yield f"attention=True needs attention and a class token. Received: a model without {received}"
