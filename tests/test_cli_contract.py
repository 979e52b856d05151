"""All commands have help, exit codes, one line for a user's error, and JSON without other output."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from command_line import fails, run
from keras_vit import cli
from keras_vit._util import files
from keras_vit.batch.folder import open_folder
from keras_vit.zoo import catalogue, pretrained
from package_source import MODULES, TREES

GROUP: Any = typer.main.get_command(cli.app)
COMMANDS = sorted(GROUP.commands)
OFFLINE = {"KERAS_VIT_OFFLINE": "1", "COLUMNS": "100"}

# A user's error for each command, found before any model is loaded.
WRONG = {
    "bench": ["digits", "--rounds", "0"],
    "convert": ["nothing.npz", "out.npz", "--to", "google"],
    "demo": ["--out", "file"],
    "embed": ["nothing.npz", "photos", "--to", "out"],
    "evaluate": ["nothing.npz", "--data", "digits"],
    "export": ["digits", "--to", "out.tflite", "--images", "nothing.png"],
    "plan": ["B/16", "--batch", "0"],
    "predict": ["digits", "nothing.png"],
    "resize": ["nothing.npz", "out.npz", "32"],
    "search": ["nothing", "a red car"],
    "show": ["ViT-B/61"],
    "train": ["nothing.toml", "--model", "digits", "--data", "digits"],
    "verify": ["out.tflite", "digits", "nothing.png"],
    "visualize": ["digits", "nothing.png"],
}
UNFAILING = {"list"}  # every pattern is valid
# Commands that print figures, with as few arguments as possible.
FIGURES: dict[str, list[str]] = {
    "bench": ["digits", "--rounds", "1", "--threads", "1"],
    "embed": ["digits", "digit.png", "--to", "rows"],
    "evaluate": ["digits", "--data", "digits", "--split", "test[:16]"],
    "export": ["digits", "--to", "digits.tflite"],
    "list": [],
    "plan": ["B/16", "--batch", "8"],
    "predict": ["digits", "digit.png"],
    "search": ["rows", "digit.png"],
    "show": ["digits"],
    "verify": ["digits.tflite", "digits"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_each_of_its_options(command: str) -> None:
    assert len(run(command, "--help").splitlines()) > 5
    known = GROUP.commands[command]
    assert known.help
    undocumented = [parameter.name for parameter in known.params if not getattr(parameter, "help", None)]
    assert not undocumented


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_is_none_is_a_usage_error(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--no-such-option"])
    assert result.exit_code == 2
    assert "No such option" in result.stderr
    assert result.stdout == ""


def test_every_command_has_its_row() -> None:
    assert set(COMMANDS) - UNFAILING == set(WRONG)
    with_json = {name for name in COMMANDS if any("--json" in p.opts for p in GROUP.commands[name].params)}
    assert with_json == set(FIGURES) | {"train"}  # tests/test_cli_train.py runs it


@pytest.mark.parametrize("command", WRONG)
def test_an_error_of_the_user_is_one_line_on_standard_error(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("no folder")
    message = fails(monkeypatch, command, *WRONG[command])
    assert "\n" not in message
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")  # the line itself is printed when the process ends
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_that_line_is_on_standard_error_and_the_status_is_1() -> None:
    done = process(["convert", "nothing.npz", "out.npz", "--to", "google"])  # TensorFlow has started by then
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"keras-vit: .*nothing\.npz.*\n", done.stderr)


@pytest.mark.full
def test_json_is_all_there_is_on_standard_output_and_standard_error_is_quiet(tmp_path: Path) -> None:
    """Run commands in a new process: TensorFlow and LiteRT write to the descriptors when they first start."""
    from PIL import Image

    Image.new("RGB", (16, 16)).save(tmp_path / "digit.png")
    order = sorted(FIGURES, key=lambda command: (command == "verify", command))  # of the file that export has written
    lines = [[command, *FIGURES[command], "--json"] for command in order]
    done = process(*lines, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    texts = done.stdout.split(SEPARATOR)
    for command, text in zip(order, texts, strict=True):
        assert isinstance(json.loads(text), dict | list), command


SEPARATOR = "-- next --\n"
PROGRAM = f"""
import sys
from keras_vit import cli
for number, arguments in enumerate({{lines}}):
    if number:
        print(end={SEPARATOR!r})
    sys.argv = ["keras-vit", *arguments]
    try:
        cli.main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def process(
    *lines: list[str], folder: Path | None = None, given: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run commands one after the other in a new process, without the tests' settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "KERAS_"))}
    environment = {**kept, **OFFLINE, "PYTHONPATH": str(files.PACKAGE.parent), **(given or {})}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(lines=list(lines))],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=folder,
    )


