"""The zoo's recipes have the published values; recipes can be changed; invalid ones are refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keras_vit import ViTConfig
from keras_vit._util import files
from keras_vit.train._recipe import Recipe, recipe, recipes

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


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_reads_and_says_where_its_numbers_stand(name):
    read = recipe(name)
    assert read.name == name and len(read.source) > 20
    assert Recipe.from_dict(json.loads(json.dumps(read.to_dict()))) == read
    assert Recipe(**read.to_dict()) == read


@pytest.mark.parametrize("name", recipes())
def test_every_recipes_config_fits_a_model(name):
    config = ViTConfig.from_name("S/16")
    assert config.replace(**recipe(name).config_changes(config))


@pytest.mark.parametrize(("name", "fields"), OFFICIAL.items())
def test_official_numbers(name, fields):
    assert {field: getattr(recipe(name), field) for field in fields} == fields


@pytest.mark.parametrize(("name", "expected"), LEVELS.items())
def test_the_levels_of_augreg_are_files(name, expected):
    read = recipe(name)
    assert (read.randaugment_layers, read.randaugment_magnitude, read.mixup) == expected
    base = recipe(name.rpartition("-")[0] if name.endswith(("none", "1", "2")) else name)
    same = {"randaugment_layers": 0, "randaugment_magnitude": 0, "mixup": 0, "name": "", "source": "", "notes": ()}
    assert read.replace(**same) == base.replace(**same)


def test_a_run_of_a_version_with_variants_is_read():
    stored = {**recipe("augreg").to_dict(), "variant": "medium2"}
    assert Recipe.from_dict(stored) == recipe("augreg")


def test_what_the_user_chose_is_known():
    read = recipe("finetune", steps=500)
    assert read.is_stated("steps") and not read.is_stated("batch_size")
    again = read.replace(batch_size=64)
    assert again.is_stated("steps") and again.is_stated("batch_size") and not again.is_stated("image_size")
    assert Recipe(**SMALL).replace(seed=1).is_stated("steps")  # made by hand: all of it is


def test_steps_take_the_place_of_epochs_and_the_other_way_round():
    assert recipe("pretrain-i1k", steps=5).epochs is None
    assert recipe("finetune", epochs=1).replace(steps=9).replace(epochs=2.5).steps is None
    assert recipe("finetune", warmup_fraction=0.1).warmup_steps is None


def test_config_joins_what_there_is():
    joined = recipe("big-vision-i21k", config={"dropout_rate": 0.1}).replace(config={"layer_scale": 1e-4}).config
    assert joined["classifier"] == "gap" and joined["dropout_rate"] == 0.1 and joined["layer_scale"] == 1e-4


def test_a_recipe_made_by_hand_is_changed_in_the_same_way():
    made = Recipe(**SMALL, config={"dropout_rate": 0.1})
    assert made.replace(epochs=3, config={"layer_scale": "none"}).config == {"dropout_rate": 0.1, "layer_scale": None}
    assert made.steps == 10


def test_numbers_and_arrays_of_numpy_are_taken():
    numbers = Recipe(**{**SMALL, "steps": np.int64(4), "learning_rate": np.float32(0.5), "xla": np.bool_(False)})
    assert (type(numbers.steps), type(numbers.learning_rate), numbers.xla) == (int, float, False)
    changed = numbers.replace(image_size=np.array([32, 48]), config={"dropout_rate": np.float64(0.5)})
    assert changed.image_size == (32, 48)
    json.dumps(changed.to_dict())


def test_whole_numbers_stand_for_floats():
    assert isinstance(recipe("finetune", learning_rate=1, clip_norm=2).clip_norm, float)


@pytest.mark.parametrize(
    ("changes", "count", "steps"),
    [({"steps": 7}, 1000, 7), ({"epochs": 60}, 1437, 1347), ({"epochs": 0.001}, 100, 1), ({"epochs": 1}, 63, 1)],
)
def test_steps_are_counted_from_epochs(changes, count, steps):
    assert recipe("digits", **changes).resolved_steps(count) == steps


@pytest.mark.parametrize(
    ("changes", "total", "warmup"),
    [({}, 20_000, 500), ({"warmup_fraction": 0.1}, 200, 20), ({"warmup_fraction": 0.9}, 1, 0)],
)
def test_the_warm_up_in_steps(changes, total, warmup):
    assert recipe("finetune", **changes).resolved_warmup(total) == warmup
    assert Recipe(**SMALL).resolved_warmup(total) == 0


def test_a_warm_up_of_a_run_on_few_images_is_told_and_cut_to_a_fifth():
    with pytest.warns(UserWarning, match="10000 leaves no step of 500; 100, a fifth, are used"):
        assert recipe("pretrain-i1k").resolved_warmup(500) == 100


@pytest.mark.parametrize(
    ("name", "changes", "total", "warmup"),
    [
        ("finetune", {"steps": 500}, 500, 12),  # the share of the recipe, 500 of 20,000
        ("finetune", {"steps": 2_000}, 2_000, 50),
        ("finetune", {"steps": 40_000}, 40_000, 500),
        ("finetune", {"epochs": 3}, 800, 20),
        ("finetune", {"steps": 500, "warmup_steps": 100}, 500, 100),
        ("finetune", {"steps": 500, "warmup_steps": "none"}, 500, 0),
        ("finetune-augreg", {"steps": 50}, 50, 10),
        ("linear-probe", {"steps": 50}, 50, 10),
        ("masked-patch", {"steps": 100_000}, 100_000, 1_000),
        ("pretrain-i1k", {"epochs": 3}, 938, 100),  # 10,000 for 300 epochs
        ("pretrain-i1k", {"steps": 12_000}, 12_000, 2_400),  # the share is not known: at most a fifth
        ("pretrain-i1k", {"steps": 90_000}, 90_000, 10_000),
        ("augreg", {"steps": 7}, 7, 1),
    ],
)
def test_a_shorter_run_has_a_shorter_warm_up(name, changes, total, warmup):
    assert recipe(name, **changes).resolved_warmup(total) == warmup


def test_a_shorter_recipe_that_extends_another_has_a_shorter_warm_up(written):
    assert recipe(written('extends = "finetune"\nsource = "mine"\nsteps = 400\n')).resolved_warmup(400) == 10


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("steps", [1, 10, 500, 10_000])
def test_no_recipe_warms_up_for_a_whole_run(name, steps):
    assert recipe(name, steps=steps).resolved_warmup(steps) <= steps // 5


@pytest.mark.parametrize("warmup", [500, 501])
def test_a_warm_up_that_is_stated_and_leaves_no_step_is_refused(warmup):
    with pytest.raises(ValueError, match=f"warmup_steps must be below steps=500, .*Received: {warmup}. Set warmup_fr"):
        recipe("finetune", steps=500, warmup_steps=warmup)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "steps must be an integer >= 1. Received: 0"),
        ({"steps": 2.5}, "steps must be an integer >= 1. Received: 2.5"),
        ({"steps": None}, "either steps or epochs. Received: steps=None, epochs=None"),
        ({"epochs": 3.0}, "either steps or epochs"),
        ({"batch_size": True}, "batch_size must be an integer >= 1. Received: True"),
        ({"accumulation": 3}, "accumulation must divide batch_size=8. Received: 3"),
        (
            {"accumulation": "fast"},
            r"accumulation must be one of \['auto'\], or a number in \[1, inf\). Received: 'fast'",
        ),
        ({"accumulation": 0}, r"accumulation must be in \[1, inf\). Received: 0"),
        ({"eval_steps": "often"}, r"eval_steps must be one of \['auto'\], or a number in"),
        ({"learning_rate": 0.0}, r"learning_rate must be in \(0, inf\)"),
        ({"learning_rate": float("nan")}, "learning_rate must be in"),
        ({"learning_rate": "0.1"}, "learning_rate must be an integer or a number. Received: '0.1'"),
        ({"momentum": 1}, r"momentum must be in \[0, 1\)"),
        ({"layer_decay": 0.0}, r"layer_decay must be in \(0, 1\]"),
        ({"ema_decay": 1.0}, r"ema_decay must be in \(0, 1\)"),
        ({"clip_norm": -1.0}, "clip_norm must be in"),
        ({"weight_decay": float("inf")}, "weight_decay must be in"),
        ({"xla": 1}, "xla must be true or false or text. Received: 1"),
        ({"xla": "pieces"}, r"xla must be one of \[True, False, 'auto'\]. Received: 'pieces'"),
        ({"optimizer": "adam"}, r"optimizer must be one of \['sgd', 'adamw', .*\]. Received: 'adam'"),
        ({"crop": "incption"}, "crop must be one of"),
        ({"freeze": "block_0/*"}, "freeze must be a list. Received: 'block_0"),
        ({"freeze": [1]}, r"freeze\[0\] must be text"),
        ({"image_size": 0}, "image_size must be an integer >= 1"),
        ({"image_size": (3, 4, 5)}, "image_size must be an integer >= 1"),
        ({"crop_resize": 10}, "crop_resize is for crop='random'"),
        ({"crop": "random", "crop_resize": 10, "image_size": 12}, "crop_resize must be at least image_size=12"),
        ({"schedule": "linear", "learning_rate": 1e-6}, "linear_end must be at most learning_rate"),
        ({"warmup_steps": 1, "warmup_fraction": 0.1}, "warmup_steps or warmup_fraction, not both"),
        ({"config": {"droput_rate": 0.1}}, "ViTConfig has no field .*dropout_rate"),
        ({"config": {"num_classes": 3}}, "config must not have num_classes"),
        ({"config": ["dropout_rate"]}, "config must be a table"),
    ],
)
def test_a_value_that_does_not_fit_is_named(changes, said):
    with pytest.raises(ValueError, match=f"Recipe 'mine': .*{said}"):
        Recipe(**{**SMALL, **changes})


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match="steps .*; batch_size .*; precision .*"):
        Recipe(**{**SMALL, "steps": 0, "batch_size": -1, "precision": "float16"})


@pytest.mark.parametrize(
    ("name", "changes", "error", "said"),
    [
        ("finetun", {}, ValueError, "no recipe 'finetun'.*the nearest is 'finetune'"),
        ("zzz", {}, ValueError, "no recipe 'zzz'.*known are .*'augreg'"),
        ("finetune", {"learning_rte": 1}, ValueError, "no field 'learning_rte'; the nearest is 'learning_rate'"),
        ("augreg-light", {}, ValueError, "no recipe 'augreg-light'.*the nearest is 'augreg-light"),
        ("augreg", {"variant": "light1"}, ValueError, "no field 'variant'"),
        ("nowhere/finetune.toml", {}, FileNotFoundError, "no recipe file nowhere.*'finetune'"),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(name, changes, error, said):
    with pytest.raises(error, match=said):
        recipe(name, **changes)


def test_a_file_of_ones_own(written):
    path = written(TABLE + 'clip_norm = "none"\nfreeze = ["embedding/*"]\nimage_size = [32, 48]\n')
    for given in (path, str(path)):
        read = recipe(given, steps=3)
        assert (read.name, read.steps, read.clip_norm) == ("mine", 3, None)
        assert (read.freeze, read.image_size) == (("embedding/*",), (32, 48))


def test_the_path_of_a_recipe_of_the_zoo():
    assert recipe(files.data_folder("zoo") / "recipes" / "finetune.toml") == recipe("finetune")


def test_a_file_extends_a_recipe_of_the_zoo(written):
    read = recipe(written('extends = "augreg-light1"\nsource = "mine"\nsteps = 5\n'))
    assert (read.steps, read.epochs, read.batch_size, read.config["dropout_rate"]) == (5, None, 4096, 0.0)
    assert (read.mixup, read.notes) == (0.0, ())  # notes are about one file


def test_a_file_that_extends_a_recipe_may_leave_out_its_source(written):
    read = recipe(written('extends = "finetune"\nsteps = 5\n'))
    assert (read.steps, read.source) == (5, f"changes to finetune: {recipe('finetune').source}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TABLE.replace("batch_size", "batch_sise"), "mine.toml has no key 'batch_sise'; the nearest is 'batch_size'"),
        (TABLE.replace("batch_size = 8\n", ""), r"mine.toml is not a valid recipe: it lacks the keys \['batch_size'\]"),
        (TABLE.replace('source = "here"\n', ""), r"lacks the keys \['source'\]"),
        (TABLE + "accumulation = 3", "accumulation must divide batch_size=8"),
        (TABLE + 'name = "other"', "no key 'name'"),
        (TABLE + 'flip = "no"', "not a valid recipe: Recipe 'mine': flip must be true or false. Received: 'no'"),
        (TABLE + 'steps = "none"', "not valid TOML"),
        (TABLE + "[config]\nmlp_dims = 3", "ViTConfig has no field"),
        ('extends = "finetun"\nsource = "mine"', "extends names no recipe of the zoo: 'finetun'"),
        ("steps = ", "not valid TOML"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(written, text, said):
    with pytest.raises(ValueError, match=said):
        recipe(written(text))


def test_a_recipe_imports_neither_tensorflow_nor_keras():
    code = (
        "import sys; from keras_vit.train._recipe import recipe; recipe('finetune'); "
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
