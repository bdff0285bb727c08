"""How a job's scheduler says that it ended: Slurm's and Kubernetes' own words, as a cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from haiprof.base.errors import RunFormatError
from haiprof.base.units import NS_PER_S, shorten, visible
from haiprof.base.version import read_data
from haiprof.run_analysis.run_files import RunFiles, integer, mapping, objects, text
from haiprof.run_format.reader import read_json

_WORDS = read_data("run_analysis/scheduler_ends.json")
SLURM_STATES, _POD = (
    {reason: (str(cause), str(what)) for reason, (cause, what) in _WORDS[of].items()}
    for of in ("slurm", "pod")
)
"""Cause, and what it means: by state (sacct(1), JOB STATE CODES); by reason of a container, pod or
condition DisruptionTarget.
Source: kubernetes.io/docs: Pod disruption conditions, Pod lifecycle, Node-pressure eviction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerEnd:
    """What one scheduler says."""

    cause: str | None  # as in `deaths.Death`; None: it only tells that or how the job ended
    what: str
    failed: bool  # whether the job did not end as one that has done its work
    ended_ns: int | None
    hosts: tuple[str, ...]
    """Nodes that it names, as the run calls them; empty where it is about all of the job."""
    lines: tuple[str, ...]  # all of it, for people


def scheduler_ends(files: RunFiles) -> list[SchedulerEnd]:
    """What was said of the run's end; empty where nobody asked, or nobody knew."""
    try:
        content = read_json(files.paths.scheduler)
    except RunFormatError:
        return []
    found = [_pod_end(pod) for pod in objects(content.get("pods"))]
    found.sort(key=lambda end: (end.cause is None, end.ended_ns or 0))
    slurm = mapping(content.get("slurm"))
    return [*([_slurm_end(slurm, _slurm_nodes(files))] if slurm else ()), *found]


def _slurm_nodes(files: RunFiles) -> dict[str, str]:
    """Hosts by their names in Slurm."""
    found = {}
    for node in files.nodes:
        try:
            name = text(read_json(node.paths.agent).get("slurm_node"))
        except RunFormatError:
            name = None
        found[name or node.host.partition(".")[0]] = node.host
    return found


def _slurm_end(said: Mapping[str, Any], hosts: Mapping[str, str]) -> SchedulerEnd:
    """The accounting's state where there is one: it knows who cancelled and which node failed."""
    shown, row = mapping(said.get("scontrol")), mapping(said.get("sacct"))
    whole = _word(row, "State") or _word(shown, "JobState")
    state, steps = whole.partition(" ")[0], objects(said.get("steps"))
    full = [_word(s, "JobIDRaw") for s in steps if _word(s, "State") == "OUT_OF_MEMORY"]
    reason = next(filter(None, map(_reason, (row, shown))), "")
    if state == "FAILED" and (full or reason == "OutOfMemory"):
        state = "OUT_OF_MEMORY"
    cause, what = SLURM_STATES.get(state, (None, f"Slurm says {whole}"))
    failed = _word(row, "FailedNode")
    failed = failed if re.fullmatch(r"[\w.-]+", failed) else ""
    if cause == "node_lost" and failed not in ("", "None"):
        what += f": {failed}"
    if by := re.search(r" by (\S+)$", whole):
        what += f" by user {by[1]}"
    limit = _word(row, "ReqMem") if cause == "out_of_memory" else ""
    what += f", {limit} asked for" if limit not in ("", "0") else ""
    ends = [_unix_ns(row.get("End")), _unix_ns(shown.get("EndTime"))]
    return SchedulerEnd(
        cause=cause, what=what, failed=state != "COMPLETED",
        ended_ns=next((each for each in ends if each is not None), None),
        hosts=(hosts[failed],) if cause == "node_lost" and failed in hosts else (),
        lines=tuple(_slurm_lines(said, whole, reason)),
    )  # fmt: skip


def _slurm_lines(said: Mapping[str, Any], state: str, reason: str) -> Iterator[str]:
    shown, row = mapping(said.get("scontrol")), mapping(said.get("sacct"))
    status = _word(row, "ExitCode") or _word(shown, "ExitCode")
    limit = _word(row, "Timelimit") or _word(shown, "TimeLimit")
    parts = [state, f"exit {status}" if status else "", reason]
    parts += [f"time limit {limit}" if state.startswith("TIMEOUT") and limit else ""]
    yield f"Slurm: job {_word(said, 'job')} {', '.join(filter(None, parts))}"
    for step in objects(said.get("steps")):
        size = _word(step, "MaxRSS")
        largest = f", at most {size} resident in a task" if size not in ("", "0") else ""
        yield (f"Slurm: step {_word(step, 'JobIDRaw')} {_word(step, 'State')}, "
               f"exit {_word(step, 'ExitCode')}{largest}")  # fmt: skip
    for node in objects(said.get("nodes")):
        name, state, why = (_word(node, each) for each in ("name", "state", "reason"))
        yield f"Slurm: node {name} is {state}: {why}"


def _reason(fields: Mapping[str, Any]) -> str:
    said = _word(fields, "Reason")
    return "" if said in ("None", "NonZeroExitCode", "(null)") else said


def _pod_end(pod: Mapping[str, Any]) -> SchedulerEnd:
    """The first of: why its container ended, why the pod did, what disrupted it."""
    container = mapping(pod.get("container"))
    named = [_word(container, "reason"), _word(pod, "reason"), _word(pod, "disruption")]
    reason = next((each for each in named if each in _POD), "")
    status = integer(container.get("exitCode"))
    cause, meaning = _POD.get(reason, (None, ""))
    message = _word(pod, "message") or _word(pod, "disruption_message")
    name = f"pod {_word(pod, 'name')}"
    what = f"{name}: {meaning} ({reason})" if cause else f"{name}: {named[0] or 'its end'}"
    what += f": {message}" if cause and message else ""
    parts = [*dict.fromkeys(filter(None, named)), "" if status is None else f"exit {status}",
             f"on node {_word(pod, 'node')}" if pod.get("node") else "",
             message, _word(container, "message")]  # fmt: skip
    return SchedulerEnd(
        cause=cause, what=what, failed=bool(cause) or bool(status),
        ended_ns=_unix_ns(container.get("ended_s")), hosts=(_word(pod, "host"),),
        lines=(f"Kubernetes: {name} {', '.join(filter(None, parts))}",),
    )  # fmt: skip


def _word(fields: Mapping[str, Any], name: str) -> str:
    return shorten(visible(text(fields.get(name)) or ""), 300)


def _unix_ns(seconds: object) -> int | None:
    """Unix time in seconds, as a number or as Slurm writes it, in nanoseconds."""
    if (said := text(seconds)) is not None:
        seconds = int(said) if said.isascii() and said.isdigit() and len(said) < 13 else None
    found = integer(seconds)
    return found * NS_PER_S if found is not None and 0 < found < 1 << 33 else None
