"""What docs/ and the examples for TPUs say is so: their code runs, their commands exist, their tables are true."""

from __future__ import annotations

import configparser
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import typer

import doc_blocks
import recipe_table
from keras_vit import cli, train
from keras_vit.train.session import Session
from tiny_models import built

ROOT = doc_blocks.ROOT
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
TPU = ROOT / "examples" / "tpu"
WITH_COMMANDS = [*doc_blocks.PAGES, ROOT / "README.md", TPU / "README.md"]


@pytest.mark.parametrize("page", doc_blocks.PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    doc_blocks.run(doc_blocks.script(page.read_text(encoding="utf-8")), tmp_path, name=page.stem, timeout=300)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_commands(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where zoo/recipes/finetune.toml is
    known: Any = typer.main.get_command(cli.app)
    found = doc_blocks.commands(page.read_text(encoding="utf-8"))
    assert found
    for name, *rest in found:
        context = known.commands[name].make_context(name, rest)  # reads the arguments, and does nothing
        if name == "train":
            train.recipe(context.params["recipe"], **cli._facts(context.params["changes"] or [], "--set"))


def test_the_settings_of_the_page_are_fields_of_recipes() -> None:
    settings = re.findall(r"--set '?([a-z]\w*)=", TRAINING) + re.findall(r"^\| `(\w+)=\S+` \|", TRAINING, re.MULTILINE)
    assert len(settings) > 10
    assert set(settings) <= train.recipe("finetune").to_dict().keys()


def test_the_table_of_recipes_is_the_recipes() -> None:
    table = TRAINING.split(recipe_table.START)[1].split(recipe_table.END)[0]
    assert table == recipe_table.rendered(), "run python tests/recipe_table.py"


def test_the_plan_on_the_page_is_what_plan_says() -> None:
    planned = train.plan(
        "ViT-L/16", image_size=384, batch_size=512, devices=8, accumulation=8, precision="mixed_bfloat16", remat=True
    )
    assert f"--remat\n{planned}\n```" in TRAINING


def test_links_lead_somewhere() -> None:
    for page in (*doc_blocks.PAGES, TPU / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page, target)


def requirements(text: str) -> set[str]:
    """Names out of a list of requirements."""
    return {re.split(r"[ <>=\[]", line.strip())[0] for line in text.splitlines() if line.strip()}


def test_the_tpu_environment_has_all_that_the_package_needs_but_tensorflow() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    needed = requirements(setup["options"]["install_requires"] + setup["options.extras_require"]["train"])
    readme = (TPU / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"pip install -c constraints.txt .* tensorflow-tpu +(.*)", readme)
    assert set(line.split()) == needed - {"tensorflow"}


def test_the_tpu_constraints_agree_with_the_packages_own() -> None:
    pins = [dict(re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE)) for file in _constraints()]
    assert {name: pins[0][name] for name in pins[0].keys() & pins[1].keys()} == {"keras": pins[1]["keras"]}


def _constraints() -> tuple[Path, Path]:
    return ROOT / "constraints.txt", TPU / "constraints.txt"


@pytest.fixture
def lower_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.setenv(name, "1")  # put back what the script sets
    spec = importlib.util.spec_from_file_location("lower_step", TPU / "lower_step.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("recipe", ["pretrain-i1k", "finetune"])
def test_what_is_lowered_for_tpus_is_the_training_step(recipe: str, lower_step: ModuleType) -> None:
    fields = {"batch_size": 8, "accumulation": 2, "image_size": 16, "warmup_steps": 500, "xla": False}
    config = {"dropout_rate": 0.1}
    chosen = train.recipe(recipe, steps=10_000, config=config, **fields)  # as many as the script says
    source = built(num_classes=lower_step.CLASSES)
    session = Session(
        chosen,
        source,
        images=8,
        num_classes=lower_step.CLASSES,
        class_names=None,
        strategy=tf.distribute.get_strategy(),
    )
    own = [*(v.value for v in session.model.trainable_variables), *session.optimizer.slots.values()]
    state = [tf.convert_to_tensor(v) for v in own]
    function = tf.function(lower_step.training_step(chosen, session.model)[0], autograph=False)
    draw = np.random.default_rng(0)
    images = draw.normal(size=(8, 16, 16, 3)).astype(np.float32)
    labels = np.eye(lower_step.CLASSES, dtype=np.float32)[draw.integers(0, lower_step.CLASSES, 8)]
    batches = iter(tf.data.Dataset.from_tensors({"image": images, "label": labels}).repeat())
    for now in range(3):
        loss, _, norm, _ = session.train(batches, tf.constant(1), tf.constant(0.0)).numpy()
        state, lowered_loss, lowered_norm = function(tf.constant(now, tf.int64), images, labels, *state)
        # The same operations in the same order; TensorFlow may fuse them differently.
        np.testing.assert_allclose((lowered_loss, lowered_norm), (loss, norm), rtol=1e-5)
    for variable, value in zip(own, state, strict=True):
        difference = np.abs(tf.cast(variable, tf.float32) - tf.cast(value, tf.float32)).max()
        # 2e-6 of float32 noise, and a bfloat16 momentum (below 1 here) may fall on the neighbouring value.
        assert difference <= (2**-8 if variable.dtype == tf.bfloat16 else 2e-6)
