from __future__ import annotations

import polars as pl

from haiprof.show.series import Series, TimeRange, bucket_means, fold_series

SPAN = TimeRange(start_ns=0, end_ns=1000)


def samples(times: list[int], values: list[float | None]) -> pl.DataFrame:
    return pl.DataFrame(
        {"time_ns": times, "value": values}, schema={"time_ns": pl.Int64, "value": pl.Float64}
    )


def test_bucketed_pause_of_the_samples_is_none() -> None:
    times = [*range(0, 300, 10), *range(700, 1000, 10)]
    values = bucket_means(samples(times, [1.0] * len(times)), span=SPAN, bucket_count=10)
    assert values == (1.0, 1.0, 1.0, None, None, None, None, 1.0, 1.0, 1.0)


def test_bucketed_sparse_samples_leave_no_holes() -> None:
    values = bucket_means(samples([0, 240, 510, 760], [1.0, 2.0, 3.0, 4.0]), span=SPAN)
    assert len(values) < 10
    assert None not in values


def test_bucketed_null_and_nan_are_not_zero() -> None:
    values = bucket_means(
        samples([0, 10, 20], [5.0, None, float("nan")]), span=SPAN, bucket_count=1
    )
    assert values == (5.0,)


def test_bucketed_long_step_fills_the_buckets_it_covers() -> None:
    steps = pl.DataFrame({"time_ns": [0, 100], "end_ns": [100, 1000], "value": [1.0, 9.0]})
    assert bucket_means(steps, span=SPAN, bucket_count=10) == (1.0, *(9.0,) * 9)


def test_bucketed_nothing_is_empty() -> None:
    assert bucket_means(samples([], []), span=SPAN) == ()


def rank_series(rank: int, mean: float) -> Series:
    return Series(
        title="step time", label=f"rank {rank}", unit="ns", mean=mean, max=mean, values=(mean, None)
    )


def test_folded_few_lines_stay() -> None:
    lines = [rank_series(rank, 1.0) for rank in range(4)]
    assert fold_series(lines) == lines


def test_folded_many_lines_name_the_highest() -> None:
    median, highest = fold_series([rank_series(rank, 1.0 + (rank == 7)) for rank in range(64)])
    assert (median.label, median.mean, median.values) == ("median of 64", 1.0, (1.0, None))
    assert (highest.label, highest.mean) == ("rank 7, highest", 2.0)
