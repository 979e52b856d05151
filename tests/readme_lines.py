"""Print README's first Python block that runs offline; `make test-wheel` runs it with only the wheel installed."""

from __future__ import annotations

import doc_blocks


def lines() -> str:
    """Return README's first block of Python that uses the embedded model.

    Raises:
        ValueError: there is none.
    """
    readme = (doc_blocks.ROOT / "README.md").read_text(encoding="utf-8")
    for block in doc_blocks.blocks(readme, "python"):
        if '"digits"' in block and not block.startswith(doc_blocks.NEEDS):
            return block
    raise ValueError('README.md has no block of Python with zoo.load("digits"), which is what a newcomer can run')


if __name__ == "__main__":
    print(lines(), end="")
