"""Whole training runs: their results, their files, and errors for invalid settings."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import VisionTransformer, train, zoo
from keras_vit.train import prepare
from keras_vit.train.strategies import strategy
from model_weights import values
from tiny_models import VARIANTS, tiny

# XLA takes longer to compile a step than these runs take.
SHORT: dict[str, Any] = {"steps": 3, "batch_size": 8, "image_size": 16, "xla": False, "warmup_fraction": 0.0}


def short(name: str = "digits", **changes: Any) -> train.Recipe:
    return train.recipe(name, **SHORT | changes)


def run(recipe: train.Recipe, **arguments: Any) -> train.Result:
    return train.run(recipe, **{"model": tiny(num_layers=1), "data": "digits", "progress": False} | arguments)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> train.Result:
    """Return the result of a short run that wrote to a folder."""
    return run(short(checkpoint_steps=2, log_steps=1), out=tmp_path_factory.mktemp("runs") / "run")


def arrays(count: int = 16, classes: int = 5) -> dict[str, Any]:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    labels = np.arange(count) % classes
    return {"train": (images, labels), "evaluation": (images, labels)}


@pytest.mark.full
def test_the_digits_model_fine_tunes_at_another_resolution() -> None:
    # The official fine-tuning: new zero head, SGD. Fifteen steps are enough here (0.97); the demo takes two hundred.
    recipe = train.recipe("finetune-digits", steps=15, log_steps=5)
    result = train.run(recipe, model="digits", data="digits", progress=False)
    assert result.model.config.image_size == (48, 48)
    assert result.metrics["accuracy"] > 0.8  # a zero head begins with 36 of 360, by chance
    assert [line["step"] for line in result.history] == [5, 10, 15, 15]
    assert {"loss", "accuracy", "gradient_norm", "learning_rate", "images_per_second"} < result.history[0].keys()
    before = zoo.load("digits", image_size=48)
    assert not np.array_equal(before.get_layer("embedding").kernel, result.model.get_layer("embedding").kernel)


@pytest.mark.full
def test_a_model_that_is_given_stays_as_it_is() -> None:
    model = VisionTransformer(tiny())
    before = values(model)
    result = run(short(), model=model)
    assert all(np.array_equal(before[path], now) for path, now in values(model).items())
    assert result.model.config.num_classes == 10
    assert model.config.num_classes == 5


def test_what_a_run_leaves_in_its_folder(plain: train.Result) -> None:
    assert isinstance(plain.out, str) and plain.out.endswith("/run")
    folder = Path(plain.out)
    loaded = keras.saving.load_model(folder / "model.keras")
    assert isinstance(loaded, VisionTransformer)
    for path, value in values(plain.model).items():
        np.testing.assert_array_equal(values(loaded)[path], value)
    assert loaded.config.labels == plain.model.config.labels
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert lines == plain.history
    assert [path.name for path in sorted((folder / "checkpoints").glob("step-*"))] == [
        "step-00000002",
        "step-00000003",
    ]
    assert list(folder.glob("tensorboard/*tfevents*"))


@pytest.mark.full
def test_the_same_seed_trains_the_same_weights_and_another_does_not(plain: train.Result) -> None:
    one, seed = values(plain.model), plain.recipe.seed
    again, other = (values(run(short(seed=seed)).model) for seed in (seed, seed + 1))
    assert all(np.array_equal(again[path], value) for path, value in one.items())
    assert not np.array_equal(other["embedding/kernel"], one["embedding/kernel"])


@pytest.mark.full
def test_steps_a_call_change_nothing(plain: train.Result) -> None:
    assert plain.recipe.steps_per_call == 1
    three = values(run(short(steps_per_call=3, log_steps=3)).model)
    assert all(np.array_equal(three[path], value) for path, value in values(plain.model).items())


@pytest.mark.full
def test_averages_are_what_comes_out() -> None:
    # After three steps with decay d the average is d^3 w0 + (1 - d)(d^2 w1 + d w2 + w3); with d near 1 it is w0.
    start = VisionTransformer(tiny(num_classes=10, image_size=16, num_layers=1))
    near, far = (run(short(ema_decay=decay), model=start).model for decay in (0.999999, 1e-6))
    kernel = np.array(start.get_layer("embedding").kernel)
    plain = run(short(), model=start).model.get_layer("embedding").kernel
    np.testing.assert_allclose(near.get_layer("embedding").kernel, kernel, atol=1e-6)
    np.testing.assert_allclose(far.get_layer("embedding").kernel, plain, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({"linear_probe": True}, lambda path: path.startswith("head/")),
        ({"freeze": ("block_*", "embedding/*")}, lambda path: not path.startswith(("block_", "embedding/"))),
    ],
    ids=["linear probe", "freeze"],
)
def test_only_what_is_meant_to_moves(changes: dict[str, Any], moves: Any) -> None:
    start = VisionTransformer(tiny(num_classes=10, image_size=16, num_layers=1))
    data = {"train": arrays(classes=10)["train"]}
    before, after = values(start), values(run(short(learning_rate=0.1, **changes), model=start, data=data).model)
    moved = {path for path in before if not np.array_equal(before[path], after[path])}
    assert moved == {path for path in before if moves(path)}


def test_a_pattern_that_freezes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"freeze matches no variable with \['blocks/\*'\]"):
        run(short(freeze=("blocks/*",)))


@pytest.mark.full
def test_masked_patches_then_labels(tmp_path: Path) -> None:
    run(short("masked-patch", accumulation=1, batch_size=8, warmup_fraction=0.5), out=tmp_path)
    result = run(short("finetune-digits"), model=tmp_path / "model.keras")
    assert result.model.config.num_classes == 10


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"accumulation": 2, "ema_decay": 0.9, "config": {"dropout_rate": 0.1, "stochastic_depth": 0.1}},
            marks=pytest.mark.full,
        ),
        # Blocks that are computed again compile in test_randomness.py and test_masked_patch.py too.
        pytest.param(
            {
                "accumulation": 2,
                "ema_decay": 0.9,
                "remat": True,
                "config": {"dropout_rate": 0.1, "stochastic_depth": 0.1},
            },
            marks=pytest.mark.full,
        ),
        {
            **{"precision": "mixed_bfloat16", "config": {"attention_dropout_rate": 0.1}, "mixup": 0.2},
            **{"optimizer": "sgd", "momentum_dtype": "bfloat16", "objective": "sigmoid", "label_smoothing": 0.1},
        },
    ],
    ids=lambda changes: ",".join(changes),
)
def test_the_whole_step_compiles_under_xla(changes: dict[str, Any]) -> None:
    # A requirement of TPUs that can be tested without one: XLA has a kernel for every operation.
    # Of two blocks the second has stochastic depth.
    result = run(
        short(xla=True, **changes), data=arrays(), model=tiny(num_layers=2 if "accumulation" in changes else 1)
    )
    assert np.isfinite(result.history[0]["loss"])


@pytest.mark.full
def test_compiled_in_pieces_a_run_is_the_plain_one_and_repeats_bit_for_bit() -> None:
    changes = {"accumulation": 2, "config": {"dropout_rate": 0.1, "stochastic_depth": 0.1}, "log_steps": 1}
    plain, *twice = (run(short(xla=xla, **changes), data=arrays(), model=tiny()) for xla in (False, "auto", "auto"))
    # Masks are drawn outside of the compiled part, so their numbers are the same; XLA's own would differ.
    losses = [[line["loss"] for line in result.history if "loss" in line] for result in (plain, twice[0])]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)  # other masks give 1e-2
    first, second = (values(result.model) for result in twice)
    assert all(np.array_equal(first[path], second[path]) for path in first)


@pytest.mark.full
def test_a_hybrid_trains() -> None:
    assert np.isfinite(
        run(short(image_size=32), model=tiny(**VARIANTS["hybrid"], num_layers=1), data=arrays()).metrics["loss"]
    )


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    recipe = short(optimizer="sgd", learning_rate=1e30, clip_norm=None, steps=20, checkpoint_steps=1, log_steps=1)
    with pytest.raises(train.DivergedError, match=r"diverged before step \d+.*(is kept|there is no checkpoint)"):
        run(recipe, out=tmp_path, data={"train": arrays()["train"]})
    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        reader = tf.train.load_checkpoint(str(checkpoint / "variables"))
        for name in reader.get_variable_to_shape_map():
            if "weights" in name:
                assert np.isfinite(reader.get_tensor(name)).all(), (checkpoint, name)
    assert not (tmp_path / "model.keras").exists()


def test_a_batch_that_the_replicas_cannot_share_is_refused() -> None:
    three: Any = types.SimpleNamespace(num_replicas_in_sync=3)
    with pytest.raises(ValueError, match="batch_size must be a multiple of replicas x accumulation = 3 x 1"):
        run(short(), strategy=three)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("workers", None, "needs the environment variable TF_CONFIG"),
        ("workers", "{", "TF_CONFIG must be JSON such as"),
        ("workers", "[]", "TF_CONFIG must be JSON such as"),
        ("workers", "{}", "must name a cluster and this machine's task"),
        (
            "workers",
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
            "must be below 1, the number of machines of type 'worker'. Received: 1",
        ),
        ("tpu", None, "There is no TPU at 'local'"),
        ("tpus", None, r"strategy must be one of .* Received: 'tpus'"),
        ("one:x", None, "strategy must be one of"),
    ],
)
def test_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, name: str, config: str | None, message: str
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("TPU_NAME", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match=message):
        strategy(name)


def test_without_anything_special_one_device_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("TPU_NAME", raising=False)
    assert strategy("auto").num_replicas_in_sync == 1


def test_the_data_must_be_named() -> None:
    with pytest.raises(ValueError, match="data must say what to train on: a folder of images"):
        run(short(), data=None)


def test_weights_are_for_a_name() -> None:
    with pytest.raises(ValueError, match="weights are for a model's name"):
        run(short(), weights="sam")


def test_a_recipe_decides_which_weights_a_name_starts_with() -> None:
    assert prepare.choose_model(train.recipe("augreg"), "B/16").source is None
    assert prepare.choose_model(train.recipe("finetune"), "B/16").source is not None


def test_a_missing_model_is_reported_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file or folder .*nothing"):
        run(short(), model=f"{tmp_path}/nothing")


def test_a_keras_file_that_holds_another_model_is_refused(tmp_path: Path) -> None:
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save(tmp_path / "other.keras")
    with pytest.raises(ValueError, match="does not contain a VisionTransformer"):
        run(short(), model=tmp_path / "other.keras")
