"""What `doctor`, `preflight` and `try-loader` show."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from haiprof.agent.samplers.registry import Permission, Software, Tool
from haiprof.agent.samplers.table import CounterState
from haiprof.base.options import KEPT_BATCHES
from haiprof.base.units import MISSING, bytes_text, digits_text, duration_text
from haiprof.diagnosis.preflight import NONE_IS_USUAL, TIMEOUT, Preflight, Suspect
from haiprof.live.loader_trials import AS_GIVEN, LoaderTrial
from haiprof.show.text import count_text, printable, value_text
from haiprof.show.views.blocks import one_line, plain_table, section

_STYLES = {"available": "green", "denied": "yellow", "unsupported": "dim", "absent": "dim"}
_UNIT_SUFFIXES = ("_ns", "_bytes", "_ratio", "_hz", "_watts", "_joules", "_celsius")
_MANY = 6  # names before the rest is a number

_source = attrgetter("source")
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def doctor_view(
    counters: Sequence[CounterState], tools: Sequence[Tool], permissions: Sequence[Permission], *,
    node: Software, every_row: bool,
) -> RenderableType:  # fmt: skip
    """The whole view."""
    parts = [*_missing(counters), *_available(counters)]
    denied = [each for each in permissions if each.status != "available"]
    allowed = [each for each in permissions if each.status == "available"]
    return Group(
        _head(node, counters),
        *_permissions("Permissions denied or absent", denied),
        *([_every_counter(counters)] if every_row else parts),
        *_tools(tools),
        *_permissions("Permissions", allowed),
    )


def _head(node: Software, counters: Sequence[CounterState]) -> RenderableType:
    sources = list(dict.fromkeys(c.source for c in counters if c.status == "available"))
    title = Text.assemble(
        (node.host, "bold"), f"  sources that can be read: {', '.join(sources) or 'none'}"
    )
    summary = [node.kernel, f"cgroup {node.cgroup or MISSING}", f"Python {node.python}",
               f"torch {node.torch}" if node.torch else "no torch in this Python",
               f"NVIDIA driver {node.nvidia_driver}" if node.nvidia_driver else ""]  # fmt: skip
    return Group(title, Text(" · ".join(filter(None, summary)), style="dim"))


def _available(counters: Sequence[CounterState]) -> Iterable[RenderableType]:
    """One row per sampler: how many counters, of what, from where, and what reading them takes."""
    here = [c for c in counters if c.status == "available"]
    if not here:
        return
    table = plain_table("source", "counters", "reading takes", "of", left=("source", "of"))
    table.add_column("read from", overflow="fold")
    for source, states in _group(here, _source).items():
        reads = {(c.entity, c.origin): c.read_ns or 0 for c in states}
        first, *others = dict.fromkeys(c.origin for c in states)
        more = f" and {len(others)} more" if others else ""
        table.add_row(
            source, str(len(_metrics(states))), duration_text(sum(reads.values())),
            _entities(states), Text(first + more, style="dim"),
        )  # fmt: skip
    yield section("Can be read", table)


def _entities(states: Sequence[CounterState]) -> str:
    return _join_names([c.entity for c in states if c.entity])


def _join_names(names: Iterable[str]) -> str:
    """Each once, the first few by name."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - _MANY} more" if len(every) > _MANY else ""
    return ", ".join(every[:_MANY]) + more


def _missing(counters: Sequence[CounterState]) -> Iterable[RenderableType]:
    """One row per reason, with everything that is missing because of it."""
    gone = [c for c in counters if c.status != "available"]
    if not gone:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    for _ in range(2):
        table.add_column(overflow="fold")
    sizes = {source: len(_metrics(states)) for source, states in _group(counters, _source).items()}
    for states in _group(gone, lambda c: (c.status, _cause(c), c.remedy)).values():
        status = Text(states[0].status, style=_STYLES[states[0].status])
        table.add_row(status, _names(states, sizes), _why(_reason(states), states[0].remedy))
    yield section("Not available", table)


def _cause(state: CounterState) -> str:
    """The reason without the file name, which differs although the cause is the same."""
    return state.reason.removeprefix(f"{state.origin}: ")


def _reason(states: Sequence[CounterState]) -> str:
    """The reason with one file, and the number of others."""
    files = {c.origin for c in states if c.reason.startswith(f"{c.origin}: ")}
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{states[0].origin}{more}: {_cause(states[0])}" if files else states[0].reason


def _why(reason: str, remedy: str) -> Text:
    text = Text(reason, style="dim")
    if remedy:
        text.append("\ndo: ", style="dim")
        text.append(remedy, style="not dim")
    return text


