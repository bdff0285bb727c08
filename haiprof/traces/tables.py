"""The tables that a trace is read into: which events go where, with which columns."""

from __future__ import annotations

from dataclasses import dataclass

TRACE_VERSION = 1  # of the tables below; a cache of another version is built anew
NULL = -(1 << 63)  # "missing" in an integer column while it is being read

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
# Arrows from launches to kernels; a correlation says the same. They are counted, and not kept.
REDUNDANT_CATEGORIES = ("ac2g", "async_cpu_to_gpu", "async", "async_gpu")


@dataclass(frozen=True, slots=True)
class TraceColumn:
    """One column of a table."""

    name: str
    type: str
    """`i64`, `f64` or `str` (kept as codes while it is read)."""
    field: str
    """Field of `events.Args`, or of `events.Event` where it begins with a dot."""
    meaning: str
    scale: float = 1.0
    """From the file's unit to the column's."""


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
_EXTERNAL = TraceColumn("external_id", "i64", "external_id", "joins an operator and its launches")
_COLLECTIVE = (
    TraceColumn("collective", "str", "collective", "Collective name"),
    TraceColumn("dtype", "str", "dtype", "of its elements"),
    TraceColumn("in_count", "i64", "in_nelems", "In msg nelems"),
    TraceColumn("out_count", "i64", "out_nelems", "Out msg nelems"),
    TraceColumn("group_size", "i64", "group_size", "ranks in its process group"),
    TraceColumn("process_group", "str", "process_group", "Process Group Name"),
    TraceColumn("group_ranks", "str", "group_ranks", "Process Group Ranks"),
    TraceColumn("sequence", "i64", "collective_seq", "Seq: number of the collective in its group"),
)

TABLES: dict[str, tuple[TraceColumn, ...]] = {
    GPU: (
        *COMMON,
        _CORRELATION,
        _EXTERNAL,
        TraceColumn("device", "i64", "device", "GPU number in the process"),
        TraceColumn("stream", "i64", "stream", "CUDA stream"),
        TraceColumn("bytes", "i64", "bytes", "of a copy or set"),
        TraceColumn("bandwidth_bytes_per_s", "f64", "bandwidth_gb", "of a copy", 1e9),
        TraceColumn("blocks_per_sm", "f64", "blocks_per_sm", "blocks per SM"),
        TraceColumn("warps_per_sm", "f64", "warps_per_sm", "warps per SM"),
        TraceColumn("occupancy_ratio", "f64", "occupancy", "est. achieved occupancy", 0.01),
        TraceColumn("graph_node", "i64", "graph_node", "node of the CUDA graph that launched it"),
        *_COLLECTIVE,
    ),
    RUNTIME: (*COMMON, _CORRELATION, _EXTERNAL),
    OPS: (
        *COMMON,
        _EXTERNAL,
        TraceColumn("record_function_id", "i64", "record_function", "joins an execution trace"),
        TraceColumn("sequence_number", "i64", "sequence_number", "joins forward and backward"),
        TraceColumn("forward_tid", "i64", "forward_tid", "thread of the forward operator"),
        TraceColumn("input_dims", "str", "input_dims", "shapes, as JSON"),
        TraceColumn("input_types", "str", "input_types", "element types, as JSON"),
        *_COLLECTIVE,
    ),
    ANNOTATIONS: (*COMMON, _EXTERNAL),
    PYTHON: (
        *COMMON,
        TraceColumn("python_id", "i64", "python_id", "of this call"),
        TraceColumn("parent_id", "i64", "python_parent", "python_id of the caller"),
        TraceColumn("module_id", "i64", "python_module", "which instance of an nn.Module"),
    ),
    MEMORY: (
        *COMMON,
        TraceColumn("bytes", "i64", "memory_bytes", "allocated; negative when freed"),
        TraceColumn("address", "i64", "address", "of the block"),
        TraceColumn("device_type", "i64", "device_type", "0 CPU, 1 CUDA"),
        TraceColumn("device", "i64", "device_id", "device number; -1 for the CPU"),
        TraceColumn("allocated_bytes", "i64", "total_allocated", "of that device after it"),
        TraceColumn("reserved_bytes", "i64", "total_reserved", "of that device after it"),
    ),
    SYNC: (
        *COMMON,
        _CORRELATION,
        _EXTERNAL,
        TraceColumn("device", "i64", "device", "GPU number in the process"),
        TraceColumn("stream", "i64", "stream", "that waits"),
        TraceColumn("sync_kind", "str", "sync_kind", "cuda_sync_kind"),
        TraceColumn("wait_on_stream", "i64", "wait_on_stream", "stream that it waits for"),
        TraceColumn("wait_on_event", "i64", "wait_on_event", "CUDA event that it waits for"),
        TraceColumn("wait_on_correlation", "i64", "wait_on_correlation", "of its record call"),
    ),
    LINKS: (
        *COMMON,
        TraceColumn("phase", "str", ".ph", "s at the forward operator, f at the backward one"),
        TraceColumn("id", "i64", ".id", "the same at both ends"),
    ),
}
