"""The judged steps of all ranks side by side: what a part of the time takes, and its gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from haiprof.base.arrays import Floats, Ints
from haiprof.base.ledger import POSITIONS
from haiprof.run_analysis.lateness import Arrivals
from haiprof.run_analysis.ledger import COLLECTION, RankTime, TimeTable, spikes
from haiprof.run_analysis.lines import wilson
from haiprof.run_analysis.nesting import Bools
from haiprof.run_analysis.step_positions import BACKWARD

_COUNT = len(POSITIONS)
_Z = 1.96
_BLOCKS = 20
_COVERED_MIN = 8
"""With fewer steps whose collectives are known, waiting is judged by the lengths of backward."""
_ALIKE_RATIO = 0.03
"""Ranks whose mean steps differ by less than this wait for each other."""
_PERIODIC = 0.8
_SPIKE_RATIO = 0.5
"""So much of an account must lie in spikes, or so many gaps between them be alike."""
_GROWN = 1.5
"""An account that is so many times larger in its second part than in its first one has changed."""
_SEEN = 40
"""With fewer samples nothing is said of how an account changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """Steps that all ranks have; where they have none in common, as many of each."""

    ranks: tuple[int, ...]
    step: Ints
    """Numbers of the steps, of the first rank."""
    plain_ns: Mapping[int, Ints]
    """By rank: [position, step] without collections."""
    collected_ns: Mapping[int, Ints]
    """By rank: [position, step] in collections."""
    spike: Mapping[int, Bools]
    """By rank: [position, step] that take much longer than usual."""
    waits_for_all: bool
    """Whether ranks wait for the slowest."""
    peer_ns: Floats
    """[rank, step]: waiting for later ranks."""
    covered: Bools
    """[step]: where that is known."""

    @property
    def period_ns(self) -> Floats:
        """[rank, step]."""
        return np.array([
            self.plain_ns[rank].sum(axis=0) + self.collected_ns[rank].sum(axis=0)
            for rank in self.ranks
        ], dtype=np.float64)  # fmt: skip

    @property
    def own_ns(self) -> Floats:
        """[rank, covered step]: the period less waiting for peers."""
        own: Floats = (self.period_ns - self.peer_ns)[:, self.covered]
        return own

    @property
    def mean_ns(self) -> float:
        """The mean period of the ranks."""
        return float(self.period_ns.mean())

    @property
    def positions(self) -> dict[str, float]:
        """By position: mean time per step over ranks; collections are where they happened."""
        each = [self.plain_ns[rank] + self.collected_ns[rank] for rank in self.ranks]
        means = np.mean([times.mean(axis=1) for times in each], axis=0)
        return {name: float(ns) for name, ns in zip(POSITIONS, means, strict=True) if ns}

    def gains(self, parts: Floats) -> Floats:
        """[step]: what the job's step becomes shorter by without some part of it.

        max_r T[r,k] - max_r (T[r,k] - a[r,k]), where T is a rank's own time, its period less
        waiting for peers: ranks wait for the slowest. Steps where that is not known are left out.

        Args:
            parts: [rank, step]: a, in ns.
        """
        if not self.waits_for_all or len(self.ranks) < 2:
            mean: Floats = parts.mean(axis=0)
            return mean
        own = self.own_ns
        gained: Floats = own.max(axis=0) - (own - parts[:, self.covered]).max(axis=0)
        return gained

    def parts(self, table: TimeTable, rows: Ints) -> Floats:
        """[rank, step]: the time of some rows; ranks that were not sampled are as the others are."""
        share_of, pooled = _shares(table, rows)
        found = []
        for rank in self.ranks:
            share = share_of.get(rank, pooled)
            spiked = self.spike[rank]
            each = np.where(spiked, share[1][:, None], share[0][:, None]) * self.plain_ns[rank]
            collected = (share[2][:, None] * self.collected_ns[rank]).sum(axis=0)
            found.append(each.sum(axis=0) + collected)
        return np.array(found)

    def interval(self, table: TimeTable, rows: Ints, series: Floats) -> tuple[float, float]:
        """Where a mean lies with 95 % certainty, in ns.

        By the samples of the positions that its rows lie in (Wilson 1927), and by its spread over
        blocks of steps.

        Args:
            table: The time table.
            rows: The rows that it is made of.
            series: [step]: what is averaged.
        """
        mean = float(series.mean())
        cells = np.isin(table.cell, np.unique(table.cell[rows])) & (table.count > 0)
        cells &= np.isin(table.rank, np.unique(table.rank[rows]))
        whole, count = float(table.ns[cells].sum()), float(table.count[cells].sum())
        low = high = mean
        if table.count[rows].any() and whole:
            share = min(float(table.ns[rows].sum()) / whole, 1.0)
            below, above = wilson(np.array([share * count]), np.array([count]))
            if share:
                low, high = mean * float(below[0]) / share, mean * float(above[0]) / share
        blocks = np.array(
            [part.mean() for part in np.array_split(series, min(_BLOCKS, len(series)))]
        )
        spread = _Z * float(blocks.std(ddof=1)) / len(blocks) ** 0.5 if len(blocks) > 1 else mean
        return (
            max(mean - float(np.hypot(mean - low, spread)), 0.0),
            mean + float(np.hypot(high - mean, spread)),
        )

    def when(self, table: TimeTable, rows: Ints, series: Floats) -> str:
        """When an account is paid.

        Args:
            table: The time table.
            rows: Its rows.
            series: [step]: its time in each step.
        """
        if len(series) < _COVERED_MIN or not series.sum():
            return "each step"
        spiked = series > 2 * np.median(series) + series.mean() / 2
        if series[spiked].sum() > _SPIKE_RATIO * series.sum() and spiked.mean() <= 0.5:
            return _spike_text(self.step[: len(series)], series, spiked)
        known = rows[table.step[rows] >= 0]
        if table.count[known].sum() < _SEEN:
            return "each step"
        return _change_text(self.step, table.step[known], table.ns[known])


