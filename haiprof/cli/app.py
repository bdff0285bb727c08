"""The commands that read runs, put together in one screen."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

import typer

from haiprof.cli.attach import attach
from haiprof.cli.chakra import chakra
from haiprof.cli.compare import compare
from haiprof.cli.diagnose import diagnose
from haiprof.cli.doctor import doctor
from haiprof.cli.export import export
from haiprof.cli.functions import functions
from haiprof.cli.kineto_agent import kineto_agent
from haiprof.cli.link import link
from haiprof.cli.list import list_runs
from haiprof.cli.merge import merge
from haiprof.cli.names import COMMANDS
from haiprof.cli.output import say, show_error
from haiprof.cli.overview import overview
from haiprof.cli.perfetto import perfetto
from haiprof.cli.ps import ps
from haiprof.cli.query import query
from haiprof.cli.rank import rank
from haiprof.cli.report import report
from haiprof.cli.scalars import scalars
from haiprof.cli.snapshot import snapshot
from haiprof.cli.submit import submit
from haiprof.cli.tensorboard import tensorboard
from haiprof.cli.top import top
from haiprof.cli.trace_critical_path import critical_path
from haiprof.cli.trace_diff import trace_diff
from haiprof.cli.trace_memory import memory_timeline
from haiprof.cli.trace_now import trace_now
from haiprof.cli.trace_report import trace_report
from haiprof.cli.verdict import verdict
from haiprof.cli.view import view
from haiprof.cli.what_if import what_if
from haiprof.config import ENV_DEBUG
from haiprof.errors import HaiprofError, UsageError

_FUNCTIONS: dict[str, Callable[..., None]] = {
    "overview": overview,
    "rank": rank,
    "list": list_runs,
    "verdict": verdict,
    "report": report,
    "view": view,
    "diagnose": diagnose,
    "scalars": scalars,
    "tensorboard": tensorboard,
    "perfetto": perfetto,
    "doctor": doctor,
    "export": export,
    "trace-report": trace_report,
    "functions": functions,
    "merge": merge,
    "link": link,
    "chakra": chakra,
    "query": query,
    "compare": compare,
    "trace-diff": trace_diff,
    "what-if": what_if,
    "critical-path": critical_path,
    "memory-timeline": memory_timeline,
    "ps": ps,
    "top": top,
    "attach": attach,
    "snapshot": snapshot,
    "trace-now": trace_now,
    "kineto-agent": kineto_agent,
    "submit": submit,
}
# What the parser raises for a command line it cannot take; typer carries click or its own copy.
_ParserError: type[Exception] = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130


def make_app() -> typer.Typer:
    """The typer application; its commands are those of `names.COMMANDS`."""
    app = typer.Typer(
        name="haiprof", add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True
    )
    for name in COMMANDS:
        app.command(name)(_FUNCTIONS[name])
    return app


def run_command(argv: Sequence[str]) -> int:
    """Parses and runs one command; every known error ends here as one line and a status."""
    command = typer.main.get_command(make_app())
    try:
        status = command.main(list(argv), prog_name="haiprof", standalone_mode=False)
        sys.stdout.flush()
    except HaiprofError as error:
        return show_error(error)
    except _ParserError as error:
        return show_error(_usage_error(error, argv))
    except (typer.Abort, KeyboardInterrupt):
        say("interrupted", sys.stderr)
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


def _usage_error(error: Exception, argv: Sequence[str]) -> UsageError:
    text = getattr(error, "format_message", error.__str__)()
    name = argv[0] if argv and argv[0] in COMMANDS else ""
    return UsageError(f"{name}: {text}" if name else text, hint=f"haiprof {name} --help".strip())


def _defect(error: Exception) -> HaiprofError:
    """An error that nobody foresaw, with the place for a report."""
    if os.environ.get(ENV_DEBUG) == "1":
        raise error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return HaiprofError(
        f"internal error at {frame.filename}:{frame.lineno}: {type(error).__name__}: {error}",
        hint=f"{ENV_DEBUG}=1 shows the traceback; please report it",
    )


def _reader_gone() -> int:
    """Somebody like `head` closed our stdout; nothing more can be said there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 141
