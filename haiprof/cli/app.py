"""The typer application with all commands that read runs."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_DEBUG
from haiprof.cli.names import COMMANDS
from haiprof.cli.stored_answers import Recording, ask, print_stored
from haiprof.cli.target import (
    ADDRESS,
    COMMAND_NAME,
    LOG_DIR,
    default_log_dir,
    fetch_addresses,
    has_address,
)

if TYPE_CHECKING:
    import typer

_MODULES = {
    "list": ("list", "list_runs"),
    "critical-path": ("trace_critical_path", "critical_path"),
    "memory-timeline": ("trace_memory", "memory_timeline"),
    "diagnose": ("verdict", "verdict"),
}
"""Module and function of the commands that are not named as both."""
_OWN_LOG_DIR = frozenset({"ps", "top", "attach", "snapshot", "trace-now", "submit", "try-loader"})
"""Commands whose `--log-dir` says where to look for jobs, or where to write."""
_COMMAND_LINES = frozenset({"try-loader"})
"""Commands that take another command: what follows its first word is its own."""
_INTERRUPTED = 130


def command_function(name: str) -> Callable[..., None]:
    """The function of a command; its module is imported now."""
    module, function = _MODULES.get(name, (name.replace("-", "_"),) * 2)
    found = getattr(importlib.import_module(f"haiprof.cli.{module}"), function)
    return cast("Callable[..., None]", found)


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The typer application of some commands: of all, if none are named."""
    import typer

    from haiprof.cli.command_help import help_paragraphs

    width = shutil.get_terminal_size().columns
    app = typer.Typer(
        name="haiprof", add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True
    )
    app.callback()(_no_options)  # without it, one command alone is taken for the whole program
    for name in names:
        function = _full_command(name)
        settings = {"allow_interspersed_args": name not in _COMMAND_LINES}
        words = help_paragraphs(function.__doc__ or "", width)
        app.command(name, help=words, context_settings=settings)(function)
    return app


def _full_command(name: str) -> Callable[..., None]:
    function = command_function(name)
    return function if name in _OWN_LOG_DIR else take_log_dir(function)


def _no_options() -> None:
    """The application itself has none."""


def take_log_dir(function: Callable[..., None]) -> Callable[..., None]:
    """The same command with `--log-dir`, which names the log directory of what is left out."""
    from haiprof.cli.arguments import LogDir

    @functools.wraps(function)
    def command(log_dir: Path | None, **options: object) -> None:
        del log_dir  # its callback has taken it, before the other arguments were parsed
        function(**options)

    signature = inspect.signature(function, eval_str=True)
    added = inspect.Parameter(
        "log_dir", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=LogDir
    )
    parameters = [*signature.parameters.values(), added]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__
    return command


def run_command(argv: Sequence[str]) -> int:
    """Runs one command, or prints what it said before where nothing has changed since."""
    words = list(argv)
    LOG_DIR.set(None)
    ADDRESS.set("")
    COMMAND_NAME.set(words[0] if words else "")
    return _run_on_addresses(words) if has_address(words) else _run_or_print(words)


def _run_on_addresses(words: Sequence[str]) -> int:
    """Runs one command on runs that are fetched first."""
    from haiprof.cli.output import show_error

    try:
        with fetch_addresses(words) as found:
            return _run_or_print(found)
    except HaiprofError as error:
        return show_error(error)
    except KeyboardInterrupt:
        print_message("interrupted")
        return _INTERRUPTED


def _run_or_print(words: list[str]) -> int:
    try:
        question = ask(words, default_log_dir())
    except HaiprofError:
        question = None  # the command itself says what is wrong
    if question is None:
        return _run(words)
    kept = question.load()
    if kept is not None:
        try:
            print_stored(kept)
        except BrokenPipeError:
            return _reader_gone()
        return 0
    with Recording() as recording:
        status = _run(words)
    if status == 0:
        question.keep(**recording.streams())
    return status


def _run(argv: list[str]) -> int:
    """Parses and runs one command; every known error becomes one line and a status here."""
    import typer

    from haiprof.cli.output import show_error

    # The parser's errors for an invalid command line; typer carries click or its own copy.
    parser_error = cast("type[Exception]", typer.BadParameter.__mro__[1])
    try:
        status = _call_or_parse(argv)
        sys.stdout.flush()
    except HaiprofError as error:
        return show_error(error)
    except parser_error as error:
        return show_error(_usage_error(error, argv))
    except (typer.Abort, KeyboardInterrupt):
        print_message("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as error:  # with which click and rich answer a pipe without a reader
        if isinstance(error.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except Exception as error:  # noqa: BLE001 - a defect of ours: one line, as every error
        return show_error(_defect(error))
    return status if isinstance(status, int) else 0


def _call_or_parse(argv: list[str]) -> object:
    """Calls the command of a plain command line; typer parses whatever is not plain."""
    import typer

    from haiprof.cli.plain_words import plain_arguments

    names = [argv[0]] if argv and argv[0] in COMMANDS else COMMANDS
    if len(names) == 1:
        function = _full_command(argv[0])
        arguments = plain_arguments(function, argv[1:])
        if arguments is not None:
            try:
                return function(**arguments)
            except typer.Exit as ended:
                return ended.exit_code
    from haiprof.cli.command_help import name_no_type_of_switches

    app = typer.main.get_command(make_app(names))
    name_no_type_of_switches(app)
    return app.main(argv, prog_name="haiprof", standalone_mode=False)


def _usage_error(error: Exception, argv: Sequence[str]) -> UsageError:
    text = getattr(error, "format_message", error.__str__)()
    name = argv[0] if argv and argv[0] in COMMANDS else ""
    option = getattr(error, "option_name", None)
    if option and type(error).__name__ == "NoSuchOption":
        nearest = getattr(error, "possibilities", None) or ()
        hint = f"did you mean {' or '.join(sorted(nearest))}?" if nearest else ""
        hint = hint or f"haiprof {name} --help"
        return UsageError(f"{name}: no option {option!r}".removeprefix(": "), hint=hint)
    return UsageError(f"{name}: {text}" if name else text, hint=f"haiprof {name} --help".strip())


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
