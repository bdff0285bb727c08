"""The commands that read runs, by name, for whoever must not import the command line itself."""

from __future__ import annotations

COMMANDS = {
    "overview": "haiprof overview [DIR]: the whole job: every rank, counters, time split",
    "rank": "haiprof rank [DIR] RANK: one rank over time, phase statistics, slowest steps",
    "list": "haiprof list [DIR]: the runs in a log directory",
    "verdict": "haiprof verdict [DIR]: the cause, the numbers that prove it, what to change",
    "scalars": "haiprof scalars DIR --follow: live scalars for TensorBoard",
    "doctor": "haiprof doctor: what can be measured on this node, and what stands in the way",
    "export": "haiprof export [DIR] --format FORMAT: csv, parquet, prometheus or otlp-json",
    "trace-report": "haiprof trace-report TRACES: what traces of torch.profiler say, all ranks",
    "query": "haiprof query TRACE_OR_RUN SQL: tables of traces or of a run, asked in SQL",
    "trace-diff": "haiprof trace-diff CONTROL TEST: slower or not, by chance or not, and by what",
    "critical-path": "haiprof critical-path TRACES: what a step's time consists of",
    "memory-timeline": "haiprof memory-timeline TRACES: memory over time, and what the peak is of",
}
"""Name, and the line that `haiprof --help` shows."""
