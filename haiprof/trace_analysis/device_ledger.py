"""The ledger of the device's time line: each nanosecond of a step in one account, from traces.

Where kernels run together, the time is computing's before it is communication's, and that before
copies'; among equals it is the one's that began first. What is left is idle, and belongs to what
the host did until it had launched the next event.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.intervals import (
    Bools,
    Intervals,
    Ints,
    complement,
    covered_lengths,
    intersection,
    union,
)
from haiprof.base.ledger import POSITIONS
from haiprof.base.version import PACKAGE
from haiprof.trace_analysis.call_tree import innermost_at
from haiprof.trace_analysis.collectives import collective_kernels
from haiprof.trace_analysis.device_time import (
    COMMUNICATION,
    COMPUTATION,
    MEMORY,
    gpu_events,
    with_kind,
)
from haiprof.trace_analysis.host_activity import (
    ACTIVITIES,
    ALLOCATION,
    BACKWARD,
    FORWARD,
    OPERATORS,
    OUTSIDE,
    SYNC,
    Host,
    read_host,
    split,
)
from haiprof.trace_analysis.kernel_names import work_kind
from haiprof.trace_analysis.launches import with_call
from haiprof.trace_analysis.step_time import step_windows
from haiprof.trace_format.kineto.load import Cut
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.launch_checks import BLOCKING, FREE

Texts = npt.NDArray[np.object_]

HOST_LANE = -1
"""The device of a trace without GPU events: the host's training thread is its time line."""
COMPUTE, COPY, IDLE = "compute: ", "copy: ", "idle: "
TALK = "communication: "
QUEUE, UNKNOWN = f"{IDLE}between kernels", f"{IDLE}host not recorded"
LONG_QUEUE = f"{QUEUE}, long"
_USUAL_GAP_NS = 10_000
"""A device needs no longer from one kernel to the next that is launched: 1 to 2 us on H100 and
V100, 5 to 10 on MI300X under a profiler."""

