"""What `snapshot`, `trace now` and `attach` show: the answers of a running job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import polars as pl
from rich.console import Group, RenderableType, group
from rich.text import Text
from rich.tree import Tree

from haiprof.base.code_places import frame_text, is_library
from haiprof.base.units import bytes_text, duration_text, ranks_text, ratio_text
from haiprof.diagnosis.verdict import Verdict
from haiprof.live.attach import RECORDED, Attached
from haiprof.live.external_sampling import RATE_HZ, SampledStacks
from haiprof.live.kineto_processes import KinetoTraces, ProcessTrace
from haiprof.live.snapshot import Snapshot, SuspectDetails
from haiprof.live.standstill import Node, Suspect, doing
from haiprof.live.trace_now import TraceNow, failures
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.card import verdict_card
from haiprof.show.figures.style import PHASE_COLORS, PHASES
from haiprof.show.run_header import RunHeader
from haiprof.show.text import count_text, moment_text, printable, value_text
from haiprof.show.views.blocks import notes_block, one_line, section

MOST_SUSPECTS = 12
NATIVE_FRAMES = 8


def snapshot_view(snapshot: Snapshot) -> RenderableType:
    """The whole view: the verdict first, then every rank's stack as one tree."""
    root = snapshot.tree
    tree = Tree(Text(ranks_text(root.ranks) if root.ranks else "no stacks"), guide_style="dim")
    mute = [state for state in snapshot.states if state.stack is None]
    mute_lines = [one_line(f"rank {s.rank}: {doing(s)}") for s in mute[:MOST_SUSPECTS]]
    return Group(
        Text(_headline(snapshot), style="bold"),
        Text(
            f"{moment_text(snapshot.wall_ns)} · {count_text(len(snapshot.states), 'rank')}, "
            f"{sum(s.answered for s in snapshot.states)} answered",
            style="dim",
        ),
        *_suspects(snapshot.suspects, {details.rank: details for details in snapshot.details}),
        section("main threads", _grow(tree, root)),
        *([section("without a stack", *mute_lines)] if mute else []),
        notes_block(snapshot.notes),
    )


def _headline(snapshot: Snapshot) -> str:
    if not snapshot.states:
        return "no rank has reported in"
    if snapshot.suspended:
        return "The job is suspended: all its ranks are stopped by a signal (kill -CONT)"
    if not any(state.answered or state.stack for state in snapshot.states):
        return "No rank answered: they are stopped, hold the interpreter lock, or have ended since"
    certain = [s.rank for s in snapshot.suspects if s.certain]
    if certain:
        return f"{ranks_text(certain, 'holds', 'hold')} the job up".capitalize()
    if snapshot.moves:
        return "The job moves: collectives went on between two looks"
    odd = [s.rank for s in snapshot.suspects]
    if odd:
        return f"{ranks_text(odd, 'does', 'do')} something different from the rest".capitalize()
    if snapshot.moves is None:
        if len(snapshot.states) == 1:
            return "One rank, nothing to compare it with: what it does is below"
        return "No collectives to compare, and no rank's stack differs from the others'"
    return "Nothing moves, and no rank differs from the others: all wait for something else"


def _suspects(
    suspects: Sequence[Suspect], details: Mapping[int, SuspectDetails]
) -> Iterator[RenderableType]:
    for suspect in suspects[:MOST_SUSPECTS]:
        yield section(
            f"rank {suspect.rank}",
            Text(printable(suspect.reason)),
            *([one_line(f"doing: {suspect.doing}")] if suspect.doing else []),
            *(_details(known) if (known := details.get(suspect.rank)) else ()),
        )
    if len(suspects) > MOST_SUSPECTS:
        yield Text(f"and {len(suspects) - MOST_SUSPECTS} more (--json has all)", style="dim")


def _details(details: SuspectDetails) -> Iterator[RenderableType]:
    for frame in (details.native or ())[-NATIVE_FRAMES:]:
        yield one_line(f"  {printable(frame)}")
    if details.gpu:  # `memory_used_bytes`: its unit is its last word
        named = ((*metric.rpartition("_"), value) for metric, value in details.gpu.items())
        said = (f"{name.replace('_', ' ')} {value_text(n, unit)}" for name, _, unit, n in named)
        yield one_line(f"its GPU: {', '.join(said)}")
    if details.xids:
        codes = ", ".join(map(str, details.xids))
        yield one_line(f"its GPU reported XID {codes}", style="bold")


def _grow(branch: Tree, node: Node) -> Tree:
    """The merged tree; a chain of frames that the same ranks are in is one branch."""
    for child in node.children.values():
        chain = [child]
        while len(chain[-1].children) == 1:
            (only,) = chain[-1].children.values()
            if only.ranks != chain[-1].ranks:
                break
            chain.append(only)
        _grow(branch.add(_chain_text(chain)), chain[-1])
    return branch


def _chain_text(chain: Sequence[Node]) -> Text:
    """The user's own frames of a chain and its innermost one; what lies between is counted."""
    text, hidden = Text(), 0
    text.append(ranks_text(chain[0].ranks), style="cyan")
    for node in chain:
        frame = node.frame or ("", 0, "")
        if is_library(frame[0], frame[2]) and node is not chain[-1]:
            hidden += 1
            continue
        if hidden:
            text.append(f"\n  … {count_text(hidden, 'library frame')}", style="dim")
        text.append(f"\n  {printable(frame_text(frame))}")
        hidden = 0
    return text


MOST_FILES = 8


def _file_lines(paths: Sequence[Path], stopped: str = "") -> Iterator[RenderableType]:
    size = bytes_text(sum(path.stat().st_size for path in paths if path.is_file()))
    yield Text(f"{count_text(len(paths), 'file')}, {size}{stopped}", style="dim")
    for path in paths[:MOST_FILES]:
        yield one_line(f"  {path}")
    if len(paths) > MOST_FILES:
        yield Text(f"  and {len(paths) - MOST_FILES} more", style="dim")


