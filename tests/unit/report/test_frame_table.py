"""Frames as tables for people: names that stay apart, times that begin with the first event."""

from __future__ import annotations

import polars as pl
from rich.console import Group

from haiprof.show.card import view_text
from haiprof.show.frame_table import frame_table


def test_names_that_differ_at_their_ends_stay_apart_in_a_narrow_table() -> None:
    names = [f"void at::native::vectorized_elementwise_kernel<4, at::native::{n}Functor>" for n in
             ("CUDAAdd", "CUDAMul", "Sqrt")]  # fmt: skip
    found = pl.DataFrame({"name": names, "sum_ns": [1, 2, 3]})
    parts = frame_table(found, (("name", "kernel"), ("sum_ns", "time")), limit=9)
    text = view_text(Group(*parts), width=60)
    lines = [line for line in text.splitlines() if "void" in line]
    assert len(set(lines)) == 3
    assert all("…" in line and "Functor>" in line for line in lines)


def test_points_in_time_are_shown_since_the_first_of_them() -> None:
    boot_ns = 470_591 * 3_600_000_000_000
    found = pl.DataFrame({"start_ns": [boot_ns, boot_ns + 5_000_000], "sum_ns": [1, 2]})
    parts = frame_table(found, (("start_ns", "start"), ("sum_ns", "time")), limit=9)
    text = view_text(Group(*parts), width=60)
    assert "5.00 ms" in text
    assert " h" not in text


def test_durations_are_shown_as_they_are_and_unix_times_since_the_first() -> None:
    columns = (("kind", "kind"), ("time_ns", "time"))
    durations = pl.DataFrame({"kind": ["memory", "computing"], "time_ns": [39_088_000, 10_670_000]})
    text = view_text(Group(*frame_table(durations, columns, limit=9)), width=60)
    assert "39.1 ms" in text
    assert "10.7 ms" in text
    unix_ns = 1_795_000_000_000_000_000
    moments = pl.DataFrame({"kind": ["a", "b"], "time_ns": [unix_ns, unix_ns + 5_000_000]})
    assert "5.00 ms" in view_text(Group(*frame_table(moments, columns, limit=9)), width=60)
