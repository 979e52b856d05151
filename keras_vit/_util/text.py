"""Nearest names, readable sizes and install commands for messages and tables."""

import difflib
import re
from collections.abc import Iterable, Sequence

DISTRIBUTION = "keras-vit-zoo"  # on a package index; `keras-vit` there is another project
# TensorFlow puts these around a reason.
GRAPH_NAMES = re.compile(
    r"Error in user-defined function passed to \S+ transformation with iterator: \S+ "
    r"|\{\{.*?\}\} ?|\s*\[Op:[^]]*\](?: name:\s?\S*)?"
    r"|Graph execution error:\s+(?:Detected at .*\n(?:\s*(?:File .*)?\n)*)?"
)


def nearest(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Find at most `count` known names with a similarity of at least `cutoff` (0..1), the best first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)


def suggestion(name: str, known: Iterable[str]) -> str:
    """End an error about an unknown name: "the nearest is 'digits'", or all known names."""
    known = list(known)
    found = nearest(name, known)
    return f"the nearest is {found[0]!r}" if found else f"known are {sorted(known)}"


def abbreviated(names: Sequence[str], count: int = 5) -> str:
    """List the first names and count the others; bytes of file names that are not valid UTF-8 are escaped."""
    text = ", ".join(names[:count]) + (f" and {len(names) - count:,} more" if len(names) > count else "")
    return escaped(text)


def text_lines(data: bytes, name: str) -> list[str]:
    """Split a text file in UTF-8 into its lines, without space around them, nor empty lines at the end.

    `str.splitlines` also splits at form feeds, U+2028 and others, which a name of a class may have.

    Raises:
        ValueError: the file, of this name, is in another encoding.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name} must be saved as UTF-8. Received: other bytes in line {line}") from None
    lines = [line.strip() for line in re.split(r"\r\n|\r|\n", text.rstrip())]
    return lines if text.strip() else []


def error_reason(text: str) -> str:
    """Shorten a message of TensorFlow to its first line, without the names of functions and operations."""
    lines = (line.strip() for line in GRAPH_NAMES.sub("", text).splitlines())
    return next(filter(None, lines), "without a reason")


def escaped(text: str) -> str:
    """Escape the bytes of file names that are not valid UTF-8, for messages and reports."""
    return text.encode(errors="backslashreplace").decode()


def printable(text: str, *, keep: str = "") -> str:
    """Escape what a terminal would not print as text, such as the codes that clear it, except the characters `keep`."""
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def byte_size(size: float) -> str:
    """Format a number of bytes with a binary unit and about three digits, such as "330 MiB"."""
    return scaled(size, 1024, (" bytes", " KiB", " MiB", " GiB"))


def scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    """Format a number from 0 with about three digits and a unit; each unit is `base` times the one before."""
    power = 0
    while number >= 1000 * base**power and power < len(units) - 1:
        power += 1
    value = number / base**power
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}{units[power]}"


def install_command(extra: str) -> str:
    """Command that installs the packages of one of the extras in setup.cfg.

    >>> install_command("litert")
    'pip install "keras-vit-zoo[litert]"'
    """
    return f'pip install "{DISTRIBUTION}[{extra}]"'
