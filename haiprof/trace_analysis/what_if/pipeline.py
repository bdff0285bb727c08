"""Dependencies in a step of a Megatron pipeline: streams, sends, collectives, optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import polars as pl

from haiprof.base.errors import MissingDataError

FORWARD, BACKWARD = "forward-compute", "backward-compute"
COMPUTING = (FORWARD, BACKWARD)
PEER = {
    "forward-send": ("forward-recv", 1),
    "backward-send": ("backward-recv", -1),
}
"""Sending operation: the receiving one, and how many stages away it is."""
SENDS_AND_RECEIVES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
OVER_DATA_PARALLEL = (GATHER, SCATTER, SEPARATE)
COLLECT, LAYERNORM, EMBEDDING = "gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, OPTIMIZER = "optimizer-clip-main-grad", "optimizer"


class Operation(NamedTuple):
    """One operation of a step, the same on every data-parallel rank."""

    optype: str
    seq_id: int
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Dependencies of one data-parallel rank; they are the same for all."""

    after: tuple[tuple[Operation, Operation], ...]
    """(earlier, later): the later starts once the earlier has ended."""
    groups: tuple[tuple[Operation, ...], ...]
    """Operations that transfer only once all of them have started."""
    over_ranks: frozenset[Operation]
    """Those whose group also spans the data-parallel ranks."""


def dependencies(step: pl.DataFrame) -> Dependencies:
    """The dependency model of a step.

    Source: Lin et al., "Understanding Stragglers in Large Model Training Using What-if
    Analysis" (OSDI 2025), section 3, and the notes of its artifact (ByteDance-Seed/
    StragglerAnalysis): order within a stream; a receive before its computing, and after the
    computing before that one; a send after its computing; the first sends and receives of the
    backward pass are posted after the last but one forward computing before it; gradients,
    clipping and optimizer at the end; parameters gathered before the first forward.
    """
    stages = {
        int(key[0]): _Stage.of(rows)
        for key, rows in step.sort("stage").group_by("stage", maintain_order=True)
    }
    if "mc" in step.columns and int(step["mc"].max() or 0) > 0:  # type: ignore[arg-type]
        raise MissingDataError("several model chunks per stage (virtual stages) are not modelled")
    last = max(stages)
    after = [pair for stage in stages.values() for pair in stage.waits(last)]
    here = frozenset(operation for stage in stages.values() for operation in stage.operations)
    return Dependencies(
        after=tuple(dict.fromkeys(after)),
        groups=tuple(_groups(here, last)),
        over_ranks=frozenset(o for o in here if o.optype in (*OVER_DATA_PARALLEL, CLIP)),
    )


def _groups(here: frozenset[Operation], last: int) -> Iterator[tuple[Operation, ...]]:
    """Operations that start a transfer together; each operation is in one group at most."""
    for operation in sorted(here):
        if operation.optype in PEER:
            other, distance = PEER[operation.optype]
            peer = Operation(other, operation.seq_id, operation.stage + distance)
            yield (operation, peer) if peer in here else (operation,)
        elif operation.optype in OVER_DATA_PARALLEL:
            yield (operation,)
    for optype, stages in ((EMBEDDING, {0, last}), (CLIP, set(range(last + 1)))):
        members = tuple(Operation(optype, 0, stage) for stage in sorted(stages))
        if found := tuple(member for member in members if member in here):
            yield found


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage's operations, by their start."""

    stage: int
    operations: tuple[Operation, ...]
    last_to_end: Operation

    @classmethod
    def of(cls, rows: pl.DataFrame) -> _Stage:
        rows = rows.sort("start_ns", "seq_id", "optype")
        operations = [Operation(*row) for row in rows.select("optype", "seq_id", "stage").rows()]
        computing = rows.filter(pl.col("optype").is_in(COMPUTING))
        for optype in COMPUTING:
            if optype not in computing["optype"]:
                raise MissingDataError(f"stage {operations[0].stage} has no {optype} in the table")
        last = computing.row(int(computing["end_ns"].arg_max() or 0), named=True)
        return cls(
            operations[0].stage,
            tuple(operations),
            Operation(last["optype"], last["seq_id"], last["stage"]),
        )

    def waits(self, last: int) -> Iterator[tuple[Operation, Operation]]:
        """All pairs (earlier, later) within the stage."""
        computing = self.these(*COMPUTING)
        yield from _chain(computing)
        yield from _chain(self.these(GATHER, SCATTER))
        for optype in SENDS_AND_RECEIVES:
            yield from _chain(self.these(optype))
            yield from self._around_computing(optype)
        yield from self._first_of_backward(computing)
        for gather in self.these(GATHER)[-1:]:
            yield gather, self.these(FORWARD)[0]
        yield from self._after_computing(last)

    def these(self, *optypes: str) -> list[Operation]:
        """The operations of some types, by their start."""
        return [operation for operation in self.operations if operation.optype in optypes]

    def _around_computing(self, optype: str) -> Iterator[tuple[Operation, Operation]]:
        computing = self.these(FORWARD if optype.startswith("forward") else BACKWARD)
        moves = self.these(optype)
        if moves and len(moves) != len(computing):
            raise MissingDataError(
                f"stage {self.stage}: {len(moves)} {optype}, but {len(computing)} computing"
            )
        for number, (move, compute) in enumerate(zip(moves, computing, strict=False)):
            if optype.endswith("send"):
                yield compute, move
                continue
            yield move, compute
            if number:
                yield computing[number - 1], move

    def _first_of_backward(
        self, computing: Sequence[Operation]
    ) -> Iterator[tuple[Operation, Operation]]:
        first = next(i for i, o in enumerate(computing) if o.optype == BACKWARD)
        if first < 2:
            return
        for optype in ("backward-recv", "backward-send"):
            for move in self.these(optype)[:1]:
                yield computing[first - 2], move

    def _after_computing(self, last: int) -> Iterator[tuple[Operation, Operation]]:
        scatters, separate = self.these(SCATTER), self.these(SEPARATE)
        tail = [self.last_to_end, *self.these(COLLECT), *self.these(LAYERNORM)]
        tail += self.these(EMBEDDING) if self.stage in (0, last) else []
        if separate:  # reduce-scatters run beside the computing, and only the rest comes after it
            yield from ((self.these(BACKWARD)[-1], scatter) for scatter in scatters[:1])
            yield from ((scatters[-1], o) for o in self.these(LAYERNORM) if scatters)
        tail += separate or scatters
        yield from _chain([*tail, *self.these(CLIP), *self.these(OPTIMIZER)])


def _chain(operations: Iterable[Operation]) -> Iterator[tuple[Operation, Operation]]:
    return pairwise(operations)