COPY_OR_CAST = f"{COMPUTE}copy or cast"
CONVERSIONS = (COPY_OR_CAST, f"{COMPUTE}layout conversion")
"""Computing that another layout or precision of the tensors makes unnecessary."""
_DIRECTIONS = {
    "HtoD": "host to device", "DtoH": "device to host", "DtoD": "on the device",
    "PtoP": "device to device",
}  # fmt: skip
_DIRECTION = re.compile("|".join(_DIRECTIONS))
_NEVER_BLOCKS = r"Pinned|DtoD|PtoP|[Mm]emset"
"""In the names of copies that the host does not wait for, whatever memory it is."""
GAPS_SCHEMA = {
    "device": pl.Int64, "start_ns": pl.Int64, "idle_ns": pl.Int64, "activity": pl.String,
    "activity_ns": pl.Int64, "code": pl.String, "operator": pl.String, "kernel": pl.String,
}  # fmt: skip
_GAP_COUNT = 12
ROWS_SCHEMA = {
    "device": pl.Int64, "step": pl.Int64, "position": pl.String, "activity": pl.String,
    "code": pl.String, "callee": pl.String, "operator": pl.String, "event": pl.Int64,
    "start_ns": pl.Int64, "end_ns": pl.Int64, "ns": pl.Int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLedger:
    """What the time of one rank's devices was, step by step."""

    rows: pl.DataFrame
    """Columns of ROWS_SCHEMA: `step` counts from 0; `code` is the job's own, from the outermost
    call on, a line each; `callee` and `operator` are the innermost ones. Exposed communication has
    a row per piece, with its `event` and when it was, from that event's begin: other ranks' traces
    tell what it waited for. Else `event` is -1."""
    steps: pl.DataFrame
    """`step`, its `number` (null without profiler steps), `start_ns` and `end_ns` on the device, to
    the next one's begin; `own_ns` without what lies between, `mark_ns` as the host marked it."""
    gaps: pl.DataFrame
    """The longest idle times of each device, columns of GAPS_SCHEMA: since its first step, what
    the host did most of it and for how long, and the `kernel` that ended it."""
    devices: tuple[int, ...]
    kernel_count: int
    linked_count: int  # events of the GPU whose launch is in the trace
    has_stacks: bool
    world_size: int | None
    damage: tuple[str, ...]  # what of the file could not be read
    cut: Cut | None = None  # where its file is cut off

    @property
    def has_no_step(self) -> bool:
        """Whether it is certain that the file is cut off in its first step."""
        return self.cut is not None and self.cut.whole_ns == -1 and self.cut.end_ns is not None


class _Time(NamedTuple):
    """Pieces of a time line with what they were spent on; one row per piece."""

    starts: Ints
    ends: Ints
    position: Ints  # index into POSITIONS
    activity: Texts
    row: Ints  # of the host's tree: what launched it, or was innermost; -1 where that is unknown
    at: Ints  # when the host did that
    event: Ints  # of what communicates; -1 of all else
    begun: Ints  # when that event began


def rank_ledger(trace: Trace) -> RankLedger:
    """The time line of each device of one rank, by account; a question for a pool.

    A step lasts on the device until the last event that it launched has ended, and the next one
    begins there (`step_time`); without profiler steps there is one, of all that was recorded. In a
    trace without GPU events the time line is that of the host's training thread.
    """
    host = read_host(trace)
    gpu = with_kind(with_call(gpu_events(trace, None), trace.runtime))
    steps = step_windows(trace)
    spoken = collective_kernels(trace).select("event", "kind") if len(gpu) else None
    lanes = {key[0]: _device_line(host, part, steps, spoken)
             for key, part in gpu.group_by("device", maintain_order=True)}  # fmt: skip
    cut = trace.report.cut
    is_lost = gpu.is_empty() and cut is not None and cut.is_device_lost
    if gpu.is_empty() and not is_lost and len(host.kind) and len(steps):
        # The time line of the training thread of a trace without a GPU.
        starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
        line = _host_pieces(host, starts, ends, np.full(len(starts), host.main), "")
        operator = host.name_at(host.tree.climb(line.row, host.is_operator))
        works = line.activity == OPERATORS
        names = [name for name, is_work in zip(operator, works, strict=True) if is_work]
        kinds = {name: f"{OPERATORS}: {work_kind(name or '', name)}" for name in set(names)}
        line.activity[works] = [kinds[name] for name in names]
        lanes = {HOST_LANE: line}
    rows = [_accounts(host, lane, time, steps) for lane, time in lanes.items()]
    gaps = [_longest_gaps(host, lane, time, steps, gpu) for lane, time in lanes.items()]
    return RankLedger(
        rows=pl.concat([pl.DataFrame(schema=ROWS_SCHEMA), *rows]), steps=steps,
        gaps=pl.concat([pl.DataFrame(schema=GAPS_SCHEMA), *gaps]), devices=tuple(lanes),
        kernel_count=len(gpu), linked_count=len(gpu) - gpu["call"].null_count(),
        has_stacks=host.has_stacks, world_size=trace.world_size,
        damage=tuple(trace.report.notes), cut=cut,
    )  # fmt: skip


def _device_line(
    host: Host, gpu: pl.DataFrame, steps: pl.DataFrame, spoken: pl.DataFrame | None
) -> _Time:
    """The time line of one device, from its first event or step to its last."""
    starts = gpu["ts_ns"].to_numpy()
    ends = starts + gpu["dur_ns"].to_numpy()
    call_ts = gpu["call_ts_ns"].fill_null(-1).to_numpy()
    row = host.call_rows(gpu["correlation"])
    position = np.where(call_ts >= 0, host.position_at(call_ts), -1)
    position[host.tree.climb(row, host.is_backward) >= 0] = BACKWARD
    # Positions with those of the event before, else after, where none is known.
    known = pl.Series(position)
    known = known.set(known < 0, None).forward_fill().backward_fill().fill_null(FORWARD)
    position = known.to_numpy().copy()
    activity = _event_activities(host, gpu, row, spoken)
    busy, lines = Intervals(starts[:0], ends[:0]), []
    for kind in (COMPUTATION, COMMUNICATION, MEMORY):
        own = np.flatnonzero((gpu["kind"] == kind).to_numpy())
        of, begins, finishes = not_covered(starts[own], ends[own], busy)
        at = own[of]
        event = gpu["event"].to_numpy()[at] if kind == COMMUNICATION else np.full(len(at), -1)
        lines.append(_Time(
            begins, finishes, position[at], activity[at], row[at],
            np.where(call_ts[at] >= 0, call_ts[at], begins), event, starts[at],
        ))  # fmt: skip
        busy = union(np.append(busy.starts, starts[own]), np.append(busy.ends, ends[own]))
    edges = np.concatenate([busy.starts, busy.ends, steps["start_ns"], steps["end_ns"]])
    whole = Intervals(np.array([edges.min()]), np.array([edges.max()]))
    gaps = intersection(complement(busy), whole)
    calls = call_ts, call_ts + gpu["call_dur_ns"].fill_null(0).to_numpy()
    # The launch of an event before all linked ones of its stream was before the trace; that of a
    # later one was lost.
    linked = gpu.select("stream", linked=pl.Series((row >= 0).astype(np.int64)))
    seen = linked.select(pl.col("linked").cum_max().over("stream")).to_series().to_numpy() > 0
    times = [*lines, *_idle_lines(host, gpu, gaps, calls, row, seen)]
    return _Time(*(np.concatenate(column) for column in zip(*times, strict=True)))


def not_covered(starts: Ints, ends: Ints, taken: Intervals) -> tuple[Ints, Ints, Ints]:
    """Intervals without what an earlier one or the taken time covers: of which each part is."""
    reach = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, ends))[:-1]
    edges = np.column_stack([taken.starts, taken.ends]).ravel()
    parts = split(np.maximum(starts, reach), ends, edges)
    free = parts.segment % 2 == 1  # before all of the taken time the segment is -1
    return parts.of[free], parts.starts[free], parts.ends[free]


