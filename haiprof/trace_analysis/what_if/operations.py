"""What-if on operation tables of a Megatron pipeline: dependencies, stragglers, their cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.intervals import Bools, Ints
from haiprof.trace_analysis.what_if.predict import Plan, plan_graph, times

FORWARD, BACKWARD = "forward-compute", "backward-compute"
COMPUTING = (FORWARD, BACKWARD)
PEER = {"forward-send": ("forward-recv", 1), "backward-send": ("backward-recv", -1)}
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
    over_ranks: frozenset[Operation]  # those whose group also spans the data-parallel ranks


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
        if missing := [optype for optype in COMPUTING if optype not in computing["optype"]]:
            raise MissingDataError(f"stage {operations[0].stage} has no {missing[0]} in the table")
        last = computing.row(int(computing["end_ns"].arg_max() or 0), named=True)
        return cls(
            operations[0].stage,
            tuple(operations),
            Operation(last["optype"], last["seq_id"], last["stage"]),
        )

    def waits(self, last: int) -> Iterator[tuple[Operation, Operation]]:
        """All pairs (earlier, later) within the stage."""
        computing = self.these(*COMPUTING)
        yield from pairwise(computing)
        yield from pairwise(self.these(GATHER, SCATTER))
        for optype in SENDS_AND_RECEIVES:
            moves = self.these(optype)
            yield from pairwise(moves)
            own = self.these(FORWARD if optype.startswith("forward") else BACKWARD)
            if moves and len(moves) != len(own):
                raise MissingDataError(
                    f"stage {self.stage}: {len(moves)} {optype}, but {len(own)} computing"
                )
            if optype.endswith("send"):
                yield from zip(own, moves, strict=False)
            else:
                yield from zip(moves, own, strict=False)
                yield from zip(own, moves[1:], strict=False)
        first = next(i for i, o in enumerate(computing) if o.optype == BACKWARD)
        for optype in ("backward-recv", "backward-send") if first > 1 else ():
            yield from ((computing[first - 2], move) for move in self.these(optype)[:1])
        for gather in self.these(GATHER)[-1:]:
            yield gather, self.these(FORWARD)[0]
        scatters, separate = self.these(SCATTER), self.these(SEPARATE)
        tail = [self.last_to_end, *self.these(COLLECT), *self.these(LAYERNORM)]
        tail += self.these(EMBEDDING) if self.stage in (0, last) else []
        if separate:  # reduce-scatters run beside the computing, and only the rest comes after it
            yield from ((self.these(BACKWARD)[-1], scatter) for scatter in scatters[:1])
            yield from ((scatters[-1], o) for o in self.these(LAYERNORM) if scatters)
        tail += separate or scatters
        yield from pairwise([*tail, *self.these(CLIP), *self.these(OPTIMIZER)])

    def these(self, *optypes: str) -> list[Operation]:
        """The operations of some types, by their start."""
        return [operation for operation in self.operations if operation.optype in optypes]


COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
COMMUNICATION = (*SENDS_AND_RECEIVES, *OVER_DATA_PARALLEL, LAYERNORM, EMBEDDING, CLIP)
"""Types whose ideal duration is the median; that of all others is the mean."""
SLOWEST_WORKER_RATIO = 0.03
"""M_W asks how much of the slowdown this share of the workers explains (the paper's 3 %)."""
SHOWN_AS = {kind: f"{kind.split('-')[0]}-pp-comm" for kind in SENDS_AND_RECEIVES}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTable:
    """A job's operations: a row per operation and data-parallel rank, a column per step."""

    rows: pl.DataFrame  # `optype`, `seq_id`, `stage`, `dp_rank`, `rank`; shape (rows,)
    steps: Ints  # step numbers, shape (steps,)
    starts: Ints  # ns since the step's start, shape (rows, steps)
    ends: Ints  # ns since the step's start, shape (rows, steps)
    model: Dependencies


def operation_table(source: str | Path | pl.DataFrame) -> OperationTable:
    """Reads a table of operations."""
    begin, lasting = ((pl.col(name).cast(pl.Float64) * 1e9).round().cast(pl.Int64)
                      for name in ("start_ts", "duration"))  # fmt: skip
    try:
        table = source if isinstance(source, pl.DataFrame) else pl.read_parquet(Path(source))
        if missing := [name for name in COLUMNS if name not in table.columns]:
            raise MissingDataError(f"operation table without column {', '.join(missing)}")
        found = table.with_columns(
            pl.col("optype").cast(pl.String),
            pl.col("stage", "seq_id", "dp_rank", "rank", "step").cast(pl.Int64),
            start_ns=begin, end_ns=begin + lasting,
        )  # fmt: skip
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = " ".join(str(error).split())
        raise TraceFormatError(f"{source}: no table of operations: {reason}") from None
    used = found.select(*COLUMNS, "start_ns", "end_ns")
    if not used.height or sum(used.null_count().row(0)):
        raise TraceFormatError("operation table: it is empty, or values are missing")
    if used.filter(pl.col("end_ns") < pl.col("start_ns")).height:
        raise TraceFormatError("operation table: a duration is negative")
    table = found.sort("optype", "seq_id", "stage", "dp_rank", "step")
    steps = table["step"].unique().sort()
    rows = table.filter(pl.col("step") == steps[0])
    keys = ("optype", "seq_id", "stage", "dp_rank")
    expected = rows.select(*keys).join(pl.DataFrame({"step": steps}), how="cross")
    if not expected.equals(table.select(*keys, "step")):
        raise TraceFormatError("operation table: not every rank has every operation in every step")
    shape = (rows.height, len(steps))
    first = rows.filter(pl.col("dp_rank") == rows["dp_rank"].min())
    return OperationTable(
        rows=rows.select(*keys, "rank"), steps=steps.to_numpy(),
        starts=table["start_ns"].to_numpy().reshape(shape),
        ends=table["end_ns"].to_numpy().reshape(shape), model=dependencies(first),
    )  # fmt: skip


def operation_files(path: Path) -> list[Path]:
    """The tables of operations that a path means: one, or all of a folder; none of other paths."""
    if path.is_dir():
        return sorted(path.glob("*.parquet")) if not (path / "traces").is_dir() else []
    return [path] if path.suffix == ".parquet" else []


class OperationWhatIf:
    """A job's step replayed: as it was, with every operation as fast as the others, and in between.

    Source: Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis"
    (OSDI 2025): S in equation 1, S_t in 2, S_w in 4, M_W in 5, M_S in section 5.2. Time in which
    the CPU had not launched an operation yet is not modelled; `error_ratio` is what that costs.
    """

    def __init__(self, table: OperationTable) -> None:
        self.table = table

    @cached_property
    def _plan(self) -> tuple[Plan, Ints]:
        """The graph of a whole step, operations first, and each one's transfer, or -1."""
        rows, model = self.table.rows.height, self.table.model
        columns = self.table.rows.select("optype", "seq_id", "stage", "dp_rank").rows()
        place = {(Operation(*row[:3]), row[3]): at for at, row in enumerate(columns)}
        ranks = self.table.rows["dp_rank"].unique().to_list()
        transfer_of = np.full(rows, -1)
        count = 0
        for group in model.groups:
            together = [ranks] if group[0] in model.over_ranks else [[rank] for rank in ranks]
            for members in together:
                transfer_of[[place[o, rank] for o in group for rank in members]] = count
                count += 1
        waits = [(rows + place[a, rank], place[b, rank]) for a, b in model.after for rank in ranks]
        later, earlier = np.array([b for _, b in waits]), np.array([a for a, _ in waits])
        everyone = np.arange(rows)
        enters = np.flatnonzero(transfer_of >= 0)
        begins = np.where(transfer_of >= 0, 2 * rows + transfer_of, everyone)
        sources = np.concatenate([begins, earlier, enters])
        targets = np.concatenate([rows + everyone, later, 2 * rows + transfer_of[enters]])
        return plan_graph(2 * rows + count, sources, targets), transfer_of

    @property
    def measured_ns(self) -> Ints:
        """Duration of each step in the table, shape (steps,)."""
        span: Ints = self.table.ends.max(axis=0) - self.table.starts.min(axis=0)
        return span

    @cached_property
    def reproduced_ns(self) -> Ints:
        """Duration of each step, replayed with its own durations, shape (steps,)."""
        return self.replay(self.durations_ns)

    @cached_property
    def ideal_ns(self) -> Ints:
        """Duration of each step if no operation was slower than others of its type."""
        return self.replay(self.ideal_durations_ns)

    @property
    def error_ratio(self) -> float:
        """How far the replay is from what was measured: mean step over mean step, less one."""
        return float(self.reproduced_ns.mean() / self.measured_ns.mean() - 1)

    @property
    def slowdown_ratio(self) -> float:
        """S: mean step as replayed over mean ideal step."""
        return float(self.reproduced_ns.mean() / self.ideal_ns.mean())

    @cached_property
    def durations_ns(self) -> Ints:
        """Of each operation, shape (rows, steps); of a transfer once all have started."""
        starts, transfer_of = self.table.starts.copy(), self._plan[1]
        members = np.flatnonzero(transfer_of >= 0)
        of = transfer_of[members]
        last = np.full((of.max(initial=-1) + 1, starts.shape[1]), np.iinfo(np.int64).min)
        np.maximum.at(last, of, starts[members])
        starts[members] = last[of]
        lasting: Ints = np.maximum(self.table.ends - starts, 0)
        return lasting

    @cached_property
    def ideal_durations_ns(self) -> Ints:
        """The mean of each type over ranks, stages and steps; the median of transfers."""
        found = np.empty_like(self.durations_ns)
        optypes = self.table.rows["optype"].to_numpy()
        for optype in np.unique(optypes):
            these = optypes == optype
            middle = np.median if optype in COMMUNICATION else np.mean
            found[these] = round(float(middle(self.durations_ns[these])))
        return found

    def replay(self, durations_ns: Ints) -> Ints:
        """Duration of each step, shape (steps,), with given durations of the operations."""
        plan = self._plan[0]
        lengths = np.zeros((len(plan.sources), durations_ns.shape[1]), dtype=np.int64)
        lengths[: len(durations_ns)] = durations_ns
        ends: Ints = times(plan, lengths).max(axis=0)
        return ends

    def only(self, rows: Bools) -> float:
        """Slowdown if some operations had their own durations and all others the ideal ones."""
        durations = np.where(rows[:, None], self.durations_ns, self.ideal_durations_ns)
        return float(self.replay(durations).mean() / self.ideal_ns.mean())

    def explained_ratio(self, rows: Bools) -> float | None:
        """Share of the slowdown that goes away once some operations are ideal, if it has any."""
        durations = np.where(rows[:, None], self.ideal_durations_ns, self.durations_ns)
        real, ideal = self.reproduced_ns.mean(), self.ideal_ns.mean()
        return (
            float((real - self.replay(durations).mean()) / (real - ideal)) if real > ideal else None
        )

    def by(self, column: str) -> pl.DataFrame:
        """Slowdown due to each type of operation, stage or rank alone (the paper's S_t and S_w)."""
        labels = self.table.rows[column]
        labels = labels.replace(old=SHOWN_AS) if column == "optype" else labels
        groups = labels.unique().sort()
        ratios = [self.only((labels == group).to_numpy()) for group in groups]
        return pl.DataFrame({column: groups, "slowdown_ratio": ratios}).sort(
            "slowdown_ratio", descending=True, maintain_order=True
        )

    def by_worker(self) -> pl.DataFrame:
        """Slowdown due to each worker: the smaller of its stage's and its data-parallel rank's."""
        workers = self.table.rows.select("rank", "stage", "dp_rank").unique()
        stage, rank = self.by("stage"), self.by("dp_rank").rename({"slowdown_ratio": "other"})
        joined = workers.join(stage, on="stage").join(rank, on="dp_rank")
        smaller = pl.min_horizontal("slowdown_ratio", "other").alias("slowdown_ratio")
        return joined.select("rank", "stage", "dp_rank", smaller).sort(
            ["slowdown_ratio", "rank"], descending=[True, False]
        )

    def slowest_workers_ratio(self) -> float | None:
        """M_W: share of the slowdown that the slowest 3 % of the workers (at least one) explain."""
        workers = self.by_worker()["rank"]
        count = -int(-len(workers) * SLOWEST_WORKER_RATIO // 1)
        return self.explained_ratio(self.table.rows["rank"].is_in(workers[:count]).to_numpy())

    def last_stage_ratio(self) -> float | None:
        """M_S: share of the slowdown that the last stage explains; above 1 where it is more."""
        stages = self.table.rows["stage"]
        return self.explained_ratio((stages == stages.max()).to_numpy())
