"""Which ranks, nodes and links of a preflight differ from their peers, or from a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from haiprof.base.medians import MAD_TO_SIGMA, mean_median, upper_median
from haiprof.base.units import NS_PER_S, duration_text
from haiprof.diagnosis.collective_timeouts import Contradiction, find_contradictions
from haiprof.diagnosis.thresholds import (
    PREFLIGHT_CLOCK_RATIO,
    PREFLIGHT_LINK_RATIO,
    PREFLIGHT_MADS,
    PREFLIGHT_RATIO,
)

_NOISY = ("disk_bytes_per_s", "loader_batches_per_s")
"""What others who use the same disk or cores change: half of the peers' is needed, as of links."""
NONE_IS_USUAL, TIMEOUT = "none is usual", "timeout"
_CLOCK = "gpu_load_clock_mhz"
_HELD_DOWN = {
    0x2: "its application clocks", 0x4: "its power cap", 0x8: "a slowdown of the hardware",
    0x10: "sync boost", 0x20: "temperature", 0x40: "temperature (hardware)",
    0x80: "the power brake",
}  # fmt: skip
"""Source: nvmlClocksEventReasons in nvml.h."""
_NOT_USUAL = 0x8 | 0x20 | 0x40 | 0x80
"""A GPU that multiplies matrices reaches its power cap; these say that something is wrong."""
_OF_PROGRAMS = (13, 31, 43, 45, 68, 109)
"""XIDs that say nothing of the GPU. Source: what NVIDIA's k8s-device-plugin leaves out."""
_XID_S = 86_400.0
"""What is older was as a rule mended, by a reset that the log need not show. Own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One thing that differs."""

    what: str
    """`cpu_loops_per_s`, `send_bytes_per_s`, `limit cpu_cores`, ..."""
    rank: int | None = None
    """None for a link between nodes, and for what all ranks share."""
    host: str | None = None
    to_host: str | None = None
    """The receiver of a link."""
    value: float
    usual: float | None
    """Of its peers or of the baseline; None where the peers have no such limit."""
    against: str = "peers"
    """`peers`, `baseline`, `maximum` (of its own clock), `timeout`, or `none is usual`."""
    reason: str = ""
    """What is known beside the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What was measured, and what to leave out."""

    ranks: tuple[Mapping[str, Any], ...]
    suspects: tuple[Suspect, ...]
    leave_out: tuple[str, ...]
    """Nodes."""
    unread: tuple[str, ...]
    """What could not be read, and why."""

    @property
    def slurm(self) -> str:
        """For srun or sbatch; empty where no node is to be left out."""
        return f"--exclude={','.join(self.leave_out)}" if self.leave_out else ""

    @property
    def rates(self) -> dict[str, float]:
        """The median of each rate, which a baseline keeps."""
        return {what: mean_median(list(own.values())) for what, own in _rates(self.ranks).items()}


def judge_preflight(
    ranks: Sequence[Mapping[str, Any]], baseline: Mapping[str, float] | None = None
) -> Preflight:
    """Compares what ranks measured (`preflight_probe`) with their peers and `Preflight.rates`."""
    known = baseline or {}
    found = [*_slow_ranks(ranks, known), *_slow_clocks(ranks, known), *_tight_limits(ranks)]
    found += [*_faults(ranks), *_xids(ranks)]
    found += _slow_links(ranks, {suspect.rank for suspect in found})
    found += _contradictions(ranks)
    found += _below_baseline(ranks, known, {suspect.what for suspect in found})
    return Preflight(
        ranks=tuple(ranks),
        suspects=tuple(found),
        leave_out=_blame_nodes(ranks, found),
        unread=tuple(_unread(ranks)),
    )


