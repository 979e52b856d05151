"""Refuse an exported file whose outputs are too far from its model's, and say what to do about it."""

import math

from keras_vit.errors import VerificationError
from keras_vit.export.check.report import Report
from keras_vit.export.quantization.modes import Mode

# Of a file of unknown mode: 8-bit weights measure 0.999 and better, a broken file far less.
LEAST = {"cosine": 0.99, "difference_cosine": 0.9, "agreement": 0.0}
# Of a SavedModel with bfloat16 weights: 0.9998 and 0.992 are the lowest of all model families.
LEAST_BFLOAT16 = {"cosine": 0.995, "difference_cosine": 0.95, "agreement": 0.0}
ACCEPTABLE = 0.8  # values below mean that the file is another model's or damaged
HALF = 16  # bits
# Numbers of classes do not say which pixels are near ties, as those at edges are: so many times more may differ.
UNDECIDED = 10
LEAST_CLASS_MAP = 0.97  # of images, for a file of unknown mode
# The direction of fewer logits says little: they are small where classes are close, and an error of a few percent of
# the largest logit turns them. Their best class on as many images says what the file is good for.
MANY_CLASSES = 10
ENOUGH_IMAGES = 16


def check_thresholds(
    report: Report, mode: Mode | None, *, has_classes: bool, num_classes: int = MANY_CLASSES, **given_least: float
) -> None:
    """Raise a VerificationError with the next step if a value of the report is below the given or the mode's least.

    `given_least` has "cosine" and "agreement". Without classes, or on images whose classes mean little, no agreement is
    asked for unless it is given. With few classes and enough images it decides alone. A quantized file may always
    differ on one image: with 30 of them, a share of 0.99 cannot be measured.
    """
    values = {
        "cosine": report.cosine if report.mean_cosine is None else report.mean_cosine,
        "difference_cosine": report.difference_cosine,
        "agreement": report.decided_agreement,
    }
    is_class_map = report.cosine is None
    if is_class_map:
        values["agreement"] = report.agreement
    least = dict(LEAST_BFLOAT16 if report.mode == "bfloat16" else LEAST)
    if mode is not None:
        least = {name: getattr(mode, f"least_{name}") for name in values}
    if is_class_map:
        least["agreement"] = round(1 - UNDECIDED * (1 - max(least["agreement"], LEAST_CLASS_MAP)), 4)
    elif not has_classes:
        least["agreement"] = 0.0
    else:
        if mode is not None and min(mode.bits) < HALF:
            least["agreement"] = _least_share(least["agreement"], report.images)
        if num_classes < MANY_CLASSES and report.images >= ENOUGH_IMAGES:
            least["cosine"] = -1.0
    least = least | given_least
    least["difference_cosine"] = min(least["difference_cosine"], least["cosine"])
    missed = {name: value for name, value in values.items() if value is not None and not value >= least[name]}
    if missed:
        wanted = " and ".join(f"{name} >= {least[name]}" for name in missed)
        raise VerificationError(
            f"{report.path} differs from the model: wanted {wanted}. {'; '.join(report.lines()[1:])}. "
            f"What to do: {'; or '.join(_next_steps(missed, mode))}"
        )


def _least_share(least: float, images: int) -> float:
    """Return the least share of so many images after the number that may differ is rounded up."""
    differing = math.ceil(round((1 - least) * images, 4))
    return math.floor(10_000 * (1 - differing / images)) / 10_000


def _next_steps(missed: dict[str, float], mode: Mode | None) -> list[str]:
    """Return what a user can do, in the order in which to try it."""
    steps = []
    if mode is None:
        steps.append("check that the file is of this model, with these weights")
    elif min(mode.bits) < HALF:
        calibrates = mode.needs_calibration or mode.smoothing
        images = (
            "a hundred typical images, calibration=model.preprocess(...) (--images FOLDER), or " if calibrates else ""
        )
        steps.append(f"export it again with {images}quantize='float16'")
    if min(missed.values()) >= ACCEPTABLE:
        arguments: dict[str, float] = {}
        for name, value in missed.items():
            argument = "least_agreement" if name == "agreement" else "least_cosine"
            arguments[argument] = min(arguments.get(argument, 1.0), math.floor(10_000 * value) / 10_000)
        steps.append(f"accept it with {' and '.join(f'{name}={value}' for name, value in arguments.items())}")
    return steps or ["write the damaged file again"]
