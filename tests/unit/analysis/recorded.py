"""Spans from hand-written token lines, and run directories that hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from haiprof.run_analysis.nesting import Spans
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest
from haiprof.run_format.schema import ClockAnchor
from haiprof.run_format.writer import LineWriter, RecordWriter

CLOCK = ClockAnchor(1_700_000_000_000_000_000, 1_000)
WALL_OFFSET_NS = CLOCK.wall_ns - CLOCK.mono_ns
SPAN_NS, GAP_NS = 100, 7
KINDS = {
    "D": schema.DATA, "END": schema.DATA_END, "ITER": schema.DATA_ITER, "F": schema.FORWARD,
    "E": schema.EVAL, "N": schema.NOGRAD, "B": schema.BACKWARD, "O": schema.OPTIMIZER,
    "S": schema.SCALER, "GC": schema.GC, "SAVE": schema.SAVE, "FE": schema.FORWARD_EVAL,
    "C": schema.COLLECTIVE, "M": schema.MARK,
}  # fmt: skip


def spans_of(line: str, *, span_ns: int = SPAN_NS, gap_ns: int = GAP_NS) -> Spans:
    """Spans of `D F B O1(F B) ...`: a number is the tag, brackets hold what is inside.

    A leaf lasts `span_ns`, `gap_ns` lie around each; rows come in order of end, as in the file.
    """
    rows: list[tuple[int, int, int, int]] = []
    opened: list[tuple[int, int, int]] = []
    time = 1_000
    for word in line.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            kind, tag, start, _ = rows.pop()
            opened.append((kind, tag, start))
            time = start + gap_ns
        elif word == ")":
            kind, tag, start = opened.pop()
            rows.append((kind, tag, start, time))
            time += gap_ns
        else:
            name = word.rstrip("0123456789")
            tag = int(word[len(name) :] or 0)
            rows.append((KINDS[name], tag, time, time + span_ns))
            time += span_ns + gap_ns
    return spans_from(rows)


def spans_from(rows: Sequence[tuple[int, int, int, int]]) -> Spans:
    """Spans from (kind, tag, start, end)."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Spans(
        kind=table[:, 0].astype(np.int8), tag=table[:, 1].astype(np.int8), start_ns=table[:, 2],
        end_ns=table[:, 3],
    )  # fmt: skip


def packed(spans: Spans) -> bytes:
    """Spans as records of phases.rec."""
    words = np.empty((len(spans.kind), 2), dtype="<i8")
    words[:, 0] = spans.start_ns << schema.TAG_BITS | spans.kind
    words[:, 1] = spans.end_ns << schema.TAG_BITS | spans.tag
    return words.tobytes()


def write_run(root: Path, *, name: str = "job") -> RunPaths:
    """An empty run directory with its manifest."""
    run = RunPaths(root)
    root.mkdir(parents=True)
    write_manifest(
        run,
        Manifest(
            haiprof_version="0.1.0", name=name, command=["python", "train.py"],
            start_wall_ns=CLOCK.wall_ns,
        ),
    )  # fmt: skip
    return run


def write_rank(
    run: RunPaths,
    spans: Spans,
    *,
    rank: int = 0,
    attempt: int = 0,
    lines: Sequence[Mapping[str, object]] = (),
    **report: object,
) -> None:
    """One rank's files."""
    paths = run.rank(rank, attempt)
    paths.root.mkdir(parents=True)
    facts = {
        "version": 1, "rank": rank, "attempt": attempt, "local_rank": rank, "world_size": 1,
        "pid": 100 + rank, "start_ticks": 7, "host": "node0",
        "python": "3.11", "torch": "2.13", "device": "cpu",
        "gpu_uuid": None, "clock": {"wall_ns": CLOCK.wall_ns, "mono_ns": CLOCK.mono_ns},
        "phases": dict.fromkeys(("dataloader", "forward", "backward", "optimizer"), "ok"),
        **report,
    }  # fmt: skip
    paths.report.write_text(json.dumps(facts), encoding="utf-8")
    writer = RecordWriter(paths.phases, schema.PHASES, clock=CLOCK, extra={"rank": rank})
    writer.append(packed(spans))
    writer.close()
    events = LineWriter(paths.events)
    events.append({"type": "root", "tag": 0, "name": "GPT", "family": 0})
    events.append({"type": "optimizer", "tag": 0, "name": "AdamW"})
    for line in lines:
        events.append(line)
    events.close()


def row_of(table: schema.Table, **values: float) -> list[float]:
    """One record of a table; null where nothing is given."""
    nulls = [math.nan if c.type[0] == "f" else schema.NULL_I64 for c in table.columns]
    named = dict(zip((c.name for c in table.columns), nulls, strict=True))
    assert values.keys() <= named.keys()
    return list((named | {"read_ns": 5} | values).values())


def write_records(
    path: Path, table: schema.Table, rows: Sequence[Sequence[float | int]], **extra: object
) -> None:
    """A record file of any table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(path, table, clock=CLOCK, extra=extra)
    for row in rows:
        writer.append(table.struct.pack(*row))
    writer.close()
