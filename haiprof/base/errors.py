"""The exception tree: what went wrong, where, and what to do.

HaiprofError                exit 1   anything of haiprof's own
├── UsageError              exit 2   the command line or an option cannot be taken
├── RunNotFoundError        exit 3   no run directory where one was named
├── RunFormatError          exit 4   a file of a run directory cannot be read
├── TraceFormatError        exit 4   a trace cannot be read, or two claim to be one rank's
├── MissingDataError        exit 5   the run is readable but lacks what was asked for
└── MissingExtraError       exit 6   an optional part is not installed
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class HaiprofError(Exception):
    """Base of every error that haiprof raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.__notes__ = [f"hint: {hint}"]  # tracebacks and notebooks show it, Python 3.11 on


class UsageError(HaiprofError):
    """The command line or an option is invalid."""

    exit_code = 2


class RunNotFoundError(HaiprofError):
    """There is no run directory where one was named."""

    exit_code = 3


class RunFormatError(HaiprofError):
    """A file of a run directory is damaged, foreign or of another version."""

    exit_code = 4


class TraceFormatError(HaiprofError):
    """A file is not a trace, is damaged beyond repair, or contradicts another trace."""

    exit_code = 4


class MissingDataError(HaiprofError):
    """The run can be read, but what was asked for was not recorded."""

    exit_code = 5


class MissingExtraError(HaiprofError):
    """An optional part of haiprof is not installed."""

    exit_code = 6


@contextlib.contextmanager
def convert_os_errors(kind: type[HaiprofError], what: str, *, hint: str = "") -> Iterator[None]:
    """Makes of an error of the system one of haiprof's: `FILE: Permission denied`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}", hint=hint) from None
