"""Collectives of a run or of any dumps: which rank begins them later, and which contradict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from haiprof.base.collector import pause_collector
from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.intervals import Ints
from haiprof.base.units import ranks_text
from haiprof.run_analysis.run_files import RunFiles, note_damage, text
from haiprof.run_analysis.step_frame import RankSegments
from haiprof.run_format import schema
from haiprof.trace_format.clock_offsets import estimate_offsets
from haiprof.trace_format.flight_recorder import FLIGHT_SCHEMA, read_flight, read_torch_dump


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks that are at the same place of a group's sequence with different collectives."""

    group: str
    sequence: int
    what: str  # `kind`, `element_count` or `dtype`
    values: Mapping[str, tuple[int, ...]]  # ranks by value

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks with another value than the most common one; all of them where there is a tie."""
        ordered = sorted(self.values.items(), key=lambda item: -len(item[1]))
        tie = len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1])
        return tuple(sorted(rank for _, ranks in ordered[0 if tie else 1 :] for rank in ranks))

    def as_text(self) -> str:
        """For people."""
        said = ", ".join(f"{ranks_text(ranks)} {value}" for value, ranks in self.values.items())
        return f"collective {self.sequence} of group {self.group}: {said} ({self.what} differs)"


_SIZED = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "allreduce")
"""Kinds whose ranks all bring the same number of elements."""


def find_mismatches(collectives: pl.DataFrame) -> list[Mismatch]:
    """The first place of each group at which the ranks' collectives contradict each other.

    Source: matching by sequence number, then kind, size and type, as in torch's Flight Recorder
    analyzer (torch.distributed.flight_recorder.components).
    """
    found = []
    rows = collectives.filter(~pl.col("p2p"))
    # With `member`: the place of a collective among those of its rank with one sequence number.
    own = ["rank", "group"]
    rows = rows.with_columns(
        pl.int_range(pl.len()).over(*own, "sequence").alias("member"),
        pl.len().over(*own, "sequence").alias("member_count"),
        (pl.col("sequence") == pl.col("sequence").min().over(own)).alias("oldest"),
    )
    cut = pl.col("oldest") & (pl.col("sequence") > 1)
    unknown = cut.any() & (pl.col("member_count") > 1).any()
    rows = rows.filter(~unknown.over("group", "sequence"))
    sized = pl.col("kind").is_in(_SIZED)
    for (group,), part in rows.group_by("group", maintain_order=True):
        for what in ("kind", "element_count", "dtype"):
            # A scatter has inputs on its root alone.
            of_interest = part.drop_nulls(what).filter(sized | (what != "element_count"))
            unlike = pl.col(what).n_unique().over("sequence", "member") > 1
            differing = of_interest.filter(unlike).sort("sequence", "member", maintain_order=True)
            if differing.height:
                at = differing.join(differing.head(1), on=["sequence", "member"], how="semi")
                by_value = at.group_by(what, maintain_order=True).agg("rank").rows()
                values = {str(value): tuple(sorted(ranks)) for value, ranks in by_value}
                place = int(at["sequence"][0])
                found.append(Mismatch(group=str(group), sequence=place, what=what, values=values))
                break
    return found


MIN_MATCHES = 8  # fewer common collectives than this say nothing about a rank

_CLOCK_EVENTS = 256  # the last ones of each group of the first host that clocks are compared by

COLLECTIVE_SCHEMA = {"rank": pl.Int64, "attempt": pl.Int64, "host": pl.String, **FLIGHT_SCHEMA}
LATENESS_SCHEMA = {
    "rank": pl.Int64, "group": pl.String, "group_name": pl.String, "late_ns_per_step": pl.Float64,
    "late_ns": pl.Int64, "last_ratio": pl.Float64, "collective_count": pl.Int64,
    "step_count": pl.Int64, "kind": pl.String,
}  # fmt: skip


def collective_frame(files: RunFiles, *, since_ns: int = 0) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Every collective that the ranks' Flight Recorders still held when they were read."""
    frames, notes = [pl.DataFrame(schema=COLLECTIVE_SCHEMA)], list[str]()
    last = files.last_attempts()
    found = [(rank, path, False) for rank in files.ranks for path in rank.paths.collective_files()]
    if not since_ns:  # what PyTorch's own watchdog wrote before it ended ranks
        found += [(last[n], path, True) for n, path in files.paths.flight_files() if n in last]
    with pause_collector():
        for rank, path, is_torchs in found:
            with note_damage(notes):
                flight = read_torch_dump(path) if is_torchs else read_flight(path)
                if flight.wall_ns is None or flight.wall_ns >= since_ns:
                    own = {"rank": rank.rank, "attempt": rank.attempt,
                           "host": text(rank.report.get("host"))}  # fmt: skip
                    named = (pl.lit(own[name], COLLECTIVE_SCHEMA[name]).alias(name) for name in own)
                    frames.append(flight.entries.select(*named, *FLIGHT_SCHEMA))
    keys = ["rank", "attempt", "group", "kind", "sequence", "p2p", "created_ns"]
    rows = pl.concat(frames).unique(keys, maintain_order=True, keep="last")
    newest = rows.filter(pl.col("attempt") == pl.col("attempt").max())
    return newest.sort("rank", "created_ns", maintain_order=True), tuple(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The collectives of one group that all its ranks began."""

    group: str
    group_name: str
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    sequence: Ints  # [collective]: its number in the group
    created_ns: Ints  # [rank, collective], on one clock, in the order of the group's sequence


def host_clock_offsets(collectives: pl.DataFrame) -> dict[str, int | None]:
    """By host: what to subtract from its Unix times to get those of the first host.

    From the completions of collectives that both took part in, to within how often ranks look for
    them (`clock_offsets`). None where fewer than `MIN_MATCHES` are shared with the first host, as
    of backends that do not tell completions (gloo).
    """
    hosts = collectives["host"].drop_nulls().unique().sort().to_list()
    known = collectives.filter(~pl.col("p2p")).drop_nulls(["completed_ns", "host"])
    end_ns, keys = pl.col("completed_ns").median(), ["group", "sequence"]
    ends = known.group_by(*keys, clock="host").agg(end_ns=end_ns)
    of_first = ends.filter(pl.col("clock").is_in(hosts[:1])).sort(keys)
    events = of_first.group_by("group", maintain_order=True).tail(_CLOCK_EVENTS)
    shared = ends.join(events.with_row_index("event").select(*keys, "event"), on=keys)
    shared = shared.filter(pl.len().over("clock") >= MIN_MATCHES)
    offsets = dict(estimate_offsets(shared).select("clock", "offset_ns").rows())
    first_ns = offsets.get(hosts[0], 0.0) if hosts else 0.0
    found = {host: round(offsets[host] - first_ns) if host in offsets else None for host in hosts}
    return found | dict.fromkeys(hosts[:1], 0)


def arrivals(collectives: pl.DataFrame, clocks: Mapping[str, int | None]) -> list[Arrivals]:
    """Collectives by group, those that all ranks seen in the group have in common."""
    # Ranks of hosts whose clocks are not known to each other are not compared: a group that spans
    # them falls into one part per clock.
    offset = {host: offset_ns or 0 for host, offset_ns in clocks.items()}
    own = {host: host if offset_ns is None else "" for host, offset_ns in clocks.items()}
    rows = collectives.filter(~pl.col("p2p") & pl.col("created_ns").is_not_null()).with_columns(
        pl.col("created_ns")
        - pl.col("host").replace_strict(offset, default=0, return_dtype=pl.Int64),
        clock=pl.col("host").replace_strict(own, default="", return_dtype=pl.String),
    )
    keys = ["group", "group_name", "clock"]
    parts = (_arrivals(part) for part in rows.partition_by(keys, maintain_order=True))
    return [part for part in parts if part is not None]


def _arrivals(part: pl.DataFrame) -> Arrivals | None:
    ranks = tuple(part["rank"].unique().sort().to_list())
    once = part.unique(["rank", "sequence"], keep="last", maintain_order=True)
    common = pl.len().over("sequence") == len(ranks)
    alike = pl.col("kind").n_unique().over("sequence") == 1
    whole = once.filter(common & alike).sort("rank", "sequence")
    if len(ranks) < 2 or whole.height < len(ranks) * MIN_MATCHES:
        return None
    table = whole["created_ns"].to_numpy().reshape(len(ranks), -1)
    return Arrivals(
        group=part["group"][0], group_name=part["group_name"][0], ranks=ranks,
        kinds=tuple(whole["kind"].head(table.shape[1]).to_list()),
        sequence=whole["sequence"].head(table.shape[1]).to_numpy(), created_ns=table,
    )  # fmt: skip


def lateness(groups: Sequence[Arrivals], steps: pl.DataFrame) -> pl.DataFrame:
    """How much later than the others each rank begins its collectives.

    In a synchronous job the others wait for the slow rank, wherever it is slow: it enqueues its
    collectives last and has the shortest ones. Lateness at a collective is the start less that of
    the middle rank (the lower one of two). Where every rank begins the next collective after the
    last has begun this one, they have waited for each other, and lateness counts anew; elsewhere
    (buckets of one backward pass) only the largest value of a delay that is seen again counts.
    Source: enqueue skew of equal sequence numbers; C4 (HPCA 2025) has the same anchors.
    """
    if not groups:
        return pl.DataFrame(schema=LATENESS_SCHEMA)
    ordered = steps.select("rank", "start_ns").sort("rank", "start_ns")
    starts = {
        own["rank"][0]: own["start_ns"].to_numpy()
        for own in ordered.partition_by("rank", maintain_order=True)
    }
    rows = [row for group in groups for row in _rows(group, starts)]
    return pl.DataFrame(rows, schema=LATENESS_SCHEMA, orient="row").sort(
        ["late_ns_per_step", "rank"], descending=[True, False], nulls_last=True
    )


def _rows(group: Arrivals, starts_of: Mapping[int, Ints]) -> list[tuple[object, ...]]:
    created = group.created_ns
    middle = np.sort(created, axis=0)[(len(created) - 1) // 2]
    late = np.maximum(created - middle, 0)
    # Where all ranks have waited for each other.
    waited = created.min(axis=0)[1:] >= created.max(axis=0)[:-1]
    begins = np.flatnonzero(np.append(True, waited))
    largest = np.maximum.reduceat(late, begins, axis=1)
    last = created == created.max(axis=0)
    alone = last & (last.sum(axis=0) == 1)
    rows: list[tuple[object, ...]] = []
    for place, rank in enumerate(group.ranks):
        starts = starts_of.get(rank, np.empty(0, dtype=np.int64))
        in_steps = _by_step(starts, created[place][begins], largest[place])
        names, places = np.unique(np.array(group.kinds), return_inverse=True)
        sums = np.bincount(places, weights=late[place].astype(np.float64))
        rows.append((
            rank, group.group, group.group_name,
            float(np.median(in_steps)) if len(in_steps) else None, int(in_steps.sum()),
            float(alone[place].mean()), created.shape[1], len(in_steps),
            str(names[int(sums.argmax())]),
        ))  # fmt: skip
    return rows


def _by_step(starts: Ints, created: Ints, late: Ints) -> Ints:
    """[step]: lateness of a rank in each step that the collectives cover."""
    place = np.searchsorted(starts, created, side="right") - 1
    inside = place >= 0
    sums = np.bincount(place[inside], weights=late[inside].astype(np.float64))
    covered: Ints = sums[place[inside].min(initial=len(sums)) :].round().astype(np.int64)
    return covered


def tail_ratio(rank: RankSegments, created: np.ndarray) -> tuple[float, float] | None:
    """The share of backward after the last collective begun in each pass; None: not known.

    And in which share of the passes one was begun.

    Gradients are averaged as they become ready, so the last collective is begun when the rank's own
    work is done; what follows until backward returns is transfer, and waiting for other ranks.
    Source: torch DistributedDataParallel, "Internal Design": buckets are reduced as hooks fire.
    """
    spans = rank.found.nested.spans
    backward = np.flatnonzero(spans.kind == schema.BACKWARD)
    start = spans.start_ns[backward] + rank.wall_offset_ns
    end = spans.end_ns[backward] + rank.wall_offset_ns
    last = np.searchsorted(created, end, side="right") - 1
    inside = last >= 0
    inside[inside] = created[last[inside]] >= start[inside]
    passes = np.flatnonzero(inside)
    if len(passes) < MIN_MATCHES:
        return None
    # Of passes that accumulate gradients (`no_sync`) none begins a collective: they are all work.
    known = slice(passes[0], passes[-1] + 1)
    after = end[passes] - created[last[passes]]
    tail = float(after.sum() / (end - start)[known].sum())
    return tail, len(passes) / (known.stop - known.start)


_RANK = re.compile(r"rank[-_]?(\d{1,7})(?!\d)|(\d{1,7})(?=\.[a-z]+$|$)", re.IGNORECASE)
"""`nccl_trace_rank_3`, `dump_3.pickle`."""
_NOT_DUMPS = (".txt", ".log", ".md", ".py", ".csv")
_RUNNING = ("scheduled", "started")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightVerdict:
    """What the dumps of a job say together."""

    findings: tuple[str, ...]
    """Sentences, the most telling first; empty where the ranks agree and nothing is unfinished."""
    ranks: tuple[int, ...]  # whom the first finding names
    last: pl.DataFrame
    """Per group and rank the last collective: `group_name`, `rank`, `kind`, `sequence`, `state`
    (null where the backend does not tell), `element_count`, `dtype`, `created_ns`, `line`
    (of the job's code; null without stacks)."""
    notes: tuple[str, ...]  # what could not be read, and what cannot be told


def judge_dumps(paths: Sequence[Path]) -> FlightVerdict:
    """Reads one dump per rank: files, or folders of them."""
    frames, notes = [], list[str]()
    members: dict[str, Sequence[int]] = {}
    with pause_collector():
        for rank, path in _by_rank(paths).items():
            with note_damage(notes):
                flight = read_torch_dump(path)
                members |= flight.groups
                line = pl.Series("line", flight.lines, pl.String)
                own = flight.entries.with_columns(line, rank=pl.lit(rank, pl.Int64))
                frames.append(own.unique([*FLIGHT_SCHEMA, "rank"], maintain_order=True))
    if not frames:
        raise MissingDataError(notes[0] if notes else f"{paths[0]}: no dump in it")
    rows = pl.concat(frames)
    return _judge(rows, members, sorted(set(rows["rank"])), notes)


def _by_rank(paths: Sequence[Path]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in paths:
        if not path.exists():
            raise TraceFormatError(f"{path}: no such file or folder")
        inside = [file for file in sorted(path.iterdir()) if _RANK.search(file.name)
                  and file.suffix not in _NOT_DUMPS and file.is_file()
                  ] if path.is_dir() else [path]  # fmt: skip
        for file in inside:
            if not (named := _RANK.search(file.name)):
                raise TraceFormatError(
                    f"{file}: its name does not say its rank", hint="name it rank_0, rank_1, ..."
                )
            rank = int(named[1] or named[2])
            if rank in found:
                raise TraceFormatError(
                    f"two dumps of rank {rank}: {found[rank]} and {file}",
                    hint="name the files of one dump, one per rank",
                )
            found[rank] = file
    return dict(sorted(found.items()))


def _judge(
    rows: pl.DataFrame, members: dict[str, Sequence[int]], ranks: list[int], notes: list[str]
) -> FlightVerdict:
    names = dict(rows.select("group", "group_name").unique().rows())
    found: list[tuple[str, tuple[int, ...]]] = []
    contradictions = find_mismatches(rows)
    for each in contradictions:
        at = rows.filter((pl.col("group") == each.group) & (pl.col("sequence") == each.sequence))
        said = ", ".join(f"{ranks_text(r)} {value}" for value, r in each.values.items())
        label = "collective" if each.what == "kind" else at["kind"].mode().sort()[0]
        found.append((
            f"{label} {each.sequence} of group {names[each.group]} does not match: {said} "
            f"({each.what.replace('_', ' ')} differs{_lines(at.filter(~pl.col('p2p')))})",
            each.odd,
        ))  # fmt: skip
    own = rows.filter(~pl.col("p2p"))
    last = own.sort("sequence", maintain_order=True).unique(
        ["group", "rank"], keep="last", maintain_order=True
    )
    for (group,), part in last.sort("group").group_by("group", maintain_order=True):
        in_group = members.get(str(group)) or part["rank"].to_list()
        if group not in {each.group for each in contradictions}:
            found += _judge_last(part, sorted({*in_group} & {*ranks}), names[str(group)])
        if absent := sorted({*in_group} - {*ranks}):
            notes.append(f"no dump of {ranks_text(absent)} of group {names[str(group)]}")
    if _tells(rows):
        running = rows.filter(pl.col("p2p") & pl.col("state").is_in(_RUNNING))
        waiting = running.select("rank", "kind", "group_name").unique(maintain_order=True).rows()
        notes += [f"rank {rank} has not completed {kind} of group {n}" for rank, kind, n in waiting]
    else:
        last = last.with_columns(state=pl.lit(None, pl.String))
        notes.append("which collectives have ended is not known: the backend does not tell (gloo)")
    columns = ["group_name", "rank", "kind", "sequence", "state", "element_count", "dtype",
               "created_ns", "line"]  # fmt: skip
    return FlightVerdict(
        findings=tuple(text for text, _ in found), ranks=found[0][1] if found else (),
        last=last.sort("group", "rank").select(columns), notes=tuple(notes),
    )  # fmt: skip


def _judge_last(
    part: pl.DataFrame, ranks: Sequence[int], name: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A group's last collective where a rank has not come to it, or where it does not end."""
    top = int(part["sequence"].max())  # type: ignore[arg-type]
    there = part.filter(pl.col("sequence") == top)
    if not there["state"].is_in(_RUNNING).any():
        return
    what = f"{there['kind'][0]} {top} of group {name}"
    away = tuple(rank for rank in ranks if rank not in there["rank"])
    if away:
        before = {
            rank: f"{kind} {number}" + (f" at {line}" if line else "")
            for rank, kind, number, line in part.select("rank", "kind", "sequence", "line").rows()
        }
        is_one = len(away) == 1
        said = before.get(away[0], "none")
        yield (
            f"{ranks_text(away)} {'has' if is_one else 'have'} not come to {what}, in which "
            f"{ranks_text(there['rank'].to_list())} "
            f"{'waits' if len(there) == 1 else 'wait'}{_lines(there)}; "
            f"the last one of {'it' if is_one else f'rank {away[0]}'} there is {said}",
            away,
        )
        return
    if not _tells(part):
        return
    not_begun = tuple(sorted(there.filter(pl.col("state") == "scheduled")["rank"]))
    running = tuple(sorted(there.filter(pl.col("state") == "started")["rank"]))
    if not_begun and running:
        yield (
            f"{what} has begun on {ranks_text(running)} and waits on {ranks_text(not_begun)}: its "
            "GPU is busy with what was enqueued before it",
            not_begun,
        )
    elif running:
        yield (
            f"{what} has begun on all of its ranks and not ended on {ranks_text(running)}: a link "
            "or a GPU that fails, or data that is still under way",
            running,
        )


def _tells(rows: pl.DataFrame) -> bool:
    """Whether states are known: some backends (gloo) leave each as it was enqueued."""
    return bool(rows["started_ns"].count() or rows["completed_ns"].count())


def _lines(there: pl.DataFrame) -> str:
    """`, at train.py:3 in step`: where the job's code enqueued it."""
    lines = there["line"].drop_nulls().unique(maintain_order=True).to_list()
    return f", at {' and '.join(lines[:2])}" if lines else ""
