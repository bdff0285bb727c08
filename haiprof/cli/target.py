"""Which run a command means: the one named, or the newest of the default log directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.config import merge_options, options_from_environment, options_from_pyproject
from haiprof.errors import RunNotFoundError

if TYPE_CHECKING:
    from haiprof.analysis.analyzer import Analyzer
    from haiprof.rundir.layout import RunPaths


def default_log_dir() -> Path:
    """Where a job started here would write: pyproject.toml, then the environment, then default.

    Raises:
        UsageError: An option there cannot be taken.
    """
    pyproject = options_from_pyproject(Path("pyproject.toml"))
    environment = options_from_environment(os.environ)
    layers = [
        {k: v for k, v in layer.items() if k == "log_dir"} for layer in (pyproject, environment)
    ]
    return merge_options(*layers).log_dir


def open_target(path: Path | None) -> Analyzer:
    """The run of a command.

    Args:
        path: A run or log directory; None takes the default log directory.

    Raises:
        RunNotFoundError: There is no run.
    """
    from haiprof.analysis.analyzer import Analyzer

    if path is not None:
        return Analyzer(path)
    log_dir = default_log_dir()
    if not log_dir.is_dir():
        raise RunNotFoundError(
            f"{log_dir}: no log directory here",
            hint="name a run directory, or record a run: haiprof train.py",
        )
    return Analyzer(log_dir)


def run_or_traces(path: Path | None) -> tuple[RunPaths | None, Path]:
    """What a viewer shows: the run, and where its traces are; no run where only traces are named.

    Args:
        path: A run or log directory, a trace, or a folder of traces; None takes the default log
            directory.

    Raises:
        RunNotFoundError: There is nothing.
    """
    from haiprof.rundir.layout import RunPaths
    from haiprof.rundir.manifest import newest_run

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
