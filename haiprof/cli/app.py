"""Runs one command: reads its words, calls its function, and turns every error into one line."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from haiprof.base.errors import HaiprofError
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_DEBUG
from haiprof.cli import command_line, shared
from haiprof.cli.names import COMMANDS, resolve
from haiprof.cli.stored_answers import Recording, ask, print_stored

_OWN_LOG_DIR = frozenset({"ps", "top", "attach", "snapshot", "trace-now", "submit", "try-loader"})
"""Commands whose `--log-dir` says where to look for jobs, or where to write."""
_LOG_DIR = command_line.Parameter(
    name="log_dir", kind=Path, several=False, is_required=False,
    declared=command_line.Opt(
        "--log-dir DIR", "The log directory, instead of the default one; where a run is read, its "
        "newest.", callback=shared.name_log_dir,
    ),
)  # fmt: skip
_INTERRUPTED = 130
_MIN_WIDTH, _MAX_WIDTH = 60, 100


def command_function(name: str) -> Callable[..., None]:
    """The function of a command; its module is imported now."""
    module, _, function = COMMANDS[name].function.partition(":")
    own = name.replace("-", "_")
    found = getattr(importlib.import_module(f"haiprof.cli.{module or own}"), function or own)
    return cast("Callable[..., None]", found)


def command_parameters(name: str) -> list[command_line.Parameter]:
    """What a command takes: what its function declares, and `--log-dir`."""
    own = command_line.parameters_of(command_function(name))
    return own if name in _OWN_LOG_DIR else [*own, _LOG_DIR]


def command_help(name: str, width: int) -> str:
    """The help of one command, which `COMMANDS` has by that name."""
    docstring = command_function(name).__doc__ or ""
    return command_line.help_page(COMMANDS[name].words, docstring, command_parameters(name), width)


def run_command(argv: Sequence[str]) -> int:
    """Runs one command, or prints what it said before where nothing has changed since."""
    name, rest = resolve(argv) or ("verdict", list(argv))
    words = [name, *rest]
    shared.LOG_DIR.set(None)
    shared.ADDRESS.set("")
    shared.COMMAND_NAME.set(name)
    asked = set(command_line.HELP).intersection(rest)
    if asked and asked.intersection(command_line.own_words(command_parameters(name), rest)):
        columns = shutil.get_terminal_size((_MAX_WIDTH, 0)).columns
        sys.stdout.write(command_help(name, min(_MAX_WIDTH, max(_MIN_WIDTH, columns))))
        return 0
    # Every known error becomes one line and a status here.
    try:
        with shared.fetch_addresses(words) as found:
            _run_or_print(found)
    except HaiprofError as error:
        return _show_error(error)
    except command_line.ExitStatus as ended:
        return ended.status
    except KeyboardInterrupt:
        print_message("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as error:  # with which rich answers a pipe without a reader
        if isinstance(error.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except Exception as error:  # noqa: BLE001 - a defect of ours: one line, as every error
        return _show_error(_defect(error))
    return 0


def _run_or_print(words: list[str]) -> None:
    try:
        question = ask(words, shared.default_log_dir())
    except HaiprofError:
        question = None  # the command itself says what is wrong
    if question is None:
        _run(words)
    elif (kept := question.load()) is not None:
        print_stored(kept)
    else:
        with Recording() as recording:
            _run(words)
        if ask(words, shared.default_log_dir()) == question:  # no run became the newest meanwhile
            question.keep(**recording.streams())


def _run(words: Sequence[str]) -> None:
    """Reads and runs one command."""
    name, *rest = words
    arguments = command_line.read_arguments(COMMANDS[name].words, command_parameters(name), rest)
    arguments = {k: v for k, v in arguments.items() if k != "log_dir" or name in _OWN_LOG_DIR}
    command_function(name)(**arguments)
    sys.stdout.flush()


def _show_error(error: HaiprofError) -> int:
    from haiprof.cli.output import show_error  # what draws: a kept answer needs none of it

    return show_error(error)


def _defect(error: Exception) -> HaiprofError:
    """An unexpected error, with the place for a report."""
    if os.environ.get(ENV_DEBUG) == "1":
        raise error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return HaiprofError(
        f"internal error at {frame.filename}:{frame.lineno}: {type(error).__name__}: {error}",
        hint=f"{ENV_DEBUG}=1 shows the traceback; please report it",
    )


def _reader_gone() -> int:
    """Handles a closed stdout, such as by `head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 141
