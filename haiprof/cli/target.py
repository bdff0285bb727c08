"""The run of a command: the one named, or the newest of the default log directory."""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.base.errors import RunNotFoundError
from haiprof.base.options import (
    Options,
    merge_options,
    options_from_environment,
    options_from_pyproject,
)

if TYPE_CHECKING:
    from haiprof.run_analysis.run_frames import RunFrames
    from haiprof.run_format.layout import RunPaths


LOG_DIR: ContextVar[Path | None] = ContextVar("LOG_DIR", default=None)
"""The log directory that the command line names, with `--log-dir`."""
ADDRESS: ContextVar[str] = ContextVar("ADDRESS", default="")
"""The address that `--log-dir` of a command on running jobs names: its recordings are put there."""
COMMAND_NAME: ContextVar[str] = ContextVar("COMMAND_NAME", default="")
"""The name under which the command was called: `diagnose` and `verdict` are one function."""


def name_log_dir(path: Path | None) -> Path | None:
    """Takes `--log-dir` for the rest of the command."""
    if path is not None:
        LOG_DIR.set(path)
    return path


def default_log_dir() -> Path:
    """The one named by `--log-dir`; else where a job started here would write.

    Raises:
        UsageError: An option there is invalid.
    """
    named = LOG_DIR.get()
    return default_options().log_dir if named is None else named


def default_options() -> Options:
    """Where a job started here would write: the options `log_dir` and `address`, and no others.

    Raises:
        UsageError: An option is invalid.
    """
    pyproject = options_from_pyproject(Path("pyproject.toml"))
    environment = options_from_environment(os.environ)
    names = ("log_dir", "local_dir")
    layers = [{k: v for k, v in layer.items() if k in names} for layer in (pyproject, environment)]
    named: dict[str, object] = {"log_dir": ADDRESS.get()} if ADDRESS.get() else {}
    return merge_options(*layers, named)


def working_folder() -> Path | None:
    """The folder that the command was called in; None where it is gone."""
    try:
        return Path.cwd()
    except OSError:
        return None


def existing_log_dir() -> Path:
    """The default log directory, where there is one.

    Raises:
        RunNotFoundError: Nothing was recorded here.
    """
    log_dir = default_log_dir()
    if not log_dir.is_dir():
        raise RunNotFoundError(
            f"{log_dir}: no log directory here",
            hint="name a run directory, or record a run: haiprof train.py",
        )
    return log_dir


def open_target(path: Path | None) -> RunFrames:
    """The run of a command.

    Args:
        path: A run or log directory; None takes the default log directory.

    Raises:
        RunNotFoundError: There is no run.
    """
    from haiprof.run_analysis.run_frames import RunFrames

    return RunFrames(existing_log_dir() if path is None else path)


def run_or_traces(path: Path | None) -> tuple[RunPaths | None, Path]:
    """The run of a viewer, and where its traces are; no run if only traces are named.

    Args:
        path: A run or log directory, a trace, or a folder of traces; None takes the default log
            directory.

    Raises:
        RunNotFoundError: There is nothing.
    """
    from haiprof.run_format.layout import RunPaths
    from haiprof.run_format.manifest import newest_run

    target = path or default_log_dir()
    if path is not None and not path.exists():
        raise RunNotFoundError(f"{path}: no such file or folder")
    if target.is_file():
        return None, target
    try:
        run = RunPaths(newest_run(target))
    except RunNotFoundError:
        if path is None:
            raise
        return None, path
    return run, run.root


def trace_target(path: Path) -> Path:
    """What a trace command means by a path: of a log directory, its newest run.

    Args:
        path: A trace, a folder of traces, a run or a log directory.
    """
    from haiprof.run_format.layout import MANIFEST_NAME
    from haiprof.run_format.manifest import run_folders, start_order

    if not path.is_dir() or os.path.lexists(path / MANIFEST_NAME):
        return path
    try:
        runs = run_folders(path)
    except RunNotFoundError:
        return path  # whoever reads it says why it cannot be read
    return max(runs, key=start_order) if runs else path
