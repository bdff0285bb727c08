"""Where joined execution traces are written: one file, or one per rank."""

from __future__ import annotations

from pathlib import Path

from haiprof.base.errors import UsageError
from haiprof.trace_analysis.execution.link import Linked
from haiprof.trace_format.execution.write import write_linked
from haiprof.trace_format.find import TRACE_ENDINGS


def linked_path(path: Path, rank: int | None) -> Path:
    """The file of one rank."""
    ending = next((ending for ending in reversed(TRACE_ENDINGS) if path.name.endswith(ending)), "")
    if not ending:
        raise UsageError(f"{path}: a joined trace ends in .json or .json.gz")
    if rank is None:
        return path
    return path.with_name(f"{path.name.removesuffix(ending)}.rank{rank}{ending}")


def write_rank(path: Path, linked: Linked) -> None:
    """Writes one rank's joined trace."""
    execution = linked.pair.execution
    header = {"pid": execution.pid, **execution.header, "rank": linked.pair.rank}
    write_linked(path, linked.nodes, header)
