"""Runs one command: reads its words, calls its function, and turns every error into one line."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import cast

from haiprof.base.errors import HaiprofError
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_DEBUG
from haiprof.cli.command_line import (
    HELP,
    ExitStatus,
    Opt,
    Parameter,
    help_page,
    own_words,
    parameters_of,
    read_arguments,
)
from haiprof.cli.names import COMMANDS, resolve
from haiprof.cli.stored_answers import Recording, ask, print_stored
from haiprof.cli.target import (
    ADDRESS,
    COMMAND_NAME,
    LOG_DIR,
    default_log_dir,
    fetch_addresses,
    has_address,
    name_log_dir,
)

_OWN_LOG_DIR = frozenset({"ps", "top", "attach", "snapshot", "trace-now", "submit", "try-loader"})
"""Commands whose `--log-dir` says where to look for jobs, or where to write."""
_LOG_DIR = Parameter(
    name="log_dir", kind=Path, several=False, is_required=False,
    declared=Opt("--log-dir DIR", "The log directory, instead of the default one; where a run "
                 "is read, its newest.", callback=name_log_dir),
)  # fmt: skip
_INTERRUPTED = 130
_MIN_WIDTH, _MAX_WIDTH = 60, 100


def command_function(name: str) -> Callable[..., None]:
    """The function of a command; its module is imported now."""
    module, _, function = COMMANDS[name].function.partition(":")
    found = getattr(importlib.import_module(f"haiprof.cli.{module}"), function)
    return cast("Callable[..., None]", found)


def command_parameters(name: str) -> list[Parameter]:
    """What a command takes: what its function declares, and `--log-dir`."""
    own = parameters_of(command_function(name))
    return own if name in _OWN_LOG_DIR else [*own, _LOG_DIR]


def command_help(name: str, width: int) -> str:
    """The help of one command, which `COMMANDS` has by that name."""
    docstring = command_function(name).__doc__ or ""
    return help_page(COMMANDS[name].words, docstring, command_parameters(name), width)


def run_command(argv: Sequence[str]) -> int:
    """Runs one command, or prints what it said before where nothing has changed since."""
    name, rest = resolve(argv) or ("verdict", list(argv))
    words = [name, *rest]
    LOG_DIR.set(None)
    ADDRESS.set("")
    COMMAND_NAME.set(name)
    if set(HELP) & set(rest) and set(HELP) & set(own_words(command_parameters(name), rest)):
        columns = shutil.get_terminal_size((_MAX_WIDTH, 0)).columns
        sys.stdout.write(command_help(name, min(_MAX_WIDTH, max(_MIN_WIDTH, columns))))
        return 0
    # Every known error becomes one line and a status here.
    try:
        with fetch_addresses(words) if has_address(words) else nullcontext(words) as found:
            _run_or_print(found)
    except HaiprofError as error:
        return _show_error(error)
    except ExitStatus as ended:
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
        question = ask(words, default_log_dir())
    except HaiprofError:
        question = None  # the command itself says what is wrong
    if question is None:
        _run(words)
    elif (kept := question.load()) is not None:
        print_stored(kept)
    else:
        with Recording() as recording:
            _run(words)
        question.keep(**recording.streams())


def _run(words: Sequence[str]) -> None:
    """Reads and runs one command."""
    name, *rest = words
    arguments = read_arguments(COMMANDS[name].words, command_parameters(name), rest)
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
