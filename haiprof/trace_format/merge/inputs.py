"""The files to merge: one per rank, with the rank, host and clock that each states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from haiprof.base.errors import TraceFormatError
from haiprof.trace_format.file_ranks import MERGED_KEY, rank_of
from haiprof.trace_format.find import by_rank, trace_files
from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.kineto.times import exact_ns
from haiprof.trace_format.run_windows import one_window

WALL_FROM_NS = 10**18
"""September 2001: an earlier time is not Unix time but counts from something else."""
_SAID_BEFORE = {"distributedInfo", "baseTimeNanoseconds", "haiprof"}
"""Where one of these precedes the events, the metadata behind them is not needed."""


class _Stamp(msgspec.Struct):
    ph: msgspec.Raw = msgspec.Raw(b"")
    ts: msgspec.Raw = msgspec.Raw(b"null")


_STAMPS = msgspec.json.Decoder(list[_Stamp])


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInput:
    """One file before it is merged."""

    path: Path
    rank: int | None
    """As the file states it; `by_rank` numbers the others."""
    metadata: dict[str, Any]
    first_ns: int | None
    """Time of one of its first events, less `base_ns`; None in a file without events."""

    @property
    def base_ns(self) -> int:
        """What its profiler subtracted from its stamps."""
        base = self.metadata.get("baseTimeNanoseconds")
        return base if type(base) is int and abs(base) < 1 << 62 else 0

    @property
    def has_wall_clock(self) -> bool:
        """Whether its times are Unix time once `base_ns` is added."""
        return self.first_ns is not None and self.base_ns + self.first_ns >= WALL_FROM_NS

    @property
    def host(self) -> str | None:
        """The machine it was recorded on, where the file states it."""
        for said in (self.metadata.get("haiprof"), self.metadata):
            host = said.get("host") or said.get("host_name") if isinstance(said, dict) else None
            if isinstance(host, str) and host:
                return host
        return None


def merge_files(sources: Sequence[Path], window: int | None) -> tuple[list[Path], int]:
    """The files to merge, and how many are of other windows."""
    every = list(dict.fromkeys(path for source in sources for path in trace_files(source)))
    chosen = one_window(every, window)
    return chosen, len(every) - len(chosen)


def merge_inputs(
    paths: Sequence[Path], *, ranks: frozenset[int] | None = None
) -> dict[int, TraceInput]:
    """Reads what the files state about themselves, by rank."""
    found = by_rank(trace_input(path) for path in paths)
    if ranks is None:
        return found
    missing = sorted(ranks - found.keys())
    if missing:
        raise TraceFormatError(
            f"{paths[0].parent}: no trace of rank {', '.join(map(str, missing))}",
            hint=f"there are ranks {', '.join(map(str, found))}",
        )
    return {rank: each for rank, each in found.items() if rank in ranks}


def trace_input(path: Path) -> TraceInput:
    """Reads what a file states about itself; all of it only where that stands behind the events."""
    text = TraceText(path)
    texts = event_texts(text)
    first = next(texts, b"")
    if not _SAID_BEFORE & text.metadata.keys():
        for _ in texts:
            pass
    if MERGED_KEY in text.metadata:
        raise TraceFormatError(
            f"{path}: it is a merged trace already", hint="name the ranks' own traces"
        )
    return TraceInput(
        path=path,
        rank=rank_of(path, text.metadata),
        metadata=text.metadata,
        first_ns=_first_ns(first),
    )


def _first_ns(events: bytes) -> int | None:
    """The earliest time in the first piece; metadata events may have the time 0."""
    stamps = _STAMPS.decode(b"[" + events + b"]")
    times, good = exact_ns([bytes(each.ts) for each in stamps if bytes(each.ph) != b'"M"'])
    return int(times[good].min()) if good.any() else None
