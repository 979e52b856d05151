"""Training a part of the weights: groups, patterns and LoRA, whose updates are in the kernels of every result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import dense, digits, train, zoo
from keras_vit.train import prepare
from keras_vit.train._recipe import Recipe
from keras_vit.train.checkpoints import read_run
from keras_vit.train.objective import supervised
from keras_vit.train.step import TrainState
from marks import full_except
from model_weights import assert_same_bits, values
from refusals import unrefused
from tiny_models import built, tiny

FIELDS: dict[str, Any] = {"steps": 2, "batch_size": 8, "image_size": 16, "xla": False, "eval_steps": None}
MLP = tuple(f"block_1/mlp/{name}" for name in ("dense1/kernel", "dense1/bias", "dense2/kernel", "dense2/bias"))
# What is trained -> the ends of the paths that change beside the head.
CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"train_only": ["norms"]}, ("gamma", "beta")),
    ({"train_only": ["norms", "biases"], "freeze": ["embedding/*", "*/attention/key/*"]}, ("gamma", "beta", "bias")),
    ({"train_only": ["block_1/mlp/*"]}, MLP),
    ({"lora_rank": 2}, ("query/kernel", "value/kernel")),
    ({"lora_rank": 2, "lora_targets": ["dense2"], "train_only": ["lora", "norms"]}, ("dense2/kernel", "gamma", "beta")),
]


def arrays() -> dict[str, Any]:
    data = digits.load()
    held_out = data.test_images[:20], data.test_labels[:20]
    return {"train": (data.train_images[:24], data.train_labels[:24]), "evaluation": held_out}


def changed(before: Any, after: Any) -> set[str]:
    """Return the paths of the weights that differ, without the head's."""
    first, second = ({w.path: w.numpy() for w in model.weights} for model in (before, after))
    shared = [path for path in first if "head" not in path]
    return {path for path in shared if not np.array_equal(first[path], second[path])}


def state_of(model: Any = None, **changes: Any) -> TrainState:
    recipe = train.recipe("digits", **FIELDS | changes)
    adapted = prepare.adapt_model(recipe, model or built(image_size=16, num_classes=10), num_classes=10)
    return TrainState(recipe, adapted, supervised(recipe, adapted), total_steps=2)


@pytest.mark.filterwarnings("ignore:arrays. classes of which the 24 training images have none")
@pytest.mark.parametrize("numbers", full_except(["4"], ["4", "0123"]))
def test_only_what_is_named_changes_and_has_moments(numbers: str, tmp_path: Path) -> None:
    model = built(image_size=16, num_classes=10)
    for number, (fields, ends) in [(number, CASES[number]) for number in map(int, numbers)]:
        recipe = train.recipe("digits", **FIELDS, **fields, calibrate=False)  # a checkpoint has no temperature
        result = train.run(recipe, model=model, data=arrays(), out=tmp_path / str(number), progress=False)
        found = changed(model, result.model)
        assert all(path.endswith(ends) and not path.startswith("embedding") for path in found), (fields, found)
        assert all(any(path.endswith(end) for path in found) for end in ends), (fields, found)
        # What was written is what was evaluated.
        assert_same_bits(values(zoo.load(tmp_path / str(number))), values(result.model))
        assert train.evaluate(result.model, arrays()).top1 == pytest.approx(result.metrics["accuracy"])
        # Another run may continue from the checkpoint of a run that did not end.
        (tmp_path / str(number) / "model.keras").unlink()
        for found_weight, weight in zip(
            read_run(tmp_path / str(number), None).model.weights, result.model.weights, strict=True
        ):
            np.testing.assert_allclose(found_weight, weight, rtol=1e-6, atol=1e-7)
        # What changes has moments, and nothing else; of LoRA its two matrices in place of the kernel.
        slots = {name.partition("/")[2] for name in state_of(model, **fields).optimizer.slots}
        kernels = {path for path in found if "lora_rank" in fields and path.endswith("kernel")}
        updates = {f"{path.removesuffix('kernel')}lora_kernel_{name}" for path in kernels for name in "ab"}
        assert slots == found - kernels | updates | {"head/kernel", "head/bias"}


