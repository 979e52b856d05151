"""What a training recipe may say: one frozen `Recipe`, checked. `recipe` reads it from a file.

Nothing here imports Keras or TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_vit._util.schema import misfits
from keras_vit.model.config import ViTConfig
from keras_vit.model.sizes import canonical_name
from keras_vit.train._recipe_checks import (
    CHOICES,
    INTERVALS,
    KINDS,
    config_misfits,
    image_size_misfits,
    known,
    lies_in,
    plain,
)

HIDDEN_SIZE = "hidden_size"  # as config's representation_size: as wide as the model's tokens


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained, complete but for the model and the data. Frozen; `replace` makes another.

    NumPy's numbers are taken as Python's, lists as tuples.

    Args:
        name: what it is called; that of its file without ".toml".
        source: where its numbers were published, and where they differ from that.
        notes: what a user had better know.
        variant: which of the file's [variants] is laid over it; None for none.

        start: weights that training begins with where only a model is named: "pretrained" or "scratch".
        objective: "softmax", "sigmoid" (a yes or no for each class) or "masked_patch" (paper, appendix B.1.2).
        steps: updates in all; either these or `epochs`.
        epochs: passes over the data, a fraction too.
        batch_size: images an update, over all replicas.
        accumulation: micro-batches it is computed in; divides `batch_size`.
        seed: of everything random, a whole number from 0.

        image_size: int or (height, width); None leaves the model's.
        config: other fields of ViTConfig to change, such as dropout_rate or stochastic_depth.
            `representation_size = "hidden_size"` means as wide as the model's tokens.
        reset_head: a new head of zeros and no pre_logits layer, as the official fine-tuning.
        freeze: patterns, as of file names, of the variables that do not train: "embedding/*".
        linear_probe: only the head trains.
        ema_decay: of the moving average of the weights (Polyak; the paper's is .9999), in (0, 1); None for none.
        label_smoothing: share of the label spread over all classes, in [0, 1).

        optimizer: "sgd" (momentum) or "adamw".
        learning_rate: the highest, above 0.
        momentum: of "sgd", in [0, 1).
        beta1: of "adamw", in [0, 1), as is beta2.
        beta2: of "adamw".
        epsilon: of "adamw", added to the root of the second moment, bias-corrected both.
        momentum_dtype: "float32" or "bfloat16": what the momentum (the first moment) is stored in.
        weight_decay: of variables called kernel, decoupled from the gradient (AdamW).
        weight_decay_independent: it is multiplied by the schedule alone, not by `learning_rate` too (big_vision).
        clip_norm: the gradient's largest global norm; None for no limit.
        layer_decay: share of its successor's learning rate that a block has, in (0, 1] (BEiT).

        schedule: "cosine" to 0, "linear" to `linear_end` or "constant".
        warmup_steps: updates in which the rate rises linearly from 0; None, as for `warmup_fraction`, for none.
        warmup_fraction: the same as a share of all updates, in [0, 1); not both.
        linear_end: last rate of "linear", from 0 to `learning_rate`.

        crop: "inception" (random area and aspect), "random", "resize" (the whole image) or "none" (as it is).
        crop_resize: side that an image is resized to before a "random" crop.
        min_area: least share of the image that an "inception" crop keeps, in (0, 1].
        flip: half of the images are mirrored.
        shift: random translation up to this share of the sides, in [0, 1).
        randaugment_layers: operations an image, 0 for none.
        randaugment_magnitude: of 10, though the papers go up to 20.
        mixup: parameter of the Beta distribution, 0 for none.

        precision: "float32" or "mixed_bfloat16".
        xla: True compiles the whole step, False nothing; "auto" on a CPU only what lies between products of matrices,
            elsewhere all of it.
        remat: whether blocks are recomputed in the backward pass, for half the memory.
        steps_per_call: updates a call of the compiled function.

        checkpoint_steps: updates from one checkpoint to the next; None for none by number.
        checkpoint_minutes: minutes likewise.
        keep: checkpoints kept.
        eval_steps: updates from one evaluation to the next; None evaluates at the end.
        log_steps: updates from one line of the log to the next.

    Raises:
        ValueError: naming every field that is wrong.
    """

    name: str
    source: str = ""
    notes: tuple[str, ...] = ()
    variant: str | None = None

    start: str = "pretrained"
    objective: str = "softmax"
    steps: int | None = None
    epochs: float | None = None
    batch_size: int
    accumulation: int = 1
    seed: int = 0

    image_size: int | tuple[int, int] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    reset_head: bool = False
    freeze: tuple[str, ...] = ()
    linear_probe: bool = False
    ema_decay: float | None = None
    label_smoothing: float = 0.0

    optimizer: str
    learning_rate: float
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum_dtype: str = "float32"
    weight_decay: float = 0.0
    weight_decay_independent: bool = False
    clip_norm: float | None = None
    layer_decay: float = 1.0

    schedule: str = "cosine"
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    linear_end: float = 1e-5

    crop: str = "inception"
    crop_resize: int | None = None
    min_area: float = 0.05
    flip: bool = True
    shift: float = 0.0
    randaugment_layers: int = 0
    randaugment_magnitude: float = 0.0
    mixup: float = 0.0

    precision: str = "float32"
    xla: bool | str = "auto"
    remat: bool = False
    steps_per_call: int = 1

    checkpoint_steps: int | None = None
    checkpoint_minutes: float | None = 10.0
    keep: int = 3
    eval_steps: int | None = None
    log_steps: int = 10

    origin: Origin | None = field(default=None, repr=False, compare=False)  # no setting: what it was made of

    def __post_init__(self) -> None:
        for name in ANNOTATIONS:
            object.__setattr__(self, name, plain(getattr(self, name)))
        wrong = list(self._misfits()) or list(self._contradictions())
        if wrong:
            raise ValueError(f"Recipe {self.name!r}: " + "; ".join(wrong))
        for name, kind in ANNOTATIONS.items():
            if kind.startswith("float") and getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))

    def _misfits(self) -> Iterator[str]:
        """What is wrong with single fields."""
        for name in ANNOTATIONS:
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            wrong = list(misfits(list(value) if isinstance(value, tuple) else value, SCHEMA[name], name))
            yield from wrong
            if not wrong and name in CHOICES and value not in CHOICES[name]:
                yield f"{name} is one of {list(CHOICES[name])}. Received: {value!r}"
            if not wrong and name in INTERVALS and not lies_in(value, INTERVALS[name]):
                yield f"{name} lies in {INTERVALS[name]}. Received: {value!r}"

    def _contradictions(self) -> Iterator[str]:
        """What is wrong between fields that are right by themselves."""
        if (self.steps is None) == (self.epochs is None):
            yield f"it has either steps or epochs. Received: steps={self.steps}, epochs={self.epochs}"
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            yield (
                "it has warmup_steps or warmup_fraction, not both. "
                f"Received: {self.warmup_steps} and {self.warmup_fraction}"
            )
        if self.batch_size % self.accumulation:
            yield f"accumulation divides batch_size={self.batch_size}. Received: {self.accumulation}"
        if self.schedule == "linear" and self.linear_end > self.learning_rate:
            yield f"linear_end is at most learning_rate={self.learning_rate}. Received: {self.linear_end}"
        if self.crop_resize is not None and self.crop != "random":
            yield f"crop_resize is for crop='random'. Received: crop={self.crop!r}, crop_resize={self.crop_resize}"
        yield from image_size_misfits(self.image_size, self.crop_resize)
        yield from config_misfits(self.config)

    def replace(self, **changes: Any) -> Recipe:
        """The same recipe with some fields changed.

        `steps` given alone take the place of `epochs`, and `warmup_steps` of `warmup_fraction`, or the other way
        round; fields of `config` join those there are; `variant` is one of the file's. What was ever changed in this
        way comes before what a variant says.

        Args:
            **changes: fields and their new values.

        Raises:
            ValueError: an unknown field or variant, with the nearest; a value that does not fit.
        """
        origin = self.origin or Origin(stated={name: getattr(self, name) for name in ANNOTATIONS})
        for name in changes:
            known(name, ANNOTATIONS, "A recipe has no field {!r}")
        changes = without_none(changes)
        variant = changes.pop("variant", self.variant)
        if variant is not None and variant != self.variant:
            known(variant, origin.variants, f"Recipe {self.name!r} has no variant {{!r}}")
        return dataclasses.replace(origin, changes=laid_over(origin.changes, changes)).recipe(variant)

    def for_model(self, architecture: str) -> Recipe:
        """The recipe with the variant that its file names for a model, unless one is chosen already.

        Args:
            architecture: in any spelling; for one that the file does not name, the recipe stays as it is.
        """
        try:
            architecture = canonical_name(architecture)
        except ValueError:
            return self  # a model of one's own: no file can name it
        variant = self.origin.variant_of.get(architecture) if self.origin else None
        return self if variant is None or self.variant else self.replace(variant=variant)

    def config_changes(self, config: ViTConfig) -> dict[str, Any]:
        """The fields of a model's config that this recipe changes: its `config` and `image_size`.

        Args:
            config: of the model that is trained.
        """
        changes = {name: config.hidden_size if value == HIDDEN_SIZE else value for name, value in self.config.items()}
        return changes if self.image_size is None else {**changes, "image_size": self.image_size}

    def resolved_steps(self, count: int) -> int:
        """All updates of a run; at least one.

        Args:
            count: of training images.

        Raises:
            ValueError: there are none.
        """
        if count < 1:
            raise ValueError(f"There are no images to train on. Received: {count}")
        if self.steps is not None:
            return self.steps
        return max(1, round((self.epochs or 0.0) * count / self.batch_size))

    def resolved_warmup(self, total_steps: int) -> int:
        """Updates of the warm-up.

        A number of them that leaves nothing to decay is told and cut to a fifth, as the official 500 steps have 100.

        Args:
            total_steps: all updates of the run.
        """
        if self.warmup_fraction is not None:
            return min(round(self.warmup_fraction * total_steps), total_steps - 1)
        warmup = self.warmup_steps or 0
        if warmup < total_steps:
            return warmup
        warnings.warn(
            f"keras_vit: a warm-up of {warmup} leaves nothing of {total_steps} steps; {total_steps // 5} are taken, "
            "a fifth. warmup_steps sets another.",
            stacklevel=2,
        )
        return total_steps // 5

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `Recipe(**d)` gives the recipe back."""
        fields = {name: getattr(self, name) for name in ANNOTATIONS}
        json_able: dict[str, Any] = json.loads(json.dumps(fields, default=dataclasses.asdict))
        return json_able


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a recipe was made of, so that another variant or other changes can be laid over it."""

    stated: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    variant_of: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, variant: str | None) -> Recipe:
        """What is stated, under the variant, under the changes."""
        fields = laid_over(self.stated, self.variants.get(variant or "", {}))
        return Recipe(**{**laid_over(fields, self.changes), "variant": variant, "origin": self})


