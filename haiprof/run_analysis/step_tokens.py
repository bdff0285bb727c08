"""The line of outermost spans: which are training, and where on it steps begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from haiprof.base.intervals import Ints
from haiprof.run_analysis.nesting import CLOSING, FETCH, LOADER, Bools, Codes, Nested, kind_table
from haiprof.run_format import schema

_TRAIN = kind_table(schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER, schema.SCALER)
_NO_GRAD = kind_table(schema.EVAL, schema.NOGRAD)
_EVAL_MODE_MARKS = kind_table(schema.DATA, schema.DATA_END, schema.DATA_ITER, schema.BACKWARD)
# An evaluation-like pass between loader and forward in this many of the optimizer steps is part
# of the step (pseudo labels, old policy); a real evaluation is rarer or has a loader loop.
IN_STEP_PASS_RATIO = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """Outermost spans in order of time."""

    row: Ints
    """Row in the nested spans."""
    kind: Codes
    """Kind, with FORWARD_EVAL resolved to FORWARD or EVAL."""
    evaluation: Bools
    """Whether it belongs to an evaluation, its loader included."""


def next_of(mask: Bools) -> Ints:
    """Position of the next true after each position; the length where there is none."""
    places = np.append(np.flatnonzero(mask), len(mask))
    following: Ints = places[np.cumsum(mask)]
    return following


def previous_of(mask: Bools) -> Ints:
    """Position of the last true before each position; -1 where there is none."""
    places = np.concatenate([[-1], np.flatnonzero(mask)])
    preceding: Ints = places[np.cumsum(mask) - mask]
    return preceding


def resolve_eval_mode(kind: Codes) -> Codes:
    """FORWARD_EVAL as FORWARD where a backward follows before the next batch, else as EVAL."""
    ambiguous = kind == schema.FORWARD_EVAL
    if not ambiguous.any():
        return kind
    following = np.append(kind, 0)[next_of(_EVAL_MODE_MARKS[kind])]
    resolved = np.where(following == schema.BACKWARD, schema.FORWARD, schema.EVAL)
    return np.where(ambiguous, resolved, kind).astype(np.int8)


def token_line(nested: Nested, kind: Codes, families: Mapping[int, int]) -> TokenLine:
    """Tells evaluation from training."""
    row = np.flatnonzero(nested.parent < 0)
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
        return TokenLine(row=row, kind=tokens, evaluation=no_grad)
    if not len(forward_tags):
        passes = no_grad
    else:
        of_trained = trained[family[nested.spans.tag[row]]]
        passes = (tokens == schema.EVAL) & of_trained & ~_in_step(tokens)
        passes |= no_grad & _alone_with_loader(tokens)
    return TokenLine(row=row, kind=tokens, evaluation=_with_loader(tokens, passes))


def _in_step(kind: Codes) -> Bools:
    """Passes between a batch and the training that uses it, where most steps have one."""
    loader, train = LOADER[kind], _TRAIN[kind]
    mark = loader | train
    before, after = previous_of(mark), next_of(mark)
    fetched = (before >= 0) & (kind[before] == schema.DATA)
    fetched &= ~np.append(_NO_GRAD[kind], False)[previous_of(~loader)][before]  # its own loop
    used = np.append(train, False)[after]
    found: Bools = (kind == schema.EVAL) & fetched & used
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
    following = next_of(~LOADER[kind])
    core: Bools = passes | (FETCH[kind] & np.append(passes, False)[following])
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
    """The training part of the token line, one row per token."""

    closing: Bools
    """Optimizer or scaler step; what stands for it where no optimizer is seen."""
    tag: Codes
    """Which optimizer, where closing."""
    work: Bools
    """Forward or backward that separates two closing tokens."""
    holds_work: Bools
    """Closing tokens with forward or backward inside (closures)."""
    fetch: Bools
    """Loader tokens that a step can begin with."""
    by: int | None = None
    """What stands in for the optimizer, an index into BOUNDARIES; None where it was seen itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """One row per step."""

    first: Ints
    """Its first token."""
    last_closing: Ints
    """Its last closing token."""
    by_loader: Bools
    """Whether it begins with a loader token."""
    boundary: Codes
    """Index into BOUNDARIES."""
    confidence: npt.NDArray[np.float64]
    """One of the constants above."""
    rest: int
    """First token after the last step; a loader token where `rest_by_loader`."""
    rest_by_loader: bool
    """Whether the next step had begun when the recording ended."""


def find_boundaries(tokens: TrainTokens) -> Boundaries:
    """Cuts the line into steps.

    A segment begins with the first batch after an optimizer step. Inside a segment, and where
    there is no loader, a step begins when an optimizer that has stepped steps again after more
    forward or backward; unless nearly all segments hold the same number of those (an inner loop).
    """
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
    rest_by_loader = len(pending) > 0 and len(head) > 0
    boundary, confidence = _grade(tokens, by_loader, split[step_segment], run[head], run)
    return Boundaries(
        first=first,
        last_closing=last,
        by_loader=by_loader,
        boundary=boundary,
        confidence=confidence,
        rest=int(pending[0]) if rest_by_loader else rest,
        rest_by_loader=rest_by_loader,
    )


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
    """Positions (among closing tokens) of the first of each step.

    A run opens a step when one of its optimizers has already stepped in the step before it.
    """
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
