"""The tables that a trace is read into: which events go where, with which columns."""

from __future__ import annotations

from dataclasses import dataclass

TRACE_VERSION = 6  # of the tables below; a cache of another version is built again

GPU, RUNTIME, OPS, ANNOTATIONS, PYTHON, MEMORY, SYNC, LINKS = (
    "gpu", "runtime", "ops", "annotations", "python", "memory", "sync", "links",
)  # fmt: skip

# Categories of Kineto, with those of before 2022 (Operator, Kernel, Runtime, Memcpy, Memset).
TABLE_OF_CATEGORY = {
    "kernel": GPU,
    "Kernel": GPU,
    "gpu_memcpy": GPU,
    "Memcpy": GPU,
    "gpu_memset": GPU,
    "Memset": GPU,
    "mtia_ccp_events": GPU,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "hip_runtime": RUNTIME,
    "mtia_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME,
    "Runtime": RUNTIME,
    "cpu_op": OPS,
    "Operator": OPS,
    "user_annotation": ANNOTATIONS,
    "gpu_user_annotation": ANNOTATIONS,
    "python_function": PYTHON,
    "cpu_instant_event": MEMORY,
    "cuda_sync": SYNC,
    "fwdbwd": LINKS,
}
# Arrows from launches to kernels: correlations say the same, so they are only counted.
REDUNDANT_CATEGORIES = ("ac2g", "async_cpu_to_gpu", "async", "async_gpu")


@dataclass(frozen=True, slots=True)
class TraceColumn:
    """One column of a table."""

    name: str
    type: str
    """`i64`, `f64` or `str`."""
    field: str
    """Key among an event's `args`, or `|` between spellings; of the event itself after a dot."""
    meaning: str
    scale: float = 1.0
    """From the file's unit to the column's."""
    is_json: bool = False
    """A text that holds any JSON value as it was written."""


COMMON = (
    TraceColumn("event", "i64", "", "place among the file's events, from 0"),
    TraceColumn("name", "str", ".name", "as recorded"),
    TraceColumn("category", "str", ".cat", "Kineto's category"),
    TraceColumn("ts_ns", "i64", ".ts", "start on the trace's clock"),
    TraceColumn("dur_ns", "i64", ".dur", "duration; 0 of what has none"),
    TraceColumn("pid", "i64", ".pid", "process, or device number of what ran on a GPU"),
    TraceColumn("tid", "i64", ".tid", "thread, or stream of what ran on a GPU"),
)
_CORRELATION = TraceColumn("correlation", "i64", "correlation", "joins a launch and its kernels")
_EXTERNAL = TraceColumn(
    "external_id", "i64", "External id|external id", "joins an operator and its launches"
)
_RECORD_FUNCTION = TraceColumn(
    "record_function_id", "i64", "Record function id", "joins an execution trace"
)
_INPUTS = (
    TraceColumn("input_dims", "str", "Input Dims", "shapes, as JSON", is_json=True),
    TraceColumn("input_types", "str", "Input type", "element types, as JSON", is_json=True),
)
_COLLECTIVE = (
    TraceColumn("collective", "str", "Collective name", "Collective name"),
    TraceColumn("dtype", "str", "dtype", "of its elements"),
    TraceColumn("in_count", "i64", "In msg nelems", "In msg nelems"),
    TraceColumn("out_count", "i64", "Out msg nelems", "Out msg nelems"),
    TraceColumn("group_size", "i64", "Group size", "ranks in its process group"),
    TraceColumn("process_group", "str", "Process Group Name", "Process Group Name"),
    TraceColumn("group_ranks", "str", "Process Group Ranks", "Process Group Ranks", is_json=True),
    TraceColumn("sequence", "i64", "Seq", "Seq: number of the collective in its group"),
)

TABLES: dict[str, tuple[TraceColumn, ...]] = {
    GPU: (
        *COMMON,
        _CORRELATION,
        _EXTERNAL,
        TraceColumn("device", "i64", "device", "GPU number in the process"),
        TraceColumn("stream", "i64", "stream", "CUDA stream"),
        TraceColumn("bytes", "i64", "bytes", "of a copy or set"),
        TraceColumn("bandwidth_bytes_per_s", "f64", "memory bandwidth (GB/s)", "of a copy", 1e9),
        TraceColumn("blocks_per_sm", "f64", "blocks per SM", "blocks per SM"),
        TraceColumn("warps_per_sm", "f64", "warps per SM", "warps per SM"),
        TraceColumn(
            "occupancy_ratio", "f64", "est. achieved occupancy %", "est. achieved occupancy", 0.01
        ),
        TraceColumn(
            "graph_node", "i64", "graph node id", "node of the CUDA graph that launched it"
        ),
        *_COLLECTIVE,
        TraceColumn("grid", "str", "grid", "blocks of a kernel's launch, as JSON", is_json=True),
        TraceColumn("block", "str", "block", "threads of a block, as JSON", is_json=True),
    ),
    RUNTIME: (*COMMON, _CORRELATION, _EXTERNAL),
    OPS: (
        *COMMON,
        _EXTERNAL,
        _RECORD_FUNCTION,
        TraceColumn("sequence_number", "i64", "Sequence number", "joins forward and backward"),
        TraceColumn("forward_tid", "i64", "Fwd thread id", "thread of the forward operator"),
        *_INPUTS,
        *_COLLECTIVE,
    ),
    ANNOTATIONS: (*COMMON, _EXTERNAL, _RECORD_FUNCTION, *_INPUTS),
    PYTHON: (
        *COMMON,
        TraceColumn("python_id", "i64", "Python id", "of this call"),
        TraceColumn("parent_id", "i64", "Python parent id", "python_id of the caller"),
        TraceColumn("module_id", "i64", "Python module id", "which instance of an nn.Module"),
    ),
    MEMORY: (
        *COMMON,
        TraceColumn("bytes", "i64", "Bytes", "allocated; negative when freed"),
        TraceColumn("address", "i64", "Addr", "of the block"),
        TraceColumn("device_type", "i64", "Device Type", "0 CPU, 1 CUDA"),
        TraceColumn("device", "i64", "Device Id", "device number; -1 for the CPU"),
        TraceColumn("allocated_bytes", "i64", "Total Allocated", "of that device after it"),
        TraceColumn("reserved_bytes", "i64", "Total Reserved", "of that device after it"),
    ),
    SYNC: (
        *COMMON,
        _CORRELATION,
        _EXTERNAL,
        TraceColumn("device", "i64", "device", "GPU number in the process"),
        TraceColumn("stream", "i64", "stream", "that waits"),
        TraceColumn("sync_kind", "str", "cuda_sync_kind", "cuda_sync_kind"),
        TraceColumn("wait_on_stream", "i64", "wait_on_stream", "stream that it waits for"),
        TraceColumn(
            "wait_on_event", "i64", "wait_on_cuda_event_id", "CUDA event that it waits for"
        ),
        TraceColumn(
            "wait_on_correlation", "i64", "wait_on_cuda_event_record_corr_id", "of its record call"
        ),
    ),
    LINKS: (
        *COMMON,
        TraceColumn("phase", "str", ".ph", "s at the forward operator, f at the backward one"),
        TraceColumn("id", "i64", ".id", "the same at both ends"),
    ),
}
