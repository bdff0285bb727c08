"""Parts of the terminal's views: numbers as text, bars, buckets of time, tables that fit."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from rich.console import Console, Group

from haiprof.base.units import MISSING, number_text
from haiprof.diagnosis.traced_window import StepWork
from haiprof.show.card import view_text, work_text
from haiprof.show.figures.style import PHASES, time_unit
from haiprof.show.frame_table import frame_table
from haiprof.show.series import Series, TimeRange, bucket_means, fold_series
from haiprof.show.terminal import (
    Sparkline,
    SplitBar,
    block_lengths,
    fit_width,
    shows_colors,
    sparkline,
)
from haiprof.show.text import count_text, fine_ratio_text, flops_text, prefix_text, value_text
from haiprof.show.views.blocks import FittingTable
from haiprof.show.views.functions import stack_labels
from haiprof.show.views.jobs import split_text


@pytest.mark.parametrize(("found", "text"), [
    (value_text(12_300_000, "ns"), "12.3 ms"), (value_text(1.5 * 2**30, "bytes"), "1.50 GiB"),
    (value_text(math.nan, "ns"), MISSING),
    (value_text(0.37, "ratio"), "37 %"), (value_text(212.0, "watts"), "212 W"),
    (value_text(0.9, "cores"), "0.90 cores"), (value_text(400.0, "count"), "400"),
    (value_text(None, "ns"), MISSING), (number_text(None), MISSING),
    (count_text(1, "rank"), "1 rank"), (count_text(0, "rank"), "0 ranks"),
    (fine_ratio_text(0.000_17), "0.017 %"), (fine_ratio_text(0.0), "0.0 %"),
    (fine_ratio_text(0.3), "30 %"),
    (flops_text(14.68e6), "14.7 MFLOP"), (flops_text(999.4e6), "999 MFLOP"),
    (flops_text(999.7e6), "1.00 GFLOP"), (flops_text(3.217e12), "3.22 TFLOP"),
    (flops_text(12.0), "12.0 FLOP"), (prefix_text(2.31e12), "2.31 T"),
    (time_unit(None)[0], "ms"), (time_unit(90e3)[0], "µs"), (time_unit(3e6)[0], "ms"),
    (time_unit(900e6)[0], "ms"), (time_unit(30e9)[0], "s"),
    (sparkline([0.0, None, 1.0]), "▁ ▇"), (sparkline([0.0, 0.0]), "▁▁"),
    (sparkline([98.0, 100.0]), "▇▇"), (sparkline([0.5], top=1.0), "▄"),
    (sparkline([]), ""), (sparkline([None, None]), "  "),
])  # fmt: skip
def test_numbers_are_written_so(found: str, text: str) -> None:
    assert found == text


def test_mfu_is_left_out_where_it_is_not_known() -> None:
    work = StepWork(
        model_flops=3.2e12, flops_per_s=2.1e14, mfu_ratio=None, is_lower_bound=False,
        kernel_known_ratio=0.8, device="NVIDIA H100 80GB HBM3", peak=None, reason="no peak",
    )  # fmt: skip
    assert work_text(work) == "3.20 TFLOP a step, 210 TFLOP/s"


# -- bars -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [1, 7, 40, 200])
def test_fitted_has_the_width_and_keeps_gaps(width: int) -> None:
    cells = fit_width([1.0] * 20 + [None] * 20 + [2.0] * 20, width)
    assert len(cells) == width
    assert all(cell is None or 1.0 <= cell <= 2.0 for cell in cells)
    assert width < 7 or cells[width // 2] is None
    assert fit_width([], width) == [None] * width


def split(*times: float | None) -> dict[str, float | None]:
    return dict(zip(PHASES, times, strict=True))


@pytest.mark.parametrize("width", [5, 10, 37, 100])
def test_block_lengths_add_up_and_lose_no_phase(width: int) -> None:
    lengths = block_lengths(split(0.001, 50, 30, 10, 9.999), width)
    assert (sum(lengths.values()), list(lengths)) == (width, list(PHASES))
    assert min(lengths.values()) >= 1


def test_block_lengths_follow_the_times() -> None:
    found = block_lengths(split(25, 50, 25, 0, None), 40)
    assert found == {"dataloader": 10, "forward": 20, "backward": 10}
    assert block_lengths(split(None, None, 0, 0, None), 40) == {}


def test_bars_take_the_width_and_tell_phases_apart_by_filling_without_colour() -> None:
    console = Console(file=io.StringIO(), width=10, color_system=None)
    with console.capture() as capture:
        console.print(SplitBar(split(20, 20, 20, 20, 20)))
        console.print(Sparkline([1.0, 2.0, 3.0, 4.0]))
    bar, line = capture.get().splitlines()
    assert (bar, len(line)) == ("▒▒██▓▓░░··", 10)
    job = SimpleNamespace(split={"forward": 0.5, "backward": 0.5})
    assert set(split_text(job.split, width=12).plain) == {"█", "▓"}


@pytest.mark.parametrize("colors", [None, "standard"])
def test_phases_stay_apart_in_a_pipe_and_with_16_colours(colors: Any) -> None:
    console = Console(file=io.StringIO(), width=20, color_system=colors, force_terminal=True)
    assert not shows_colors(console)
    console.print(SplitBar({"forward": 1.0, "backward": 1.0}))
    assert {"█", "▓"} <= set(console.file.getvalue())  # type: ignore[attr-defined]


# -- series ---------------------------------------------------------------------------------------
SPAN = TimeRange(start_ns=0, end_ns=1000)
PAUSE = [*range(0, 300, 10), *range(700, 1000, 10)]


@pytest.mark.parametrize(("times", "values", "count", "expected"), [
    (PAUSE, [1.0] * 60, 10, [1.0] * 3 + [None] * 4 + [1.0] * 3),
    ([0, 10, 20], [5.0, None, float("nan")], 1, [5.0]),
    ([], [], 10, []),
], ids=["pause", "null-and-nan", "nothing"])  # fmt: skip
def test_buckets_have_means_and_pauses_none(
    times: list[int], values: list[float | None], count: int, expected: Sequence[float | None]
) -> None:
    schema = {"time_ns": pl.Int64, "value": pl.Float64}
    samples = pl.DataFrame({"time_ns": times, "value": values}, schema=schema)
    assert list(bucket_means(samples, span=SPAN, bucket_count=count)) == expected


def test_sparse_samples_leave_no_holes_and_a_long_step_fills_its_buckets() -> None:
    sparse = pl.DataFrame({"time_ns": [0, 240, 510, 760], "value": [1.0, 2.0, 3.0, 4.0]})
    values = bucket_means(sparse, span=SPAN)
    assert len(values) < 10
    assert None not in values
    steps = pl.DataFrame({"time_ns": [0, 100], "end_ns": [100, 1000], "value": [1.0, 9.0]})
    assert bucket_means(steps, span=SPAN, bucket_count=10) == (1.0, *(9.0,) * 9)


def test_few_lines_stay_and_many_name_the_highest() -> None:
    lines = [
        Series(title="step time", label=f"rank {rank}", unit="ns", mean=mean, max=mean,
               values=(mean, None))
        for rank, mean in ((rank, 1.0 + (rank == 7)) for rank in range(64))
    ]  # fmt: skip
    assert fold_series(lines[:4]) == lines[:4]
    median, highest = fold_series(lines)
    assert (median.label, median.mean, median.values) == ("median of 64", 1.0, (1.0, None))
    assert (highest.label, highest.mean) == ("rank 7, highest", 2.0)


# -- tables ---------------------------------------------------------------------------------------
def table_text(frame: pl.DataFrame, **columns: str) -> str:
    return view_text(Group(*frame_table(frame, tuple(columns.items()), limit=9)), width=60)


def test_names_that_differ_at_their_ends_stay_apart_in_a_narrow_table() -> None:
    names = [f"void at::native::vectorized_elementwise_kernel<4, at::native::{n}Functor>" for n in
             ("CUDAAdd", "CUDAMul", "Sqrt")]  # fmt: skip
    found = pl.DataFrame({"name": names, "sum_ns": [1, 2, 3]})
    text = table_text(found, name="kernel", sum_ns="time")
    lines = [line for line in text.splitlines() if "void" in line]
    assert len(set(lines)) == 3
    assert all("…" in line and "Functor>" in line for line in lines)


BOOT_NS, UNIX_NS = 470_591 * 3_600_000_000_000, 1_795_000_000_000_000_000


@pytest.mark.parametrize(("column", "times", "texts"), [
    ("start_ns", [BOOT_NS, BOOT_NS + 5_000_000], ["5.00 ms"]),
    ("time_ns", [39_088_000, 10_670_000], ["39.1 ms", "10.7 ms"]),
    ("time_ns", [UNIX_NS, UNIX_NS + 5_000_000], ["5.00 ms"]),
], ids=["since-boot", "durations", "unix"])  # fmt: skip
def test_durations_are_shown_as_they_are_and_moments_since_the_first(
    column: str, times: list[int], texts: list[str]
) -> None:
    text = table_text(pl.DataFrame({"kind": ["a", "b"], column: times}), kind="k", **{column: "t"})
    assert all(each in text for each in texts)
    assert " h" not in text


@pytest.mark.parametrize(("width", "titles", "last"), [
    (80, "pid time samples id", "training_of_a_large_model-20261123"),
    (50, "pid time samples id", "training_of_a_large_model…"),
    (40, "pid time id", "training_of_a_large_mode…"),
    (30, "pid id", "training_of_a_large_mod…"),
    (12, "pid id", "train…"),
])  # fmt: skip
def test_columns_that_fit_are_whole(width: int, titles: str, last: str) -> None:
    rows = [("4711", "12.3 ms", "3 of 4", "training_of_a_large_model-20261123")]
    columns = ("pid", "time", "samples", "id")
    out = io.StringIO()
    table = FittingTable(columns, rows, left=("id",), first_to_go=("samples", "time"))
    Console(file=out, width=width).print(table)
    head, row = out.getvalue().splitlines()
    assert (head.split(), row.split()[0]) == (titles.split(), "4711")
    assert row.rstrip().endswith(last)
    assert max(map(len, (head, row))) <= width


ROOT = "train.py(9): <module>|train.py(5): main"
END = "x.py(1): same|loader.py(3): next|loader.py(4): fetch|<built-in function sleep>"
SLEEPS = "<built-in function sleep> < loader.py(4): fetch < loader.py(3): next < ... < "


@pytest.mark.parametrize("labels", [
    {"aten::mm": "aten::mm"},
    {f"{ROOT}|torch/nn/modules/module.py(1): _call_impl|a/model.py(7): forward|aten::mm":
     "aten::mm < model.py(7): forward < train.py(5): main < ..."},
    {f"{ROOT}|train.py(30): first|{END}": f"{SLEEPS}train.py(30): first < ...",
     f"{ROOT}|train.py(40): rest|{END}": f"{SLEEPS}train.py(40): rest < ..."},
], ids=["one", "own-frames", "same-end"])  # fmt: skip
def test_labels_of_stacks_are_short_and_differ_where_stacks_do(labels: dict[str, str]) -> None:
    assert stack_labels(list(labels)) == labels


def test_stack_that_is_the_end_of_another_has_a_label_of_its_own() -> None:
    labels = stack_labels(["a|b|c", "root|a|b|c", "other|root|a|b|c"])
    assert len(set(labels.values())) >= 2
    assert labels["a|b|c"] == "c < b < a"
