"""The one sink: what is shown to people, what `--json` prints, and how errors look."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType

from haiprof.config import ENV_DEBUG
from haiprof.errors import HaiprofError

MIN_WIDTH, MAX_WIDTH = 60, 200
PIPE_WIDTH = 100  # columns where the output is no terminal

View = Callable[[int], RenderableType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a command's result and its talk go."""

    json: bool = False
    """Data as JSON to stdout, and nothing else there."""
    quiet: bool = False
    """Neither view nor hints."""

    def show(self, view: View, data: Mapping[str, Any]) -> None:
        """Shows one result.

        Args:
            view: What people see, for a terminal of so many columns.
            data: The same for scripts.
        """
        if self.json:
            sys.stdout.write(json_text(data) + "\n")
        elif not self.quiet:
            console = stdout_console()
            console.print(view(console.width))

    def hint(self, text: str) -> None:
        """What to do next, to stderr."""
        if not self.json and not self.quiet:
            say(text, sys.stderr)


def stdout_console() -> Console:
    """A console on stdout; without colour where it is no terminal or NO_COLOR is set."""
    console = Console(highlight=False, soft_wrap=False)
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else PIPE_WIDTH
    console.width = min(MAX_WIDTH, max(MIN_WIDTH, width))
    return console


def say(text: str, stream: TextIO) -> None:
    """One line of talk."""
    stream.write(f"haiprof: {text}\n")
    stream.flush()


def show_error(error: HaiprofError) -> int:
    """One line, a hint, and the exit status; the traceback with HAIPROF_DEBUG=1.

    Raises:
        HaiprofError: The same one, where debugging is asked for.
    """
    if os.environ.get(ENV_DEBUG) == "1":
        raise error
    from haiprof.report.text import printable  # names of files and traces are whatever they are

    say(f"error: {printable(str(error))}", sys.stderr)
    if error.hint:
        say(f"hint: {printable(error.hint)}", sys.stderr)
    return error.exit_code


def json_text(data: Mapping[str, Any]) -> str:
    """JSON for scripts: what is missing or not finite is null."""
    return json.dumps(plain(data), indent=1, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """A value as JSON can carry it."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    return str(value) if isinstance(value, Path) else value
