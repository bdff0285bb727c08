"""Command lines that are read without typer: the same arguments as typer's, or none at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from haiprof.cli.app import command_function, take_log_dir
from haiprof.cli.names import COMMANDS
from haiprof.cli.plain_words import plain_arguments


def parsed(function: Callable[..., None], words: list[str]) -> dict[str, Any]:
    """What typer passes to a command with this signature."""
    found: dict[str, Any] = {}

    def command(**options: object) -> None:
        found.update(options)

    command.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(command)
    typer.main.get_command(app).main(words, prog_name="haiprof", standalone_mode=False)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "verdict", "verdict DIR --json --all", "verdict --last 60 --svg card.svg",
        "list DIR --json",
        "overview DIR --log-dir DIR", "rank 3 DIR", "rank DIR --rank 3", "lines --phase forward",
        "compare DIR DIR --json", "trace-report DIR --window 1 --steps 3:5", "query DIR SELECT",
        "ps --log-dir DIR --log-dir DIR", "report DIR -o page.html", "what-if DIR",
    ],
)  # fmt: skip
def test_plain_command_line_is_read_as_typer_reads_it(line: str, tmp_path: Path) -> None:
    name, *words = line.replace("DIR", str(tmp_path)).split()
    function = take_log_dir(command_function(name)) if name != "ps" else command_function(name)
    assert plain_arguments(function, words) == parsed(function, words)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_errors_and_unusual_forms_are_left_to_typer(name: str) -> None:
    function = command_function(name)
    for words in (["--help"], ["--nonsense"], ["--json=1"], ["--", "x"], ["-1"]):
        assert plain_arguments(function, words) is None


@pytest.mark.parametrize("line", ["trace-report . --rank -1", "verdict --last 0", "rank --rank x"])
def test_value_that_is_refused_is_left_to_typer(line: str) -> None:
    name, *words = line.split()
    assert plain_arguments(command_function(name), words) is None
