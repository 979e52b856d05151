"""The guides and the example for TPUs are right: code runs, commands exist, tables and pictures are up to date."""

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
import folder_picture
import recipe_table
from keras_vit import cli, train
from keras_vit.cli import options
from keras_vit.train.prepare import adapt_model
from keras_vit.train.step import TrainState, make_train_step
from marks import full_except
from package_source import PACKAGE
from test_structure import FLOORS, floor
from tiny_models import built

ROOT = doc_blocks.ROOT
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in doc_blocks.PAGES}
MANY_GPUS = PAGES["many-gpus-and-tpu-pods"]
TRAINING = "".join([PAGES["fine-tune"], PAGES["pre-train-and-self-supervise"], MANY_GPUS])
TPU = ROOT / "examples" / "tpu"
WITH_COMMANDS = [*doc_blocks.PAGES, ROOT / "README.md", TPU / "README.md"]
WITH_LINKS = [*WITH_COMMANDS, *(ROOT / name / "README.md" for name in ("zoo", "converters", "benchmarks"))]
PYTHON = [page for page in doc_blocks.PAGES if doc_blocks.script(PAGES[page.stem]).strip()]


QUICK = [page for page in PYTHON if page.stem == "change-resolution"]
OTHERS = [page for page in PYTHON if page not in QUICK]


