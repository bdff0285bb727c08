"""What was traced in a run, in a line each: which steps, where the files are, why the rest not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from haiprof.base.log_addresses import shown_path
from haiprof.base.units import bytes_text, duration_text, ranks_text, ratio_text
from haiprof.diagnosis.thresholds import UNTRACED_MIN_RATIO
from haiprof.run_analysis.reactions import watched_frame
from haiprof.run_format.layout import RunPaths

LINE_LIMIT = 6
_ALL = 0.9  # the first steps of a run are never watched: what is usual must be known
_WORDS = {"failed": "failed", "refused": "refused", "dropped": "not kept"}


def traced_lines(windows: pl.DataFrame, steps: pl.DataFrame, run: RunPaths) -> tuple[str, ...]:
    """What a reader of a run should know of its traces; empty where none was asked for."""
    watched = tuple(_slow_step_lines(watched_frame(run)))
    if windows.is_empty():
        return watched
    kept = windows.filter(pl.col("path").is_not_null())
    lines = list(_stored_windows(kept, run))
    lines += _others(windows.filter(pl.col("path").is_null()))
    if len(lines) > LINE_LIMIT:
        more = len(lines) - LINE_LIMIT + 1
        lines[LINE_LIMIT - 1 :] = [
            f"and {more} more: haiprof query {shown_path(run.root)} --schema"
        ]
    if kept.height:
        lines.append(_left_out(steps))
        path = shown_path(run.root)
        lines.append(f"see them: haiprof trace-report {path}, haiprof tensorboard {path}")
    return (*watched, *(line for line in lines if line))


def _slow_step_lines(frame: pl.DataFrame) -> Iterable[str]:
    """How many steps `--keep-slow` looked at, what that took, and how it would be more."""
    frame = frame.filter(pl.col("step_count") > 0, pl.col("watched_count").is_not_null())
    if frame.is_empty():
        return
    most = frame.sort("step_count").row(-1, named=True)
    steps, seen = most["step_count"], most["watched_count"]
    share = seen / steps
    line = f"watched for slow steps: {seen:,} of {steps:,} steps ({ratio_text(share)})"
    cost, budget = _most(frame["cost_ratio"]), most["budget_ratio"]
    if cost is not None:
        line += f" for {ratio_text(cost)} of the time"
        line += "" if budget is None else f" (--slow-cost {budget:g})"
    memory, disk = _most(frame["memory_bytes"]), int(frame["kept_bytes"].sum() or 0)
    line += "" if memory is None else f", at most {bytes_text(memory)} of memory per rank"
    yield line + (f", {bytes_text(disk)} of disk before compression" if disk else "")
    slow, kept = _most(frame["slow_count"]), _most(frame["kept_count"])
    if slow is not None and kept is not None:
        line = f"{_number(slow, 'slow step')} on the rank with most, {_number(kept, 'window')} kept"
        limit = most["kept_limit"]
        if limit is not None and kept >= limit:
            line += f", as many as --repeat {limit} asks for: no later step was watched"
        yield line + _more(most, share)
    for (reason,), rows in frame.drop_nulls("refused").group_by("refused", maintain_order=True):
        yield f"{ranks_text(rows['rank'].to_list())}: not watched at the end: {reason}"


def _number(count: float, what: str) -> str:
    return f"{count:,.0f} {what}" + ("" if count == 1 else "s")


def _more(most: Mapping[str, Any], share: float) -> str:
    """With which chance one slow step is caught, and which option makes that larger."""
    if share >= _ALL:
        return ""
    line = f"; one that comes once is caught with a chance of {ratio_text(share)}"
    cost_ns, usual_ns = most["cost_ns"], most["usual_ns"]
    if not (cost_ns and usual_ns and most["watched_count"]):
        return line + ": a higher --slow-cost watches more"
    price = cost_ns / most["watched_count"] / usual_ns
    return line + f", with --slow-cost {_rounded_up(price):g} nearly always"


def _rounded_up(ratio: float) -> float:
    """To one digit."""
    unit = 10.0 ** math.floor(math.log10(ratio))
    return round(math.ceil(ratio / unit - 1e-9) * unit, 9)


def _stored_windows(windows: pl.DataFrame, run: RunPaths) -> Iterable[str]:
    """Windows with a file, those of the same steps together."""
    keys = ("first_step", "end_step", "trigger", "state", "reason")
    for key, rows in windows.group_by(*keys, maintain_order=True):
        first, end, trigger, state, reason = (None if v is None else str(v) for v in key)
        files = rows.height + rows["et_path"].drop_nulls().len()
        size = int(rows["bytes"].sum() or 0) + int(rows["et_bytes"].sum() or 0)
        line = f"{_steps(first, end)} on {ranks_text(rows['rank'].to_list())}: "
        line += f"{files} {'file' if files == 1 else 'files'}, {bytes_text(size)}, in {run.traces}"
        if rows["stall_ns"].max() is not None:
            line += f"; the job stood still for {duration_text(_most(rows['stall_ns']))} at most"
        if trigger == "slow":
            line += "; kept because a step was slow"
        yield line + (f"; {state}: {reason}" if reason else "")


def _others(windows: pl.DataFrame) -> Iterable[str]:
    """Windows without a file, by why."""
    for (state, reason), rows in windows.group_by("state", "reason", maintain_order=True):
        who = ranks_text(rows["rank"].to_list())
        if state == "dropped":
            yield f"{rows.height} windows of {who} not kept: {reason or 'no step was slow'}"
        elif state in ("recorded", "cut"):
            yield f"{who}: recorded, and the files are gone"
        else:
            yield f"{who}: not traced: {reason or _WORDS.get(str(state), state)}"


def _left_out(steps: pl.DataFrame) -> str:
    traced = int(steps["traced"].sum() or 0)
    if not traced:
        return ""
    if steps.height - traced <= UNTRACED_MIN_RATIO * steps.height:
        return f"{traced} of {steps.height} steps were traced, which makes them slower than usual"
    return f"{traced} traced steps of all ranks are left out of medians and findings"


def _steps(first: str | None, end: str | None) -> str:
    if first is None or end is None:
        return "steps that are not known"
    last = int(end) - 1
    return f"step {first}" if last == int(first) else f"steps {first} to {last}"


def _most(values: pl.Series) -> float | None:
    most = values.max()
    return float(most) if isinstance(most, (int, float)) else None
