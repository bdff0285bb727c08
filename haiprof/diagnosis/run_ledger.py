"""The ledger of a run: its time table, the opportunities in it, and what each would gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.ledger import POSITIONS, Account, Ledger
from haiprof.diagnosis.finding import place_text
from haiprof.diagnosis.job_time import JobTime, job_time, peer_waits
from haiprof.diagnosis.opportunities import Opportunity, find_opportunities, needed_rows
from haiprof.run_analysis.code_samples import WORKER, CodeSamples
from haiprof.run_analysis.ledger import (
    ACTIVITIES,
    PEER_WAIT,
    RankSamples,
    RankTime,
    TimeTable,
    time_table,
)
from haiprof.run_analysis.lines import common_callees, functions_of, innermost_frame
from haiprof.run_analysis.run_frames import RunFrames

SAMPLED_RANKS = 8
"""Samples of so many ranks are read: the slowest, and others at equal distances."""
SMALL_RATIO = 0.002
"""Accounts below this share of a step are one row by position and activity."""
_ONE_RANK = 0.8
"""Where one of several ranks has so much of an account, it is about that rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLedger:
    """The ledger with what its explanations look at."""

    ledger: Ledger
    table: TimeTable
    time: JobTime
    samples: CodeSamples
    found: tuple[Opportunity, ...]
    """Of the first accounts of the ledger, in their order."""


def run_ledger(
    analyzer: RunFrames,
    judged: Mapping[int, pl.DataFrame],
    core_waits: Mapping[int, float],
) -> RunLedger | None:
    """Builds the ledger of a run; None without judged steps.

    Args:
        analyzer: The run.
        judged: By rank: its judged steps.
        core_waits: By rank: share of time in which its training thread could run and got no core.
    """
    ranks = [_rank_time(analyzer, rank, steps) for rank, steps in judged.items() if steps.height]
    if not ranks:
        return None
    groups = analyzer.arrivals()
    starts = {rank: analyzer.step_starts(rank) for rank in judged}
    time = job_time(ranks, peer_waits(groups, starts) if groups else None)
    chosen = _sampled_ranks(time)
    samples = analyzer.code_samples(chosen)
    parts = [
        _rank_samples(analyzer, each, time, core_waits) for each in ranks if each.rank in chosen
    ]
    table = time_table(samples, parts)
    needed = needed_rows(table)
    found = find_opportunities(table, needed)
    return _ledger(table, time, samples, found, needed, ranks)


def _rank_time(analyzer: RunFrames, rank: int, steps: pl.DataFrame) -> RankTime:
    plain, collected = analyzer.position_times(rank)
    step = steps["step"].to_numpy()
    return RankTime(
        rank=rank,
        step=step,
        plain_ns=plain[:, step],
        collected_ns=collected[:, step],
        median_ns=float(steps["step_ns"].median() or 0.0),
    )


