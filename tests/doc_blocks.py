"""The code in the documentation, and running it as a reader would: elsewhere, offline, in a process of its own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = "# needs "  # how a block begins that asks for the internet, weights or a device


def blocks(text: str, language: str) -> list[str]:
    """The blocks of a page in one language ("" for commands and what they print)."""
    return [code for name, code in BLOCK.findall(text) if name == language]


def script(text: str) -> str:
    """All of a page's Python that needs nothing, on the lines where the page has it: a traceback names them."""
    lines = [""] * len(text.splitlines())
    for match in BLOCK.finditer(text):
        if match[1] == "python" and not match[2].startswith(NEEDS):
            first = text.count("\n", 0, match.start(2))
            lines[first : first + match[2].count("\n")] = match[2].splitlines()
    return "\n".join(lines)


def commands(text: str) -> list[list[str]]:
    """The `keras-vit` commands of a page, as arguments; what only stands for more ("...") is no command."""
    joined = "\n".join(blocks(text, "")).replace("\\\n", " ")
    found = re.findall(r"^(?:\w*\$ +)?(?:TF_CONFIG='.*?' +)?keras-vit +(.*)$", joined, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


def run(code: str, folder: Path, *, name: str = "page", timeout: float = 120) -> str:
    """Runs Python offline in a folder, with our cache there too; returns what it prints.

    Raises:
        AssertionError: it fails, with the end of what it says.
    """
    file = folder / f"{name}.py"
    file.write_text(code, encoding="utf-8")
    offline = {"KERAS_VIT_OFFLINE": "1", "KERAS_VIT_CACHE": str(folder / "cache"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **offline},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
