"""Training checkpoints: the newest whole one is restored, a full disk harms none, and one process has the folder."""

import contextlib
import os
import re
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit._util.checks import as_path
from keras_vit.errors import CheckpointError
from keras_vit.train.checkpoints import MANIFEST, Checkpoints, exclusive, plain_path

FACTS: dict[str, dict[str, Any]] = {
    "recipe": {"learning_rate": 0.03, "keep": 3, "config": {"dropout_rate": 0.1}},
    "model": {"size": (24, 24), "notes": "?" * 900},
}
INDEX, DATA = "variables.index", "variables.data-00000-of-00001"


def variables() -> dict[str, tf.Variable]:
    """Return one variable of each kind that training has, with names that need escaping."""
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        mirrored = tf.Variable(tf.zeros((4, 4)))
    return {
        "model/block_0/mlp/kernel": mirrored,
        "mu/block_0/kernel.bf16": tf.Variable(tf.zeros((5, 3), tf.bfloat16)),
        "ema/größe %s": tf.Variable(tf.zeros((2,), tf.float16)),
        "iterations": tf.Variable(0, dtype=tf.int64),
        "flag": tf.Variable(False),
        "nothing": tf.Variable(tf.zeros((0, 3))),
    }


def fill(held: dict[str, tf.Variable], step: int) -> None:
    """Set values that differ between steps in every tensor; in some tensors with NaN and infinity."""
    numbers = np.random.default_rng(step)
    for name, variable in held.items():
        values = numbers.normal(size=variable.shape) * 100
        if values.size > 3:
            values.flat[:3] = np.nan, -0.0, np.inf
        variable.assign(tf.cast(step if name == "iterations" else values, variable.dtype))


def bits(held: dict[str, tf.Variable]) -> dict[str, bytes]:
    return {name: variable.numpy().tobytes() for name, variable in held.items()}


def bits_at(step: int) -> dict[str, bytes]:
    held = variables()
    fill(held, step)
    return bits(held)


def opened(folder: Path | str, **options: Any) -> tuple[Checkpoints, dict[str, tf.Variable]]:
    held = variables()
    return Checkpoints(folder, held, **{"facts": FACTS, **options}), held


