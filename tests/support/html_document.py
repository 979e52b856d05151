"""Parse an HTML file for a test."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"br", "hr", "img", "input", "link", "meta"}


class Document(HTMLParser):
    """The elements and the text of a page; an assertion fails if tags do not match."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        """Return the attributes of all elements with a tag."""
        return [attributes for name, attributes in self.tags if name == tag]

    def values(self, attribute: str) -> list[str]:
        """Return the values of an attribute, of all elements that have it."""
        return [attributes[attribute] for _, attributes in self.tags if attributes.get(attribute)]

    @property
    def text(self) -> str:
        """Return the text without markup, with single spaces."""
        return re.sub(r"\s+", " ", " ".join(self.words))