ANNOTATIONS = {f.name: str(f.type) for f in dataclasses.fields(Recipe) if f.name != "origin"}
OPTIONAL = {name for name, kind in ANNOTATIONS.items() if kind.endswith(" | None")}
_NONE_SAID = OPTIONAL - {"variant"}  # AugReg has a variant called "none"
REQUIRED = {f.name for f in dataclasses.fields(Recipe) if f.default is f.default_factory is dataclasses.MISSING}
_EITHER = (("steps", "epochs"), ("warmup_steps", "warmup_fraction"))
SCHEMA = {name: KINDS[kind.removesuffix(" | None")] for name, kind in ANNOTATIONS.items()}


def laid_over(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with some of them changed, as `Recipe.replace` describes it."""
    merged = {**fields, **changes}
    for pair_of_fields in _EITHER:
        for one, other in (pair_of_fields, pair_of_fields[::-1]):
            if changes.get(one) is not None and other not in changes:
                merged.pop(other, None)
    if all(isinstance(layer.get("config"), Mapping) for layer in (fields, changes)):
        merged["config"] = {**fields["config"], **changes["config"]}
    return merged


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with None where a field that may be None says "none": TOML has no other way."""
    return {
        name: None if name in _NONE_SAID and isinstance(value, str) and value == "none" else value
        for name, value in fields.items()
    }
