"""Summaries: the standard report's answers about one trace as a small file that needs no trace.

Each node reduces its own traces right after they were captured, and the report on all of them moves
kilobytes. No code is stored: frames are Arrow IPC, the rest is JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.analysis.trace.kept import UNFIT, Answer, packed, unpacked
from haiprof.analysis.trace.temporal import Steps
from haiprof.errors import HaiprofError, MissingDataError, TraceFormatError, UsageError
from haiprof.traces.find import SUMMARY_SUFFIX

VERSION = 1
"""1: a line of JSON (`haiprof_summary`, `steps`), then the answers as `kept` packs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a summary holds."""

    path: Path
    steps: Steps
    """First profiler step and the one after the last; null: all that was recorded."""
    answers: Mapping[str, Answer]
    """By the name of the question."""


def write_summary(trace: Path, folder: Path, steps: Steps, answers: Mapping[str, Answer]) -> Path:
    """Writes a trace's answers under its name; what stands there is replaced, whole.

    Raises:
        UsageError: The folder cannot be written.
    """
    head = json.dumps({"haiprof_summary": VERSION, "steps": steps}).encode() + b"\n"
    target = folder / f"{trace.name}{SUMMARY_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, building = tempfile.mkstemp(prefix=".building-", dir=folder)
        with open(handle, "wb") as file:
            file.write(head + packed(answers))
        os.chmod(building, folder.stat().st_mode & 0o666)
        os.replace(building, target)
    except OSError as error:
        raise UsageError(f"--reduce {folder}: {error.strerror}") from None
    return target


def read_summary(path: Path, questions: Collection[str]) -> Summary:
    """The answers in a file.

    Args:
        path: Of the summary.
        questions: Whose answers must be there.

    Raises:
        TraceFormatError: It is none, damaged, or of another version of haiprof.
    """
    try:
        data = path.read_bytes()
        at = data.index(b"\n") + 1
        head = json.loads(data[:at])
        if head["haiprof_summary"] != VERSION:
            raise ValueError(f"version {head['haiprof_summary']}")
        steps = None if head["steps"] is None else (int(head["steps"][0]), int(head["steps"][1]))
        answers = unpacked(data[at:], path)
        lacking = sorted(set(questions) - set(answers))
        if lacking:
            raise ValueError(f"no answer to {lacking[0]}")
    except UNFIT as error:
        raise TraceFormatError(
            f"{path}: no summary that this haiprof can read: {error}",
            hint="haiprof trace-report TRACES --reduce DIR writes it anew",
        ) from None
    return Summary(path=path, steps=steps, answers=answers)


def common_steps(summaries: Sequence[Summary], asked: Steps) -> Steps:
    """The steps that all summaries are of.

    Raises:
        HaiprofError: They are of different ones.
        MissingDataError: Others were asked for.
    """
    first = summaries[0]
    for other in summaries:
        if other.steps != first.steps:
            raise HaiprofError(
                f"{first.path} is of {_said(first.steps)}, {other.path} of {_said(other.steps)}"
            )
    if asked not in (None, first.steps):
        raise MissingDataError(
            f"{first.path}: a summary of {_said(first.steps)}",
            hint="haiprof trace-report TRACES --reduce DIR --steps A:B makes one of others",
        )
    return first.steps


def _said(steps: Steps) -> str:
    return "all steps" if steps is None else f"steps {steps[0]} to before {steps[1]}"
