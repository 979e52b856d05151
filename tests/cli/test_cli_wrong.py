"""Wrong commands fail before TensorFlow is imported, with one line in the words of the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from command_line import fails
from keras_vit import cli, converters
from keras_vit._util import files
from keras_vit.cli import main, options, predict
from keras_vit.visualize import report_page
from keras_vit.zoo import catalogue
from places import ROOT
from tiny_models import built

CHECKPOINT = files.data_folder("zoo") / "weights" / "digits.npz"
# Each command, and a word of its one line: the file, the option or the field. x.png is an image, own.npz a checkpoint,
# empty.png an empty file, pipe.png a pipe, `served` a SavedModel, and `run` a training run that has not finished.
WRONG = {
    "predict mispelt x.png": "mispelt",
    "predict ViT-B/61 x.png": "nearest",
    "predict digits nothing.png": "nothing.png",
    "predict digits empty.png": "empty.png",
    "predict digits pipe.png": "pipe.png",
    "predict digits no*.png": "no*.png",
    "predict digits x.png --top 0": "--top must be an integer >= 1. Received: 0",
    "predict digits x.png --weights sma": "weights='sma'",
    "predict digits x.png --weights nothing.npz": "nothing.npz",
    "predict digits x.png --image-size big": "--image-size must be a number of pixels or HEIGHTxWIDTH",
    "predict digits x.png --image-size 3": "image_size=(3, 3)",
    "predict digits x.png --image-size 0": "--image-size",
    "predict runs/x/model.h5 x.png": "runs/x/model.h5",
    "predict runs/x x.png": "runs/x",
    "predict run x.png": "has not finished",
    "predict x.png x.png": "89 50 4e 47",
    "predict served x.png": "served is a SavedModel, which servers and TensorFlow run",
    "embed served x.png --to out": "keras-vit verify compares with its model",
    "evaluate served --data digits": "served is a SavedModel",
    "predict digts.tflit x.png": "There is no file 'digts.tflit', and no model has this name",
    "predict empty.png x.png": "empty.png",
    "predict own.npz x.png --weights sam": "weights='sam'",
    "convert own.npz out.npz --to gogle": "'big_vision'",
    "convert own.npz out.npz --to google --from gogle": "'big_vision'",
    "convert own.npz nowhere/out.npz --to google": "nowhere",
    "convert own.npz out.npz --to google --config num_headz=4": "num_headz",
    "convert own.npz out.npz --to google --config num_heads": "--config must be FIELD=VALUE",
    "convert own.npz out.npz --to google --config num_heads=5": "num_heads=5",
    "convert own.npz out.npz --to google --num-classes -1": "--num-classes",
    "convert digits out.npz --to google --config num_heads=4": "describe a file",
    "convert nothing.npz out.npz --to google": "nothing.npz",
    "resize own.npz out.npz 32x32x3": "HEIGHTxWIDTH",
    "resize own.npz nowhere/out.npz 48": "nowhere",
    "train finetun --model digits --data digits": "the nearest is 'finetune'",
    "train augreg-lite1 --model digits --data digits": "augreg-light1",
    "train mine.toml --model digits --data digits": "mine.toml",
    "train finetune --model digits --data digits --set learnin_rate=1": "the nearest is 'learning_rate'",
    "train finetune --model digits --data digits --set learning_rate=fast": "learning_rate",
    "train finetune --model digits --data digits --set steps": "--set must be FIELD=VALUE",
    "train finetune --model digits --data digits --steps 0": "--steps",
    "train finetune --model mispelt --data digits": "mispelt",
    "train finetune --model missing.npz --data digits": "missing.npz",
    "train finetune --model run --data digits": "has not finished",
    "train finetune --model digits --data digits --image-size 3": "smaller than one patch",
    "train finetune --model digits --data photos/train": "photos/train",
    "evaluate digits --data nowhere/at/all": "nowhere/at/all",
    "evaluate digits --data digits --on-bad-image ignore": "--on-bad-image",
    "evaluate digits --data digits --batch-size 0": "--batch-size",
    "evaluate mispelt --data digits": "mispelt",
    "plan mispelt --batch 8": "mispelt",
    "plan own.npz --batch 0": "--batch",
    "export digits --to out.tflite --quantize int5": "quantize",
    "export digits --to out.tflite --quantize int8": "calibration",
    "export digits --to out.tflite --input int8": "--input",
    "export digits --to out.tflite --source-size 32": "--input uint8",
    "export digits --to out.tflite --source-size big": "--source-size",
    "export digits --to out.tflite --labels imagenett": "labels",
    "export digits --to out.tflite --threads 0": "--threads",
    "export digits --to out.tflite --images nothing.png": "nothing.png",
    "export digits --to out.tflite --calibrate": "--calibrate needs --images FOLDER",
    "fetch digits nonsense": "No model has this name",
    "export digits --to out.tflite --top 3": "a .tflite file does not take --top",
    "export digits --to 1 --quantize none --input uint8": "does not take --quantize, --input",
    "export digits --to 1 --labels imagenett": "labels",
    "export digits --to digits.onnx": "a .tflite file, or a folder",
    "export digits --to digits.keras": "a .tflite file, or a folder",
    "export digits --to out.tflit": "suffix .tflit, of a .tflite file .tflite",
    "export digits --to out.tfilte": "suffix .tfilte",
    "export digits --to out.tflite --num-classes 3": "--num-classes must be one of [0]. Received: 3",
    "export digits --to x.png/1": "x.png is a file",
    "export digits --to nowhere/out.tflite": "nowhere",
    "export digits --to run": "run already exists",
    "export mispelt --to out.tflite": "mispelt",
    "export digits --to out.tflite --device gpu --quantize int16x8": "does not run with device='gpu'",
    "verify nothing.tflite digits": "nothing.tflite",
    "verify run digits --quantize int5": "quantize",
    "verify run digits nothing.png": "nothing.png",
    "visualize digits x.png --image-size 2x2": "smaller than one patch",
    "visualize mispelt nothing.png": "nothing.png",
    "embed nothing.npz x.png --to out": "nothing.npz",
    "embed digits x.png --to x.png": "x.png must be a folder. Received: x.png is a file",
    "embed digits x.png --to x.png/rows": "x.png/rows must be a folder. Received: x.png is a file",
    "show nowhere/run": "nowhere/run",
    "show ViT-B/61": "nearest",
    "bench nothing.tflite": "nothing.tflite",
    "bench own.npz --batch -1": "--batch",
    "bench digits --rounds 0": "--rounds",
    "bench mispelt": "mispelt",
    "demo --out run": "The demo needs a folder of its own",
}
# Commands that succeed without TensorFlow; the last are those that bash asks for completions.
RIGHT = ("--help", "list", "list --json", "complete keras-vit show ")
PROGRAM = """
import contextlib, io, json, os, sys
before = set(sys.modules)
import keras_vit
others = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
from keras_vit import cli
rows = []
for line in json.load(sys.stdin):
    sys.argv = ["keras-vit", *line.split()]
    if line.startswith("complete "):
        words = line.removeprefix("complete ")
        os.environ |= {"_KERAS_VIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    rows.append([line, code, printed.getvalue(), sorted({"tensorflow", "keras", "jax", "torch"} & set(sys.modules))])
print(json.dumps([sorted(others), rows]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "saved_model.pb").touch()
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    (tmp_path / "own.npz").symlink_to(CHECKPOINT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_wrong_command_starts_tensorflow_or_writes_a_file(folder: Path) -> None:
    assert {line.split()[0] for line in WRONG} == cli.COMMANDS.keys() - {"list", "search"}
    before = sorted(folder.rglob("*"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "KERAS_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([*WRONG, *RIGHT]),
        capture_output=True,
        text=True,
        env={**kept, "KERAS_VIT_OFFLINE": "1", "PYTHONPATH": str(files.PACKAGE.parent)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    others, rows = json.loads(done.stdout)
    assert others == ["keras_vit", "lazy_loader"]  # importing the package imports only its loader
    assert [(line, heavy) for line, _, _, heavy in rows if heavy] == []
    wrong, right = rows[: len(WRONG)], rows[len(WRONG) :]
    assert [row for row in wrong if not str(row[1]).startswith("keras-vit: ") or "\n" in row[1] or row[2]] == []
    assert [(line, code) for line, code, *_ in wrong if WRONG[line] not in code] == []
    assert [line for line, code, printed, _ in right if code or not printed] == []
    assert right[-1][2].split() == catalogue.names()
    assert sorted(folder.rglob("*")) == before


QUIET = {
    "plan B/16 --batch 8 --json": dict,
    "export digits --to digits.tflite --json": dict,
}
QUIET_TOO = {
    "list --json": list,
    "show digits --json": dict,
    "bench digits --rounds 1 --threads 1 --json": dict,
    "embed digits x.png --to rows --json": dict,
    "search rows x.png --json": list,
    "evaluate digits --data digits --split test[:16] --json": dict,
    "predict digits x.png --json": list,
    "export digits --to again.tflite --json": dict,
    "verify again.tflite digits --json": dict,
}


MODULE = """
import runpy, sys
for line in sys.stdin:
    sys.argv[1:] = line.split()
    try:
        runpy.run_module("keras_vit", run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, ended.code
"""


@pytest.mark.parametrize("lines", [QUIET, pytest.param(QUIET_TOO, marks=pytest.mark.full)], ids=["quick", "others"])
def test_json_is_all_there_is_on_standard_output_and_standard_error_is_quiet(
    lines: dict[str, type], folder: Path
) -> None:
    """Run commands in a new process: TensorFlow and LiteRT write to the descriptors when they first start."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "KERAS_"))}
    done = subprocess.run(
        [sys.executable, "-c", MODULE],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        env={
            **kept,
            "KERAS_VIT_OFFLINE": "1",
            "KERAS_VIT_CACHE": str(folder / "cache"),
            "PYTHONPATH": str(files.PACKAGE.parent),
        },
    )
    assert (done.returncode, done.stderr) == (0, "")
    decoder, rest, values = json.JSONDecoder(), done.stdout.lstrip(), []
    while rest:
        value, end = decoder.raw_decode(rest)
        values.append(value)
        rest = rest[end:].lstrip()
    assert [type(value) for value in values] == list(lines.values())


LEFT_OUT = """
import sys
from keras_vit.cli import options
with options.quiet():
    assert "keras" in sys.modules and not {"matplotlib", "sklearn"} & {*sys.modules}
from matplotlib.figure import Figure
import sklearn.base
"""


@pytest.mark.full
def test_commands_start_keras_without_plots_and_wrappers_which_can_be_imported_later() -> None:
    """They take a quarter of the processor time that `import tensorflow` takes."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    environment = os.environ | {"PYTHONPATH": str(files.PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", LEFT_OUT], env=environment, check=True)


def raising(error: Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the line that `main` prints for an error."""

    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    return fails(monkeypatch, "predict")


def test_an_error_of_tensorflow_is_one_line_without_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.io.decode_png(b"no image")
    line = raising(caught.value, monkeypatch)
    assert line.startswith("keras-vit: TensorFlow failed (InvalidArgumentError): ")
    assert not {"{{", "\n", "[Op:"} & {mark for mark in ("{{", "\n", "[Op:") if mark in line}
    wrapped = ValueError("{{function_node __wrapped__DecodePng}} cannot decode [Op:DecodePng] name: ")
    assert "{{" not in raising(wrapped, monkeypatch)
    assert raising(MemoryError("3 GiB"), monkeypatch) == "keras-vit: There is not enough memory. 3 GiB"


def test_without_the_packages_of_the_command_line_it_says_in_one_line_how_to_install_them() -> None:
    program = "import sys; sys.modules['typer'] = None; from keras_vit.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == 'keras-vit: The command line needs the package typer: pip install "keras-vit-zoo"\n'


def test_a_mistake_of_the_package_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        raising(KeyError("a bug"), monkeypatch)


def test_a_warning_is_one_line_without_a_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        warnings.simplefilter("always")
        warnings.warn("keras_vit: images of 39x32 pixels", stacklevel=1)

    monkeypatch.setattr(cli, "app", app)
    cli.main()
    assert capsys.readouterr().err == "keras-vit: warning: images of 39x32 pixels\n"


def test_a_mistyped_variable_is_named_with_the_nearest_that_exists() -> None:
    code = "import sys; from keras_vit.__main__ import main; sys.argv[1:] = ['--version']; main()"
    own = {name: value for name, value in os.environ.items() if not name.startswith("KERAS_VIT_")}
    for given, line in {
        "KERAS_VIT_OFLINE": "KERAS_VIT_OFLINE is read by nothing; the nearest is 'KERAS_VIT_OFFLINE'",
        "KERAS_VIT_OFFLINE": "",
    }.items():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**own, given: "1"})
        assert done.stderr == (f"keras-vit: warning: {line}\n" if line else "") and not done.returncode


def test_the_variables_of_the_package_are_those_of_the_guide() -> None:
    guide = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(KERAS_VIT_\w+)` \|", guide, re.MULTILINE)
    sources = "".join(path.read_text(encoding="utf-8") for path in files.PACKAGE.rglob("*.py"))
    assert {*listed} == {*cli.VARIABLES} == {*re.findall(r"\bKERAS_VIT_[A-Z]+", sources)}


def test_values_may_be_written_as_in_python() -> None:
    fields = options.parse_fields(["position_prefix=True", "labels=None", "num_heads=12", "classifier=gap"])
    assert fields == {"position_prefix": True, "labels": None, "num_heads": 12, "classifier": "gap"}
    assert predict.MAX_IMAGES == report_page.MAX_IMAGES  # told twice: the command does not import the report


def test_names_cannot_control_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    escape = "\x1b[2J\rgo\nod"
    labels = (f"cat{escape}", "\u202edog", "é 猫", "d", "e")
    converters.save(built(num_layers=1, labels=labels), tmp_path / "model", format="huggingface")
    Image.new("RGB", (32, 32)).save(tmp_path / f"a{escape}.png")
    (tmp_path / f"b{escape}.png").write_bytes(b"no image")
    monkeypatch.setattr(sys, "argv", ["keras-vit", "predict", f"{tmp_path}/model", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    shown = capfd.readouterr().out
    assert not [char for char in shown if not char.isprintable() and char != "\n"]
    assert len(shown.splitlines()) == 1 + 5 + 1
    assert "cat\\x1b[2J\\rgo\\nod" in shown and "\\u202edog" in shown and "é 猫" in shown
    assert "a\\x1b[2J\\rgo\\nod.png" in shown and "b\\x1b[2J" in shown
    message = fails(monkeypatch, "predict", f"{tmp_path}/none\x1b[2J", tmp_path)
    assert "\x1b" not in message
    options.show_warning(UserWarning("left out: \x1b]0;title\x07.png"))
    assert capfd.readouterr().err == "keras-vit: warning: left out: \\x1b]0;title\\x07.png\n"
