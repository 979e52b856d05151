"""Find the code in the documentation, and run it as a reader would: in another folder and offline."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import map_folders
import photo_folder

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = "# needs "  # a block that begins so needs the internet, weights or a device, and is not run
FILE = re.compile(r"# ([\w-]+\.toml)\n")  # a block that begins so is a file of that name

# Runs pages one after the other, each in its own folder and namespace, in one process: importing TensorFlow is slow.
DRIVER = """
import os, runpy, sys, traceback
for folder in sys.argv[1:]:
    os.chdir(folder)
    failed = ""
    try:
        runpy.run_path("page.py", run_name="__main__")
    except BaseException:
        failed = traceback.format_exc()
    with open("outcome", "w", encoding="utf-8") as file:
        file.write(failed)
"""


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of a page in one language ("" for commands and their output)."""
    return [code for name, code in BLOCK.findall(text) if name == language]


def script(text: str) -> str:
    """Return the Python of a page that needs nothing, on the same lines as on the page, so that tracebacks fit."""
    lines = [""] * len(text.splitlines())
    for match in BLOCK.finditer(text):
        if match[1] == "python" and not match[2].startswith(NEEDS):
            first = text.count("\n", 0, match.start(2))
            lines[first : first + match[2].count("\n")] = match[2].splitlines()
    return "\n".join(lines)


def shown_outputs(text: str) -> list[tuple[str, str]]:
    """Return each block of Python that a block of `text` follows directly, with that block: what it prints."""
    found = list(BLOCK.finditer(text))
    pairs = [
        (first, second)
        for first, second in zip(found, found[1:], strict=False)
        if not text[first.end() : second.start()].strip()
    ]
    return [(first[2], second[2]) for first, second in pairs if (first[1], second[1]) == ("python", "text")]


def files(text: str) -> dict[str, str]:
    """Return the blocks of TOML that the page gives a file name, by name."""
    named = [(FILE.match(code), code) for code in blocks(text, "toml")]
    return {name[1]: code for name, code in named if name}


def commands(text: str) -> list[list[str]]:
    """Return the `keras-vit` commands of a page, as lists of arguments."""
    joined = "\n".join(blocks(text, "")).replace("\\\n", " ")
    found = re.findall(r"^(?:\w*\$ +)?(?:\w+=(?:'.*?'|\S+) +)*keras-vit +(.*)$", joined, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


def run(code: str, folder: Path, *, name: str = "page", timeout: float = 120) -> str:
    """Run Python offline in a folder, with the cache there too, and return its output.

    Raises:
        AssertionError: it fails; the message is the end of its standard error.
    """
    file = folder / f"{name}.py"
    file.write_text(code, encoding="utf-8")
    done = _python([file.name], folder, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_pages(pages: Sequence[Path], folder: Path, *, timeout: float = 600) -> dict[str, str]:
    """Run the Python of pages in one process; return the traceback of each by its stem, "" if it succeeded."""
    places = [folder / page.stem for page in pages]
    for page, place in zip(pages, places, strict=True):
        text = page.read_text(encoding="utf-8")
        place.mkdir()
        if '"photos"' in text:
            photo_folder.make(place / "photos")
        if '"yard"' in text:
            map_folders.make(place / "yard")
        for name, content in {"page.py": script(text), **files(text)}.items():
            (place / name).write_text(content, encoding="utf-8")
    done = _python(["-c", DRIVER, *map(str, places)], folder, timeout=timeout)
    outcomes = {place.name: place / "outcome" for place in places}
    lost = f"The process ended before this page did: {done.stderr[-2000:]}"
    return {name: path.read_text(encoding="utf-8") if path.exists() else lost for name, path in outcomes.items()}


def _python(arguments: list[str], folder: Path, *, timeout: float) -> subprocess.CompletedProcess[str]:
    offline = {"KERAS_VIT_OFFLINE": "1", "KERAS_VIT_CACHE": str(folder / "cache"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **offline},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
