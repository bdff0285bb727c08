"""The commands that read runs, by name, for whoever must not import the command line itself."""

from __future__ import annotations

from collections.abc import Iterable

COMMANDS = {
    "overview": "haiprof overview [DIR]: the whole job: every rank, counters, time split",
    "rank": "haiprof rank [DIR] [RANK]: one rank over time, phase statistics, slowest steps",
    "lines": "haiprof lines [DIR]: which lines of your code take the time, by rank and position",
    "list": "haiprof list [DIR]: the runs in a log directory",
    "verdict": "haiprof verdict [RUN_OR_JOB]: the cause, the numbers that prove it, what to change",
    "report": "haiprof report [DIR] -o report.html: all of a run in one page, without network",
    "view": "haiprof view [DIR]: the same page on this machine, also while the job runs",
    "diagnose": "haiprof diagnose [RUN_OR_JOB]: another name of verdict",
    "scalars": "haiprof scalars [DIR] --follow: live scalars for TensorBoard",
    "tensorboard": "haiprof tensorboard [RUN_OR_TRACES]: TensorBoard with scalars and traces",
    "perfetto": "haiprof perfetto [TRACE_OR_RUN]: a trace in Perfetto's UI, without network",
    "doctor": "haiprof doctor: what can be measured on this node, and what stands in the way",
    "export": "haiprof export [DIR] --format FORMAT: csv, parquet, prometheus or otlp-json",
    "trace-report": "haiprof trace-report [TRACES]: what traces of torch.profiler say, all ranks",
    "trace-table": "haiprof trace-table TABLE [TRACES]: one table whole, with HTA's cut-offs",
    "trace-check": "haiprof trace-check [TRACES]: what is wrong with the recording of traces",
    "efficiency": "haiprof efficiency [TRACES]: MFU, and operators against the roofline",
    "modules": "haiprof modules [TRACES]: which layers take the time, forward and backward",
    "functions": "haiprof functions [TRACES]: what bounds the job by function, which rank differs",
    "merge": "haiprof merge [RUN_OR_TRACES] -o merged.json.gz: all ranks in one timeline",
    "link": "haiprof link [RUN_OR_TRACES]: execution traces joined with timelines, share linked",
    "chakra": "haiprof chakra [RUN_OR_LINKED] -o DIR: Chakra traces, or the graph as a picture",
    "query": "haiprof query [TRACE_OR_RUN] SQL: tables of traces or of a run, asked in SQL",
    "compare": "haiprof compare BEFORE AFTER: a run slower than another or not, and by what",
    "trace-diff": "haiprof trace-diff CONTROL TEST: slower or not, by chance or not, and by what",
    "what-if": "haiprof what-if [TRACES_OR_RUN]: what would make steps shorter, and by how much",
    "critical-path": "haiprof critical-path [TRACES]: what a step's time consists of",
    "memory-timeline": "haiprof memory-timeline [TRACES]: memory over time, what fills its peak",
    "ps": "haiprof ps: the jobs that run under haiprof now: progress and speed",
    "top": "haiprof top [JOB]: running jobs, live in the terminal: ranks, steps, split, verdict",
    "attach": "haiprof attach [JOB] --time 60: record a running job for a while, and judge it",
    "snapshot": "haiprof snapshot [JOB]: what every rank does now, and who holds the job up",
    "trace-now": "haiprof trace-now [JOB] --steps 5: trace a running job, all ranks alike",
    "kineto-agent": "haiprof kineto-agent: for trace-now on jobs with KINETO_USE_DAEMON alone",
    "put": "haiprof put [RUN] ADDRESS: a run to s3://bucket/runs, or any address like it",
    "fetch": "haiprof fetch ADDRESS: a run from there into a folder of this machine",
    "try-loader": "haiprof try-loader train.py: steps per second with other DataLoaders, tried",
    "submit": "haiprof submit train.py: a job in the background, here or on Slurm's nodes",
}
"""Name, and the line that `haiprof --help` shows."""

GROUPS = {
    "Why is it slow, or dead?": ("verdict", "overview", "rank", "lines"),
    "All of it on one page": ("report", "view", "list"),
    "A running job": ("ps", "top", "attach", "snapshot", "trace-now", "kineto-agent"),
    "Traces of torch.profiler": (
        "trace-report", "trace-table", "trace-check", "efficiency", "modules", "functions",
        "critical-path", "what-if", "memory-timeline", "query",
    ),
    "Before and after": ("compare", "trace-diff", "try-loader"),
    "In other tools": (
        "tensorboard", "scalars", "perfetto", "merge", "link", "chakra", "export",
    ),
    "Where jobs run": ("doctor", "submit"),
    "Where runs are kept": ("put", "fetch"),
}  # fmt: skip
"""The commands by what one wants to know; every command is in one group, but for other names."""

OTHER_NAMES = ("diagnose",)
"""Of a command that is in a group."""

WORDS = (*COMMANDS, "run", "help", "completion")
"""What the first word of a command line can be, apart from a program."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that a mistyped word most likely means; None where none is near."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(names), n=1)), None)
