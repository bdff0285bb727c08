"""Data as YAML for people: blocks, lists, and strings quoted so that any parser reads the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""What YAML 1.1 takes for something else than text."""


def yaml_text(value: Mapping[str, Any]) -> str:
    """A mapping of strings, whole numbers, switches, lists and mappings as a YAML document."""
    return "\n".join(_mapping(value)) + "\n"


def _mapping(value: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for key, inner in value.items():
        name = key if _PLAIN.match(key) and key.lower() not in _WORDS else _quoted(key)
        if isinstance(inner, (Mapping, list)) and inner:
            lines.append(f"{name}:")
            lines += ["  " + line if line else "" for line in _block(inner)]
        elif isinstance(inner, str) and _is_block(inner):
            lines.append(f"{name}: |")
            lines += [f"  {line}".rstrip() for line in inner.rstrip("\n").split("\n")]
        else:
            lines.append(f"{name}: {_scalar(inner)}")
    return lines


def _block(value: Any) -> list[str]:  # noqa: ANN401 - any YAML value
    if isinstance(value, Mapping):
        return _mapping(value)
    lines: list[str] = []
    for item in value:
        inner = _block(item) if isinstance(item, (Mapping, list)) and item else [_scalar(item)]
        lines += [f"- {inner[0]}", *(f"  {line}" if line else "" for line in inner[1:])]
    return lines


def _scalar(value: Any) -> str:  # noqa: ANN401 - any YAML value
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """Double quotes: JSON's string is YAML's, but for characters that YAML wants escaped."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in quoted)


def _is_block(text: str) -> bool:
    """Whether text of several lines can stand as it is, and come back the same."""
    lines = text.split("\n")
    return (
        text.endswith("\n")
        and len(lines) > 2
        and not lines[0].startswith(" ")
        and all(line and line.isprintable() and line == line.rstrip() for line in lines[:-1])
    )
