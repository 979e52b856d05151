"""Files that are wrong in every way that was thought of, for the tests of verification.

One right file of a model is compared with changed copies of the model, which is as a file of the changed model beside
the right one: a file is written once for each mode. `python tests/support/wrong_files.py` prints which faults are seen.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_vit import VisionTransformer, dense, export, position, text
from keras_vit.errors import VerificationError
from keras_vit.export import samples, verification
from keras_vit.export.exported import load_exported
from keras_vit.export.modes import load_mode, mode_names
from keras_vit.model import task as tasks
from keras_vit.text import litert as text_litert
from outlier_models import standardise
from text_cases import small_encoder
from tiny_models import tiny

MODES = tuple(mode_names())
COUNT = 24  # images
FACTORS = (0.5, 1.1, 3.0)


class Kind(NamedTuple):
    """A kind of models: how one is made, and the modes of its files."""

    make: Callable[[], Any]
    modes: tuple[str, ...] = MODES


def _model(**changes: Any) -> VisionTransformer:
    """Return a model whose activations keep their variance, of many classes so that all modes have their thresholds."""
    fields: dict[str, Any] = {"num_classes": 20, "hidden_size": 64, "mlp_dim": 128, "num_layers": 3, **changes}
    return standardise(VisionTransformer(tiny(**fields)), np.random.default_rng(0))


def _on_backbone(**head: Any) -> dense.DenseModel:
    """Return a model of maps whose values are spread, so that an error does not hide."""
    model = dense.DenseModel(_model(num_classes=0, num_layers=4), dense.MapConfig(**head))
    random = np.random.default_rng(1)
    for variable in model.trainable_weights:
        if not variable.path.startswith(tuple(layer.name for layer in model.backbone.layers)):
            variable.assign(variable + random.normal(scale=0.1, size=variable.shape))
    return model


def _without(mode: str) -> tuple[str, ...]:
    """Return the modes without one in which verification refuses the right file of a model with random weights."""
    return tuple(name for name in MODES if name != mode)


RESNET = {"num_layers": (1, 1), "width_factor": 0.5}
DPT: dict[str, Any] = {"kind": "dpt", "blocks": (0, 1, 2, 3), "widths": (4, 6, 8, 12), "fusion_width": 8}
KINDS = {
    "ViT": Kind(_model),
    "hybrid": Kind(
        lambda: _model(resnet={"num_layers": (1, 1), "width_factor": 0.5}, patch_size=1), _without("int16x8")
    ),
    "DINOv2, registers": Kind(lambda: _model(num_registers=4, layer_scale=0.5, num_classes=0, position_prefix=False)),
    "SigLIP": Kind(lambda: _model(class_token=False, classifier="map", num_classes=0)),
    "segmenter": Kind(lambda: _on_backbone(num_classes=3, output="classes", blocks=(3,), batch_norm=True)),
    "depth": Kind(lambda: _on_backbone(**DPT, output="depth", activation="sigmoid", max_depth=20.0), _without("int4")),
    "text tower": Kind(small_encoder, text_litert.MODES),
}


# ---- faults


@contextlib.contextmanager
def changed(model: Any, path: str, change: Callable[[np.ndarray], np.ndarray]) -> Iterator[Any]:
    """Change a variable of the model for the block."""
    [variable] = [variable for variable in model.weights if variable.path == path]
    value = keras.ops.convert_to_numpy(variable)
    variable.assign(change(value))
    yield model
    variable.assign(value)


@contextlib.contextmanager
def exchanged(model: Any, paths: list[tuple[str, str]]) -> Iterator[Any]:
    """Exchange the values of pairs of variables for the block."""
    variables = {variable.path: variable for variable in model.weights}
    pairs = [(variables[one], variables[other]) for one, other in paths]
    values = [tuple(map(keras.ops.convert_to_numpy, pair)) for pair in pairs]
    for (one, other), (first, second) in zip(pairs, values, strict=True):
        one.assign(second)
        other.assign(first)
    yield model
    for pair, old in zip(pairs, values, strict=True):
        for variable, value in zip(pair, old, strict=True):
            variable.assign(value)


def faults(model: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over (name, context manager of a changed model)."""
    paths = [v.path for v in model.weights if "seed" not in v.path and v.dtype == "float32"]
    for path in paths:
        last = path.rpartition("/")[2]
        if last in ("kernel", "bias"):
            for factor in FACTORS:
                yield f"factor {factor} on a {last}", changed(model, path, lambda value, by=factor: by * value)
        if last == "bias":
            yield "shifted bias", changed(model, path, lambda value: value + 0.3)
        if last == "gamma" and "scale" in path:
            yield "no LayerScale", changed(model, path, np.ones_like)
        if "position" in path and last in ("embedding", "position_embedding"):
            yield "positions of another size", changed(model, path, _coarse)
        if path.endswith(("head/kernel", "map_logits/kernel")):
            yield "two classes exchanged", changed(model, path, lambda value: value[..., _swapped(value.shape[-1])])
        if "attention/value/kernel" in path:
            yield "two heads exchanged", changed(model, path, lambda value: value[:, _swapped(value.shape[1])])
    for part in ("attention/query/kernel", "mlp/dense1/kernel", "norm1/gamma"):
        blocks = [path for path in paths if path.endswith(part)]
        yield f"two blocks' {part} exchanged", exchanged(model, list(zip(blocks[:1], blocks[1:2], strict=True)))
    if isinstance(model, VisionTransformer):
        yield from (
            (name, contextlib.nullcontext(model.with_config(model.config.replace(**change))))
            for name, change in {
                "epsilon of norms 1e-5": {"norm_epsilon": 1e-5},
                "epsilon of norms 1e-2": {"norm_epsilon": 1e-2},
                "tanh GELU": {"activation": "gelu_tanh"},
                "quick GELU": {"activation": "gelu_quick"},
                "SiLU": {"activation": "silu"},
            }.items()
        )


