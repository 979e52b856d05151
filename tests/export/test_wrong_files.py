"""Verification refuses files that are wrong in any way whose effect is above the mode's own error."""

from __future__ import annotations

import pytest

from wrong_files import KINDS, seen_faults

pytest.importorskip("litert_quantizer")

# The largest error, as a share of the outputs, of an honest file of each mode: docs/decisions.md.
OWN = {"none": 4e-6, "float16": 1e-3, "dynamic": 0.05, "int8": 0.045, "int16x8": 0.045, "int4": 0.14}
CASES = [(name, mode) for name, kind in KINDS.items() for mode in kind.modes]


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_fault_above_three_times_the_modes_error_is_refused(name: str, mode: str) -> None:
    right, *wrong = seen_faults(name, mode)
    assert not right.refused and right.own <= OWN[mode]
    large = [fault for fault in wrong if fault.effect > 3 * OWN[mode]]
    assert large
    assert [fault for fault in large if not fault.refused] == []
