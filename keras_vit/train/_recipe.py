"""Training recipes: one frozen dataclass, checked when created, and its files: zoo/recipes/*.toml, or a user's own.

Needs neither Keras nor TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from keras_vit._util import files
from keras_vit._util.checks import (
    Checked,
    Count,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
    WholeNumber,
    as_path,
    field_rules,
    given,
    pair,
    table_problems,
)
from keras_vit._util.fields import documented, option
from keras_vit._util.text import suggestion, warn
from keras_vit.model.config import ViTConfig, check_fields

# Tensors that an optimizer keeps for each variable: the first in momentum_dtype, others in float32. "least_squares" has
# no step.
SLOTS = {"sgd": ("momentum",), "adamw": ("mu", "nu")}
HIDDEN_SIZE = "hidden_size"  # value of config's representation_size: the width of the model's tokens
# Words of train_only: the paths of their variables.
GROUPS = {"norms": ("*/gamma", "*/beta"), "biases": ("*/bias",), "lora": ("*/lora_kernel_*",)}
EXCLUSIVE_FIELDS = (("steps", "epochs"), ("warmup_steps", "warmup_fraction"))
_OPTIONAL_IN_CONFIG = {name for name, rule in field_rules(ViTConfig).items() if rule.is_optional}
# Fields of ViTConfig that a recipe's `config` may not set -> where their values come from.
_NOT_IN_CONFIG = {
    "image_size": "the recipe's image_size",
    "num_classes": "the number of classes of the data",
    "labels": "the class names of the data",
    "probabilities": "the recipe's objective, softmax or sigmoid",
}


@documented
@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(Checked):
    """All settings of a training run except the model and the data. Frozen; `replace` makes a changed copy.

    NumPy's numbers are converted to Python's, lists to tuples.

    Raises:
        ValueError: A field is not valid; the message names all invalid fields.

    Example:
        >>> keras_vit.train.Recipe(name="mine", steps=100, batch_size=32, optimizer="sgd", learning_rate=0.1).momentum
        0.9
    """

    name: str
    """Name of the recipe; for a file, its name without ".toml"."""
    source: str = ""
    """Where its values were published, and which values differ from the publication."""
    notes: tuple[str, ...] = ()
    """Caveats for users."""

    start: Literal["pretrained", "scratch"] = "pretrained"
    """Initial weights where the model is given by name: "pretrained" or "scratch"."""
    objective: Literal["softmax", "sigmoid", "silog", "masked_patch", "distill", "distill_features"] = "softmax"
    """Objective: "softmax", "sigmoid" (independent classes), "silog" (depth), "masked_patch" (paper, appendix B.1.2),
    "distill" (the classes of a teacher) or "distill_features" (its features).
    """
    steps: Count | None = option(None)
    """Number of updates; either these or `epochs`."""
    epochs: Positive | None = None
    """Number of passes over the training data, above 0; may be a fraction."""
    batch_size: Count
    """Images per update, over all replicas."""
    accumulation: Count | Literal["auto"] = 1
    """Number of micro-batches that an update is computed in; divides `batch_size`. "auto" takes the fewest that fit
    into the memory of the device.
    """
    seed: Annotated[int, f"[0, {2**64})"] = 0
    """Seed of all random numbers, an integer from 0 to 2**64 - 1."""

    image_size: int | tuple[int, int] | None = option(None, is_size=True)
    """Pixels, an int or (height, width); by default those of the model."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of ViTConfig to change, such as dropout_rate or stochastic_depth. `representation_size =
    "hidden_size"` stands for the width of the model's tokens.
    """
    reset_head: Literal[True, False, "auto"] = False
    """Whether to replace the head by zeros and remove the pre_logits layer, as the official fine-tuning; "auto" does so
    unless model and data have the same class names, in any order.
    """
    head: Literal["linear", "multiscale", "dpt"] | None = None
    """The head for maps that a model without one gets, as `dense.segmenter` has them; None for none."""
    max_depth: Positive | None = None
    """Largest distance in metres of a head for depth."""
    freeze: tuple[str, ...] = ()
    """Patterns with wildcards of variables that are not trained, such as "embedding/*"."""
    train_only: tuple[str, ...] = ()
    """Variables that are trained beside a head: "norms" (gains and shifts, LayerScale's too), "biases", "lora", and
    patterns of variable paths; empty for everything, or with `lora_rank` for LoRA. `freeze` takes from these.
    """
    lora_rank: WholeNumber = 0
    """Rank of the updates (LoRA, arXiv 2106.09685) that the kernels of `lora_targets` get; 0 for none. They are added
    to the kernels of the results.
    """
    lora_targets: tuple[str, ...] = ("query", "value")
    """Names of layers inside the blocks, such as "query", "value" and "dense1"."""
    linear_probe: bool = False
    """Whether to train the head only."""
    layers: Count = 1
    """Number of last blocks whose class tokens and mean patches a new head reads, or with "least_squares" the most that
    it may read; 1 for the model's own feature.
    """
    head_start: Literal["zeros", "probe"] = "zeros"
    """A new head begins with "zeros", or with the "probe": the head of least squares that linear-probe finds. Then step
    0 is evaluated too, and the result is the model of the best evaluation. A head that is not trained becomes, after
    the last step, the mean of itself and of one that is solved for the trained features.
    """
    ema_decay: Annotated[float, "(0, 1)"] | None = None
    """Decay of the weights' moving average (Polyak; 0.9999 in the paper), in (0, 1); None for no average."""
    label_smoothing: Share = 0.0
    """Share of each label that is spread over all classes, in [0, 1)."""
    calibrate: bool = True
    """Whether the head of every result that says softmax is divided by a temperature, the one with the least
    cross-entropy on the held-out images (arXiv 1706.04599). The best class stays the same. Evaluations measure the
    model with it.
    """
    class_weights: Literal["balanced"] | tuple[NonNegative, ...] | Mapping[str, NonNegative] | None = None
    """Weight of each class: "balanced" for labels / (classes * labels of the class), as scikit-learn; a list with the
    weight of each class, from 0; or a table by the names, or numbers, of classes, with 1 for all others. They multiply
    the losses of images, or of pixels of maps, as Keras' `fit(class_weight=)`, or the squares of "least_squares". None
    weighs all labels equally.
    """

    temperature: Positive = 1.0
    """Divisor of the logits of "distill", above 0."""
    teacher_size: int | tuple[int, int] | None = None
    """Pixels that the teacher sees; None for its own size, or on a CPU the model's if that is smaller."""
    hard_targets: bool = False
    """Whether "distill" takes the teacher's best class as a label instead of its probabilities."""
    label_weight: Share = 0.0
    """Share of the data's labels in the loss of "distill", in [0, 1)."""
    patch_weight: NonNegative = 1.0
    """Weight of the patches' loss in "distill_features", beside 1 for the whole image's."""

    optimizer: Literal["sgd", "adamw", "least_squares"]
    """Rule of the updates: "sgd" (with momentum), "adamw", or "least_squares": with linear_probe, a head in closed
    form.
    """
    learning_rate: Positive
    """Highest learning rate of the schedule, above 0."""
    momentum: Share = 0.9
    """Momentum of "sgd", in [0, 1)."""
    beta1: Share = 0.9
    """Decay of the first moment of "adamw", in [0, 1)."""
    beta2: Share = 0.999
    """Decay of the second moment of "adamw", in [0, 1)."""
    epsilon: NonNegative = 1e-8
    """Epsilon of "adamw", added to the root of the second moment, after the bias correction of both moments."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the stored momentum (first moment): "float32" or "bfloat16"."""
    weight_decay: NonNegative = 0.0
    """Weight decay of variables called kernel, decoupled from the gradient (AdamW)."""
    weight_decay_independent: bool = False
    """Whether the decay follows the schedule only, not also `learning_rate` (big_vision)."""
    clip_norm: Positive | None = None
    """Largest global norm of the gradient; None for no limit."""
    layer_decay: PositiveShare = 1.0
    """Learning rate of a block divided by that of the next one, in (0, 1] (BEiT)."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up: "cosine" to 0, "linear" to `linear_end`, or "constant"."""
    warmup_steps: WholeNumber | None = None
    """Number of updates in which the learning rate rises linearly from 0; None for none."""
    warmup_fraction: Share | None = None
    """The same as a share of all updates, in [0, 1); give one of the two."""
    linear_end: NonNegative = 1e-5
    """Last learning rate of "linear", from 0 to `learning_rate`."""

    crop: Literal["inception", "random", "resize", "none"] = "inception"
    """Part of an image that is taken: "inception" (random area and aspect ratio), "random", "resize" (the whole image)
    or "none" (no change).
    """
    crop_resize: Count | None = None
    """Side in pixels that an image is resized to before a "random" crop."""
    min_area: PositiveShare = 0.05
    """Smallest share of the image that an "inception" crop keeps, in (0, 1]."""
    flip: bool = True
    """Whether to mirror half of the images."""
    shift: Share = 0.0
    """Largest random translation, as a share of the sides, in [0, 1)."""
    randaugment_layers: WholeNumber = 0
    """Number of RandAugment operations per image, 0 for none."""
    randaugment_magnitude: NonNegative = 0.0
    """Strength of RandAugment, on a scale of 10; the papers go up to 20."""
    mixup: NonNegative = 0.0
    """Parameter of mixup's Beta distribution, 0 for no mixup."""

    precision: Literal["float32", "mixed_bfloat16"] = "float32"
    """Policy of the computation: "float32" or "mixed_bfloat16"."""
    xla: Literal[True, False, "auto"] = "auto"
    """Part that XLA compiles: True compiles the whole step, False nothing, "auto" the whole step (on a CPU: between
    matrix products). With False, two equal runs on a CPU may differ in the last digits: TensorFlow adds three gradients
    in an order that depends on threads.
    """
    remat: bool = False
    """Whether to recompute blocks in the backward pass, which halves the memory."""
    steps_per_call: Count = 1
    """Updates per call of the compiled function."""

    checkpoint_steps: Count | None = None
    """Updates from one checkpoint to the next; None saves none by steps."""
    checkpoint_minutes: Positive | None = 10.0
    """Minutes from one checkpoint to the next; None saves none by time."""
    keep: Count = 3
    """Number of checkpoints that are kept."""
    eval_steps: Count | Literal["auto"] | None = "auto"
    """Updates from one evaluation to the next; None evaluates at the end only, "auto" about ten times in a run, with at
    least 10 updates between and at most a tenth of the arithmetic of training.
    """
    log_steps: Count = 10
    """Updates from one line of the log to the next."""

    # No setting: the set of fields that were changed after the recipe was read; None for a recipe that was not read.
    changed: Any = field(default=None, repr=False, compare=False)

    def _title(self) -> str:
        return f"Recipe {self.name!r}"

    def _convert(self) -> None:
        if isinstance(self.config, Mapping):
            self._set("config", read_none(self.config, _OPTIONAL_IN_CONFIG))
        if isinstance(self.class_weights, Mapping):  # Keras has numbers of classes as keys
            self._set("class_weights", {str(name): weight for name, weight in self.class_weights.items()})

    def __repr__(self) -> str:
        """Fields that differ from their defaults, without where they are from."""
        own = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self) if f.name in FIELD_RULES}
        shown = (f"{name}={value!r}" for name, (value, default) in own.items() if value not in (default, {}))
        return f"Recipe({', '.join(text for text in shown if not text.startswith(('source=', 'notes=')))})"

    def _conflicts(self) -> Iterator[str]:
        if (self.steps is None) == (self.epochs is None):
            yield f"give either steps or epochs. Received: steps={self.steps}, epochs={self.epochs}"
        warmup, fraction = self.warmup_steps, self.warmup_fraction
        if warmup is not None and fraction is not None:
            yield f"give warmup_steps or warmup_fraction, not both. Received: {warmup} and {fraction}"
        if self.steps is not None and (warmup or 0) >= self.steps:
            yield (
                f"warmup_steps must be below steps={self.steps}, or the learning rate never reaches its peak. "
                f"Received: {warmup}. Set warmup_fraction=0.1 for a tenth of the run"
            )
        if self.accumulation != "auto" and self.batch_size % self.accumulation:
            yield f"accumulation must divide batch_size={self.batch_size}. Received: {self.accumulation}"
        if self.optimizer == "least_squares" and not self.linear_probe:
            yield "optimizer='least_squares' finds a head only: set linear_probe=true. Received: linear_probe=False"
        if self.linear_probe and (self.train_only or self.lora_rank):
            received = f"train_only={list(self.train_only)}, lora_rank={self.lora_rank}"
            yield f"linear_probe trains the head only: it takes no train_only and no lora_rank. Received: {received}"
        if "lora" in self.train_only and not self.lora_rank:
            yield "train_only has 'lora', which needs a lora_rank, such as 8. Received: 0"
        if self.head_start == "probe" and (self.optimizer == "least_squares" or not self.trains_head):
            received = f"optimizer={self.optimizer!r}, objective={self.objective!r}"
            yield f"head_start='probe' is for a head that is trained in steps. Received: {received}"
        if self.class_weights is not None and self.objective not in ("softmax", "sigmoid"):
            yield f"class_weights are for objective='softmax' or 'sigmoid'. Received: objective={self.objective!r}"
        if self.class_weights is not None and not isinstance(self.class_weights, str):
            weights = self.class_weights.values() if isinstance(self.class_weights, Mapping) else self.class_weights
            if not any(weights):
                yield f"class_weights must have one above 0. Received: {self.class_weights!r:.200}"
        if self.schedule == "linear" and self.linear_end > self.learning_rate:
            yield f"linear_end must be at most learning_rate={self.learning_rate}. Received: {self.linear_end}"
        if self.crop_resize is not None and self.crop != "random":
            yield f"crop_resize is for crop='random'. Received: crop={self.crop!r}, crop_resize={self.crop_resize}"
        try:
            if self.teacher_size is not None:
                pair(self.teacher_size, "teacher_size")
            sides = pair(self.image_size, "image_size") if self.image_size is not None else (1, 1)
            if self.crop_resize is not None and self.crop_resize < max(sides):
                yield f"crop_resize must be at least image_size={self.image_size}. Received: {self.crop_resize}"
        except ValueError as error:
            yield str(error).rstrip(".")
        try:
            check_fields(self.config)  # their names; ViTConfig checks the values later
        except ValueError as error:
            yield f"config: {error}"
        for name in _NOT_IN_CONFIG.keys() & self.config.keys():
            yield f"config must not have {name}: it is {_NOT_IN_CONFIG[name]}. Received: {self.config[name]!r:.200}"

    @property
    def has_teacher(self) -> bool:
        """Whether a model is trained to agree with a teacher."""
        return self.objective in ("distill", "distill_features")

    @property
    def trained_patterns(self) -> dict[str, tuple[str, ...]]:
        """Patterns of the paths that are trained beside the head, by the words of train_only; {} for everything."""
        words = self.train_only or (("lora",) if self.lora_rank else ())
        return {word: GROUPS.get(word, (word,)) for word in words}

    @property
    def trains_head(self) -> bool:
        """Whether the result has a head for the classes of the data."""
        return self.objective not in ("masked_patch", "distill_features")

    @property
    def probabilities(self) -> str:
        """Function from the result's logits to probabilities, "softmax" or "sigmoid", as in ViTConfig."""
        return "sigmoid" if self.objective == "sigmoid" else "softmax"

    def replace(self, **changes: Any) -> Recipe:
        """Copy the recipe with some fields changed.

        `steps` and `epochs` replace each other, as do `warmup_steps` and `warmup_fraction`. In a shorter run the
        warm-up keeps its share of the updates, unless it is or was changed too. Fields of `config` are added to those
        that are set.

        Args:
            **changes: fields and their new values.

        Raises:
            ValueError: A field is unknown (the message names the nearest), or a value is not valid.

        Example:
            >>> short = keras_vit.train.recipe("finetune").replace(steps=2000, learning_rate=0.01)
            >>> short.resolved_warmup(2000)  # 500 of 20,000
            50
        """
        for name in changes:
            if name not in FIELD_RULES:
                words = _in_words_of_recipes(name, changes[name]) or suggestion(name, FIELD_RULES)
                raise ValueError(f"A recipe has no field {name!r:.200}; {words}.")
        own = {name: getattr(self, name) for name in FIELD_RULES}
        changed = None if self.changed is None else self.changed | changes.keys()
        return Recipe(**merge_fields(own, read_none(changes), stated=self.changed or ()), changed=changed)

    def is_stated(self, field: str) -> bool:
        """Whether the user chose the value of a field, and not the recipe's file.

        Args:
            field: name of the field.

        Example:
            >>> keras_vit.train.recipe("finetune", steps=500).is_stated("steps")
            True
        """
        return self.changed is None or field in self.changed

    def config_changes(self, config: ViTConfig) -> dict[str, Any]:
        """Fields of a model's config that this recipe changes: those of its `config`, and `image_size`.

        Args:
            config: config of the model that is trained.

        Example:
            >>> keras_vit.train.recipe("digits", image_size=32).config_changes(keras_vit.ViTConfig.from_name("B/16"))
            {'image_size': 32}
        """
        changes = {name: config.hidden_size if value == HIDDEN_SIZE else value for name, value in self.config.items()}
        return {**changes, **given(image_size=self.image_size)}

    def resolved_steps(self, count: int) -> int:
        """Number of updates of a run, at least 1.

        Args:
            count: number of training images, above 0.

        Example:
            >>> keras_vit.train.recipe("digits", epochs=2, batch_size=64).resolved_steps(640)
            20
        """
        return self.steps or max(1, round((self.epochs or 0.0) * count / self.batch_size))

    def resolved_warmup(self, total_steps: int) -> int:
        """Number of updates of the warm-up.

        If `warmup_steps` leaves no other update, a fifth of all updates is used instead, with a warning. This is the
        official warm-up of short runs: 100 of 500 updates.

        Args:
            total_steps: number of updates of the run.

        Example:
            >>> keras_vit.train.recipe("finetune", warmup_fraction=0.1).resolved_warmup(200)
            20
        """
        if self.warmup_fraction is not None:
            return min(round(self.warmup_fraction * total_steps), total_steps - 1)
        if (warmup := self.warmup_steps or 0) < total_steps:
            return warmup
        warn(
            f"keras_vit: a warm-up of {warmup} leaves no step of {total_steps}; {total_steps // 5}, a fifth, are "
            "used instead. Set warmup_steps to choose another number."
        )
        return total_steps // 5

    def to_dict(self) -> dict[str, Any]:
        """Convert all fields to values that JSON can hold; `from_dict` gives the recipe back.

        Example:
            >>> recipe = keras_vit.train.recipe("digits")
            >>> keras_vit.train.Recipe.from_dict(recipe.to_dict()) == recipe
            True
        """
        fields = {name: getattr(self, name) for name in FIELD_RULES}
        return dict(json.loads(json.dumps(fields, default=dataclasses.asdict)))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Recipe:
        """Restore a recipe that `to_dict` stored.

        Args:
            fields: as `to_dict` returns them.

        Example:
            >>> keras_vit.train.Recipe.from_dict(keras_vit.train.recipe("digits").to_dict()).epochs
            100.0
        """
        return cls(**fields, changed=frozenset())


FIELD_RULES = {name: rule for name, rule in field_rules(Recipe).items() if name != "changed"}
REQUIRED = {f.name for f in dataclasses.fields(Recipe) if f.default is f.default_factory is dataclasses.MISSING}
_OPTIONAL = {name for name, rule in FIELD_RULES.items() if rule.is_optional}


def _in_words_of_recipes(name: str, value: Any) -> str:
    """Say what a recipe has in place of a field of another name; "" if none is known."""
    if name in ("early_stopping", "patience"):
        return (
            "no run ends early. The weights of its best evaluation are kept, as best.keras; eval_steps says how often"
        )
    if name in _NOT_IN_CONFIG:
        return f"it is {_NOT_IN_CONFIG[name]}"
    if name not in field_rules(ViTConfig):
        return ""
    field = json.dumps({name: value}, default=repr)
    return f"{name} is a field of the model's config: config={{{name!r}: {value!r}}} (--set 'config={field}')"


def read_none(fields: Mapping[str, Any], optional: Collection[str] = _OPTIONAL) -> dict[str, Any]:
    """Replace "none" (TOML has no null) by None in optional fields."""
    return {
        name: None if name in optional and isinstance(value, str) and value == "none" else value
        for name, value in fields.items()
    }


def merge_fields(
    fields: Mapping[str, Any], changes: Mapping[str, Any], *, stated: Collection[str] = ()
) -> dict[str, Any]:
    """Change some fields by the rules of `Recipe.replace`; `stated` ones were changed before."""
    merged = {**fields, **changes}
    for names in EXCLUSIVE_FIELDS:
        for name, alternative in (names, names[::-1]):
            if changes.get(name) is not None and alternative not in changes:
                merged.pop(alternative, None)
    if not {"warmup_steps", "warmup_fraction"} & {*changes, *stated}:
        merged |= _scaled_warmup(fields, changes)
    if all(isinstance(values.get("config"), Mapping) for values in (fields, changes)):
        merged["config"] = {**fields["config"], **changes["config"]}
    return merged


def _scaled_warmup(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the warm-up of a run whose length is changed, so that its share of the steps does not grow."""
    warmup, steps, epochs = (fields.get(name) for name in ("warmup_steps", "steps", "epochs"))
    new_steps, new_epochs = changes.get("steps"), changes.get("epochs")
    if not isinstance(warmup, int) or not all(isinstance(n, int | float | None) for n in (new_steps, new_epochs)):
        return {}  # `Recipe` reports values of other types
    if steps and (new_epochs or (new_steps and new_steps < steps)):
        return {"warmup_steps": None, "warmup_fraction": warmup / steps}
    if epochs and new_epochs and new_epochs < epochs:
        return {"warmup_steps": round(warmup * new_epochs / epochs)}
    # Without the data the steps of the earlier epochs are not known.
    return {"warmup_steps": min(warmup, int(new_steps) // 5)} if epochs and new_steps else {}


# ---- files

# Keys of a file; `Recipe` checks the values. The recipe's name is the file's.
_KEYS = dict.fromkeys(FIELD_RULES.keys() - {"name"}, NotRequired[Any])
_File = TypedDict("_File", {**_KEYS, "source": NotRequired[str], "extends": NotRequired[str]})  # type: ignore[misc]


def recipe(name_or_path: str | os.PathLike[str], **changes: Any) -> Recipe:
    """Load a training recipe from the zoo or from a file.

    Args:
        name_or_path: one of `recipes()`, or the path of a .toml file in the format that zoo/README.md describes.
        **changes: fields to change, as for `Recipe.replace`.

    Raises:
        ValueError: No recipe has this name (the message names the nearest), or the file or a change is not valid.
        FileNotFoundError: There is no such file.

    Example:
        >>> keras_vit.train.recipe("finetune", image_size=224, steps=10_000).learning_rate
        0.03
    """
    path = _find_file(name_or_path)
    fields = _read_fields(path)
    if missing := sorted({"source", *REQUIRED} - fields.keys()):
        raise ValueError(f"{path} is not a valid recipe: it lacks the keys {missing}")
    try:
        loaded = Recipe(**fields, changed=frozenset())
    except ValueError as error:
        raise ValueError(f"{path} is not a valid recipe: {error}") from None
    return loaded.replace(**changes) if changes else loaded


def recipes() -> list[str]:
    """List the names of the recipes that come with the package.

    Example:
        >>> "finetune" in keras_vit.train.recipes()
        True
    """
    return sorted(_recipe_files())


def _recipe_files() -> dict[str, Path]:
    return {path.stem: path for path in (files.data_folder("zoo") / "recipes").glob("*.toml")}


def _find_file(name_or_path: str | os.PathLike[str]) -> Path:
    name, known = as_path(name_or_path, "recipe"), _recipe_files()
    path = known.get(name, Path(name))
    if path.suffix != ".toml":
        near = suggestion(name, known)
        raise ValueError(f"There is no recipe {name!r:.200}, and it is not a .toml file; {near}.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no recipe file {path}. The recipes of the package are {list(known)}")
    return path


def _read_fields(path: Path) -> dict[str, Any]:
    """Read the fields of a file, with those of the recipe that it extends."""
    table = files.read_toml(path)
    if wrong := list(table_problems(table, _File, path.name)):
        raise ValueError(f"{path} is not a valid recipe: " + "; ".join(wrong))
    extended = table.pop("extends", None)
    fields = {"name": path.stem, **read_none(table)}
    if extended is None:
        return fields
    known = set(recipes()) - {path.stem}
    if extended not in known:
        raise ValueError(
            f"{path.name}.extends names no recipe of the zoo: {extended!r}; {suggestion(extended, known)}."
        )
    base = _read_fields(_find_file(extended))
    base |= {"source": f"changes to {extended}: {base['source']}", "notes": ()}
    return merge_fields(base, fields)
