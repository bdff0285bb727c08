"""A report page taken apart: its elements, its text, and the numbers of its figures."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

_EMPTY = {"meta", "link", "br", "img", "input", "hr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    """All text inside."""


@dataclass
class PageParts(HTMLParser):
    """Feed it the page."""

    elements: list[Element] = field(default_factory=list)
    _open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in _EMPTY:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def by_id(self, name: str) -> Element:
        return next(e for e in self.elements if e.attributes.get("id") == name)

    def numbers(self) -> Any:
        """What the figures are drawn of."""
        return json.loads(gzip.decompress(base64.b64decode(self.by_id("data").text)))


def parts_of(html: str) -> PageParts:
    parts = PageParts()
    parts.feed(html)
    parts.close()
    return parts
