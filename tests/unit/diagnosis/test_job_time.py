"""Gains against a job that is played step by step, intervals against chance, and `when`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from haiprof.base.intervals import Floats
from haiprof.base.ledger import GROWING, POSITIONS
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.job_time import JobTime, PeerWaits, find_stragglers, job_time, peer_waits
from haiprof.run_analysis.collectives import Arrivals
from haiprof.run_analysis.ledger import LONG, PYTHON, USUAL, TimeTable
from haiprof.run_analysis.run_frames import Cells
from haiprof.run_analysis.step_positions import (
    AFTER_STEP,
    BACKWARD,
    EVALUATION,
    FORWARD,
    PREPARE,
    StepPositions,
)
from tests.unit.diagnosis.tables import tree_of

STEPS = 200
DICE = np.random.default_rng(5)
Work = Callable[[int, int], float]
"""(rank, step) to ms of avoidable work."""


def judged(numbers: Mapping[int, np.ndarray]) -> dict[int, Cells]:
    """Whole steps, each under its own number."""
    return {
        rank: Cells(step=own, count=np.ones_like(own), column=own) for rank, own in numbers.items()
    }


def own_numbers(own: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """As many steps of each rank as it has values."""
    return {rank: np.arange(len(values)) for rank, values in own.items()}


def only(position: int, ms: Mapping[int, np.ndarray]) -> tuple[Any, list[int]]:
    """Ranks that are there alone, for so many ms of each step: how to load it, and the position."""

    def load(rank: int) -> tuple[np.ndarray, np.ndarray]:
        plain = np.zeros((len(POSITIONS), len(ms[rank])), dtype=np.int64)
        plain[position] = ms[rank] * NS_PER_MS
        return plain, np.zeros_like(plain)

    return load, [position]


def recorded(work: Mapping[int, Floats], *, known: bool, every: int = 1) -> JobTime:
    """Ranks with [position, step] in ms, that wait for the slowest in each Nth step's backward."""
    took = {rank: ms.sum(axis=0).reshape(-1, every).sum(axis=1) for rank, ms in work.items()}
    meets = np.arange(every) == every - 1
    slowest = np.max(list(took.values()), axis=0)
    waits = {rank: np.outer(slowest - own, meets).ravel() for rank, own in took.items()}
    times = {}
    for rank, ms in work.items():
        seen = ms.copy()
        seen[BACKWARD] += waits[rank]
        times[rank] = (seen * NS_PER_MS).round().astype(np.int64)
    numbers = {rank: np.arange(ms.shape[1]) for rank, ms in work.items()}

    def load(rank: int) -> tuple[np.ndarray, np.ndarray]:
        return times[rank], np.zeros_like(times[rank])

    peers = {
        rank: {n: round(ms[n] * NS_PER_MS) for n in numbers[rank].tolist()[every - 1 :: every]}
        for rank, ms in waits.items()
    }
    stretches = {rank: [(0, len(waits[rank]) - 1)] for rank in work}
    used = [p for p in range(len(POSITIONS)) if any(ms[p].any() for ms in times.values())]
    known_waits = PeerWaits({BACKWARD: peers}, frozenset(), stretches) if known else None
    return job_time(judged(numbers), load, used, known_waits)


def working(ranks: int, extra: Work, at: int = FORWARD, steps: int = STEPS) -> dict[int, Floats]:
    """30 ms of a model on each rank, and its avoidable work at a position."""
    found = {}
    for rank in range(ranks):
        ms = np.zeros((len(POSITIONS), steps))
        ms[[FORWARD, BACKWARD]] = [[10.0], [20.0]]
        ms[at] += [extra(rank, step) for step in range(steps)]
        found[rank] = ms
    return found


def played(ranks: int, extra: Work, keeps: Callable[[int], bool], every: int) -> float:
    """ms of the mean step where all wait for all at each Nth one's end; some lose their extra."""
    ends = [0.0] * ranks
    for step in range(STEPS):
        ends = [at + 30.0 + extra(rank, step) * keeps(rank) for rank, at in enumerate(ends)]
        if step % every == every - 1:
            ends = [max(ends)] * ranks
    return max(ends) / STEPS


