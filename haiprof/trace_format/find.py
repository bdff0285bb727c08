"""Finds the trace files of a job, the rank of each, and the run's window that it belongs to."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from haiprof.base.errors import HaiprofError, MissingDataError, RunFormatError, TraceFormatError
from haiprof.run_format import layout
from haiprof.run_format.manifest import read_manifest
from haiprof.run_format.raw_traces import Part, Stem, parse_stem, readable_parts
from haiprof.run_format.reader import read_json, read_lines

# rank-0.json, trace_rank_3.json.gz, host_123.rank7.json, worker0_step_12.1694.pt.trace.json; but
# worker-0_4711.1694.pt.trace.json is process 4711 of a host, as TensorBoard's handler names it.
_RANK_IN_NAME = re.compile(
    r"(?:^|[^a-z])rank[-_]?(\d{1,6})(?!\d)|^worker[-_]?(\d{1,6})(?!\d|_\d+\.)", re.IGNORECASE
)
_NUMBER = re.compile(r"\d+")
MERGED_KEY = "haiprof_merge"
"""Metadata of a trace that `haiprof export --to merged` wrote: all ranks in one."""
COPY_KEY = "haiprof_copy"
"""Begins a trace that haiprof wrote anew with more or less in it: it is not another rank."""

_NUMBERS = ("pid", "rank")
_NO_RANK = 1 << 31  # numbers from here on are not taken for ranks


def rank_of(path: Path, metadata: Mapping[str, Any]) -> int | None:
    """The rank of the process that recorded a trace; None where it is not known."""
    if MERGED_KEY in metadata:
        raise _merged_error(path)
    said = metadata.get("distributedInfo")
    rank = said.get("rank") if isinstance(said, dict) else None
    if type(rank) is int and 0 <= rank < _NO_RANK:
        return rank
    named = rank_in_name(path.name)
    return rank_in_run(path) if named is None else named


def _merged_error(path: Path) -> TraceFormatError:
    return TraceFormatError(
        f"{path}: it holds several ranks (haiprof export --to merged), for a viewer",
        hint="name the ranks' own traces",
    )


def rank_in_name(name: str) -> int | None:
    """The rank that a file name states."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1] or found[2]) if found else None


def rank_in_run(path: Path) -> int | None:
    """The rank of the process whose id is in the name of a file of a run's `traces` folder."""
    if path.absolute().parent.name != "traces":
        return None
    numbers = {int(digits) for digits in _NUMBER.findall(path.name) if len(digits) < 10}
    run = layout.RunPaths(path.absolute().parent.parent)
    known = [each for each in _reports(run) if all(type(each.get(n)) is int for n in _NUMBERS)]
    reported = [each for each in known if each["pid"] in numbers]
    of_host = [each for each in reported if path.name.startswith(f"{each.get('host')}_")]
    ranks = {each["rank"] for each in of_host or reported}
    rank = ranks.pop() if len(ranks) == 1 else None
    return rank if rank is not None and 0 <= rank < _NO_RANK else None


def _reports(run: layout.RunPaths) -> Iterator[dict[str, Any]]:
    """`rank`, `host` and `pid` of every process that reported in."""
    try:
        ranks = read_manifest(run).ranks
    except HaiprofError:
        return  # not a run directory
    yield from ranks
    for _, _, folder in [] if ranks else run.rank_folders():  # the job is still running
        with contextlib.suppress(HaiprofError):  # it may not have reported in yet
            yield read_json(folder.report)


def one_window(files: Iterable[Path], window: int | None = None) -> list[Path]:
    """The files of one window, one per rank; all files where haiprof did not record them."""
    paths = list(files)
    found = [(stem, path) for path in paths if (stem := parse_stem(path.name))]
    if not found:
        if window not in (None, 0, -1):
            raise MissingDataError(f"no window {window}: these traces are of no haiprof run")
        return paths
    windows = _windows(sorted(found, key=lambda file: file[0].start_wall_ns))
    if window is None:
        most = max(map(len, windows))
        return [group for group in windows if len(group) == most][-1]
    if not -len(windows) <= window < len(windows):
        raise MissingDataError(
            f"no window {window}: {found[0][1].parent} has {len(windows)}",
            hint="windows are counted by their start, from 0",
        )
    return windows[window]


def _windows(files: Sequence[tuple[Stem, Path]]) -> list[list[Path]]:
    """Files by window, in order of their first start; of each rank the latest file, by rank."""
    sidecars: dict[str, Mapping[str, Any]] = {}
    # By stem: from the nodes' events, and those beside raw traces.
    for folder in {path.absolute().parent for _, path in files}:
        run = layout.RunPaths(folder.parent.parent if folder.name == ".parts" else folder.parent)
        for _, node in run.node_folders():
            with contextlib.suppress(RunFormatError):  # without them windows are numbered by file
                for line in read_lines(node.events)[0]:
                    part = line.get("part")
                    if line.get("type") == "trace_written" and isinstance(part, dict):
                        sidecars[str(line.get("stem"))] = part
        for raw in readable_parts(run):
            with contextlib.suppress(RunFormatError):
                sidecars[raw.stem.text] = raw.sidecar_content()
    counts: Counter[tuple[int, str, int]] = Counter()
    groups: dict[tuple[int, int], dict[int, Path]] = {}
    for stem, path in files:
        process = (stem.rank, stem.host, stem.pid)
        sidecar = sidecars.get(stem.text, {})
        attempt, number = sidecar.get("attempt"), sidecar.get("window")
        if not isinstance(attempt, int) or not isinstance(number, int):
            attempt, number = 0, counts[process]
        counts[process] += 1
        groups.setdefault((attempt, number), {})[stem.rank] = path
    return [[group[rank] for rank in sorted(group)] for group in groups.values()]