def _event_activities(
    host: Host, gpu: pl.DataFrame, row: Ints, spoken: pl.DataFrame | None
) -> Texts:
    """What each event of the GPU works on."""
    said = pl.DataFrame(schema={"event": pl.Int64, "kind": pl.String}) if spoken is None else spoken
    operator = pl.Series("operator", host.name_at(host.tree.climb(row, host.is_operator)))
    events = gpu.select("event", "kind", pl.col("name").cast(pl.String), operator).join(
        said.rename({"kind": "spoken"}), on="event", how="left", maintain_order="left"
    )

    @cache
    def describe(kind: str, name: str, by: str | None, collective: str | None) -> str:
        if kind == COMMUNICATION:
            return f"{TALK}{collective or 'other'}"
        if kind != MEMORY:
            return f"{COMPUTE}{work_kind(name, by)}"
        direction = _DIRECTION.search(name)
        pageable = ", pageable" if "pageable" in name.lower() else ""
        without = "set" if "set" in name.lower() else "other"
        return f"{COPY}{_DIRECTIONS[direction[0]] + pageable if direction else without}"

    keys = events.select("kind", "name", "operator", "spoken").iter_rows()
    return np.array([describe(*key) for key in keys], dtype=object)


def _idle_lines(
    host: Host, gpu: pl.DataFrame, gaps: Intervals, calls: tuple[Ints, Ints], row: Ints, seen: Bools
) -> list[_Time]:
    """What the host did while the device was idle: late until the next event's launch returned.

    A wait for the device as that became idle has as much of the gap as it lasted.
    """
    # Calls that return only when the GPU is done: by their names, or copies by times.
    known = np.flatnonzero(host.is_call & host.has_name(f"{BLOCKING}|{FREE}"))
    starts, ends = gpu["ts_ns"].to_numpy(), (gpu["ts_ns"] + gpu["dur_ns"]).to_numpy()
    paged = ~gpu["name"].cast(pl.String).str.contains(_NEVER_BLOCKS)
    copies = (paged & (gpu["kind"] == MEMORY)).to_numpy() & (row >= 0)
    copies[copies] = host.tree.ends[row[copies]] >= ends[copies]
    works = np.isin(host.thread, np.append(host.thread[row[row >= 0]], host.main))
    blocking = np.unique(np.concatenate([known, row[copies]]))
    blocking = blocking[works[blocking]]
    # Of each event in order: begin and end of its launch (`calls`), that one's `row` in the host's
    # tree, or -1, and whether a launch up to it on its stream is in the trace (`seen`).
    after = np.searchsorted(starts, gaps.ends, side="left")
    last = after >= len(starts)
    at = np.where(last, 0, after)
    linked = ~last & (row[at] >= 0)
    is_late = (last | seen[at]) & (len(host.kind) > 0)
    launched = np.where(linked, calls[1][at], np.where(is_late, gaps.ends, gaps.starts))
    ready = np.clip(launched, gaps.starts, gaps.ends)
    order = blocking[np.argsort(host.tree.starts[blocking], kind="stable")]
    around = innermost_at(host.tree.starts[order], host.tree.ends[order], gaps.starts)
    wait = np.where(around >= 0, np.append(order, -1)[around], -1)
    waited = np.where(wait >= 0, np.append(host.tree.ends - host.tree.starts, 0)[wait], 0)
    # Freeing memory waits for the device itself: without the wait before it would take as long.
    frees = np.flatnonzero(host.is_call & host.has_name(FREE))
    freeing = union(host.tree.starts[frees], host.tree.ends[frees])
    waited[2 * covered_lengths(freeing, gaps.starts, ready) > ready - gaps.starts] = 0
    free = np.minimum(ready, gaps.starts + waited)
    wait_ts = np.append(host.tree.starts, 0)[wait]
    threads = np.where(linked, np.append(host.thread, 0)[row[at]], host.main)
    none = np.full(len(at), -1)
    since = np.where(linked, calls[0][at], gaps.starts)
    frees = np.append(host.activity, -1)[wait] == ACTIVITIES.index(ALLOCATION)
    waits = np.where(frees, f"{IDLE}{ALLOCATION}", f"{IDLE}{SYNC}").astype(object)
    queue = np.full(len(at), QUEUE if len(host.kind) else UNKNOWN, dtype=object)
    waits_in_queue = linked & (launched <= gaps.starts) & (len(host.kind) > 0)
    usual = np.where(waits_in_queue, np.minimum(ready + _USUAL_GAP_NS, gaps.ends), gaps.ends)
    long = np.full(len(at), LONG_QUEUE, dtype=object)
    launch = np.where(linked, row[at], -1)
    return [
        _Time(gaps.starts, free, host.position_at(wait_ts), waits, wait, wait_ts, none, none),
        _host_pieces(host, free, ready, threads, IDLE),
        _Time(ready, usual, host.position_at(since), queue, launch, since, none, none),
        _Time(usual, gaps.ends, host.position_at(since), long, launch, since, none, none),
    ]  # fmt: skip


