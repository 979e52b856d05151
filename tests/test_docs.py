"""The guides and the example for TPUs are right: code runs, commands exist, tables and pictures are up to date."""

from __future__ import annotations

import ast
import configparser
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import typer

import doc_blocks
import folder_picture
import recipe_table
from html_document import Document
from keras_vit import cli, train
from keras_vit.cli import options
from keras_vit.train.objective import supervised
from keras_vit.train.prepare import adapt_model
from keras_vit.train.step import TrainState, make_train_step
from marks import full_except
from package_source import FLOORS, PACKAGE
from tiny_models import built

ROOT = doc_blocks.ROOT
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in doc_blocks.PAGES}
MANY_GPUS = PAGES["many-gpus-and-tpu-pods"]
TRAINING = "".join([PAGES["fine-tune"], PAGES["pre-train-and-self-supervise"], MANY_GPUS])
TPU = ROOT / "examples" / "tpu"
WITH_COMMANDS = [*doc_blocks.PAGES, ROOT / "README.md", TPU / "README.md"]
WITH_LINKS = [*WITH_COMMANDS, *(ROOT / name / "README.md" for name in ("zoo", "converters", "benchmarks"))]
PYTHON = [name for name in sorted(PAGES) if doc_blocks.script(PAGES[name]).strip()]
QUICK = ["add-a-model-or-format", "many-gpus-and-tpu-pods"]


@pytest.mark.parametrize("page", full_except(QUICK, PYTHON))
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of folder-of-photos: more epochs and pictures run no other code.
    text = PAGES[page].replace("epochs=5", "epochs=1").replace("size=(len(images), 2)", "size=(len(images) // 3, 2)")
    doc_blocks.run(text, tmp_path, monkeypatch)


def test_blocks_that_need_something_are_python_too() -> None:
    for page, text in PAGES.items():
        for code in doc_blocks.blocks(text, "python"):
            compile(code, page, "exec")


def test_the_commands_of_a_page_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the folder with zoo/recipes/finetune.toml
    known: Any = typer.main.get_command(cli.app)
    shown = set()
    for page in WITH_COMMANDS:
        for name, *rest in doc_blocks.commands(page.read_text(encoding="utf-8")):
            if name.startswith("-"):
                known.make_context("keras-vit", [name, *rest], resilient_parsing=True)
                continue
            assert name in known.commands, (page, name)
            context = known.commands[name].make_context(name, rest)  # only parses the arguments
            if name == "train":
                recipe = context.params["recipe"] or "finetune"  # with --continue-from there is none
                train.recipe(recipe, **options.parse_fields(context.params["changes"], "--set"))
            shown.add(name)
    assert known.commands.keys() - {"demo"} <= shown
    settings = re.findall(r"--set '?([a-z]\w*)=", TRAINING) + re.findall(r"^\| `(\w+)=\S+` \|", TRAINING, re.MULTILINE)
    assert len(settings) > 10 and set(settings) <= train.recipe("finetune").to_dict().keys()


def last_value(source: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last expression, which Jupyter shows; None without one."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.full
def test_the_cells_of_the_notebook_run_and_their_results_show_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    cells = json.loads((ROOT / "examples" / "first_hour.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(cell.get("outputs", []) == [] and cell.get("execution_count") is None for cell in cells)
    names: dict[str, Any] = {}
    shown = [last_value("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    pages = [Document(value._repr_html_()) for value in shown if hasattr(value, "_repr_html_")]
    assert len(pages) == 5  # model, result, examination, evaluation, file
    assert names["probe"].metrics["accuracy"] > 0.9
    assert all((tmp_path / file).exists() for file in ("report.html", "mistakes/examination.html", "even.tflite"))


def test_the_table_of_recipes_is_the_recipes() -> None:
    table = recipe_table.PAGE.read_text(encoding="utf-8").split(recipe_table.START)[1].split(recipe_table.END)[0]
    assert table == recipe_table.rendered(), "run python tests/support/recipe_table.py"


def test_the_plan_on_the_page_is_what_plan_says() -> None:
    planned = train.plan(
        "ViT-L/16", image_size=384, batch_size=512, devices=8, accumulation=8, precision="mixed_bfloat16", remat=True
    )
    assert f"--remat\n{planned}\n```" in MANY_GPUS


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ +(.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere_and_every_guide_is_in_the_index() -> None:
    for page in WITH_LINKS:
        prose = re.sub(r"`[^`\n]*`", "", without_code(page))
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", prose):
            place = (page.parent / target) if target else page
            assert place.exists(), (page, target)
            assert not anchor or anchor in anchors(place), (page, target, anchor)
    linked = re.findall(r"\]\(([\w-]+)\.md\)", PAGES["README"])
    assert sorted(linked) == sorted(PAGES.keys() - {"README"})


def test_the_picture_of_the_folders_is_the_package() -> None:
    at_the_top = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert folder_picture.boxes().keys() == at_the_top == set().union(*FLOORS)
    assert folder_picture.PICTURE.read_text(encoding="utf-8") == folder_picture.rendered(), (
        "run python tests/support/folder_picture.py"
    )


def test_the_places_that_how_it_works_names_exist() -> None:
    places = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", PAGES["how-it-works"])) - {"__init__.py"}
    assert len(places) > 20
    assert not {place for place in places if not (PACKAGE / place).exists() and not (ROOT / place).exists()}


def test_the_tpu_environment_has_all_that_the_package_needs_but_tensorflow() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    declared = setup["options"]["install_requires"] + setup["options.extras_require"]["train"]
    needed = {re.split(r"[ <>=\[]", line)[0] for line in declared.split("\n") if line}
    readme = (TPU / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"pip install -c constraints.txt .* tensorflow-tpu +(.*)", readme)
    assert set(line.split()) == needed - {"tensorflow"}
    files = (ROOT / "constraints.txt", TPU / "constraints.txt")
    pins = [dict(re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE)) for file in files]
    assert {name: pins[0][name] for name in pins[0].keys() & pins[1].keys()} == {"keras": pins[1]["keras"]}


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["finetune"])
def test_what_is_lowered_for_tpus_is_the_training_step(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.setenv(name, "1")  # restore the variables that the script sets
    lower_step = SimpleNamespace(**runpy.run_path(str(TPU / "lower_step.py")))
    fields = {"batch_size": 8, "accumulation": 2, "image_size": 16, "warmup_steps": 500, "xla": False}
    config = {"dropout_rate": 0.1}
    chosen = train.recipe(recipe, steps=10_000, config=config, **fields)  # the script's number of steps
    source = built(num_classes=lower_step.CLASSES, num_layers=1)
    model = adapt_model(chosen, source, num_classes=lower_step.CLASSES)
    training = TrainState(chosen, model, supervised(chosen, model), total_steps=chosen.resolved_steps(8))
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
