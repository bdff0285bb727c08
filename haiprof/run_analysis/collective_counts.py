"""How many collectives a rank begins per second: from its process groups' sequence numbers."""

from __future__ import annotations

import numpy as np

from haiprof.base.errors import RunFormatError
from haiprof.base.units import NS_PER_S
from haiprof.run_analysis.records import read_table, record_columns
from haiprof.run_analysis.run_files import RunFiles
from haiprof.run_format.schema import HEARTBEAT, NULL_I64


def collectives_per_s(files: RunFiles, rank: int, *, begin_ns: int, end_ns: int) -> float | None:
    """Collectives that the last attempt of a rank began, of all its groups together.

    Args:
        files: The run.
        rank: The rank.
        begin_ns: Unix time; readings before it do not count.
        end_ns: The same of those after it.

    Returns:
        Per second; None where fewer than two readings of each group lie between these times. A
        torch without a Flight Recorder for its backend (before 2.9: all but NCCL) has none.
    """
    own = [each for each in files.ranks if each.rank == rank]
    if not own:
        return None
    try:
        records = read_table(max(own, key=lambda r: r.attempt).paths.heartbeat, HEARTBEAT)
    except RunFormatError:
        return None
    columns = record_columns(records)
    offset_ns = records.clock.wall_ns - records.clock.mono_ns
    time_ns, begun = columns["time_ns"] + offset_ns, columns["enqueued"]
    inside = (time_ns >= begin_ns) & (time_ns <= end_ns) & (begun != NULL_I64)
    rates = []
    for group in np.unique(columns["group"][inside]).tolist():
        chosen = inside & (columns["group"] == group)
        times, numbers = time_ns[chosen], begun[chosen]
        if len(times) > 1 and times[-1] > times[0]:
            rates.append(float(numbers[-1] - numbers[0]) / (float(times[-1] - times[0]) / NS_PER_S))
    return sum(rates) if rates else None
