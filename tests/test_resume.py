"""A run that is killed or stopped continues and ends with the weights of an undisturbed run."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import killed_runs
from keras_vit import train
from keras_vit.errors import CheckpointError
from tiny_models import tiny

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    killed_runs.train(folder)
    return folder


def assert_same_end(folder: Path, undisturbed: Path) -> None:
    expected, found = killed_runs.weights(undisturbed), killed_runs.weights(folder)
    assert expected.keys() == found.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    steps = [json.loads(line)["step"] for line in killed_runs.logged(folder)]
    assert steps == [json.loads(line)["step"] for line in killed_runs.logged(undisturbed)]


def test_stopped_killed_and_damaged_it_ends_the_same_bit_for_bit(tmp_path: Path, undisturbed: Path) -> None:
    # One folder: each start continues from the previous one's checkpoint.
    folder = tmp_path / "run"
    sigterm_saves_and_ends_in_order(folder)
    killed_runs.killed(folder, 25, 0.0)
    assert not (folder / "model.keras").exists()
    newest = max((folder / "checkpoints").glob("step-????????"))
    data = newest / "variables.data-00000-of-00001"
    broken = bytearray(data.read_bytes())
    broken[len(broken) // 2] ^= 1
    data.write_bytes(broken)
    with pytest.warns(UserWarning, match=f"{newest} is damaged"):
        killed_runs.train(folder)
    assert_same_end(folder, undisturbed)


def sigterm_saves_and_ends_in_order(folder: Path) -> None:
    process = killed_runs.started(folder)
    while len(killed_runs.logged(folder)) < 7:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0
    assert not (folder / "model.keras").exists()
    last = json.loads(killed_runs.logged(folder)[-1])["step"]
    assert (folder / "checkpoints" / f"step-{last:08d}").is_dir()


def test_another_recipe_in_the_same_folder_is_refused(undisturbed: Path) -> None:
    other = train.recipe("digits", **killed_runs.FIELDS | {"seed": 5, "log_steps": 4})
    with pytest.raises(CheckpointError, match=r"recipe\.seed") as caught:
        train.run(other, model=tiny(), data="digits", out=undisturbed, progress=False)
    assert "log_steps" not in str(caught.value)


def test_a_finished_run_is_not_trained_again(undisturbed: Path) -> None:
    recipe = train.recipe("digits", **killed_runs.FIELDS)
    before = killed_runs.logged(undisturbed)
    # Another number of devices may need another number of micro-batches.
    result = train.run(recipe.replace(accumulation=4), model=tiny(), data="digits", out=undisturbed, progress=False)
    assert (result.steps, result.stopped) == (killed_runs.STEPS, False)
    assert killed_runs.logged(undisturbed) == before
    for v in result.model.weights:
        np.testing.assert_array_equal(v.numpy(), killed_runs.weights(undisturbed)[v.path])
