"""What the NFS clients of a job's nodes waited for, by mount, while its judged steps ran."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats
from haiprof.run_analysis.counters import OwnerSeries, read_sources
from haiprof.run_analysis.run_files import RunFiles

REQUESTS = {"server_read": "read", "server_write": "write", "metadata": "metadata request"}
"""Kinds of requests, by how their counters begin."""
_PARTS = ("queue", "rtt", "execute")
_WANTED = frozenset(
    ("filesystem", name)
    for kind in REQUESTS
    for name in (f"{kind}_count_per_s", *(f"{kind}_{part}_ns" for part in _PARTS))
) | {("filesystem", "retransmission_count_per_s")}


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRequests:
    """The requests of one kind of one NFS mount."""

    host: str
    point: str
    """Where it is mounted."""
    kind: str
    """Of REQUESTS: what one of them is."""
    count_per_s: float
    execute_ns: float
    """Mean time of one, from the call to the end."""
    queue_ns: float | None
    """Of that, waiting on this client to be sent; None: not counted."""
    rtt_ns: float | None
    """And from sending to the reply."""
    sent_again_per_s: float | None
    """Requests of all kinds that were sent again."""

    @property
    def under_way(self) -> float:
        """How many of them were under way on average."""
        return self.count_per_s * self.execute_ns / 1e9


def mount_requests(run: RunFiles, windows: pl.DataFrame) -> tuple[MountRequests, ...]:
    """Those that were under way most come first; `windows` are `host`, `begin`, `end`."""
    spans = {host: (begin, end) for host, begin, end in windows.rows()}
    found = []
    for source in read_sources(run, _WANTED, coarse=True):
        if source.host not in spans:
            continue
        series: dict[str, dict[str, OwnerSeries]] = {}
        for metric in source.metrics:
            for each in source.series(metric):
                if each.owner[3] is not None:
                    own = each.cut(*spans[source.host])
                    series.setdefault(each.owner[3], {})[metric.name] = own
        found += [
            known
            for point, own in series.items()
            for kind in REQUESTS
            if (known := _requests(source.host, point, kind, own)) is not None
        ]
    return tuple(sorted(found, key=lambda each: -each.under_way))


def _requests(
    host: str, point: str, kind: str, series: dict[str, OwnerSeries]
) -> MountRequests | None:
    count = series.get(f"{kind}_count_per_s")
    if count is None or not count.values.sum():
        return None
    parts = dict.fromkeys(_PARTS)
    for part in _PARTS:
        times = series.get(f"{kind}_{part}_ns")
        if times is None:
            continue
        # The mean over all requests, of means of those between two samples each.
        here = np.isin(times.time_ns, count.time_ns)
        many: Floats = count.values[np.isin(count.time_ns, times.time_ns)]
        parts[part] = float(np.average(times.values[here], weights=many)) if many.sum() else None
    if parts["execute"] is None:
        return None
    again = series.get("retransmission_count_per_s")
    return MountRequests(
        host=host, point=point, kind=REQUESTS[kind],
        count_per_s=float(count.values.mean()),
        execute_ns=parts["execute"], queue_ns=parts["queue"], rtt_ns=parts["rtt"],
        sent_again_per_s=None if again is None or not len(again.values)
        else float(again.values.mean()),
    )  # fmt: skip
