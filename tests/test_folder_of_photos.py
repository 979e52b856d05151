"""The guide about a folder of photos works as printed: train, Ctrl-C, go on, evaluate, predict, export."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import doc_blocks
import keras_vit
import photo_folder

PAGE = doc_blocks.ROOT / "docs" / "folder-of-photos.md"
MODEL = "MODEL=digits"  # what the page says to take without internet
NOISE = ("Traceback", "Warning", ".py:", "{{", "\r", "\x1b", "oneDNN", "cuda")


def page_commands() -> list[str]:
    """Return the lines of the page that call keras-vit."""
    code = "\n".join(doc_blocks.blocks(PAGE.read_text(encoding="utf-8"), ""))
    return [line.removeprefix("$ ") for line in code.splitlines() if line.startswith("$ keras-vit")]


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command of the page in a folder, offline, as a user's shell does."""
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(doc_blocks.ROOT),
        "KERAS_VIT_OFFLINE": "1",
        "KERAS_VIT_CACHE": str(folder / "cache"),
    }
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # a user has not set it
    # exec: the signal reaches Python, as Ctrl-C reaches all processes of a terminal.
    line = command.replace("keras-vit ", 'exec "$PYTHON" -m keras_vit ', 1)
    return subprocess.Popen(
        ["bash", "-c", f"{MODEL}; {line}"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Return the output of a command that succeeds and prints nothing that a user has to puzzle over."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    assert not [word for word in NOISE if word in out + err], err
    return out


@pytest.mark.full
def test_from_a_folder_of_photos_to_a_phone_and_a_server(tmp_path: Path) -> None:
    photos = photo_folder.make(tmp_path / "photos")
    commands = page_commands()
    first = next(command for command in commands if "finetune-photos" in command)
    others = [command for command in commands if command != first]

    interrupted = start(first, tmp_path)
    log = tmp_path / "runs" / "photos" / "log.jsonl"
    while not log.exists() and interrupted.poll() is None:
        time.sleep(0.1)
    interrupted.send_signal(signal.SIGINT)
    assert "the same command resumes the run" in finish(interrupted)
    finish(start(first, tmp_path))
    steps = [line["step"] for line in map(json.loads, log.read_text().splitlines())]
    assert steps == sorted(steps) and max(steps) == 54  # 20 epochs of 86 photos, 32 at a time

    outputs = {command: finish(start(command, tmp_path)) for command in others}
    evaluated = next(out for command, out in outputs.items() if "--split held-out" in command)
    assert float(re.search(r"top-1 ([\d.]+)%", evaluated)[1]) > 60  # type: ignore[index]  # of five classes

    # Server, phone and Python agree on a photo that a tag turns.
    turned = photos / "roof" / "roof-03.jpg"
    model = keras_vit.converters.load(tmp_path / "runs" / "faster" / "model.keras")
    expected = np.asarray(model(model.preprocess(turned)))
    server = tf.saved_model.load(str(tmp_path / "models" / "photos" / "1"))
    answer = server.signatures["serving_default"](tf.constant([turned.read_bytes()]))
    assert model.classify(turned, top=1)[0][0].label.encode() == answer["classes"].numpy()[0, 0]
    runner = keras_vit.export.runner(tmp_path / "photos.tflite")
    np.testing.assert_allclose(runner(model.preprocess(turned)), expected, atol=0.5)  # of logits of several units
