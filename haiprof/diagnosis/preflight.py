"""Which ranks, nodes and links of a preflight differ from their peers, or from a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from haiprof.base.medians import MAD_TO_SIGMA, mean_median, upper_median
from haiprof.diagnosis.thresholds import PREFLIGHT_LINK_RATIO, PREFLIGHT_MADS, PREFLIGHT_RATIO

_NOISY = ("disk_bytes_per_s", "loader_batches_per_s")
"""What others who use the same disk or cores change: half of the peers' is needed, as of links."""


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
    """`peers` or `baseline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What was measured, and what to leave out."""

    ranks: tuple[Mapping[str, Any], ...]
    suspects: tuple[Suspect, ...]
    leave_out: tuple[str, ...]
    """Nodes."""

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
    found = [*_slow_ranks(ranks, baseline or {}), *_tight_limits(ranks), *_faults(ranks)]
    found += _slow_links(ranks, {suspect.rank for suspect in found})
    found += _below_baseline(ranks, baseline or {}, {suspect.what for suspect in found})
    return Preflight(
        ranks=tuple(ranks), suspects=tuple(found), leave_out=_blame_nodes(ranks, found)
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
                              value=float(value), usual=0.0, against="peers")  # fmt: skip


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
    blamed = {one.host for one in suspects if one.rank is not None and one.host is not None}
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
