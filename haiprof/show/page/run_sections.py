"""Tables of the page about the run itself, and its slowest step as a timeline."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import polars as pl

from haiprof.base.errors import HaiprofError, RunFormatError
from haiprof.base.units import MISSING, duration_text
from haiprof.run_analysis.run_files import number
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest
from haiprof.run_format.reader import read_json
from haiprof.show.figures.style import PHASES
from haiprof.show.frame_table import Fields, PageTable, page_table, record_cells, text_table
from haiprof.show.summary import OverviewSummary, RankSummary, rank_name
from haiprof.show.text import moment_text, printable
from haiprof.trace_analysis.files import files_by_window

_SLOW_LIMIT, _LATE_LIMIT = 5, 16
_UNSET: tuple[object, ...] = (None, False, "", [], {})


_NODES: Fields = (
    (lambda node: printable(node.host or MISSING), "host"), ("cpu_count", "CPUs"),
    ("cpu_utilization_ratio", "CPU"), ("memory_used_bytes", "memory used"),
    ("memory_total_bytes", "memory in all"), ("disk_read_bytes_per_s", "disk read"),
    ("disk_write_bytes_per_s", "disk write"), ("network_receive_bytes_per_s", "received"),
    ("network_transmit_bytes_per_s", "sent"),
)  # fmt: skip


def _phase_field(phase: str) -> Callable[[RankSummary], str]:
    return lambda rank: duration_text(rank.split_ns.get(phase))


_RANKS: Fields = (
    (rank_name, "rank"), (lambda rank: printable(rank.host or MISSING), "host"),
    (lambda rank: printable(rank.device or MISSING), "device"), ("step_count", "steps"),
    ("mean_step_ns", "mean step"), ("median_step_ns", "median step"),
    *((_phase_field(phase), phase) for phase in PHASES), ("cpu_cores", "CPU cores"),
    ("memory_rss_bytes", "memory"), ("read_bytes_per_s", "read"),
)  # fmt: skip
_RANK_GPUS: Fields = (("gpu_utilization_ratio", "GPU"), ("gpu_memory_used_bytes", "GPU memory"))
"""Columns that are left out where no rank has a value."""


def rank_table(summary: OverviewSummary) -> PageTable:
    """A row per rank and attempt."""
    known = [f for f in _RANK_GPUS if any(getattr(r, str(f[0])) is not None for r in summary.ranks)]
    return _records(summary.ranks, (*_RANKS, *known), left=("host", "device"))


def node_table(summary: OverviewSummary) -> PageTable:
    """A row per host."""
    return _records(summary.nodes, _NODES, left=("host",))


def _records(records: Sequence[object], fields: Fields, *, left: Sequence[str]) -> PageTable:
    rows = [[cell.plain for cell in record_cells(record, fields)] for record in records]
    return text_table("", [head for _, head in fields], rows, left=left)


def phase_table(steps: pl.DataFrame) -> PageTable:
    """Each phase over the steps given: of all ranks, warm and not traced."""
    head = ("phase", "5 %", "median", "95 %", "longest", "median on the GPU")
    rows = []
    for phase in PHASES:
        times, device = steps[f"{phase}_host_ns"], steps[f"{phase}_device_ns"]
        spread = [times.quantile(q) for q in (0.05, 0.5, 0.95)]
        known = [number(value) for value in (*spread, times.max(), device.median())]
        if times.count() or device.count():
            rows.append((phase, *map(duration_text, known)))
    shown = len(head) - all(row[-1] == MISSING for row in rows)
    return text_table(
        "Times of phases", head[:shown], [row[:shown] for row in rows], left=("phase",)
    )


def slow_table(steps: pl.DataFrame) -> PageTable:
    """The slowest steps of all ranks, and what each consists of."""
    slowest = steps.sort("step_ns", "rank", "step", descending=[True, False, False])
    rank = [("rank", "rank")] if steps["rank"].n_unique() > 1 else []
    columns = [*rank, ("step", "step"), ("step_ns", "took"),
               *((f"{phase}_host_ns", phase) for phase in PHASES)]  # fmt: skip
    return page_table("Slowest steps", slowest.head(_SLOW_LIMIT), columns, limit=_SLOW_LIMIT)


def late_table(late: pl.DataFrame) -> PageTable:
    """The latest ranks of all groups."""
    columns = [
        ("rank", "rank"), ("group_name", "group"), ("late_per_step_ns", "late per step"),
        ("late_ns", "in all"), ("last_ratio", "alone last"), ("kind", "mostly at"),
        ("collective_count", "collectives"), ("step_count", "steps"),
    ]  # fmt: skip
    named = late.rename({"late_ns_per_step": "late_per_step_ns"})
    return page_table("", named, columns, limit=_LATE_LIMIT)


def collective_table(collectives: pl.DataFrame) -> PageTable:
    """Collectives of the ranks' Flight Recorders, by group and kind."""
    found = (
        collectives.group_by("group_name", "kind")
        .agg(
            rank_count=pl.col("rank").n_unique(),
            count=pl.len(),
            median_ns=(pl.col("completed_ns") - pl.col("created_ns")).median(),
        )
        .sort("count", "group_name", "kind", descending=[True, False, False])
    )
    columns = [("group_name", "group"), ("kind", "kind"), ("rank_count", "ranks"),
               ("count", "in the record"), ("median_ns", "from call to end")]  # fmt: skip
    return page_table("Recorded", found, columns, limit=_LATE_LIMIT)


