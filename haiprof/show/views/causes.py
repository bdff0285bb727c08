"""What `trace critical-path`, `what-if` and `compare --traces` show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl
from rich.console import Group, RenderableType, group
from rich.text import Text

from haiprof.base.errors import HaiprofError, MissingDataError
from haiprof.base.units import MISSING, duration_text, ratio_text
from haiprof.show.frame_table import frame_table, headings, heads
from haiprof.show.text import count_text
from haiprof.show.views.blocks import notes_block, section
from haiprof.trace_analysis.critical_path import CriticalPath
from haiprof.trace_analysis.diff import NOTHING, TraceDiff, Verdict
from haiprof.trace_analysis.pool import Pool
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.step_time import step_windows
from haiprof.trace_analysis.what_if.operations import OperationWhatIf, operation_table
from haiprof.trace_analysis.what_if.replay import Change
from haiprof.trace_analysis.what_if.scenarios import scenarios

_CAUSES = heads(bound_by="cause", duration_ns="time", share_ratio="share", segment_count="pieces")
_NAMES = (("name", "name"), *_CAUSES)
_OUTSIDE = "(host, outside of all events)"


def critical_path_view(path: CriticalPath) -> RenderableType:
    """The whole view."""
    count = path.dependency_count
    links = f"{count} cross-thread {'dependency' if count == 1 else 'dependencies'}"
    summary = f"{links} ({path.assumed_count} inferred) · confidence: {path.confidence}"
    causes = path.summary().filter(pl.col("duration_ns") > 0).sort("duration_ns", descending=True)
    names = path.top(12).with_columns(pl.col("name").fill_null(_OUTSIDE))
    return Group(
        Text(f"{path.window}, {duration_text(path.length_ns)}", style="bold"),
        Text(summary, style="dim"),
        section("What it consists of", *frame_table(causes, _CAUSES, limit=12)),
        section("By name", *frame_table(names, _NAMES, limit=12)),
        notes_block(path.caveats),
    )


def critical_path_data(path: CriticalPath) -> dict[str, Any]:
    """The same as JSON, with every segment."""
    names = ("window", "start_ns", "end_ns", "confidence", "dependency_count", "assumed_count",
             "caveats")  # fmt: skip
    return {
        **{name: getattr(path, name) for name in names},
        "summary": path.summary().to_dicts(),
        "segments": path.segments().to_dicts(),
    }


_COMMON = (
    "measured_step_ns", "reproduced_step_ns", "error_ratio", "unexplained_ratio",
    "collective_count", "unmatched_count", "apart_count", "ahead_count",
)  # fmt: skip
_COLUMNS = heads(name="if", predicted_step_ns="step", saved="shorter by")
_INTERVAL = (("low_step_ns", "step at least"), ("high_step_ns", "at most (95 %)"))
_LEAST_RATIO = 0.0005
_DIFFERS_RATIO = 0.02  # From this share on it is said why the verdict's step is shorter or longer
_DOUBTFUL_RATIO = 0.05  # Above this share of unexplained time a note is shown
_TOTALS = (
    ("slowdown_ratio", "S, slowdown by stragglers"),
    ("slowest_workers_ratio", "M_W, what the slowest 3 % of the workers explain of it"),
    ("last_stage_ratio", "M_S, what the last stage explains of it"),
)
_GROUPS = {"optype": "operation", "stage": "stage", "dp_rank": "data-parallel rank"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfAnswers:
    """Predictions for traces."""

    path: Path
    ranked: bool  # Whether haiprof chose the changes, and the best comes first
    predictions: pl.DataFrame  # From `TraceAnalysis.what_if`
    late: str | None = None  # Who is late, in words; None of one rank
    outside_ratio: float | None = None
    """Share of the critical path outside of all recorded events; None where it is not known."""
    has_stacks: bool = False  # Whether Python functions were recorded
    device_step_ns: float | None = None
    """The mean step as the device has it; None without a device or profiler steps."""

    @property
    def common(self) -> dict[str, Any]:
        """The columns that are the same in all rows."""
        return self.predictions.select(_COMMON).row(0, named=True)

    @property
    def explained_step_ns(self) -> int:
        """The step's time as the dependencies alone give it."""
        common = self.common
        explained: int = round(common["measured_step_ns"] * (1 - common["unexplained_ratio"]))
        return explained

    @property
    def notes(self) -> list[str]:
        """Notes on the predictions."""
        late = [self.late] if self.late else []
        best = self.predictions["saved_ratio"].max()
        outside, measured = [], self.common["measured_step_ns"]
        if self.outside_ratio and isinstance(best, float) and self.outside_ratio > best:
            see = ("haiprof verdict names the functions" if self.has_stacks else
                   "record Python stacks to see what it is (haiprof --trace-stacks)")  # fmt: skip
            outside = [
                f"{ratio_text(self.outside_ratio)} of the step is host time outside of all "
                f"{'operators' if self.has_stacks else 'recorded events'}, more than any change "
                f"above saves: {see}"
            ]
        device = self.device_step_ns
        if device is not None and abs(device - measured) > _DIFFERS_RATIO * measured:
            outside.append(
                f"the verdict's step is {duration_text(device)}, the device's own: from the end of "
                "the last step's work on; here a step begins where the host marks it"
            )
        return [*outside, *late, *_notes(self.common, self.predictions)]


