from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.agent.samplers.host import SummedCounters
from haiprof.linux.readings import Unavailable

NAMES = (b"sda", b"sdb", b"nvme0n1")
growths = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(st.integers(0, 1 << 50), st.integers(0, (1 << 31) - 1))
)


@given(st.tuples(*[st.integers(0, (1 << 32) - 1)] * len(NAMES)), st.lists(growths, max_size=30))
def test_sum_of_counters_that_wrap_is_what_they_grew(
    starts: tuple[int, ...], steps: list[dict[bytes, tuple[int, int]]]
) -> None:
    true = {name: [0, start] for name, start in zip(NAMES, starts, strict=True)}
    sums = SummedCounters((64, 32))
    begin = sums.add({name: (wide, narrow) for name, (wide, narrow) in true.items()})
    for step in steps:
        for name, (wide, narrow) in step.items():
            true[name] = [true[name][0] + wide, true[name][1] + narrow]
        seen = {name: (wide, narrow % (1 << 32)) for name, (wide, narrow) in true.items()}
        now = sums.add(seen)
        assert now[0] - begin[0] == sum(wide for wide, _ in true.values())
        assert now[1] - begin[1] == sum(narrow for _, narrow in true.values()) - sum(starts)


@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=20))
def test_sum_over_devices_that_come_and_go_counts_each_between_sightings(
    present: list[set[bytes]],
) -> None:
    sums = SummedCounters((64,))
    begin: tuple[int, ...] | None = None
    grown = 0
    before: set[bytes] = set()
    for tick, names in enumerate(present):
        now = sums.add(dict.fromkeys(names, (1000 + 10 * tick,)))
        begin = begin or now
        grown += 10 * len(names & before)
        assert now[0] - begin[0] == grown
        before = names


def test_sum_with_a_device_that_was_set_back_is_not_known_once() -> None:
    sums = SummedCounters((64, 32))
    begin = sums.add({b"sda": (100, 100), b"sdb": (5, 5)})
    with pytest.raises(Unavailable, match="sda were set back"):
        sums.add({b"sda": (3, 101), b"sdb": (6, 6)})
    assert sums.add({b"sda": (4, 102), b"sdb": (7, 7)}) == (begin[0] + 3, begin[1] + 3)


def test_sum_where_a_narrow_counter_falls_by_little_was_set_back() -> None:
    sums = SummedCounters((32,))
    sums.add({b"sda": (1000,)})
    with pytest.raises(Unavailable):
        sums.add({b"sda": (900,)})