def trace_files(run: RunPaths) -> tuple[list[list[Path]], str]:
    """Traces by window, ranks in order; or why there are none."""
    if not run.traces.is_dir():
        return [], "no traces in this run: `--trace` records a window"
    try:
        return [[member.path for member in found] for found in files_by_window(run.root)], ""
    except (HaiprofError, OSError) as error:
        return [], printable(str(error))


def file_size(path: Path) -> int | None:
    """Bytes; None where it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def snapshot_table(run: RunPaths) -> PageTable | None:
    """The run's snapshots; None without any."""
    rows = list(_snapshots(run))
    head = ("taken", "who holds the job up", "why", "kept in snapshots/")
    return text_table("", head, rows, left=head) if rows else None


def _snapshots(run: RunPaths) -> Iterator[tuple[str, ...]]:
    for path in run.snapshot_files():
        try:
            found = read_json(path)
        except RunFormatError:
            yield MISSING, MISSING, "cannot be read", printable(path.parent.name)
            continue
        wall, listed = found.get("wall_ns"), found.get("suspects")
        suspects = [s for s in listed if isinstance(s, dict)] if isinstance(listed, list) else []
        yield (
            moment_text(wall if isinstance(wall, int) else None),
            ", ".join(f"rank {printable(str(s.get('rank')))}" for s in suspects) or "nobody",
            "; ".join(printable(str(s.get("reason"))) for s in suspects[:3]) or MISSING,
            printable(path.parent.name),
        )


def one_rank_facts(ranks: PageTable, nodes: PageTable) -> tuple[tuple[str, str], ...]:
    """What the tables of ranks and hosts say of the only rank, without what the ledger says."""
    if len(ranks.rows) != 1:
        return ()
    said = {"rank", "steps", "mean step", "median step", *PHASES}
    own = [pair for pair in zip(ranks.head, ranks.rows[0], strict=True) if pair[0] not in said]
    host = zip(nodes.head[1:], nodes.rows[0][1:], strict=True) if len(nodes.rows) == 1 else ()
    return (*own, *host)


def option_pairs(manifest: Manifest | None) -> tuple[tuple[str, str], ...]:
    """The options that were set."""
    options = manifest.options.items() if manifest else ()
    return tuple(
        (f"--{printable(name).replace('_', '-')}", printable(_option(value)))
        for name, value in options if value not in _UNSET
    )  # fmt: skip


def environment_pairs(
    run: RunPaths, manifest: Manifest | None, ranks: pl.DataFrame
) -> tuple[tuple[str, str], ...]:
    """What was run, where, and with which versions."""
    known = manifest or Manifest(haiprof_version="", name=run.root.name, command=[])
    versions = [
        (name, ", ".join(sorted(printable(v) for v in ranks[column].drop_nulls().unique())))
        for name, column in (("Python", "python"), ("torch", "torch"), ("device", "device"))
    ]
    hosts = sorted(printable(host) for host in ranks["host"].drop_nulls().unique())
    shown = ", ".join(hosts[:_LATE_LIMIT])
    shown += f" and {len(hosts) - _LATE_LIMIT} more" if len(hosts) > _LATE_LIMIT else ""
    return (
        ("command", printable(shlex.join(map(str, known.command)))),
        ("folder", printable(known.cwd) or MISSING),
        ("started", moment_text(known.start_wall_ns or None)),
        ("hosts", shown or MISSING),
        *((name, text or MISSING) for name, text in versions),
        ("haiprof", printable(known.haiprof_version) or MISSING),
        ("run directory", printable(str(run.root))),
    )


def _option(value: object) -> str:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ",".join(value)  # as on the command line
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
