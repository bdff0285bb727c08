"""Sampled stacks written by hand: what a rank and its DataLoader workers leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from haiprof.run_format.stack_lines import HEADER, SAMPLES, STACKS_VERSION
from haiprof.run_format.writer import LineWriter

Stack = tuple[tuple[Any, ...], ...]
"""Frames (file, line, function, and maybe the expression), the outermost first."""


def write_stacks(
    path: Path, samples: Sequence[tuple[int, Stack]], *, worker: int | None = None, pid: int = 7,
    per_line: int = 5, libraries: Sequence[str] = (), waits: Sequence[bool] | None = None,
    other: Stack = (), lock: str = "", kernel_waits: str = "",
) -> None:  # fmt: skip
    """Writes (time_ns in whole us, stack) as the job would: so many samples in a line."""
    writer = LineWriter(path)
    writer.append({
        "type": HEADER, "version": STACKS_VERSION, "pid": pid, "worker": worker, "time_ns": 0,
        "hz": 20.0, "libraries": list(libraries),
    })  # fmt: skip
    frames: dict[tuple[Any, ...], int] = {}
    stacks: dict[tuple[int, int], int] = {}
    for first in range(0, len(samples), per_line):
        chosen = samples[first : first + per_line]
        frame_count, stack_count = len(frames), len(stacks)
        numbers = []
        for _, stack in chosen:
            number = 0
            for frame in stack:
                place = frames.setdefault(frame, len(frames))
                number = stacks.setdefault((number, place), len(stacks) + 1)
            numbers.append(number)
        begin = chosen[0][0]
        more: dict[str, object] = {}
        if waits is not None:
            waited = [i for i in range(len(chosen)) if waits[first + i]]
            number = 0
            for frame in other:
                place = frames.setdefault(frame, len(frames))
                number = stacks.setdefault((number, place), len(stacks) + 1)
            since_us = [(chosen[i][0] - samples[max(first + i - 1, 0)][0]) // 1000 for i in waited]
            offsets = [(chosen[i][0] - begin) // 1000 for i in waited]
            letters = "".join("1" if i in waited else "0" for i in range(len(chosen)))
            more = {"lock_wait": letters, "others": [
                [offset, 0, number, 1000, since]
                for offset, since in zip(offsets, since_us, strict=True)
            ]}  # fmt: skip
        if lock:
            more["lock_wait"] = lock[first : first + len(chosen)]
        if kernel_waits:
            more["wait"] = kernel_waits[first : first + len(chosen)]
        writer.append({
            "type": SAMPLES, "pid": pid, "time_ns": begin,
            "first_frame": frame_count,
            "frames": [[*f[:3], f[1], *f[3:]] for f in list(frames)[frame_count:]],
            "first_stack": stack_count + 1,
            "stacks": [list(stack) for stack in list(stacks)[stack_count:]],
            "offset_us": [(time - begin) // 1000 for time, _ in chosen],
            "late_us": [100] * len(chosen),
            "stack": numbers,
            "cpu_ns": 1000,
            **more,
        })  # fmt: skip
    writer.close()
