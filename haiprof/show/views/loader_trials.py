"""What `haiprof try-loader` shows: the steps per second of each trial."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.options import KEPT_BATCHES
from haiprof.base.units import MISSING, digits_text
from haiprof.live.loader_trials import AS_GIVEN, LoaderTrial
from haiprof.show.text import count_text, printable
from haiprof.show.views.blocks import one_line, plain_table


def loader_trials_view(trials: Sequence[LoaderTrial]) -> RenderableType:
    """The whole view."""
    given = trials[0]
    table = plain_table(
        "loader", "steps/s", "95 % interval", "of the loader as given", left=("loader",)
    )
    for trial in trials:
        table.add_row(_name(trial), *_cells(trial, given))
    failed = [each for each in trials if each.reason is not None]
    return Group(
        Text(headline(trials), style="bold"),
        table,
        *(one_line(f"{_name(each)}: {printable(each.reason or '')}") for each in failed),
    )


def headline(trials: Sequence[LoaderTrial]) -> str:
    """`a free loader: 1.9 times as fast; 4 workers: 1.8 times (12.1 steps/s)`."""
    given, known = trials[0], [each for each in trials if each.steps_per_s is not None]
    free = next((each for each in known if each.loader == KEPT_BATCHES), None)
    parts = []
    if free is not None:
        is_same = _overlap(free, given)
        parts.append(
            "an instant loader would give no measurable gain"
            if is_same
            else f"a free loader: {_times(free, given)} times as fast"
        )
    tried = [each for each in known if each.loader not in (AS_GIVEN, KEPT_BATCHES)]
    if tried:
        best = max(tried, key=lambda each: each.steps_per_s or 0.0)
        better = not _overlap(best, given) and (best.steps_per_s or 0) > (given.steps_per_s or 0)
        parts.append(
            f"{_name(best)}: {_times(best, given)} times"
            if better
            else "no number of workers is faster than the loader as given"
        )
    return "; ".join(parts) or "nothing could be measured but the loader as given"


def _overlap(one: LoaderTrial, other: LoaderTrial) -> bool:
    """Whether the two may be the same, as their intervals tell."""
    return (one.low or 0) <= (other.high or 0) and (other.low or 0) <= (one.high or 0)


def _times(trial: LoaderTrial, given: LoaderTrial) -> str:
    if not trial.steps_per_s or not given.steps_per_s:
        return MISSING
    return f"{trial.steps_per_s / given.steps_per_s:.2f}"


def _name(trial: LoaderTrial) -> str:
    if trial.loader == AS_GIVEN:
        return AS_GIVEN if trial.workers is None else f"{AS_GIVEN} ({trial.workers} workers)"
    if trial.loader == KEPT_BATCHES:
        return "kept batches (a free loader)"
    return count_text(int(trial.loader), "worker")


def _cells(trial: LoaderTrial, given: LoaderTrial) -> tuple[str, str, str]:
    if trial.steps_per_s is None or trial.low is None or trial.high is None:
        return MISSING, MISSING, MISSING
    interval = f"{digits_text(trial.low)} to {digits_text(trial.high)}"
    return digits_text(trial.steps_per_s), interval, f"x{_times(trial, given)}"
