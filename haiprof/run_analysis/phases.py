"""The frame of spans: one row per span of a phase, and per collector pause and checkpoint save."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.intervals import Ints
from haiprof.run_analysis.nesting import Bools, Codes
from haiprof.run_analysis.segments import RankSegments
from haiprof.run_analysis.steps import NOGRAD_PHASE, SPAN_PHASES
from haiprof.run_format import schema

GC_PHASE, SAVE_PHASE = "gc", "save"
NOGRAD_NAME = SPAN_PHASES[NOGRAD_PHASE]
PHASE_SCHEMA = {
    "rank": pl.Int64,
    "attempt": pl.Int64,
    "step": pl.Int64,  # null outside training steps
    # a phase of a step, `nograd_forward`, `eval`, `eval_dataloader`, `gc`, `save`, ...
    "phase": pl.String,
    "name": pl.String,  # module or optimizer; null where there is none
    "start_ns": pl.Int64,  # Unix time
    "duration_ns": pl.Int64,
    "self_ns": pl.Int64,  # without the spans inside
}
_OPTIMIZER_KINDS = (schema.OPTIMIZER, schema.SCALER)
_NAME_COUNT = schema.TAG_MASK + 1


def phase_frame(rank: RankSegments) -> pl.DataFrame:
    """Spans of one rank, by start.

    Spans that belong to an outer span's own work (a recomputed forward inside the backward) are
    left out: their time is the outer one's.
    """
    return pl.concat([_spans(rank), pause_frame(rank)]).sort("start_ns", maintain_order=True)


def _spans(rank: RankSegments) -> pl.DataFrame:
    nested = rank.found.nested
    spans = nested.spans
    return _frame(
        rank,
        step=_where(rank.found.step >= 0, rank.found.step),
        phase=pl.Series(SPAN_PHASES, dtype=pl.String).gather(rank.found.phase),
        name=_names(rank, spans.kind, spans.tag),
        start=spans.start_ns,
        duration=spans.end_ns - spans.start_ns,
        own=nested.self_ns,
    )


def pause_frame(rank: RankSegments) -> pl.DataFrame:
    """Collector pauses and checkpoint saves alone, in the columns of `phase_frame`."""
    events, steps = rank.events, rank.found.steps
    if not len(events.kind):
        return pl.DataFrame(schema=PHASE_SCHEMA)
    duration = events.end_ns - events.start_ns
    place = np.searchsorted(steps.start_ns, events.start_ns, side="right") - 1
    inside = (place >= 0) & (events.start_ns < np.append(steps.end_ns, 0)[place])
    inside &= ~_in_evaluation(rank, events.start_ns)
    phase = np.where(events.kind == schema.GC, GC_PHASE, SAVE_PHASE)
    return _frame(
        rank,
        step=_where(inside, place),
        phase=pl.Series(phase, dtype=pl.String),
        name=pl.Series([None] * len(place), dtype=pl.String),
        start=events.start_ns,
        duration=duration,
        own=duration,
    )


def _where(known: Bools, values: Ints) -> pl.Series:
    """Null elsewhere."""
    missing = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(values))
    return pl.Series(values, dtype=pl.Int64).zip_with(pl.Series(known), missing)


def _in_evaluation(rank: RankSegments, time: Ints) -> np.ndarray:
    place = np.searchsorted(rank.found.evaluation_start_ns, time, side="right") - 1
    return (place >= 0) & (time < np.append(rank.found.evaluation_end_ns, 0)[place])


def _names(rank: RankSegments, kind: Codes, tag: Codes) -> pl.Series:
    """Names from the event lines: modules by root tag, then optimizers, then none."""
    roots, optimizers = rank.files.names("root"), rank.files.names("optimizer")
    names = [roots.get(tag) for tag in range(_NAME_COUNT)]
    names += [optimizers.get(tag) for tag in range(_NAME_COUNT)] + [None]
    stepped = np.isin(kind, _OPTIMIZER_KINDS)
    module = np.isin(kind, (schema.FORWARD, schema.FORWARD_EVAL, schema.EVAL, schema.NOGRAD))
    code = np.where(module, tag, np.where(stepped, tag.astype(np.int64) + _NAME_COUNT, -1))
    code[code < 0] = len(names) - 1
    return pl.Series(names, dtype=pl.String).gather(code)


def _frame(
    rank: RankSegments, *, step: pl.Series, phase: pl.Series, name: pl.Series, start: Ints,
    duration: Ints, own: Ints,
) -> pl.DataFrame:  # fmt: skip
    columns = {
        "rank": np.full(len(start), rank.files.rank),
        "attempt": np.full(len(start), rank.files.attempt),
        "step": step,
        "phase": phase,
        "name": name,
        "start_ns": start + rank.wall_offset_ns,
        "duration_ns": duration,
        "self_ns": own,
    }
    return pl.DataFrame(columns, schema_overrides=PHASE_SCHEMA)