def what_if_answers(
    path: Path, changes: Sequence[Change], *, steps: tuple[int, int] | None = None,
    window: int | None = None, pool: Pool | None = None,
) -> WhatIfAnswers:  # fmt: skip
    """Predictions with some changes, or with all that may help, the best first."""
    analysis = TraceQuestions(path, window=window, pool=pool)
    asked = changes or scenarios(analysis, steps)
    if not asked:
        raise MissingDataError(f"{path}: no kernel, operator or loader that could be faster")
    found = analysis.what_if(*asked, steps=steps)
    if not changes:
        found = found.sort("saved_ratio", descending=True, maintain_order=True)
    late = None
    if len(analysis.files) > 1:
        try:
            late = str(analysis.arrival_lateness(steps)["said"][0])
        except MissingDataError as error:
            late = str(error)
    traces = list(analysis.traces.values())
    own = [step_windows(each) for each in traces if len(each.gpu) and len(each.steps)]
    lengths = [length for each in own for length in each["end_ns"] - each["start_ns"]]
    return WhatIfAnswers(
        path=path, ranked=not changes, predictions=found, late=late,
        outside_ratio=None if changes else _unrecorded_ratio(analysis, steps),
        has_stacks=any(len(trace.python) for trace in traces),
        device_step_ns=fmean(lengths) if lengths and steps is None else None,
    )  # fmt: skip


def _unrecorded_ratio(analysis: TraceQuestions, steps: tuple[int, int] | None) -> float | None:
    """Host time outside of all events, as a share of the lowest rank's critical path."""
    known = analysis.traces[min(analysis.traces)].steps["step"].to_list()
    try:
        path = analysis.critical_path(steps=steps or (min(known), max(known) + 1))
    except (HaiprofError, ValueError):  # no profiler step, or no path
        return None
    unnamed = path.top(path.rows.height).filter(pl.col("name").is_null())
    return float(unnamed["share_ratio"].sum())


def what_if_view(answers: WhatIfAnswers) -> RenderableType:
    """The whole view."""
    common, explained = answers.common, answers.explained_step_ns
    off = explained / common["measured_step_ns"] - 1
    first = f"step {duration_text(common['measured_step_ns'])} measured, "
    first += f"{duration_text(explained)} replayed from its dependencies ({_sign_text(off)})"
    title = "What would help most" if answers.ranked else "Predictions"
    saved = [
        "no shorter" if ratio < _LEAST_RATIO else ratio_text(ratio)
        for ratio in answers.predictions["saved_ratio"]
    ]
    rows = answers.predictions.with_columns(pl.Series("saved", saved), name=pl.col("change"))
    columns = (*_COLUMNS, *(_INTERVAL if rows["low_step_ns"].count() else ()))
    return Group(
        Text(first, style="bold"),
        section(title, *frame_table(rows, columns, limit=20)),
        notes_block(answers.notes),
    )


def what_if_data(answers: WhatIfAnswers) -> dict[str, Any]:
    """The same as JSON."""
    own = answers.predictions.drop(_COMMON)
    return {
        "path": str(answers.path), **answers.common,
        "explained_step_ns": answers.explained_step_ns, "predictions": own.to_dicts(),
        "notes": answers.notes,
    }  # fmt: skip


def job_row(path: Path) -> dict[str, Any]:
    """A job replayed from its table of operations: mean steps in ns, and what stragglers cost."""
    what_if = OperationWhatIf(operation_table(path))
    return {
        "path": str(path), "measured_step_ns": float(what_if.measured_ns.mean()),
        "reproduced_step_ns": float(what_if.reproduced_ns.mean()),
        "error_ratio": what_if.error_ratio, "ideal_step_ns": float(what_if.ideal_ns.mean()),
        "slowdown_ratio": what_if.slowdown_ratio,
        "slowest_workers_ratio": what_if.slowest_workers_ratio(),
        "last_stage_ratio": what_if.last_stage_ratio(),
        **{f"by_{column}": what_if.by(column).to_dicts() for column in _GROUPS},
        "by_worker": what_if.by_worker().to_dicts(),
    }  # fmt: skip


