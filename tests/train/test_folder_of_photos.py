"""The guide about a folder of photos works as printed: train, evaluate, predict, export."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import command_line
import doc_blocks
import keras_vit
import photo_folder

PAGE = doc_blocks.ROOT / "docs" / "folder-of-photos.md"
QUICK = ("--set", "epochs=1", "--set", "xla=false")  # compiling takes longer than an epoch
SAME = ("--set", "randaugment_layers=0")  # which the run before has drawn
# An epoch of fine-tuning is for the next commands, and not for accuracy; the probe of the page is accurate.
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:.* are held out"),
    pytest.mark.filterwarnings("ignore:.* are in the run already"),  # the class that is added is a copy of another
]


def test_the_commands_of_the_guide_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    photos = photo_folder.make(tmp_path / "photos")
    shutil.copytree(photos / "sky", tmp_path / "more" / "cloud")
    outputs = {}
    code = "\n".join(doc_blocks.blocks(PAGE.read_text(encoding="utf-8"), ""))
    for line in (line.removeprefix("$ ") for line in code.splitlines() if line.startswith("$ keras-vit")):
        _, *arguments = shlex.split(line.replace("$MODEL", "digits"), comments=True)  # what the page says offline
        has_steps = arguments[0] == "train" and arguments[1] not in ("linear-probe", "--add-to")
        quick = (*QUICK, *(SAME if "--try" in arguments else ())) if has_steps else ()
        outputs[line] = command_line.run(*arguments, *quick)
    evaluated = next(out for line, out in outputs.items() if "--split held-out" in line)
    assert float(re.search(r"top-1 ([\d.]+)%", evaluated)[1]) > 20  # type: ignore[index]  # of five classes

    # Server, phone and Python agree on a photo that a tag turns.
    turned = photos / "roof" / "roof-03.jpg"
    model = keras_vit.converters.load(tmp_path / "runs" / "photos" / "model.keras")
    expected = np.asarray(model(model.preprocess(turned)))
    server = tf.saved_model.load(str(tmp_path / "models" / "photos" / "1"))
    answer = server.signatures["serving_default"](tf.constant([turned.read_bytes()]))
    assert model.classify(turned, top=1)[0][0].label.encode() == answer["classes"].numpy()[0, 0]
    runner = keras_vit.export.runner(tmp_path / "photos.tflite")
    np.testing.assert_allclose(runner(model.preprocess(turned)), expected, atol=0.5)  # of logits of several units
