"""A short run of tests/fuzz.py: a damaged checkpoint is a CheckpointError or a model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import fuzz
import official_readers
from keras_vit import converters
from keras_vit.converters.containers import open_container


@pytest.mark.parametrize("format", fuzz.SEEDS)
def test_no_damage_to_a_checkpoint_brings_out_another_error(format: str, tmp_path: Path) -> None:
    outcomes = dict(fuzz.fuzz(format, 100, seed=0, folder=tmp_path))
    strange = {seed: outcome for seed, outcome in outcomes.items() if outcome not in ("read", "refused")}
    assert not strange
    # Both outcomes must occur, or the test would show nothing.
    assert min(Counter(outcomes.values()).values()) > 10


def test_every_format_with_a_file_of_its_own_is_fuzzed(tmp_path: Path) -> None:
    assert set(fuzz.SEEDS) <= set(converters.formats())
    for format in fuzz.SEEDS:
        for seed in fuzz.valid(format):
            assert fuzz.outcome(seed.write(tmp_path), whole=True) == "read"


def test_an_error_that_is_not_ours_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(converters, "read_config", broken)
    assert "KeyError: 'oops'" in fuzz.outcome(tmp_path, whole=False)


@pytest.mark.parametrize("count", [100, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", official_readers.FORMATS)
def test_what_the_official_reader_refuses_is_refused(format: str, count: int, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_bytes(official_readers.FORMATS[format][0])
    with open_container(good) as container:
        assert container.headers.keys() == official_readers.TENSORS.keys()
    assert official_readers.difference(format, good) is None
    found = official_readers.differences(format, count, seed=0, folder=tmp_path)
    assert not {seed: text for seed, text in found if text is not None}
