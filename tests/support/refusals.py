"""Check many invalid arguments in one test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

REFUSALS = (ValueError, TypeError, OSError)


def unrefused(call: Callable[..., Any], cases: Iterable[tuple[dict[str, Any], str]]) -> dict[str, str]:
    """Return each case that a call does not refuse with this part of a message, and what came instead.

    Args:
        call: function that is called with the keyword arguments of a case.
        cases: keyword arguments, and the part of the message that matters, such as the name of a field.
    """
    found = {}
    for arguments, part in cases:
        try:
            call(**arguments)
        except REFUSALS as error:
            if part in str(error):
                continue
            found[repr(arguments)] = f"{part!r} is not in: {error}"
        else:
            found[repr(arguments)] = "accepted"
    return found
