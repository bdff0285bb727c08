"""Training steps from the stream of spans: the period that a user would call a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from haiprof.base.intervals import Bools, Intervals, Ints
from haiprof.run_analysis.nesting import (
    CLOSING,
    FETCH,
    LOADER,
    MODULES,
    Codes,
    Nested,
    Spans,
    kind_table,
    nest,
)
from haiprof.run_format import schema

_TRAIN = kind_table(schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER, schema.SCALER)
_NO_GRAD = kind_table(schema.EVAL, schema.NOGRAD)
_EVAL_MODE_MARKS = kind_table(schema.DATA, schema.DATA_END, schema.DATA_ITER, schema.BACKWARD)
# An evaluation-like pass between loader and forward in this many of the optimizer steps is part
# of the step (pseudo labels, old policy); a real evaluation is rarer or has a loader loop.
IN_STEP_PASS_RATIO = 0.4
_UNUSED_LEAST = 4
"""Forward passes more than usual before a backward, from which on they are none of a step. Own
choice."""


def next_of(mask: Bools) -> Ints:
    """Position of the next true after each position; the length where there is none."""
    following: Ints = np.append(np.flatnonzero(mask), len(mask))[np.cumsum(mask)]
    return following


def previous_of(mask: Bools) -> Ints:
    """Position of the last true before each position; -1 where there is none."""
    preceding: Ints = np.concatenate([[-1], np.flatnonzero(mask)])[np.cumsum(mask) - mask]
    return preceding


def resolve_eval_mode(kind: Codes) -> Codes:
    """FORWARD_EVAL as FORWARD where a backward follows before the next batch, else as EVAL."""
    ambiguous = kind == schema.FORWARD_EVAL
    if not ambiguous.any():
        return kind
    following = np.append(kind, 0)[next_of(_EVAL_MODE_MARKS[kind])]
    resolved = np.where(following == schema.BACKWARD, schema.FORWARD, schema.EVAL)
    return np.where(ambiguous, resolved, kind).astype(np.int8)


def _find_unused(kind: Codes, tag: Codes, ns: Ints) -> Bools:
    """Forward passes with gradients that no backward can use: an evaluation without no_grad.

    Before most backwards a module is called equally often; where it is called far more often, and
    its backward is no longer for that, only the last calls are those of training. A penalty that is
    seldom added calls it once or twice. `ns`: how long each token takes.
    """
    found = np.zeros(len(kind), dtype=np.bool_)
    forward, backward = kind == schema.FORWARD, kind == schema.BACKWARD
    of_backward, backward_ns = np.cumsum(backward) - backward, ns[backward]
    for module in np.unique(tag[forward]) if backward.any() else ():
        at = np.flatnonzero(forward & (tag == module))
        count = np.bincount(of_backward[at], minlength=len(backward_ns) + 1)
        own = count[:-1][count[:-1] > 0]
        usual = int(np.median(own)) if len(own) else 0
        if not usual or (own == usual).mean() < 1 - IN_STEP_PASS_RATIO:
            continue
        many = (count >= usual + _UNUSED_LEAST) & (count >= 3 * usual)
        if not many.any():
            continue
        plain = backward_ns[count[:-1] == usual]
        many[:-1] &= backward_ns < 2 * np.median(plain)
        place = np.arange(len(at)) - np.searchsorted(of_backward[at], of_backward[at])
        left = count[of_backward[at]] - place
        found[at[many[of_backward[at]] & (left > usual)]] = True
    return found


def _find_evaluations(nested: Nested, kind: Codes, row: Ints, families: Mapping[int, int]) -> Bools:
    """Which of the outermost spans belong to an evaluation, its loader included."""
    tokens = kind[row]
    # Small family number by tag; a tag without a root line is a family of its own.
    named = {tag: family for tag, family in families.items() if 0 <= tag < schema.TAG_MASK}
    number = {family: i for i, family in enumerate(sorted(set(named.values())))}
    family = np.arange(schema.TAG_MASK + 1) + len(number)
    for tag, name in named.items():
        family[tag] = number[name]
    trained = np.zeros(int(family.max()) + 1, dtype=np.bool_)
    forward_tags = np.flatnonzero(np.bincount(nested.spans.tag[kind == schema.FORWARD]))
    trained[family[forward_tags]] = True
    no_grad = _NO_GRAD[tokens]
    if not no_grad.any():
        return no_grad
    passes = no_grad
    if len(forward_tags):
        of_trained = trained[family[nested.spans.tag[row]]]
        passes = (tokens == schema.EVAL) & of_trained & ~_in_step(tokens)
        passes |= no_grad & _alone_with_loader(tokens)
    return _with_loader(tokens, passes)


def _in_step(kind: Codes) -> Bools:
    """Passes between a batch and the training that uses it, where most steps have one."""
    loader, train = LOADER[kind], _TRAIN[kind]
    mark = loader | train
    before, after = previous_of(mark), next_of(mark)
    fetched = (before >= 0) & (kind[before] == schema.DATA)
    fetched &= ~np.append(_NO_GRAD[kind], False)[previous_of(~loader)][before]  # its own loop
    found: Bools = (kind == schema.EVAL) & fetched & np.append(train, False)[after]
    steps = int(CLOSING[kind].sum()) or int((kind == schema.BACKWARD).sum())
    batches = np.count_nonzero(np.diff(before[found], prepend=-1))
    if batches < max(1.0, IN_STEP_PASS_RATIO * steps):
        return np.zeros(len(kind), dtype=np.bool_)
    return found


def _alone_with_loader(kind: Codes) -> Bools:
    """Positions after a batch where no training happens until the next batch or the end."""
    loader = LOADER[kind]
    before, after = previous_of(loader), next_of(loader)
    trained = np.concatenate([[0], np.cumsum(_TRAIN[kind])])
    alone: Bools = (before >= 0) & (trained[after] == trained[before + 1])
    return alone


def _with_loader(kind: Codes, passes: Bools) -> Bools:
    """Evaluation passes, the batches fetched for them, and the end of their loader."""
    core: Bools = passes | (FETCH[kind] & np.append(passes, False)[next_of(~LOADER[kind])])
    end = kind == schema.DATA_END
    if not end.any() or not core.any():
        return core
    inside = np.append(core, False)[previous_of(~end)]  # -1 takes the appended False
    fetched = np.append(np.cumsum(core & (kind == schema.DATA)), 0)
    since = np.maximum(previous_of(end), previous_of(~core & ~end))
    own_batches = fetched[:-1] > fetched[since]
    core |= end & inside & own_batches
    return core


BOUNDARIES = ("dataloader", "optimizer", "backward", "mark", "fetch", "module", "collective")
"""What marks a step: the batch it begins with, or the optimizer or backward it ends with; the call
of haiprof.step() it ends with; where no optimizer stepped the loader's fetch it begins with, or the
root module's call or the collective it ends with."""
BY_LOADER, BY_OPTIMIZER, BY_BACKWARD, BY_MARK, BY_FETCH, BY_MODULE, BY_COLLECTIVE = range(7)
WORDS = {
    "mark": "steps end with the job's own calls of haiprof.step()",
    "fetch": "steps begin with the loader's batches: no optimizer seen",
    "module": "steps are root module calls: no optimizer seen",
    "collective": "steps end with a collective that repeats: no optimizer seen",
}
"""What steps are that are not those of a training, by their boundary."""