def _host_pieces(host: Host, starts: Ints, ends: Ints, threads: Ints, prefix: str) -> _Time:
    """What some threads did at some times; where one did nothing, what the training thread did."""
    parts = []
    for thread in np.unique(threads):
        own = np.flatnonzero(threads == thread)
        moments = host.main_moments if thread == host.main else host.moments(int(thread))
        cut = split(starts[own], ends[own], moments.edges)
        row = moments.rows[cut.segment + 1]
        lost = row < 0
        main = split(cut.starts[lost], cut.ends[lost], host.main_moments.edges)
        parts += [
            (cut.starts[~lost], cut.ends[~lost], row[~lost], np.full((~lost).sum(), False)),
            (main.starts, main.ends, host.main_moments.rows[main.segment + 1],
             np.full(len(main.of), thread != host.main)),
        ]  # fmt: skip
    if not parts:
        none = starts[:0]
        return _Time(none, none, none, none.astype(object), none, none, none, none)
    begins, finishes, row, other = (np.concatenate(column) for column in zip(*parts, strict=True))
    edges, codes = host.positions
    cut = split(begins, finishes, edges)
    position, row = codes[cut.segment + 1], row[cut.of]
    activity = np.where(row >= 0, np.append(host.activity, 0)[row], ACTIVITIES.index(OUTSIDE))
    # Autograd's own thread between two operators: no event tells of its engine.
    activity[other[cut.of] & (position == BACKWARD)] = ACTIVITIES.index(OPERATORS)
    names = np.array([f"{prefix}{name}" for name in ACTIVITIES], dtype=object)[activity]
    none = np.full(len(row), -1)
    return _Time(cut.starts, cut.ends, position, names, row, cut.starts, none, none)


