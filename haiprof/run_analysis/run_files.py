"""Opens a run directory: what each rank and each node left, whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import RunFormatError
from haiprof.base.units import duration_text
from haiprof.run_analysis.records import clock_offset_ns, integer, text
from haiprof.run_format.layout import NodePaths, RankPaths, RunPaths
from haiprof.run_format.manifest import Manifest, newest_run, read_manifest
from haiprof.run_format.reader import check_version, read_failures, read_json, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """What one rank reported, apart from its spans."""

    rank: int
    attempt: int
    paths: RankPaths
    report: Mapping[str, Any]
    """rank.json; empty where it cannot be read."""
    lines: tuple[Mapping[str, Any], ...]
    """events.jsonl, in order."""
    notes: tuple[str, ...]
    """What was damaged."""

    @property
    def clock_offset_ns(self) -> int | None:
        """Unix time minus the rank's clock, as it wrote both when it began to be recorded."""
        return clock_offset_ns(self.report.get("clock"))

    def of_type(self, line_type: str) -> list[Mapping[str, Any]]:
        """Lines of one type, in order."""
        return [line for line in self.lines if line.get("type") == line_type]

    def names(self, line_type: str) -> dict[int, str]:
        """Name by tag, from `root` or `optimizer` lines."""
        found = ((integer(x.get("tag")), text(x.get("name"))) for x in self.of_type(line_type))
        return {tag: name for tag, name in found if tag is not None and name is not None}

    def families(self) -> dict[int, int]:
        """Family by root tag; roots of one family share their parameters."""
        found = ((integer(x.get("tag")), integer(x.get("family"))) for x in self.of_type("root"))
        return {tag: family for tag, family in found if tag is not None and family is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """What the agent of one host reported, apart from its counters."""

    host: str
    paths: NodePaths
    lines: tuple[Mapping[str, Any], ...]
    """events.jsonl, in order."""
    notes: tuple[str, ...]
    """What was damaged."""

    def of_type(self, line_type: str) -> list[Mapping[str, Any]]:
        """Lines of one type, in order."""
        return [line for line in self.lines if line.get("type") == line_type]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """A run directory as it was found."""

    paths: RunPaths
    manifest: Manifest | None
    """run.json; None where it is damaged."""
    ranks: tuple[RankFiles, ...]
    nodes: tuple[NodeFiles, ...]
    hook_failures: tuple[str, ...]
    """Processes in which the hook could not be loaded, with the error."""
    notes: tuple[str, ...]
    """What was damaged, ranks and nodes apart."""


def node_notes(node: NodeFiles) -> list[str]:
    """What was damaged, and what happened to the whole machine while it recorded."""
    gaps = [integer(line.get("gap_ns")) for line in node.of_type("suspend")]
    return [
        *node.notes,
        *(
            f"the machine was suspended for {duration_text(gap)}: rates are right, but Unix times"
            " after it are too early by as much"
            for gap in gaps
        ),
        *(_suspended_text(line) for line in node.of_type("job_suspended")),
    ]


def _suspended_text(line: Mapping[str, Any]) -> str:
    gap = duration_text(integer(line.get("gap_ns")))
    if line.get("seen") is True:
        return f"the job was suspended for {gap}: its ranks were stopped by a signal"
    return (
        f"the launcher did not run for {gap}: the job was suspended (Ctrl-Z, SIGSTOP), or the node "
        "had no time for it"
    )


def open_run(path: Path) -> RunFiles:
    """Opens a run directory, or the newest run of a log directory."""
    paths = RunPaths(newest_run(path))
    manifest, notes = _manifest(paths)
    ranks = tuple(_rank_files(*folder) for folder in paths.rank_folders())
    nodes = tuple(_node_files(*folder) for folder in paths.node_folders())
    if manifest is None and not any(r.lines for r in ranks) and not any(n.lines for n in nodes):
        raise RunFormatError(f"{notes[0]}; and no rank or node of this run can be read")
    return RunFiles(
        paths=paths,
        manifest=manifest,
        ranks=ranks,
        nodes=nodes,
        hook_failures=tuple(read_failures(paths.boot_failures)),
        notes=notes,
    )


def _manifest(paths: RunPaths) -> tuple[Manifest | None, tuple[str, ...]]:
    try:
        content = read_json(paths.manifest)
        version = content.get("version")
    except RunFormatError as error:
        return None, (str(error),)
    if type(version) is int:
        check_version(paths.manifest, version)
    try:
        return read_manifest(paths), ()
    except RunFormatError as error:
        return None, (str(error),)


def _rank_files(rank: int, attempt: int, paths: RankPaths) -> RankFiles:
    report, damaged = _json_or_note(paths.report)
    lines, more = _lines_or_note(paths.events)
    return RankFiles(
        rank=rank, attempt=attempt, paths=paths, report=report, lines=lines, notes=damaged + more
    )


def _node_files(host: str, paths: NodePaths) -> NodeFiles:
    lines, notes = _lines_or_note(paths.events)
    return NodeFiles(host=text(host) or "", paths=paths, lines=lines, notes=notes)


def _json_or_note(path: Path) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    try:
        return read_json(path), ()
    except RunFormatError as error:
        return {}, (str(error),)


def _lines_or_note(path: Path) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    try:
        lines, notes = read_lines(path)
    except RunFormatError as error:
        return (), (str(error),)
    return tuple(lines), notes
