"""phases.rec of one rank as columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from haiprof.run_analysis.nesting import Spans
from haiprof.run_analysis.records import read_table, record_columns
from haiprof.run_format import schema
from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.reader import RecordFile


def read_spans(path: Path, *, first: int = 0) -> tuple[Spans, ClockAnchor, tuple[str, ...]]:
    """Reads the spans of one rank, the anchor of their clock, and notes on what was left out."""
    records = read_table(path, schema.PHASES, first=first)
    spans, notes = spans_of(records)
    return spans, records.clock, notes


def spans_of(records: RecordFile) -> tuple[Spans, tuple[str, ...]]:
    """The sound spans of a phases.rec, and notes on what was left out."""
    columns = record_columns(records)
    spans = unpack(columns["start"], columns["end"])
    known = np.zeros(1 << schema.TAG_BITS, dtype=np.bool_)
    known[list(schema.KIND_NAMES)] = True
    sound = known[spans.kind] & (spans.start_ns >= 0) & (spans.end_ns >= spans.start_ns)
    notes = records.notes
    if not sound.all():
        notes += (f"{records.path}: {int((~sound).sum())} damaged spans left out",)
        spans = spans.take(sound)
    return spans, notes


def unpack(start: np.ndarray, end: np.ndarray) -> Spans:
    """Spans from the two packed words of their records."""
    return Spans(
        kind=(start & schema.TAG_MASK).astype(np.int8),
        tag=(end & schema.TAG_MASK).astype(np.int8),
        start_ns=start >> schema.TAG_BITS,
        end_ns=end >> schema.TAG_BITS,
    )
