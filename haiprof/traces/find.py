"""Which files are the traces of a job, and whose: a file, a folder of ranks, a run directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from haiprof.errors import TraceFormatError

TRACE_ENDINGS = (".json", ".json.gz")
COUNTER_SUFFIX = "_with_counters"
"""Ends the name of a trace that was written anew with counter tracks: the same rank once more."""
OVERLAY_SUFFIX = "_critical_path"
"""The same, with its critical path drawn in."""
# What stands beside traces and ends like them.
_OTHERS = ("run.json", "rank.json", "agent.json", "verdict.json", "config.json", "failures.log")

Source = str | Path | Iterable[str | Path] | Mapping[int, str | Path]


def trace_files(source: str | Path) -> list[Path]:
    """The trace files that a path means, by name.

    Args:
        source: A file; a folder with one file per rank; a run directory with its `traces`.

    Raises:
        TraceFormatError: There is nothing, or no trace in it.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TraceFormatError(f"{path}: no such file or folder")
    folder = path / "traces" if (path / "traces").is_dir() else path
    found = sorted(Path(entry.path) for entry in os.scandir(folder) if _is_trace(entry))
    if not found:
        raise TraceFormatError(
            f"{folder}: no trace in it", hint="traces end in .json or .json.gz, one file per rank"
        )
    return found


def _is_trace(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    plain = not name.startswith(".") and name not in _OTHERS
    anew = any(suffix in name for suffix in (COUNTER_SUFFIX, OVERLAY_SUFFIX))
    return plain and not anew and name.endswith(TRACE_ENDINGS) and entry.is_file()


class _OfRank(Protocol):
    """Anything that knows its file and its rank, such as a `Trace`."""

    @property
    def path(self) -> Path: ...
    @property
    def rank(self) -> int | None: ...


_Found = TypeVar("_Found", bound=_OfRank)


def by_rank(traces: Iterable[_Found]) -> dict[int, _Found]:
    """Traces by their rank; one that does not say gets the lowest free number.

    Raises:
        TraceFormatError: Two files say that they are the same rank; both are named.
    """
    found: dict[int, _Found] = {}
    silent: list[_Found] = []
    for trace in traces:
        if trace.rank is None:
            silent.append(trace)
        elif trace.rank in found:
            raise TraceFormatError(
                f"two traces of rank {trace.rank}: {found[trace.rank].path} and {trace.path}",
                hint="name the files of one window, or give {rank: path}",
            )
        else:
            found[trace.rank] = trace
    free = (number for number in range(len(found) + len(silent)) if number not in found)
    found |= dict(zip(free, silent, strict=False))
    return dict(sorted(found.items()))
