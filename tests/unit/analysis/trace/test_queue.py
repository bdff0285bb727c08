from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from haiprof.trace_analysis.launches import full_queue, queue_length, queue_length_summary
from tests.sampling import examples
from tests.unit.analysis.trace.shared import (
    event,
    kernel,
    launch,
    ranks_of,
    reference,
    trace_of,
)

HTA_COLUMNS = ["rank", "stream", "count", "mean", "std", "min", "25%", "50%", "75%", "max"]
LAUNCHES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(-2, 20), st.integers(7, 8)), min_size=1, max_size=15
)


@settings(max_examples=examples(60))
@given(LAUNCHES)
def test_queue_equals_brute_force_and_is_never_negative(
    launches: list[tuple[int, int, int]],
) -> None:
    early = sum(max(at + delay, 0) < at for at, delay, _ in launches)
    assume(early < 3)  # more are the GPU's clock behind the host's: times are moved
    events = []
    for number, (at, delay, stream) in enumerate(launches, start=1):
        events += [
            launch(number, at),
            kernel("k", max(at + delay, 0), 1, correlation=number, stream=stream),
        ]
    with TemporaryDirectory() as folder:
        trace = trace_of(Path(folder), events)
        series, summary = queue_length(trace), queue_length_summary(trace)
    assert series["queue_length"].min() == 0
    for number in series["stream"].unique():
        rows = series.filter(pl.col("stream") == number)
        own = [(at, max(at + delay, at)) for at, delay, where in launches if where == number]
        held = dict(rows.select("ts_ns", "queue_length").rows())  # the last one of a time
        for when, length in held.items():
            assert length == sum(begin * 1000 <= when < end * 1000 for begin, end in own)
        assert rows["queue_length"][-1] == 0
        row = summary.row(by_predicate=pl.col("stream") == number, named=True)
        waited = sum(end - begin for begin, end in own) * 1000
        if row["span_ns"]:
            assert row["mean_length"] == pytest.approx(waited / row["span_ns"])  # Little's law
        else:
            assert row["mean_length"] is None


def test_a_graph_is_one_entry_on_each_of_its_streams(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            launch(1, 0, name="cudaGraphLaunch"),
            *(kernel("node", 10 + at, 1, correlation=1) for at in range(5)),
            kernel("node", 20, 1, correlation=1, stream=9),
        ],
    )
    assert queue_length(trace).select("stream", "ts_ns", "queue_length").rows() == [
        (7, 0, 1),
        (7, 10_000, 0),
        (9, 0, 1),
        (9, 20_000, 0),
    ]


def test_every_stream_says_how_long_it_was_full(tmp_path: Path) -> None:
    """HTA keeps the last stream of a rank only (D14)."""
    events = [event("aten::op", "cpu_op", 0, 100)]
    for stream, begin in ((7, 10), (8, 50)):
        for number in range(3):
            correlation = stream * 10 + number
            events += [
                launch(correlation, number),
                kernel("k", begin + number, 1, correlation=correlation, stream=stream),
            ]
    found = full_queue(trace_of(tmp_path, events), max_queue_length=3)
    assert found.select("stream", "full_ns", "trace_ns").rows() == [
        (7, 8000, 100_000),
        (8, 48_000, 100_000),
    ]
    assert found["full_ratio"].to_list() == pytest.approx([0.08, 0.48])
    assert full_queue(trace_of(tmp_path, events))["full_ns"].to_list() == [0, 0]


def test_no_queue_of_a_real_trace_was_full_as_hta_says() -> None:
    for name in ("dlrm_v100_8ranks", "hta_diff_test_v100_r1of2"):
        said = reference(f"{name}/get_time_spent_blocked_on_full_queue.csv").read_text()
        assert len(said.splitlines()) == 1
        for trace in ranks_of(name).values():
            assert full_queue(trace)["full_ns"].to_list() == [0, 0, 0, 0]


def test_two_devices_of_a_process_have_queues_of_their_own(tmp_path: Path) -> None:
    events = [launch(1, 0), launch(2, 1)]
    events += [kernel("k", 5, 1, correlation=number + 1, device=number) for number in range(2)]
    found = queue_length_summary(trace_of(tmp_path, events))
    assert found.select("device", "max_length").rows() == [(0, 1), (1, 1)]


def test_a_trace_of_the_cpu_alone_has_no_queue(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [event("aten::relu", "cpu_op", 0, 1)])
    assert queue_length(trace).is_empty()
    assert queue_length_summary(trace).is_empty()
    assert full_queue(trace).is_empty()
