"""The record tables of a run directory: every column's type, unit and meaning, as a literal."""

from __future__ import annotations

import struct
from dataclasses import dataclass

SCHEMA_VERSION = 1
# History
# 1: phases (two packed words per span), device, host, process, gpu

FORMAT_NAME = "haiprof.rec"
NULL_I64 = -(1 << 63)  # "missing" in an i64 column; f64 and f32 use NaN; readers turn both to null

_STRUCT_CODE = {"i64": "q", "f64": "d", "f32": "f", "u32": "I"}


@dataclass(frozen=True)
class Column:
    """One column of a record."""

    name: str
    """Field word with the unit as suffix."""
    type: str
    """`i64`, `f64`, `f32` or `u32`, little-endian."""
    unit: str
    """Base unit: ns, bytes, count, ratio, watts, hz, celsius; `packed` for bit fields."""
    kind: str
    """`counter` (only grows), `gauge`, `time`, `key` or `span`."""
    meaning: str
    """Where it comes from and what it says, in one sentence."""


@dataclass(frozen=True)
class Table:
    """One kind of record file."""

    name: str
    columns: tuple[Column, ...]

    @property
    def struct(self) -> struct.Struct:
        """Packs one record: little-endian, without padding."""
        return struct.Struct("<" + "".join(_STRUCT_CODE[c.type] for c in self.columns))

    @property
    def record_bytes(self) -> int:
        """Length of one record."""
        return self.struct.size


# Kinds of a phase span. They are numbers in a file: never renumber, only add.
DATA = 1  # DataLoader iterator's __next__ gave a batch
DATA_END = 2  # ... raised StopIteration: the end of an epoch
DATA_ITER = 3  # DataLoader.__iter__: workers started, sampler reset
FORWARD = 4  # outermost module call that owns parameters, gradients on, module in training mode
EVAL = 5  # the same, gradients off, module in eval mode
NOGRAD = 6  # the same, gradients off, module in training mode
BACKWARD = 7  # autograd engine entered
OPTIMIZER = 8  # Optimizer.step
SCALER = 9  # GradScaler.step: holds the optimizer, or nothing when the step is skipped
GC = 10  # garbage collector pause; tag = generation
SAVE = 11  # checkpoint save (torch.save, distributed checkpoint, safetensors)
FORWARD_EVAL = 12  # as FORWARD with the module in eval mode: fine-tuning, or no no_grad

KIND_NAMES = {
    DATA: "dataloader",
    DATA_END: "dataloader_end",
    DATA_ITER: "dataloader_iter",
    FORWARD: "forward",
    EVAL: "eval",
    NOGRAD: "nograd_forward",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer",
    SCALER: "scaler",
    GC: "gc",
    SAVE: "save",
    FORWARD_EVAL: "forward_eval_mode",
}

TAG_BITS = 6
TAG_MASK = (1 << TAG_BITS) - 1  # the last tag stands for "one of the many that had no room"

PHASES = Table(
    "phases",
    (
        Column("start", "i64", "packed", "span", "start_ns << 6 | kind; CLOCK_MONOTONIC ns"),
        Column("end", "i64", "packed", "span", "end_ns << 6 | tag (root, optimizer, generation)"),
    ),
)

DEVICE = Table(
    "device",
    (
        Column("end_ns", "i64", "ns", "key", "end of the optimizer span that closed the interval"),
        Column("dataloader_ns", "f32", "ns", "span", "stream time between the marks, CUDA events"),
        Column("forward_ns", "f32", "ns", "span", "the same around forward calls"),
        Column("backward_ns", "f32", "ns", "span", "the same around the autograd engine"),
        Column("optimizer_ns", "f32", "ns", "span", "the same around optimizer steps"),
        Column("interval_ns", "f32", "ns", "span", "previous optimizer end to this one, on stream"),
        Column("missing_count", "u32", "count", "gauge", "spans of the interval without a time"),
    ),
)

HOST = Table(
    "host",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("cpu_user_ns", "i64", "ns", "counter", "/proc/stat user + nice, all CPUs"),
        Column("cpu_system_ns", "i64", "ns", "counter", "/proc/stat system + irq + softirq"),
        Column("cpu_idle_ns", "i64", "ns", "counter", "/proc/stat idle"),
        Column("cpu_iowait_ns", "i64", "ns", "counter", "/proc/stat iowait"),
        Column("cpu_steal_ns", "i64", "ns", "counter", "/proc/stat steal"),
        Column("cpu_count", "i64", "count", "gauge", "CPUs online"),
        Column("memory_total_bytes", "i64", "bytes", "gauge", "/proc/meminfo MemTotal"),
        Column("memory_available_bytes", "i64", "bytes", "gauge", "/proc/meminfo MemAvailable"),
        Column("disk_read_bytes", "i64", "bytes", "counter", "/proc/diskstats, whole devices"),
        Column("disk_write_bytes", "i64", "bytes", "counter", "/proc/diskstats, whole devices"),
        Column("network_receive_bytes", "i64", "bytes", "counter", "/proc/net/dev without lo"),
        Column("network_transmit_bytes", "i64", "bytes", "counter", "/proc/net/dev without lo"),
        Column("pressure_cpu_some_ns", "i64", "ns", "counter", "/proc/pressure/cpu some total"),
        Column("pressure_memory_some_ns", "i64", "ns", "counter", "/proc/pressure/memory some"),
        Column("pressure_io_some_ns", "i64", "ns", "counter", "/proc/pressure/io some total"),
    ),
)

PROCESS = Table(
    "process",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("pid", "i64", "count", "key", "process of a rank; children are included below"),
        Column("process_count", "i64", "count", "gauge", "the process and its live descendants"),
        Column("cpu_ns", "i64", "ns", "counter", "utime + stime of the process and descendants"),
        Column("cpu_main_ns", "i64", "ns", "counter", "utime + stime of the process alone"),
        Column("memory_rss_bytes", "i64", "bytes", "gauge", "statm resident, summed"),
        Column("read_bytes", "i64", "bytes", "counter", "io rchar: read calls, cache hits too"),
        Column("write_bytes", "i64", "bytes", "counter", "io wchar: write calls"),
        Column("storage_read_bytes", "i64", "bytes", "counter", "io read_bytes: storage layer"),
        Column("storage_write_bytes", "i64", "bytes", "counter", "io write_bytes: storage layer"),
        Column("thread_count", "i64", "count", "gauge", "threads, summed"),
    ),
)

GPU = Table(
    "gpu",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("gpu", "i64", "count", "key", "NVML index; its UUID is in the file header"),
        Column("utilization_ratio", "f64", "ratio", "gauge", "NVML: share with any kernel running"),
        Column("memory_used_bytes", "i64", "bytes", "gauge", "NVML memory used"),
        Column("memory_total_bytes", "i64", "bytes", "gauge", "NVML memory total"),
        Column("power_watts", "f64", "watts", "gauge", "NVML power usage"),
    ),
)

TABLES = (PHASES, DEVICE, HOST, PROCESS, GPU)
