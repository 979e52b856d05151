"""Messages that one function makes: packages that are missing, and warnings with the caller's line."""

from __future__ import annotations

import configparser
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit import cli, digits, errors, text, train
from keras_vit.batch.compute import import_ray
from keras_vit.export import exported
from keras_vit.export.litert import builder
from keras_vit.train import log_files
from keras_vit.train.data.sources import open_data
from keras_vit.train.data.split import DataRequest
from places import ROOT
from tiny_models import tiny

CALLS: list[tuple[str, Callable[[], Any], str, str]] = [
    ("sklearn.datasets", digits.load, "The data set of digits", "demo"),
    ("importlib_resources", lambda: open_data(DataRequest(data="digits")), "This kind of data", "demo"),
    ("importlib_resources", lambda: open_data(DataRequest(data="cifar10")), "This kind of data", "train"),
    ("tokenizers", lambda: text.load(ROOT / "zoo/weights/digits-text.keras"), "A tokenizer", "text"),
    ("ai_edge_litert.interpreter", lambda: exported.load_exported("model.tflite"), "Running a .tflite file", "litert"),
    ("ai_edge_litert", builder.schema, "Writing and reading .tflite files", "litert"),
    ("matplotlib.figure", lambda: log_files.plot("."), "A plot", "plots"),
    ("ray", import_ray, 'engine="ray"', "ray"),
]


@pytest.mark.parametrize(("package", "call", "what", "extra"), CALLS)
def test_a_missing_package_names_its_extra(
    package: str, call: Callable[[], Any], what: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.tflite").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as caught:
        call()
    assert str(caught.value) == f'{what} needs the package {package}: pip install "keras-vit-zoo[{extra}]"'


def test_one_function_says_each_and_every_extra_exists() -> None:
    sources = {path: path.read_text() for path in (ROOT / "keras_vit").rglob("*.py")}
    for call in ("raise ImportError", "warnings.warn("):
        assert [path.name for path, source in sources.items() if call in source] == ["text.py"], call
    named = {extra for source in sources.values() for extra in re.findall(r'needs_extra\(.*, "(\w+)"\)', source)}
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    assert len(named) > 5 and named <= set(setup["options.extras_require"])


@pytest.mark.full
def test_a_warning_shows_the_line_outside_of_the_package() -> None:
    images = np.zeros((8, 16, 16, 3), np.uint8)
    recipe = train.recipe("digits", epochs=1, batch_size=8, warmup_steps=100, xla=False)
    data = {"train": (images, np.arange(8))}
    with pytest.warns(UserWarning, match="a warm-up of 100 leaves no step of 1") as caught:
        train.run(recipe, model=tiny(image_size=16, num_layers=1), data=data, progress=False)
    assert [w.filename for w in caught if "warm-up" in str(w.message)] == [__file__]


@pytest.mark.full
def test_a_global_dtype_policy_that_training_does_not_use_is_named() -> None:
    data = {"train": (np.zeros((8, 16, 16, 3), np.uint8), np.arange(8) % 5)}
    recipe = train.recipe("digits", steps=1, batch_size=8, xla=False)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.warns(UserWarning, match=r"'mixed_float16' is not used: the recipe says precision='float32'"):
            train.run(recipe, model=tiny(image_size=16, num_layers=1), data=data, progress=False)
    finally:
        keras.config.set_dtype_policy(before)


def test_a_recipe_is_printed_by_what_it_sets() -> None:
    for name in train.recipes():
        assert len(repr(train.recipe(name))) < 480, name
    with pytest.raises(ValueError, match=r"^Give a recipe and a model, or continue_from. Received: no model$"):
        train.run("finetune")


def test_a_command_that_was_interrupted_does_not_wait_for_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    def interrupted() -> None:
        raise SystemExit(cli.INTERRUPTED)

    monkeypatch.setattr(cli, "app", interrupted)
    monkeypatch.setattr(os, "_exit", left.append)
    with pytest.raises(SystemExit):
        cli.main()
    assert left == [130]


def test_a_line_that_quotes_a_long_name_is_cut() -> None:
    error = errors.CheckpointError(f"left over:\n{'x' * 100_000} is unknown\nshort")
    first, second, third = str(error).split("\n")
    assert (first, third) == ("left over:", "short") and len(second) < 2000 and second.endswith(" is unknown")
