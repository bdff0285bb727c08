"""Traces that haiprof itself recorded: which window of a run each file belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import MissingDataError, RunFormatError
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.raw_traces import Part, Stem, parse_stem, readable_parts
from haiprof.run_format.reader import read_lines

_Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Found:
    """One rank's trace of one window."""

    path: Path
    stem: Stem
    key: _Key
    """Attempt of the rank, and number of its window."""


def one_window(files: Iterable[Path], window: int | None = None) -> list[Path]:
    """The files of one window, one per rank; all files where haiprof did not record them."""
    paths = list(files)
    found = _add_keys([(path, stem) for path in paths if (stem := parse_stem(path.name))])
    if not found:
        if window not in (None, 0, -1):
            raise MissingDataError(f"no window {window}: these traces are of no haiprof run")
        return paths
    windows = _in_order(found)
    if window is None:
        most = max(map(len, windows))
        chosen = [group for group in windows if len(group) == most][-1]
    else:
        if not -len(windows) <= window < len(windows):
            raise MissingDataError(
                f"no window {window}: {found[0].path.parent} has {len(windows)}",
                hint="windows are counted by their start, from 0",
            )
        chosen = windows[window]
    return [each.path for each in chosen]


def _in_order(found: list[_Found]) -> list[list[_Found]]:
    """Windows in order of their first start; of each rank the latest file, by rank."""
    groups: dict[_Key, dict[int, _Found]] = {}
    for each in sorted(found, key=lambda each: each.stem.start_wall_ns):
        groups.setdefault(each.key, {})[each.stem.rank] = each
    return [[group[rank] for rank in sorted(group)] for group in groups.values()]


def _add_keys(files: list[tuple[Path, Stem]]) -> list[_Found]:
    """Files with the window number of their sidecar, else their index among the process's files."""
    said: dict[str, Mapping[str, Any]] = {}
    for folder in {path.absolute().parent for path, _ in files}:
        said |= _sidecars(folder)
    places: dict[tuple[int, str, int], int] = {}
    found = []
    for path, stem in sorted(files, key=lambda file: file[1].start_wall_ns):
        process = (stem.rank, stem.host, stem.pid)
        place = places.get(process, 0)
        places[process] = place + 1
        sidecar = said.get(stem.text, {})
        found.append(_Found(path, stem, _recorded_key(sidecar) or (0, place)))
    return found


def _recorded_key(sidecar: Mapping[str, Any]) -> _Key | None:
    attempt, window = sidecar.get("attempt"), sidecar.get("window")
    if isinstance(attempt, int) and isinstance(window, int):
        return attempt, window
    return None


def _sidecars(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The sidecars by stem: from the nodes' events, and those beside raw traces."""
    run = RunPaths(folder.parent.parent if folder.name == ".parts" else folder.parent)
    found: dict[str, Mapping[str, Any]] = {}
    for _, node in run.node_folders():
        with contextlib.suppress(RunFormatError):  # without them windows are numbered by file
            for line in read_lines(node.events)[0]:
                part = line.get("part")
                if line.get("type") == "trace_written" and isinstance(part, dict):
                    found[str(line.get("stem"))] = part
    for part in readable_parts(run):
        with contextlib.suppress(RunFormatError):
            found[part.stem.text] = part.sidecar_content()
    return found


def raw_traces(folder: Path, finished: Iterable[str]) -> list[Path]:
    """Raw traces that will not be compressed any more, as the job ended before."""
    names = set(finished)
    parts: list[Part] = readable_parts(RunPaths(folder.parent))
    return [part.raw for part in parts if part.trace.name not in names]
