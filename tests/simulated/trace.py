"""GPU events for a profile of CPU operators, in Kineto's form: what a simulated GPU did.

Each operator that calls no other becomes a launch and a kernel: the launch takes the first
`LAUNCH_US` of it (or most of a shorter one), the kernel the rest. Copies and waits that
`benchmarks.gpu.device` marks become theirs. Forms and names are those of an H100's trace
(TraceLens, torch 2.7).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

COPY = "simulated::copy pageable"
COPY_PINNED = "simulated::copy pinned"
WAIT = "simulated::wait"
GRAPH_LAUNCH = "simulated::graph"
LAUNCH_US = 5.0
SHORT_LAUNCH_SHARE = 0.7  # of an operator that is shorter than twice that
PROPERTIES = {
    "id": 0, "name": "NVIDIA Stub", "totalGlobalMem": 80 << 30, "computeMajor": 9,
    "computeMinor": 0, "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,
    "regsPerBlock": 65536, "warpSize": 32, "sharedMemPerBlock": 49152, "numSms": 132,
    "regsPerMultiprocessor": 65536, "sharedMemPerBlockOptin": 232448,
    "sharedMemPerMultiprocessor": 233472,
}  # fmt: skip
_MARKS = (COPY, COPY_PINNED, WAIT)
_NO_KERNEL = ("aten::view", "aten::t", "aten::transpose", "aten::as_strided", "aten::empty",
              "aten::detach", "aten::reshape", "aten::expand", "aten::unsqueeze", "aten::permute",
              "aten::_local_scalar_dense", "aten::item", "aten::result_type", "aten::alias",
              "aten::squeeze", "aten::select", "aten::slice", "aten::split", "aten::empty_like",
              "aten::empty_strided", "aten::resolve_conj", "aten::resolve_neg", "detach",
              "aten::_unsafe_view", "aten::unbind", "aten::stride")  # fmt: skip
_MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")

Event = dict[str, Any]


def install(torch: Any) -> None:
    """Lets every Chrome trace that torch.profiler writes in this process have them."""
    kineto = torch.profiler.profiler._KinetoProfile
    plain = kineto.export_chrome_trace

    @functools.wraps(plain)
    def export(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        outcome = plain(self, path, *args, **kwargs)
        if not str(path).endswith(".gz"):
            precision = torch.get_float32_matmul_precision()
            rewrite(str(path), tensor_cores=precision != "highest")
        return outcome

    kineto.export_chrome_trace = export
    begin = torch.autograd.profiler.profile.__init__

    @functools.wraps(begin)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("use_cuda", None)
        begin(self, *args, **{**kwargs, "use_device": None})  # there is no CUPTI to ask

    torch.autograd.profiler.profile.__init__ = initialise


def rewrite(path: str, *, tensor_cores: bool) -> None:
    """Adds the events of the GPU to a trace."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        content = json.load(file)
    events = content["traceEvents"]
    content["deviceProperties"] = [PROPERTIES]
    events += list(gpu_events(events, tensor_cores=tensor_cores))
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(content, file)


def gpu_events(events: Iterable[Event], *, tensor_cores: bool) -> Iterator[Event]:
    """What a GPU would have done for the operators of a trace."""
    whole = [e for e in events if e.get("ph") == "X" and "dur" in e]
    marks = [e for e in whole if e["name"] in _MARKS or e["name"] == GRAPH_LAUNCH]
    operators = [e for e in whole if e.get("cat") == "cpu_op"]
    graphs = [e for e in marks if e["name"] == GRAPH_LAUNCH]
    kernels: list[Event] = []
    for number, work in enumerate(_work(operators, marks), start=1):
        graph = next((at for at, g in enumerate(graphs) if _contains(g, work)), None)
        for event in _happening(work, number, tensor_cores=tensor_cores):
            if graph is not None:
                if event["cat"] != "kernel":
                    continue
                event["args"]["correlation"] = -1 - graph
            if event["cat"] == "kernel":
                kernels.append(event)
            yield event
    for at, graph_mark in enumerate(graphs):
        head = {name: graph_mark[name] for name in ("ph", "pid", "tid", "ts")}
        yield {**head, "cat": "cuda_runtime", "name": "cudaGraphLaunch", "dur": LAUNCH_US,
               "args": {"cbid": 311, "correlation": -1 - at}}  # fmt: skip
    for span in (e for e in whole if e.get("cat") == "user_annotation"):
        if span["name"] not in (*_MARKS, GRAPH_LAUNCH):
            yield from _on_gpu(span, kernels)