def saved(folder: Path | str, *steps: int, **options: Any) -> tuple[Checkpoints, dict[str, tf.Variable]]:
    saves, held = opened(folder, **options)
    for step in steps:
        fill(held, step)
        saves.save(step)
    return saves, held


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with the steps 10, 20 and 30; tests copy it."""
    folder = tmp_path_factory.mktemp("three")
    saved(folder, 10, 20, 30)
    return folder


@pytest.fixture
def run(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "run"))


def at(run: Path, step: int, file: str = "") -> Path:
    return run / f"step-{step:08d}" / file


def test_everything_comes_back_bit_for_bit_in_whatever_order_it_is_named(run: Path) -> None:
    held = dict(reversed(variables().items()))
    assert Checkpoints(run, held, facts=FACTS).restore() == 30
    assert bits(held) == bits_at(30)
    saves, held = opened(run.parent / "new")  # an empty folder is a fresh start
    assert (saves.restore(), saves.steps()) == (None, [])
    assert bits(held) == bits(variables())


def test_the_newest_stay_and_the_step_just_saved_is_not_written_again(tmp_path: Path) -> None:
    saves, held = saved(tmp_path, 5, 10, 15, 20, keep=2)
    assert saves.steps() == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]
    before = at(tmp_path, 20, DATA).stat()
    fill(held, 99)
    saves.save(20)
    assert at(tmp_path, 20, DATA).stat() == before
    with pytest.raises(ValueError, match=r"takes \[ in a path for a pattern"):
        opened(tmp_path / "run[1]")


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, tuple[Callable[[Path], object], int, list[str]]] = {
    "data truncated": (lambda run: truncate(at(run, 30, DATA)), 20, ["Read less bytes"]),
    "data missing": (lambda run: at(run, 30, DATA).unlink(), 20, ["No such file"]),
    "data flipped": (lambda run: flip(at(run, 30, DATA), 0.5), 20, ["Checksum does not match"]),
    "index truncated": (lambda run: truncate(at(run, 30, INDEX)), 20, ["bad magic number"]),
    "manifest truncated": (lambda run: truncate(at(run, 30, MANIFEST)), 20, ["Unterminated|Expecting"]),
    "two damaged": (
        lambda run: (truncate(at(run, 30, DATA)), flip(at(run, 20, INDEX), 0.2)),
        10,
        ["Read less bytes", "checksum mismatch"],
    ),
    "an older one half deleted": (lambda run: at(run, 10, DATA).unlink(), 30, []),
    # The manifest is written last: this is what a kill leaves.
    "the newest unfinished": (lambda run: at(run, 30, MANIFEST).unlink(), 20, []),
    "unrelated files": (lambda run: [(run / name).write_text("?") for name in ("checkpoint", "step-1")], 30, []),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_newest_whole_checkpoint_is_used_and_training_goes_on_from_there(run: Path, name: str) -> None:
    damage, expected, reasons = DAMAGES[name]
    damage(run)
    saves, held = opened(run, keep=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert saves.restore() == expected
    assert bits(held) == bits_at(expected)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == len(reasons)
    for step, message, reason in zip(reversed(saves.steps()), messages, reasons, strict=False):
        assert re.search(rf"step-{step:08d} is damaged: .*({reason}).*from step {expected}", message)
    for step in range(expected + 10, 51, 10):
        fill(held, step)
        saves.save(step)
    with warnings.catch_warnings(action="error"):  # the damaged ones are gone
        again, held = opened(run)
        assert (again.steps(), again.restore()) == ([40, 50], 50)
    assert bits(held) == bits_at(50)


def test_damaged_ones_do_not_take_the_place_of_whole_ones(run: Path) -> None:
    truncate(at(run, 30, DATA))
    truncate(at(run, 20, DATA))
    saves, _ = opened(run, keep=2)
    with pytest.warns(UserWarning, match="from step 10, the one before"):
        saves.restore()
    saves.save(15)
    assert saves.steps() == [10, 15, 20, 30]  # later checkpoints are not touched
    truncate(at(run, 15, DATA))
    truncate(at(run, 10, DATA))
    with pytest.raises(CheckpointError, match="No checkpoint can be used") as error:
        opened(run)[0].restore()
    assert all(f"step-{step:08d} is damaged: Read less bytes" in str(error.value) for step in (10, 15, 20, 30))


def test_a_run_with_other_facts_or_variables_is_refused_by_every_name(run: Path) -> None:
    other = {
        "recipe": {"learning_rate": 0.01, "keep": 5, "config": {}, "seed": 0},
        "model": FACTS["model"] | {"size": (24, 32)},
    }
    saves, held = opened(run, facts=other, may_differ={"recipe.keep"})
    with pytest.raises(CheckpointError, match="Use another folder, or the settings of that run") as error:
        saves.restore()
    assert [line.partition(":")[0].strip() for line in str(error.value).splitlines()[1:-1]] == [
        *("model.size", "recipe.config", "recipe.config.dropout_rate", "recipe.learning_rate", "recipe.seed")
    ]
    assert "recipe.learning_rate: 0.03 then, 0.01 now" in str(error.value)
    assert bits(held) == bits(variables())
    assert opened(run, facts=other, may_differ={"recipe", "model.size"})[0].restore() == 30
    del held["flag"]
    held |= {"more": tf.Variable(0.0), "nothing": tf.Variable(tf.ones((1, 3))), "iterations": tf.Variable(7)}
    with pytest.raises(CheckpointError, match="Use another folder, or the model and optimizer") as error:
        Checkpoints(run, held, facts=FACTS).restore()
    assert [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:-1]] == [
        *("flag", "iterations", "more", "nothing")
    ]
    assert held["iterations"].numpy() == 7


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Simulate a full disk for this process: files cannot grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_harms_no_earlier_checkpoint(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    saves, held = opened(run)
    saves.restore()
    for size in (0, 600, 900):  # too small for: everything, data, manifest
        with files_up_to(size), pytest.raises(OSError, match="Step 40 cannot be saved in .*/run, where the checkp"):
            saves.save(40)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        assert saves.steps() == [10, 20, 30]
    fill(held, 40)
    saves.save(40)  # when there is space again
    assert saves.steps() == [20, 30, 40]


def test_a_bucket_works_as_a_folder() -> None:
    # TensorFlow's in-memory file system uses the same code as gs://: no renaming. It has no lock.
    with exclusive("ram://bucket/run"), exclusive("ram://bucket/run"):
        saves, _ = saved("ram://bucket/run", 10, 20, 30, 40)
    assert saves.steps() == [20, 30, 40]
    with tf.io.gfile.GFile(f"ram://bucket/run/step-00000040/{INDEX}", "wb") as file:
        file.write(b"?")
    saves, held = opened("ram://bucket/run")
    with pytest.warns(UserWarning, match=r"ram://bucket/run/step-00000040 is damaged: .*from step 30"):
        assert saves.restore() == 30
    assert bits(held) == bits_at(30)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    refused = pytest.raises(BlockingIOError, match=f"Another process trains in this folder: {tmp_path}")
    with exclusive(str(tmp_path)), refused, exclusive(str(tmp_path)):
        pass
    (tmp_path / ".lock").unlink(missing_ok=True)
    (tmp_path / ".lock").mkdir()
    with pytest.raises(OSError, match=r"/\.lock cannot be locked .*remove what is there"), exclusive(str(tmp_path)):
        pass


def test_the_home_directory_is_that_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plain_path("~/runs/mine/") == f"{tmp_path}/runs/mine" == as_path("~/runs/mine", "path")
    assert plain_path("gs://bucket/~") == "gs://bucket/~"
