"""A rank's window on disk: raw trace and execution trace whole, the sidecar last."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from haiprof.base.safe_files import make_folder, remove_file, rename
from haiprof.in_job.identity import local_rank, rank_and_world, restart
from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.layout import ET_RAW_SUFFIX, RAW_SUFFIX, SIDECAR_SUFFIX, RunPaths
from haiprof.run_format.schema import SCHEMA_VERSION
from haiprof.run_format.writer import write_json

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_HOST_LIMIT = 80


class WindowFiles:
    """The files of one window: drafts until all of them are whole."""

    def __init__(self, run: RunPaths, clock: ClockAnchor) -> None:
        self._root, self._folder = run.root, run.trace_parts
        self.clock = clock
        """When the window began."""
        self._draft = self.stem
        make_folder(self._folder, below=run.root, trusted=True)

    @property
    def stem(self) -> str:
        """What the window's files are named by."""
        host = _UNSAFE.sub("-", socket.gethostname())[:_HOST_LIMIT] or "host"
        rank, _ = rank_and_world()
        return f"rank{rank}_{host}_{os.getpid()}.{self.clock.wall_ns}"

    @property
    def raw_draft(self) -> Path:
        """Where Kineto writes."""
        return self._folder / f".{self._draft}{RAW_SUFFIX}"

    @property
    def et_draft(self) -> Path:
        """Where the execution trace observer writes."""
        return self._folder / f".{self._draft}{ET_RAW_SUFFIX}"

    def finish(self, details: Mapping[str, Any], *, execution_trace: bool) -> dict[str, Any]:
        """Gives the files their names and writes the sidecar; what that says."""
        raw_bytes = self.raw_draft.stat().st_size
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if raw_bytes >= limit != resource.RLIM_INFINITY:  # torch does not say that it was cut
            raise OSError(27, "larger than a file may be (ulimit -f)", str(self.raw_draft))
        et_bytes = self.et_draft.stat().st_size if execution_trace else None
        rank, world = rank_and_world()
        content = {
            "version": SCHEMA_VERSION,
            "stem": self.stem,
            "rank": rank,
            "world_size": world,
            "restart": restart(),
            "local_rank": local_rank(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "event_count": None,
            **details,
            "raw_bytes": raw_bytes,
            "et_bytes": et_bytes,
        }
        rename(self.raw_draft, self._folder / f"{self.stem}{RAW_SUFFIX}", below=self._root)
        if execution_trace:
            rename(self.et_draft, self._folder / f"{self.stem}{ET_RAW_SUFFIX}", below=self._root)
        write_json(self._folder / f"{self.stem}{SIDECAR_SUFFIX}", content, below=self._root)
        return content

    def drop(self) -> None:
        """Removes the drafts."""
        for draft in (self.raw_draft, self.et_draft):
            with contextlib.suppress(OSError):
                remove_file(draft, below=self._root)
