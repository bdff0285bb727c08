"""What `haiprof attach` shows: the verdict, or what stacks and counters say from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import ratio_text
from haiprof.live.attach import RECORDED, Attached
from haiprof.live.external_sampling import RATE_HZ, SampledStacks
from haiprof.show.card import verdict_card
from haiprof.show.figures.style import PHASE_COLORS
from haiprof.show.run_header import RunHeader
from haiprof.show.text import printable
from haiprof.show.views.blocks import one_line
from haiprof.show.views.trace_now import trace_now_view

if TYPE_CHECKING:
    from haiprof.diagnosis.verdict import Verdict
    from haiprof.run_analysis.run_frames import RunFrames

_PHASES = ("dataloader", "forward", "backward", "optimizer", "other")
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


def _sampling_lines(seen: Sequence[SampledStacks], analyzer: RunFrames) -> Iterator[RenderableType]:
    cores = _main_cores(analyzer)
    for each in seen:
        if each.problem is not None:
            yield Text(f"rank {each.rank}: no stacks: {printable(each.problem)}", style="yellow")
        else:
            yield _headline(each, cores.get(each.rank))
            yield from _shares(each)
    yield Text(
        "From outside: no steps are counted, no step times known, and a share of samples is not a "
        "share of GPU time. haiprof attach --inject measures them.",
        style="dim",
    )


def _headline(seen: SampledStacks, cores: float | None) -> Text:
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


def _shares(seen: SampledStacks) -> Iterator[RenderableType]:
    line = Text("  ")
    for phase in _PHASES:
        if phase in seen.shares:
            line.append(f"{phase} ", style=PHASE_COLORS.get(phase, ""))
            line.append(f"{ratio_text(seen.shares[phase])} ±{100 * seen.margin(phase):.0f}  ")
    yield line
    for frame, share in seen.hottest:
        yield one_line(f"  {ratio_text(share)} at {printable(frame)}")


def _main_cores(analyzer: RunFrames) -> dict[int, float]:
    rows = analyzer.counters().filter(
        (pl.col("source") == "process") & (pl.col("metric") == "cpu_main_cores")
    )
    medians = rows.group_by("rank").agg(pl.col("value").median())
    return {rank: value for rank, value in medians.rows() if rank is not None and value is not None}
