"""Which file `haiprof perfetto` shows: the one named, the merged one, or one rank's."""

from __future__ import annotations

from pathlib import Path

from haiprof.base.errors import MissingDataError, UsageError
from haiprof.run_format.layout import RunPaths
from haiprof.trace_analysis.files import files_by_window
from haiprof.trace_format.find import merged_files


def trace_to_show(
    run: RunPaths | None, source: Path, *, rank: int | None, window: int | None
) -> Path:
    """Chooses the file that a viewer opens."""
    if source.is_file():
        return source
    merged = None if rank is not None or window is not None else _find_merged(run, source)
    if merged is not None:
        return merged
    found = files_by_window(source)
    if window is not None and window >= len(found):
        raise MissingDataError(f"{source}: no window {window}: there are {len(found)}")
    members = found[-1 if window is None else window]
    if rank is None and len(members) > 1:
        raise UsageError(
            f"{source}: {len(members)} ranks, and Perfetto shows one file",
            hint=f"haiprof merge {source}, which puts them in one; or --rank N",
        )
    for member in members:
        if rank in (None, member.rank):
            return member.path
    ranks = ", ".join(str(member.rank) for member in members)
    raise MissingDataError(f"{source}: no trace of rank {rank}: there are {ranks}")


def _find_merged(run: RunPaths | None, source: Path) -> Path | None:
    """The newest file that `haiprof merge` wrote, under whatever name."""
    folders = [source] if run is None else [run.root, run.root / "traces"]
    found = [path for folder in folders for path in merged_files(folder)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
