"""Where a rank process runs and where its memory lies."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

PLACEMENT = Table(
    "placement",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("pid", "i64", "count", "key", "process of a rank, without its children"),
        Column("start_ticks", "i64", "ticks", "key", "stat field 22: a reused pid is another one"),
        Column("last_cpu", "i64", "count", "gauge", "stat field 39: CPU of the main thread"),
        Column("cpu_node", "i64", "count", "gauge", "NUMA node of that CPU"),
        Column("allowed_cpu_count", "i64", "count", "gauge", "status Cpus_allowed_list"),
        Column("cpu_frequency_hz", "i64", "hz", "gauge", "scaling_cur_freq of last_cpu alone"),
        Column(
            "sampled_page_count",
            "i64",
            "count",
            "gauge",
            "move_pages: pages in memory, of at most 512 drawn from private writable memory",
        ),
        Column(
            "local_page_ratio",
            "f64",
            "ratio",
            "gauge",
            "share of those on NUMA nodes of the allowed CPUs",
        ),
    ),
)