def job_time(ranks: Sequence[RankTime], peers: Mapping[int, Mapping[int, int]] | None) -> JobTime:
    """Puts ranks side by side.

    Args:
        ranks: Those with judged steps, at least one.
        peers: By rank and step: how long it waited for later ranks; None where no collectives are
            known.
    """
    common = ranks[0].step
    for rank in ranks[1:]:
        common = np.intersect1d(common, rank.step)
    count = min(len(rank.step) for rank in ranks)
    if len(common) < count / 2:
        chosen = {rank.rank: np.arange(count) for rank in ranks}
        common = ranks[0].step[:count]
    else:
        chosen = {rank.rank: np.searchsorted(rank.step, common) for rank in ranks}
    plain = {rank.rank: rank.plain_ns[:, chosen[rank.rank]] for rank in ranks}
    collected = {rank.rank: rank.collected_ns[:, chosen[rank.rank]] for rank in ranks}
    means = [float(plain[rank.rank].sum() + collected[rank.rank].sum()) for rank in ranks]
    alike = len(ranks) > 1 and (max(means) - min(means)) < _ALIKE_RATIO * max(means)
    peer, covered = _peer_waits([rank.rank for rank in ranks], common, plain, peers)
    return JobTime(
        ranks=tuple(rank.rank for rank in ranks),
        step=common,
        plain_ns=plain,
        collected_ns=collected,
        spike={rank: spikes(each) for rank, each in plain.items()},
        waits_for_all=len(ranks) > 1 and (peers is not None or alike),
        peer_ns=peer,
        covered=covered,
    )


