"""Which call led to which kernel: launches, queues, links without correlations, captures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.attribution import kernel_operators, operator_kernels
from haiprof.trace_analysis.launches import (
    full_queue,
    launch_statistics,
    launch_summary,
    queue_length,
    queue_length_summary,
)
from haiprof.trace_analysis.operator_efficiency import operator_efficiency
from haiprof.trace_analysis.python_code import module_times
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.sampling import examples
from tests.unit.analysis.trace import treacherous as made
from tests.unit.analysis.trace.shared import (
    Event,
    event,
    kernel,
    launch,
    ranks_of,
    reference,
    step,
    trace_of,
)


def test_amd_launches_are_counted_where_hta_finds_none() -> None:
    assert len(reference("tl_mi300_ddp_resnet18/get_cuda_kernel_launch_stats.rank0.csv")
               .read_text().splitlines()) == 1  # D16  # fmt: skip
    found = launch_summary(ranks_of("tl_mi300_ddp_resnet18")[0])
    assert dict(found.select("call", "launch_count").rows()) == {
        "hipExtModuleLaunchKernel": 1510, "hipLaunchKernel": 850, "hipMemsetAsync": 10,
        "hipMemcpyWithStream": 5,
    }  # fmt: skip


def test_a_graph_launch_is_one_launch_of_many_kernels() -> None:
    found = launch_summary(ranks_of("hta_diff_test_v100_r1of2")[1])
    graph = found.filter(pl.col("call") == "cudaGraphLaunch").row(0, named=True)
    assert (graph["launch_count"], graph["kernel_count"]) == (12, 5046)
    alone = found.filter(pl.col("call").is_null()).row(0, named=True)
    assert (alone["kernel_count"], alone["launch_count"]) == (614, None)
    assert found["kernel_count"].sum() == 15632


def test_one_launch_by_hand(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
            launch(1, 0, 4),
            kernel("quick", 10.5, 2, correlation=1),
            launch(2, 20, 60.001, name="cuLaunchKernelEx"),
            kernel("early", 30, 100, correlation=2),
            launch(3, 100, 1, name="cudaGraphLaunch"),
            kernel("node", 300, 5, correlation=3),
            kernel("node", 310, 5, correlation=3, stream=9),
            launch(4, 400, 1, name="cudaMemcpyAsync"),
            kernel("Memcpy HtoD", 402, 5, correlation=4, category="gpu_memcpy"),
    ])  # fmt: skip
    found = launch_statistics(trace)
    part = found.select(
        "correlation", "call", "kernel", "kernel_count", "cpu_duration_ns", "gpu_duration_ns",
        "launch_delay_ns", "is_short", "is_runtime_outlier", "is_launch_delay_outlier",
    )  # fmt: skip
    assert part.rows() == [
        (1, "cudaLaunchKernel", "quick", 1, 4000, 2000, 6500, True, False, False),
        (2, "cuLaunchKernelEx", "early", 1, 60001, 100_000, 0, False, True, False),
        (3, "cudaGraphLaunch", "node", 2, 1000, 10_000, 199_000, False, False, True),
        (4, "cudaMemcpyAsync", "Memcpy HtoD", 1, 1000, 5000, 1000, False, False, False),
    ]
    assert len(launch_statistics(trace, include_memory_events=False)) == 3
    late = launch_statistics(trace, runtime_cutoff_ns=60_001, launch_delay_cutoff_ns=199_000)
    assert not late["is_runtime_outlier"].any()
    assert not late["is_launch_delay_outlier"].any()


def test_of_two_calls_with_one_correlation_the_outermost_counts(tmp_path: Path) -> None:
    inner = event("cuLaunchKernel", "cuda_driver", 2, 3, correlation=1)
    trace = trace_of(tmp_path, [inner, launch(1, 1, 9), kernel("a", 20, 1, correlation=1)])
    assert launch_statistics(trace).select("call", "launch_delay_ns").rows() == [
        ("cudaLaunchKernel", 10_000)
    ]


def test_steps_and_correlations_of_zero(tmp_path: Path) -> None:
    events = [
        step(1, 0, 50), step(2, 50, 50), launch(1, 10), kernel("a", 60, 1, correlation=1),
        launch(2, 70), kernel("b", 80, 1, correlation=2), launch(0, 5, name="cudaEventQuery"),
        kernel("c", 90, 1, correlation=0),
    ]  # fmt: skip
    trace = trace_of(tmp_path, events)
    assert launch_statistics(trace)["correlation"].to_list() == [1, 2]
    assert launch_statistics(trace, steps=(1, 2))["correlation"].to_list() == [1]
    assert launch_summary(trace)["call"].to_list() == ["cudaLaunchKernel", None]


def test_gpu_events_without_any_launch_say_what_to_record(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [kernel("a", 0, 1, correlation=1)])
    with pytest.raises(MissingDataError, match="1 GPU events and no call"):
        launch_statistics(trace)


@pytest.mark.parametrize("category", ["xpu_runtime", "xpu_driver", "privateuse1_driver"])
def test_calls_of_other_devices_are_launches(category: str, tmp_path: Path) -> None:
    events = [
        event("urEnqueueKernelLaunch", category, 0, 5, correlation=1),
        kernel("gemm", 10, 5, correlation=1),
    ]
    (call,) = launch_statistics(trace_of(tmp_path, events))["call"]
    assert call == "urEnqueueKernelLaunch"


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
    trace = trace_of(tmp_path, [
            launch(1, 0, name="cudaGraphLaunch"),
            *(kernel("node", 10 + at, 1, correlation=1) for at in range(5)),
            kernel("node", 20, 1, correlation=1, stream=9),
    ])  # fmt: skip
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


def test_two_devices_of_a_process_have_queues_of_their_own(tmp_path: Path) -> None:
    events = [launch(1, 0), launch(2, 1)]
    events += [kernel("k", 5, 1, correlation=number + 1, device=number) for number in range(2)]
    found = queue_length_summary(trace_of(tmp_path, events))
    assert found.select("device", "max_length").rows() == [(0, 1), (1, 1)]


EXTERNAL = "External id"


@pytest.mark.parametrize("numbered", [made.external_ids, made.ids_of_calls, made.arrows])
def test_each_number_names_the_operator_that_the_correlation_names(
    numbered: Callable[[], list[Event]], tmp_path: Path
) -> None:
    right, found = (
        kernel_operators(trace_of(tmp_path, events())).select("ts_ns", "operator_event", "call")
        for events in (made.sound, numbered)
    )
    assert found.rows() == right.rows()
    assert found["operator_event"].null_count() == 0


def test_numbers_of_calls_name_no_operator_where_the_call_is_in_none(tmp_path: Path) -> None:
    """The call of the last kernel stands outside of operators; its number is that of another."""
    events: list[Event] = []
    for at in range(4):
        events += [
            event("aten::mm", "cpu_op", 20 * at, 10, **{EXTERNAL: at + 1}),
            event("cudaLaunchKernel", "cuda_runtime", 20 * at + (12 if at == 3 else 1), 2,
                  **{EXTERNAL: at + 101 if at < 3 else 2}),
            event("gemm", "kernel", 100 + 20 * at, 15, pid=0, tid=7,
                  **{EXTERNAL: at + 101 if at < 3 else 2}),
        ]  # fmt: skip
    found = kernel_operators(trace_of(tmp_path, events))
    assert found["operator"].to_list() == ["aten::mm"] * 3 + [None]


def test_numbers_that_contradict_time_join_nothing(tmp_path: Path) -> None:
    events = [
        event("cudaLaunchKernel", "cuda_runtime", 100 + at, 1, **{EXTERNAL: at}) for at in range(4)
    ] + [event("gemm", "kernel", 10 * at, 5, pid=0, tid=7, **{EXTERNAL: at}) for at in range(4)]
    trace = trace_of(tmp_path, events)
    (found,) = (each for each in trace.checked.findings if each.check == "no_launch_known")
    assert found.is_fault
    assert trace.gpu["correlation"].null_count() == 4


def test_the_first_operator_is_in_the_window_of_a_trace_without_steps(tmp_path: Path) -> None:
    types = {"Input type": ["Float", "c10::BFloat16"], "Input Dims": [[64, 64], [64, 64]]}
    events = [
        event("aten::mm", "cpu_op", 0, 10, **types),
        launch(1, 2), kernel("gemm", 20, 10, correlation=1),
    ]  # fmt: skip
    found = operator_efficiency(trace_of(tmp_path, events))
    assert found.select("count", "flops", "time_ns", "precision").rows() == [
        (1, 2 * 64**3, 10_000, "fp32")
    ]


def test_a_call_without_a_kernel_has_no_time_and_no_rate(tmp_path: Path) -> None:
    types = {"Input type": ["float", "float"], "Input Dims": [[64, 64], [64, 64]]}
    events = [
        event("aten::mm", "cpu_op", 0, 10, **types),
        launch(1, 2), kernel("gemm", 20, 10, correlation=1),
        event("aten::mm", "cpu_op", 40, 10, **types),
        event("aten::addmm", "cpu_op", 60, 10, **{
            "Input type": ["float"] * 3, "Input Dims": [[64], [64, 64], [64, 64]],
        }),
    ]  # fmt: skip
    found = operator_efficiency(trace_of(tmp_path, events))
    assert found.select("operator", "count", "time_ns").rows() == [
        ("aten::mm", 1, 10_000), ("aten::addmm", 1, None), ("aten::mm", 1, None),
    ]  # fmt: skip
    assert found["flops_per_s"].to_list() == [pytest.approx(2 * 64**3 / 10e-6), None, None]


def test_a_stored_trace_is_linked_like_a_new_one(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, made.external_ids())
    first = kernel_operators(trace)
    assert kernel_operators(Trace(trace.path)).equals(first)
    assert Trace(trace.path).runtime["correlation"].null_count() == 1  # the wait launches nothing
    assert len(trace.gpu.filter(pl.col("correlation") > 0)) == made.COUNT


def test_a_few_correlations_that_meet_by_chance_do_not_count(tmp_path: Path) -> None:
    """One kernel of forty has a correlation that a call has, too; External ids join all."""
    events = made.external_ids()
    events[1]["args"]["correlation"] = 77
    events[5]["args"]["correlation"] = 77
    found = kernel_operators(trace_of(tmp_path, events))
    right = kernel_operators(trace_of(tmp_path, made.sound()))
    assert found["operator_event"].to_list() == right["operator_event"].to_list()


NODE = "graph node id"


def captured(first: int, begin: float, module: str, *, memset: bool = True) -> list[Event]:
    """A module whose three calls become nodes: nothing of them runs yet."""
    names = ("cudaLaunchKernel", "cudaMemsetAsync" if memset else "cuLaunchKernel")
    return [
        event(f"nn.Module: {module}", "python_function", begin, 60),
        event("cudaStreamBeginCapture", "cuda_runtime", begin + 1, 1),
        event("aten::mm", "cpu_op", begin + 5, 10),
        launch(first, begin + 6, name=names[0]),
        event("aten::zero_", "cpu_op", begin + 20, 10),
        launch(first + 1, begin + 21, name=names[1]),
        event("aten::add", "cpu_op", begin + 40, 10),
        launch(first + 2, begin + 41, name=names[0]),
        event("cudaStreamEndCapture", "cuda_runtime", begin + 55, 1),
    ]


def launched(
    correlation: int, begin: float, nodes: list[int], *, streams: tuple[int, ...] = (7, 7, 7)
) -> list[Event]:
    """One launch of a graph: a product, a set, a sum."""
    categories = ("kernel", "gpu_memset", "kernel")
    return [
        launch(correlation, begin, name="cudaGraphLaunch"),
        *(
            kernel(f"k{at}", begin + 10 * (1 + at), 5, correlation=correlation, stream=stream,
                   category=category, **{NODE: node})
            for at, (node, stream, category) in enumerate(
                zip(nodes, streams, categories, strict=True)
            )
        ),
    ]  # fmt: skip


def owners(tmp_path: Path, events: list[Event]) -> list[tuple[str | None, ...]]:
    found = kernel_operators(trace_of(tmp_path, events))
    return found.select("operator", "module", "matched_by").rows()


WHOLE = [("aten::mm", "Net_0", "capture"), ("aten::zero_", "Net_0", "capture"),
         ("aten::add", "Net_0", "capture")]  # fmt: skip


def test_each_launch_of_a_graph_names_what_was_captured(tmp_path: Path) -> None:
    events = [*captured(1, 0, "Net_0"), *launched(10, 100, [5, 6, 7]),
              *launched(11, 200, [5, 6, 7])]  # fmt: skip
    assert owners(tmp_path, events) == 2 * WHOLE
    trace = trace_of(tmp_path, events)
    rows = operator_kernels(trace).select("operator", "call_count", "kernel_count").rows()
    assert set(rows) == {("aten::mm", 1, 2), ("aten::zero_", 1, 2), ("aten::add", 1, 2)}
    module = module_times(trace).row(0, named=True)
    assert (module["kernel_count"], module["graph_kernel_count"]) == (6, 0)


def test_a_window_that_ends_within_a_launch_still_knows_its_nodes(tmp_path: Path) -> None:
    cut = launched(11, 200, [5, 6, 7])[:-2]
    events = [*captured(1, 0, "Net_0"), *launched(10, 100, [5, 6, 7]), *cut]
    assert owners(tmp_path, events) == [*WHOLE, WHOLE[0]]


def test_two_graphs_alike_are_those_captured_in_that_order(tmp_path: Path) -> None:
    events = [*captured(1, 0, "Net_0"), *captured(4, 300, "Other_0"),
              *launched(10, 500, [15, 16, 17]), *launched(11, 600, [5, 6, 7])]  # fmt: skip
    assert [row[1] for row in owners(tmp_path, events)] == 3 * ["Other_0"] + 3 * ["Net_0"]


@pytest.mark.parametrize("events", [
    pytest.param(launched(10, 100, [5, 6, 7]), id="no_capture"),
    pytest.param(
        [*captured(1, 0, "Net_0", memset=False), *launched(10, 100, [5, 6, 7])],
        id="other_nodes",
    ),
    pytest.param(
        [*captured(1, 0, "Net_0"), *captured(4, 300, "Net_0"), *launched(10, 500, [5, 6, 7])],
        id="which_of_two",
    ),
    pytest.param([*captured(1, 0, "Net_0"), *launched(10, 100, [7, 6, 5])], id="not_in_order"),
    pytest.param(
        [*captured(1, 0, "Net_0")[:-1], *launched(10, 100, [5, 6, 7])], id="capture_cut_off"
    ),
])  # fmt: skip
def test_what_is_not_known_names_nobody(tmp_path: Path, events: list[Event]) -> None:
    assert owners(tmp_path, events) == 3 * [(None, None, None)]


def test_streams_of_a_graph_are_put_together_by_the_numbers_of_nodes(tmp_path: Path) -> None:
    """The set runs beside on a stream of its own; in time it is last."""
    nodes = launched(10, 100, [5, 7, 6], streams=(7, 7, 9))
    nodes[2], nodes[3] = ({**nodes[2], "cat": "kernel"}, {**nodes[3], "cat": "gpu_memset"})
    found = owners(tmp_path, [*captured(1, 0, "Net_0"), *nodes])
    assert [row[0] for row in found] == ["aten::mm", "aten::add", "aten::zero_"]
