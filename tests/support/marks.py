"""Parameters of tests, of which only some run in `make test` and all others in `make test-full`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def full_except(quick: Collection[Any], cases: Iterable[Any], *, marks: Any = pytest.mark.full) -> list[Any]:
    """Return the parameters of a test, with a mark on all but the quick ones. A tuple has several arguments."""
    cases = list(cases)
    assert set(quick) <= set(cases), f"no such case: {sorted(set(quick) - set(cases))}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else marks)
        for case in cases
    ]
