"""Pictures of traces: each question that can be drawn, with its numbers as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go
import polars as pl

from haiprof.base.errors import HaiprofError, MissingDataError
from haiprof.base.units import duration_text
from haiprof.base.version import read_data
from haiprof.show.figures import traces as figures
from haiprof.trace_analysis.device_time import TOP_KERNELS, Steps
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.step_time import timeline
from haiprof.trace_analysis.what_if.replay import Change
from haiprof.trace_analysis.what_if.scenarios import scenarios


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePicture:
    """One question about traces, answered."""

    title: str
    frame: pl.DataFrame  # The answer as numbers
    figure: go.Figure
    columns: Sequence[str]  # Those of the frame that a terminal has room for
    says: str = ""  # What to see in it


_NO_GPU = "no GPU event in it"
_PROFILE_GPU = "if the job used a GPU: profile with ProfilerActivity.CUDA"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One question about traces that can be drawn; its options are those of the question."""

    title: str
    ask: str | Callable[..., pl.DataFrame]
    """A method of `TraceQuestions`, or a function of the traces and steps."""
    figure: Callable[..., go.Figure]
    columns: Sequence[str]
    says: str = ""
    needs: str = ""  # The column without whose values there is nothing to draw
    why: str = _NO_GPU  # Why it has none
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the question, where they differ from its own defaults."""
    drawn_options: tuple[str, ...] = ()  # Those of the question that are drawn, too

    def __call__(
        self, traces: TraceQuestions, steps: Steps = None, *, share: bool = False,
        **options: Any,  # noqa: ANN401 - whatever the question takes
    ) -> TracePicture:  # fmt: skip
        """Asks and draws; with `share`, each part is a share of its bar."""
        if isinstance(self.ask, str):
            found = getattr(traces, self.ask)(steps, **{**self.options, **options})
        else:
            found = self.ask(traces, steps, **options)
        if self.needs and not found[self.needs].count():
            hint = _PROFILE_GPU if self.why is _NO_GPU else ""
            raise MissingDataError(f"{traces.path}: {self.why}", hint=hint)
        drawn = {name: options[name] for name in self.drawn_options if name in options}
        figure = self.figure(found, **drawn, **({"share": True} if share else {}))
        title = f"{self.title}, as shares" if share else self.title
        return TracePicture(
            title=title, frame=found, figure=figure, columns=self.columns, says=self.says
        )  # fmt: skip


def one_kernel(
    traces: TraceQuestions, steps: Steps = None, *, kernel: str | None = None
) -> TracePicture:
    """One kernel on every rank, with its shortest and longest call."""
    every = PICTURES["kernels"](traces, steps, num_kernels=None).frame
    asked = pl.col("kind") == "computation" if kernel is None else (
        pl.col("name").cast(pl.String).str.contains(kernel, literal=True)
    )  # fmt: skip
    chosen = every.filter(asked).group_by("name").agg(pl.col("sum_ns").sum())
    if chosen.is_empty():
        raise MissingDataError(
            f"{traces.path}: no kernel with {kernel or 'computing'!r} in its name"
        )
    longest = chosen.sort(-pl.col("sum_ns"), "name")["name"][0]
    found = every.filter(pl.col("name") == longest)
    return TracePicture(
        title=f"One kernel over ranks: {figures.kernel_label(longest)}",
        frame=found,
        figure=figures.one_kernel_figure(found),
        columns=("rank", "name", "count", "mean_ns", "min_ns", "max_ns"),
        says="The mean of its calls, with the shortest and the longest: a rank that is slower in "
        "the same kernel has a slower GPU, or other sizes.",
    )


def _overlap(traces: TraceQuestions, steps: Steps) -> pl.DataFrame:
    found = traces.overlap(steps)
    if not found["communication_ns"].sum():
        raise MissingDataError(f"{traces.path}: no communication on a GPU in it")
    return found


def _memory(traces: TraceQuestions, steps: Steps) -> pl.DataFrame:
    """Memory over the whole trace: allocations have no step."""
    if steps is not None:
        raise MissingDataError("memory over time is of the whole trace, not of some steps")
    return traces.memory_timeline()


def critical_path(
    traces: TraceQuestions, steps: Steps = None, *, rank: int | None = None,
    annotation: str | None = None, instance: int = 0,
) -> TracePicture:  # fmt: skip
    """The critical path of one rank, by cause; options are those of `TraceAnalysis`."""
    path = traces.critical_path(rank, steps=steps, annotation=annotation, instance=instance)
    found = path.summary()
    of = min(traces.files) if rank is None else rank
    title = f"<b>Critical path of rank {of}, by cause</b>"
    return TracePicture(
        title="Critical path", frame=found,
        figure=figures.critical_path_figure(found, title=title),
        columns=("bound_by", "duration_ns", "share_ratio", "segment_count"),
        says="Only what is on this path makes the step longer: shorten its largest part.",
    )  # fmt: skip


def time_line(traces: TraceQuestions, steps: Steps = None) -> TracePicture:
    """One step of the lowest rank: its streams, when the GPU is idle, and the host below."""
    rank = min(traces.traces)
    found = timeline(traces.traces[rank], steps)
    step, length, idle, gap, begin = (
        found[name][0] for name in ("step", "step_ns", "idle_ns", "gap_ns", "gap_start_ns")
    )
    which = "All that was recorded" if step is None else f"Step {step}"
    says = f"{which} of rank {rank}, {duration_text(length)}: the GPU is "
    says += "never idle" if gap is None else (
        f"idle for {duration_text(idle)} of it, the longest time {duration_text(gap)} "
        f"{f'after {duration_text(begin)}' if begin else 'at its begin'}; below is what the host "
        "did meanwhile"
    )  # fmt: skip
    return TracePicture(
        title="Time line of a step", frame=found, figure=figures.timeline_figure(found),
        columns=("lane", "kind", "name", "start_ns", "dur_ns"), says=f"{says}.",
    )  # fmt: skip


def _what_if(
    traces: TraceQuestions, steps: Steps, *, changes: tuple[Change, ...] = ()
) -> pl.DataFrame:
    """The step as each change would make it; without changes, those that may help, best first."""
    found = traces.what_if(*(changes or tuple(scenarios(traces, steps))), steps=steps)
    if changes:
        return found
    return found.sort("saved_ratio", descending=True, maintain_order=True)


_WORDS = read_data("show/trace_pictures.json")


def _drawing(name: str, figure: Callable[..., go.Figure], **more: Any) -> Drawing:  # noqa: ANN401
    """What the data file says of a drawing, and what is code of it."""
    return Drawing(figure=figure, **_WORDS[name], **more)


PICTURES: Mapping[str, Callable[..., TracePicture]] = {
    "timeline": time_line,
    "temporal": _drawing("temporal", figures.temporal_figure),
    "idle": _drawing("idle", figures.idle_figure),
    "kernel_types": _drawing("kernel_types", figures.kernel_type_figure),
    "kernels": _drawing("kernels", figures.top_kernels_figure,
                        options={"num_kernels": TOP_KERNELS}),
    "kernel": one_kernel,
    "overlap": _drawing("overlap", figures.overlap_figure, ask=_overlap),
    "launches": _drawing("launches", figures.launch_figure,
                         drawn_options=("runtime_cutoff_ns", "launch_delay_cutoff_ns")),
    "queue_length": _drawing("queue_length", figures.queue_figure),
    "memory_bandwidth": _drawing("memory_bandwidth", figures.bandwidth_figure),
    "collectives": _drawing("collectives", figures.collective_figure),
    "lateness": _drawing("lateness", figures.arrival_figure),
    "memory": _drawing("memory", figures.memory_figure, ask=_memory),
    "critical_path": critical_path,
    "what_if": _drawing("what_if", figures.what_if_figure, ask=_what_if),
}  # fmt: skip
"""By name, in the order of the page; each takes the traces, the steps, and options."""


def all_pictures(
    traces: TraceQuestions, steps: Steps = None
) -> tuple[dict[str, TracePicture], dict[str, str]]:
    """Every picture that the traces can be drawn as, and of the others why not."""
    drawn: dict[str, TracePicture] = {}
    missing: dict[str, str] = {}
    for name, picture in PICTURES.items():
        try:
            made = picture(traces, steps)
        except HaiprofError as error:
            missing[name.replace("_", " ")] = str(error)
            continue
        alone = "rank" in made.frame.columns and made.frame["rank"].n_unique() == 1
        if name == "kernel" and alone:  # nothing to compare it with
            continue
        drawn[name] = made
    return drawn, missing
