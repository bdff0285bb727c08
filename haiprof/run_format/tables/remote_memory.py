"""What the cores of a rank did: instructions, cycles, cache fills from near and far DRAM."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

REMOTE_MEMORY = Table(
    "remote_memory",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("pid", "i64", "count", "key", "process of a rank; children are included below"),
        Column("start_ticks", "i64", "ticks", "key", "stat field 22: a reused pid is another one"),
        Column("instruction_count", "i64", "count", "counter",
               "instructions in user mode since the rank was first seen"),
        Column("cycle_count", "i64", "count", "counter", "core cycles, the same"),
        Column("local_dram_bytes", "i64", "bytes", "counter",
               "64 B x cache fills from near DRAM (the header names the event): no full traffic"),
        Column("remote_dram_bytes", "i64", "bytes", "counter",
               "64 B x cache fills from far DRAM: compare with local_dram_bytes"),
        Column("counted_ratio", "f64", "ratio", "gauge",
               "share of the time in which counters ran; below 1 the figures are scaled estimates"),
    ),
)  # fmt: skip