def _accounts(host: Host, device: object, time: _Time, steps: pl.DataFrame) -> pl.DataFrame:
    """The pieces of a time line within steps, summed by what they have in common."""
    edges = np.column_stack([steps["start_ns"], steps["end_ns"]]).ravel()
    cut = split(time.starts, time.ends, edges)
    inside = np.flatnonzero((cut.segment >= 0) & (cut.segment % 2 == 0) & (cut.ends > cut.starts))
    of = cut.of[inside]
    row, talks = time.row[of], time.event[of] >= 0
    place = host.place_rows(row, time.at[of])
    callee = host.tree.climb(row, host.is_python)
    callee[(callee == place) | np.append(host.runs_backward, False)[callee]] = -1
    since = np.where(talks, time.begun[of], cut.starts[inside])
    starts, ends = cut.starts[inside], cut.ends[inside]
    pieces = pl.DataFrame({
        "device": np.full(len(of), device), "step": cut.segment[inside] // 2,
        "position": time.position[of], "activity": time.activity[of].astype(str),
        "place": place, "callee": host.name_codes(callee),
        "operator": host.name_codes(host.tree.climb(row, host.is_operator)),
        "event": time.event[of], "start_ns": np.where(talks, starts - since, -1),
        "end_ns": np.where(talks, ends - since, -1), "ns": ends - starts,
    })  # fmt: skip
    summed = pieces.group_by(pieces.columns[:-1], maintain_order=True).agg(pl.col("ns").sum())
    named = summed.with_columns(
        position=pl.col("position").replace_strict(dict(enumerate(POSITIONS))),
        code=host.chains(summed["place"].to_numpy()),
        callee=pl.Series(host.texts(summed["callee"].to_numpy()), dtype=pl.String),
        operator=pl.Series(host.texts(summed["operator"].to_numpy()), dtype=pl.String),
    ).select(pl.col(name).cast(kind) for name, kind in ROWS_SCHEMA.items())
    return named.group_by(named.columns[:-1], maintain_order=True).agg(pl.col("ns").sum())


