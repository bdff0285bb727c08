"""Whatever a trace holds, its replay lasts as long as it did, and faster things never slow it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haiprof import TraceAnalysis
from haiprof.trace_analysis.what_if.replay_parts import (
    faster_kernel,
    faster_network,
    faster_operator,
)
from tests.sampling import examples
from tests.unit.analysis.trace.shared import Event, event, kernel, launch, rank_file, step

TIMES = st.integers(0, 30)
SHORT = st.integers(0, 6)


@st.composite
def ranks(draw: st.DrawFn) -> list[Event]:
    """Launches, kernels, waits and backward spans at few different times, many of them at once."""
    events = [step(1, 0, 40)]
    free = dict.fromkeys((7, 20), 0)
    for number in range(draw(st.integers(0, 8))):
        at, stream = draw(TIMES), draw(st.sampled_from([7, 20]))
        begin = max(free[stream], at + draw(SHORT))
        free[stream] = begin + draw(SHORT)
        said: dict[str, Any] = {"correlation": number + 1, "stream": stream}
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if stream == 20 else "gemm"
        events.append(launch(number + 1, at, draw(SHORT), tid=draw(st.sampled_from([1, 2, 3]))))
        events.append(kernel(name, begin, free[stream] - begin, **said))
    names = ["cudaDeviceSynchronize", "cudaStreamWaitEvent", "cudaEventQuery"]
    for number in range(draw(st.integers(0, 4))):
        tid, name = draw(st.sampled_from([1, 2])), draw(st.sampled_from(names))
        events.append(launch(100 + number, draw(TIMES), draw(SHORT), name=name, tid=tid))
    spans = ["autograd::engine::evaluate_function: MulBackward0", "aten::add"]
    for _ in range(draw(st.integers(0, 6))):
        tid, name = draw(st.sampled_from([1, 2])), draw(st.sampled_from(spans))
        events.append(event(name, "cpu_op", draw(TIMES), draw(SHORT), tid=tid))
    return [*events, event("aten::mul", "cpu_op", 35, 2)]


@given(st.lists(ranks(), min_size=1, max_size=3))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_replay_lasts_as_long_and_nothing_faster_slows_it(found: list[list[Event]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, events in enumerate(found):
            rank_file(Path(folder), rank, events, len(found))
        changes = [faster_kernel("gemm", 2), faster_operator("aten"), faster_network(3)]
        rows = TraceAnalysis(folder).what_if(*changes)
    assert rows["error_ratio"].to_list() == [0.0] * 3
    assert (rows["predicted_step_ns"] <= rows["reproduced_step_ns"]).all()
    assert (rows["unexplained_ratio"] >= -1e-9).all()