def test_moving_averages_of_lora_are_in_the_kernels_too() -> None:
    state, random = state_of(lora_rank=2, ema_decay=0.5), np.random.default_rng(0)
    for path, average in state.averages.items():
        average.assign(random.normal(size=average.shape))
        assert "lora" in path or path.startswith("head/")
    target = built(image_size=16, num_classes=10)
    kernel = target.get_layer("block_0").attention.query.kernel.numpy()
    update = [state.averages[f"block_0/attention/query/lora_kernel_{name}"].numpy() for name in "ab"]
    state.copy_to(target)
    # Keras' alpha is the rank.
    found = target.get_layer("block_0").attention.query.kernel.numpy()
    np.testing.assert_allclose(found, kernel + update[0] @ update[1], rtol=1e-5, atol=1e-6)


def test_updates_of_lora_that_nothing_trains_are_refused() -> None:
    with pytest.raises(ValueError, match="lora_rank=8 adds updates that nothing trains: add 'lora' to train_only"):
        state_of(lora_rank=8, train_only=["norms"])


@pytest.mark.full
def test_masks_and_teachers_take_a_part_of_the_weights() -> None:
    images, random = digits.load().train_images[:8], np.random.default_rng(0)
    maps = {"train": (images.repeat(2, 1).repeat(2, 2), random.integers(0, 3, (8, 16, 16)))}
    backbone = built(image_size=16, num_classes=0)
    segmenter = dense.segmenter(backbone, 3)
    fields = {"batch_size": 4, "linear_probe": False, "train_only": ["lora", "norms", "map_logits/*"], "lora_rank": 2}
    recipe = train.recipe("segment-folder", **FIELDS | fields)
    result = train.run(recipe, model=segmenter, data=maps, progress=False)
    found = changed(backbone, result.model.backbone)
    assert found and all(path.endswith(("gamma", "beta", "query/kernel", "value/kernel")) for path in found)
    for name in ("distill", "distill-features"):
        recipe = train.recipe(name, **FIELDS, train_only=["biases"])
        result = train.run(recipe, model=backbone, teacher="digits", data=arrays(), progress=False)
        assert changed(backbone, result.model) and all(
            path.endswith("bias") for path in changed(backbone, result.model)
        )


def test_a_plan_counts_what_is_trained() -> None:
    config = tiny(image_size=16, num_classes=10)
    for fields in ({}, {"train_only": ("norms", "biases")}, {"train_only": ("block_1/*",)}):
        planned = train.plan(config, batch_size=8, **fields)
        state = state_of(**fields, start="scratch")
        assert planned.optimizer == sum(4 * int(np.prod(slot.shape)) for slot in state.optimizer.slots.values())
    whole, part = (train.plan(config, batch_size=8, train_only=words) for words in ((), ("norms",)))
    assert part.step_flops * 3 == whole.step_flops * 2 and part.activations < whole.activations
    with pytest.raises(ValueError, match=r"matches no variable with \['norm'\]"):
        train.plan(config, batch_size=8, train_only=("norm",))


def test_wrong_parts_are_named() -> None:
    def make(**changes: Any) -> Recipe:
        return state_of(**changes).recipe

    cases = [
        ({"train_only": ["norm"]}, "train_only matches no variable with ['norm']"),
        ({"train_only": ["lora"]}, "needs a lora_rank"),
        ({"lora_rank": 2, "lora_targets": ["q"]}, "['dense1', 'dense2', 'key', 'out', 'query', 'value']"),
        ({"lora_rank": 2, "linear_probe": True}, "linear_probe trains the head only"),
        ({"head_start": "probe", "objective": "masked_patch"}, "for a head that is trained in steps"),
    ]
    assert not unrefused(make, cases)
