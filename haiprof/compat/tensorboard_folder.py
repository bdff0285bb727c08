"""The folder that TensorBoard reads: a run's scalars, and its traces by window as links."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.base.errors import HaiprofError, TraceFormatError
from haiprof.base.safe_files import (
    MadeFolder,
    list_folder,
    make_folder,
    make_link,
    remove_file,
    remove_folder,
)
from haiprof.run_format.layout import PLAIN_TRACE_SUFFIX, TRACE_SUFFIX, RunPaths
from haiprof.trace_analysis.files import Worker, files_by_window

_UNSAFE = re.compile(r"[^A-Za-z0-9-]+")
_FOLDER = "window"
_WINDOW = re.compile(_FOLDER + r"\d+")
_LINK = re.compile(r"rank\d+_[A-Za-z0-9-]+" + re.escape(PLAIN_TRACE_SUFFIX) + r"(\.gz)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What TensorBoard reads."""

    folder: Path
    below: Path
    """The run, or the temporary folder: within it no link is followed."""
    source: Path
    """Where the traces themselves are."""
    is_temporary: bool = False
    """Whether it is removed at the end, as the run is not the user's own."""

    @property
    def traces(self) -> Path:
        """Below it one folder per window, with a link to each rank's trace."""
        return self.folder / "traces"

    def link_windows(self, *, whole_only: bool) -> int:
        """Links the windows that are not yet linked."""
        try:
            found = files_by_window(self.source)
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
        # Made elsewhere first: TensorBoard must not find it incomplete.
        fresh = MadeFolder.temporary(".haiprof-", self.below)
        try:
            for name, worker in link_names(members).items():
                make_link(fresh.path / name, worker.path.resolve(), below=self.below)
            fresh.move(folder)
        except OSError:
            fresh.remove()
            raise

    def unlink_windows(self) -> None:
        """Removes the links, and the folders that held nothing else."""
        for window in _names(self.traces, self.below):
            folder = self.traces / window
            if not _WINDOW.fullmatch(window) or folder.is_symlink():
                continue
            for name in _names(folder, self.below):
                if _LINK.fullmatch(name) and (folder / name).is_symlink():
                    remove_file(folder / name, below=self.below)
            _remove_empty(folder, self.below)
        _remove_empty(self.traces, self.below)


def _names(folder: Path, below: Path) -> list[str]:
    try:
        return list_folder(folder, below=below)
    except FileNotFoundError:
        return []


def _remove_empty(folder: Path, below: Path) -> None:
    """Removes a folder unless it holds files of others."""
    with contextlib.suppress(OSError):
        remove_folder(folder, below=below)


def link_names(members: Sequence[Worker]) -> dict[str, Worker]:
    """The traces of one window by the names that torch-tb-profiler takes its workers from."""
    digits = len(str(max(member.rank for member in members)))
    found: dict[str, Worker] = {}
    for member in members:
        host = _UNSAFE.sub("-", member.host or "").strip("-")[:64] or "host"
        stem, number = f"rank{member.rank:0{digits}}_{host}", 1
        ending = TRACE_SUFFIX if member.is_packed else PLAIN_TRACE_SUFFIX
        name = stem + ending
        while name in found:
            number += 1
            name = f"{stem}-{number}{ending}"
        found[name] = member
    return found


@contextlib.contextmanager
def open_layout(run: RunPaths | None, source: Path) -> Iterator[Layout]:
    """The folder, while TensorBoard runs."""
    with contextlib.ExitStack() as stack:
        if run is not None and _is_ours(run):
            layout = Layout(folder=run.tensorboard, below=run.root, source=source)
        else:
            base = stack.enter_context(MadeFolder.temporary("haiprof-tensorboard-"))
            layout = Layout(folder=base / "log", below=base, source=source, is_temporary=True)
        try:
            layout.unlink_windows()  # of an earlier server that was killed
            make_folder(layout.traces, below=layout.below)
            yield layout
        except OSError as error:
            raise HaiprofError(
                f"{layout.folder}: cannot be written: {error.strerror or error}"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                layout.unlink_windows()


def _is_ours(run: RunPaths) -> bool:
    """Whether only this user can write event files and links there."""
    try:
        make_folder(run.tensorboard / "traces", below=run.root, own=True)
    except OSError:
        return False
    return os.access(run.root, os.W_OK) and os.access(run.tensorboard, os.W_OK)


def _is_whole(members: Sequence[Worker]) -> bool:
    size = max((member.world_size or 1 for member in members), default=1)
    return len({member.rank for member in members}) >= size
