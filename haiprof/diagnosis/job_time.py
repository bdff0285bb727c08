"""The judged steps of all ranks side by side: what a part of the time takes, and its gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from haiprof.base.intervals import Bools, Floats, Ints
from haiprof.base.ledger import EACH_STEP, GROWING, NOT_KNOWN, POSITIONS
from haiprof.base.units import duration_text
from haiprof.diagnosis import thresholds
from haiprof.run_analysis import ledger, step_positions
from haiprof.run_analysis.collectives import Arrivals
from haiprof.run_analysis.ledger import TimeTable
from haiprof.run_analysis.lines import wilson
from haiprof.run_analysis.run_frames import Cells
from haiprof.run_analysis.step_positions import BACKWARD, StepPositions

Singles = npt.NDArray[np.float32]
FREE, BESIDE, NEITHER = 0, 1, -1
"""Of a step: no save was written in it; one was when it began; one began in it, or not known."""
_COUNT = len(POSITIONS)
_COLLECTED = ledger.BESIDE_SAVE + 1
_CELLS = (_COLLECTED + 1) * _COUNT
_Z = 1.96
_BLOCKS = 20
_COVERED_MIN = 8
"""With fewer steps whose collectives are known, waiting is judged by the lengths of backward."""
_ALIKE_RATIO = 0.03  # Ranks whose mean steps differ by less than this wait for each other
_UNLIKE_RATIO = 1.5
"""Ranks whose mean steps differ by so much run different loops, as an actor and a learner do."""
_CLOCKS_RATIO = 0.01  # Of a step: clocks of ranks agree so well
_PERIODIC = 0.8
_RUNS_APART = 4
"""What begins at every Nth step and takes several of them has an N of so many at least: shorter
ones are waves, as of two loader workers that take turns."""
_SPIKE_RATIO, _ALL_PAID_RATIO = 0.5, 0.8
"""So much of an account must lie in spikes: in regular ones, and in others."""
_SHORT_SPIKE = 0.3  # Of the one that the middle nanosecond of an account's spikes lies in
_OWN_SPIKES = 0.2  # An account that has less of its positions' long periods does not make them long
_GROWN = 1.5
"""An account that is so many times larger in its second part than in its first one has changed."""
_NOTHING, _HARDLY = 0.05, 0.25
"""Of what is paid later, for it to have begun then: what was seen before, what may have been."""
_DISTURBED = 0.1
"""Positions that wait for a core so long are longer or shorter as others come and go."""
_CHAIN = 1 / 3
"""Of the short time that the last rank needs from one collective to the next, what most others
need, too: then it is no work of that rank's, but what calling the two takes."""
_CALLED_BY_HAND = (
    step_positions.PREPARE, step_positions.GRADIENTS, step_positions.AFTER_STEP,
    step_positions.BETWEEN_STEPS,
)  # fmt: skip
_PARTS = 8  # A change is looked for in parts of the run of this number


