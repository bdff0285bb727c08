"""Checkpoints that are written beside the training thread, and the steps that began meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from haiprof.base.intervals import Ints, union
from haiprof.run_analysis.run_files import RankFiles, integer, text
from haiprof.run_analysis.step_positions import is_inside

FREE, BESIDE, NEITHER = 0, 1, -1
"""Of a step: no save was written in it; one was when it began; one began in it, or not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundSave:
    """One of them; Unix times in ns."""

    start_ns: int
    end_ns: int
    begun_at: tuple[str, int, str] | None
    """File, line and function of the job that began it; None where that was not seen."""


def background_saves(files: RankFiles) -> list[BackgroundSave]:
    """Those of one rank's attempt, in the order in which they ended."""
    offset_ns, found = files.clock_offset_ns, []
    for line in files.of_type("checkpoint"):
        start, end = integer(line.get("beside_ns")), integer(line.get("end_ns"))
        if offset_ns is None or start is None or end is None or end <= start:
            continue
        file, function = text(line.get("begun_file")), text(line.get("begun_function"))
        number = integer(line.get("begun_line"))
        known = file is not None and number is not None and function is not None
        found.append(BackgroundSave(
            start_ns=start + offset_ns, end_ns=end + offset_ns,
            begun_at=(file or "", number or 0, function or "") if known else None,
        ))  # fmt: skip
    return found


def steps_beside(saves: Iterable[BackgroundSave], begin_ns: Ints) -> Ints:
    """BESIDE, FREE or NEITHER of each step, given the begin of all in Unix time."""
    starts, ends = np.array(
        [(save.start_ns, save.end_ns) for save in saves], dtype=np.int64
    ).reshape(-1, 2).T  # fmt: skip
    times = union(starts, ends)
    # The step in which a save begins also holds what the training thread does for it: it copies.
    place = np.searchsorted(times.starts, begin_ns, "left")
    next_ns = np.append(begin_ns[1:], np.iinfo(np.int64).max)
    begins = np.append(times.starts, np.iinfo(np.int64).max)[place] < next_ns
    found = np.where(begins, NEITHER, FREE)
    return np.where(is_inside(*times, begin_ns), BESIDE, found)
