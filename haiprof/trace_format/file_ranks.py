"""The rank of a trace file: from its metadata, its name, or the run that it was recorded in."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, TraceFormatError
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest
from haiprof.run_format.reader import read_json

# rank-0.json, trace_rank_3.json.gz, host_123.rank7.json, worker0_step_12.1694.pt.trace.json; but
# worker-0_4711.1694.pt.trace.json is process 4711 of a host, as TensorBoard's handler names it.
_RANK_IN_NAME = re.compile(
    r"(?:^|[^a-z])rank[-_]?(\d{1,6})(?!\d)|^worker[-_]?(\d{1,6})(?!\d|_\d+\.)", re.IGNORECASE
)
_NUMBER = re.compile(r"\d+")
MERGED_KEY = "haiprof_merge"
COPY_KEY = "haiprof_copy"
"""Begins a trace that haiprof wrote anew with more or less in it: it is not another rank."""
"""Metadata of a trace that `haiprof merge` wrote: all ranks in one."""

_NUMBERS = ("pid", "rank")
_NO_RANK = 1 << 31
"""Numbers from here on are not taken for ranks."""


def rank_of(path: Path, metadata: Mapping[str, Any]) -> int | None:
    """The rank of the process that recorded a trace; None where it is not known."""
    if MERGED_KEY in metadata:
        raise TraceFormatError(
            f"{path}: it holds several ranks (haiprof merge), for a viewer",
            hint="name the ranks' own traces",
        )
    said = metadata.get("distributedInfo")
    rank = said.get("rank") if isinstance(said, dict) else None
    if type(rank) is int and 0 <= rank < _NO_RANK:
        return rank
    named = rank_in_name(path.name)
    return rank_in_run(path) if named is None else named


def rank_in_name(name: str) -> int | None:
    """The rank that a file name states."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1] or found[2]) if found else None


def rank_in_run(path: Path) -> int | None:
    """The rank of the process whose id is in the name of a file of a run's `traces` folder."""
    if path.absolute().parent.name != "traces":
        return None
    numbers = {int(digits) for digits in _NUMBER.findall(path.name) if len(digits) < 10}
    run = RunPaths(path.absolute().parent.parent)
    known = [each for each in _reports(run) if all(type(each.get(n)) is int for n in _NUMBERS)]
    reported = [each for each in known if each["pid"] in numbers]
    of_host = [each for each in reported if path.name.startswith(f"{each.get('host')}_")]
    ranks = {each["rank"] for each in of_host or reported}
    rank = ranks.pop() if len(ranks) == 1 else None
    return rank if rank is not None and 0 <= rank < _NO_RANK else None


def _reports(run: RunPaths) -> Iterator[dict[str, Any]]:
    """`rank`, `host` and `pid` of every process that reported in."""
    try:
        ranks = read_manifest(run).ranks
    except HaiprofError:
        return  # not a run directory
    yield from ranks
    for _, _, folder in [] if ranks else run.rank_folders():  # the job is still running
        with contextlib.suppress(HaiprofError):  # it may not have reported in yet
            yield read_json(folder.report)