def _sampled_ranks(time: JobTime) -> set[int]:
    world = time.ranks
    own = (time.period_ns - time.peer_ns).mean(axis=1)
    slowest = world[int(own.argmax())]
    return {slowest, *world[:: max(len(world) // (SAMPLED_RANKS - 1), 1)]}


def _rank_samples(
    analyzer: RunFrames, rank: RankTime, time: JobTime, core_waits: Mapping[int, float]
) -> RankSamples:
    row = time.ranks.index(rank.rank)
    waits = time.peer_ns[row, time.covered].sum() / time.period_ns[row, time.covered].sum()
    positions, offset = analyzer.step_positions(rank.rank)
    return RankSamples(
        time=rank,
        positions=positions,
        wall_offset_ns=offset,
        no_core_ratio=core_waits.get(rank.rank),
        tail_ratio=analyzer.backward_tail(rank.rank),
        peer_ratio=float(waits) if time.waits_for_all else None,
    )


def _ledger(
    table: TimeTable,
    time: JobTime,
    samples: CodeSamples,
    found: Sequence[Opportunity],
    needed: np.ndarray,
    ranks: Sequence[RankTime],
) -> RunLedger:
    rows = [(each, _account(table, time, samples, each)) for each in found]
    rows.sort(key=lambda row: -row[1].gain_ns)
    rest = np.ones(len(table.ns), dtype=np.bool_)
    for each in found:
        rest[each.rows] = False
    others = _other_accounts(table, time, np.flatnonzero(rest), needed)
    accounts = (*(account for _, account in rows), *others)
    mean = time.mean_ns
    ledger = Ledger(
        mean_ns=mean,
        median_ns=float(np.median([rank.median_ns for rank in ranks])),
        count=max(len(rank.step) for rank in ranks),
        residual_ns=mean - sum(account.ns_per_step for account in accounts),
        accounts=accounts,
        opportunities=tuple(place for place, (_, a) in enumerate(rows) if a.gain_ns > 0),
        rests_on=f"spans of {len(time.step)} steps and {int(table.count.sum())} samples",
    )
    return RunLedger(
        ledger=ledger, table=table, time=time, samples=samples,
        found=tuple(each for each, _ in rows),
    )  # fmt: skip


def _account(
    table: TimeTable, time: JobTime, samples: CodeSamples, found: Opportunity
) -> Account:
    parts = time.parts(table, found.rows)
    mean = parts.mean(axis=0)
    low, high = time.interval(table, found.rows, mean)
    gains = time.gains(parts) if found.activity != PEER_WAIT else np.zeros(1)
    gain = float(gains.mean())
    gain_low, gain_high = time.interval(table, found.rows, gains) if gain > 0 else (0.0, 0.0)
    share = parts.sum(axis=1) / max(float(parts.sum()), 1.0)
    several = len(time.ranks) > 1 and float(share.max()) >= _ONE_RANK
    series = parts.max(axis=0) if several else mean
    account = Account(
        ranks=(time.ranks[int(share.argmax())],) if several else (),
        position=POSITIONS[found.position],
        activity=ACTIVITIES[found.activity],
        package=_package(table, found.rows),
        ns_per_step=float(mean.mean()),
        low_ns=low,
        high_ns=high,
        gain_ns=gain,
        gain_low_ns=min(gain_low, gain),
        gain_high_ns=max(gain_high, gain),
        when=time.when(table, found.rows, series),
    )
    if found.place is None:
        return account
    at = found.place
    return replace(
        account,
        file=at.file,
        line=at.line,
        function=at.function,
        callees=common_callees(table.tree, table.stack[found.rows], table.ns[found.rows]),
        callers=tuple(place_text(*caller) for caller in at.callers),
    )


def _package(table: TimeTable, rows: Ints) -> str | None:
    ns: dict[str, float] = {}
    for name, part in zip(table.take(rows).package, table.ns[rows].tolist(), strict=True):
        if name is not None:
            ns[name] = ns.get(name, 0.0) + part
    return max(ns, key=lambda name: (ns[name], name)) if ns else None


def _other_accounts(
    table: TimeTable, time: JobTime, rows: Ints, needed: np.ndarray
) -> list[Account]:
    """What no opportunity holds, by position, activity, package and function."""
    tree = table.tree
    frame = innermost_frame(tree)[table.stack[rows]]
    function = functions_of(tree)[1][frame]
    names = sorted(set(table.packages))
    package = np.array([*(names.index(name) for name in table.packages), -1])
    keys = np.stack([
        table.position[rows], table.activity[rows], package[tree.place[table.stack[rows]]],
        function, needed[rows],
    ])  # fmt: skip
    total = float(table.ns.sum())
    _, group = np.unique(keys, axis=1, return_inverse=True)
    small = np.bincount(group, table.ns[rows])[group] < SMALL_RATIO * total
    keys[2:4, small] = -1
    _, group = np.unique(keys, axis=1, return_inverse=True)
    found = []
    for number in range(int(group.max(initial=-1)) + 1):
        own = np.flatnonzero(group == number)
        found.append(_plain_account(table, time, rows[own], keys[:, own[0]], names, frame[own]))
    return sorted(found, key=lambda account: -account.ns_per_step)


def _plain_account(
    table: TimeTable, time: JobTime, rows: Ints, key: Ints, names: Sequence[str], frame: Ints
) -> Account:
    mean = time.parts(table, rows).mean(axis=0)
    low, high = time.interval(table, rows, mean)
    named = key[3] >= 0
    at = None
    if named:
        at = table.tree.frames[int(np.bincount(frame[frame >= 0], table.ns[rows[frame >= 0]]).argmax())]
    return Account(
        ranks=(),
        position=POSITIONS[key[0]],
        activity=ACTIVITIES[key[1]],
        package=names[key[2]] if key[2] >= 0 else None,
        file=at.file if at else None,
        line=at.line if at else None,
        function=at.function if at else None,
        callees=common_callees(table.tree, table.stack[rows], table.ns[rows]) if at else (),
        ns_per_step=float(mean.mean()),
        low_ns=low,
        high_ns=high,
        needed=bool(key[4]),
    )


def loading_samples(samples: CodeSamples) -> CodeSamples:
    """What DataLoader workers did while they loaded."""
    return samples.take(samples.phase == WORKER)

