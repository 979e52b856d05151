"""A short run of each area of tests/adversary.py, and a long one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import adversary
from keras_vit.batch import compute, images
from marks import full_except

SHORT = {"folders": 40, "lines": 12, "records": 8, "reports": 1}
SEEDS = {"folders": 0, "lines": 200, "records": 300, "reports": 400}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what the adversary sets for speed; a busy machine is no hang."""
    monkeypatch.setattr(adversary, "SECONDS", 600)
    for module, name in ((compute, "Worker"), (images, "PAUSE")):
        monkeypatch.setattr(module, name, getattr(module, name))


LONG = [pytest.param(area, most, marks=pytest.mark.slow) for area, (_, most) in adversary.AREAS.items()]


@pytest.mark.parametrize(("area", "count"), [*full_except([("folders", 40), ("records", 8)], SHORT.items()), *LONG])
def test_every_case_is_read_or_refused_with_one_error(area: str, count: int, tmp_path: Path) -> None:
    found = dict(adversary.outcomes(area, count, SEEDS[area], tmp_path))
    assert not {seed: text for seed, text in found.items() if text not in ("accepted", "refused")}
    if area == "folders":
        assert min(Counter(found.values()).values(), default=0) > 0 and len(set(found.values())) == 2


def test_an_error_that_is_not_ours_a_hang_and_a_long_message_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: BaseException) -> adversary.Case:
        def case() -> str | None:
            raise error

        return case

    assert "KeyError" in adversary.outcome(raising(KeyError("x")))
    assert "UnicodeDecodeError" in adversary.outcome(lambda: b"\xff".decode())  # type: ignore[arg-type]
    assert "more than" in adversary.outcome(raising(adversary.Hang()))
    assert "a message of 5000 letters" in adversary.outcome(raising(ValueError("x" * 5000)))
    assert adversary.outcome(raising(ValueError("a reason"))) == "refused"
    assert adversary.outcome(lambda: "a wrong row") == "a wrong row"