TURNS = DICE.integers(0, 4, STEPS)
CHANCE = DICE.exponential(5.0, (8, STEPS))
STORIES: dict[str, tuple[int, Work]] = {
    "one rank": (1, lambda rank, step: 7.0),
    "all alike": (4, lambda rank, step: 7.0),
    "straggler": (4, lambda rank, step: 9.0 if rank == 2 else 4.0),
    "rank 0 alone": (2, lambda rank, step: 0.0 if rank else 6.0),
    "rank 0 every 20th step": (4, lambda rank, step: 140.0 * (step % 20 == 7 and not rank)),
    "by turns": (4, lambda rank, step: 8.0 * (rank == TURNS[step])),
    "by chance": (8, lambda rank, step: float(CHANCE[rank, step])),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize(("known", "every"), [(True, 1), (False, 1), (True, 20)])
def test_gain_is_what_the_job_loses_by_it(story: str, known: bool, every: int) -> None:
    """Also of what one rank does: then the slowest of the others is waited for."""
    ranks, extra = STORIES[story]
    time = recorded(working(ranks, extra), known=known, every=every)
    parts = np.array([[extra(r, s) for s in range(STEPS)] for r in range(ranks)])
    whole = played(ranks, extra, lambda _: True, every)
    assert time.mean_ns / NS_PER_MS == pytest.approx(whole)
    gain = time.gains(parts[None] * NS_PER_MS).mean() / NS_PER_MS
    assert gain == pytest.approx(whole - played(ranks, extra, lambda _: False, every))
    for rank in range(ranks):
        own = parts * (np.arange(ranks) == rank)[:, None] * NS_PER_MS
        alone = time.gains(own[None]).mean() / NS_PER_MS
        left = played(ranks, extra, lambda r: r != rank, every)  # noqa: B023
        assert alone == pytest.approx(whole - left, rel=1e-5)  # kept in single precision
        assert alone <= gain + 1e-9


def test_ranks_that_do_not_wait_for_each_other_gain_what_the_mean_one_does() -> None:
    """Hogwild, or separate jobs: no collectives, and steps of unlike length."""
    own = {rank: np.full(20, 10 + 20 * rank) for rank in (0, 1)}
    time = job_time(judged(own_numbers(own)), *only(FORWARD, own), None)
    assert not time.waits_for_all
    of_rank_1 = np.array([[0], [6]], dtype=np.float32).repeat(20, axis=1)
    assert time.gains(of_rank_1[None]).mean() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("counts", "first", "steps"),
    [((60, 57), {}, range(57)), ((60, 60), {1: 4}, range(4, 60)), ((60, 50), {1: 60}, range(50))],
    ids=["one ends earlier", "one begins later", "none in common"],
)
def test_ranks_with_unequal_steps_are_compared_where_both_have_them(
    counts: tuple[int, int], first: dict[int, int], steps: range
) -> None:
    """As many of each where their numbers have nothing in common."""
    numbers = {rank: np.arange(n) + first.get(rank, 0) for rank, n in enumerate(counts)}
    ms = {rank: np.arange(int(own[-1]) + 1) + 1 for rank, own in numbers.items()}
    time = job_time(judged(numbers), *only(FORWARD, ms), None)
    assert time.step.tolist() == list(steps)
    own = [n[: len(steps)] if first == {1: 60} else np.array(steps) for n in numbers.values()]
    assert (time.period_ns / NS_PER_MS).tolist() == [(each + 1).tolist() for each in own]


def test_ranks_without_a_common_clock_wait_after_their_own_last_collective() -> None:
    """Both backwards take 20 ms; rank 0 begins its last collective after 10, rank 1 after 18."""
    own = {rank: np.full(20, 20) for rank in (0, 1)}
    time = job_time(
        judged(own_numbers(own)), *only(BACKWARD, own), PeerWaits({}, frozenset()), {0: 0.5, 1: 0.1}
    )
    assert time.waits_for_all
    assert time.own_ns.mean(axis=1) / NS_PER_MS == pytest.approx([12.0, 20.0])
    of_rank_1 = np.array([[0], [8e6]], dtype=np.float32).repeat(20, axis=1)
    assert time.gains(of_rank_1[None]).mean() == pytest.approx(8e6)


