"""Data as YAML for people: keys in their own order, text of several lines as a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Indents lists below their key, and writes text of several lines as it is read."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401 - as PyYAML has it
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_text(value: Mapping[str, Any]) -> str:
    """A mapping of strings, whole numbers, switches, lists and mappings as a YAML document."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)