# How sure a boundary is: an order of the rules below, not a measured frequency.
CONFIDENCE_LOADER = 0.95  # a batch, then optimizer steps, the same number in nearly every segment
CONFIDENCE_OPTIMIZER = 0.8  # no loader seen; the same number of optimizer runs in nearly every step
CONFIDENCE_SPLIT = 0.5  # irregular: cut where an optimizer steps again
CONFIDENCE_BACKWARD = 0.4  # no optimizer seen (compiled away, or fused into the backward)
_CONFIDENCE = {  # no optimizer seen: what repeats, the nearer to a user's loop the surer
    BY_BACKWARD: CONFIDENCE_BACKWARD, BY_MARK: 1.0, BY_FETCH: 0.7, BY_MODULE: 0.4,
    BY_COLLECTIVE: 0.4,
}  # fmt: skip

# From here on, several optimizer steps per batch are an inner loop (critic updates), not steps.
REGULAR_RATIO = 0.8
MIN_SEGMENTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTokens:
    """The training part of the token line, one row per token, with the evaluations around it."""

    row: Ints  # row in the nested spans
    eval_after: Ints  # number of the evaluation that begins right after the token, -1: none does
    evaluations: Intervals
    closing: Bools  # optimizer or scaler step; what stands for it where no optimizer is seen
    tag: Codes  # which optimizer, where closing
    work: Bools  # forward or backward that separates two closing tokens
    holds_work: Bools  # closing tokens with forward or backward inside (closures)
    fetch: Bools  # loader tokens that a step can begin with
    by: int | None = None
    """What stands in for the optimizer, an index into BOUNDARIES; None where it was seen itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """One row per step; `first` and `by_loader` have one more, of what follows the last step."""

    first: Ints  # its first token
    last_closing: Ints  # its last closing token
    by_loader: Bools  # whether it begins with a loader token
    boundary: Codes  # index into BOUNDARIES
    confidence: npt.NDArray[np.float64]  # one of the constants above


def find_boundaries(tokens: TrainTokens) -> Boundaries:
    """Cuts the line into steps."""
    # A segment begins with the first batch after an optimizer step. Inside a segment, and where
    # there is no loader, a step begins when an optimizer that has stepped steps again after more
    # forward or backward; unless nearly all segments hold the same number of those (an inner loop).
    closing = np.flatnonzero(tokens.closing)
    # Loader tokens with a closing token since the previous loader token, that one included.
    fetch = np.flatnonzero(tokens.fetch)
    closed: Ints = np.cumsum(tokens.closing) - tokens.closing
    cuts: Ints = fetch[np.diff(closed[fetch], prepend=0) > 0]
    segment = np.searchsorted(cuts, closing, side="right")  # 0 is before the first cut
    run = _runs(tokens, closing, segment)
    head = _step_heads(tokens.tag[closing], run, segment)
    counts = np.bincount(segment[head], minlength=len(cuts) + 1)
    split = (counts > 1) & bool(len(cuts))
    full = counts[counts > 0]
    regular = len(full) >= MIN_SEGMENTS and _is_regular(full)
    if len(cuts) and (regular or tokens.by == BY_FETCH):
        head = np.flatnonzero(np.diff(segment, prepend=-1) > 0)
        split[:] = False
    step_segment = segment[head]
    opens = np.diff(step_segment, prepend=-1) > 0  # first step of its segment
    before = np.where(head > 0, closing[head - 1] + 1, 0) if len(head) else head
    by_loader = opens & (step_segment > 0)
    first = np.where(by_loader, np.append(cuts, 0)[step_segment - 1], before)
    last = closing[np.append(head[1:], len(closing)) - 1] if len(head) else head
    if len(head):
        by_loader[0] |= bool(tokens.fetch[: closing[0]].any())
        first[0] = 0
    rest = int(last[-1]) + 1 if len(head) else 0
    pending = cuts[cuts >= rest]
    has_begun = len(pending) > 0 and len(head) > 0  # the next step, when the recording ended
    boundary, confidence = _grade(tokens, by_loader, split[step_segment], run[head], run)
    return Boundaries(
        first=np.append(first, pending[0] if has_begun else rest), last_closing=last,
        by_loader=np.append(by_loader, has_begun), boundary=boundary, confidence=confidence,
    )  # fmt: skip


def _runs(tokens: TrainTokens, closing: Ints, segment: Ints) -> Ints:
    """Number of the run of each closing token: no work in between, same segment."""
    if not len(closing):
        return closing
    work = np.cumsum(tokens.work)[closing]
    new = tokens.holds_work[closing].copy()
    new[1:] |= (np.diff(work) > 0) | (np.diff(segment) > 0)
    if not tokens.work.any() and not tokens.holds_work.any():
        new[:] = True  # forward and backward are invisible: only the optimizers tell
    new[0] = True
    runs: Ints = np.cumsum(new) - 1
    return runs


def _step_heads(tag: Codes, run: Ints, segment: Ints) -> Ints:
    """Positions (among closing tokens) of the first of each step."""
    # A run opens a step when one of its optimizers has already stepped in the step before it.
    if not len(run):
        return run
    first = np.flatnonzero(np.diff(run, prepend=-1) > 0)
    if (tag == tag[0]).all():
        return first
    # For each run, if it opened a step: the run that would open the next one.
    count = len(first)
    pair = np.unique(run * 64 + tag)
    pair_run, pair_tag = pair >> 6, pair & 63
    order = np.lexsort((pair_run, pair_tag))
    same = np.flatnonzero(pair_tag[order][1:] == pair_tag[order][:-1])
    earlier, later = pair_run[order][same], pair_run[order][same + 1]
    latest = np.full(count, -1, dtype=np.int64)
    np.maximum.at(latest, later, earlier)  # the last run before that shares an optimizer
    seen = np.flatnonzero(latest >= 0)[::-1]
    jump = np.full(count, count, dtype=np.int64)
    jump[latest[seen]] = seen  # ascending order reversed: the smallest run is written last
    jump = np.minimum.accumulate(jump[::-1])[::-1]
    run_segment = segment[first]
    edge = np.searchsorted(run_segment, run_segment, side="right")
    following: list[int] = np.minimum(jump, edge).tolist()
    heads, at, end = [], 0, len(first)
    while at < end:  # a chain of jumps, one per step: 60 ns each, doubling in numpy is slower
        heads.append(at)
        at = following[at]
    return first[np.array(heads, dtype=np.int64)]


def _is_regular(counts: Ints) -> bool:
    """Whether nearly all are the same number."""
    return len(counts) > 0 and np.bincount(counts).max() >= REGULAR_RATIO * len(counts)


def _grade(
    tokens: TrainTokens, by_loader: Bools, split: Bools, head_run: Ints, run: Ints
) -> tuple[Codes, npt.NDArray[np.float64]]:
    """What marks each step, and how sure that is."""
    if tokens.by is not None:
        count = len(by_loader)
        return np.full(count, tokens.by, dtype=np.int8), np.full(count, _CONFIDENCE[tokens.by])
    boundary = np.where(by_loader, BY_LOADER, BY_OPTIMIZER).astype(np.int8)
    confidence = np.where(by_loader, CONFIDENCE_LOADER, CONFIDENCE_OPTIMIZER)
    if len(run) and not by_loader[1:].any():
        runs = np.diff(np.append(head_run, run[-1] + 1))
        if not _is_regular(runs):
            confidence[:] = CONFIDENCE_SPLIT
    return boundary, np.where(split, CONFIDENCE_SPLIT, confidence)


BY_TRAINING = -1  # steps are found by optimizer, scaler and backward, as `steps` has it
LOADER_CUTS = 2
"""So often a fetch must come after other work before the loader is what repeats: one that gave a
single batch, or was read before the loop, is not. As in `in_job/repeats.py`."""

_TRAINING = kind_table(schema.OPTIMIZER, schema.SCALER, schema.BACKWARD)


def find_sources(spans: Spans) -> tuple[int, ...]:
    """What the steps of a process may be, of BOUNDARIES: the first that repeats."""
    # PerfTracker finds iterations where a fetch or an optimizer step repeats (arXiv 2506.08528).
    # Here the fetch comes first, then the root module's call, then the collective; and they count
    # only where nothing trained: empty where something did.
    kind = spans.kind
    if (kind == schema.MARK).any():
        return (BY_MARK,)
    if _TRAINING[kind].any():
        return ()
    modules, batches = bool(MODULES[kind].any()), bool((kind == schema.DATA).any())
    fetched = batches
    if batches and modules:  # how often it was read with a root module's call since the read before
        nested = nest(spans.take((MODULES | LOADER)[kind]))
        tokens = nested.spans.kind[nested.parent < 0]
        called = np.cumsum(MODULES[tokens])[LOADER[tokens]]
        fetched = int((np.diff(called, prepend=0) > 0).sum()) >= LOADER_CUTS
    collectives = bool((kind == schema.COLLECTIVE).any())
    sources = ((BY_FETCH, fetched), (BY_MODULE, modules), (BY_COLLECTIVE, collectives))
    return tuple(source for source, there in sources if there)


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
    held = place >= 0  # else nothing else was seen before: the first step began with the mark's
    end = np.where(held, np.maximum(np.append(outer.end_ns, 0)[place], marks.end_ns), marks.end_ns)
    marks = replace(marks, start_ns=np.where(held, end, marks.start_ns), end_ns=end)
    return Spans(
        kind=np.append(line.kind, marks.kind), tag=np.append(line.tag, marks.tag),
        start_ns=np.append(line.start_ns, marks.start_ns),
        end_ns=np.append(line.end_ns, marks.end_ns),
    )  # fmt: skip


def _repeating_tokens(tag: Codes, token: Codes, source: int) -> dict[str, Any]:
    """The tokens that end steps, and those that a step can begin with."""
    none = np.zeros(len(token), dtype=np.bool_)
    marks = {BY_MARK: schema.MARK, BY_COLLECTIVE: schema.COLLECTIVE}
    closing = token == marks.get(source, schema.FORWARD)
    if source == BY_FETCH and not closing.any():  # all of its steps but the fetch is invisible
        closing = token == schema.DATA
        closing[np.flatnonzero(LOADER[token])[-1:]] = False  # the last one's end cannot be seen
    return {
        "closing": closing,
        "tag": tag if source in (BY_MODULE, BY_COLLECTIVE) else np.zeros_like(tag),
        "work": none, "holds_work": none,
        "fetch": LOADER[token] if source == BY_FETCH else none,
        "by": source,
    }  # fmt: skip


PHASES = ("dataloader", "forward", "backward", "optimizer")
"""The measured phases of a step; what is left of it is `other`."""
SPAN_PHASES = (*PHASES, "nograd_forward", "eval", "eval_dataloader", "collective", "step_mark")
"""Phases of a span; those after PHASES count as other, or lie outside steps."""
NOGRAD_PHASE, EVAL_PHASE, EVAL_LOADER_PHASE, COLLECTIVE_PHASE, MARK_PHASE = range(4, 9)
MIN_REPEATS = 2  # steps of a process that never trained: what came once has not repeated

_WORK = kind_table(schema.FORWARD, schema.BACKWARD)

_PHASE_OF_KIND = np.full(1 << schema.TAG_BITS, NOGRAD_PHASE, dtype=np.int8)
_PHASE_OF_KIND[[schema.DATA, schema.DATA_END, schema.DATA_ITER]] = 0
_PHASE_OF_KIND[schema.FORWARD] = 1
_PHASE_OF_KIND[schema.BACKWARD] = 2
_PHASE_OF_KIND[[schema.OPTIMIZER, schema.SCALER]] = 3
_PHASE_OF_KIND[schema.COLLECTIVE] = COLLECTIVE_PHASE
_PHASE_OF_KIND[schema.MARK] = MARK_PHASE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """One row per step, in order of time; times on the clock of the spans."""

    start_ns: Ints
    end_ns: Ints  # not after the next step's start
    step_ns: Ints  # end minus start, without evaluations in between
    host_ns: Ints  # [phase of PHASES, step]: exclusive time in each phase
    other_ns: Ints  # what is left of `step_ns`
    micro_step_count: Ints  # backward passes (forward passes where the rank has no backward)
    optimizer_step_count: Ints
    skipped: Bools  # whether a scaler stepped and let no optimizer step
    boundary: Codes  # index into BOUNDARIES
    confidence: npt.NDArray[np.float64]  # how sure the boundary is, one of the CONFIDENCE constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmentation:
    """The spans of one thread, by kind."""

    nested: Nested
    phase: Codes  # per nested span: index into SPAN_PHASES
    step: Ints  # per nested span: its step, -1 outside steps
    steps: StepColumns
    evaluations: Intervals
    unfinished_micro_step_count: int  # after the last step: job or recording ended in the middle


def trained_ns(found: Segmentation) -> Ints:
    """By step: the end of its last optimizer step, or its own where none was seen."""
    steps, spans = found.steps, found.nested.spans
    trained = steps.start_ns.copy()
    stepped = (found.step >= 0) & (spans.kind == schema.OPTIMIZER)
    np.maximum.at(trained, found.step[stepped], spans.end_ns[stepped])
    return np.where(trained > steps.start_ns, trained, steps.end_ns)


def segment(spans: Spans, *, families: Mapping[int, int] | None = None) -> Segmentation:
    """Cuts the spans of one thread into steps.

    A step begins with the first batch after an optimizer step; several batches (accumulation),
    several optimizers (GAN, parameter groups) and closures make one step. Without a loader it
    ends with the optimizer, and without an optimizer with the backward. Evaluation is in no step.
    In a process that never trained, a step is what repeats (`find_sources`), and calls of
    haiprof.step() are the ends of steps wherever there are some.
    """
    for source in find_sources(spans):
        found = _segment(spans, families or {}, source=source)
        if source == BY_MARK or len(found.steps.start_ns) >= MIN_REPEATS:
            return found
    return _segment(spans, families or {}, source=BY_TRAINING)


def _segment(spans: Spans, families: Mapping[int, int], *, source: int) -> Segmentation:
    nested = nest(spans_for(spans, source))
    kind = nested.spans.kind
    if source != BY_TRAINING and not _TRAINING[kind].any():  # each module's call is a forward
        kind = np.where(MODULES[kind], schema.FORWARD, kind).astype(np.int8)
    kind = resolve_eval_mode(kind)
    row = np.flatnonzero(nested.parent < 0)
    ns = nested.spans.end_ns[row] - nested.spans.start_ns[row]
    unused = np.zeros(len(kind), dtype=np.bool_)
    unused[row[_find_unused(kind[row], nested.spans.tag[row], ns)]] = True
    kind = np.where(unused, schema.EVAL, kind).astype(np.int8)
    evaluation = _find_evaluations(nested, kind, row, families)
    training = _training(nested, kind, row, evaluation, source)
    found = find_boundaries(training)
    start, end = _step_times(nested.spans, training, found)
    of_token = np.searchsorted(found.first, np.arange(len(training.row)), side="right") - 1
    by_row = np.full(len(nested.top), -1, dtype=np.int64)
    by_row[training.row] = np.where(of_token < len(start), of_token, -1)
    step = by_row[nested.top]
    phase = _PHASE_OF_KIND[kind]
    inside = np.flatnonzero(_holders(nested, row[evaluation])[nested.top])
    phase[inside] = np.where(LOADER[kind[inside]], EVAL_LOADER_PHASE, EVAL_PHASE)
    micro = kind == (schema.BACKWARD if (kind == schema.BACKWARD).any() else schema.FORWARD)
    rest = int(found.last_closing[-1]) + 1 if len(start) else len(training.row)
    left = _holders(nested, training.row[rest:])
    count, evaluated = len(start), training.evaluations
    before = np.append(0, np.cumsum(evaluated.ends - evaluated.starts))
    first, last = (np.searchsorted(evaluated.starts, edge) for edge in (start, end))
    step_ns = end - start - (before[last] - before[first])
    host = np.stack([_sums(nested.self_ns, step, phase == p, count) for p in range(len(PHASES))])
    of_optimizer = np.append(kind, 0)[nested.parent] == schema.OPTIMIZER
    optimizer = _counts(step, (kind == schema.OPTIMIZER) & ~of_optimizer, count)
    steps = StepColumns(
        start_ns=start, end_ns=end, step_ns=step_ns, host_ns=host,
        other_ns=step_ns - host.sum(axis=0), micro_step_count=_counts(step, micro, count),
        optimizer_step_count=optimizer,
        skipped=(_counts(step, kind == schema.SCALER, count) > 0) & (optimizer == 0),
        boundary=found.boundary, confidence=found.confidence,
    )  # fmt: skip
    return Segmentation(
        nested=nested, phase=phase, step=step, steps=steps, evaluations=evaluated,
        unfinished_micro_step_count=int((left[nested.top] & micro).sum()),
    )  # fmt: skip


def _training(nested: Nested, kind: Codes, row: Ints, evaluated: Bools, source: int) -> TrainTokens:
    """Training tokens, evaluation runs, and what a token holds inside."""
    begins = evaluated & ~np.append(False, evaluated[:-1])
    ends = evaluated & ~np.append(evaluated[1:], False)
    after = np.append(np.where(begins, np.cumsum(begins) - 1, -1)[1:], -1)
    spans, trained = nested.spans, row[~evaluated]
    tokens = (
        _train_tokens(nested, kind, row, evaluated)
        if source == BY_TRAINING
        else _repeating_tokens(spans.tag[trained], kind[trained], source)
    )
    return TrainTokens(
        row=trained, eval_after=after[~evaluated],
        evaluations=Intervals(spans.start_ns[row[begins]], spans.end_ns[row[ends]]), **tokens,
    )  # fmt: skip


def _train_tokens(nested: Nested, kind: Codes, outer: Ints, evaluation: Bools) -> dict[str, Any]:
    row = outer[~evaluation]
    token = kind[row]
    inner = np.flatnonzero(nested.parent >= 0)
    holds_work = _holders(nested, inner[_WORK[kind[inner]]])[row]
    holds_step = _holders(nested, inner[kind[inner] == schema.OPTIMIZER])[row]
    closing, work = CLOSING[token], _WORK[token]
    by_backward = not bool(closing.any())
    if by_backward:
        work = token == schema.FORWARD
        closing = token == schema.BACKWARD
        if (closing & holds_step).any():
            closing = closing & holds_step  # the optimizer steps inside the backward
    at_work = np.append(~evaluation & ~LOADER[kind[outer]], False)[1:]
    early_end = (token == schema.DATA_END) & at_work[~evaluation]  # one batch was fetched ahead
    return {
        "closing": closing, "tag": _optimizer_tags(nested, kind, inner)[row],
        "work": work & ~closing, "holds_work": closing & holds_work & (token != schema.BACKWARD),
        "fetch": FETCH[token] | early_end, "by": BY_BACKWARD if by_backward else None,
    }  # fmt: skip


def _holders(nested: Nested, inner: Ints) -> Bools:
    """Rows of outermost spans around the given ones."""
    mask = np.zeros(len(nested.top), dtype=np.bool_)
    mask[nested.top[inner]] = True
    return mask


def _optimizer_tags(nested: Nested, kind: Codes, inner: Ints) -> Codes:
    """Tags, where a scaler takes that of the optimizer inside it."""
    tag = nested.spans.tag.copy()
    steps = inner[kind[inner] == schema.OPTIMIZER]
    held = steps[kind[nested.top[steps]] == schema.SCALER]
    tag[nested.top[held]] = nested.spans.tag[held]
    closing = np.flatnonzero(CLOSING[kind] & (nested.parent < 0))
    empty = (kind[closing] == schema.SCALER) & ~_holders(nested, held)[closing]
    tag[closing] = _with_skipped(tag[closing], empty)
    return tag


def _with_skipped(tag: Codes, empty: Bools) -> Codes:
    """Tags of optimizers, where one that a scaler skipped takes its usual place in the order."""
    if not empty.any() or empty.all():
        return tag
    usual = np.zeros((schema.TAG_MASK + 1, schema.TAG_MASK + 1), dtype=np.int64)
    pairs = np.flatnonzero(~empty[1:] & ~empty[:-1])
    np.add.at(usual, (tag[pairs], tag[pairs + 1]), 1)
    follower = np.where(usual.any(axis=1), usual.argmax(axis=1), tag[~empty][0])
    filled = tag.copy()
    for place in np.flatnonzero(empty).tolist():  # skipped steps are few
        filled[place] = follower[filled[place - 1]] if place else tag[~empty][0]
    return filled


def _step_times(spans: Spans, training: TrainTokens, found: Boundaries) -> tuple[Ints, Ints]:
    """Start and end of each step."""
    # A step ends where the next one's batch begins, or where an evaluation begins after its last
    # token, or with its last optimizer step; one that begins with no batch begins there too.
    if not (count := len(found.last_closing)):
        return found.last_closing, found.last_closing
    row = training.row
    end = spans.end_ns[row[found.last_closing]]
    follower, by_loader = found.first[1:], found.by_loader[1:]
    loader = np.flatnonzero(by_loader)
    end[loader] = spans.start_ns[row[follower[loader]]]
    last = np.where(by_loader | (np.arange(count) < count - 1), follower - 1, found.last_closing)
    evaluation = training.eval_after[last]
    begun = np.flatnonzero(evaluation >= 0)
    if training.by != BY_MARK:
        end[begun] = training.evaluations.starts[evaluation[begun]]
    start = np.append(spans.start_ns[row[found.first[:1]]], end[:-1])
    begun = begun[begun < count - 1]
    start[begun + 1] = training.evaluations.ends[evaluation[begun]]
    own = np.flatnonzero(found.by_loader[:-1])
    start[own] = spans.start_ns[row[found.first[own]]]
    return start, end


def _sums(values: Ints, step: Ints, mask: Bools, count: int) -> Ints:
    """Sum per step of the chosen rows; steps ascend with the rows, so that sums stay integer."""
    rows = np.flatnonzero(mask & (step >= 0))
    total = np.append(0, np.cumsum(values[rows]))
    return np.diff(total[np.searchsorted(step[rows], np.arange(count + 1))])


def _counts(step: Ints, mask: Bools, count: int) -> Ints:
    return np.bincount(step[mask & (step >= 0)], minlength=count)