class _Totals(NamedTuple):
    """Of a table: what its cells have together."""

    ranks: Ints  # that were sampled
    cell: Ints  # per row of the table: index into what follows, flat
    total: Floats  # [rank, kind or collections x position]: time
    seen_ns: Floats  # the same of rows with samples alone
    seen: Floats  # samples


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """Steps that all ranks have; where they have none in common, as many of each.

    Sums are exact; what is kept per step of a thousand ranks is of single precision.
    """

    ranks: tuple[int, ...]
    step: Ints  # Numbers of the steps, of the first rank; a folded block has that of its first one
    count: Ints  # [step]: 1, or of a block its steps: all times are those of its mean step
    used: tuple[int, ...]  # Positions that any rank was in
    cell_ns: Singles  # [used position, rank, step]: without collections
    beside: npt.NDArray[np.int8]  # [rank, step]: BESIDE, FREE or NEITHER
    kind: npt.NDArray[np.int8]  # [used position, rank, step]: USUAL, LONG or BESIDE_SAVE
    collected_ns: Singles  # [rank, step]: in collections
    period_ns: Singles  # [rank, step]: from a step's begin to the next one's
    totals_ns: Floats  # [rank, kind or collections, position]: over all steps
    waits_for_all: bool  # Whether ranks wait for the slowest
    waits_ns: Mapping[int, Singles]  # By position: [rank, step], waiting for later ranks there
    segment: Ints
    """[position]: in which part of the step it is: a part ends where ranks wait for each other."""
    covered: Bools  # [step]: where that is known
    stretch: Ints
    """Indices into the covered steps: first ones of stretches, at whose end ranks wait for each
    other. Most jobs do in each step; one that averages weights at every Nth step has longer ones.
    """
    slowest: int  # The rank whose own time is the longest on the mean
    idle_ns: Singles | None = None
    """[rank, step]: for how long the device had nothing to do; None without a device."""
    is_idle_bound: bool = False  # Whether that is no more than a bound from above for some rank
    is_idle_known: bool = False
    """Whether anything is known of it; all of a step's time is a bound, too."""
    like: Mapping[int, int] = field(default_factory=dict)
    """By rank: another one whose samples tell of it, where it has none of its own."""
    _known: list[Any] = field(default_factory=list, repr=False, compare=False)  # of `_totals`

    @property
    def own_ns(self) -> Singles:
        """[rank, covered step]: the period less waiting for peers, the mean over its stretch."""
        own = self.period_ns.copy()
        for waits in self.waits_ns.values():
            own -= waits
        return self.of_stretches(own)

    def position_ns(self, row: int) -> Singles:
        """[rank, step]: the time in one of the used positions, less waiting for peers."""
        found: Singles = self.cell_ns[row]
        waits = self.waits_ns.get(self.used[row])
        return found if waits is None else np.maximum(found - waits, 0.0)

    def own_by_segment(self) -> Singles:
        """[segment, rank, covered step]: `own_ns` by segment, collections in the last one."""
        own = np.zeros((int(self.segment.max()) + 1, *self.period_ns.shape), dtype=np.float32)
        if len(own) == 1:
            return self.own_ns[None]
        for row, position in enumerate(self.used):
            own[self.segment[position]] += self.cell_ns[row]
        for position, waits in self.waits_ns.items():
            own[self.segment[position]] -= waits
        own[-1] += self.collected_ns
        return self.of_stretches(own)

    def of_stretches(self, values: Singles) -> Singles:
        """[..., covered step] of [..., step]: of each stretch its mean, in all of its steps."""
        known = self.of_covered(values)
        if len(self.stretch) == known.shape[-1]:
            return known
        count = self.count[self.covered]
        whole = np.add.reduceat(known * count, self.stretch, axis=-1)
        means = (whole / np.add.reduceat(count, self.stretch)).astype(np.float32)
        found: Singles = np.repeat(means, np.diff(self.stretch, append=len(count)), axis=-1)
        return found

    def of_covered(self, values: Singles) -> Singles:
        """[..., covered step] of [..., step]; a view where that is all of them."""
        return values if self.covered.all() else values[..., self.covered]

    def average(self, values: Floats | Singles) -> Floats:
        """The mean over steps, or covered ones, of [..., step]: a block counts as its steps."""
        return average(values, self._counts(values))

    def each_step(self, values: Floats | Singles) -> Floats:
        """[..., step] with every step of a block for itself."""
        found: Floats = np.repeat(values, self._counts(values), axis=-1)
        return found

    def _counts(self, values: Floats | Singles) -> Ints:
        whole = values.shape[-1] == len(self.count)
        return self.count if whole else self.count[self.covered]

    @property
    def period_count(self) -> int:
        """Steps of all ranks together."""
        return len(self.ranks) * int(self.count.sum())

    @property
    def mean_ns(self) -> float:
        """The mean period of the ranks."""
        return float(self.totals_ns.sum()) / self.period_count

    @property
    def positions(self) -> dict[str, float]:
        """By position: mean time per step over ranks; collections are where they happened."""
        means = self.totals_ns.sum(axis=(0, 1)) / self.period_count
        return {name: float(ns) for name, ns in zip(POSITIONS, means, strict=True) if ns}

    def gains(self, parts: Singles) -> Floats:
        """[step]: what the job's step becomes shorter by without some part of it.

        Per segment max_r T[r,k] - max_r (T[r,k] - a[r,k]), where T is a rank's own time, its period
        less waiting for peers: ranks wait for the slowest of each segment, which may be another
        one. Steps where that is not known are left out. Of ranks that are not in step, the slowest
        of each step add up to more than the job takes: then all is scaled to that.
        What the host does while its device is busy gains nothing: a is no longer than the device
        was idle in that step. `parts` is a, [segment, rank, step] in ns.
        """
        if self.idle_ns is not None:
            ratio = np.maximum(parts.sum(axis=0), 1e-9)
            parts = parts * np.minimum(np.divide(self.idle_ns, ratio, out=ratio), 1.0, out=ratio)
            del ratio
        if not self.waits_for_all or len(self.ranks) < 2:
            mean: Floats = parts.sum(axis=0).mean(axis=0, dtype=np.float64)
            return mean
        own = self.own_by_segment()
        slowest = own.max(axis=1).sum(axis=0)
        own -= self.of_stretches(parts)
        gained: Singles = slowest - own.max(axis=1).sum(axis=0)
        took = float(self.average(self.of_covered(self.period_ns)).max())
        scale = min(took / max(float(self.average(slowest)), 1.0), 1.0)
        return gained.astype(np.float64) * scale

    def series_of(self, table: TimeTable, rows: Ints) -> Singles:
        """[rank, step]: the time of some rows; unsampled ranks are as those that were sampled."""
        parts = self.parts_of(table, rows)
        found: Singles = parts[0] if len(parts) == 1 else parts.sum(axis=0)
        return found

    def parts_of(self, table: TimeTable, rows: Ints) -> Singles:
        """[segment, rank, step]: the same by segment."""
        share = self._share(table, rows).astype(np.float32)
        found = np.zeros((int(self.segment.max()) + 1, *self.period_ns.shape), dtype=np.float32)
        part = np.empty_like(self.period_ns)
        for row, position in enumerate(self.used):
            if share[:, :_COLLECTED, position].any():
                np.multiply(self.cell_ns[row], share[:, ledger.USUAL, position, None], out=part)
                for kind in (ledger.LONG, ledger.BESIDE_SAVE):  # seldom
                    own, ratio = self.kind[row] == kind, share[:, kind, position, None]
                    np.multiply(self.cell_ns[row], ratio, out=part, where=own)
                found[self.segment[position]] += part
        collected = self.totals_ns[:, _COLLECTED]
        whole = np.maximum(collected.sum(axis=1), 1.0)
        paused = (share[:, _COLLECTED] * collected).sum(axis=1) / whole
        if paused.any():
            found[-1] += paused[:, None].astype(np.float32) * self.collected_ns
        return found

    def mean_of(self, table: TimeTable, rows: Ints) -> float:
        """The mean of the same, exact."""
        return float((self._share(table, rows) * self.totals_ns).sum()) / self.period_count

    def _share(self, table: TimeTable, rows: Ints) -> Floats:
        """[rank, kind or collections, position]: what rows have of each cell's time."""
        of = self._totals(table)
        part = np.bincount(of.cell[rows], table.ns[rows], of.total.size).reshape(of.total.shape)
        others = of.ranks != self.slowest if len(of.ranks) > 1 else of.ranks == of.ranks
        # What the slowest does alone says nothing of the others.
        pooled = _ratio(part[others].sum(axis=0), of.total[others].sum(axis=0))
        found = [_ratio(own, whole) for own, whole in zip(part, of.total, strict=True)]
        of_rank = dict(zip(of.ranks.tolist(), found, strict=True))
        like = [rank if rank in of_rank else self.like.get(rank, rank) for rank in self.ranks]
        return np.array([of_rank.get(rank, pooled) for rank in like])

    def _totals(self, table: TimeTable) -> _Totals:
        """Of one table once."""
        if not self._known or self._known[0] is not table:
            kind = np.where(table.activity == ledger.COLLECTION, _COLLECTED, table.kind)
            ranks = np.flatnonzero(np.bincount(table.rank))  # few, of very many rows
            place = np.zeros(int(table.rank.max(initial=0)) + 1, dtype=np.int32)
            place[ranks] = np.arange(len(ranks))
            cell = place[table.rank] * _CELLS + kind * _COUNT + table.cell
            seen_ns = np.where(table.count > 0, table.ns, 0.0)
            sums = np.empty((3, len(ranks), _CELLS))
            for number, of in enumerate((table.ns, seen_ns, table.count)):
                sums[number] = np.bincount(cell, of, len(ranks) * _CELLS).reshape(-1, _CELLS)
            self._known[:] = table, _Totals(ranks, cell, *sums)
        found: _Totals = self._known[1]
        return found

    def interval(self, table: TimeTable, rows: Ints, series: Floats) -> tuple[float, float]:
        """Where a mean lies with 95 % certainty, in ns.

        By the samples of the positions that its rows lie in (Wilson 1927), and by its spread over
        blocks of steps. `series` is what is averaged, [step].
        """
        mean = float(self.average(series)) if len(series) > 1 else float(series.mean())
        of = self._totals(table)
        rank, cell = np.divmod(of.cell[rows], _CELLS)
        there, at = (np.flatnonzero(np.bincount(each)) for each in (rank, cell % _COUNT))
        inside = np.ix_(there, np.arange(_COLLECTED + 1), at)
        whole, count = (
            float(each.reshape(len(of.ranks), -1, _COUNT)[inside].sum())
            for each in (of.seen_ns, of.seen)
        )
        low = high = mean
        if table.count[rows].any() and whole:
            share = min(float(table.ns[rows].sum()) / whole, 1.0)
            below, above = wilson(np.array([share * count]), np.array([count]))
            if share:
                low, high = mean * float(below[0]) / share, mean * float(above[0]) / share
        blocks = np.array(self._block_means(series))
        spread = _Z * float(blocks.std(ddof=1)) / len(blocks) ** 0.5 if len(blocks) > 1 else 0.0
        return (
            max(mean - float(np.hypot(mean - low, spread)), 0.0),
            mean + float(np.hypot(high - mean, spread)),
        )

    def _block_means(self, series: Floats) -> list[float]:
        """Means over stretches of about as many steps."""
        # What is paid every Nth step is no spread: a block holds at least N steps.
        period = _period(np.flatnonzero(_find_spikes(series)))
        many, place = max(min(_BLOCKS, len(series) // (period or 1)), 1), np.arange(len(series))
        if len(series) == 1 or (self._counts(series) == 1).all():
            return [float(series[part].mean()) for part in np.array_split(place, many)]
        count = self._counts(series)
        edges = np.searchsorted(np.cumsum(count), np.arange(1, many) / many * count.sum())
        parts = np.split(place, edges)
        return [float(average(series[part], count[part])) for part in parts if len(part)]

    def when(self, table: TimeTable, rows: Ints, series: Floats, every: Floats) -> str:
        """When an account is paid.

        The rows in its own position tell the rhythm: `series` is their time in each step, `every`
        that of all its rows.
        """
        if len(series) < _COVERED_MIN or not series.sum():
            return EACH_STEP
        whole = self.count[: len(series)] == 1  # in the mean step of a block nothing stands out
        whole = whole if whole.sum() >= _COVERED_MIN else np.ones_like(whole)
        spiked = _find_spikes(series[whole])
        at = self.step[: len(series)][whole][spiked]
        regular = _times_of(at)
        makes = len(at) and self._makes_spikes(table, rows, is_regular=regular is not None)
        if makes is None:
            return NOT_KNOWN
        if makes:
            # What follows an evaluation belongs to it, and may lie in the step after.
            after = np.flatnonzero(spiked[:-1] & ~spiked[1:]) + 1
            paid = every[whole][spiked].sum() + (every - series)[whole][after].sum()
            time = duration_text(float(paid / len(at if regular is None else regular)))
            period = _period(at)
            if period is None:
                return _stretch_text(np.flatnonzero(spiked), self.step[: len(series)][whole], time)
            ending = {1: "st", 2: "nd", 3: "rd"}.get(period % 10, "th")
            return f"every {period}{'th' if 10 <= period % 100 <= 20 else ending} step, {time}"
        cells = self._same_cells(table, rows) & (table.step >= 0)
        exact = sum(
            self.cell_ns[row].mean(axis=0)
            for row, position in enumerate(self.used)
            if position in table.cell[rows]
        )
        others = np.maximum((self.period_ns - self.collected_ns).mean(axis=0) - every, 0.0)
        own = np.zeros(len(cells), dtype=np.bool_)
        own[rows] = True
        return _change_text(self.step, table.take(cells), own[cells], exact, others)

    def _makes_spikes(self, table: TimeTable, rows: Ints, *, is_regular: bool) -> bool | None:
        """Whether its positions' long periods are its own; None: they may be the machine's."""
        long = self._same_cells(table, rows) & (table.kind == ledger.LONG)
        whole = float(table.ns[long].sum())
        if float(table.ns[rows[long[rows]]].sum()) < _OWN_SPIKES * whole:
            return False  # another one makes them long, in which it was sampled now and then
        # Where they mostly wait for a core they are the machine's: what runs in them runs in the
        # others, too. But who waits at every Nth step has some reason for it.
        lost = table.activity == ledger.NO_CORE
        own = float(table.ns[rows[lost[rows]]].sum()) > 0.5 * float(table.ns[rows].sum())
        most = 0.5 if is_regular else _DISTURBED
        if (own and is_regular) or float(table.ns[long & lost].sum()) <= most * whole:
            return True
        return None

    def _same_cells(self, table: TimeTable, rows: Ints) -> Bools:
        """Samples of the cells that some rows lie in."""
        found = table.count > 0
        for values in (table.cell, table.rank):  # small numbers
            wanted = np.zeros(int(values.max(initial=0)) + 1, dtype=np.bool_)
            wanted[values[rows]] = True
            found &= wanted[values]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What is known of how busy the device of one rank was."""

    step: Ints
    bound_ns: Floats
    """By such a step: for how long at most it had nothing to do, by events on its stream; NaN."""
    busy_ratio: float | None
    """Of the time, by its own counter (NVML: a kernel was running); None where it has none."""

    @property
    def is_known(self) -> bool:
        """Whether either says anything."""
        return self.busy_ratio is not None or bool(np.isfinite(self.bound_ns).any())

    def idle_ns(self, step: Ints, period_ns: Floats) -> Floats:
        """By step: for how long it had nothing to do."""
        # The counter tells the sum, events tell where: without the counter their bound is taken,
        # without events all steps have the same share, and without both all of them may be idle.
        known = np.full(int(max(step.max(), self.step.max())) + 1, np.nan)
        known[self.step] = self.bound_ns
        bound = np.minimum(known[step], period_ns)
        seen = np.isfinite(bound)
        if not seen.any():
            return period_ns * (1.0 if self.busy_ratio is None else 1.0 - self.busy_ratio)
        share = float(bound[seen].sum() / period_ns[seen].sum())
        bound = np.where(seen, bound, share * period_ns)
        if self.busy_ratio is None:
            return bound
        total = (1.0 - self.busy_ratio) * float(period_ns.sum())
        return bound * min(total / max(float(bound.sum()), 1.0), 1.0)


def average(values: Floats | Singles, count: Ints) -> Floats:
    """The mean of [..., step], each as often as it counts."""
    weight = None if (count == 1).all() else count
    mean: Floats = values.mean(axis=-1) if weight is None else np.average(values, -1, weight)
    return mean


def _common_cells(cells: Mapping[int, Cells]) -> tuple[Ints, Ints]:
    """First number and length of the stretches of steps that all ranks have whole."""
    edges: Ints | None = None
    for own in cells.values():
        end = own.step + own.count
        follow = bool((own.step[1:] == end[:-1]).all())
        mine = np.append(own.step, end[-1:]) if follow else np.union1d(own.step, end)
        if edges is None:
            edges = mine
        elif len(mine) != len(edges) or (mine != edges).any():
            edges = np.intersect1d(edges, mine, assume_unique=True)
    assert edges is not None
    step, length = edges[:-1], np.diff(edges)
    whole = np.ones(len(step), dtype=np.bool_)
    for own in cells.values():
        before = np.append(0, np.cumsum(own.count))
        first, end = (np.searchsorted(own.step, edge) for edge in (step, step + length))
        whole &= before[end] - before[first] == length
    return step[whole], length[whole]


def _join(times: Ints, own: Cells, step: Ints, count: Ints) -> Ints:
    """[..., cell] of a rank, summed up to the stretches that all ranks have."""
    chosen = times[..., own.column]
    if len(own.step) == len(step) and (own.step == step).all():
        return chosen
    before = np.concatenate([np.zeros((*times.shape[:-1], 1), dtype=np.int64),
                             np.cumsum(chosen, axis=-1)], axis=-1)  # fmt: skip
    first, end = (np.searchsorted(own.step, edge) for edge in (step, step + count))
    joined: Ints = before[..., end] - before[..., first]
    return joined


def _of_stretches(values: Ints, own: Cells, step: Ints, count: Ints) -> Ints:
    """What is said of a rank's cells, by stretch; NEITHER where a stretch is several of them."""
    place = np.minimum(np.searchsorted(own.step, step), len(own.step) - 1)
    same = (own.step[place] == step) & (own.count[place] == count)
    return np.where(same, values[place], NEITHER)


def job_time(
    steps: Mapping[int, Cells], load: Callable[[int], tuple[Ints, Ints]], used: Sequence[int],
    peers: PeerWaits | None, tails: Mapping[int, float] | None = None,
    device: Callable[[int], DeviceUse] | None = None, beside: Mapping[int, Ints] | None = None,
) -> JobTime:  # fmt: skip
    """Puts the judged steps of ranks side by side; of at least one rank.

    `load` gives the exact times of a rank, [position, cell] without collections and in these;
    `used` are the positions that any rank was in. `peers` says how long ranks waited for later ones
    (None: no collectives are known). Where it says nothing, `tails` does: of a
    rank's backward, what follows the last collective that it began there. It waits in that, and
    needs no clock in common with others. `beside` says by rank of each of its cells whether it
    began while a save was written beside it: BESIDE, FREE or NEITHER.
    """
    ranks = tuple(steps)
    common, count = _common_cells(steps)
    most = min(int(own.count.sum()) for own in steps.values())
    alone = int(count.sum()) < most / 2
    if alone:  # as many of each, one by one
        fewest = min(len(own.step) for own in steps.values())
        common, count = steps[ranks[0]].step[:fewest], steps[ranks[0]].count[:fewest]
    shape = (len(ranks), len(common))
    cells = np.zeros((len(used), *shape), dtype=np.float32)
    kinds = np.zeros((len(used), *shape), dtype=np.int8)
    saved = np.full(shape, FREE, dtype=np.int8)
    collected, period, idle = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    totals = np.zeros((len(ranks), _COLLECTED + 1, _COUNT))
    is_known, is_bound = device is not None, False
    for row, rank in enumerate(ranks):
        own = steps[rank]
        at = (own.step[: len(common)], own.count[: len(common)]) if alone else (common, count)
        plain, pauses = (_join(times[used], own, *at) for times in load(rank))
        means = plain if (count == 1).all() else plain / count
        if beside is not None:
            saved[row] = _of_stretches(beside[rank], own, *at)
        kind = ledger.period_kinds(means, saved[row] == BESIDE)
        cells[:, row], kinds[:, row] = means, kind
        if pauses.any():  # memory that is not written takes no room
            collected[row] = pauses.sum(axis=0) / count
        period[row] = (plain + pauses).sum(axis=0) / count
        for of_kind in (ledger.USUAL, ledger.LONG, ledger.BESIDE_SAVE):
            totals[row, of_kind, used] = np.where(kind == of_kind, plain, 0).sum(axis=1)
        totals[row, _COLLECTED, used] = pauses.sum(axis=1)
        if device is not None:
            use = device(rank)
            idle[row] = use.idle_ns(at[0], period[row])
            is_known, is_bound = is_known and use.is_known, is_bound or use.busy_ratio is None
    means = average(period, count)
    alike = len(ranks) > 1 and float(np.ptp(means)) < _ALIKE_RATIO * float(means.max())
    in_step = len(ranks) > 1 and float(means.max()) < _UNLIKE_RATIO * float(means.min())
    backward = cells[list(used).index(BACKWARD)] if BACKWARD in used else collected
    waits, covered, segment, stretch = _peer_waits(
        ranks, common, count, backward, peers, tails or {}
    )
    # Who waits longer in a position than it is there runs other code (a rank that dispatches
    # batches): then it is not known which positions lie between two meetings.
    for position, ns in waits.items():
        there = cells[list(used).index(position)] if position in used else np.zeros_like(ns)
        if (average(ns, count) > average(there, count) + _CLOCKS_RATIO * means).any():
            segment = np.zeros_like(segment)
    own_means = means - average(sum(waits.values(), np.zeros_like(period)), count)
    return JobTime(
        ranks=ranks, step=common, count=count, used=tuple(used), cell_ns=cells, kind=kinds,
        beside=saved, collected_ns=collected, period_ns=period, totals_ns=totals,
        waits_for_all=in_step and (peers is not None or alike), waits_ns=waits, segment=segment,
        covered=covered, stretch=stretch, slowest=ranks[int(own_means.argmax())],
        idle_ns=None if device is None else idle,
        is_idle_known=is_known, is_idle_bound=is_bound,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Ranks that need longer than the others."""

    ranks: tuple[int, ...]
    extra_ns: float  # What the slowest needs beyond the middle one per step
    by_position: Mapping[int, Floats]  # By rank: that of each position, as far as it would go
    goes: float = 1.0  # Which part of it that is

    def dealt_over(self, rank_count: int) -> Stragglers:
        """Of work that all ranks would share: what the stragglers keep does not go."""
        goes = 1 - len(self.ranks) / rank_count
        by_position = {rank: goes * ns for rank, ns in self.by_position.items()}
        return replace(self, by_position=by_position, goes=goes)


def find_stragglers(time: JobTime, own_ns: Singles, avoidable_ns: Floats) -> Stragglers | None:
    """The ranks that need longer than the others, steadily; None where there are none.

    On the mean the slowest needs at least half of what the slowest of each step needs beyond the
    middle one: of ranks that take turns in being the slowest none does. Others that lose more than
    half as much as it are stragglers, too, where they are fewer than half of all. `own_ns` is their
    own time, [rank, covered step], without what was found avoidable: its mean is `avoidable_ns`,
    [rank, position].
    """
    count = len(time.ranks)
    if not time.waits_for_all or count < 2:
        return None
    means = time.average(own_ns)
    place = int(means.argmax())
    others = own_ns.copy()
    others[place] = np.inf
    others.partition((count - 2) // 2, axis=0)
    middle = others[(count - 2) // 2]
    beyond = own_ns[place] - middle
    others = np.partition(own_ns, (count - 1) // 2, axis=0)
    lost = own_ns.max(axis=0) - others[(count - 1) // 2]
    extra = float(time.average(beyond))
    if extra <= time.average(lost) / 2 or not _is_steady(beyond):
        return None
    usual = float(time.average(middle))
    late = np.flatnonzero(means - usual > extra / 2)
    late = late if len(late) <= count / 2 else np.array([place])
    longer = {
        time.ranks[row]: _longer(time, row, late, avoidable_ns, float(means[row]) - usual)
        for row in late.tolist()
    }
    return Stragglers(ranks=tuple(longer), extra_ns=extra, by_position=longer)


def _longer(time: JobTime, place: int, late: Ints, avoidable_ns: Floats, extra_ns: float) -> Floats:
    """[position]: what one of the late ranks needs beyond the middle one of the others."""
    longer = np.zeros(_COUNT)
    for row, position in enumerate(time.used):
        cells = time.of_covered(time.position_ns(row))
        others = np.median(np.delete(cells, late, axis=0), axis=0)
        usual = np.median(np.delete(avoidable_ns[:, position], late))
        beyond = float(time.average(cells[place] - others)) - (
            avoidable_ns[place, position] - usual
        )
        longer[position] = max(beyond, 0.0)
    return longer * min(extra_ns / max(float(longer.sum()), 1.0), 1.0)


def _is_steady(series: Floats) -> bool:
    """Whether a series has a good part of its mean in most of one stretch of the steps."""
    # The stretch is from the first such block of steps to the last, and a quarter of all at least.
    blocks = np.array([part.mean() for part in np.array_split(series, min(_BLOCKS, len(series)))])
    high = blocks > series.mean() / 4
    at = np.flatnonzero(high)
    if not len(at) or at[-1] - at[0] + 1 < len(blocks) / 4:
        return False
    return float(high[at[0] : at[-1] + 1].mean()) >= _PERIODIC


class PeerWaits(NamedTuple):
    """Waiting for later ranks at collectives."""

    ns: Mapping[int, Mapping[int, Mapping[int, int]]]  # By position, rank and step
    early: frozenset[int]
    """Positions that begin with it: all else in them comes after (broadcasts before forward)."""
    known: Mapping[int, Sequence[tuple[int, int]]] = {}
    """By rank: first and last steps of stretches in which all of a group's collectives are known:
    in their other steps it waited for none."""


def _peer_waits(
    ranks: Sequence[int], step: Ints, count: Ints, backward: Singles, peers: PeerWaits | None,
    tails: Mapping[int, float],
) -> tuple[dict[int, Singles], Bools, Ints, Ints]:  # fmt: skip
    """`waits_ns`, `covered`, `segment` and `stretch` of a JobTime.

    By collectives, else by lengths of backward.
    """
    waits, seen = dict[int, Singles](), np.zeros(backward.shape, dtype=np.bool_)
    meet = np.zeros(len(step), dtype=np.bool_)
    often = set[int]()
    for position, known in (peers.ns if peers else {}).items():
        own = np.array([[of_rank.get(number, -1) for number in step.tolist()]
                        for of_rank in (known.get(rank, {}) for rank in ranks)])  # fmt: skip
        waits[position] = np.maximum(own, 0).astype(np.float32)
        seen |= own >= 0
        meet |= (own >= 0).all(axis=0)
        often |= {position} if (own >= 0).all(axis=0).mean() >= 0.5 else set()
    for row, rank in enumerate(ranks):
        for first, last in peers.known.get(rank, ()) if peers else ():
            seen[row] |= (count == 1) & (step >= first) & (step <= last)
    segment: Ints = np.zeros(_COUNT, dtype=np.int64)
    covered = np.logical_and.reduce(seen)
    if peers is None or covered.sum() < _COVERED_MIN:
        tail = np.array([[tails.get(rank, 1.0)] for rank in ranks], dtype=np.float32)
        waiting = backward * tail
        found = {BACKWARD: waiting - waiting.min(axis=0)}
        return found, np.ones(len(step), dtype=np.bool_), segment, np.arange(len(step))
    ends = sorted({position - (position in peers.early) for position in often})
    if len(ends) > 1:  # after the last one the first segment of the next step begins
        segment = np.searchsorted(ends, np.arange(_COUNT)) % len(ends)
    at = np.flatnonzero(covered)
    begins = np.append(True, meet[at[:-1]] | (np.diff(at) > 1))
    return waits, covered, segment, np.flatnonzero(begins)


def peer_waits(
    groups: Sequence[Arrivals],
    starts: Mapping[int, tuple[int, Ints]],
    positions_of: Callable[[int], tuple[StepPositions, int]],
) -> PeerWaits:
    """From when a rank began its collectives until the last rank began them.

    Collectives between which ranks have not waited for each other (buckets of one backward) count
    once, by the last of them: the delay before it is the same. Between several that the job calls
    soon after another, outside of the model, no rank is late where the others need about as long
    for them: that wait is a part of calling them. `starts` has by rank the number of a
    step, and the begin of each of its steps from there on in Unix time; `positions_of` a rank's
    positions on their clock, and Unix time less that.
    """
    found: dict[int, dict[int, dict[int, int]]] = {}
    stretches: dict[int, list[tuple[int, int]]] = {}
    before, after = np.zeros(_COUNT), np.zeros(_COUNT)
    for group in groups:
        created = group.created_ns
        waited = created.min(axis=0)[1:] >= created.max(axis=0)[:-1]
        last = np.flatnonzero(np.append(waited, True))
        waits = (created.max(axis=0) - created)[:, last]
        # Numbers left out are collectives of which nothing is known.
        gaps = np.flatnonzero(np.diff(group.sequence)[last[:-1]] > 1) + 1
        # All ranks run the same code: one tells in which position it is, and where in that.
        positions, offset_ns = positions_of(group.ranks[0])
        at_ns = created[0][last] - offset_ns
        place = positions.at(at_ns)
        known = place >= 0
        position = np.where(known, positions.position[place], BACKWARD)
        ends = np.append(positions.start_ns[1:], positions.end_ns)
        inside = (place[1:] == place[:-1]) & known[1:] & np.isin(position[1:], _CALLED_BY_HAND)
        inside[gaps - 1] = False
        if np.isin(positions.position, ledger.MODEL_POSITIONS).any():  # else it is in these
            chain = np.flatnonzero(inside) + 1
            own = created[:, last[chain]] - created[:, last[chain - 1]].max(axis=0)
            middle = np.partition(own, (len(own) - 1) // 2, axis=0)[(len(own) - 1) // 2]
            longest = own.max(axis=0)
            is_call = (middle >= _CHAIN * longest) & (longest <= thresholds.LINK_LATENCY_NS)
            waits[:, chain[is_call]] = 0
        np.add.at(before, position[known], (at_ns - positions.start_ns[place])[known])
        np.add.at(after, position[known], (ends[place] - at_ns - waits[0])[known])
        for row, rank in enumerate(group.ranks):
            first, begun = starts.get(rank, (0, last[:0]))
            step = np.searchsorted(begun, created[row][last], "right") - 1
            for part in np.split(step, gaps):
                stretches.setdefault(rank, []).append((first + part[0], first + part[-1]))
            for number, own, wait in zip(
                step.tolist(), position.tolist(), waits[row].tolist(), strict=True
            ):
                if number >= 0:
                    of_rank = found.setdefault(own, {}).setdefault(rank, {})
                    of_rank[first + number] = of_rank.get(first + number, 0) + wait
    return PeerWaits(found, frozenset(np.flatnonzero(before < after).tolist()), stretches)


def _ratio(part: np.ndarray, total: np.ndarray) -> Floats:
    share: Floats = np.divide(part, total, out=np.zeros(len(part)), where=total > 0)
    return share.reshape(-1, _COUNT)


def _find_spikes(series: Floats) -> Bools:
    """Steps in which an account is paid that other steps do not pay; none where most of them do."""
    # What every second or third step pays is no more than usual, and is known by its regularity.
    for level in (0.5, 0.25):
        found: Bools = series > 2 * np.quantile(series, level) + series.mean() / 2
        if found.any():  # a short one among long ones is the machine's
            order = np.sort(series[found])
            usual = order[np.searchsorted(np.cumsum(order), order.sum() / 2)]
            found &= series > _SHORT_SPIKE * usual
            long: Bools = found & (series > 2 * _SHORT_SPIKE * usual)
            if _period(np.flatnonzero(found)) is None and _period(np.flatnonzero(long)) is not None:
                found = long
        few = 0 < found.mean() <= 0.5
        ratio = series[found].sum() / series.sum() if few else 0.0
        regular = ratio > _SPIKE_RATIO and _period(np.flatnonzero(found)) is not None
        if regular or (ratio > _ALL_PAID_RATIO and level == 0.5):
            return found
    return np.zeros(len(series), dtype=np.bool_)


def _times_of(step: Ints) -> Ints | None:
    """Those of the steps given that are always about as far apart; None where they are not.

    What takes several steps in a row at each Nth one is paid at the first of them.
    """
    for at, least in ((step, 2), (step[np.diff(step, prepend=-2) > 1], _RUNS_APART)):
        gaps = np.diff(at)
        if len(gaps) >= 2:
            usual = float(np.median(gaps))
            alike = float((np.abs(gaps - usual) <= 0.1 * usual).mean()) >= _PERIODIC
            if usual >= least and alike:
                return at
    return None


def _period(step: Ints) -> int | None:
    """The number of steps between those given, where it is always about the same."""
    times = _times_of(step)
    return None if times is None else round(float(np.median(np.diff(times))))


def _stretch_text(at: Ints, step: Ints, time: str) -> str:
    """When an account is paid in some steps: all from one on or until one, or now and then."""
    first, last, edge = int(at[0]), int(at[-1]), len(step) // 20
    if len(at) >= _PERIODIC * (last - first + 1) and len(at) > edge:
        if first <= edge and last < len(step) - 1 - edge:
            return f"until step {step[last]}"
        if last >= len(step) - 1 - edge and first > edge:
            return f"since step {step[first]}"
    return f"in {len(at)} of {len(step)} steps, {time}"


def _change_text(
    step: Ints, cells: TimeTable, own: Bools, exact_ns: Floats, others_ns: Floats
) -> str:
    """Whether an account changed on the way: `since step 512`, `until step 299`, `growing`.

    `more since step 512` where it was paid before, too, or may have been.
    """
    begun = _find_growth(step, cells, own, exact_ns, others_ns)
    if begun is not None:
        return begun if isinstance(begun, str) else begun.text("since", begun.step)
    ends = int(step[0] + step[-1])  # and the same backwards: what ends has begun then
    back = replace(cells, step=ends - cells.step)
    ended = _find_growth(ends - step[::-1], back, own, exact_ns[::-1], others_ns[::-1])
    return ended.text("until", ends - ended.step) if isinstance(ended, _Began) else EACH_STEP


class _Began(NamedTuple):
    """From which step on more is paid, and whether nothing was before."""

    step: int
    anew: bool

    def text(self, word: str, step: int) -> str:
        return f"{'' if self.anew else 'more '}{word} step {step}"


def _find_growth(
    step: Ints, cells: TimeTable, own: Bools, exact_ns: Floats, others_ns: Floats
) -> _Began | str | None:
    """The step at which an account became larger; GROWING where it did so little by little."""
    # Where it changed is where the sum of its samples' time is farthest below that of an even one
    # (Page 1954). That it changed is said where its share of the samples of its positions (Wilson
    # 1927), times the exact time of these (`exact_ns`, by step), is more than before with 95 %
    # certainty, and _GROWN times, beyond what all else of the step became longer by: that is the
    # machine's. `own` are its samples among those of `cells`, its positions.
    at = np.clip(np.searchsorted(step, cells.step), 0, len(step) - 1)
    first = int(at.min(initial=len(step)))  # nobody sampled what was before
    step, exact_ns, at = step[first:], exact_ns[first:], at - first
    others_ns = others_ns[first:]
    count = len(step)
    if count < _COVERED_MIN:
        return None
    each = np.bincount(at[own], cells.ns[own], minlength=count)
    part = max(count // _PARTS, 1)
    cut = part + int(_below_even(each.astype(np.float64))[part - 1 : count - part].argmax())
    early = at < cut
    seen = np.array([[cells.count[own & half].sum(), cells.count[half].sum()]
                     for half in (early, ~early)])  # fmt: skip
    low, high = wilson(seen[:, 0], np.maximum(seen[:, 1], 1.0))
    share = seen[:, 0] / np.maximum(seen[:, 1], 1.0)
    before, after = float(exact_ns[:cut].mean()), float(exact_ns[cut:].mean())
    rest = float(others_ns[:cut].mean()), float(others_ns[cut:].mean())
    disturbed = cells.ns[cells.activity == ledger.NO_CORE].sum() > _DISTURBED * cells.ns.sum()
    if disturbed:
        before = after = 1.0  # who has the cores may have changed: its share alone tells
    elif min(rest) > 0:
        before *= max(rest[1] / rest[0], 1.0)
    if after * share[1] <= _GROWN * before * share[0] or after * low[1] <= before * high[0]:
        return None
    sampled, exact, of_all = (
        ns[: count // part * part].reshape(-1, part).sum(axis=1)
        for ns in (each, exact_ns, np.bincount(at, cells.ns, count))
    )
    # What samples stand for is no exact time: of that, their share of each part.
    parts = sampled if disturbed else exact * sampled / np.maximum(of_all, 1.0)
    number = np.arange(len(parts))
    line = np.polyval(np.polyfit(number, parts, 1), number)
    later = min(-(-cut // part), len(parts) - 1)  # the last part may be less than a whole one
    levels = parts[: cut // part].mean(), parts[later:].mean()
    two = np.interp(number, [cut / part - 1, cut / part], levels)  # the part with the cut has both
    # Two levels have a cut besides: so much closer they must be (Schwarz 1978).
    if ((parts - line) ** 2).sum() < len(parts) ** (1 / len(parts)) * ((parts - two) ** 2).sum():
        return None if disturbed else GROWING  # who has the cores may change little by little, too
    spread = parts[: cut // part].std(), parts[later:].std()
    if max(spread) < 0.5 * (levels[1] - levels[0]):
        anew = share[0] * before <= _NOTHING * share[1] * after
        anew &= high[0] * before <= _HARDLY * share[1] * after
        rise = (levels[1] - levels[0]) / part
        return _Began(int(step[_exact_cut(exact_ns, cut, part, rise)]), bool(anew))
    return None


def _below_even(series: Floats) -> Floats:
    """By how much the sum up to each place is below that of an even series of the same sum."""
    below: Floats = np.arange(1, len(series)) * series.mean() - np.cumsum(series)[:-1]
    return below


def _exact_cut(exact_ns: Floats, cut: int, reach: int, rise_ns: float) -> int:
    """Where the exact time rises, no farther than `reach` from where samples say so."""
    # Samples are seldom. The time of the positions is exact, and rises by the account's part there
    # unless something else falls.
    capped = np.minimum(exact_ns, np.quantile(exact_ns, 0.95))
    first = max(cut - reach, 1)
    found = first + int(_below_even(capped)[first - 1 : cut + reach].argmax())
    rises = capped[found:].mean() - capped[:found].mean() >= rise_ns / 2
    return found if rises else cut
