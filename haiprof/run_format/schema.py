"""The record tables of a run directory: columns with units and meanings; clocks, rates, growth."""

from __future__ import annotations

import math
import re
import struct
import time
from dataclasses import dataclass
from typing import NamedTuple

SCHEMA_VERSION = 2
# History
# 1: phases (two packed words per span), device, host, process, gpu
# 2: counters by entity with their width; tables of InfiniBand, NUMA and file systems

FORMAT_NAME = "haiprof.rec"
READ_NS = "read_ns"  # in every table of counters: what the read itself took
NULL_I64 = -(1 << 63)  # "missing" in an i64 column; f64 and f32 use NaN; readers turn both to null

_STRUCT_CODE = {"i64": "q", "f64": "d", "f32": "f", "u32": "I"}


@dataclass(frozen=True)
class Column:
    """One column of a record."""

    name: str  # field word with the unit as suffix
    type: str  # `i64`, `f64`, `f32` or `u32`, little-endian
    unit: str  # base unit: ns, bytes, count, ratio, watts, hz, celsius; `packed` for bit fields
    kind: str
    """`gauge`, `time`, `key`, `span`, or a counter: it only grows, and ends as `counter_end` says.

    `counter` has 64 bits, `counter32` goes on at 0 after 32 bits, `sticky16` stops at 16 bits;
    `sticky32x4` is one of 32 bits that is stored times 4.
    """
    meaning: str  # where it comes from and what it says, in one sentence


class CounterEnd(NamedTuple):
    """How a counter ends."""

    bits: int
    sticks: bool  # whether it stays at its highest value; else it wraps to 0
    scale: int = 1  # the factor that the source's own count was multiplied by


_COUNTER_KIND = re.compile(r"(counter|sticky)([1-9]\d?)?(?:x([1-9]\d{0,3}))?\Z", re.ASCII)


def counter_end(kind: str) -> CounterEnd | None:
    """The end of a counter kind; null for other kinds."""
    if (match := _COUNTER_KIND.match(kind)) is None:
        return None
    word, bits, scale = match.groups()
    return CounterEnd(int(bits or 64), word == "sticky", int(scale or 1))


# What a counter of ns per ns is called; others of its kind become ratios under their own name.
_CPU_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_RATES_OF_NS = {
    **{f"cpu_{state}_ns": (f"cpu_{state}_cores", "cores") for state in _CPU_STATES},
    "cpu_ns": ("cpu_cores", "cores"),
    "cpu_main_ns": ("cpu_main_cores", "cores"),
    "cpu_main_system_ns": ("cpu_main_system_cores", "cores"),
    "cpu_throttled_ns": ("cpu_throttled_cores", "cores"),
    "disk_busy_ns": ("disk_busy_count", "count"),
    "receive_pause_ns": ("receive_paused_priority_count", "count"),
    "transmit_pause_ns": ("transmit_paused_priority_count", "count"),
}
NS_OF_EVENTS = {
    f"{events}_{part}_ns": f"{events}_count"
    for events in ("server_read", "server_write", "metadata")
    for part in ("queue", "rtt", "execute")
}
"""Counters of ns that events took, with the counter of those events: the mean of one is shown."""


def rate_of(name: str, unit: str) -> tuple[str, str]:
    """What a counter's growth over time is called, and its unit."""
    if unit == "ns":
        return _RATES_OF_NS.get(name, (f"{name.removesuffix('_ns')}_ratio", "ratio"))
    return f"{name}_per_s", f"{unit}/s"


def is_known(value: float) -> bool:
    """Whether a stored value is one, and not the sign of a missing one."""
    return value != NULL_I64 and math.isfinite(value)


def growth(before: float, now: float, end: CounterEnd) -> float | None:
    """By how much a counter grew; None where that cannot be known: missing, set back, saturated.

    One that goes back has wrapped if it grew by less than half its range, else it was set back
    (serial number arithmetic, RFC 1982).
    """
    bits, sticks, scale = end
    if not (is_known(before) and is_known(now)) or (sticks and now == scale * ((1 << bits) - 1)):
        return None
    grown = now - before
    if grown < 0 and not sticks and scale << bits < 1 << 63:
        grown += scale << bits
        return grown if 0 <= grown < scale << (bits - 1) else None
    return grown if grown >= 0 else None


@dataclass(frozen=True)
class Table:
    """One kind of record file."""

    name: str
    columns: tuple[Column, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that say whose record it is."""
        return tuple(c.name for c in self.columns if c.kind == "key")

    @property
    def metrics(self) -> tuple[Column, ...]:
        """Columns that hold what was measured, after the times and keys."""
        return tuple(
            column
            for column in self.columns
            if column.name != READ_NS
            and (column.kind == "gauge" or counter_end(column.kind) is not None)
        )

    def names(self, first: str, last: str) -> tuple[str, ...]:
        """The columns from one to another: what one file or call fills, in its order."""
        found = [column.name for column in self.columns]
        return tuple(found[found.index(first) : found.index(last) + 1])

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
COLLECTIVE = 13  # torch.distributed call before any training; tag = the calling place
MARK = 14  # haiprof.step(): a step ends; the first may begin where the recording did

KIND_NAMES = dict(enumerate((
    "dataloader", "dataloader_end", "dataloader_iter", "forward", "eval", "nograd_forward",
    "backward", "optimizer", "scaler", "gc", "save", "forward_eval_mode", "collective", "step_mark",
), 1))  # fmt: skip

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
        Column("idle_ns", "f32", "ns", "span", "of it, nothing to do on the stream: at most"),
        Column("lag_ns", "f32", "ns", "span", "work left on the stream at end_ns: at least"),
    ),
)

HEARTBEAT = Table(
    "heartbeat",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC ns of the read, about 1 Hz"),
        Column("group", "i64", "count", "key", "process group, as the Flight Recorder numbers it"),
        Column("enqueued", "i64", "count", "gauge", "sequence number of the last collective begun"),
        Column("started", "i64", "count", "gauge", "... started on the device (null: not known)"),
        Column("completed", "i64", "count", "gauge", "... completed; with gloo the last enqueued"),
    ),
)

TABLES = (PHASES, DEVICE, HEARTBEAT)  # of a rank; those of nodes are in run_format/tables

_READINGS = 3


@dataclass(frozen=True)
class ClockAnchor:
    """The same instant on two clocks of one host."""

    wall_ns: int  # Unix time
    mono_ns: int  # CLOCK_MONOTONIC, which `time.perf_counter_ns` reads on Linux

    @classmethod
    def now(cls) -> ClockAnchor:
        """Reads both clocks; the monotonic time is the mean of two reads around the other.

        The closest of some readings counts: a thread that loses its core between two reads would
        move all times of a trace against the job's.
        """
        readings = []
        for _ in range(_READINGS):
            before = time.perf_counter_ns()
            wall = time.time_ns()
            after = time.perf_counter_ns()
            readings.append((after - before, wall, (before + after) // 2))
        _, wall, mono = min(readings)
        return cls(wall, mono)
