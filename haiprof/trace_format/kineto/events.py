"""One event of a Chrome trace as msgspec decodes it, and the tables of events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

TRACE_VERSION = 8  # of the tables below; a cache of another version is built again

GPU_RANGES = "gpu_user_annotation"  # category of ranges of the host as they show on the GPU
GPU, RUNTIME, OPS, ANNOTATIONS, PYTHON, MEMORY, SYNC, LINKS = (
    "gpu", "runtime", "ops", "annotations", "python", "memory", "sync", "links",
)  # fmt: skip
GPU_COUNTERS, GRAPH_NODES, OS_CALLS = "gpu_counters", "graph_nodes", "os_calls"

# Categories of Kineto, with those of before 2022 (Operator, Kernel, Runtime, Memcpy, Memset).
TABLE_OF_CATEGORY = {
    category: table
    for table, categories in (
        (GPU, ("kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset",
               "mtia_ccp_events")),
        (RUNTIME, ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "xpu_driver",
                   "mtia_runtime", "glow_runtime", "privateuse1_runtime", "privateuse1_driver",
                   "Runtime")),
        (OPS, ("cpu_op", "Operator")),
        (ANNOTATIONS, ("user_annotation", GPU_RANGES)),
        (PYTHON, ("python_function",)),
        (MEMORY, ("cpu_instant_event",)),
        (SYNC, ("cuda_sync",)),
        (LINKS, ("fwdbwd",)),
        (GPU_COUNTERS, ("gpu_counter",)),
        (GRAPH_NODES, ("graph_event_node", "graph_host_node")),
        (OS_CALLS, ("os_runtime",)),
    )
    for category in categories
}  # fmt: skip
LANE = 50_000_000
"""Added to a stream's or thread's number, once per lane: more than any such number (Linux counts
threads to 4 million), and 64 of them fit the 32 bits that Perfetto reads."""
GPU_BACKEND_NAMES = ("nccl", "nccl2", "ncclx", "rccl", "xccl", "hccl", "mccl")
GPU_BACKENDS = "|".join(GPU_BACKEND_NAMES)
HOST_BACKENDS = "gloo|mpi|ucc"
"""Backends of collectives, as PyTorch's annotations begin: `nccl:all_reduce`, `ncclx:...`."""

# Arrows from launches to kernels: correlations say the same, so they are only counted.
REDUNDANT_CATEGORIES = ("ac2g", "async_cpu_to_gpu", "async", "async_gpu")


@dataclass(frozen=True, slots=True)
class TraceColumn:
    """One column of a table."""

    name: str
    type: str  # `i64`, `f64` or `str`
    field: str
    """Key among an event's `args`, or `|` between spellings; of the event itself after a dot."""
    meaning: str
    scale: float = 1.0  # from the file's unit to the column's
    is_json: bool = False  # a text that holds any JSON value as it was written


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
_DEVICE = TraceColumn("device", "i64", "device", "GPU number in the process")
_STREAM = TraceColumn("stream", "i64", "stream", "CUDA stream")
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
        *(*COMMON, _CORRELATION, _EXTERNAL, _DEVICE, _STREAM),
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
        TraceColumn("graph", "i64", "graph id", "CUDA graph of that node"),
        TraceColumn("copy_kind", "str", "copy kind", "HtoD, DtoH, ...: where the name lacks it"),
        TraceColumn("source_kind", "str", "src kind", "memory that a copy reads, likewise"),
        TraceColumn("target_kind", "str", "dst kind", "memory that it writes, likewise"),
        *_COLLECTIVE,
        TraceColumn("grid", "str", "grid", "blocks of a kernel's launch, as JSON", is_json=True),
        TraceColumn("block", "str", "block", "threads of a block, as JSON", is_json=True),
    ),
    RUNTIME: (*COMMON, _CORRELATION, _EXTERNAL),
    OPS: (
        *(*COMMON, _EXTERNAL, _RECORD_FUNCTION),
        TraceColumn("sequence_number", "i64", "Sequence number", "joins forward and backward"),
        TraceColumn("forward_tid", "i64", "Fwd thread id", "thread of the forward operator"),
        *(*_INPUTS, *_COLLECTIVE),
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
        *(*COMMON, _CORRELATION, _EXTERNAL, _DEVICE),
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
    GPU_COUNTERS: (
        *(*COMMON, _DEVICE),
        TraceColumn("value", "f64", "value", "in the unit that the name states"),
    ),
    GRAPH_NODES: (
        *(*COMMON, _CORRELATION, _DEVICE, _STREAM),
        TraceColumn("graph", "i64", "graph id", "CUDA graph"),
        TraceColumn("graph_node", "i64", "graph node id", "node of that graph"),
    ),
    OS_CALLS: COMMON,
}


