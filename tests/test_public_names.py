"""The public surface: names and flags are frozen here, so that a change is a decision."""

from __future__ import annotations

import haiprof
from haiprof.cli.names import COMMANDS
from haiprof.config import OPTIONS

PUBLIC = ["Analyzer", "TraceAnalysis", "__version__"]
ANALYZER = [
    "bursts",
    "counters",
    "manifest",
    "notes",
    "phases",
    "ranks",
    "show_one_rank",
    "show_overview",
    "steps",
]


def test_package_exports_exactly_its_public_names() -> None:
    assert sorted(haiprof.__all__) == PUBLIC
    assert dir(haiprof) == PUBLIC


def test_analyzer_has_the_documented_methods() -> None:
    methods = [name for name in vars(haiprof.Analyzer) if not name.startswith("_")]
    assert set(ANALYZER) <= set(methods)


def test_commands_are_frozen() -> None:
    assert list(COMMANDS) == [
        "overview",
        "rank",
        "list",
        "verdict",
        "scalars",
        "doctor",
        "export",
        "trace-report",
        "query",
        "trace-diff",
        "critical-path",
        "memory-timeline",
    ]


def test_launch_options_are_frozen() -> None:
    assert [(spec.name, spec.env) for spec in OPTIONS] == [
        ("time", "HAIPROF_TIME"),
        ("warmup", "HAIPROF_WARMUP"),
        ("trace", "HAIPROF_TRACE"),
        ("recorder", "HAIPROF_RECORDERS"),
        ("log-dir", "HAIPROF_LOG_DIR"),
        ("name", "HAIPROF_NAME"),
        ("run-id", "HAIPROF_RUN_ID"),
        ("burst", "HAIPROF_BURST"),
        ("burst-hz", "HAIPROF_BURST_HZ"),
        ("burst-time", "HAIPROF_BURST_TIME"),
        ("tensorboard", "HAIPROF_TENSORBOARD"),
        ("prometheus-port", "HAIPROF_PROMETHEUS_PORT"),
        ("quiet", "HAIPROF_QUIET"),
    ]