def _names(states: Sequence[CounterState], sizes: Mapping[str, int]) -> Text:
    """Sources that are missing completely, else their counters; then the entities."""
    words = []
    for source, of_source in _group(states, _source).items():
        metrics = _metrics(of_source)
        is_whole = len(metrics) == sizes[source] > 1
        words.append(f"{source} ({count_text(len(metrics), 'counter')})" if is_whole
                     else f"{source}: {_join_names(map(short_name, metrics))}")  # fmt: skip
    words += [f"of {entities}"] if (entities := _entities(states)) else []
    return Text("\n".join(words))


def _every_counter(counters: Sequence[CounterState]) -> RenderableType:
    table = plain_table("counter", "of", "now", "read", left=("counter", "of"))
    table.add_column("source, or why not", overflow="fold")
    for state in counters:
        ok = state.status == "available"
        now = None if state.value is None else now_text(state.value, state.unit)
        table.add_row(
            f"{state.source}.{state.metric}",
            state.entity,
            now or Text(state.status, style=_STYLES[state.status]),
            duration_text(state.read_ns) if ok else "",
            Text(state.origin, style="dim") if ok else _why(state.reason, state.remedy),
        )
    return section("Counters", table)


def _tools(tools: Sequence[Tool]) -> Iterable[RenderableType]:
    for kind, of_kind in _group(tools, lambda tool: tool.kind).items():
        table = Table.grid(padding=(0, 2, 0, 0))
        for tool in of_kind:
            if tool.path:
                table.add_row(tool.name, Text(tool.path, overflow="fold"),
                              Text(tool.purpose, style="dim"))  # fmt: skip
        absent = [tool.name for tool in of_kind if not tool.path]
        lacking = [Text(f"not found: {', '.join(absent)}", style="dim")] if absent else []
        yield section(f"{kind.capitalize()}s", table, *lacking)


def _permissions(title: str, permissions: Sequence[Permission]) -> Iterable[RenderableType]:
    if not permissions:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for each in permissions:
        allows = Text(each.allows)
        if each.reason:
            allows.append("\n").append_text(_why(each.reason, each.remedy))
        value = "" if each.value is None else str(each.value)
        table.add_row(each.name, Text(each.status, style=_STYLES[each.status]), value, allows)
    yield section(title, table)


def short_name(metric: str) -> str:
    """A metric without the unit, where its value carries one: `cpu_user`."""
    suffix = next((s for s in _UNIT_SUFFIXES if metric.endswith(s)), "")
    return metric.removesuffix(suffix)


def now_text(value: float, unit: str) -> str:
    """A value as people read it: `"1.98 GHz"`, bit fields in hexadecimal digits."""
    if unit == "packed":
        return f"0x{int(value):x}"
    if unit == "hz":
        scale, name = (1e9, "GHz") if value >= 1e9 else (1e6, "MHz")
        return f"{digits_text(value / scale)} {name}"
    return value_text(value, unit)


def _metrics(states: Iterable[CounterState]) -> list[str]:
    return list(dict.fromkeys(c.metric for c in states))


