"""The output of commands: views for people, `--json`, hints and errors."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from haiprof.base.errors import HaiprofError
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_DEBUG
from haiprof.show.terminal import SafeConsole

MIN_WIDTH, MAX_WIDTH = 60, 200
# json.dumps does not escape them: C1 controls, marks of direction, unpaired surrogates.
_UNSEEN = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
PIPE_WIDTH = 100  # columns where the output is no terminal

View = Callable[[int], RenderableType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a command's result and its hints go."""

    json: bool = False  # Data as JSON to stdout, and nothing else there
    markdown: bool = False  # Markdown to stdout: a result's own, or its view as it is in a pipe
    quiet: bool = False  # Neither view nor hints

    def show(self, view: View, data: object, markdown: Callable[[], str] | None = None) -> None:
        """Shows one result as a view, as JSON, or as Markdown: its own, else the view as text."""
        if self.json:
            sys.stdout.write(json_text(data) + "\n")
        elif self.markdown:
            sys.stdout.write(_block(view) if markdown is None else markdown())
        elif not self.quiet:
            console = stdout_console()
            console.print(view(console.width), crop=False)  # a command to copy is one line

    def hint(self, text: str) -> None:
        """Prints what to do next to stderr."""
        if not self.json and not self.markdown and not self.quiet:
            print_message(text)


def _block(view: View) -> str:
    """A view as a block of Markdown, which no backticks in it can end."""
    console = SafeConsole(file=io.StringIO(), width=PIPE_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(view(PIPE_WIDTH), crop=False)
    text = captured.get().replace("```", "'''")
    return f"```text\n{text}```\n"


def stdout_console() -> Console:
    """A console on stdout; without colour where it is no terminal or NO_COLOR is set."""
    console = SafeConsole(soft_wrap=False)
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else PIPE_WIDTH
    console.width = _usable_width(width)
    return console


def terminal_width() -> int:
    """Columns of the terminal as it is now."""
    return _usable_width(shutil.get_terminal_size().columns)


def _usable_width(width: int) -> int:
    return min(MAX_WIDTH, max(MIN_WIDTH, width))


def show_error(error: HaiprofError) -> int:
    """Prints an error on one line, with a hint; returns the exit status, or raises it to debug."""
    if os.environ.get(ENV_DEBUG) == "1":
        raise error
    from haiprof.show.text import printable

    print_message(f"error: {printable(str(error))}")
    if error.hint:
        print_message(f"hint: {printable(error.hint)}")
    return error.exit_code


def json_text(data: object, *, indent: int | None = 1) -> str:
    """JSON for scripts, where what is missing or not finite is null; without indent on one line.

    It is safe on a terminal, too: what is not visible is written as an escape.
    """
    text = json.dumps(plain(data), indent=indent, ensure_ascii=False, allow_nan=False)
    return _UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], text)


def plain(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """A value as JSON can carry it: a record by its fields, a frame by its rows."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if hasattr(value, "to_dicts"):  # polars, which most commands do not load
        return plain(value.to_dicts())
    return str(value) if isinstance(value, Path) else value
