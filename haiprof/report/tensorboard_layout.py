"""The folder that TensorBoard is shown: a run's scalars, and its traces by window as links."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.analysis.trace.workers import Worker, windows
from haiprof.errors import HaiprofError, TraceFormatError
from haiprof.rundir.layout import RunPaths

_UNSAFE = re.compile(r"[^A-Za-z0-9-]+")
_FOLDER = "window"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What TensorBoard reads."""

    folder: Path
    traces: Path
    """Below it one folder per window, with a link to each rank's trace."""
    source: Path
    """Where the traces themselves are."""
    is_temporary: bool
    """Whether all of it goes away, as the run cannot be written to."""

    def link_windows(self, *, whole_only: bool) -> int:
        """Links the windows that are not yet linked.

        Args:
            whole_only: Only windows of which every rank's trace is there: TensorBoard reads a
                window once.

        Returns:
            How many windows there are now.
        """
        try:
            found = windows(self.source)
        except TraceFormatError:
            return 0
        linked = 0
        for number, members in enumerate(found):
            folder = self.traces / f"{_FOLDER}{number}"
            if folder.is_dir() or not whole_only or _is_whole(members):
                linked += 1
                if not folder.is_dir():
                    self._link(folder, members)
        return linked

    def _link(self, folder: Path, members: Sequence[Worker]) -> None:
        # Made elsewhere first: TensorBoard must not find it half.
        fresh = Path(tempfile.mkdtemp(prefix=".haiprof-", dir=self.folder.parent))
        try:
            for name, worker in link_names(members).items():
                (fresh / name).symlink_to(worker.path.resolve())
            fresh.chmod(0o755)
            fresh.rename(folder)
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
            raise


def link_names(members: Sequence[Worker]) -> dict[str, Worker]:
    """The traces of one window by the names that torch-tb-profiler takes its workers from.

    Args:
        members: At least one.

    Returns:
        `rank03_node1.pt.trace.json.gz`, ranks padded so that they sort; a second trace of a rank
        has a number behind its host.
    """
    digits = len(str(max(member.rank for member in members)))
    found: dict[str, Worker] = {}
    for member in members:
        host = _UNSAFE.sub("-", member.host or "").strip("-")[:64] or "host"
        stem, number = f"rank{member.rank:0{digits}}_{host}", 1
        ending = ".pt.trace.json.gz" if member.is_packed else ".pt.trace.json"
        name = stem + ending
        while name in found:
            number += 1
            name = f"{stem}-{number}{ending}"
        found[name] = member
    return found


@contextlib.contextmanager
def open_layout(run: RunPaths | None, source: Path) -> Iterator[Layout]:
    """The folder, while TensorBoard runs.

    Args:
        run: The run; its `tensorboard` folder is used, where it can be written to. None of traces
            that are not of a run.
        source: Where the traces are: a file, a folder, or the run.
    """
    own = run is not None and _is_writable(run)
    base = Path(tempfile.mkdtemp(prefix="haiprof-tensorboard-")) if not own else None
    folder = base / "log" if base is not None else run.tensorboard  # type: ignore[union-attr]
    traces = folder / "traces"
    try:
        shutil.rmtree(traces, ignore_errors=True)  # links of an earlier, killed one
        traces.mkdir(parents=True, exist_ok=True)
        yield Layout(folder=folder, traces=traces, source=source, is_temporary=base is not None)
    except OSError as error:
        raise HaiprofError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(base if base is not None else traces, ignore_errors=True)


def _is_writable(run: RunPaths) -> bool:
    target = run.tensorboard if run.tensorboard.exists() else run.root
    return os.access(target, os.W_OK) and os.access(run.root, os.W_OK)


def _is_whole(members: Sequence[Worker]) -> bool:
    size = max((member.world_size or 1 for member in members), default=1)
    return len({member.rank for member in members}) >= size
