"""NCCL's files as its sources write them: the Inspector's two forms, the example plugin's trace.

Sources: NVIDIA/nccl, plugins/profiler/inspector/inspector_json.cc and inspector_prom.cc (labels of
2.29 and 2.30), plugins/profiler/example/print_event.cc (2.28 and 2.30).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COMMUNICATOR = "0x7f8c496ae9f661"
DUMPED_US = 1_752_867_229_276_385
MIB = 1 << 20


def header(rank: int, size: int, **changes: object) -> dict[str, object]:
    return {"id": COMMUNICATOR, "comm_name": "DP Group 0", "rank": rank, "n_ranks": size,
            "nnodes": 1, **changes}  # fmt: skip


def metadata(rank: int, version: str = "v4.0", **changes: object) -> dict[str, object]:
    return {"inspector_output_format_version": version, "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface", "dump_timestamp_us": DUMPED_US,
            "hostname": "node0", "pid": 100 + rank, **changes}  # fmt: skip


def collective(
    number: int, *, size: int = 25 * MIB, gbs: float = 200.0, kind: str = "AllReduce",
    timing: str = "kernel_gpu", exec_us: int = 400,
) -> dict[str, object]:  # fmt: skip
    return {"coll": kind, "coll_sn": number, "coll_msg_size_bytes": size,
            "coll_exec_time_us": exec_us, "coll_timing_source": timing,
            "coll_algobw_gbs": gbs / 1.75, "coll_busbw_gbs": gbs}  # fmt: skip


def p2p(peer: int) -> dict[str, object]:
    return {"p2p": "Send", "p2p_sn": 9, "p2p_peer": peer, "p2p_msg_size_bytes": MIB,
            "p2p_exec_time_us": 40, "p2p_timing_source": "kernel_gpu", "p2p_algobw_gbs": 26.2,
            "p2p_busbw_gbs": 26.2}  # fmt: skip


def inspector(
    rank: int, payloads: Sequence[Mapping[str, object]], *, size: int = 4, version: str = "v4.0",
    changes: Mapping[str, object] | None = None,
) -> str:  # fmt: skip
    """One process: each line with its context until v4.2, one line before them all from v4.3."""
    context = {"header": header(rank, size), "metadata": metadata(rank, version, **(changes or {}))}
    lines: list[Mapping[str, object]] = []
    if version >= "v4.1":
        counts = {f"{kind}_records": sum(f"{kind}_perf" in one or f"{kind}_trace" in one
                                         for one in payloads)
                  for kind in ("coll", "p2p", "proxy")}  # fmt: skip
        stats = {**counts, "coll_dropped_total": 0, "proxy_output_mode": "nested"}
        lines.append({**context, "dump_stats": stats})
    lines += [one if version >= "v4.3" else {**context, **one} for one in payloads]
    return "".join(json.dumps(line) + "\n" for line in lines)


def inspector_of(rank: int, last: int, **how: Any) -> str:
    """AllReduce after AllReduce, up to a number."""
    gbs = how.pop("gbs", 200.0)
    numbers = range(max(last - 9, 0), last + 1)
    return inspector(rank, [{"coll_perf": collective(n, gbs=gbs)} for n in numbers], **how)


SEND_STEP = {"proxy_step_sn": 1, "step": 0, "trans_size_bytes": MIB, "total_us": 40,
             "gpu_produce_us": 10, "peer_credit_us": 5, "wire_us": 20}  # fmt: skip
RECEIVE_STEP = {"proxy_step_sn": 2, "step": 0, "trans_size_bytes": MIB, "total_us": 70,
                "wire_us": 60, "flush_us": 1, "gpu_consume_us": 4}  # fmt: skip


def proxy(direction: str, steps: Sequence[Mapping[str, object]], **more: object) -> dict[str, Any]:
    return {"proxy_trace": {
        "record_type": "proxy_op", "record_sn": 42, "parent_type": "coll", "parent_sn": 7,
        "proxy_op_sn": 12, "rank": 0, "channel_id": 0, "peer": 3, "direction": direction,
        "timing_source": "proxy_cpu", "is_final": True, "total_us": 70, "steps": [*steps], **more,
    }}  # fmt: skip


def prometheus(gbs: float, *, kind: str = "AllReduce", message: str = "25-26MB") -> str:
    """As NCCL 2.30 writes it: one GPU, means since the last time."""
    labels = (
        'version="v5.1",slurm_job_id="unknown",node="node0",gpu="GPU0",comm_name="DP Group 0",'
        f'n_nodes="1",nranks="4",collective="{kind}",message_size="{message}",algo_proto="Ring_ll"'
    )
    return (
        f"nccl_bus_bandwidth_gbs{{{labels}}} {gbs:.6g}\n"
        f"nccl_collective_exec_time_microseconds{{{labels}}} 9498.47\n"
    )


def prometheus_2_29(rank: int, number: int, gbs: float) -> str:
    """As NCCL 2.29 writes it: the last collective of each communicator."""
    labels = (
        f'comm_id="{COMMUNICATOR}",hostname="node0",rank="{rank}",slurm_job="unknown",'
        'slurm_job_id="unknown",nranks="4",n_nodes="1",gpu_device_id="GPU0",collective="AllReduce",'
        f'coll_sn="{number}",timestamp="2026-03-26T10:00:00Z",message_size="25.00MB"'
    )
    return (
        f"nccl_algorithm_bandwidth_gbs{{{labels}}} {gbs / 1.75:.6g}\n"
        f"nccl_bus_bandwidth_gbs{{{labels}}} {gbs:.6g}\n"
        f"nccl_collective_exec_time_microseconds{{{labels}}} 400\n"
    )


COMM_HASH = 1493613951195738943


def profiler(
    rank: int, last: int, *, waits: Mapping[str, float] | None = None, quoted: bool = True
) -> str:
    """One communicator of one process: a step that sends and one that receives per collective."""
    spent = {"SendGpuWait": 10.0, "SendPeerWait": 5.0, "SendWait": 20.0, "RecvWait": 60.0,
             "RecvFlushWait": 1.0, "RecvGpuWait": 4.0} | dict(waits or {})  # fmt: skip
    lines = ["["]
    for place, number in enumerate(range(max(last - 2, 0), last + 1)):
        lines += _traced(rank, number, place, 100_000.0 * (place + 1), spent, quoted)
    return "\n".join(lines) + "\n{}]\n"


def _event(name: str, cat: str, ph: str, at: int, pid: int, ts: float, args: str = "") -> str:
    more = f', "args": {{{args}}}' if args else ""
    return (
        f'{{"name": "{name}", "cat": "{cat}", "ph": "{ph}", "id": {at}, "pid": {pid}, "tid": 1, '
        f'"ts": {ts:f}{more}}},'
    )


def _traced(
    rank: int, number: int, place: int, ts: float, spent: Mapping[str, float], quoted: bool
) -> Iterator[str]:
    pid, stream = 100 + rank, '"0x5020000567d0"' if quoted else "0x5020000567d0"
    dtype = '"ncclFloat32"' if quoted else "ncclFloat32"
    yield _event("Group API", "GROUP_API", "b", place, pid, ts, '"groupApiId": 0, "groupDepth": 1')
    yield _event("KernelLaunch", "KERNEL_LAUNCH", "b", place, pid, 0.0, f'"Stream": {stream}')
    yield _event("KernelLaunch", "KERNEL_LAUNCH", "e", place, pid, ts)
    yield _event("AllReduce", "COLL_API", "b", place, pid, 0.0, f'"datatype": {dtype}')
    yield _event(
        "AllReduce", "COLL", "b", place, pid, ts,
        f'"SeqNum": {number}, "CommHash": {COMM_HASH}, "Rank": {rank}, "Count": 262144, '
        '"Datatype": "ncclFloat32", "Algorithm": "RING", "Protocol": "SIMPLE", "nChannels": 1',
    )  # fmt: skip
    yield _event("KernelCh", "GPU", "b", 0, pid, ts, '"Channel": 0, "StartGpuClk": 1')
    for step, names in enumerate(
        (("RecvWait", "RecvFlushWait", "RecvGpuWait"), ("SendGpuWait", "SendPeerWait", "SendWait"))
    ):
        at = ts
        for name in names:
            end = at + spent[name] if spent[name] >= 0 else 0.0
            yield _event(name, "NET", "b", 2 * place + step, pid, at, '"Step": 0')
            yield _event(name, "NET", "e", 2 * place + step, pid, end)
            at = end
    yield _event("KernelCh", "GPU", "e", 0, pid, ts)
    yield _event("AllReduce", "COLL", "e", place, pid, ts + 100)
    yield _event("AllReduce", "COLL_API", "e", place, pid, ts + 90)
    yield _event("Group API", "GROUP_API", "e", place, pid, ts + 110)