def _longest_gaps(
    host: Host, device: int, time: _Time, steps: pl.DataFrame, gpu: pl.DataFrame
) -> pl.DataFrame:
    """The longest idle times of a device within its steps, one by one."""
    first, last = int(steps["start_ns"][0]), int(steps["end_ns"][-1])
    idle = np.char.startswith(time.activity.astype(str), IDLE)
    idle &= (time.ends > time.starts) & (time.starts >= first) & (time.ends <= last)
    at = np.flatnonzero(idle)[np.argsort(time.starts[idle], kind="stable")]
    pieces = pl.DataFrame({
        "start_ns": time.starts[at], "end_ns": time.ends[at],
        "activity": time.activity[at].astype(str), "row": time.row[at],
        "at": time.at[at], "ns": time.ends[at] - time.starts[at],
    }).with_columns(
        gap=(pl.col("start_ns") != pl.col("end_ns").shift(1)).fill_null(value=True).cum_sum()
    )  # fmt: skip
    spent = pieces.with_columns(activity_ns=pl.col("ns").sum().over("gap", "activity"))
    gaps = spent.sort("activity_ns", "ns", descending=True).group_by("gap").agg(
        pl.col("activity", "activity_ns", "row", "at").first(), idle_ns=pl.col("ns").sum(),
        start_ns=pl.col("start_ns").min(), end_ns=pl.col("end_ns").max(),
    ).sort("idle_ns", "start_ns", descending=[True, False]).head(_GAP_COUNT)  # fmt: skip
    after = gpu.filter(device=device).select(end_ns="ts_ns", kernel=pl.col("name").cast(pl.String))
    row = gaps["row"].to_numpy()
    named = gaps.with_columns(
        device=device,
        start_ns=pl.col("start_ns") - first,
        code=host.chains(host.place_rows(row, gaps["at"].to_numpy())),
        operator=pl.Series(host.name_at(host.tree.climb(row, host.is_operator)), dtype=pl.String),
    ).join(after.unique("end_ns", keep="first"), on="end_ns", how="left", maintain_order="left")
    return named.select(pl.col(name).cast(kind) for name, kind in GAPS_SCHEMA.items())  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What an account is called, and what makes it smaller."""

    activity: str  # begins the activities that it is for
    key: str  # of the explanation, as JSON has it
    says: str  # what the device does there
    do: str


REMEDIES = msgspec.json.decode(
    (PACKAGE / "trace_analysis" / "remedies.json").read_bytes(), type=tuple[Remedy, ...]
)
"""In the order in which they are tried: the first that fits is taken."""
HOST_OPERATORS_REMEDY = (
    "give them the cores of the job (torch.get_num_threads(), OMP_NUM_THREADS); torch.compile "
    "fuses small ones; torch.autocast('cpu') where the CPU has AMX or AVX-512 BF16; a larger batch "
    "where each is short"
)
"""What to do where operators take most of a step on a CPU."""
_FEWER_BITS = "compute in bf16 (torch.autocast), or allow TF32: "
OPERATOR_REMEDIES = {
    "gemm": "sizes that are multiples of 64 (pad the dimensions); with a small result and a long "
            "inner dimension split that dimension; let torch.compile(mode='max-autotune') choose",
    "convolution": "channels_last, torch.backends.cudnn.benchmark=True, channels that are "
                   "multiples of 8; depthwise and transposed ones are often faster in another form",
    "attention": "scaled_dot_product_attention without a mask that its flash kernel lacks; where "
                 "that one runs already, cuDNN's (SDPBackend.CUDNN_ATTENTION) or a newer "
                 "FlashAttention; longer sequences or a larger batch fill the GPU better",
    "mixture of experts": "a kernel that is tuned for these shapes (grouped GEMM); more tokens to "
                          "an expert: a larger batch or fewer experts on a GPU",
    "optimizer": "fused=True, which reads and writes each parameter once",
}  # fmt: skip
"""What to do about an operator that is far from the roofline, by its kind."""
_MEMORY_BOUND = (
    "fuse it with its neighbours (torch.compile), so that its tensors are read once; see that they "
    "are contiguous and of 16 bits where that is enough"
)
_SMALL_ROWS = 128  # fewer rows than this leave a GPU of today waiting for the weights


def operator_remedy(kind: str, precision: str | None, rows: int | None) -> str:
    """What to do about an operator that is far from the roofline."""
    found = OPERATOR_REMEDIES.get(kind, _MEMORY_BOUND)
    if is_small_batch(kind, rows):
        return f"a larger batch: the weights are read for {rows:,} rows alone; else {found}"
    if precision == "fp32" and kind in ("gemm", "convolution", "attention"):
        return f"{_FEWER_BITS}torch.set_float32_matmul_precision('high'); {found}"
    return found


def is_small_batch(kind: str, rows: int | None) -> bool:
    """Whether a product of matrices has too few rows for its weights."""
    return kind in ("gemm", "mixture of experts") and rows is not None and rows <= _SMALL_ROWS


def remedy_of(activity: str) -> Remedy | None:
    """What is said of an activity; None of work that is needed."""
    return next((each for each in REMEDIES if activity.startswith(each.activity)), None)
