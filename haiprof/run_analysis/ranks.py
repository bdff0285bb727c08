"""The frame of ranks: who reported in, what was recorded, what it cost; all on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.intervals import Bools, Floats, Intervals, Ints, intersection, total, union
from haiprof.run_analysis.nesting import MODULE_KINDS, kind_table, take_rows
from haiprof.run_analysis.run_files import RankFiles, entries, integer, mapping, number, text
from haiprof.run_analysis.step_frame import (
    STEP_PHASES,
    RankSegments,
    SharedColumns,
    cut_segments,
    pause_frame,
    slow_frame,
    step_frame,
)
from haiprof.run_analysis.step_positions import StepPositions, step_positions
from haiprof.run_analysis.steps import BY_MARK, NOGRAD_PHASE, PHASES
from haiprof.run_analysis.windows import TraceWindow, traced_steps
from haiprof.run_format import schema
from haiprof.trace_format.frame_columns import Columns, types_of

_LIMIT_US = 1 << 52


def compile_intervals(files: RankFiles) -> Intervals:
    """Unix time in ns of all compilations, those of backward graphs included.

    Source: `torch._dynamo.utils.get_compilation_metrics`. One that compiles another counts once.
    """
    spans = [entries(span) for x in files.of_type("compile") for span in entries(x.get("spans"))]
    pairs = [[integer(at) for at in span] for span in spans if len(span) == 2]
    known = [p for p in pairs if all(at is not None and 0 <= at < _LIMIT_US for at in p)]
    table = np.array(known, dtype=np.int64).reshape(-1, 2) * 1_000
    return union(table[:, 0], table.sum(axis=1))


LOADING_SCHEMA = dict.fromkeys(("rank", "attempt", "epoch_count", "epoch_ns", "wait_ns"), pl.Int64)
"""Waits for the loader in the training steps after a rank's first one."""
_LOADER_PHASE = 0  # in steps.SPAN_PHASES

RANK_COLUMNS: Columns = {
    "rank": (pl.Int64, "of the process"),
    "attempt": (pl.Int64, "restart of the rank, from 0"),
    "host": (pl.String, "node"),
    "pid": (pl.Int64, "process"),
    "local_rank": (pl.Int64, "on its node"),
    "world_size": (pl.Int64, "ranks of the job"),
    "python": (pl.String, "version"),
    "torch": (pl.String, "version"),
    "device": (pl.String, "its name"),
    "gpu_uuid": (pl.String, "of the device"),
    "step_count": (pl.Int64, "training steps"),
    "eval_ns": (pl.Int64, "in evaluations"),
    "nograd_ns": (pl.Int64, "calls of models without gradients in training steps"),
    "compile_ns": (pl.Int64, "torch.compile at work"),
    "eval_compile_ns": (pl.Int64, "of that, in evaluations"),
    "unfinished_micro_step_count": (pl.Int64, "after the last step"),
    "record_start_ns": (pl.Int64, "Unix time"),
    "record_end_ns": (pl.Int64, "Unix time"),
    "recording_ended": (pl.String, "time or exit; null: killed, or still running"),
    "cost_ns_per_step": (pl.Float64, "haiprof's own time in the training thread"),
    "cost_ratio": (pl.Float64, "of the job's time"),
    "beside_cpu_ratio": (pl.Float64, "share of one CPU that haiprof's threads in the job use"),
    "notes": (pl.List(pl.String), "what was cut, damaged or missing"),
}
RANK_SCHEMA = types_of(RANK_COLUMNS)


def rank_row(files: RankFiles, segments: RankSegments | None) -> dict[str, object]:
    """The row of one rank; without segments where its spans cannot be read."""
    report = files.report
    row: dict[str, object] = {"rank": files.rank, "attempt": files.attempt}
    row.update({n: integer(report.get(n)) for n in ("pid", "local_rank", "world_size")})
    row.update({n: text(report.get(n)) for n in ("host", "python", "torch", "device", "gpu_uuid")})
    if segments is not None:
        found = segments.found
        row["step_count"] = segments.step_count
        evaluated = evaluations(segments)
        row["eval_ns"] = total(evaluated)
        row["nograd_ns"] = nograd_ns(segments)
        compiled = compile_intervals(files)
        row["compile_ns"] = total(compiled)
        row["eval_compile_ns"] = total(intersection(union(*evaluated), compiled))
        row["unfinished_micro_step_count"] = found.unfinished_micro_step_count
        row.update(_cost(files, segments))
    offset = files.clock_offset_ns if segments is None else segments.wall_offset_ns
    begun, ended = files.first("record_start"), files.last("record_end")
    row["recording_ended"] = text(ended.get("reason"))
    for name, line in (("record_start_ns", begun), ("record_end_ns", ended)):
        time = integer(line.get("time_ns"))
        row[name] = None if time is None or offset is None else integer(time + offset)
    row["notes"] = list(_rank_notes(files, segments))
    return row


