"""Wrong commands fail before TensorFlow is imported, with one line in the words of the command line."""

from __future__ import annotations

import json
import os
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
from tiny_models import built

CHECKPOINT = files.data_folder("zoo") / "weights" / "digits.npz"
# Each command, and what its one line says. x.png is an image, own.npz a checkpoint, empty.png an empty file, and `run`
# the folder of a training run that has not finished.
WRONG = {
    "predict mispelt x.png": "No model has this name",
    "predict digits nothing.png": "There is no image file or folder 'nothing.png'",
    "predict digits empty.png": "'empty.png' is empty",
    "predict digits no*.png": "'no*.png' has no images",
    "predict digits x.png --top 0": "--top must be an integer >= 1. Received: 0",
    "predict digits x.png --weights sma": "Received: weights='sma'",
    "predict digits x.png --image-size big": "--image-size must be a number of pixels or HEIGHTxWIDTH. Received: 'big'",
    "predict digits x.png --image-size 3": "smaller than one patch (4x4 pixels). Received: image_size=(3, 3)",
    "predict digits x.png --image-size 0": "--image-size must be a number of pixels or HEIGHTxWIDTH. Received: '0'",
    "predict runs/x/model.h5 x.png": "There is no file or folder",
    "predict runs/x x.png": "There is no file or folder",
    "predict run x.png": "run is a training run that has not finished: it has no model.keras yet",
    "predict x.png x.png": "x.png: starts with the bytes 89 50 4e 47",
    "predict empty.png x.png": "empty.png: is empty",
    "predict own.npz x.png --weights sam": "weights are for a model's name. Received: weights='sam'",
    "convert own.npz out.npz --to gogle": "format must be one of ['big_vision', ",
    "convert own.npz out.npz --to google --from gogle": "format must be one of ['big_vision', ",
    "convert own.npz nowhere/out.npz --to google": "There is no folder 'nowhere'",
    "convert own.npz out.npz --to google --config num_headz=4": "num_headz",
    "convert own.npz out.npz --to google --config num_heads": "--config must be FIELD=VALUE",
    "convert own.npz out.npz --to google --config num_heads=5": "has 4 attention heads. Received: num_heads=5",
    "convert own.npz out.npz --to google --num-classes -1": "--num-classes must be an integer >= 0",
    "convert digits out.npz --to google --config num_heads=4": "describe a file",
    "convert nothing.npz out.npz --to google": "nothing.npz",
    "resize own.npz out.npz 32x32x3": "HEIGHTxWIDTH",
    "resize own.npz nowhere/out.npz 48": "There is no folder 'nowhere'",
    "train finetun --model digits --data digits": "the nearest is 'finetune'",
    "train mine.toml --model digits --data digits": "There is no recipe file mine.toml",
    "train finetune --model digits --data digits --set learnin_rate=1": "the nearest is 'learning_rate'",
    "train finetune --model digits --data digits --set learning_rate=fast": "learning_rate must be",
    "train finetune --model digits --data digits --steps 0": "--steps must be an integer >= 1. Received: 0",
    "train finetune --model mispelt --data digits": "No model has this name",
    "train finetune --model run --data digits": "has not finished",
    "train finetune --model digits --data digits --image-size 3": "smaller than one patch",
    "train finetune --model digits --data photos/train": "There is no folder of images or of prepared data",
    "evaluate digits --data nowhere/at/all": "'nowhere/at/all'",
    "evaluate digits --data digits --on-bad-image ignore": "--on-bad-image must be one of ['skip', 'fail']",
    "evaluate digits --data digits --batch-size 0": "--batch-size must be an integer >= 1",
    "evaluate mispelt --data digits": "No model has this name",
    "plan mispelt --batch 8": "Received: 'mispelt'",
    "plan own.npz --batch 0": "--batch must be an integer >= 1",
    "export digits --to out.tflite --quantize int5": "quantize must be one of",
    "export digits --to out.tflite --quantize int8": "--quantize int8 needs calibration images",
    "export digits --to out.tflite --input int8": "--input must be one of",
    "export digits --to out.tflite --source-size 32": "needs input_dtype='uint8' (--input uint8)",
    "export digits --to out.tflite --labels imagenett": "labels must be one of ['digits'",
    "export digits --to out.tflite --threads 0": "--threads must be an integer >= 1",
    "export digits --to nowhere/out.tflite": "There is no folder for the .tflite file: nowhere",
    "export digits --to run": "run already exists",
    "export digits --to 1 --labels imagenett": "labels must be one of ['digits'",
    "export mispelt --to out.tflite": "No model has this name",
    "verify nothing.tflite digits": "There is no exported file nothing.tflite",
    "verify run digits --quantize int5": "quantize must be one of",
    "visualize digits x.png --image-size 2x2": "smaller than one patch",
    "predict digits pipe.png": "'pipe.png' is not a regular file",
    "show nowhere/run": "There is no file or folder",
    "bench nothing.tflite": "There is no exported file nothing.tflite",
    "bench mispelt": "No model has this name",
    "demo --out run": "The demo needs a folder of its own",
}
PROGRAM = """
import json, sys
from keras_vit import cli
rows = []
for line in json.load(sys.stdin):
    sys.argv = ["keras-vit", *line.split()]
    try:
        cli.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    rows.append([line, code, "tensorflow" in sys.modules])
print(json.dumps(rows))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    (tmp_path / "own.npz").symlink_to(CHECKPOINT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_wrong_command_starts_tensorflow(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    environment = {**os.environ, "PYTHONPATH": str(files.PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(list(WRONG)), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [line for line, code, _ in rows if not str(code).startswith("keras-vit: ") or "\n" in code] == []
    assert [(line, code) for line, code, _ in rows if WRONG[line] not in code] == []
    assert [line for line, _, has_tensorflow in rows if has_tensorflow] == []
    assert done.stderr == ""
    assert sorted(folder.rglob("*")) == before


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


def test_values_may_be_written_as_in_python() -> None:
    fields = options.parse_fields(["position_prefix=True", "labels=None", "num_heads=12", "classifier=gap"])
    assert fields == {"position_prefix": True, "labels": None, "num_heads": 12, "classifier": "gap"}


def test_the_number_of_images_of_a_report_is_the_reports() -> None:
    assert predict.MAX_IMAGES == report_page.MAX_IMAGES


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
