"""Counters of a rank process with its descendants."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

PROCESS = Table(
    "process",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("pid", "i64", "count", "key", "process of a rank; children are included below"),
        Column("start_ticks", "i64", "ticks", "key", "stat field 22: a reused pid is another one"),
        Column("process_count", "i64", "count", "gauge", "the process and its live descendants"),
        Column("cpu_ns", "i64", "ns", "counter", "utime + stime of the process and descendants"),
        Column("cpu_main_ns", "i64", "ns", "counter", "utime + stime of the process alone"),
        Column("memory_rss_bytes", "i64", "bytes", "gauge", "statm resident, summed"),
        Column("read_bytes", "i64", "bytes", "counter", "io rchar: read calls, cache hits too"),
        Column("write_bytes", "i64", "bytes", "counter", "io wchar: write calls"),
        Column("storage_read_bytes", "i64", "bytes", "counter", "io read_bytes: storage layer"),
        Column("storage_write_bytes", "i64", "bytes", "counter", "io write_bytes: storage layer"),
        Column("thread_count", "i64", "count", "gauge", "threads, summed"),
        Column("page_fault_count", "i64", "count", "counter", "stat minflt + majflt, summed"),
        Column("major_page_fault_count", "i64", "count", "counter", "stat majflt: from storage"),
        Column(
            "run_queue_wait_ns",
            "i64",
            "ns",
            "counter",
            "schedstat of the main thread alone: able to run, and no CPU free",
        ),
        Column(
            "context_switch_count", "i64", "count", "counter", "status of the main thread alone"
        ),
        Column(
            "involuntary_context_switch_count",
            "i64",
            "count",
            "counter",
            "those of them in which the kernel took the CPU away",
        ),
    ),
)