def raw_traces(folder: Path, finished: Iterable[str]) -> list[Path]:
    """Raw traces that will not be compressed any more, as the job ended before."""
    names = set(finished)
    parts: list[Part] = readable_parts(layout.RunPaths(folder.parent))
    return [part.raw for part in parts if part.trace.name not in names]


TRACE_ENDINGS = (".json", ".json.gz")
NSIGHT_ENDING = ".sqlite"  # of an export of Nsight Systems
COUNTER_SUFFIX = "_with_counters"
"""Ends the name of a copy of a trace with counter tracks, which is not another rank."""
OVERLAY_SUFFIX = "_critical_path"  # ends the name of a copy with its critical path drawn in
SUMMARY_SUFFIX = ".summary"  # ends the name of a summary: a trace's answers to the standard report
FUNCTIONS_SUFFIX = ".functions"
"""Ends the name of what `haiprof trace functions` asks of a trace, in place of the trace."""
MERGED_NAME = "merged"
"""Begins the default name of `haiprof export --to merged`'s output, which holds all ranks."""
LINKED_NAME = "linked"
"""Begins the name of `haiprof export --to linked`'s output: execution traces with times."""
_EXECUTION_TRACE = re.compile(rb'\s*\{\s*"schema"\s*:')  # a profiler's begins with schemaVersion
_MERGED = f'"{MERGED_KEY}"'.encode()
_COPY = f'"{COPY_KEY}"'.encode()
_HEAD_BYTES = 256
# Files beside traces with the same ending.
_OTHERS = ("run.json", "rank.json", "agent.json", "verdict.json", "config.json", "failures.log")


def trace_files(source: str | Path) -> list[Path]:
    """The trace files that a path means, by name; of a run those of all windows."""
    path = Path(source)
    if path.is_file() or is_parquet_export(path):
        return [path]
    if not path.is_dir():
        raise TraceFormatError(f"{path}: no such file or folder")
    folder = path / "traces" if (path / "traces").is_dir() else path
    heads = {Path(entry.path): _head(Path(entry.path))
             for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
             if _is_trace(entry)}  # fmt: skip
    there = [path for path, head in heads.items() if _COPY not in head]
    merged = [path for path in there if _MERGED in heads[path]]
    found = [p for p in there if p not in merged and not _EXECUTION_TRACE.match(heads[p])]
    if folder.name == "traces":
        found += raw_traces(folder, [file.name for file in found])
    for suffix in (SUMMARY_SUFFIX, FUNCTIONS_SUFFIX):
        found = found or sorted(folder.glob(f"[!.]*{suffix}"))
    if not found and merged:
        raise _merged_error(merged[0])
    if not found:
        raise TraceFormatError(f"{folder}: no trace in it", hint=_why_none(folder, there))
    return found


def is_parquet_export(path: Path) -> bool:
    """Whether it is a folder of Parquet files, as Nsight Systems exports one."""
    return (path / "StringIds.parquet").is_file()


def merged_files(folder: Path) -> list[Path]:
    """Merged traces in a folder: by their default name, or by what a file holds."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [
        path
        for path in paths
        if path.name.endswith(TRACE_ENDINGS) and path.name[0] != "." and path.is_file()
        and (path.name.startswith(f"{MERGED_NAME}.") or _MERGED in _head(path))
    ]  # fmt: skip


def window_files(source: str | Path, window: int | None = None) -> list[Path]:
    """The trace files of one window, one per rank."""
    return one_window(trace_files(source), window)


def is_reduced_to_functions(paths: Sequence[Path]) -> bool:
    """Whether these are not traces, but what `haiprof trace functions --reduce` made of some."""
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
        waiting = [n for n in os.listdir(folder / ".parts") if n.endswith(layout.SIDECAR_SUFFIX)]
    except OSError:
        waiting = []
    if waiting:
        return f"{len(waiting)} of the running job are being compressed, raw in {folder}/.parts"
    if os.path.lexists(folder / layout.MANIFEST_NAME):
        return "this run recorded none; haiprof --trace train.py records some steps"
    return (
        "traces end in .json or .json.gz (Nsight's in .sqlite, or folders of Parquet), one per rank"
    )


def _is_trace(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    plain = not name.startswith(".") and name not in _OTHERS
    anew = any(suffix in name for suffix in (COUNTER_SUFFIX, OVERLAY_SUFFIX))
    anew = anew or name.startswith((f"{MERGED_NAME}.", f"{LINKED_NAME}."))
    of_haiprof = name.endswith((layout.SIDECAR_SUFFIX, layout.ET_RAW_SUFFIX, layout.ET_SUFFIX))
    own = plain and not anew and not of_haiprof
    if own and entry.is_dir():
        return is_parquet_export(Path(entry.path))
    return own and name.endswith((*TRACE_ENDINGS, NSIGHT_ENDING)) and entry.is_file()


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
        elif found.setdefault(trace.rank, trace) is not trace:
            raise TraceFormatError(
                f"two traces of rank {trace.rank}: {found[trace.rank].path} and {trace.path}",
                hint="name the files of one window, or give {rank: path}",
            )
    free = (number for number in itertools.count() if number not in found)
    found |= dict(zip(free, silent, strict=False))
    return dict(sorted(found.items()))