def _swapped(count: int) -> list[int]:
    return [1, 0, *range(2, count)]


def _coarse(table: np.ndarray) -> np.ndarray:
    """Bring a table of positions to half its size and back."""
    prefix = table.shape[1] - int(np.sqrt(table.shape[1])) ** 2
    side = int(np.sqrt(table.shape[1] - prefix))
    options: dict[str, Any] = {"prefix_tokens": prefix}
    small = position.resize(table, (side // 2, side // 2), source_grid=(side, side), **options)
    return position.resize(small, (side, side), source_grid=(side // 2, side // 2), **options)


# ---- their verification


class Seen(NamedTuple):
    """A fault: its effect, and the right file's own error, as shares of the outputs, and whether it is refused."""

    kind: str
    mode: str
    fault: str
    effect: float
    own: float
    refused: bool


def images_of(model: Any) -> np.ndarray:
    """Return images, or the numbers of tokens of texts."""
    if isinstance(model, text.TextEncoder):
        return model.tokenize(text_litert.TEXTS)
    return samples.images(model.config, COUNT)


def share(received: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square error as a share of the outputs."""
    return float(np.sqrt(np.mean((received - expected) ** 2) / np.mean(expected**2)))


def output_of(model: Any, inputs: np.ndarray) -> np.ndarray:
    """Return the model's output."""
    return np.asarray(keras.ops.convert_to_numpy(model.predict_on_batch(inputs)), np.float64)


def write(kind: Kind, model: Any, path: Path, mode: str, inputs: np.ndarray) -> None:
    """Write the model's file; it is verified."""
    if isinstance(model, text.TextEncoder):
        text.tflite(model, path, quantize=mode)
        return
    given = {"calibration": inputs} if load_mode(mode).needs_calibration else {}
    export.tflite(model, path, quantize=mode, verify=inputs, **given)


def is_refused(
    model: Any, path: Path, mode: str, inputs: np.ndarray, received: dict[str, np.ndarray]
) -> tuple[bool, Any]:
    """Compare a model with a file's outputs as `export.verify` and `text.tflite` do."""
    task = tasks.of_model(model)
    [name] = received
    expected = {name: task.exported_output(name, output_of(model, inputs).astype(np.float32))}
    report = export.Report(path=path, bytes=1, milliseconds=1.0, **verification.compare(task, expected, received))
    try:
        verification.check_thresholds(
            report, load_mode(mode), has_classes=task.has_classes, num_classes=task.num_classes
        )
    except VerificationError:
        return True
    return False


def seen_faults(name: str, mode: str) -> Iterator[Seen]:
    """Verify a kind of models in a mode with each fault."""
    kind = KINDS[name]
    model = made(name)
    inputs = images_of(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        write(kind, model, path, mode, inputs)
        file = load_exported(path)
        parts = [file.call(batch) for batch, _ in file.batches(inputs, 1)]
    received = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    right = output_of(model, inputs)
    [values] = received.values()
    own = share(values, right)
    yield Seen(name, mode, "none", 0.0, own, is_refused(model, path, mode, inputs, received))
    for fault, context in faults(model):
        with context as wrong:
            effect = share(output_of(wrong, inputs), right)
            yield Seen(name, mode, fault, effect, own, is_refused(wrong, path, mode, inputs, received))
    if inputs.dtype.kind == "f":
        other = 1.1 * inputs + 0.2
        effect = share(output_of(model, other), right)
        yield Seen(name, mode, "another mean and std", effect, own, is_refused(model, path, mode, other, received))
    # The first image has the second one's outputs.
    shifted = {key: np.concatenate([array[1:2], array[1:]]) for key, array in received.items()}
    effect = share(shifted[next(iter(received))] - values + right, right)
    yield Seen(name, mode, "one image of the batch", effect, own, is_refused(model, path, mode, inputs, shifted))


@functools.cache
def made(name: str) -> Any:
    """Make the model of a kind."""
    keras.utils.set_random_seed(0)
    return KINDS[name].make()


def main() -> None:
    """Print a table: faults whose effect is above three times the file's own error, and how many of them are seen."""
    for name, kind in KINDS.items():
        for mode in kind.modes:
            right, *wrong = seen_faults(name, mode)
            large = [fault for fault in wrong if fault.effect > 3 * right.own]
            missed = [fault for fault in large if not fault.refused]
            print(f"{name:18} {mode:8} {right.own:.1e} {len(large) - len(missed):4} of {len(large):4}", flush=True)
            for fault in missed:
                print(f"    {fault.fault}: effect {fault.effect:.1e}, {fault.effect / right.own:.1f} times the error")


if __name__ == "__main__":
    main()
