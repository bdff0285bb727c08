"""Waiting for a file, as the NFS client of the node counted it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from haiprof.base.units import duration_text, number_text, visible
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.verdict import Evidence, evidence_rows
from haiprof.run_analysis.network_storage import MountRequests

_SLOTS = (
    "let the client send more at once: mount with nconnect=N, or raise "
    "sunrpc.tcp_max_slot_table_entries and nfs.max_session_slots (`haiprof preflight` shows them)"
)
_SERVER = (
    "the server or the way to it is slow: a copy of the data on a local disk, or larger files read "
    "in order; nfsiostat and the server's own load tell more"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NfsWait:
    """What a sentence on waiting for a file goes on with."""

    text: str
    remedy: str
    evidence: tuple[Evidence, ...]


def nfs_wait(inputs: RuleInputs, ranks: Collection[int], share: float) -> NfsWait | None:
    """The NFS mount whose requests may be a wait of such a share of the time; None where none is.

    It may be where so many were under way on average, on a node of these ranks (none: of any).
    """
    hosts = dict(inputs.ranks.select("rank", "host").drop_nulls().rows())
    own = {hosts.get(rank) for rank in ranks or hosts}
    found = next((each for each in inputs.mounts if each.host in own), None)
    if found is None or found.under_way < share:
        return None
    queue, rtt = found.queue_ns, found.rtt_ns
    is_held = queue is not None and rtt is not None and queue > rtt
    again = found.sent_again_per_s
    return NfsWait(
        text=f"NFS {visible(found.point)}: a {found.kind} takes {_parts_text(found)}"
        + (": RPC slots full" if is_held else "")
        + (f", {number_text(again)} requests a second sent again" if again else ""),
        remedy=_SLOTS if is_held else _SERVER,
        evidence=evidence_rows(
            (f"{found.kind}s of NFS {visible(found.point)} a second", found.count_per_s, "count"),
            ("such requests under way, on average", found.under_way, "count"),
            ("one of them", found.execute_ns, "ns"),
            ("waiting on this client to be sent", queue, "ns"),
            ("from sending to the reply (RTT)", rtt, "ns"),
            ("requests sent again a second", again, "count"),
        ),
    )


def _parts_text(found: MountRequests) -> str:
    """`340 ms (RTT 40.0 ms, queue 300 ms)`."""
    known = (("RTT", found.rtt_ns), ("queue", found.queue_ns))
    parts = [f"{name} {duration_text(ns)}" for name, ns in known if ns is not None]
    return duration_text(found.execute_ns) + (f" ({', '.join(parts)})" if parts else "")
