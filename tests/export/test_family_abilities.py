"""Every kind of model is written as a LiteRT file in every mode, served and trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import VisionTransformer, digits, export, train
from keras_vit.export import modes, samples
from keras_vit.export.verification import difference_cosine
from outlier_models import images, standardise
from reference_cases import distance
from tiny_models import FAMILIES, OTHERS, VARIANTS, built, prepared, tiny

KINDS: dict[str, dict[str, Any]] = {
    **FAMILIES,
    **OTHERS,
    "gated": {"gated_mlp": True, "activation": "silu", "layer_scale": 1.0},
    "map": VARIANTS["map"],
}
QUICK = ("rotary beside learned positions, gated, normed",)
# With random weights the outputs of two images are closer than a trained model's, and more is lost between them.
WIDE: dict[str, Any] = {"hidden_size": 96, "mlp_dim": 192, "num_heads": 3, "image_size": 64, "num_classes": 50}
# Few images and no shift: twenty steps are ten epochs. XLA takes longer to compile a step than to run it.
RECIPE: dict[str, Any] = {
    **{"steps": 20, "batch_size": 32, "image_size": 16, "learning_rate": 0.005, "warmup_fraction": 0.0},
    **{"shift": 0.0, "xla": False, "log_steps": 1},
}
MODES = [mode for mode in modes.mode_names() if mode not in ("none", "dynamic")]


def turn(kind: str) -> tuple[int, int]:
    """Return the numbers of two modes for a kind of model, so that the kinds together have all modes."""
    number = list(KINDS).index(kind)
    return number, number + 2


def wide(kind: str, dtype: str = "float32") -> tuple[VisionTransformer, np.ndarray]:
    """Return a model, and images for it."""
    changes = WIDE | KINDS[kind] | ({"tokens_mlp_dim": 128} if "mixer" in kind else {})
    model = standardise(VisionTransformer(tiny(**changes), dtype=dtype), np.random.default_rng(0))
    patterns = samples.images(model.config, 24)
    return model, np.concatenate([patterns[8:14], images(model.config, 6)])


@pytest.mark.parametrize("kind", KINDS)
def test_litert_files_compute_the_model(kind: str, tmp_path: Path) -> None:
    model, shown = wide(kind, "float64")
    want = np.asarray(model(shown))
    for mode, least in (("none", 1 - 1e-9), ("dynamic", 0.999)):
        export.tflite(model, path := tmp_path / f"{mode}.tflite", quantize=mode, verify=shown[:2])
        received = export.runner(path)(shown)
        assert difference_cosine(want, received) >= least
        assert mode != "none" or distance(received, want) <= 1e-5  # measured: up to 9e-7


@pytest.mark.full
@pytest.mark.parametrize(("mode", "kind"), [(MODES[i % len(MODES)], kind) for kind in KINDS for i in turn(kind)])
def test_every_mode_holds_its_own_thresholds(mode: str, kind: str, tmp_path: Path) -> None:
    model, shown = wide(kind)
    given = {"calibration": shown} if modes.load_mode(mode).needs_calibration else {}
    report = export.tflite(model, tmp_path / "out.tflite", quantize=mode, verify=shown, least_agreement=0, **given)
    assert report.mean_cosine >= modes.load_mode(mode).least_cosine


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mixer"])  # test_saved_model has the graphs of all
def test_a_server_computes_the_model(kind: str, tmp_path: Path) -> None:
    assert export.saved_model(wide(kind)[0], tmp_path / "vit" / "1").cosine > 1 - 1e-6


@pytest.mark.full
@pytest.mark.parametrize("kind", [*KINDS][1::4])
def test_twenty_steps_of_a_recipe_lower_the_loss(kind: str) -> None:
    size = {"image_size": 16, "patch_size": 4, "num_layers": 1}
    if kind == "BiT":
        size = {"image_size": 16, "hidden_size": 128, "resnet": KINDS[kind]["resnet"] | {"num_layers": (1,)}}
    if kind == "several blocks":
        size["num_layers"] = 2
    recipe = train.recipe("digits", **RECIPE)
    data = digits.load()
    result = train.run(
        recipe,
        model=VisionTransformer(tiny(**KINDS[kind] | size)),
        data={"train": (data.train_images[:64], data.train_labels[:64])},
        progress=False,
    )
    losses = [line["loss"] for line in result.history]
    assert losses[0] == pytest.approx(np.log(10), abs=0.01)  # of a head of zeros
    assert np.mean(losses[-5:]) < 2.2  # measured: 1.46 to 2.13


@pytest.mark.parametrize(("kind", "mlp", "layer"), [("gated", "mlp", "gate"), ("mixer", "token_mlp", "dense1")])
def test_lora_updates_reach_new_models_and_files(kind: str, mlp: str, layer: str, tmp_path: Path) -> None:
    model = built(**KINDS[kind], num_layers=1)
    images = prepared(model.config)
    before = np.asarray(model(images))
    target = getattr(getattr(model.get_layer("block_0"), mlp), layer)
    target.enable_lora(rank=2)
    target.lora_kernel_b.assign(np.random.default_rng(0).normal(size=target.lora_kernel_b.shape))
    want = np.asarray(model(images))
    assert distance(want, before) > 0.01
    assert distance(np.asarray(model.with_config(model.config)(images)), want) < 1e-5
    export.tflite(model, tmp_path / "out.tflite", quantize="none")
    assert distance(export.runner(tmp_path / "out.tflite")(images), want) < 1e-5
