"""Which run a command means: the one named, or the newest of the default log directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.config import merge_options, options_from_environment, options_from_pyproject
from haiprof.errors import RunNotFoundError

if TYPE_CHECKING:
    from haiprof.analysis.analyzer import Analyzer


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
