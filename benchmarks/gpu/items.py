"""Every item, from items.txt: its question, its function, and what is expected of its figures."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import cast

from benchmarks.gpu.bench import Expect, Item, Kind, Value

_KINDS = ("must", "goal", "published")


def _value(text: str) -> Value:
    try:
        found: Value = ast.literal_eval(text)
    except ValueError:
        return text
    return found


def _expect(line: str) -> Expect:
    head, words, source = (part.strip() for part in line.split(" | "))
    kind, figure, expected, *unit = head.split()
    assert kind in _KINDS, line
    equals = _value(expected[1:]) if expected.startswith("=") else None
    low, _, high = ("", "", "") if equals is not None else expected.partition("..")
    return Expect(
        figure=figure,
        words=words,
        source=source,
        kind=cast(Kind, kind),
        unit=" ".join(unit),
        equals=equals,
        low=ast.literal_eval(low or "None"),
        high=ast.literal_eval(high or "None"),
    )


def _item(lines: list[str]) -> Item:
    head, question = lines[0].split(" | ")
    name, function, seconds, *variables = head.split()
    return Item(
        name=name, question=question, function=f"benchmarks.gpu.{function}", limit_s=float(seconds),
        expects=tuple(map(_expect, lines[1:])), environment=dict(v.split("=") for v in variables),
    )  # fmt: skip


def _read() -> tuple[Item, ...]:
    items: list[list[str]] = []
    for line in Path(__file__).with_name("items.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            items[-1].append(line)
        elif line and not line.startswith("#"):
            items.append([line])
    return tuple(map(_item, items))


ITEMS = _read()
