"""A run that is stopped, killed and damaged continues and ends with the weights of an undisturbed run."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import killed_runs

pytestmark = pytest.mark.full


def test_stopped_killed_and_damaged_it_ends_the_same_bit_for_bit(tmp_path: Path) -> None:
    # One folder: each start continues from the previous one's checkpoint.
    folder, alone = tmp_path / "run", tmp_path / "alone"
    killed_runs.train(alone)
    sigterm_saves_and_ends_in_order(folder)
    killed_runs.killed(folder, 22)
    assert not (folder / "model.keras").exists()
    newest = max((folder / "checkpoints").glob("step-????????"))
    data = newest / "variables.data-00000-of-00001"
    broken = bytearray(data.read_bytes())
    broken[len(broken) // 2] ^= 1
    data.write_bytes(broken)
    with pytest.warns(UserWarning, match=f"{newest} is damaged"):
        killed_runs.train(folder)
    expected, found = killed_runs.weights(alone), killed_runs.weights(folder)
    assert expected.keys() == found.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    steps = [[json.loads(line)["step"] for line in killed_runs.logged(each)] for each in (alone, folder)]
    assert steps[0] == steps[1]


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