def evaluations(rank: RankSegments) -> Intervals:
    """When a rank evaluated, Unix time in ns."""
    parts = zip(rank.folded.evaluations, rank.found.evaluations, strict=True)
    return Intervals(*(np.append(*edges) for edges in parts)).shift(rank.wall_offset_ns)


def nograd_ns(rank: RankSegments) -> int:
    """Time of calls without gradients in training steps, which are no evaluation."""
    found = rank.found
    inside: Bools = (found.phase == NOGRAD_PHASE) & (found.step >= 0)
    return int(found.nested.self_ns[inside].sum()) + rank.folded.fact("nograd_ns")


def root_calls(rank: RankSegments) -> dict[int, int]:
    """By tag of a root module: its calls."""
    spans = rank.found.nested.spans
    own = np.bincount(spans.tag[kind_table(*MODULE_KINDS)[spans.kind]].astype(np.int64))
    calls = {tag: int(own[tag]) for tag in np.flatnonzero(own).tolist()}
    for tag, count in rank.folded.roots().items():
        calls[tag] = calls.get(tag, 0) + count
    return calls


def loading_row(rank: RankSegments) -> tuple[int, int, int]:
    """Of its loader: starts of epochs, time of these, all waits; in the steps after the first."""
    found = rank.found
    spans, least = found.nested.spans, -1 if rank.first_step else 0
    chosen = np.flatnonzero((found.phase == _LOADER_PHASE) & (found.step > least))
    kind, own = spans.kind[chosen], found.nested.self_ns[chosen]
    starts = kind == schema.DATA_ITER
    first = np.append(False, starts[:-1])[: len(starts)] & (kind == schema.DATA)
    edge = starts | first | (kind == schema.DATA_END)
    before = rank.folded.fact
    return (int(starts.sum()) + before("epoch_count"), int(own[edge].sum()) + before("epoch_ns"),
            int(own.sum()) + before("loading_ns"))  # fmt: skip


def pauses_sum(rank: RankSegments) -> tuple[int, int, int]:
    """Of its folded collector pauses: how many, their sum and the longest in ns."""
    fact = rank.folded.fact
    return fact("gc_count"), fact("gc_ns"), fact("gc_longest_ns")


def _cost(files: RankFiles, segments: RankSegments) -> dict[str, object]:
    """From the last cost line, whose numbers are cumulative."""
    # Of the training thread: the calibrated time of all spans and of calls of modules inside the
    # roots, and for how long sampling held it up. Beside it: CPU time of haiprof's threads in the
    # job (draining, sampling), of the time so far.
    line, steps = files.last("cost"), segments.found.steps
    step_ns, count = int(steps.step_ns.sum()), segments.step_count
    if not line or not count:
        return {}
    until = integer(line.get("time_ns"))  # a job that was killed wrote none at its end
    later = 0 if until is None else int((steps.start_ns >= until).sum())
    counted = max(count - later, 1)
    step_ns += int(segments.folded.blocks["step_ns"].sum())
    # Calls of modules inside the roots, about: each passes through the hook's first line.
    inner = {integer(x.get("tag")): integer(x.get("module_count")) for x in files.of_type("root")}
    calls = sum(n * ((inner.get(tag) or 1) - 1) for tag, n in root_calls(segments).items())
    calls = calls * counted // count
    events, event_ns, call_ns, held_ns, drain_ns, sampling_ns, elapsed_ns = (
        number(line.get(name)) for name in (
            "event_count", "event_ns", "module_call_ns", "sampling_held_ns", "drain_cpu_ns",
            "sampling_cpu_ns", "elapsed_ns")
    )  # fmt: skip
    row: dict[str, object] = {}
    if events is not None and event_ns is not None:
        per_step = (events * event_ns + calls * (call_ns or 0.0) + (held_ns or 0.0)) / counted
        mean = step_ns / count
        row = {"cost_ns_per_step": per_step, "cost_ratio": per_step / mean if mean else None}
    if drain_ns is not None and elapsed_ns:
        row["beside_cpu_ratio"] = (drain_ns + (sampling_ns or 0.0)) / elapsed_ns
    return row


