"""Summaries: the standard report's answers about one trace as a small file that needs no trace.

Each node can reduce its own traces, so that a report on all of them transfers only kilobytes. No
code is stored: frames are Arrow IPC, the rest is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from haiprof.base.errors import HaiprofError, MissingDataError, TraceFormatError, UsageError
from haiprof.base.safe_files import make_named_folder, write_file
from haiprof.trace_analysis.report_cache import UNFIT, Answer, pack_answers, unpack_answers
from haiprof.trace_analysis.temporal import Steps
from haiprof.trace_format.find import SUMMARY_SUFFIX

VERSION = 1
"""1: a line of JSON (`haiprof_summary`, `steps`), then the answers as `report_cache` packs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The content of a summary."""

    path: Path
    steps: Steps
    """First profiler step and the one after the last; None: all that was recorded."""
    answers: Mapping[str, Answer]
    """By the name of the question."""


def write_summary(trace: Path, folder: Path, steps: Steps, answers: Mapping[str, Answer]) -> Path:
    """Writes a trace's answers under its name, replacing an existing file."""
    head = json.dumps({"haiprof_summary": VERSION, "steps": steps}).encode() + b"\n"
    target = folder / f"{trace.name}{SUMMARY_SUFFIX}"
    try:
        make_named_folder(folder)
        write_file(target, head + pack_answers(answers), below=folder)
    except OSError as error:
        raise UsageError(f"--reduce {folder}: {error.strerror}") from None
    return target


def read_summary(path: Path, questions: Collection[str]) -> Summary:
    """The answers in a file."""
    try:
        data = path.read_bytes()
        at = data.index(b"\n") + 1
        head = json.loads(data[:at])
        if head["haiprof_summary"] != VERSION:
            raise ValueError(f"version {head['haiprof_summary']}")
        steps = None if head["steps"] is None else (int(head["steps"][0]), int(head["steps"][1]))
        answers = unpack_answers(data[at:], path)
        lacking = sorted(set(questions) - set(answers))
        if lacking:
            raise ValueError(f"no answer to {lacking[0]}")
    except UNFIT as error:
        raise TraceFormatError(
            f"{path}: no summary that this haiprof can read: {error}",
            hint="haiprof trace-report TRACES --reduce DIR writes it again",
        ) from None
    return Summary(path=path, steps=steps, answers=answers)


class _OfSteps(Protocol):
    """What was made of some steps of a trace."""

    @property
    def path(self) -> Path: ...
    @property
    def steps(self) -> Steps: ...


def common_steps(
    summaries: Sequence[_OfSteps], asked: Steps, *, command: str = "trace-report"
) -> Steps:
    """The steps that all summaries share."""
    first = summaries[0]
    for other in summaries:
        if other.steps != first.steps:
            raise HaiprofError(
                f"{first.path} is of {_range(first.steps)}, {other.path} of {_range(other.steps)}"
            )
    if asked not in (None, first.steps):
        raise MissingDataError(
            f"{first.path}: a summary of {_range(first.steps)}",
            hint=f"haiprof {command} TRACES --reduce DIR --steps A:B makes one of others",
        )
    return first.steps


def _range(steps: Steps) -> str:
    return "all steps" if steps is None else f"steps {steps[0]} to before {steps[1]}"
