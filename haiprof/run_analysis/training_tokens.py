"""The line of outermost spans: which of them are training, and which are evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from haiprof.base.intervals import Ints
from haiprof.run_analysis.nesting import Bools, Codes, Nested, kind_table
from haiprof.run_format import schema

_LOADER = kind_table(schema.DATA, schema.DATA_END, schema.DATA_ITER)
_FETCH = kind_table(schema.DATA, schema.DATA_ITER)
_CLOSING = kind_table(schema.OPTIMIZER, schema.SCALER)
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
    family = _family_table(families)
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


def _family_table(families: Mapping[int, int]) -> Ints:
    """Small family number by tag; a tag without a root line is a family of its own."""
    named = {tag: family for tag, family in families.items() if 0 <= tag < schema.TAG_MASK}
    number = {family: i for i, family in enumerate(sorted(set(named.values())))}
    table = np.arange(schema.TAG_MASK + 1) + len(number)
    for tag, family in named.items():
        table[tag] = number[family]
    return table


def _in_step(kind: Codes) -> Bools:
    """Passes between a batch and the training that uses it, where most steps have one."""
    loader, train = _LOADER[kind], _TRAIN[kind]
    mark = loader | train
    before, after = previous_of(mark), next_of(mark)
    fetched = (before >= 0) & (kind[before] == schema.DATA)
    fetched &= ~np.append(_NO_GRAD[kind], False)[previous_of(~loader)][before]  # its own loop
    used = np.append(train, False)[after]
    found: Bools = (kind == schema.EVAL) & fetched & used
    steps = int(_CLOSING[kind].sum()) or int((kind == schema.BACKWARD).sum())
    batches = np.count_nonzero(np.diff(before[found], prepend=-1))
    if batches < max(1.0, IN_STEP_PASS_RATIO * steps):
        return np.zeros(len(kind), dtype=np.bool_)
    return found


def _alone_with_loader(kind: Codes) -> Bools:
    """Positions after a batch where no training happens until the next batch or the end."""
    loader = _LOADER[kind]
    before, after = previous_of(loader), next_of(loader)
    trained = np.concatenate([[0], np.cumsum(_TRAIN[kind])])
    alone: Bools = (before >= 0) & (trained[after] == trained[before + 1])
    return alone


def _with_loader(kind: Codes, passes: Bools) -> Bools:
    """Evaluation passes, the batches fetched for them, and the end of their loader."""
    following = next_of(~_LOADER[kind])
    core: Bools = passes | (_FETCH[kind] & np.append(passes, False)[following])
    end = kind == schema.DATA_END
    if not end.any() or not core.any():
        return core
    inside = np.append(core, False)[previous_of(~end)]  # -1 takes the appended False
    fetched = np.append(np.cumsum(core & (kind == schema.DATA)), 0)
    since = np.maximum(previous_of(end), previous_of(~core & ~end))
    own_batches = fetched[:-1] > fetched[since]
    core |= end & inside & own_batches
    return core