def _rank_notes(files: RankFiles, segments: RankSegments | None) -> tuple[str, ...]:
    """Everything that a reader of this rank's numbers should know."""
    notes = list(files.notes)
    if segments is not None:
        notes += segments.notes
        notes += folded_notes(segments)
        if left := segments.found.unfinished_micro_step_count:
            count = f"{left} forward and backward pass{'es' if left > 1 else ''}"
            verb = "belongs" if left == 1 else "belong"
            notes.append(f"{count} after the last step {verb} to no step")
        boundary = segments.found.steps.boundary  # steps that are no training lack phases
        trains = not len(boundary) or int(boundary[0]) < BY_MARK
        notes += [
            f"{phase}: {_why_missing(files, phase)}"
            for phase, seen in zip(PHASES, segments.seen.tolist(), strict=True)
            if trains and not seen
        ]
    patches = files.of_type("patch_failed")
    notes += [f"{line.get('phase')} is not measured: {line.get('reason')}" for line in patches]
    faults = files.of_type("hook_error")
    notes += [f"fault in the hook ({line.get('where')}): {line.get('reason')}" for line in faults]
    for line in files.of_type("descriptor_lost"):
        went_on = "it was opened again, nothing is missing"
        came = went_on if line.get("reopened") is True else "what came after is missing"
        notes.append(f"the job closed haiprof's descriptor of {line.get('file')}: {came}")
    if dropped := integer(files.last("cost").get("dropped_bytes")):
        notes.append(f"{dropped} bytes of records did not fit on the disk")
    return tuple(text(note) or "" for note in notes)


def folded_notes(rank: RankSegments) -> list[str]:
    """For which part of a rank's steps detail is gone."""
    folded = rank.folded
    if not folded.step_count:
        return []
    whole = len(folded.slow["step"])
    left_out = folded.fact("slow_left_out")
    many = f", of {left_out:,} more slow ones their sums alone" if left_out else ""
    return [
        f"steps 0 to {folded.step_count - 1:,} are kept as sums of {len(folded.count):,} blocks and"
        f" every Nth sample, {whole:,} slow ones whole{many}; all totals count them, medians and "
        f"single steps are of step {folded.step_count:,} on"
    ]


