"""Times are exact to the nanosecond, whatever the stamps look like."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.trace_format.kineto.columns import exact_ns
from tests.unit.traces.texts import LAYOUTS, compact, kernel, op, read

pytestmark = pytest.mark.usefixtures("way")


def ns_of(text: str) -> int:
    return int((Decimal(text) * 1000).to_integral_value())


@pytest.mark.parametrize(
    "stamp",
    [
        "0", "0.001", "1.5", "68.0", "1365627949885.185", "1365627949885", "1694128201426556",
        "1712170316123456.789", "1712170316123456.7", "1712170316123456.100", "4398046511104.001",
        "4398046511103.999", "1e3", "1.5e15", "123456789.1234", "1305516305009.771",
    ],
)  # fmt: skip
def test_stamp_is_read_to_the_nanosecond(file: Path, stamp: str) -> None:
    for neighbour in ("1", "2.5", "1712170316123456.001"):
        text = compact([op(ts="TS", dur="DUR"), kernel(ts="TS2")])
        for word, value in (("TS", stamp), ("DUR", "7.001"), ("TS2", neighbour)):
            text = text.replace(f'"{word}"', value)
        found = read(file, text)
        assert found.column("ops", "ts_ns") == [ns_of(stamp)]
        assert found.column("ops", "dur_ns") == [7001]
        assert found.column("gpu", "ts_ns") == [ns_of(neighbour)]


def test_a_single_coarse_stamp_late_in_the_file_is_exact(file: Path) -> None:
    events = [op(ts=number) for number in range(9000)] + [op(ts="END")]
    for layout in LAYOUTS:
        text = layout(events).replace('"END"', "1712170316123456.100")
        assert read(file, text).column("ops", "ts_ns")[-1] == 1712170316123456100


def test_stamps_as_texts_are_as_exact(file: Path) -> None:
    found = read(file, compact([op(ts="1712170316123456.123", dur="0.001")]))
    assert found.column("ops", "ts_ns") == [1712170316123456123]
    assert found.column("ops", "dur_ns") == [1]


def test_exact_stamps_of_instants_and_bad_ones_stand_beside_each_other(file: Path) -> None:
    instant = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 888, "args": {}}
    text = compact([op(ts=777), instant, op(ts=None), op(dur="x"), kernel(ts=-3)])
    exact = "1712170316123456.789"
    found = read(file, text.replace("777", exact).replace("888", exact))
    assert found.column("ops", "ts_ns") == found.column("memory", "ts_ns") == [ns_of(exact)]
    assert found.column("memory", "dur_ns") == [0]
    assert found.column("gpu", "ts_ns") == [-3000]
    assert found.report.bad_time_count == 2


def ns_or_none(text: str) -> int | None:
    try:
        return ns_of(text.strip('"'))
    except ArithmeticError:
        return None


numbers = st.decimals(min_value=-(10**14), max_value=10**15, places=3, allow_nan=False).map(str)
junk = st.sampled_from(
    ["null", '"1.5"', "1e3", "-1", "1.", ".5", "", "x", "1.2.3", '"a\n"', "[1,\n2]"]
)


@given(st.lists(numbers | junk, max_size=30))
def test_texts_of_any_form_are_read_like_decimals(texts: list[str]) -> None:
    found, good = exact_ns([text.encode() for text in texts])
    for text, ns, is_good in zip(texts, found.tolist(), good.tolist(), strict=True):
        expected = ns_or_none(text)
        assert is_good == (expected is not None)
        assert ns == (expected or 0)
