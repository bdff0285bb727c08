"""Which nodes the verdicts and preflights of a log directory named: how often, and as what."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, RunFormatError
from haiprof.base.safe_files import make_folder, make_named_folder
from haiprof.diagnosis.preflight import Preflight
from haiprof.diagnosis.restart_advice import OF_NODES
from haiprof.run_analysis.run_files import entries, integer, mapping, objects, text
from haiprof.run_format.layout import RunPaths, preflight_file, preflight_files
from haiprof.run_format.manifest import find_runs, read_manifest
from haiprof.run_format.reader import read_json
from haiprof.run_format.writer import write_json

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """One time that a node was named."""

    host: str
    role: str
    """`finding`: a rank there, or the machine, held the others up; `death`: ranks there died first,
    of what a sick node does; `left out`: a restart without it was advised; `preflight`."""
    what: str  # Slug of the finding, cause of the death, reason of the advice, or what was slow
    source: str  # Name of the run; `preflight`
    wall_ns: int  # Unix time: when the run began, or the preflight was


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedNode:
    """A node that was named."""

    host: str
    run_count: int  # Runs with a verdict that it was in
    named_run_count: int  # Those of them whose verdict named it
    namings: tuple[Naming, ...]  # Oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNames:
    """What a log directory says of its nodes."""

    nodes: tuple[NamedNode, ...]  # Those named most often first
    run_count: int  # Runs whose verdict was read
    node_count: int  # Nodes that they ran on
    preflight_count: int
    unjudged: tuple[str, ...]  # Runs without a verdict that was kept at their end: they name nobody


def read_named_nodes(log_dir: Path) -> NodeNames:
    """Reads the verdicts that were kept at the ends of runs, and the kept preflights."""
    runs_of, folders = Counter[str](), find_runs(log_dir)
    unjudged, preflights = list[str](), list(read_preflights(log_dir))
    namings = [naming for each in preflights for naming in _of_preflight(each)]
    for folder in folders:
        run = RunPaths(folder)
        try:
            content, start_ns = read_json(run.verdict_json), read_manifest(run).start_wall_ns
        except HaiprofError:
            unjudged.append(folder.name)
            continue
        runs_of.update(host for host, _ in run.node_folders())
        namings += _of_verdict(content, folder.name, start_ns)
    by_host = defaultdict[str, list[Naming]](list)
    for naming in sorted(namings, key=lambda each: (each.wall_ns, each.role == _PREFLIGHT)):
        by_host[naming.host].append(naming)
    nodes = []
    for host, own in by_host.items():
        named_in = {each.source for each in own if each.role != _PREFLIGHT}
        nodes.append(NamedNode(host=host, run_count=runs_of[host], named_run_count=len(named_in),
                               namings=tuple(own)))  # fmt: skip
    return NodeNames(
        nodes=tuple(sorted(nodes, key=lambda node: (-len(node.namings), node.host))),
        run_count=len(folders) - len(unjudged),
        node_count=len(runs_of),
        preflight_count=len(preflights),
        unjudged=tuple(unjudged),
    )


_PREFLIGHT = "preflight"


def _of_verdict(content: Mapping[str, Any], run: str, start_ns: int) -> Iterator[Naming]:
    named: list[tuple[object, str, object]] = []
    for finding in objects(content.get("findings")):
        if finding.get("severity") != "info":
            named += [(host, "finding", finding.get("slug")) for host in _texts(finding, "nodes")]
    advice = mapping(content.get("advice"))
    for attempt in objects(advice.get("attempts")):
        cause = attempt.get("cause")
        if attempt.get("run") == run and (cause in OF_NODES or attempt.get("is_hardware") is True):
            named += [(host, "death", cause) for host in _texts(attempt, "hosts")]
    named += [(host, "left out", advice.get("reason")) for host in _texts(advice, "nodes")]
    for host, role, what in named:
        yield Naming(host=str(host), role=role, what=text(what) or "", source=run, wall_ns=start_ns)


def _of_preflight(content: Mapping[str, Any]) -> Iterator[Naming]:
    """One time for each node, with all that was slow there."""
    slow: dict[str, dict[str, None]] = {host: {} for host in _texts(content, "leave_out")}
    for one in objects(content.get("suspects")):
        host, what = text(one.get("host")), text(one.get("what"))
        if host and what and (one.get("to_host") is None or host in slow):
            slow.setdefault(host, {})[what] = None
    wall_ns = integer(content.get("wall_ns")) or 0
    for host, whats in slow.items():
        what = ", ".join(whats) or "links"
        yield Naming(host=host, role=_PREFLIGHT, what=what, source=_PREFLIGHT, wall_ns=wall_ns)


def failed_before(log_dir: Path, hosts: Sequence[str], until_ns: int) -> list[Naming]:
    """What the last preflight of each of these nodes, before that time, found wrong with it."""
    found: dict[str, Naming | None] = dict.fromkeys(hosts)
    for content in read_preflights(log_dir):
        if (integer(content.get("wall_ns")) or 0) < until_ns:
            own = {naming.host: naming for naming in _of_preflight(content)}
            found |= {host: own.get(host) for host in _texts(content, "hosts") if host in found}
    return [naming for naming in found.values() if naming is not None]


def keep_preflight(found: Preflight, log_dir: Path, wall_ns: int) -> Path:
    """Keeps what a preflight found in a log directory; returns the file."""
    path = preflight_file(log_dir, wall_ns)
    make_named_folder(log_dir)
    make_folder(path.parent, below=log_dir)
    content = {
        "version": _VERSION, "wall_ns": wall_ns,
        "hosts": sorted({own["host"] for own in found.ranks}), "leave_out": found.leave_out,
        "suspects": [asdict(one) for one in found.suspects],
    }  # fmt: skip
    write_json(path, content, below=log_dir)
    return path


def read_preflights(log_dir: Path) -> Iterator[Mapping[str, Any]]:
    """Those that were kept, oldest first; damaged ones and those of another version are none."""
    for path in preflight_files(log_dir):
        try:
            content = read_json(path)
        except RunFormatError:
            continue
        if content.get("version") == _VERSION:
            yield content


def _texts(content: Mapping[str, Any], name: str) -> list[str]:
    return [each for each in map(text, entries(content.get(name))) if each]