# -- stragglers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "extra", "at", "expected"),
    [
        (4, lambda r, s: 5.0 * (r == 2), FORWARD, ((2,), 5.0)),
        (2, lambda r, s: 5.0 * (r == 1), AFTER_STEP, ((1,), 5.0)),
        (4, lambda r, s: float(CHANCE[r, s]) + 12.0 * (r == 3), FORWARD, ((3,), 12.0)),
        (4, lambda r, s: 8.0 * (r == 1 and s >= STEPS / 2), FORWARD, ((1,), 4.0)),
        (6, lambda r, s: 8.0 * (r in (1, 4)), FORWARD, ((1, 4), 8.0)),
        (4, lambda r, s: 8.0 * (r >= 2), FORWARD, ((2, 3), 8.0)),  # one of two nodes
        (4, lambda r, s: 8.0 * (r == TURNS[s]), FORWARD, None),
        (4, lambda r, s: float(CHANCE[r, s]), FORWARD, None),
        (4, lambda r, s: 90.0 * (r == 1 and s // 20 == 4), FORWARD, None),  # a tenth of the run
        (4, lambda r, s: 5.0, FORWARD, None),
        (1, lambda r, s: 5.0, FORWARD, None),
    ],
)
def test_stragglers_are_ranks_that_are_slower_in_most_of_a_stretch(
    ranks: int, extra: Work, at: int, expected: tuple[tuple[int, ...], float] | None
) -> None:
    time = recorded(working(ranks, extra, at), known=True)
    found = find_stragglers(time, time.own_ns, np.zeros((ranks, len(POSITIONS))))
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.ranks == expected[0]
    assert found.extra_ns / NS_PER_MS == pytest.approx(expected[1], rel=0.15)
    for by_position in found.by_position.values():
        assert int(by_position.argmax()) == at
        assert by_position.sum() <= found.extra_ns * (1 + 1e-6)


# -- intervals and when ---------------------------------------------------------------------------


def rows_of(step: np.ndarray, ns: np.ndarray, cell: int = FORWARD) -> TimeTable:
    """A table of samples with their step and weight."""
    same = np.zeros(len(step), dtype=np.int64)
    tree, _ = tree_of([])
    return TimeTable(
        tree=tree, packages=(), rank=same, cell=same + cell, position=same + cell,
        activity=same + PYTHON, work=same + PYTHON, stack=same, step=step, kind=same,
        hidden=same > 0, ns=ns.astype(np.float64), count=np.ones(len(step)), sample=same - 1,
        needed=same > 0,
    )  # fmt: skip


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """A tenth of the time, found by 300 samples, a thousand times over."""
    time = recorded(working(1, lambda r, s: 0.0), known=False)
    held, widths = 0, []
    for _ in range(1000):
        step = DICE.integers(0, STEPS, 300)
        table = rows_of(step, np.full(300, 3e7 * STEPS / 300))
        rows = np.flatnonzero(DICE.random(300) < 0.1)
        series = np.full(STEPS, 3e7 * len(rows) / 300)
        low, high = time.interval(table, rows, series)
        held += low <= 3e6 <= high
        widths.append(high - low)
    assert 930 <= held <= 985
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 3e7 * (0.09 / 300) ** 0.5, rel=0.1)


def test_what_is_paid_now_and_then_is_as_unsure_as_it_is_uneven() -> None:
    time = recorded(working(1, lambda r, s: 0.0), known=False)
    table = rows_of(np.arange(STEPS), np.ones(STEPS))
    rows = np.arange(STEPS)
    even, every_40th = np.full(STEPS, 5e6), 5e6 * 40 * (rows % 40 == 3)
    seldom = np.where(np.isin(rows, (5, 17, 60, 62, 171)), 2e8, 0.0)
    for sure in (even, every_40th):
        assert time.interval(table, rows, sure) == pytest.approx((5e6, 5e6), rel=0.02)
    low, high = time.interval(table, rows, seldom)
    assert low < 3.5e6 < 6.5e6 < high