@group()
def job_view(jobs: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """The view of such jobs."""
    for row in jobs:
        name = Path(row["path"]).name
        measured, replayed = row["measured_step_ns"], row["reproduced_step_ns"]
        yield Text(
            f"{name}: step {duration_text(measured)} measured, {duration_text(replayed)} "
            f"replayed ({_sign_text(row['error_ratio'])}), {duration_text(row['ideal_step_ns'])} "
            "without stragglers",
            style="bold",
        )
        totals = [(of, MISSING if row[key] is None else f"{row[key]:.4f}") for key, of in _TOTALS]
        shown = pl.DataFrame(totals, schema=["name", "value"], orient="row")
        yield section("Stragglers", *frame_table(shown, (("name", ""), ("value", "")), limit=3))
        for column, title in _GROUPS.items():
            slower = pl.DataFrame(row[f"by_{column}"]).with_columns(
                name=pl.col(column).cast(pl.String), over_ratio=pl.col("slowdown_ratio") - 1
            )
            columns = (("name", title), ("over_ratio", "slower by"))
            yield section(f"Slowdown by {title} alone", *frame_table(slower, columns, limit=5))
        yield Text()


def _notes(common: dict[str, Any], found: pl.DataFrame) -> Iterator[str]:
    if found["low_step_ns"].null_count():
        yield "too few steps were traced to say how sure a prediction is: trace at least 4"
    share = common["unexplained_ratio"]
    if share > _DOUBTFUL_RATIO:
        yield (
            f"{ratio_text(share)} of the step are delays that nothing in the traces explains; they "
            "are kept as they were, so predictions are less sure"
        )
    if count := common["unmatched_count"]:
        yield (
            f"{count_text(count, 'communication kernel')} found on one rank only: waiting and "
            "transfer cannot be told apart, they stay as long as they were"
        )
    if count := common["apart_count"]:
        yield (
            f"{count_text(count, 'thread')} that nothing in the traces starts: "
            f"{'it keeps its' if count == 1 else 'they keep their'} times"
        )
    if count := common["ahead_count"]:
        whose = "" if count == 1 else f" of {count} ranks"
        yield (
            f"the loader's workers{whose} always had a batch ready: how fast they can be is not in "
            "the traces; no step becomes shorter than they take per batch"
        )
    unchanged = found.filter(pl.col("changed_count") == 0)
    for change, held in unchanged.select("change", "held_count").iter_rows():
        if held:
            yield (
                f"{change}: it met {count_text(held, 'collective')} that cannot be changed from "
                "one rank's trace: what of them is waiting, only the other ranks' traces say"
            )
        else:
            yield f"{change}: it met nothing in these steps"


def _sign_text(ratio: float) -> str:
    text = f"{ratio * 100:+.1f} %"
    return "0.0 %" if text[1:] == "0.0 %" else text


_STYLES = {True: "bold red", False: "bold green", None: "bold yellow"}
_TITLES = {"kernel": "Kernels", "operator": "Operators on the host"}


def diff_view(diff: TraceDiff, verdict: Verdict) -> RenderableType:
    """The whole view: times are means per step and rank."""
    time = diff.step_time
    words = f"step {duration_text(time.control_ns)} before, {duration_text(time.test_ns)} after"
    parts: list[RenderableType] = [
        Text(verdict.text, style=_STYLES[verdict.is_slower]),
        Text(words, style="dim"),
    ]
    for kind, title in _TITLES.items():
        own = diff.names.filter(pl.col("of") == kind)
        if own["name"].to_list() == [NOTHING[kind]]:  # a job without a GPU: it idles all the time
            continue
        changed = own.filter(pl.col("difference_ns") != 0)
        if changed.is_empty():
            parts += [Text(), Text(f"{title}: each takes the same time in both", style="dim")]
            continue
        table = frame_table(changed, headings("trace_differences"), limit=10)
        parts.append(section(f"{title} per step, the largest difference first", *table))
    return Group(*parts, notes_block(diff.notes))


def diff_data(diff: TraceDiff, verdict: Verdict) -> dict[str, Any]:
    """The same as JSON, complete."""
    return {
        "is_slower": verdict.is_slower, "verdict": verdict.text,
        "step_time": {**asdict(diff.step_time), "difference_ns": diff.step_time.difference_ns,
                      "change_ratio": diff.step_time.change_ratio},
        "names": diff.names.to_dicts(), "steps": diff.steps.to_dicts(), "notes": list(diff.notes),
    }  # fmt: skip
