"""The zoo's recipes have the published values; recipes can be changed; invalid ones are refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from keras_vit import ViTConfig
from keras_vit.train._recipe import Recipe, recipe, recipes
from refusals import unrefused

SMALL = {"name": "mine", "steps": 10, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.1}
TABLE = 'source = "here"\nsteps = 10\nbatch_size = 8\noptimizer = "sgd"\nlearning_rate = 0.1\n'

# Values copied by hand from the official configs and the papers' tables: vit_jax/configs/common.py and augreg.py,
# big_vision/configs/vit_i21k.py, vit_i1k.py and vit_s16_i1k.py; arXiv 2010.11929, tables 3 and 4 and appendix B.1.2.
OFFICIAL = {
    "finetune": {"steps": 20_000, "batch_size": 512, "optimizer": "sgd", "momentum": 0.9}
    | {"momentum_dtype": "bfloat16", "learning_rate": 0.03, "clip_norm": 1.0, "schedule": "cosine", "weight_decay": 0.0}
    | {"warmup_steps": 500, "image_size": 384, "reset_head": True, "start": "pretrained"},
    "finetune-augreg": {"steps": 500, "warmup_steps": 100, "image_size": 384, "crop": "random", "crop_resize": 448},
    "pretrain-i21k": {"epochs": 90, "batch_size": 4096, "learning_rate": 1e-3, "schedule": "linear"}
    | {"weight_decay": 0.03, "warmup_steps": 10_000, "beta1": 0.9, "beta2": 0.999, "clip_norm": None},
    "pretrain-i1k": {"epochs": 300, "batch_size": 4096, "learning_rate": 3e-3, "schedule": "cosine"}
    | {"weight_decay": 0.3, "warmup_steps": 10_000, "clip_norm": 1.0, "start": "scratch"},
    "big-vision-i21k": {"objective": "sigmoid", "epochs": 300, "batch_size": 4096, "weight_decay": 1e-4}
    | {"weight_decay_independent": True, "momentum_dtype": "bfloat16", "learning_rate": 1e-3, "clip_norm": 1.0},
    "big-vision-i1k": {"objective": "softmax", "epochs": 300, "batch_size": 4096, "weight_decay": 1e-4}
    | {"weight_decay_independent": True, "momentum_dtype": "bfloat16", "warmup_steps": 10_000},
    "big-vision-s16-i1k": {"epochs": 90, "batch_size": 1024, "randaugment_layers": 2, "randaugment_magnitude": 10}
    | {"mixup": 0.2, "weight_decay": 1e-4, "weight_decay_independent": True, "learning_rate": 1e-3},
    "masked-patch": {"objective": "masked_patch", "steps": 1_000_000, "batch_size": 4096, "learning_rate": 2e-4}
    | {"warmup_steps": 10_000, "schedule": "cosine"},
}
# (RandAugment's layers and magnitude, mixup); MIXUP_DEF and RANDAUG_DEF in the official configs
NONE, LIGHT1, LIGHT2, MEDIUM2 = (0, 0, 0.0), (2, 0, 0.0), (2, 10, 0.2), (2, 15, 0.5)
LEVELS = {
    "augreg": MEDIUM2,
    "augreg-light1": LIGHT1,
    "augreg-light2": LIGHT2,
    "big-vision-i1k": MEDIUM2,
    "big-vision-i1k-light1": LIGHT1,
    "big-vision-i1k-light2": LIGHT2,
    "big-vision-i21k": LIGHT2,
    "big-vision-i21k-none": NONE,
    "big-vision-i21k-light1": LIGHT1,
    "big-vision-i21k-medium2": MEDIUM2,
}


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str, name: str = "mine.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_every_recipe_can_be_read_stored_and_used_and_leaves_steps_after_its_warm_up():
    config = ViTConfig.from_name("S/16")
    for name in recipes():
        read = recipe(name)
        assert read.name == name and len(read.source) > 20
        assert Recipe.from_dict(json.loads(json.dumps(read.to_dict()))) == read, name
        assert config.replace(**read.config_changes(config)), name
        for steps in (1, 10, 500, 10_000):
            assert recipe(name, steps=steps).resolved_warmup(steps) <= steps // 5, (name, steps)


def test_official_numbers():
    found = {name: {field: getattr(recipe(name), field) for field in fields} for name, fields in OFFICIAL.items()}
    assert found == OFFICIAL


def test_the_levels_of_augreg_are_files_that_differ_in_nothing_else():
    for name, expected in LEVELS.items():
        read = recipe(name)
        assert (read.randaugment_layers, read.randaugment_magnitude, read.mixup) == expected, name
        base = recipe(name.rpartition("-")[0] if name.endswith(("none", "1", "2")) else name)
        same = {"randaugment_layers": 0, "randaugment_magnitude": 0, "mixup": 0, "name": "", "source": "", "notes": ()}
        assert read.replace(**same) == base.replace(**same), name


def test_changes_replace_what_excludes_them_join_the_config_and_are_known_as_the_users():
    read = recipe("finetune", steps=500)
    again = read.replace(batch_size=64)
    assert again.is_stated("steps") and again.is_stated("batch_size") and not again.is_stated("image_size")
    assert not read.is_stated("batch_size")
    assert Recipe(**SMALL).replace(seed=1).is_stated("steps")  # made by hand: all of it is
    assert recipe("pretrain-i1k", steps=5).epochs is None
    assert recipe("finetune", epochs=1).replace(steps=9).replace(epochs=2.5).steps is None
    assert recipe("finetune", warmup_fraction=0.1).warmup_steps is None
    joined = recipe("big-vision-i21k", config={"dropout_rate": 0.1}).replace(config={"layer_scale": 1e-4}).config
    assert joined["classifier"] == "gap" and joined["dropout_rate"] == 0.1 and joined["layer_scale"] == 1e-4
    made = Recipe(**SMALL, config={"dropout_rate": 0.1}).replace(config={"layer_scale": "none"})
    assert made.config == {"dropout_rate": 0.1, "layer_scale": None}


def test_numbers_and_arrays_of_numpy_and_whole_numbers_are_taken():
    numbers = Recipe(**{**SMALL, "steps": np.int64(4), "learning_rate": np.float32(0.5), "xla": np.bool_(False)})
    assert (type(numbers.steps), type(numbers.learning_rate), numbers.xla) == (int, float, False)
    changed = numbers.replace(image_size=np.array([32, 48]), config={"dropout_rate": np.float64(0.5)})
    assert changed.image_size == (32, 48)
    json.dumps(changed.to_dict())
    assert isinstance(recipe("finetune", learning_rate=1, clip_norm=2).clip_norm, float)


def test_steps_are_counted_from_epochs():
    cases = [({"steps": 7}, 1000, 7), ({"epochs": 60}, 1437, 1347), ({"epochs": 0.001}, 100, 1), ({"epochs": 1}, 63, 1)]
    for changes, count, steps in cases:
        assert recipe("digits", **changes).resolved_steps(count) == steps


# Recipe, changes, all updates, updates of the warm-up
WARMUPS = [
    ("finetune", {}, 20_000, 500),
    ("finetune", {"warmup_fraction": 0.1}, 200, 20),
    ("finetune", {"warmup_fraction": 0.9}, 1, 0),
    ("finetune", {"steps": 500}, 500, 12),  # the share of the recipe, 500 of 20,000
    ("finetune", {"steps": 40_000}, 40_000, 500),
    ("finetune", {"epochs": 3}, 800, 20),
    ("finetune", {"steps": 500, "warmup_steps": 100}, 500, 100),
    ("finetune", {"steps": 500, "warmup_steps": "none"}, 500, 0),
    ("linear-probe", {"steps": 50}, 50, 10),
    ("masked-patch", {"steps": 100_000}, 100_000, 1_000),
    ("pretrain-i1k", {"epochs": 3}, 938, 100),  # 10,000 for 300 epochs
    ("pretrain-i1k", {"steps": 12_000}, 12_000, 2_400),  # the share is not known: at most a fifth
    ("pretrain-i1k", {"steps": 90_000}, 90_000, 10_000),
]


def test_the_warm_up_in_steps_is_shorter_in_a_shorter_run(written):
    found = [
        (name, changes, total, recipe(name, **changes).resolved_warmup(total)) for name, changes, total, _ in WARMUPS
    ]
    assert found == WARMUPS
    assert recipe(written('extends = "finetune"\nsource = "mine"\nsteps = 400\n')).resolved_warmup(400) == 10
    with pytest.warns(UserWarning, match="10000 leaves no step of 500; 100, a fifth, are used"):
        assert recipe("pretrain-i1k").resolved_warmup(500) == 100
    with pytest.raises(ValueError, match="warmup_steps must be below steps=500"):
        recipe("finetune", steps=500, warmup_steps=500)


# Fields that are not valid -> the start of the sentence about them
WRONG = [
    ({"steps": 0}, "steps must be"),
    ({"steps": 2.5}, "steps must be"),
    ({"steps": None}, "either steps or epochs"),
    ({"epochs": 3.0}, "either steps or epochs"),
    ({"batch_size": True}, "batch_size must be"),
    ({"accumulation": 3}, "accumulation must divide batch_size=8"),
    ({"accumulation": "fast"}, "accumulation must be"),
    ({"eval_steps": "often"}, "eval_steps must be"),
    ({"learning_rate": 0.0}, "learning_rate must be"),
    ({"learning_rate": float("nan")}, "learning_rate must be"),
    ({"learning_rate": "0.1"}, "learning_rate must be"),
    ({"momentum": 1}, "momentum must be"),
    ({"layer_decay": 0.0}, "layer_decay must be"),
    ({"ema_decay": 1.0}, "ema_decay must be"),
    ({"weight_decay": float("inf")}, "weight_decay must be"),
    ({"xla": 1}, "xla must be"),
    ({"optimizer": "adam"}, "optimizer must be"),
    ({"freeze": "block_0/*"}, "freeze must be a list"),
    ({"image_size": (3, 4, 5)}, "image_size must be"),
    ({"crop_resize": 10}, "crop_resize is for crop='random'"),
    ({"crop": "random", "crop_resize": 10, "image_size": 12}, "crop_resize must be at least image_size=12"),
    ({"schedule": "linear", "learning_rate": 1e-6}, "linear_end must be"),
    ({"warmup_steps": 1, "warmup_fraction": 0.1}, "warmup_steps or warmup_fraction"),
    ({"optimizer": "least_squares"}, "linear_probe=true"),
    ({"config": {"droput_rate": 0.1}}, "dropout_rate"),
    ({"config": {"num_classes": 3}}, "config must not have num_classes"),
]


def test_a_value_that_does_not_fit_is_refused_by_its_name_and_all_are_named_at_once():
    assert not unrefused(lambda **changes: Recipe(**{**SMALL, **changes}), WRONG)
    with pytest.raises(ValueError, match="'mine': steps .*; batch_size .*; precision .*"):
        Recipe(**{**SMALL, "steps": 0, "batch_size": -1, "precision": "float16"})


def test_a_name_that_is_none_is_answered_with_the_nearest():
    cases = [
        ({"name": "finetun"}, "the nearest is 'finetune'"),
        ({"name": "zzz"}, "known are"),
        ({"name": "finetune", "learning_rte": 1}, "the nearest is 'learning_rate'"),
        ({"name": "nowhere/finetune.toml"}, "no recipe file nowhere"),
    ]
    assert not unrefused(lambda name, **changes: recipe(name, **changes), cases)


def test_a_file_of_ones_own_may_extend_a_recipe_of_the_zoo(written):
    path = written(TABLE + 'clip_norm = "none"\nfreeze = ["embedding/*"]\nimage_size = [32, 48]\n')
    for given in (path, str(path)):
        read = recipe(given, steps=3)
        assert (read.name, read.steps, read.clip_norm) == ("mine", 3, None)
        assert (read.freeze, read.image_size) == (("embedding/*",), (32, 48))
    read = recipe(written('extends = "augreg-light1"\nsource = "mine"\nsteps = 5\n'))
    assert (read.steps, read.epochs, read.batch_size, read.config["dropout_rate"]) == (5, None, 4096, 0.0)
    assert (read.mixup, read.notes) == (0.0, ())  # notes are about one file
    assert recipe(written('extends = "finetune"\nsteps = 5\n')).source.startswith("changes to finetune: ")


def test_a_file_that_does_not_fit_is_refused_by_name(written):
    cases = [
        ({"text": TABLE.replace("batch_size", "batch_sise")}, "mine.toml has no key 'batch_sise'"),
        ({"text": TABLE.replace("batch_size = 8\n", "")}, "it lacks the keys ['batch_size']"),
        ({"text": TABLE.replace('source = "here"\n', "")}, "lacks the keys ['source']"),
        ({"text": TABLE + 'name = "other"'}, "no key 'name'"),
        ({"text": TABLE + 'flip = "no"'}, "flip must be"),
        ({"text": TABLE + "[config]\nmlp_dims = 3"}, "ViTConfig has no field"),
        ({"text": 'extends = "finetun"\nsource = "mine"'}, "'finetun'"),
        ({"text": "steps = "}, "not valid TOML"),
    ]
    assert not unrefused(lambda text: recipe(written(text)), cases)


def test_a_field_of_the_model_or_of_another_program_is_answered_with_what_a_recipe_has() -> None:
    with pytest.raises(ValueError, match=re.escape("""--set 'config={"preprocessing": {"bits": 12}}'""")):
        recipe("finetune", preprocessing={"bits": 12})
    with pytest.raises(ValueError, match="it is the number of classes of the data"):
        recipe("finetune", num_classes=3)
    for name in ("early_stopping", "patience"):
        with pytest.raises(ValueError, match=r"best\.keras"):
            recipe("finetune", **{name: 5})