def _rates(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """By what was measured: each rank's."""
    found: dict[str, dict[int, float]] = {}
    for own in ranks:
        rates = {**own["rates"]}
        if "all_reduce" in own:
            rates["all_reduce_bytes_per_s"], latency = own["all_reduce"]
            rates["all_reduces_per_s"] = 1 / latency
        for what, value in rates.items():
            found.setdefault(what, {})[own["rank"]] = value
    return found


def _lowest(values: Sequence[float], ratio: float) -> float:
    """What is below it is slow: far from the median in MADs and as a share."""
    # Half of what the share allows is slow however the peers spread: a node of four that is slow to
    # all others makes half of the links slow, and the MAD as large as the fault.
    usual = upper_median(values)  # of two the better one: the worse is not usual
    mad = mean_median([abs(value - usual) for value in values]) * MAD_TO_SIGMA
    return min(usual * (1 - ratio), max(usual * (1 - ratio) / 2, usual - PREFLIGHT_MADS * mad))


def _slow_ranks(
    ranks: Sequence[Mapping[str, Any]], baseline: Mapping[str, float]
) -> Iterator[Suspect]:
    hosts = {own["rank"]: own["host"] for own in ranks}
    for what, own in _rates(ranks).items():
        if what.startswith("all_reduce"):
            continue  # all ranks wait for the slowest: it says nothing of one
        if what == _CLOCK:
            continue
        ratio = PREFLIGHT_LINK_RATIO if what in _NOISY else PREFLIGHT_RATIO
        values = list(own.values())
        lowest, known = _lowest(values, ratio), baseline.get(what)
        for rank, value in own.items():
            if len(values) > 1 and value < lowest:
                usual, against = upper_median(values), "peers"
            elif known is not None and value < known * (1 - ratio):
                usual, against = known, "baseline"
            else:
                continue
            yield Suspect(what=what, rank=rank, host=hosts[rank], value=value, usual=usual,
                          against=against)  # fmt: skip


def _slow_clocks(
    ranks: Sequence[Mapping[str, Any]], baseline: Mapping[str, float]
) -> Iterator[Suspect]:
    """GPUs whose clock under load is below that of their peers, or held down by what is unusual."""
    clocks = [(own, own["clock"]["mhz"]) for own in ranks if own["rates"].get(_CLOCK) is not None]
    values = [mhz for _, mhz in clocks]
    known = baseline.get(_CLOCK)
    for own, mhz in clocks:
        bits, highest = int(own["clock"]["reasons"] or 0), own["clock"]["max_mhz"]
        half = highest is not None and mhz < highest * (1 - PREFLIGHT_LINK_RATIO)
        if len(values) > 1 and mhz < _lowest(values, PREFLIGHT_CLOCK_RATIO):
            usual, against = upper_median(values), "peers"
        elif known is not None and mhz < known * (1 - PREFLIGHT_CLOCK_RATIO):
            usual, against = known, "baseline"
        elif bits & _NOT_USUAL or half:
            usual, against = highest, "maximum"
        else:
            continue
        held = dict.fromkeys(word for bit, word in _HELD_DOWN.items() if bits & bit)
        yield Suspect(what=_CLOCK, rank=own["rank"], host=own["host"], value=mhz, usual=usual,
                      against=against,
                      reason=f"held down by {', '.join(held)}" if held else "")  # fmt: skip


def _tight_limits(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Suspect]:
    """Limits below what most ranks have, and fewer GPUs; None is no limit."""
    for what in ("gpu_count", *ranks[0]["limits"]):
        own = [rank[what] if what == "gpu_count" else rank["limits"].get(what) for rank in ranks]
        numbers = [float("inf") if value is None else float(value) for value in own]
        usual = upper_median(numbers)
        for rank, value in zip(ranks, numbers, strict=True):
            if value < usual:
                name = what if what == "gpu_count" else f"limit {what}"
                yield Suspect(what=name, rank=rank["rank"], host=rank["host"], value=value,
                              usual=None if usual == float("inf") else usual)  # fmt: skip


def _faults(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Suspect]:
    """Faults that a GPU tells itself: none of these is usual, whatever the peers have."""
    for rank in ranks:
        for what, value in rank.get("faults", {}).items():
            if value:
                yield Suspect(what=what, rank=rank["rank"], host=rank["host"], to_host=None,
                              value=float(value), usual=0.0, against=NONE_IS_USUAL)  # fmt: skip


def _xids(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Suspect]:
    """Errors that the driver logged of a node's GPUs; a GPU that is lost has no rank."""
    for own in ranks:
        found: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
        for xid in own.get("xids", ()):
            if xid["code"] not in _OF_PROGRAMS and xid["age_s"] < _XID_S:
                found.setdefault((xid["code"], xid["gpu"]), []).append(xid)
        for (code, gpu), same in found.items():
            last = min(same, key=lambda xid: xid["age_s"])
            ago = duration_text(last["age_s"] * NS_PER_S)
            yield Suspect(what=f"xid_{code}", rank=None, host=own["host"], value=len(same),
                          usual=0.0, against=NONE_IS_USUAL,
                          reason=f"GPU {gpu}, last {ago} ago: {last['text']}")  # fmt: skip


def _contradictions(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Suspect]:
    """Settings of timeouts that work against each other; said once where all ranks have them."""
    own = {rank["rank"]: rank["timeouts"] for rank in ranks if "timeouts" in rank}
    found: dict[Contradiction, list[int]] = {}
    for rank, timeouts in own.items():
        for one in find_contradictions(timeouts["set"], timeouts["collective_s"]):
            found.setdefault(one, []).append(rank)
    for one, among in found.items():
        for rank in [None] if len(among) == len(own) else among:
            yield Suspect(what=f"setting {one.variable}", rank=rank, value=one.value,
                          usual=one.against_s, against=TIMEOUT, reason=one.reason)  # fmt: skip


def _unread(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for own in ranks:
        for what, why in own.get("unread", {}).items():
            yield f"rank {own['rank']} on {own['host']}: {what}: not readable, because {why}"


def _slow_links(ranks: Sequence[Mapping[str, Any]], slow: set[int | None]) -> Iterator[Suspect]:
    """Directions between nodes, and inside them, that are far below the others of their kind."""
    # Ranks that are slow by themselves say nothing of a link.
    hosts = {own["rank"]: own["host"] for own in ranks}
    links: dict[tuple[str, str], list[float]] = {}
    for own in ranks:
        for to_rank, (bytes_per_s, _) in own.get("sends", {}).items():
            if {own["rank"], int(to_rank)} & slow:
                continue
            links.setdefault((own["host"], hosts[int(to_rank)]), []).append(bytes_per_s)
    for inside in (False, True):
        rates = {
            link: mean_median(values)
            for link, values in links.items()
            if (link[0] == link[1]) == inside
        }
        if len(rates) < 2:
            continue
        values = list(rates.values())
        lowest = _lowest(values, PREFLIGHT_LINK_RATIO)
        for (host, to_host), value in rates.items():
            if value < lowest:
                yield Suspect(what="send_bytes_per_s", host=host, to_host=to_host, value=value,
                              usual=upper_median(values))  # fmt: skip


def _below_baseline(
    ranks: Sequence[Mapping[str, Any]], baseline: Mapping[str, float], named: set[str]
) -> Iterator[Suspect]:
    """What all ranks share: a slow link explains a slow all-reduce, and is not said twice."""
    for what, own in _rates(ranks).items():
        known, value = baseline.get(what), mean_median(list(own.values()))
        shared = what.startswith("all_reduce") and "send_bytes_per_s" not in named
        if shared and known is not None and value < known * (1 - PREFLIGHT_LINK_RATIO):
            yield Suspect(what=what, value=value, usual=known, against="baseline")


def _blame_nodes(
    ranks: Sequence[Mapping[str, Any]], suspects: Sequence[Suspect]
) -> tuple[str, ...]:
    """Nodes of slow ranks; of slow links the node that most of them share, if there is one."""
    blamed = {one.host for one in suspects if one.to_host is None and one.host is not None}
    ends: dict[str, int] = {}
    for one in suspects:
        if one.to_host is not None and one.host is not None:
            for host in {one.host, one.to_host}:
                ends[host] = ends.get(host, 0) + 1
    most = max(ends.values(), default=0)
    worst = [host for host, count in ends.items() if count == most]
    if len(worst) == 1:
        blamed.add(worst[0])
    return tuple(sorted(blamed)) if len(blamed) < len({own["host"] for own in ranks}) else ()
