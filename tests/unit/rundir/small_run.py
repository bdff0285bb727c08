"""A small run with every kind of file in it, and what may come out of reading a damaged one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from haiprof import Analyzer
from haiprof.base.errors import RunFormatError, RunNotFoundError
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import as_document
from haiprof.run_analysis import folding
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import GPU, HOST, PROCESS
from haiprof.run_format.writer import LineWriter
from tests.unit.analysis.recorded import spans_of, write_rank, write_records, write_run
from tests.unit.analysis.sampled import write_stacks

LINE = "ITER D F B S(O) D F B S(O) E END"
EVENTS = (
    {"type": "record_start", "time_ns": 900, "optimizer_steps_before": 0},
    {"type": "cost", "time_ns": 9_000, "event_count": 12, "event_ns": 900, "elapsed_ns": 8_000,
     "module_call_count": 6, "module_call_ns": 300, "drain_cpu_ns": 5_000, "dropped_bytes": 0},
    {"type": "record_end", "time_ns": 9_500, "reason": "exit"},
)  # fmt: skip


def write_small_run(root: Path, tables: Sequence[schema.Table] = (HOST, PROCESS, GPU)) -> RunPaths:
    """One rank with device times, one node with the counters of some tables."""
    run = write_run(root)
    spans = spans_of(LINE)
    write_rank(run, spans, lines=EVENTS, gpu_uuid="GPU-a", device="cuda")
    ends = spans.end_ns[spans.kind == schema.OPTIMIZER].tolist()
    device = [(end, 1.0, 20.0, 30.0, 5.0, 60.0, 0, 12.0, 7.0) for end in ends]
    write_records(run.rank(0).device, schema.DEVICE, device)
    frames = (("/home/me/train.py", 40, "main"), ("/home/me/data.py", 12, "load"))
    write_stacks(run.rank(0).stacks, [(1_000 * i, frames[: 1 + i % 2]) for i in range(1, 9)])
    write_stacks(run.rank(0).worker_stacks(1), [(2_000, frames)], worker=1)
    node = run.node("node0")
    for table in tables:
        width = len(table.columns)
        rows = [[1_000 + 1_000 * i, *[100 + i] * (width - 1)] for i in range(3)]
        for key in range(2, 2 + len(table.keys)):
            rows = [[*row[:key], 100, *row[key + 1 :]] for row in rows]
        entity = {"key": [100] * len(table.keys), "name": "some", "uuid": "GPU-a"}
        write_records(node.records(table.name), table, rows, entities=[entity])
    node.agent.write_text(json.dumps({"version": 1, "host": "node0"}), encoding="utf-8")
    events = LineWriter(node.events)
    events.append({"type": "cost", "time_ns": 9_000, "cpu_ns": 50, "elapsed_ns": 8_000})
    events.append({"type": "counter_missing", "source": "gpu", "metric": "*", "reason": "none"})
    events.append({"type": "unreported", "pid": 7, "command": "python x.py", "reason": "-I"})
    events.close()
    return run


def fold_small_run(run: RunPaths) -> RunPaths:
    """Its first step and its old records are folded, though the run is short."""
    with mock.patch.multiple(folding, LEAST_STEPS=1, MINUTE_NS=1):
        short = folding.Retention(steps_ns=1, samples_ns=1, counters_ns=1)
        assert folding.fold_node(run, "node0", short) == []
    return run


def read_all(path: Path) -> tuple[int, list[str]]:
    """Everything that can be asked of a run; (steps, notes), or (-1, [the error]).

    Any exception other than haiprof's own escapes, and so does an error that names no file.
    """
    analyzer = Analyzer(path)
    try:
        steps = analyzer.steps().height
        rows = [
            analyzer.phases().height,
            analyzer.lines().height,
            analyzer.counters().height,
            analyzer.ranks().height,
        ]
        assert min(rows) >= 0
        json.dumps(as_document(diagnose(analyzer)), allow_nan=False)
        return steps, analyzer.notes()
    except (RunFormatError, RunNotFoundError) as error:
        if str(path) not in str(error):
            raise AssertionError("the error names no file") from error
        return -1, [str(error)]
