"""Traces of a job with a known story: what each rank's GPU and host do in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from haiprof.run_format.layout import RunPaths
from haiprof.run_format.stack_lines import RECURRENCE
from tests.unit.analysis.trace.shared import Event, event, kernel, launch, step, write_trace
from tests.unit.diagnosis.tables import job

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
ALL_TO_ALL = "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)"
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nt"
COPY = "Memcpy HtoD (Pinned -> Device)"


@dataclass(frozen=True, kw_only=True)
class Story:
    """Times in us of one rank."""

    gemm: float = 400.0
    relu: float = 60.0
    copy: float = 300.0
    transfer: float = 500.0
    host: float = 30.0
    """Python alone before the step's first launch."""
    gemm_count: int = 8
    copy_name: str = COPY
    gemm_name: str = GEMM
    sync: bool = False
    """A `.item()` at the end of each step, after which the host works a while."""


def write_ranks(
    folder: Path,
    story: Callable[[int], Story],
    *,
    ranks: int = 8,
    steps: int = 3,
    seed: int = 1,
    noise: float = 0.01,
    collective: str = ALL_TO_ALL,
    host: str | None = "node0",
) -> Path:
    """One file per rank; every duration is shaken by a percent."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    stories = [story(rank) for rank in range(ranks)]
    events: list[list[Event]] = [[] for _ in stories]
    now = np.zeros(ranks)

    def shaken(us: float) -> float:
        return round(us * (1 + noise * float(random.standard_normal())), 3)

    for number in range(steps):
        begun = now.copy()
        for rank, each in enumerate(stories):
            now[rank] = _compute(events[rank], each, float(now[rank]), shaken)
        last = float(now.max())
        for rank, each in enumerate(stories):
            end = last + (shaken(each.transfer) if ranks > 1 else 0)
            if ranks > 1:
                start = float(now[rank])
                events[rank].append(_collective(collective, start, end - start, number, ranks))
            end = _finish(events[rank], each, end)
            now[rank] = end
        if ranks > 1:
            now[:] = now.max()
        for rank in range(ranks):
            length = float(now[rank] - begun[rank])
            events[rank] += [
                step(number, float(begun[rank]), length),
                event("train.py(10): step", "python_function", float(begun[rank]), length),
            ]
    for rank, found in enumerate(events):
        metadata = {
            "distributedInfo": {"rank": rank, "world_size": ranks},
            "haiprof": {"host": host} if host else {},
            "deviceProperties": [{"id": 0, "name": "A100", "computeMajor": 8, "computeMinor": 0}],
        }
        write_trace(folder / f"rank{rank}.json", found, metadata)
    return folder


def _compute(found: list[Event], each: Story, at: float, shaken: Callable[[float], float]) -> float:
    ids = len(found) * 10 + 1
    at += shaken(each.host)
    found += [
        event("aten::to", "cpu_op", at, 8), launch(ids, at, 8, name="cudaMemcpyAsync"),
    ]  # fmt: skip
    at += 8
    length = shaken(each.copy)
    found.append(kernel(each.copy_name, at, length, category="gpu_memcpy", correlation=ids,
                        bytes=3_000_000, stream=7))  # fmt: skip
    gpu, host = at + length, at
    for place in range(each.gemm_count):
        for offset, (name, us) in enumerate(((each.gemm_name, each.gemm), ("relu", each.relu))):
            number = ids + 1 + 2 * place + offset
            found.append(launch(number, host, 5))
            begin = max(gpu, host + 5)
            length = shaken(us)
            found.append(kernel(name, round(begin, 3), length, correlation=number,
                                **{"est. achieved occupancy %": 50}))  # fmt: skip
            host, gpu = host + 6, begin + length
    return round(gpu, 3)


def _collective(name: str, start: float, length: float, number: int, ranks: int) -> Event:
    kind = "all_to_all" if name == ALL_TO_ALL else "allreduce"
    return kernel(
        name, round(start, 3), round(length, 3), stream=20,
        **{"Collective name": kind, "dtype": "BFloat16", "In msg nelems": 4_000_000,
           "Out msg nelems": 4_000_000, "Group size": ranks, "Process Group Name": "0",
           "Seq": number, "Process Group Ranks": str(list(range(ranks)))},
    )  # fmt: skip


def _finish(found: list[Event], each: Story, end: float) -> float:
    """The host waits for the GPU; with `sync` it then works before the next step."""
    end = round(end, 3)
    if not each.sync:
        return end
    found += [
        event("aten::item", "cpu_op", end - 20, 30),
        event("aten::_local_scalar_dense", "cpu_op", end - 19, 28),
        launch(9_000_000 + len(found), end - 18, 25, name="cudaStreamSynchronize"),
    ]
    return end + 1500


BLOCK = job(5, "Net.forward", "net.py")
LOOP = (*job(9, "Net.forward", "net.py"), "row * self.scale", 0, 8, RECURRENCE)
ENGINE_NODE = "autograd::engine::evaluate_function: "


def window(
    loops: int = 100, *, small_us: float = 3.0, large_us: float = 8000.0, steps: int = 2
) -> tuple[list[Event], dict[str, Any]]:
    """Steps whose forward calls one large operator, then a loop of small ones; then backward.

    Backward takes 8 ms of the large one, and 10 us of each small one.
    """
    events: list[Event] = []
    at: list[list[int]] = []
    now, number = 0.0, 10
    for each in range(steps):
        begun, first = now, number
        at += [[number, 0], [number + 1, 1]]
        lengths = [large_us] + [small_us] * loops
        for length in lengths:
            events.append(event("aten::mul", "cpu_op", now, length, **ids(number, 0)))
            now, number = now + length + 1, number + 1
        for back in reversed(range(first, number)):
            inner = 8000.0 if back == first else 6.0
            name = "MulBackward0"
            events += [
                event(ENGINE_NODE + name, "cpu_op", now, inner + 4, **ids(back, 1)),
                event(name, "cpu_op", now + 1, inner + 2, **ids(back, 1)),
                event("aten::mul", "cpu_op", now + 2, inner),
            ]
            now += inner + 5
        name = "torch::autograd::AccumulateGrad"
        events.append(event(ENGINE_NODE + name, "cpu_op", now, 4.0))
        now += 5
        events.append(step(each, begun, now - begun))
        now += 1
    places = [list(BLOCK), list(LOOP[:3])]
    return events, {"haiprof": {"lines": {"places": places, "at": at}}}


def ids(number: int, forward: int) -> dict[str, int]:
    return {"Sequence number": number, "Fwd thread id": forward}


def write_window(run: RunPaths, events: list[Event], metadata: Mapping[str, Any]) -> None:
    """The window of a run's only rank."""
    run.traces.mkdir()
    path = run.traces / "rank0_node0_7.1700000000000000000.pt.trace.json"
    write_trace(path, events, {**metadata, "distributedInfo": {"rank": 0, "world_size": 1}})
