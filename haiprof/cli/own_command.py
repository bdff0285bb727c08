"""haiprof's own commands as processes, for lower parts, which do not name commands."""

from __future__ import annotations

import sys
from pathlib import Path

from haiprof.base.version import PACKAGE

# The working directory is the user's: a calendar.py there must not be taken for Python's.
_PROGRAM = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    f"sys.path.insert(0, {str(PACKAGE.parent)!r}); "
    "from haiprof.__main__ import run; run()"
)


def own_command(*words: str) -> list[str]:
    """Another command of this haiprof, in a process of its own."""
    return [sys.executable, "-c", _PROGRAM, *words]


def installed_haiprof() -> tuple[str, ...]:
    """The command haiprof of this interpreter, as other nodes can start it."""
    command = Path(sys.executable).parent / "haiprof"
    return (str(command),) if command.exists() else (sys.executable, "-m", "haiprof")
