"""The public surface: names and flags are frozen here, so that a change is a decision."""

from __future__ import annotations

import haiprof
from haiprof.base.options import OPTIONS
from haiprof.cli.names import COMMANDS

PUBLIC = ["Analyzer", "TraceAnalysis", "__version__", "step"]
ANALYZER = [
    "bursts",
    "counters",
    "lines",
    "manifest",
    "notes",
    "phases",
    "ranks",
    "reactions",
    "show_comparison",
    "show_one_rank",
    "show_overview",
    "show_ranks",
    "steps",
    "windows",
    "write_report",
]


def test_package_exports_exactly_its_public_names() -> None:
    assert sorted(haiprof.__all__) == PUBLIC
    assert dir(haiprof) == PUBLIC


def test_analyzer_has_the_documented_methods() -> None:
    methods = [name for name in dir(haiprof.Analyzer) if not name.startswith("_")]
    assert set(ANALYZER) <= set(methods)


def test_commands_are_frozen() -> None:
    assert sorted(COMMANDS) == [
        "attach",
        "chakra",
        "compare",
        "critical-path",
        "diagnose",
        "doctor",
        "dyno",
        "efficiency",
        "export",
        "fetch",
        "flight-recorder",
        "functions",
        "goodput",
        "kineto-agent",
        "lines",
        "link",
        "list",
        "mcp",
        "memory-timeline",
        "merge",
        "mlflow",
        "modules",
        "node",
        "otlp",
        "overview",
        "perfetto",
        "preflight",
        "ps",
        "put",
        "query",
        "rank",
        "report",
        "scalars",
        "skill",
        "snapshot",
        "submit",
        "tensorboard",
        "top",
        "trace-check",
        "trace-diff",
        "trace-now",
        "trace-report",
        "trace-table",
        "try-loader",
        "verdict",
        "view",
        "wandb",
        "what-if",
    ]


def test_launch_options_are_frozen() -> None:
    assert [(spec.name, spec.env) for spec in OPTIONS] == [
        ("time", "HAIPROF_TIME"),
        ("warmup", "HAIPROF_WARMUP"),
        ("detail", "HAIPROF_DETAIL"),
        ("trace", "HAIPROF_TRACE"),
        ("steps", "HAIPROF_STEPS"),
        ("trace-steps", "HAIPROF_TRACE_STEPS"),
        ("trace-stacks", "HAIPROF_TRACE_STACKS"),
        ("trace-shapes", "HAIPROF_TRACE_SHAPES"),
        ("trace-memory", "HAIPROF_TRACE_MEMORY"),
        ("trace-flops", "HAIPROF_TRACE_FLOPS"),
        ("trace-modules", "HAIPROF_TRACE_MODULES"),
        ("trace-sync", "HAIPROF_TRACE_SYNC"),
        ("execution-trace", "HAIPROF_EXECUTION_TRACE"),
        ("explain", "HAIPROF_EXPLAIN"),
        ("repeat", "HAIPROF_REPEAT"),
        ("repeat-every", "HAIPROF_REPEAT_EVERY"),
        ("keep-slow", "HAIPROF_KEEP_SLOW"),
        ("slow-ratio", "HAIPROF_SLOW_RATIO"),
        ("slow-cost", "HAIPROF_SLOW_COST"),
        ("trace-limit", "HAIPROF_TRACE_LIMIT"),
        ("recorder", "HAIPROF_RECORDERS"),
        ("log-dir", "HAIPROF_LOG_DIR"),
        ("local-dir", "HAIPROF_LOCAL_DIR"),
        ("name", "HAIPROF_NAME"),
        ("share", "HAIPROF_SHARE"),
        ("admin-group", "HAIPROF_ADMIN_GROUP"),
        ("run-id", "HAIPROF_RUN_ID"),
        ("burst", "HAIPROF_BURST"),
        ("burst-hz", "HAIPROF_BURST_HZ"),
        ("burst-time", "HAIPROF_BURST_TIME"),
        ("memory-history", "HAIPROF_MEMORY_HISTORY"),
        ("tensorboard", "HAIPROF_TENSORBOARD"),
        ("reach", "HAIPROF_REACH"),
        ("reach-token", "HAIPROF_REACH_TOKEN"),
        ("prometheus-port", "HAIPROF_PROMETHEUS_PORT"),
        ("prometheus-allow", "HAIPROF_PROMETHEUS_ALLOW"),
        ("kineto", "HAIPROF_KINETO"),
        ("react", "HAIPROF_REACT"),
        ("slow-limit", "HAIPROF_SLOW_LIMIT"),
        ("hang-limit", "HAIPROF_HANG_LIMIT"),
        ("react-times", "HAIPROF_REACT_TIMES"),
        ("notify", "HAIPROF_NOTIFY"),
        ("quiet", "HAIPROF_QUIET"),
    ]
