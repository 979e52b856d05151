"""Find the code in the documentation, and run it as a reader would: in another folder and offline."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import warnings
from pathlib import Path

import keras
import pytest

import map_folders
import photo_folder
from places import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = "# needs "  # a block that begins so needs the internet, weights or a device, and is not run
FILE = re.compile(r"# ([\w-]+\.toml)\n")  # a block that begins so is a file of that name


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


def first_lines() -> str:
    """Return README's first block of Python that uses the embedded model: the lines that `make test-wheel` runs.

    Raises:
        ValueError: there is none.
    """
    for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python"):
        if '"digits"' in block and not block.startswith(NEEDS):
            return block
    raise ValueError('README.md has no block of Python with zoo.load("digits"), which is what a newcomer can run')


def run(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, after: str = "") -> str:
    """Run the Python of a page from top to bottom, in a folder and offline, with its files; return what it prints.

    Args:
        text: the page.
        folder: is made, with the photos and the masks that the page uses.
        monkeypatch: restores the working folder and the environment.
        after: more Python, for after the page.
    """
    folder.mkdir(exist_ok=True)
    if '"photos"' in text:
        photo_folder.make(folder / "photos")
    if '"yard"' in text:
        map_folders.make(folder / "yard")
    for name, content in {"page.py": f"{script(text)}\n{after}", **files(text)}.items():
        (folder / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    monkeypatch.setenv("KERAS_VIT_CACHE", str(folder / "cache"))
    policy = keras.config.dtype_policy()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
            warnings.simplefilter("default")  # as for a reader; in tests a warning is an error
            runpy.run_path("page.py", run_name="__main__")
    finally:
        keras.config.set_dtype_policy(policy)
    return printed.getvalue()


if __name__ == "__main__":
    print(first_lines(), end="")
