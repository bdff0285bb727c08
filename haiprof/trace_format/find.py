"""Finds the trace files of a job: in a file, a folder of ranks, or a run directory."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from haiprof.base.errors import TraceFormatError
from haiprof.run_format.layout import ET_RAW_SUFFIX, ET_SUFFIX, MANIFEST_NAME, SIDECAR_SUFFIX
from haiprof.trace_format.file_ranks import COPY_KEY, MERGED_KEY
from haiprof.trace_format.run_windows import one_window, raw_traces

TRACE_ENDINGS = (".json", ".json.gz")
COUNTER_SUFFIX = "_with_counters"
"""Ends the name of a copy of a trace with counter tracks, which is not another rank."""
OVERLAY_SUFFIX = "_critical_path"
"""Ends the name of a copy with its critical path drawn in."""
SUMMARY_SUFFIX = ".summary"
"""Ends the name of a summary: a trace's answers to the standard report."""
FUNCTIONS_SUFFIX = ".functions"
"""Ends the name of what `haiprof functions` asks of a trace, in place of the trace."""
MERGED_NAME = "merged"
"""Begins the default name of `haiprof merge`'s output, which holds all ranks."""
LINKED_NAME = "linked"
"""Begins the name of `haiprof link`'s output: execution traces with times."""
_EXECUTION_TRACE = re.compile(rb'\s*\{\s*"schema"\s*:')  # a profiler's begins with schemaVersion
_MERGED = f'"{MERGED_KEY}"'.encode()
_COPY = f'"{COPY_KEY}"'.encode()
_HEAD_BYTES = 256
# Files beside traces with the same ending.
_OTHERS = ("run.json", "rank.json", "agent.json", "verdict.json", "config.json", "failures.log")

Source = str | Path | Iterable[str | Path] | Mapping[int, str | Path]


def trace_files(source: str | Path) -> list[Path]:
    """The trace files that a path means, by name; of a run those of all windows."""
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TraceFormatError(f"{path}: no such file or folder")
    folder = path / "traces" if (path / "traces").is_dir() else path
    heads = {
        Path(entry.path): _head(Path(entry.path))
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
        if _is_trace(entry)
    }
    there = [path for path, head in heads.items() if _COPY not in head]
    merged = [path for path in there if _MERGED in heads[path]]
    found = [p for p in there if p not in merged and not _EXECUTION_TRACE.match(heads[p])]
    if folder.name == "traces":
        found += raw_traces(folder, [file.name for file in found])
    for suffix in (SUMMARY_SUFFIX, FUNCTIONS_SUFFIX):
        found = found or sorted(folder.glob(f"[!.]*{suffix}"))
    if not found and merged:
        raise TraceFormatError(
            f"{merged[0]}: it holds several ranks (haiprof merge), for a viewer",
            hint="name the ranks' own traces",
        )
    if not found:
        raise TraceFormatError(f"{folder}: no trace in it", hint=_why_none(folder, there))
    return found


def merged_files(folder: Path) -> list[Path]:
    """What `haiprof merge` wrote into a folder: by its default name, or by what a file holds."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    plain = [
        Path(entry.path)
        for entry in entries
        if entry.name.endswith(TRACE_ENDINGS) and entry.name[0] != "." and entry.is_file()
    ]
    return [
        path for path in plain if path.name.startswith(f"{MERGED_NAME}.") or _MERGED in _head(path)
    ]


def window_files(source: str | Path, window: int | None = None) -> list[Path]:
    """The trace files of one window, one per rank."""
    return one_window(trace_files(source), window)


def is_reduced_to_functions(paths: Sequence[Path]) -> bool:
    """Whether these are not traces, but what `haiprof functions --reduce` made of some."""
    return paths[0].name.endswith(FUNCTIONS_SUFFIX)


def trace_name(path: Path) -> str:
    """The name of a trace; of what was reduced, that of the trace it was made of."""
    return path.name.removesuffix(SUMMARY_SUFFIX).removesuffix(FUNCTIONS_SUFFIX)


def _head(path: Path) -> bytes:
    """How a file's text begins, which tells execution traces and merged ones; empty unreadable."""
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return b""


def _why_none(folder: Path, passed_over: Sequence[Path]) -> str:
    if passed_over:
        return f"{passed_over[0].name} is an execution trace (ExecutionTraceObserver)"
    try:
        waiting = [n for n in os.listdir(folder / ".parts") if n.endswith(SIDECAR_SUFFIX)]
    except OSError:
        waiting = []
    if waiting:
        return f"{len(waiting)} of the running job are being compressed, raw in {folder}/.parts"
    if os.path.lexists(folder / MANIFEST_NAME):
        return "this run recorded none; haiprof --trace train.py records some steps"
    return "traces end in .json or .json.gz, one file per rank"


def _is_trace(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    plain = not name.startswith(".") and name not in _OTHERS
    anew = any(suffix in name for suffix in (COUNTER_SUFFIX, OVERLAY_SUFFIX))
    anew = anew or name.startswith((f"{MERGED_NAME}.", f"{LINKED_NAME}."))
    of_haiprof = name.endswith((SIDECAR_SUFFIX, ET_RAW_SUFFIX, ET_SUFFIX))
    own = plain and not anew and not of_haiprof
    return own and name.endswith(TRACE_ENDINGS) and entry.is_file()


class _OfRank(Protocol):
    """Anything with a path and a rank, such as a `Trace`."""

    @property
    def path(self) -> Path: ...
    @property
    def rank(self) -> int | None: ...


_Found = TypeVar("_Found", bound=_OfRank)


def by_rank(traces: Iterable[_Found]) -> dict[int, _Found]:
    """Traces by rank; one without a rank gets the lowest free number."""
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