AT = np.arange(STEPS)


@pytest.mark.parametrize(
    ("series_ms", "seen", "said"),
    [
        (np.full(STEPS, 3.0), AT, "each step"),
        (131.0 * (AT % 20 == 19), AT[19::20], "every 20th step, 131 ms"),
        (131.0 * (AT % 20 == 19) + 1.0, AT[19::20], "every 20th step, 132 ms"),
        (1310.0 * (AT % 20 == 19), AT[19::20], "every 20th step, 1.31 s"),
        (
            150.0 * (AT % 20 == 19) + 12.0 * np.isin(AT, (2, 30, 51, 88, 90, 133, 171)),
            AT[19::20],
            "every 20th step, 150 ms",
        ),
        (
            3.0 * (AT % 20 == 19) + 1.2 * np.isin(AT, (2, 30, 51, 88, 90, 133, 171)),
            AT[19::20],
            "every 20th step, 3.00 ms",
        ),
        (100.0 * (AT % 20 == 9) + 50.0 * (AT % 20 == 10), AT[9::20], "every 20th step, 150 ms"),
        (8.0 * (AT % 2), AT[1::2], "every 2nd step, 8.00 ms"),
        (CHANCE.ravel()[:STEPS], AT, "each step"),
        (8.0 * (AT % 3 == 1), AT[1::3], "every 3rd step, 8.00 ms"),
        (50.0 * (AT % 33 == 0), AT[::33], "every 33rd step, 50.0 ms"),
        (90.0 * ((AT >= 100) & (AT < 110)), AT[100:110], "in 10 of 200 steps, 90.0 ms"),
        (90.0 * np.isin(AT, (5, 17, 60, 62, 171)), AT, "in 5 of 200 steps, 90.0 ms"),
        (4.0 * (AT >= 100), AT[100:], "since step 100"),
        (4.0 * (AT >= 57), np.repeat(AT[57:], 2), "since step 57"),
        (4.0 * (AT < 100), AT[:100].repeat(2), "until step 99"),
        (90.0 * (AT < 60), AT[:60].repeat(2), "until step 59"),
        (90.0 * (AT >= 150), AT[150:].repeat(2), "since step 150"),
        (1.0 + 4.0 * (AT < 60), np.append(AT, np.repeat(AT[:60], 9)), "more until step 59"),
        (1.0 + 4.0 * (AT >= 100), np.append(AT, np.repeat(AT[100:], 4)), "more since step 100"),
        (np.full(STEPS, 0.5), AT[175:].repeat(2), "since step 175"),
        (0.05 * AT, np.repeat(AT, AT // 20), "growing"),
        (1.0 + 0.0004 * AT**2, np.repeat(AT, AT**2 // 4000)[::7], "growing"),  # few samples
        (  # and by chance more of them from the middle on
            0.05 * AT,
            np.repeat(AT, np.random.default_rng(4).poisson(AT / 60)),
            "growing",
        ),
        (  # from within a part of the steps on, and sampled by chance more at the end
            1.0 * (AT >= 88),
            np.concatenate([AT[88:100], AT[103:125], AT[128:], AT[150:151], AT[180:191]]),
            "since step 88",
        ),
        (5.0 - 0.02 * AT, np.repeat(AT, 10 - AT // 20), "each step"),  # it becomes less
        (np.full(STEPS, 3.0), AT[150:180:8], "each step"),  # too few samples tell nothing
    ],
)
def test_when_an_account_is_paid(series_ms: Floats, seen: np.ndarray, said: str) -> None:
    """Its samples among as many others of its position."""
    time = recorded(working(1, lambda r, s: 0.0, EVALUATION), known=False)
    table = rows_of(np.concatenate([seen, np.repeat(AT, 3)]), np.ones(len(seen) + 3 * STEPS))
    paid = series_ms * NS_PER_MS
    assert time.when(table, np.arange(len(seen)), paid, paid) == said


def test_what_follows_in_the_step_after_is_a_part_of_each_time() -> None:
    """An evaluation of 40 ms whose confusion matrix, 15 ms, lies between that step and the next."""
    time = recorded(working(1, lambda r, s: 0.0, EVALUATION), known=False)
    table = rows_of(np.concatenate([AT[19::20], np.repeat(AT, 3)]), np.ones(10 + 3 * STEPS))
    series = 40.0 * (AT % 20 == 19) * NS_PER_MS
    every = series + 15.0 * (AT % 20 == 0) * (AT > 0) * NS_PER_MS
    said = time.when(table, np.arange(10), series, every)
    assert said == "every 20th step, 53.5 ms"  # the last one's lies after the run


def test_since_when_an_account_is_paid_is_as_exact_as_the_time_of_its_position() -> None:
    """Its first sample is of step 112; forward takes longer from step 100 on."""
    time = recorded(working(1, lambda r, s: 4.0 * (s >= 100)), known=False)
    seen = AT[112:].repeat(2)
    table = rows_of(np.concatenate([seen, np.repeat(AT, 3)]), np.ones(len(seen) + 3 * STEPS))
    paid = np.full(STEPS, 2.0 * NS_PER_MS)
    assert time.when(table, np.arange(len(seen)), paid, paid) == "since step 100"


def test_what_nobody_sampled_at_first_did_not_begin_later() -> None:
    time = recorded(working(1, lambda r, s: 0.0, EVALUATION), known=False)
    late = np.repeat(AT[80:], 10)
    table = rows_of(late, np.ones(len(late)))
    rows = np.flatnonzero(np.arange(len(late)) % 10 > 0)
    paid = np.full(STEPS, 9.0 * NS_PER_MS)
    assert time.when(table, rows, paid, paid) == "each step"


@pytest.mark.parametrize(("own_count", "said"), [(1, "each step"), (9, "every 20th step, 90.0 ms")])
def test_long_periods_are_of_the_account_that_makes_them(own_count: int, said: str) -> None:
    """Every 20th period has 20 samples: of one account, or 9 of another."""
    time = recorded(working(1, lambda r, s: 0.0, EVALUATION), known=False)
    step = np.concatenate([AT, np.repeat(AT[19::20], 20)])
    table = rows_of(step, np.ones(len(step)))
    table = replace(table, kind=np.where(step % 20 == 19, LONG, USUAL))
    rows = np.flatnonzero((np.arange(len(step)) >= STEPS) & (np.arange(len(step)) % 20 < own_count))
    paid = own_count * 10.0 * NS_PER_MS * (AT % 20 == 19)
    assert time.when(table, rows, paid, paid) == said


# -- waiting for peers ----------------------------------------------------------------------------


def test_buckets_of_one_backward_are_one_delay_and_barriers_are_several() -> None:
    """Rank 1 begins 30 ms later: two buckets at once, then a barrier for which it is late again."""
    begin = np.array([[10, 12, 60], [40, 42, 65]]) * NS_PER_MS
    created = np.concatenate([begin, begin + 100 * NS_PER_MS], axis=1)
    group = Arrivals(
        group="0", group_name="world", ranks=(0, 1), kinds=("all_reduce",) * 6,
        sequence=np.arange(6), created_ns=created,
    )  # fmt: skip
    starts = {rank: (0, np.array([0, 100]) * NS_PER_MS) for rank in (0, 1)}
    begins = np.array([0, 8, 45, 100, 108, 145]) * NS_PER_MS
    positions = StepPositions(
        start_ns=begins, end_ns=200 * NS_PER_MS,
        position=np.array([FORWARD, BACKWARD, AFTER_STEP] * 2),
        around_closure=np.zeros(6, dtype=bool), collecting=np.zeros(6, dtype=bool),
        period=np.repeat([0, 1], 3), step_count=2,
    )  # fmt: skip
    found = peer_waits([group], starts, lambda _: (positions, 0))
    assert found.ns == {
        BACKWARD: {0: {0: 30 * NS_PER_MS, 1: 30 * NS_PER_MS}, 1: {0: 0, 1: 0}},
        AFTER_STEP: {0: {0: 5 * NS_PER_MS, 1: 5 * NS_PER_MS}, 1: {0: 0, 1: 0}},
    }
    assert found.early == {AFTER_STEP}
    assert found.known == {0: [(0, 1)], 1: [(0, 1)]}
    parted = replace(group, sequence=np.array([0, 1, 2, 8, 9, 10]))
    assert peer_waits([parted], starts, lambda _: (positions, 0)).known[0] == [(0, 0), (1, 1)]


def test_nobody_is_late_between_collectives_that_are_called_one_after_the_other() -> None:
    """Of six after the step: rank 1 comes late to the first, and rank 0 evaluates before the last.

    Where the positions of the model are not known, each may be waited for.
    """
    created = np.array([[50, 60, 63, 66, 69, 95], [58, 61, 64, 67, 70, 72]]) * NS_PER_MS
    group = Arrivals(
        group="0", group_name="world", ranks=(0, 1), kinds=("all_gather",) * 6,
        sequence=np.arange(6), created_ns=created,
    )  # fmt: skip
    starts = {rank: (0, np.array([0])) for rank in (0, 1)}
    positions = StepPositions(
        start_ns=np.array([0, 8, 45]) * NS_PER_MS, end_ns=100 * NS_PER_MS,
        position=np.array([FORWARD, BACKWARD, AFTER_STEP]), around_closure=np.zeros(3, dtype=bool),
        collecting=np.zeros(3, dtype=bool), period=np.zeros(3, dtype=int), step_count=1,
    )  # fmt: skip
    found = peer_waits([group], starts, lambda _: (positions, 0))
    assert found.ns == {AFTER_STEP: {0: {0: 8 * NS_PER_MS}, 1: {0: 23 * NS_PER_MS}}}
    only_ends = replace(positions, position=np.full(3, PREPARE))
    found = peer_waits([group], starts, lambda _: (only_ends, 0))
    assert found.ns == {PREPARE: {0: {0: 12 * NS_PER_MS}, 1: {0: 23 * NS_PER_MS}}}


@pytest.mark.parametrize(
    ("second", "sequence", "waited"),
    [((150, 340), (0, 1), 190), ((52, 51), (0, 1), 0), ((52, 51), (0, 9), 1)],
)
def test_work_between_collectives_is_waited_for(
    second: tuple[int, int], sequence: tuple[int, int], waited: int
) -> None:
    """Work of 100 and of 290 ms; of 2 and of 1 ms, where it calls the two, and calls of others."""
    created = np.array([[50, second[0]], [50, second[1]]]) * NS_PER_MS
    group = Arrivals(
        group="0", group_name="world", ranks=(0, 1), kinds=("all_gather",) * 2,
        sequence=np.array(sequence), created_ns=created,
    )  # fmt: skip
    starts = {rank: (0, np.array([0])) for rank in (0, 1)}
    positions = StepPositions(
        start_ns=np.array([0, 8, 45]) * NS_PER_MS, end_ns=400 * NS_PER_MS,
        position=np.array([FORWARD, BACKWARD, AFTER_STEP]), around_closure=np.zeros(3, dtype=bool),
        collecting=np.zeros(3, dtype=bool), period=np.zeros(3, dtype=int), step_count=1,
    )  # fmt: skip
    found = peer_waits([group], starts, lambda _: (positions, 0)).ns[AFTER_STEP]
    assert max(found[0][0], found[1][0]) == waited * NS_PER_MS


def test_ranks_wait_for_the_slowest_of_each_part_of_a_step() -> None:
    """Buffers are broadcast as forward begins: rank 0 is late there, and rank 1 in backward."""
    ms = {rank: np.zeros((len(POSITIONS), STEPS)) for rank in (0, 1)}
    ms[0][[PREPARE, FORWARD, BACKWARD]] = [[10.0], [5.0], [20.0 + 8.0]]
    ms[1][[PREPARE, FORWARD, BACKWARD]] = [[2.0], [8.0 + 5.0], [28.0]]
    times = {rank: (own * NS_PER_MS).astype(np.int64) for rank, own in ms.items()}
    waits = {FORWARD: (0, 8), BACKWARD: (8, 0)}
    peers = {
        position: {r: dict.fromkeys(range(STEPS), each[r] * NS_PER_MS) for r in (0, 1)}
        for position, each in waits.items()
    }
    load = lambda rank: (times[rank], np.zeros_like(times[rank]))  # noqa: E731
    numbers = {rank: np.arange(STEPS) for rank in ms}
    time = job_time(judged(numbers), load, [PREPARE, FORWARD, BACKWARD],
                    PeerWaits(peers, frozenset([FORWARD])))  # fmt: skip
    parts = np.zeros((2, 2, STEPS), dtype=np.float32)
    parts[time.segment[PREPARE], 0] = 8 * NS_PER_MS
    assert time.gains(parts).mean() == pytest.approx(8 * NS_PER_MS)  # though rank 1 takes as long
    assert time.own_ns.mean(axis=1) / NS_PER_MS == pytest.approx([35.0, 35.0])


def test_one_rank_may_wait_where_its_own_code_is_elsewhere() -> None:
    """Rank 0 makes the batches of both: rank 1 waits for that before its step, not in forward."""
    ms = {rank: np.zeros((len(POSITIONS), STEPS)) for rank in (0, 1)}
    ms[0][[PREPARE, FORWARD, BACKWARD]] = [[50.0], [2.0], [20.0]]
    ms[1][[EVALUATION, FORWARD, BACKWARD]] = [[50.0], [2.0], [20.0]]
    times = {rank: (own * NS_PER_MS).astype(np.int64) for rank, own in ms.items()}
    waits = {PREPARE: (0, 50), BACKWARD: (0, 0)}
    peers = {
        position: {r: dict.fromkeys(range(STEPS), each[r] * NS_PER_MS) for r in (0, 1)}
        for position, each in waits.items()
    }
    load = lambda rank: (times[rank], np.zeros_like(times[rank]))  # noqa: E731
    used = [PREPARE, FORWARD, BACKWARD, EVALUATION]
    time = job_time(judged(own_numbers({0: ms[0][0], 1: ms[1][0]})), load, used,
                    PeerWaits(peers, frozenset()))  # fmt: skip
    parts = np.zeros((1, 2, STEPS), dtype=np.float32)
    parts[0, 0] = 50 * NS_PER_MS
    assert time.gains(parts).mean() == pytest.approx(50 * NS_PER_MS)


def test_no_gain_is_longer_than_the_step_of_ranks_that_are_not_in_step() -> None:
    """Each of four is slow in its own turn, and none waits for another within a step."""
    extra = np.where(np.arange(STEPS) % 4 == np.arange(4)[:, None], 60.0 * NS_PER_MS, 0.0)
    ms = {rank: np.zeros((len(POSITIONS), STEPS)) for rank in range(4)}
    for rank, own in ms.items():
        own[[FORWARD, BACKWARD]] = [10.0 + extra[rank] / NS_PER_MS, np.full(STEPS, 20.0)]
    times = {rank: (own * NS_PER_MS).astype(np.int64) for rank, own in ms.items()}
    numbers = {rank: np.arange(STEPS) for rank in ms}
    none: dict[int, dict[int, int]] = {rank: dict.fromkeys(range(STEPS), 0) for rank in ms}
    load = lambda rank: (times[rank], np.zeros_like(times[rank]))  # noqa: E731
    waits = PeerWaits({BACKWARD: none}, frozenset())
    time = job_time(judged(numbers), load, [FORWARD, BACKWARD], waits)
    assert time.waits_for_all
    step = float(time.period_ns.mean())
    assert 0 < time.gains(extra.astype(np.float32)[None]).mean() < step


def test_growth_is_told_by_exact_times_though_samples_become_fewer() -> None:
    time = recorded(working(1, lambda rank, step: 0.2 * step, at=AFTER_STEP), known=False)
    table = rows_of(AT, 5e6 * np.minimum(0.1 + AT / 60, 1.0), AFTER_STEP)
    paid = time.series_of(table, AT)[0].astype(np.float64)
    assert time.when(table, AT, paid, paid) == GROWING
