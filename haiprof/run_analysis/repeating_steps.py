"""Steps of a process that never trained: what repeats in it, or what haiprof.step() marked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from haiprof.run_analysis.nesting import MODULE_KINDS, Bools, Codes, Spans, kind_table, nest
from haiprof.run_analysis.step_boundaries import (
    BY_COLLECTIVE,
    BY_FETCH,
    BY_MARK,
    BY_MODULE,
    TrainTokens,
)
from haiprof.run_format import schema

BY_TRAINING = -1
"""Steps are found by optimizer, scaler and backward, as `steps` has it."""
LOADER_CUTS = 2
"""So often a fetch must come after other work before the loader is what repeats: one that gave a
single batch, or was read before the loop, is not. As in `in_job/repeats.py`."""

_TRAINING = kind_table(schema.OPTIMIZER, schema.SCALER, schema.BACKWARD)
_MODULES = kind_table(*MODULE_KINDS)
_LOADER = kind_table(schema.DATA, schema.DATA_END, schema.DATA_ITER)
_WORK = kind_table(*MODULE_KINDS, schema.DATA, schema.DATA_END, schema.DATA_ITER)


def find_sources(spans: Spans) -> tuple[int, ...]:
    """What the steps of a process may be, of `step_boundaries.BOUNDARIES`: the first that repeats.

    PerfTracker finds iterations where a fetch or an optimizer step repeats (arXiv 2506.08528). Here
    the fetch comes first, then the root module's call, then the collective; and they count only
    where nothing trained: empty where something did.
    """
    kind = spans.kind
    if (kind == schema.MARK).any():
        return (BY_MARK,)
    if _TRAINING[kind].any():
        return ()
    modules, batches = bool(_MODULES[kind].any()), bool((kind == schema.DATA).any())
    fetched = batches and (not modules or _cut_count(spans) >= LOADER_CUTS)
    collectives = bool((kind == schema.COLLECTIVE).any())
    sources = ((BY_FETCH, fetched), (BY_MODULE, modules), (BY_COLLECTIVE, collectives))
    return tuple(source for source, there in sources if there)


def _cut_count(spans: Spans) -> int:
    """Loader calls with a root module's call since the one before."""
    nested = nest(spans.take(_WORK[spans.kind]))
    tokens = nested.spans.kind[nested.parent < 0]
    called = np.cumsum(_MODULES[tokens])[_LOADER[tokens]]
    return int((np.diff(called, prepend=0) > 0).sum())


def spans_for(spans: Spans, source: int) -> Spans:
    """The spans that steps of that source are found in; marks are put between outermost spans."""
    if source == BY_COLLECTIVE:
        return spans
    line = spans.take((spans.kind != schema.COLLECTIVE) & (spans.kind != schema.MARK))
    if source != BY_MARK:
        return line
    marks = spans.take(spans.kind == schema.MARK)
    nested = nest(line)
    outer = nested.spans.take(nested.parent < 0)
    place = np.searchsorted(outer.start_ns, marks.end_ns, side="right") - 1
    inside = place >= 0  # else nothing else was seen before: the first step began with the mark's
    end = np.where(
        inside, np.maximum(np.append(outer.end_ns, 0)[place], marks.end_ns), marks.end_ns
    )
    marks = replace(marks, start_ns=np.where(inside, end, marks.start_ns), end_ns=end)
    return Spans(
        kind=np.concatenate([line.kind, marks.kind]),
        tag=np.concatenate([line.tag, marks.tag]),
        start_ns=np.concatenate([line.start_ns, marks.start_ns]),
        end_ns=np.concatenate([line.end_ns, marks.end_ns]),
    )


def without_gradients_as_forward(kind: Codes) -> Codes:
    """Kinds where nothing trained: every root module's call is a forward pass of its step."""
    if _TRAINING[kind].any():
        return kind
    forward = np.where(_MODULES[kind], schema.FORWARD, kind)
    return forward.astype(np.int8)


def repeating_tokens(tag: Codes, token: Codes, source: int) -> TrainTokens:
    """The tokens that end steps, and those that a step can begin with."""
    none = np.zeros(len(token), dtype=np.bool_)
    fetch = _LOADER[token] if source == BY_FETCH else none
    closing = _closing(token, source)
    return TrainTokens(
        closing=closing,
        tag=tag if source in (BY_MODULE, BY_COLLECTIVE) else np.zeros_like(tag),
        work=none,
        holds_work=none,
        fetch=fetch,
        by=source,
    )


def _closing(token: Codes, source: int) -> Bools:
    single = {BY_MARK: schema.MARK, BY_COLLECTIVE: schema.COLLECTIVE}.get(source)
    closing: Bools = token == (schema.DATA if single is None else single)
    if single is not None:
        return closing
    called: Bools = token == schema.FORWARD
    if source == BY_MODULE or called.any():
        return called
    fetches = np.flatnonzero(_LOADER[token])  # all else of its steps is invisible
    if len(fetches):
        closing[fetches[-1]] = False  # its step has no end that can be seen
    return closing
