"""Raw traces of the ranks: complete once their sidecar exists, then compressed beside the job."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import RunFormatError, convert_os_errors
from haiprof.base.options import safe_name
from haiprof.run_format import layout
from haiprof.run_format.manifest import has_ended
from haiprof.run_format.reader import read_json

_SIDECAR_LIMIT_BYTES = 1 << 20
_ABANDONED_S = 600.0  # a part of that age is no longer being finished
_STEM = re.compile(
    r"(?P<stem>rank(?P<rank>\d{1,7})_(?P<host>[A-Za-z0-9._-]{1,80})_(?P<pid>\d{1,10})"
    r"\.(?P<start>\d{1,19}))(?![\d])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stem:
    """The name of one window's files, `rank{rank}_{host}_{pid}.{start_wall_ns}`, parsed."""

    text: str
    rank: int
    host: str  # as `safe_name` writes it
    pid: int
    start_wall_ns: int

    def is_of(self, host: str) -> bool:
        """Whether a process of this host wrote it."""
        return safe_name(self.host) == safe_name(host)


class _File:
    """A file of a window, in a folder of the run."""

    def __init__(self, folder: str, suffix: str) -> None:
        self._folder, self._suffix = folder, suffix

    def __get__(self, part: Part, _: object = None) -> Path:
        folder: Path = getattr(part.run, self._folder)
        return folder / f"{part.stem.text}{self._suffix}"


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's window: its raw files in `traces/.parts`, and the finished ones."""

    run: layout.RunPaths
    stem: Stem

    sidecar = _File("trace_parts", layout.SIDECAR_SUFFIX)  # the rank's description, written last
    raw = _File("trace_parts", layout.RAW_SUFFIX)  # the trace, as Kineto wrote it
    et_raw = _File("trace_parts", layout.ET_RAW_SUFFIX)  # the execution trace of the same window
    trace = _File("traces", layout.TRACE_SUFFIX)  # the trace, finished
    et = _File("traces", layout.ET_SUFFIX)  # the execution trace, finished

    def sidecar_content(self) -> Mapping[str, Any]:
        """The sidecar."""
        path = self.sidecar
        with convert_os_errors(RunFormatError, str(path)):
            size, mode = path.lstat().st_size, path.lstat().st_mode
        if not stat.S_ISREG(mode) or size > _SIDECAR_LIMIT_BYTES:
            raise RunFormatError(f"{path}: not a sidecar of a trace ({size} bytes)")
        facts = read_json(path)
        said = (facts.get("stem"), facts.get("rank"))
        if said != (self.stem.text, self.stem.rank):
            raise RunFormatError(f"{path}: says that it belongs to stem and rank {said!r}")
        return facts


def parse_stem(name: str) -> Stem | None:
    """The stem in a file's name, also in a temporary one (`.rank...`); None where there is none."""
    if (found := _STEM.match(name.lstrip("."))) is None:
        return None
    return Stem(
        text=found["stem"], rank=int(found["rank"]), host=found["host"], pid=int(found["pid"]),
        start_wall_ns=int(found["start"]),
    )  # fmt: skip


def complete_parts(run: layout.RunPaths, host: str | None = None) -> list[Part]:
    """Windows whose sidecar is there, by name."""
    found = []
    for name in list_names(run.trace_parts):
        stem = parse_stem(name)
        if stem is None or name != f"{stem.text}{layout.SIDECAR_SUFFIX}":
            continue
        if host is None or stem.is_of(host):
            found.append(Part(run, stem))
    return found


def readable_parts(run: layout.RunPaths) -> list[Part]:
    """Complete windows that will not be finished any more, so that their raw traces are read.

    They are of a run that has ended, or older than ten minutes.
    """
    parts = [part for part in complete_parts(run) if part.raw.is_file()]
    if not parts or has_ended(run):
        return parts
    found = []
    for part in parts:
        with contextlib.suppress(OSError):  # it has just been finished
            if time.time() - part.sidecar.stat().st_mtime > _ABANDONED_S:
                found.append(part)
    return found


def list_names(folder: Path) -> list[str]:
    """Names in a folder, sorted; none where it does not exist."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
