"""Folds what is old of a run that goes on: sums of blocks of steps, records of a minute each.

This runs beside the job, in a process of its own, once an hour; nothing waits for it. What is
folded is written first, synced and renamed; only then the room of what it stands for is given back.
A crash in between loses nothing. A rank is folded up to a step from which on its spans alone tell
the same steps as all of them do; where they do not, it stays whole.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Bools, Ints
from haiprof.base.ledger import POSITIONS
from haiprof.base.units import NS_PER_S
from haiprof.run_analysis import code_samples, ranks, step_frame
from haiprof.run_analysis.counters import MINUTE_NS, fold_rows, read_folded_source
from haiprof.run_analysis.folded_steps import pack_codes
from haiprof.run_analysis.ledger import is_hidden
from haiprof.run_analysis.nesting import take_rows
from haiprof.run_analysis.run_files import (
    NUMPY_TYPE,
    NodeFiles,
    RankFiles,
    integer,
    open_run,
    read_table,
    record_columns,
    record_rows,
)
from haiprof.run_analysis.step_positions import StepPositions
from haiprof.run_analysis.steps import COLLECTIVE_PHASE, PHASES, segment, trained_ns
from haiprof.run_analysis.windows import TraceWindow, recorded_windows, traced_steps
from haiprof.run_format import folded as stored
from haiprof.run_format import schema
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.schema import Column, Table
from haiprof.run_format.stack_lines import (
    END,
    FOLDED_WORKERS,
    HEADER,
    LOCK_STATES,
    SAMPLES,
    STACKS_VERSION,
    WAIT_LETTERS,
)
from haiprof.run_format.tables import COUNTER_TABLES
from haiprof.run_format.writer import append_line

_HOUR_NS = 3600 * NS_PER_S
CONTEXT_STEPS = 64  # spans of so many folded steps are kept: a step begins by what was before it
LEAST_STEPS = 200  # with fewer steps the first ones that are no warm-up are not known yet (5 % are)
WARM_UP_STEPS = 10  # so many first steps are a block of their own, as no verdict counts them
SLOW_RATIO = 1.5  # a step that took so many times the median of the folded hour is kept whole
MOST_SLOW, ALWAYS_SLOW = 0.02, 32
"""Of the steps that are folded at once no more are kept whole, or so many, the longest first; of
the others it is counted how many there were."""
MOST_SAMPLES, MOST_WORKER_SAMPLES = 6_000, 1_200
"""Samples of a rank that are kept of all folded time, and those of all its workers."""
BESIDE_DEATH_NS = (600 * NS_PER_S, 60 * NS_PER_S)  # before and after an end counters are kept whole
_ON_TIME = tuple(POSITIONS.index(name) for name in ("evaluation", "checkpoint", "compile"))
"""Positions whose moments are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept in full, before the end of what was recorded."""

    steps_ns: int = 2 * _HOUR_NS  # spans and device times of steps
    samples_ns: int = _HOUR_NS // 4  # samples of stacks
    counters_ns: int = _HOUR_NS // 4  # each sample of counters, and of the progress of collectives


Columns = dict[str, np.ndarray]


def fold_node(run: RunPaths, host: str, kept: Retention | None = None) -> list[str]:
    """Folds what is old of one node's own files and of its ranks; why some of them stay whole."""
    kept, files = kept or Retention(), open_run(run.root, hosts={host})
    windows = recorded_windows(files)
    tasks: list[tuple[str, Callable[[], str]]] = []
    for rank in files.ranks:
        own = [w for w in windows if (w.rank, w.attempt) == (rank.rank, rank.attempt)]
        tasks.append((f"rank {rank.rank}", partial(fold_rank, rank, own, kept)))
        tasks.append((f"workers of rank {rank.rank}", partial(fold_workers, rank.paths, kept)))
    tasks += [(table.name, partial(fold_counters, node, table, kept))
              for node in files.nodes for table in COUNTER_TABLES]  # fmt: skip
    whys = [(what, _try_fold(fold)) for what, fold in tasks]
    return [f"{what}: {why}" for what, why in whys if why]