def _group(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, both in order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def preflight_view(found: Preflight) -> RenderableType:
    """The whole view."""
    whats = list(dict.fromkeys(what for own in found.ranks for what in own["rates"]))
    heads = (what.removesuffix("_bytes_per_s").replace("_per_s", "/s") for what in whats)
    table = plain_table("rank", "node", *heads, left=("node",))
    for own in found.ranks:
        rates = (_value_text(what, own["rates"].get(what)) for what in whats)
        table.add_row(str(own["rank"]), printable(own["host"]), *rates)
    lines = [Text(suspect_text(one)) for one in found.suspects]
    slurm = [one_line(f"Slurm: {found.slurm}")] if found.slurm else []
    unread = [Text(printable(each), style="dim") for each in found.unread]
    return Group(Text(headline(found), style="bold"), *lines, *slurm, table, *unread)


def headline(found: Preflight) -> str:
    """`leave out node-2`, or what was found else."""
    ranks = count_text(len(found.ranks), "rank")
    if not found.suspects:
        return f"{ranks}: none is clearly slower than its peers"
    if found.leave_out:
        return f"{ranks}: leave out {', '.join(map(printable, found.leave_out))}"
    return f"{ranks}: {count_text(len(found.suspects), 'suspect')}, no node to leave out"


def suspect_text(one: Suspect) -> str:
    """`rank 3 on node-2: memory_bytes_per_s 1.2 GiB/s, peers 5.9 GiB/s`."""
    if one.to_host is not None:
        who = f"link {one.host} -> {one.to_host}"
    elif one.rank is None:
        who = "all ranks" if one.host is None else f"node {one.host}"
    else:
        who = f"rank {one.rank}" if one.host is None else f"rank {one.rank} on {one.host}"
    than = f", {one.against}"
    if one.against == TIMEOUT:
        than = "" if one.usual is None else f", the timeout of collectives is {one.usual:g} s"
    elif one.against != NONE_IS_USUAL:
        than += f" {_value_text(one.what, one.usual)}"
    reason = f": {one.reason}" if one.reason else ""
    return printable(f"{who}: {one.what} {_value_text(one.what, one.value)}{than}{reason}")


def _value_text(what: str, value: float | None) -> str:
    if value is None:
        return MISSING
    if what.endswith("bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if what.endswith("bytes"):
        return bytes_text(value)
    if value == int(value) and value < 1e6:
        return str(int(value))
    return f"{digits_text(value / 1e9)} G" if value > 1e9 else digits_text(value)


def loader_trials_view(trials: Sequence[LoaderTrial]) -> RenderableType:
    """The whole view."""
    given, *others = _join_repeat(trials)
    heads = ("steps/s", "95 % interval", "of the loader as given")
    table = plain_table("loader", *heads, left=("loader",))
    for trial in (given, *others):
        cells = (MISSING, MISSING, MISSING)
        if trial.steps_per_s is not None and trial.low is not None and trial.high is not None:
            interval = f"{digits_text(trial.low)} to {digits_text(trial.high)}"
            reach = given.low or 0.0, given.high or 0.0
            is_noise = trial is not given and trial.low <= reach[1] and reach[0] <= trial.high
            times = "within the noise" if is_noise else f"x{_times(trial, given)}"
            cells = digits_text(trial.steps_per_s), interval, times
        table.add_row(_name(trial), *cells)
    rates = [digits_text(each.steps_per_s or 0.0) for each in trials if each not in others]
    twice = f"as given was measured twice: {' and '.join(rates)} steps/s, which differ by noise"
    failed = [each for each in trials if each.reason is not None]
    return Group(
        Text(trials_headline(trials), style="bold"),
        table,
        *([Text(twice, style="dim")] if len(rates) > 1 else []),
        *([Text(_PERSISTENT, style="dim")] if any(each.persistent for each in others) else []),
        *(one_line(f"{_name(each)}: {printable(each.reason or '')}") for each in failed),
    )


def _join_repeat(trials: Sequence[LoaderTrial]) -> list[LoaderTrial]:
    """The trials without the one that has the workers of the job itself, kept alike.

    It has measured the loader as given again: how far they are apart is noise, and is in the
    interval of that.
    """
    given, *others = trials
    own = (str(given.workers), given.persistent)
    for again in others:
        if (again.loader, again.persistent) == own and again.steps_per_s is not None:
            both = [given, again]
            mean = sum(each.steps_per_s or 0.0 for each in both) / 2
            ends = [end or 0.0 for each in both for end in (each.low, each.high)]
            others.remove(again)
            return [replace(given, steps_per_s=mean, low=min(ends), high=max(ends)), *others]
    return list(trials)


def trials_headline(trials: Sequence[LoaderTrial]) -> str:
    """`if batches cost nothing: 1.9 times as fast; 4 workers: 1.8 times (12.1 steps/s)`."""
    given, *others = _join_repeat(trials)
    known = [each for each in others if each.steps_per_s is not None]
    free = [each for each in known if each.loader == KEPT_BATCHES][:1]
    parts = [f"if batches cost nothing: {_gain_text(each, given)}" for each in free]
    tried = [each for each in known if each not in free]
    best = sorted(tried, key=lambda each: -(each.steps_per_s or 0.0))[:1]
    parts += [f"{_name(each)}: {_gain_text(each, given)}" for each in best]
    return "; ".join(parts) or "nothing could be measured but the loader as given"


_PERSISTENT = "persistent: with persistent_workers=True, workers are not started anew in each epoch"
_NO_GAIN_RATIO = 0.1
"""What is at most so much faster is told as no gain above that; above it noise hides what it is."""


def _gain_text(one: LoaderTrial, given: LoaderTrial) -> str:
    """How much faster one is than the loader as given, as far as their intervals tell it."""
    if (one.low or 0) > (given.high or 0):
        return f"{_times(one, given)} times as fast"
    most = (one.high or 0) / (given.low or math.inf) - 1
    if most <= _NO_GAIN_RATIO:
        return f"no gain above {100 * max(most, 0.0):.0f} %"
    return (
        f"too noisy to tell, up to {100 * most:.0f} % faster: try more steps (--trial-steps), "
        "or on a quieter machine"
    )


def _times(trial: LoaderTrial, given: LoaderTrial) -> str:
    if not trial.steps_per_s or not given.steps_per_s:
        return MISSING
    return f"{trial.steps_per_s / given.steps_per_s:.2f}"


def _name(trial: LoaderTrial) -> str:
    if trial.loader == AS_GIVEN:
        return AS_GIVEN if trial.workers is None else f"{AS_GIVEN} ({_workers_text(trial)})"
    return "batches that cost nothing" if trial.loader == KEPT_BATCHES else _workers_text(trial)


def _workers_text(trial: LoaderTrial) -> str:
    count = trial.workers if trial.loader == AS_GIVEN else int(trial.loader)
    return count_text(count or 0, "worker") + ", persistent" * trial.persistent