def _why_missing(files: RankFiles, phase: str) -> str:
    """Why a phase is null in this rank."""
    reason = text(mapping(files.report.get("phases")).get(phase))
    if reason and reason != "ok":
        return reason
    return {
        "dataloader": "no torch DataLoader ran in a training step",
        "forward": "no module call seen in a training step (compiled whole, or plain functions)",
        "backward": "no call of the autograd engine seen in a training step",
        "optimizer": "no torch optimizer stepped (compiled whole, or another library's)",
    }[phase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of folded steps: sums of each."""

    first_step: Ints
    count: Ints  # how many steps
    start_ns: Ints  # Unix time
    end_ns: Ints
    step_ns: Ints
    traced: Bools
    idle_ns: Floats  # of the mean step, how long at most the device was idle; NaN where not known
    pauses: tuple[int, int, int]  # collector pauses of all: how many, their sum, the longest in ns

    def take(self, rows: Bools) -> Blocks:
        """The chosen ones."""
        return take_rows(self, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """A tenth of what the rank's spans take."""

    record_end: int  # place after the records that its spans were read from
    wall_offset_ns: int  # Unix time minus the clock of the spans
    step_count: int  # of the whole recording, folded ones too
    steps: pl.DataFrame  # of the whole recording, but for folded ones; columns of `step_frame`
    first: pl.DataFrame | None  # its first step, where that was folded
    blocks: Blocks  # its folded steps
    pauses: pl.DataFrame  # of the whole recording; columns of `phase_frame`
    loading: tuple[int, ...]  # its row in LOADING_SCHEMA
    rank: Mapping[str, object]  # its row in RANK_SCHEMA
    positions: Mapping[int, Ints]
    """[block, and then step] in ns of the whole recording, by index into POSITIONS; that of
    collections in a position comes len(POSITIONS) later. Those that the rank never was in are left
    out."""


def rank_rows(
    rank: RankSegments, windows: Sequence[TraceWindow], *, between: tuple[int, int] | None,
    shared: SharedColumns,
) -> RankRows:  # fmt: skip
    """The rows of one rank."""
    row = rank_row(rank.files, rank)
    cut = rank
    if between is not None:
        cut = cut_segments(rank, between)
        inside = rank_row(rank.files, cut)
        counted = ("step_count", "eval_ns", "nograd_ns", "eval_compile_ns")
        row |= {name: inside.get(name) for name in counted}
    # Small numbers are stored small: of a thousand ranks they are much.
    before = np.concatenate([rank.folded.plain_ns, rank.folded.collected_ns])
    times = np.concatenate([before, np.concatenate(rank_positions(rank).sums())], axis=1)
    epoch_count, epoch_ns, loading_ns = loading_row(cut)
    return RankRows(
        record_end=rank.record_end, wall_offset_ns=rank.wall_offset_ns, step_count=rank.step_count,
        steps=step_frame(rank, traced_steps(rank, windows), shared=shared),
        first=slow_frame(rank, limit=1) if rank.first_step else None,
        blocks=_blocks(rank), pauses=pause_frame(rank),
        loading=(rank.files.rank, rank.files.attempt, epoch_count, epoch_ns * (epoch_count > 0),
                 loading_ns),
        rank=row,
        positions={
            at: small if (small == ns).all() else ns.copy()
            for at, ns in enumerate(times) if ns.any() for small in [ns.astype(np.uint32)]
        },
    )  # fmt: skip


def _blocks(rank: RankSegments) -> Blocks:
    folded, shift, blocks = rank.folded, rank.wall_offset_ns, rank.folded.blocks
    return Blocks(
        first_step=folded.first_step, count=folded.count, start_ns=blocks["start_ns"] + shift,
        end_ns=folded.end_ns + shift, step_ns=blocks["step_ns"], traced=blocks["traced"] > 0,
        idle_ns=blocks["idle_ns"].astype(np.float64), pauses=pauses_sum(rank),
    )  # fmt: skip


def rank_positions(rank: RankSegments) -> StepPositions:
    """Where a rank's training thread was at each moment."""
    compiled = compile_intervals(rank.files).shift(-rank.wall_offset_ns)
    return step_positions(rank.found, rank.events, compiled)


COLUMN_LIMIT = 480
_CELL_LIMIT = 200_000
_LEAST_COLUMNS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """Mean times of the steps that touch each stretch; NaN where a rank has none."""

    ranks: tuple[int, ...]  # the rows, in order
    start_ns: int  # Unix time at which the first stretch begins
    end_ns: int  # Unix time at which the last one ends
    phase_ns: Mapping[str, Floats]  # [rank, stretch] on the host clock, by phase; together the step
    typical_ns: Mapping[str, float | None]
    """Median over all steps of all ranks: of `step` and of each phase; None where never seen."""

    @property
    def column_count(self) -> int:
        """How many stretches there are."""
        return int(self.phase_ns[STEP_PHASES[0]].shape[1])

    @property
    def step_ns(self) -> Floats:
        """[rank, stretch]: the whole step."""
        parts = np.stack([self.phase_ns[phase] for phase in STEP_PHASES])
        return np.where(np.isnan(parts).all(axis=0), np.nan, np.nansum(parts, axis=0))


def rank_grid(steps: pl.DataFrame, *, column_count: int | None = None) -> RankGrid | None:
    """Steps on a common time axis; None where there is no step."""
    if steps.is_empty():
        return None
    start = steps["start_ns"].to_numpy()
    end = start + steps["step_ns"].to_numpy()
    ranks, row = np.unique(steps["rank"].to_numpy(), return_inverse=True)
    limit = min(COLUMN_LIMIT, max(_LEAST_COLUMNS, _CELL_LIMIT // len(ranks)))
    count = column_count or max(1, min(limit, int(np.bincount(row).max())))
    first_ns, last_ns = int(start.min()), max(int(end.max()), int(start.min()) + 1)
    scale = count / (last_ns - first_ns)
    first = np.clip(((start - first_ns) * scale).astype(np.int64), 0, count - 1)
    last = np.clip(((end - 1 - first_ns) * scale).astype(np.int64), first, count - 1)
    # Every step once for each stretch that it touches.
    touched = last - first + 1
    step = np.repeat(np.arange(len(row)), touched)
    column = np.arange(len(step)) - np.repeat(np.cumsum(touched) - touched - first, touched)
    cell = row[step] * count + column

    def mean(values: pl.Series) -> Floats:
        numbers = values.cast(pl.Float64).fill_null(np.nan).to_numpy()[step]
        known = np.isfinite(numbers)
        sums = np.bincount(cell[known], numbers[known], len(ranks) * count)
        counts = np.bincount(cell[known], minlength=len(sums))
        means: Floats = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        return means.reshape(len(ranks), count)

    return RankGrid(
        ranks=tuple(int(rank) for rank in ranks), start_ns=first_ns, end_ns=last_ns,
        phase_ns={phase: mean(steps[f"{phase}_host_ns"]) for phase in STEP_PHASES},
        typical_ns={
            "step": number(steps["step_ns"].median()),
            **{phase: number(steps[f"{phase}_host_ns"].median()) for phase in STEP_PHASES},
        },
    )  # fmt: skip