@group()
def kineto_view(found: KinetoTraces) -> Iterator[RenderableType]:
    """The whole view."""
    for each in found.done:
        steps = f"{each.optimizer_step_count} optimizer steps"
        if each.steps is not None:
            steps = f"steps {each.steps[0]} to {each.steps[1] - 1}"
        yield Text(f"traced {steps} of {_name(each)}", style="bold")
    if paths := [Path(each.path) for each in found.done if each.path]:
        yield from _file_lines(paths)
    for reason in sorted({each.steps_reason for each in found.done if each.steps_reason}):
        yield Text(f"steps are not marked: {reason}", style="dim")
    if found.aligned is False:
        yield Text("the ranks did not record the same steps", style="yellow")
    for each in found.processes:
        if each.state != "done":
            why = printable(each.reason or "no reason given")
            yield Text(f"{_name(each)} {each.state}: {why}", style="yellow")


def _name(each: ProcessTrace) -> str:
    return f"process {each.pid}" if each.rank is None else f"rank {each.rank}"


@group()
def trace_now_view(found: TraceNow) -> Iterator[RenderableType]:
    """The whole view."""
    by_steps: dict[tuple[int, int] | None, list[int]] = {}
    for rank in found.done:
        by_steps.setdefault(rank.steps, []).append(rank.rank)
    for steps, ranks in by_steps.items():
        said = "" if steps is None else f"steps {steps[0]} to {steps[1] - 1} "
        yield Text(f"traced {said}on {ranks_text(ranks)}", style="bold")
    stalls = [rank.stall_ns for rank in found.done if rank.stall_ns is not None]
    if paths := [Path(rank.path) for rank in found.done if rank.path]:
        stopped = (
            f"; the job was stopped for {duration_text(max(stalls))} at most" if stalls else ""
        )
        yield from _file_lines(paths, stopped)
    if not found.aligned:
        words = "did not record" if found.counted_alike else "may not have recorded"
        yield Text(f"the ranks {words} the same steps", style="yellow")
    by_reason: dict[str, list[int]] = {}
    for rank in failures(found):
        reason = f"{rank.state}: {rank.reason or 'no reason given'}"
        by_reason.setdefault(reason, []).append(rank.rank)
    for reason, failed in by_reason.items():
        yield Text(f"{ranks_text(failed)} {printable(reason)}", style="yellow")
    yield from (Text(printable(note), style="yellow") for note in found.notes)


_ENOUGH_SAMPLES = 30
_BUSY_CORES = 0.9
_IDLE_CORES = 0.2


def attach_view(
    done: Attached, verdict: Verdict | None, header: RunHeader, analyzer: RunFrames, *, width: int
) -> RenderableType:
    """The whole view."""
    parts: list[RenderableType] = []
    if verdict is not None:
        parts.append(verdict_card(verdict, header, width=width))
    else:
        parts += _sampling_lines(done.seen, analyzer)
    if done.trace is not None:
        parts.append(trace_now_view(done.trace))
    parts += [
        Text(printable(f"{name} is not recorded: {why}"), style="yellow")
        for name, why in done.refused.items()
    ]
    where = "a part of the recording in" if done.how == RECORDED else "the recording is in"
    return Group(*parts, one_line(f"{where} {done.run}"))


@group()
def sampled_run_view(
    seen: Sequence[SampledStacks], header: RunHeader, analyzer: RunFrames
) -> Iterator[RenderableType]:
    """The verdict of a run that was sampled from outside: what `attach` showed."""
    yield one_line(f"{header.name}: sampled from outside, without steps", style="bold")
    yield from _sampling_lines(seen, analyzer)


def _sampling_lines(seen: Sequence[SampledStacks], analyzer: RunFrames) -> Iterator[RenderableType]:
    rows = analyzer.counters().filter(source="process", metric="cpu_main_cores").drop_nulls("rank")
    cores = dict(rows.group_by("rank").agg(pl.col("value").median()).rows())
    for each in seen:
        if not each.shares:
            why = printable(each.problem or "not known")
            yield Text(f"rank {each.rank}: no stacks: {why}", style="yellow")
            continue
        yield _attach_headline(each, cores.get(each.rank))
        line = Text("  ")
        for phase in PHASES:
            if phase in each.shares:
                line.append(f"{phase} ", style=PHASE_COLORS.get(phase, ""))
                line.append(f"{ratio_text(each.shares[phase])} ±{100 * each.margin(phase):.0f}  ")
        yield line
        for frame, share in each.hottest:
            yield one_line(f"  {ratio_text(share)} at {printable(frame)}")
    yield Text(
        "From outside: no steps are counted, no step times known, and a share of samples is not a "
        "share of GPU time. haiprof attach --inject measures them, as does a job started under "
        "haiprof.",
        style="dim",
    )


def _attach_headline(seen: SampledStacks, cores: float | None) -> Text:
    """The result of sampling, without a cause."""
    phase, share = max(seen.shares.items(), key=lambda item: item[1])
    text = f"rank {seen.rank} (pid {seen.pid}): its main thread is in {phase} in "
    text += f"{ratio_text(share)} of {seen.sample_count} samples"
    if cores is not None:
        doing = (
            "busy" if cores > _BUSY_CORES else "mostly idle" if cores < _IDLE_CORES else "in part"
        )
        text += f", using {cores:.2f} cores ({doing})"
    if seen.sample_count < _ENOUGH_SAMPLES:
        text += f"; too few to judge by: take more than {_ENOUGH_SAMPLES / RATE_HZ:.0f} s"
    return Text(text, style="bold")
