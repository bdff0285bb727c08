"""The rings of this node's ranks: what a killed process had recorded is added to its file."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from haiprof.base.errors import RunFormatError
from haiprof.linux.procfs import read_start_ticks, read_stat
from haiprof.run_format.layout import RankPaths
from haiprof.run_format.reader import read_records
from haiprof.run_format.ring import NEVER, RING_BYTES, RING_CAPACITY, Ring, read_ring
from haiprof.run_format.schema import PHASES, TAG_BITS
from haiprof.run_format.writer import LineWriter, add_records

_F_GET_SEALS = 1034  # of <linux/fcntl.h>; the module has it from Python 3.13 on
_SEAL_SHRINK, _SEAL_GROW = 0x0002, 0x0004
_GONE = (b"Z", b"X", b"x")
_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldRing:
    """A ring of which we hold a descriptor."""

    number: int
    pid: int
    """0 for a process of another PID namespace: its end is seen by that of the job alone."""
    start_ticks: int | None
    """None where it had ended before we looked."""
    paths: RankPaths


@dataclass
class Rings:
    """Holds the rings that ranks have given us; all of it happens in the launcher's tick."""

    _held: list[_HeldRing] = field(default_factory=list)

    def add(self, number: int, pid: int, paths: RankPaths) -> None:
        """Takes over a descriptor that a rank has sent, or closes it if it is none of a ring."""
        if not _is_ring(number):
            os.close(number)
            return
        ticks = read_start_ticks(_ROOT, pid) if pid else None
        self._held.append(_HeldRing(number=number, pid=pid, start_ticks=ticks, paths=paths))

    def tick(self) -> None:
        """Looks which processes have ended, and adds what their files lack."""
        for held in [held for held in self._held if held.pid and _has_ended(held)]:
            self._held.remove(held)
            _keep(held)

    def close(self) -> None:
        """The job is over: the same, and lets go of the others."""
        self.tick()
        held, self._held = self._held, []
        for each in held:
            if each.pid:
                os.close(each.number)
            else:
                _keep(each)


def _is_ring(number: int) -> bool:
    """Whether it is sealed memory of a ring's size, whose owner we are: reading it cannot hang."""
    state = os.fstat(number)
    if not stat.S_ISREG(state.st_mode) or state.st_size != RING_BYTES:
        return False
    if state.st_uid != os.geteuid():
        return False
    try:
        seals = fcntl.fcntl(number, _F_GET_SEALS)
    except OSError:  # a file of a disk
        return False
    return seals & (_SEAL_SHRINK | _SEAL_GROW) == _SEAL_SHRINK | _SEAL_GROW


def _has_ended(held: _HeldRing) -> bool:
    fields = read_stat(_ROOT, held.pid)
    return fields is None or fields[0] in _GONE or int(fields[19]) != held.start_ticks


def _keep(held: _HeldRing) -> None:
    """Adds to the file what it lacks, and says how the recording ended, if not by itself."""
    try:
        ring = read_ring(os.pread(held.number, RING_BYTES, 0))
    finally:
        os.close(held.number)
    if ring is None or ring.ended:
        return
    kept, reason = 0, None
    try:
        kept, lacking = _add_lacking(ring, held.paths.phases)
        if kept < lacking:
            reason = "no space left"
    except (OSError, RunFormatError) as error:
        lacking, reason = len(ring.lacking(b"")), str(error)
    _note(held, ring, kept=kept, lost=lacking - kept + ring.overwritten, reason=reason)


def _add_lacking(ring: Ring, path: Path) -> tuple[int, int]:
    """How many spans were added, and how many the file lacked."""
    lacking = ring.lacking(read_records(path, first=-RING_CAPACITY).data)
    if not lacking:
        return 0, 0
    data = array("q", [word for record in lacking for word in record]).tobytes()
    return add_records(path, PHASES, data) // PHASES.record_bytes, len(lacking)


def _note(held: _HeldRing, ring: Ring, *, kept: int, lost: int, reason: str | None) -> None:
    try:
        writer = LineWriter(held.paths.events)
    except OSError:
        return  # the run directory is gone or full: nobody is left to tell
    writer.append(
        {
            "type": "unclean_end",
            "time_ns": time.perf_counter_ns(),
            "last_span_ns": ring.records[-1][1] >> TAG_BITS if ring.records else None,
            "open_ns": ring.open_ns,
            "optimizer_steps": ring.step_count,
            "recording": ring.opens_ns < NEVER,
            "added_span_count": kept,
            "lost_span_count": lost,
            "reason": reason,
        }
    )
    writer.close()