# The pages run in one process: importing TensorFlow is slow.
@pytest.mark.parametrize("pages", [QUICK, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["one", "all others"])
def test_the_python_of_a_page_runs_from_top_to_bottom(pages: list[Path], tmp_path: Path) -> None:
    assert doc_blocks.run_pages(pages, tmp_path) == {page.stem: "" for page in pages}


def test_what_fails_on_a_page_is_told_and_stops_no_other(tmp_path: Path) -> None:
    for name, code in (("first", "x = 1\nraise ValueError(x)"), ("second", "assert 'x' not in globals()")):
        (tmp_path / f"{name}.md").write_text(f"# {name}\n\n```python\n{code}\n```\n", encoding="utf-8")
    (tmp_path / "out").mkdir()
    told = doc_blocks.run_pages([tmp_path / "first.md", tmp_path / "second.md"], tmp_path / "out")
    assert 'page.py", line 5' in told["first"]  # the line of the page
    assert told["second"] == ""


@pytest.mark.parametrize("page", PAGES)
def test_blocks_that_need_something_are_python_too(page: str) -> None:
    for code in doc_blocks.blocks(PAGES[page], "python"):
        compile(code, page, "exec")


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_commands(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the folder with zoo/recipes/finetune.toml
    known: Any = typer.main.get_command(cli.app)
    for name, *rest in doc_blocks.commands(page.read_text(encoding="utf-8")):
        if name.startswith("-"):
            known.make_context("keras-vit", [name, *rest], resilient_parsing=True)
            continue
        assert name in known.commands, name
        context = known.commands[name].make_context(name, rest)  # only parses the arguments
        if name == "train":
            recipe = context.params["recipe"] or "finetune"  # with --continue-from there is none
            train.recipe(recipe, **options.parse_fields(context.params["changes"], "--set"))


def test_the_guides_show_the_commands() -> None:
    shown = {name for page in PAGES.values() for name, *_ in doc_blocks.commands(page)}
    known: Any = typer.main.get_command(cli.app)
    assert known.commands.keys() - {"demo"} <= shown


def test_the_settings_of_the_page_are_fields_of_recipes() -> None:
    settings = re.findall(r"--set '?([a-z]\w*)=", TRAINING) + re.findall(r"^\| `(\w+)=\S+` \|", TRAINING, re.MULTILINE)
    assert len(settings) > 10
    assert set(settings) <= train.recipe("finetune").to_dict().keys()


def test_the_table_of_recipes_is_the_recipes() -> None:
    table = recipe_table.PAGE.read_text(encoding="utf-8").split(recipe_table.START)[1].split(recipe_table.END)[0]
    assert table == recipe_table.rendered(), "run python tests/recipe_table.py"


def test_the_plan_on_the_page_is_what_plan_says() -> None:
    planned = train.plan(
        "ViT-L/16", image_size=384, batch_size=512, devices=8, accumulation=8, precision="mixed_bfloat16", remat=True
    )
    assert f"--remat\n{planned}\n```" in MANY_GPUS


def prose(page: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", prose(page)):
        place = (page.parent / target) if target else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), (target, anchor)


def test_every_guide_is_in_the_index() -> None:
    linked = re.findall(r"\]\(([\w-]+)\.md\)", PAGES["README"])
    assert sorted(linked) == sorted(PAGES.keys() - {"README"})


def test_the_picture_of_the_folders_is_the_package() -> None:
    at_the_top = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    boxes = folder_picture.boxes()
    assert boxes.keys() == at_the_top == set().union(*FLOORS)
    assert folder_picture.PICTURE.read_text(encoding="utf-8") == folder_picture.rendered(), (
        "run python tests/folder_picture.py"
    )


def test_the_arrows_of_the_picture_are_the_imports_and_go_down() -> None:
    boxes, arrows = folder_picture.boxes(), folder_picture.arrows()
    assert all(boxes[importer].y < boxes[imported].y for importer, imported in arrows)
    assert all(floor(importer) > floor(imported) for importer, imported in arrows)
    assert all(
        imported in folder_picture.reachable(importer, arrows) for importer, imported in folder_picture.imports()
    )


def test_the_places_that_how_it_works_names_exist() -> None:
    places = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", PAGES["how-it-works"])) - {"__init__.py"}
    assert len(places) > 20
    assert not {place for place in places if not (PACKAGE / place).exists() and not (ROOT / place).exists()}


def requirements(text: str) -> set[str]:
    """Return the names in a list of requirements."""
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
        monkeypatch.setenv(name, "1")  # restore the variables that the script sets
    spec = importlib.util.spec_from_file_location("lower_step", TPU / "lower_step.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("recipe", full_except(["finetune"], ["pretrain-i1k", "finetune"]))
def test_what_is_lowered_for_tpus_is_the_training_step(recipe: str, lower_step: ModuleType) -> None:
    fields = {"batch_size": 8, "accumulation": 2, "image_size": 16, "warmup_steps": 500, "xla": False}
    config = {"dropout_rate": 0.1}
    chosen = train.recipe(recipe, steps=10_000, config=config, **fields)  # the script's number of steps
    source = built(num_classes=lower_step.CLASSES, num_layers=1)
    training = TrainState(
        chosen, adapt_model(chosen, source, num_classes=lower_step.CLASSES), total_steps=chosen.resolved_steps(8)
    )
    train_step = make_train_step(training, tf.distribute.get_strategy())
    own = [*(v.value for v in training.model.trainable_variables), *training.optimizer.slots.values()]
    state = [tf.convert_to_tensor(v) for v in own]
    function = tf.function(lower_step.training_step(chosen, training.model)[0], autograph=False)
    draw = np.random.default_rng(0)
    images = draw.normal(size=(8, 16, 16, 3)).astype(np.float32)
    labels = np.eye(lower_step.CLASSES, dtype=np.float32)[draw.integers(0, lower_step.CLASSES, 8)]
    batches = iter(tf.data.Dataset.from_tensors({"image": images, "label": labels}).repeat())
    for now in range(3):
        loss, _, norm, _ = train_step(batches, tf.constant(1), tf.constant(0.0)).numpy()
        state, lowered_loss, lowered_norm = function(tf.constant(now, tf.int64), images, labels, *state)
        # The same operations in the same order; TensorFlow may fuse them differently.
        np.testing.assert_allclose((lowered_loss, lowered_norm), (loss, norm), rtol=1e-5)
    for variable, value in zip(own, state, strict=True):
        difference = np.abs(tf.cast(variable, tf.float32) - tf.cast(value, tf.float32)).max()
        # 2e-6 of float32 noise, and a bfloat16 momentum (below 1 here) may fall on the neighbouring value.
        assert difference <= (2**-8 if variable.dtype == tf.bfloat16 else 2e-6)
