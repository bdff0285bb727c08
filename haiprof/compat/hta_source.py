"""The traces that HTA's constructor arguments name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.base.errors import UsageError
from haiprof.trace_analysis.questions.base import NamedFiles

HtaFiles = Mapping[int, str | Path] | Sequence[str | Path]
"""Files by rank, or files that state their ranks."""
_HINT = 'TraceAnalysis("traces/"), trace_dir="traces/" or trace_files={0: "rank0.json.gz"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """Where traces are."""

    path: Path
    named: NamedFiles | None
    """These files alone; None: what the path means."""
    is_hta: bool
    """Whether HTA's names were used."""


def hta_source(
    path: str | Path | Mapping[int, str | Path] | None,
    trace_dir: str | Path | None,
    trace_files: HtaFiles | None,
    include_last_profiler_step: bool | None,
) -> TraceSource:
    """The traces that one of three arguments names; `trace_files` may lie in `trace_dir`."""
    if include_last_profiler_step is False:
        raise UsageError(
            "TraceAnalysis: include_last_profiler_step=False is not possible: no step is left out",
            hint="haiprof.compat.hta.HtaMethods(analysis, steps=(first, last))",
        )
    is_hta = trace_dir is not None or trace_files is not None
    if path is not None and is_hta:
        raise UsageError("TraceAnalysis: both path and HTA's arguments given", hint=_HINT)
    files = path if isinstance(path, Mapping) else trace_files
    given = trace_dir if path is None or isinstance(path, Mapping) else path
    folder = None if given is None else Path(given)
    if files is None and folder is not None:
        return TraceSource(path=folder, named=None, is_hta=is_hta)
    if files is None:
        raise UsageError("TraceAnalysis: no traces given", hint=_HINT)
    if isinstance(files, str | Path) or not files:
        raise UsageError(f"TraceAnalysis: trace_files={files!r}: expected files", hint=_HINT)
    named = _find_files(files, folder)
    paths = list(named.values() if isinstance(named, Mapping) else named)
    common = os.path.commonpath([os.path.abspath(each.parent) for each in paths])
    return TraceSource(path=folder or Path(common), named=named, is_hta=is_hta)


def _find_files(files: HtaFiles, folder: Path | None) -> NamedFiles:
    """As HTA finds them: a name that is no file by itself is one in the folder."""

    def find(name: str | Path) -> Path:
        return Path(name) if folder is None or Path(name).is_file() else folder / name

    if isinstance(files, Mapping):
        return {rank: find(name) for rank, name in sorted(files.items())}
    return tuple(find(name) for name in files)