# ---- names, paths and URLs

# Every command that takes a model, with the model as {}.
WITH_MODEL = {
    "bench": ["{}"],
    "convert": ["{}", "out.npz", "--to", "google"],
    "embed": ["{}", "photos", "--to", "out"],
    "evaluate": ["{}", "--data", "digits"],
    "plan": ["{}", "--batch", "8"],
    "export": ["{}", "--to", "out.tflite"],
    "predict": ["{}", "digit.png"],
    "resize": ["{}", "out.npz", "48"],
    "search": ["vectors", "digit.png", "--model", "{}"],
    "train": ["finetune-digits", "--model", "{}", "--data", "digits"],
    "verify": ["out.tflite", "{}"],
    "visualize": ["{}", "digit.png"],
}


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("digits", str(files.data_folder("zoo") / "weights" / "digits.npz")),  # although there is a folder of that name
        ("./digits", "./digits"),
        ("mine", "mine"),
        ("mine.npz", "mine.npz"),
        ("runs/mine", "runs/mine"),
        ("https://host/mine.npz", "https://host/mine.npz"),
    ],
)
def test_all_commands_agree_whether_a_text_is_a_name_a_path_or_a_url(
    model: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("digits", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "saved_model.pb").touch()
    (tmp_path / "digit.png").write_text("a file")
    for name in ("mine.npz", "out.tflite"):
        (tmp_path / name).touch()
    facts = {"source": str(tmp_path), "rows_per_file": 9, "what": "embeddings", "weights": ""}
    open_folder(tmp_path / "vectors", facts, {"working_folder": str(tmp_path)})
    monkeypatch.chdir(tmp_path)

    def fetched(choice: pretrained.Choice) -> Path:
        raise ValueError(f"loads {choice.source}")

    monkeypatch.setattr(pretrained, "fetch_source", fetched)
    # bench also runs SavedModels, plan needs no weights of a name.
    others = {"./digits": {"bench"}, "mine": {"bench"}, "digits": {"plan"}}.get(model, set())
    for command in WITH_MODEL.keys() - others:
        arguments = [argument.format(model) for argument in WITH_MODEL[command]]
        assert fails(monkeypatch, command, *arguments) == f"keras-vit: loads {source}", command


def test_every_command_with_a_model_is_in_that_table() -> None:
    taking = {name for name in COMMANDS if {"model", "source"} & {p.name for p in GROUP.commands[name].params}}
    assert taking == set(WITH_MODEL)


# ---- completion


def completed(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return the process that prints the completions that bash gets at the end of a line."""
    words = line.split(" ")
    given = {"_KERAS_VIT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return process([], given=given | environment)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("keras-vit show ViT-L", ["ViT-L/16", "ViT-L/32"]),
        ("keras-vit bench R26+S", ["R26+S/32"]),
        ("keras-vit evaluate dig", ["digits"]),
        ("keras-vit export ViT-B/16 --weights sa", ["sam"]),
        ("keras-vit plan ViT-S", ["ViT-S/16", "ViT-S/32"]),
        ("keras-vit train finetune-d", ["finetune-digits"]),
        ("keras-vit convert in out --to goo", ["google"]),
        ("keras-vit export digits --to out --quantize int8", ["int8"]),
        ("keras-vit sho", ["show"]),
    ],
)
def test_a_shell_completes_what_a_command_takes(line: str, offered: list[str]) -> None:
    assert completed(line).stdout.split() == offered


def test_all_models_are_offered_without_tensorflow() -> None:
    done = completed("keras-vit show ", PYTHONPROFILEIMPORTTIME="1")  # Python lists what it imports
    assert done.stdout.split() == catalogue.names()
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported and not imported & {"keras", "tensorflow"}


# ---- variables

PAGE = files.PACKAGE.parent / "docs" / "environment.md"
VARIABLE = re.compile(r"(?:KERAS|HF|TF|TPU|CUDA)_[A-Z_]+")


def variables(module: str) -> set[str]:
    """Return the names of environment variables that a module reads; those it sets for others are keys of dicts."""
    tree = TREES[module]
    if "os.environ" not in ast.unparse(tree):
        return set()
    keys = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text.value for text in texts if id(text) not in keys and VARIABLE.fullmatch(text.value)}


def test_the_page_of_variables_has_those_that_the_source_reads() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(listed)) == len(listed)
    assert set(listed) == set().union(*map(variables, MODULES))
