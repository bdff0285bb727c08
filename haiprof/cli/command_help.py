"""The help of a command: its docstring in paragraphs that fit the terminal, and no `<bool>`."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

_MARGIN = 2
_EXAMPLE = "  "
_REMARK = re.compile(r"(?<=\S) {2,}")
"""What stands between an example and its remark."""


def help_paragraphs(docstring: str, width: int) -> str:
    """A docstring as help: lines of a paragraph joined, examples below each other.

    A remark that has no room beside its example goes below it.

    Args:
        docstring: Of a command; paragraphs that begin with two spaces are examples.
        width: Columns of the terminal.
    """
    found: list[str] = []
    was_example = False
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        is_example = paragraph.startswith(_EXAMPLE)
        if not is_example:
            text = " ".join(paragraph.split())
        else:
            lines = (_example(line, width - _MARGIN) for line in paragraph.splitlines())
            text = "\n".join(lines)
        if is_example and was_example:
            found[-1] += f"\n{text}"
        else:
            found.append(text)
        was_example = is_example
    return "\n\n".join(found)


def _example(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    words, *remark = _REMARK.split(line.strip(), maxsplit=1)
    indent = 3 * _EXAMPLE
    shown = textwrap.wrap(
        words, width - 2, initial_indent=_EXAMPLE, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    shown = [*(f"{part} \\" for part in shown[:-1]), shown[-1]]  # a shell takes them as one
    below = [wrapped for text in remark for wrapped in textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent)]  # fmt: skip
    return "\n".join([*shown, *below])


def name_no_type_of_switches(command: Any) -> None:  # noqa: ANN401 - typer's, or click's
    """Switches take no value: typer 0.29 writes `<bool>` behind them.

    Args:
        command: Typer's command, or the group of all.
    """
    import typer

    for each in (command, *getattr(command, "commands", {}).values()):
        for option in (*each.params, each.get_help_option(typer.Context(each))):
            if getattr(option, "is_flag", False) and option.metavar is None:
                option.metavar = ""
