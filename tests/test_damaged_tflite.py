"""A .tflite file that this process has not written runs in a process of its own: a crash or a hang is one error."""

from __future__ import annotations

import gc
import itertools
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import fails
from keras_vit import export
from keras_vit.export.check import litert_file, running
from keras_vit.export.check.litert_file import IsolatedFile, LiteRTFile
from keras_vit.export.check.running import load_exported
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.operators import Operators
from marks import full_except
from tiny_models import built

IMAGES = np.random.default_rng(0).uniform(-1, 1, (3, 32, 32, 3)).astype(np.float32)
# Programs in place of the one that runs LiteRT: what a damaged file makes of it.
OPENED = """
import sys
sys.path.insert(0, {folder!r})
import litert_file
litert_file._send(sys.stdout.buffer, {{}}, batch=1, shape=[32, 32, 3], dtype="float32")
litert_file._receive(sys.stdin.buffer)
"""
CRASH = "import os; os.kill(os.getpid(), 11)"
ENDS = {
    "import os; os.abort()": r"cannot be run: LiteRT crashed \(Aborted\)",
    CRASH: r"cannot be run: LiteRT crashed \(Segmentation fault\)",
    "raise SystemExit('out of range')": r"cannot be run: LiteRT crashed \(exit status 1; out of range\)",
    "import time; time.sleep(60)": r"cannot be run: LiteRT did not answer in 0\.5 seconds",
}


def flat(path: Path, *sides: int | None, dtype: str = "float32") -> Path:
    """Write a file that reshapes images of 2x2 pixels."""
    ops = Operators(Builder())
    image = ops.builder.input("image", (None, 2, 2, 3), dtype=dtype)
    ops.builder.signature({"image": image}, {"logits": ops.reshape(image, sides or (None, 12), "flat")})
    ops.builder.write(path)
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model as a file."""
    path = tmp_path_factory.mktemp("file") / "tiny.tflite"
    export.tflite(built(num_layers=1), path, quantize="none", batch=None)
    return path


@pytest.fixture
def foreign(written: Path, tmp_path: Path) -> Path:
    """Return the same file as if another process had written it."""
    path = tmp_path / "foreign.tflite"
    path.write_bytes(written.read_bytes())
    return path


def run_once(path: Path) -> Any:
    return export.runner(path)(IMAGES[:1])


@pytest.mark.parametrize(
    ("program", "is_open"),
    full_except([(CRASH, True), ("import os; os.abort()", False)], itertools.product(ENDS, [False, True])),
)
def test_the_end_of_the_process_is_one_error(
    program: str, is_open: bool, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(
        OPENED.format(folder=str(Path(litert_file.__file__).parent)) * is_open + program
    )
    monkeypatch.setattr(litert_file, "__file__", str(tmp_path / "program.py"))
    monkeypatch.setattr(litert_file, "TIMEOUT", 0.5 if "sleep" in program else 60)
    calls: list[Callable[[Path], Any]] = [run_once, lambda path: export.verify(built(num_layers=1), path)]
    for call in calls[: 1 if is_open else 2]:
        with pytest.raises(ValueError, match=f"^{foreign} {ENDS[program]}"):
            call(foreign)


def test_the_commands_print_a_crash_as_one_line(foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text("import os; os.abort()")
    monkeypatch.setattr(litert_file, "__file__", str(tmp_path / "program.py"))
    for command in (("verify", foreign, "digits"), ("bench", foreign)):
        assert fails(monkeypatch, *command).startswith(
            f"keras-vit: {foreign} cannot be run: LiteRT crashed (Aborted). "
        )


def test_only_files_of_others_get_a_process(
    written: Path, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = export.runner(foreign)(IMAGES)
    monkeypatch.setattr(running, "IsolatedFile", None)
    np.testing.assert_array_equal(export.runner(written)(IMAGES), expected)
    written.rename(tmp_path / "renamed.tflite").rename(written)
    np.testing.assert_array_equal(export.runner(written)(IMAGES), expected)
    with pytest.raises(TypeError):  # there is no such class
        export.runner(foreign)
    export.tflite(built(num_layers=1), foreign, quantize="none")
    export.runner(foreign)
    foreign.write_bytes(foreign.read_bytes())
    with pytest.raises(TypeError):
        export.runner(foreign)


@pytest.mark.parametrize("mode", full_except(["int16x8"], ["none", "int16x8"]))
def test_a_process_gives_what_the_file_gives_here(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "file.tflite"
    export.tflite(built(), path, quantize=mode, calibration=IMAGES, verify=IMAGES, least_cosine=-1, least_agreement=0)
    here, there = LiteRTFile(path, 2), IsolatedFile(path, 2)
    assert (there.shape, there.batch, there.dtype) == (here.shape, here.batch, here.dtype)
    for image in np.split(IMAGES, 3):
        (expected, _), (received, seconds) = here.call(image), there.call(image)
        assert received.keys() == expected.keys() and seconds > 0
        np.testing.assert_array_equal(received["logits"], expected["logits"])


def test_the_process_ends_with_the_file(foreign: Path) -> None:
    file = IsolatedFile(foreign, 1)
    process = file._process
    assert process.poll() is None
    del file
    gc.collect()
    assert process.returncode == 0


def test_after_an_error_or_a_hang_the_file_still_answers(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = export.runner(flat(tmp_path / "file.tflite", 1, 12))
    image = np.ones((1, 2, 2, 3), np.float32)
    with pytest.raises(ValueError, match=r"file\.tflite cannot be run: ."):
        run(np.concatenate([image, image]))
    assert run(image).shape == (1, 12)
    hanging = IsolatedFile(foreign, 1)
    hanging._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(litert_file, "TIMEOUT", 0.1)
    for said in ("did not answer in 0.1 seconds", "LiteRT crashed (Killed)"):
        with pytest.raises(ValueError, match=re.escape(said)):
            hanging.call(IMAGES)


def test_a_file_that_states_a_tensor_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    ops = Operators(Builder())
    image = ops.builder.input("image", (1, 2, 2, 3))
    ops.builder.signature({"image": image}, {"logits": ops.reshape(image, (1, 40_000, 40_000, 3), "large")})
    ops.builder.write(tmp_path / "large.tflite")
    with pytest.raises(ValueError, match=r"large\.tflite cannot be run: "):
        export.runner(tmp_path / "large.tflite")(np.zeros((1, 2, 2, 3), np.float32))


def test_outputs_that_are_no_numbers_are_named() -> None:
    with pytest.raises(ValueError, match=r"the outputs \['names'\] are not numbers"):
        litert_file._send(None, {"names": np.array(["a"])})


def test_a_file_for_any_number_of_images_takes_many(foreign: Path) -> None:
    images = np.zeros((300, 32, 32, 3), np.float32)  # 3.5 MB are more than a pipe holds
    assert load_exported(foreign).call(images)["logits"].shape == (300, 5)