def main(words: Sequence[str]) -> None:
    """In a process of its own: `RUN HOST HOURS`. It notes what stays whole, and why."""
    run, host, hours = RunPaths(Path(words[0])), words[1], float(words[2])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    kept = Retention(steps_ns=round(hours * _HOUR_NS))
    began = time.thread_time_ns()
    left = fold_node(run, host, kept)
    line = {"type": "folded", "time_ns": time.perf_counter_ns(), "not_folded": left,
            "cpu_ns": time.thread_time_ns() - began}  # fmt: skip
    append_line(run.node(host).events, line)


def _try_fold(fold: Callable[[], str]) -> str:
    """What is wrong with one file leaves the others alone."""
    try:
        return fold()
    except (OSError, RunFormatError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  damaged: it stays as it is
        return f"{type(error).__name__}: {error}"


# -- ranks -----------------------------------------------------------------------------------------


def fold_rank(files: RankFiles, windows: Sequence[TraceWindow], kept: Retention) -> str:
    """Folds the old steps of a rank; why it stays whole, or nothing."""
    paths = files.paths
    if not os.path.lexists(paths.phases):
        return ""
    rank = step_frame.load_segments(files)
    steps = rank.found.steps
    if not rank.first_step and os.path.lexists(paths.folded):
        return "what was folded before is damaged"
    if not len(steps.start_ns):
        return ""
    last_ns = int(steps.end_ns[-1])
    place = int(np.searchsorted(steps.end_ns, last_ns - kept.steps_ns, "right"))
    # Blocks of about a minute: a power of two, so that those of several ranks fit together.
    usual = float(np.median(steps.step_ns))
    size = 1 << max(round(np.log2(MINUTE_NS / max(usual, 1.0))), 0)
    size = rank.folded.fact("block_steps") or size
    number = rank.first_step + place
    number -= number % size
    place = number - rank.first_step
    if place <= 0 or number < LEAST_STEPS:
        return ""
    begin = _find_beginning(rank, place)
    if isinstance(begin, str):
        return begin
    first_record, first_device_record = begin
    traced = traced_steps(rank, windows)
    before = step_frame.slice_segments(rank, None, place)
    positions = ranks.rank_positions(rank)
    blocks = _blocks(rank, positions, traced, place, size)
    slow, spans, left_out = _slow_steps(before, traced[:place])
    samples, lines, stack_byte = _fold_samples(rank, positions, last_ns - kept.samples_ns)
    pauses = before.events.end_ns - before.events.start_ns
    pauses = pauses[before.events.kind == schema.GC]
    count, total_ns, longest_ns = ranks.pauses_sum(rank)
    epoch_count, epoch_ns, loading_ns = ranks.loading_row(before)
    facts = {
        "step_count": number, "until_ns": int(steps.start_ns[place]), "first_record": first_record,
        "first_device_record": first_device_record, "first_stack_byte": stack_byte,
        "block_steps": size, "slow_left_out": left_out, "gc_count": count + len(pauses),
        "gc_ns": total_ns + int(pauses.sum()),
        "gc_longest_ns": max(longest_ns, int(pauses.max(initial=0))),
        "nograd_ns": ranks.nograd_ns(before), "epoch_count": epoch_count, "epoch_ns": epoch_ns,
        "loading_ns": loading_ns,
        "roots": {str(tag): calls for tag, calls in ranks.root_calls(before).items()},
    }  # fmt: skip
    sections = {stored.SAMPLED.name: _pack_records(stored.SAMPLED, samples)}
    for table, columns in ((stored.BLOCKS, blocks), (stored.SLOW, slow), (stored.SPANS, spans),
                           (stored.STRETCHES, _stretches(rank, positions, place))):  # fmt: skip
        older = record_columns(rank.folded.file.sections[table.name])  # without columns of zeros
        zeros = np.zeros(len(next(iter(older.values()))), dtype=np.int64)
        whole = {name: np.append(older.get(name, zeros), own) for name, own in columns.items()}
        sections[table.name] = _pack_records(table, whole)
    clock = {"mono_ns": 0, "wall_ns": rank.wall_offset_ns}
    stored.write_folded(
        paths.folded, sections, facts=facts, stack_lines=lines, clock=clock, below=paths.run_root
    )
    phases = read_table(paths.phases, schema.PHASES, limit=0).start
    device = step_frame.read_device_table(paths.device, limit=0).start if first_device_record else 0
    for path, first, end in (  # a file system that cannot give back the room of a part keeps it
        (paths.phases, phases, first_record * schema.PHASES.record_bytes),
        (paths.device, device, first_device_record * schema.DEVICE.record_bytes),
        (paths.stacks, 0, stack_byte),
    ):
        stored.free_beginning(path, first=first, end=first + end, below=paths.run_root)
    if os.path.lexists(paths.heartbeat):  # only its end is ever read
        beats = read_table(paths.heartbeat, schema.HEARTBEAT)
        old = int((record_columns(beats)["time_ns"] < last_ns - kept.counters_ns).sum())
        end = beats.start + old * schema.HEARTBEAT.record_bytes
        stored.free_beginning(paths.heartbeat, first=beats.start, end=end, below=paths.run_root)
    return ""


def _find_beginning(rank: step_frame.RankSegments, place: int) -> tuple[int, int] | str:
    """The first record and device record to keep; or why steps would differ without the others."""
    paths, steps = rank.files.paths, rank.found.steps
    first = rank.folded.fact("first_record")
    records = read_table(paths.phases, schema.PHASES, first=first, limit=rank.record_end - first)
    spans, _ = step_frame.spans_of(records)
    if len(spans.kind) != records.count:
        return "its spans are damaged"
    since = int(steps.start_ns[max(place - CONTEXT_STEPS, 0)])
    later = spans.start_ns >= since
    begin = int(later.argmax()) if len(later) else 0  # without one the first
    found = segment(take_rows(spans, slice(begin, None)), families=rank.files.families())
    at = int(np.searchsorted(found.steps.start_ns, steps.start_ns[place]))
    for name in ("start_ns", "end_ns", "step_ns", "host_ns"):
        alone, whole = getattr(found.steps, name)[..., at:], getattr(steps, name)[..., place:]
        if alone.shape != whole.shape or (alone != whole).any():
            return "its last steps cannot be told without those before them"
    device = 0
    if os.path.lexists(paths.device):
        later = record_columns(step_frame.read_device_table(paths.device))["end_ns"] >= since
        device = int(later.argmax()) if len(later) else 0
    return first + begin, device


def _blocks(
    rank: step_frame.RankSegments, positions: StepPositions, traced: Bools, place: int, size: int
) -> Columns:
    """Sums of the steps up to a place, in blocks."""
    steps, number = rank.found.steps, rank.first_step + np.arange(place)
    cut = (number % size == 0) | (number == WARM_UP_STEPS)
    cut[1:] |= traced[1:place] != traced[: place - 1]
    saves = rank.events.start_ns[rank.events.kind == schema.SAVE]
    after = np.searchsorted(steps.start_ns, saves, "right")
    cut[after[(after > 0) & (after < place)]] = True
    cut[0] = True
    edges = np.flatnonzero(cut)

    def sums(values: Ints | Bools) -> Ints:
        whole: Ints = np.add.reduceat(values[..., :place].astype(np.int64), edges, axis=-1)
        return whole

    plain, collected = (sums(times) for times in positions.sums())
    trained, counts = trained_ns(rank.found), np.diff(np.append(edges, place))
    idle = np.full(len(edges), np.nan)
    if rank.device_ns is not None:
        known = np.isfinite(rank.device_ns[-1, :place])
        ns = np.add.reduceat(np.where(known, rank.device_ns[-1, :place], 0.0), edges)
        seen = sums(known)
        idle = np.divide(ns, seen, out=idle, where=seen > 0)
    return {
        "first_step": number[edges], "step_count": counts, "start_ns": steps.start_ns[edges],
        "trained_ns": trained[edges + counts - 1], "step_ns": sums(steps.step_ns),
        "longest_ns": np.maximum.reduceat(steps.step_ns[:place], edges),
        "optimizer_step_count": sums(steps.optimizer_step_count),
        "micro_step_count": sums(steps.micro_step_count), "skipped_count": sums(steps.skipped),
        "traced": traced[edges], "idle_ns": idle,
        **{f"{p}_host_ns": sums(steps.host_ns[at]) for at, p in enumerate(PHASES)},
        **{f"{name}_ns": plain[at] for at, name in enumerate(POSITIONS)},
        **{f"{name}_gc_ns": collected[at] for at, name in enumerate(POSITIONS)},
    }  # fmt: skip


def _slow_steps(before: step_frame.RankSegments, traced: Bools) -> tuple[Columns, Columns, int]:
    """The first step and slow ones, their spans, and how many more slow ones there were."""
    steps, first, found = before.found.steps, before.first_step, before.found
    count = len(steps.step_ns)
    slow = np.flatnonzero(steps.step_ns > SLOW_RATIO * np.median(steps.step_ns))
    most = max(int(MOST_SLOW * count), ALWAYS_SLOW)
    kept = slow[np.argsort(-steps.step_ns[slow], kind="stable")[:most]]
    left_out = len(slow) - len(kept)
    kept = np.unique(np.append(kept, 0)) if not first else np.sort(kept)
    own = {name: getattr(steps, name)[kept] for name in
           ("start_ns", "step_ns", "micro_step_count", "optimizer_step_count", "skipped",
            "boundary", "confidence")}  # fmt: skip
    host = {f"{p}_host_ns": steps.host_ns[at, kept] for at, p in enumerate(PHASES)}
    columns = {"step": first + kept, "traced": traced[kept], **own, **host}
    events = before.events
    of_event = np.searchsorted(steps.start_ns, events.start_ns, "right") - 1
    spans = [found.nested.spans.take(np.isin(found.step, kept)),
             events.take(np.isin(of_event, kept))]  # fmt: skip
    kind, tag, start_ns, end_ns = (
        np.concatenate([getattr(each, name) for each in spans]).astype(np.int64)
        for name in ("kind", "tag", "start_ns", "end_ns")
    )
    packed = {"start": start_ns << schema.TAG_BITS | kind, "end": end_ns << schema.TAG_BITS | tag}
    return columns, packed, before.folded.fact("slow_left_out") + left_out


def _stretches(rank: step_frame.RankSegments, positions: StepPositions, place: int) -> Columns:
    """When it evaluated, saved and compiled; and waited for ranks before its first step."""
    until, begun = rank.found.steps.start_ns[place], rank.found.steps.start_ns
    end = np.append(positions.start_ns[1:], positions.end_ns)[: len(positions.start_ns)]
    rows: list[tuple[Ints, Ints, Ints]] = []
    for kind in _ON_TIME:
        own = np.flatnonzero((positions.position == kind) & (positions.start_ns < until))
        goes_on = np.append(False, np.diff(own) == 1)[: len(own)]
        goes_on[1:] &= positions.period[own[1:]] == positions.period[own[:-1]]
        heads = np.flatnonzero(~goes_on)
        tails = np.append(heads[1:], len(own))[: len(heads)] - 1
        rows.append((positions.start_ns[own[heads]], end[own[tails]], np.full(len(heads), kind)))
    first = 0 if rank.first_step else begun[0]
    met, events = rank.found.phase == COLLECTIVE_PHASE, rank.events
    for kind, some, before in (
        (stored.EVALUATED, rank.found.evaluations, until),
        (stored.SAVED, events.take(events.kind == schema.SAVE).times, until),
        (stored.MET, rank.found.nested.spans.take(met).times, first),
    ):
        chosen = some.starts < before
        rows.append((some.starts[chosen], some.ends[chosen], np.full(chosen.sum(), kind)))
    start, stop, kinds = (np.concatenate(side) for side in zip(*rows, strict=True))
    order = np.argsort(start, kind="stable")
    step = np.searchsorted(begun, start, "right") - 1
    number = np.where(step < 0, -1, step + rank.first_step)
    return {"start_ns": start[order], "end_ns": stop[order], "kind": kinds[order],
            "step": number[order]}  # fmt: skip


def _pack_records(table: Table, columns: Columns) -> tuple[Sequence[Column], bytes]:
    """Records of a table, without columns that hold only zeros."""
    needed = {"first_step", "step_count", "start_ns", "trained_ns", "step_ns", "longest_ns"}
    chosen = [c for c in table.columns if table is not stored.BLOCKS or c.name in needed
              or np.any(columns[c.name] != 0)]  # fmt: skip
    types = [(column.name, NUMPY_TYPE[column.type]) for column in chosen]
    rows = np.zeros(len(columns[chosen[0].name]), dtype=types)
    for column in chosen:
        rows[column.name] = columns[column.name]
    return chosen, rows.tobytes()


def _fold_samples(
    rank: step_frame.RankSegments, positions: StepPositions, until_ns: int
) -> tuple[Columns, list[dict[str, Any]], int]:
    """Samples before a time with places, lines that name stacks, and where the file goes on."""
    folded, known = rank.folded, [dict(line) for line in rank.folded.file.stack_lines]
    first = folded.fact("first_stack_byte")
    older = record_columns(folded.file.sections["samples"])
    lines, byte = _whole_lines(rank.files.paths.stacks, first, until_ns)
    processes = {integer(x.get("pid")) for x in (*known, *lines) if x.get("type") == HEADER}
    pid = next(iter(processes), None)
    if not lines or len(processes) != 1 or pid is None:
        return dict(older), known, first
    tree = code_samples.StackTree()
    process = code_samples.SampledProcess(pid, None, ())
    for line in lines:
        if line.get("type") != HEADER:
            process.add(line, tree)
    columns, _ = process.samples(as_stored=True)
    time_ns = columns["time_ns"]
    phase, step = code_samples.locate(rank, time_ns)
    place = positions.at(time_ns)
    inside = (place >= 0) & ~np.append(positions.collecting, False)[place]
    new = {
        "time_ns": time_ns, "step": np.where(step < 0, -1, step + rank.first_step),
        "period": np.where(place < 0, -1, np.append(positions.period, 0)[place] + rank.first_step),
        "cpu_ns": columns["cpu_ns"], "queue_ns": columns["queue_ns"],
        "stack": np.maximum(columns["stack"], 0),
        "codes": pack_codes({
            "position": np.where(inside, np.append(positions.position, 0)[place], -1),
            "phase": phase, "lock_wait": columns["lock_wait"], "wait": columns["wait"],
            "around": np.append(positions.around_closure, False)[place] & inside,
            "hidden": is_hidden(time_ns, rank.busy),
        }),
    }  # fmt: skip
    joined = {name: np.append(older[name], own) for name, own in new.items()}
    return _thin(joined, MOST_SAMPLES), _defining_lines(known, lines), byte


_SUMMED = ("cpu_ns", "queue_ns", "weight_ns")


def _thin(samples: Columns, most: int) -> Columns:
    """At most so many, at even distances: each takes over the times of those left out."""
    order = np.argsort(samples["time_ns"], kind="stable")
    samples = {name: column[order] for name, column in samples.items()}
    time_ns = samples["time_ns"]
    if len(time_ns) <= most:
        return samples
    width = max(int(time_ns[-1] - time_ns[0]) // most, 1)
    heads = np.flatnonzero(np.diff((time_ns - time_ns[0]) // width, prepend=-1) > 0)
    thinned = {name: column[heads] for name, column in samples.items()}
    for name in samples.keys() & set(_SUMMED):
        total = np.add.reduceat(np.maximum(samples[name], 0), heads)
        seen = np.logical_or.reduceat(samples[name] >= 0, heads)
        thinned[name] = np.where(seen, total, -1)
    return thinned


def _whole_lines(path: Path, first: int, until_ns: int) -> tuple[list[dict[str, Any]], int]:
    """Lines of a file from a place on that are older than a time, and where the next one begins."""
    lines: list[dict[str, Any]] = []
    try:
        with open(path, "rb") as file:
            file.seek(first)
            at = first
            for text in file:
                line = json.loads(text) if text.endswith(b"\n") else None
                if not isinstance(line, dict):
                    break
                time_ns = integer(line.get("time_ns"))  # the last line of a process has none
                if (time_ns is None and line.get("type") != END) or (time_ns or 0) >= until_ns:
                    break
                lines.append(line)
                at += len(text)
    except (OSError, ValueError):
        return [], first
    return lines, at


def _defining_lines(
    known: list[dict[str, Any]], lines: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The header, and one line with all frames and stacks of these lines."""
    header: dict[str, Any] = {}
    all_of: dict[str, Any] = {
        "type": "samples", "pid": 0, "time_ns": 0, "first_frame": 0, "frames": [],
        "first_stack": 1, "stacks": [], "offset_us": [], "stack": [],
    }  # fmt: skip
    for line in (*known, *lines):
        if line.get("type") == HEADER:
            header = dict(line)
            continue
        all_of |= {"pid": line.get("pid", 0), "time_ns": line.get("time_ns", 0)}
        for entries, first in (("frames", "first_frame"), ("stacks", "first_stack")):
            begin = (line.get(first) or 0) - all_of[first]
            if isinstance(line.get(entries), list) and begin == len(all_of[entries]):
                all_of[entries] += line[entries]
    return [header, all_of] if header else []


def fold_workers(paths: RankPaths, kept: Retention) -> str:
    """Folds the old samples of a rank's workers; why they stay, or nothing."""
    files = paths.worker_stack_files()
    older = code_samples.read_folded_workers(paths.old_worker_stacks)
    whole = [_whole_lines(p, older.get(n, (0, ()))[0], 1 << 62)[0] for n, p in files.items()]
    times = [integer(line.get("time_ns")) or 0 for lines in whole for line in lines]
    until_ns = max(times, default=0) - kept.samples_ns
    if not any(time_ns < until_ns for time_ns in times):
        return ""
    places: dict[str, int] = {}
    folded: list[dict[str, Any]] = []
    for number, path in files.items():
        first_byte, known = older.get(number, (0, ()))
        lines, places[str(number)] = _whole_lines(path, first_byte, until_ns)
        folded += _fold_worker(number, [*known, *lines], MOST_WORKER_SAMPLES // len(files))
    first = {"type": FOLDED_WORKERS, "version": STACKS_VERSION, "first_bytes": places}
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (first, *folded))
    stored.write_synced(paths.old_worker_stacks, text.encode(), below=paths.run_root)
    for number, path in files.items():
        stored.free_beginning(path, first=0, end=places[str(number)], below=paths.run_root)
    return ""


def _fold_worker(
    number: int, lines: Sequence[Mapping[str, Any]], most: int
) -> Iterator[dict[str, Any]]:
    """Lines that stand for all samples of one worker, and begin the process that goes on."""
    tree = code_samples.StackTree()
    processes = code_samples.sampled_processes(lines, tree)
    parts = [process.samples()[0] for process in processes]
    names = parts[0] if parts else ()
    samples = {name: np.concatenate([part[name] for part in parts]) for name in names}
    if samples and len(samples["time_ns"]):
        libraries = sorted({folder for process in processes for folder in process.libraries})
        yield from _lines_of(number, libraries, _thin(samples, most), tree.whole())
    last = lines[-1] if lines else {}
    if last.get("type") != END and (integer(last.get("pid")) or -1) >= 0:
        own = [line for line in lines if line.get("pid") == last.get("pid")]
        yield from _defining_lines([], own)


def _lines_of(
    number: int, libraries: Sequence[str], samples: Columns, tree: code_samples.CodeTree
) -> Iterator[dict[str, Any]]:
    """Header and samples of a process that stands for all of a worker."""
    sampled = np.unique(samples["stack"]).tolist()
    used = {at for stack in sampled for at in tree.outwards(stack)}
    stacks = {stack: at for at, stack in enumerate(sorted(used), start=1)} | {0: 0}
    frames = {place: at for at, place in enumerate(sorted({int(tree.place[s]) for s in used}))}
    begin, pid = int(samples["time_ns"][0]), -1 - number
    yield {"type": HEADER, "version": STACKS_VERSION, "pid": pid, "worker": number,
           "time_ns": begin, "hz": 0.0, "libraries": libraries}  # fmt: skip
    known = [tree.frames[place] for place in frames]
    yield {
        "type": SAMPLES, "pid": pid, "time_ns": begin,
        "first_frame": 0,
        "frames": [[*f[:3], f.line, *f[3:]] for f in known],
        "first_stack": 1,
        "stacks": [[stacks[int(tree.parent[s])], frames[int(tree.place[s])]] for s in sorted(used)],
        "offset_us": ((samples["time_ns"] - begin) // 1000).tolist(),
        "stack": [stacks[stack] for stack in samples["stack"].tolist()],
        "lock_wait": "".join(LOCK_STATES[at] for at in samples["lock_wait"].tolist()),
        "wait": "".join(WAIT_LETTERS[at] for at in samples["wait"].tolist()),
        **{name: np.where(ns < 0, -1, ns // 1000).astype(np.int64).tolist() for name, ns in (
            ("run_us", samples["cpu_ns"]), ("queue_us", samples["queue_ns"]),
            ("weight_us", samples["weight_ns"]),
        )},
    }  # fmt: skip


# -- nodes -----------------------------------------------------------------------------------------


def fold_counters(node: NodeFiles, table: Table, kept: Retention) -> str:
    """Folds the old records of one source; why they stay, or nothing."""
    path, target = node.paths.records(table.name), node.paths.old_records(table.name)
    if not os.path.lexists(path):
        return ""
    older, raw = read_folded_source(node, table)
    rows = record_rows(raw)
    if not len(rows):
        return ""
    reached = np.maximum.accumulate(rows["time_ns"])
    until = int(reached[-1]) - kept.counters_ns
    if not (count := int(np.searchsorted(reached, until - until % MINUTE_NS))):
        return ""
    wall_ns = rows["time_ns"][:count] + (raw.clock.wall_ns - raw.clock.mono_ns)
    whole = np.zeros(count, dtype=np.bool_)
    for line in node.of_type("process_end"):
        if (end := integer(line.get("wall_ns"))) is not None:
            whole |= (wall_ns >= end - BESIDE_DEATH_NS[0]) & (wall_ns <= end + BESIDE_DEATH_NS[1])
    folded = fold_rows(rows[:count], raw.columns, whole)
    data = (b"" if older is None else older.data) + folded.tobytes()
    header = {**raw.header, "folded": {"records": raw.first + count}}
    stored.write_folded_records(target, header, data, below=node.paths.run_root)
    end = raw.start + (raw.first + count) * raw.record_bytes
    stored.free_beginning(path, first=raw.start, end=end, below=node.paths.run_root)
    return ""