Number = int | float | str | None
Text = str | int | float | None
Decoder = msgspec.json.Decoder[list[Any]]

NO_JSON = msgspec.Raw(b"")  # where an event has no such argument
_NO_ARGS = msgspec.Raw(b"{}")
_NO_TIME = msgspec.Raw(b"null")

CATEGORIES = (*TABLE_OF_CATEGORY, *REDUNDANT_CATEGORIES)
"""The known categories; elsewhere a category is its index here."""
OTHER_CATEGORY = len(CATEGORIES)  # the index of all others


PHASES = dict.fromkeys(TABLES, "X") | {MEMORY: "iI", LINKS: "stf", GPU_COUNTERS: "C"}
WITHOUT_DURATION = (MEMORY, LINKS, GPU_COUNTERS)
"""How events of a table are marked, as profilers write them: a letter each."""


class Head(msgspec.Struct, gc=False):
    """An event but for its arguments, which wait until it is known what to take from them.

    `ts` and `dur` in us, as text: a float does not hold a Unix time to 1 ns.
    """

    ph: str | None = ""
    cat: Text = ""
    name: Text = ""
    pid: Number = None
    tid: Number = None
    ts: msgspec.Raw = _NO_TIME
    dur: msgspec.Raw = _NO_TIME
    id: Number = None
    args: msgspec.Raw = _NO_ARGS


HEADS: Decoder = msgspec.json.Decoder(list[Head])
TEXTS: Decoder = msgspec.json.Decoder(list[msgspec.Raw])  # events as they are written


def argument_names(column: TraceColumn) -> list[str]:
    """Fields of the arguments' struct that hold a column, by the spellings of its key."""
    keys = [] if column.field.startswith(".") or not column.field else column.field.split("|")
    return [f"{column.name}_{place}" for place, _ in enumerate(keys)]


def _arguments(table: str) -> type[msgspec.Struct]:
    """The arguments of one table's events."""
    fields = []
    for column in TABLES[table]:
        kind: Any = Text if column.type == "str" else Number
        kind, default = (msgspec.Raw, NO_JSON) if column.is_json else (kind, None)
        for name, key in zip(argument_names(column), column.field.split("|"), strict=False):
            fields.append((name, kind, msgspec.field(name=key, default=default)))
    return msgspec.defstruct(f"Args_{table}", fields, gc=False, frozen=True)


ARGUMENTS: dict[str, Decoder] = {
    table: msgspec.json.Decoder(list[_arguments(table)])  # type: ignore[misc]
    for table in TABLES
}
"""By table."""

JSON_KEYS = {key for columns in TABLES.values() for column in columns if column.is_json
             for key in column.field.split("|")}  # fmt: skip
"""Arguments that may be any JSON value."""


_COUNTERS_OF = re.compile(r"GPU (\d{1,6}) Counters")
_VALUES = msgspec.json.Decoder(dict[str, float])


def read_gpu_counter(head: Head) -> Head | None:
    """A counter of PyTorch's own CUPTI collector; None for any other event.

    Source: torch/profiler/_cuspy/trace.py, `_build_chrome_counters`: one value without a name.
    """
    found = _COUNTERS_OF.fullmatch(head.pid) if head.ph == "C" and type(head.pid) is str else None
    if found is None:
        return None
    try:
        (value,) = _VALUES.decode(head.args).values()
    except (ValueError, RecursionError):  # no number, or several
        return None
    args = msgspec.json.encode({"device": int(found[1]), "value": value})
    return msgspec.structs.replace(head, pid=None, args=msgspec.Raw(args))