def find_straggler(time: JobTime, own_ns: Floats) -> tuple[int, float, Floats] | None:
    """The rank that needs longer than the others, steadily; None where there is none.

    On the mean it needs at least half of what the slowest of each step needs beyond the middle one:
    of ranks that take turns in being the slowest none does.

    Args:
        time: All ranks.
        own_ns: [rank, covered step]: each rank's own time, without what was found avoidable.

    Returns:
        The rank, what it needs beyond the middle rank per step, and that by position.
    """
    if not time.waits_for_all or len(time.ranks) < 2:
        return None
    place = int(own_ns.mean(axis=1).argmax())
    middle = np.sort(np.delete(own_ns, place, axis=0), axis=0)[(len(own_ns) - 2) // 2]
    beyond = own_ns[place] - middle
    lost = own_ns.max(axis=0) - np.sort(own_ns, axis=0)[(len(own_ns) - 1) // 2]
    if beyond.mean() <= lost.mean() / 2 or not _is_steady(beyond):
        return None
    cells = np.array([time.plain_ns[rank] for rank in time.ranks], dtype=np.float64)
    cells[:, BACKWARD] = np.maximum(cells[:, BACKWARD] - time.peer_ns, 0.0)
    cells = cells[:, :, time.covered]
    others = np.median(np.delete(cells, place, axis=0), axis=0)
    longer = np.maximum((cells[place] - others).mean(axis=1), 0.0)
    extra = float(beyond.mean())
    return time.ranks[place], extra, longer * min(extra / max(float(longer.sum()), 1.0), 1.0)


def _is_steady(series: Floats) -> bool:
    """Whether most blocks of steps have a good part of the mean."""
    blocks = np.array([part.mean() for part in np.array_split(series, min(_BLOCKS, len(series)))])
    return float((blocks > series.mean() / 4).mean()) >= _PERIODIC


def _peer_waits(
    ranks: Sequence[int],
    step: Ints,
    plain: Mapping[int, Ints],
    peers: Mapping[int, Mapping[int, int]] | None,
) -> tuple[Floats, Bools]:
    """[rank, step] and the steps where it is known: by collectives, else by lengths of backward."""
    if peers is not None:
        covered = np.array(
            [all(number in peers.get(rank, {}) for rank in ranks) for number in step.tolist()]
        )
        if covered.sum() >= _COVERED_MIN:
            waits = [[peers[rank].get(number, 0) for number in step.tolist()] for rank in ranks]
            return np.array(waits, dtype=np.float64), covered
    backward = np.array([plain[rank][BACKWARD] for rank in ranks], dtype=np.float64)
    return backward - backward.min(axis=0), np.ones(len(step), dtype=np.bool_)


def peer_waits(groups: Sequence[Arrivals], starts: Mapping[int, Ints]) -> dict[int, dict[int, int]]:
    """By rank and step: from when a rank began its collectives until the last rank began them.

    Collectives between which ranks have not waited for each other (buckets of one backward) count
    once, by the last of them: the delay before it is the same.

    Args:
        groups: From `run_analysis.lateness.arrivals`.
        starts: By rank: begin of each of its steps, Unix time in ns.
    """
    found: dict[int, dict[int, int]] = {}
    for group in groups:
        created = group.created_ns
        waited = created.min(axis=0)[1:] >= created.max(axis=0)[:-1]
        last = np.flatnonzero(np.append(waited, True))
        waits = (created.max(axis=0) - created)[:, last]
        for place, rank in enumerate(group.ranks):
            step = np.searchsorted(starts.get(rank, last[:0]), created[place][last], "right") - 1
            known = found.setdefault(rank, {})
            for number, wait in zip(step.tolist(), waits[place].tolist(), strict=True):
                if number >= 0:
                    known[number] = known.get(number, 0) + wait
    return found


def _shares(table: TimeTable, rows: Ints) -> tuple[dict[int, Floats], Floats]:
    """By rank, and of all: [usual, spike or collections; position]: the rows' share of each cell."""
    kind = np.where(table.activity == COLLECTION, 2, table.spike.astype(np.int64))
    cell = kind * _COUNT + table.cell
    parts, totals, found = np.zeros(3 * _COUNT), np.zeros(3 * _COUNT), {}
    for rank in np.unique(table.rank).tolist():
        own = table.rank == rank
        total = np.bincount(cell[own], table.ns[own], minlength=3 * _COUNT)
        chosen = rows[own[rows]]
        part = np.bincount(cell[chosen], table.ns[chosen], minlength=3 * _COUNT)
        found[rank] = _ratio(part, total)
        parts, totals = parts + part, totals + total
    return found, _ratio(parts, totals)


def _ratio(part: Floats, total: Floats) -> Floats:
    share: Floats = np.divide(part, total, out=np.zeros(len(part)), where=total > 0)
    return share.reshape(3, _COUNT)


def _spike_text(step: Ints, series: Floats, spiked: Bools) -> str:
    at = step[spiked]
    paid = float(series[spiked].mean())
    gaps = np.diff(at)
    if len(gaps) >= 2:
        usual = float(np.median(gaps))
        if usual >= 2 and float((np.abs(gaps - usual) <= 0.1 * usual).mean()) >= _PERIODIC:
            return f"every {_ordinal(round(usual))} step, {paid / 1e6:.3g} ms"
    return f"in {len(at)} of {len(series)} steps, {paid / 1e6:.3g} ms"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 <= number % 100 <= 20 else ending}"


def _change_text(step: Ints, seen: Ints, ns: Floats) -> str:
    """Whether an account changed on the way, by where its samples lie."""
    edges = np.linspace(step[0], step[-1] + 1, 9)
    series = np.histogram(seen, edges, weights=ns)[0]
    level = series.mean()
    if not level:
        return "each step"
    best, ratio = 0, 1.0
    for cut in range(1, len(series)):
        before, after = series[:cut].mean(), series[cut:].mean()
        if after > _GROWN * before and after / max(before, level / 20) > ratio:
            best, ratio = cut, after / max(before, level / 20)
    if not best:
        return "each step"
    rises = (np.diff(series) > 0).mean()
    if ratio < 4 and rises >= 0.7:
        return "growing"
    spread = series[best:].std(), series[:best].std()
    if max(spread) < 0.5 * abs(series[best:].mean() - series[:best].mean()):
        return f"since step {int(edges[best])}"
    return "each step"