def _work(operators: list[Event], marks: list[Event]) -> Iterator[Event]:
    """Operators that call no others, matrix products with all that they call, and marks."""
    computing = [e for e in operators if e["name"] not in _NO_KERNEL]
    shown = sorted((*computing, *(m for m in marks if m["name"] != GRAPH_LAUNCH)),
                   key=lambda e: (e["tid"], e["ts"], -e["dur"]))  # fmt: skip
    inside_until: dict[object, float] = {}
    for event, following in zip(shown, [*shown[1:], None], strict=True):
        end = event["ts"] + event["dur"]
        if event["ts"] < inside_until.get(event["tid"], 0.0):
            continue  # part of a copy, a wait or a product
        if event["name"] in (*_MARKS, *_MATRIX):
            inside_until[event["tid"]] = end
            yield event
            continue
        calls = following is not None and following["tid"] == event["tid"] and following["ts"] < end
        if not calls:
            yield event


def _contains(outer: Event, inner: Event) -> bool:
    return bool(outer["ts"] <= inner["ts"] < outer["ts"] + outer["dur"])


def _happening(work: Event, number: int, *, tensor_cores: bool) -> Iterator[Event]:
    """A call on the host and what it starts on the device."""
    start, length, name = float(work["ts"]), float(work["dur"]), work["name"]
    head = {"ph": "X", "pid": work["pid"], "tid": work["tid"], "ts": start}
    about = {"External id": work.get("args", {}).get("External id", number), "correlation": number}
    if name == WAIT:
        call = {**head, "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "dur": length}
        yield {**call, "args": {"cbid": 131, **about}}
        return
    launch = min(LAUNCH_US, length * SHORT_LAUNCH_SHARE)
    place = {"device": 0, "context": 1, "stream": 7, **about}
    beside = {"ph": "X", "pid": 0, "tid": 7, "ts": start + launch, "dur": max(length - launch, 0.1)}
    if name in (COPY, COPY_PINNED):
        size = int(work.get("args", {}).get("bytes", 0)) or 1 << 20
        yield {**head, "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "dur": length,
               "args": {"cbid": 41, **about}}  # fmt: skip
        words = "Pageable" if name == COPY else "Pinned"
        yield {**beside, "cat": "gpu_memcpy", "name": f"Memcpy HtoD ({words} -> Device)",
               "args": {**place, "bytes": size, "memory bandwidth (GB/s)": 10.0}}  # fmt: skip
    else:
        yield {**head, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": launch,
               "args": {"cbid": 211, **about}}  # fmt: skip
        shape = {"registers per thread": 16, "shared memory": 0, "blocks per SM": 0.1,
                 "warps per SM": 0.4, "grid": [13, 1, 1], "block": [128, 1, 1],
                 "est. achieved occupancy %": 1 if length < 50 else 80}  # fmt: skip
        yield {**beside, "cat": "kernel", "name": _kernel_name(name, tensor_cores=tensor_cores),
               "args": {"queued": 0, **place, **shape}}  # fmt: skip
    arrow = {"cat": "ac2g", "name": "ac2g", "id": number}
    yield {**arrow, "ph": "s", "pid": work["pid"], "tid": work["tid"], "ts": start}
    yield {**arrow, "ph": "f", "pid": 0, "tid": 7, "ts": beside["ts"], "bp": "e"}


def _on_gpu(span: Event, kernels: list[Event]) -> Iterator[Event]:
    """The span of the kernels that were launched inside an annotation."""
    end = span["ts"] + span["dur"]
    inside = [k for k in kernels if span["ts"] <= k["ts"] < end]
    if inside:
        first = min(k["ts"] for k in inside)
        last = max(k["ts"] + k["dur"] for k in inside)
        yield {"ph": "X", "cat": "gpu_user_annotation", "name": span["name"], "pid": 0, "tid": 7,
               "ts": first, "dur": last - first, "args": dict(span.get("args", {}))}  # fmt: skip


def _kernel_name(operator: str, *, tensor_cores: bool) -> str:
    if operator not in _MATRIX:
        return f"void at::native::vectorized_elementwise_kernel<4, {operator}>(int)"
    if tensor_cores:
        return "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_execute_kernel__5x_cublas"
    return "ampere_sgemm_128x64_tn"
