"""Kernels of CUDA graphs belong to the operators that were captured. No real trace has both."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.trace_analysis.attribution import kernel_operators, operator_kernels
from haiprof.trace_analysis.python_code import module_times
from tests.unit.analysis.trace.shared import Event, event, kernel, launch, trace_of

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


@pytest.mark.parametrize(
    "events",
    [
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
    ],
)
def test_what_is_not_known_names_nobody(tmp_path: Path, events: list[Event]) -> None:
    assert owners(tmp_path, events) == 3 * [(None, None, None)]


def test_streams_of_a_graph_are_put_together_by_the_numbers_of_nodes(tmp_path: Path) -> None:
    """The set runs beside on a stream of its own; in time it is last."""
    nodes = launched(10, 100, [5, 7, 6], streams=(7, 7, 9))
    nodes[2], nodes[3] = ({**nodes[2], "cat": "kernel"}, {**nodes[3], "cat": "gpu_memset"})
    found = owners(tmp_path, [*captured(1, 0, "Net_0"), *nodes])
    assert [row[0] for row in found] == ["aten::mm", "aten::add", "aten::zero_"]
