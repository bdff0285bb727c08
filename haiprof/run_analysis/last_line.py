"""The last line of the user's own code that a rank was seen at: from its sampled stacks."""

from __future__ import annotations

from dataclasses import dataclass

from haiprof.base.errors import RunFormatError
from haiprof.run_analysis.run_files import RankFiles, SampledProcess, read_stack_file
from haiprof.run_format.stack_frames import Frame, frame_text, own_frame

_DEPTH = 200
_BACK = 50
"""So many samples back at the most is one looked for whose stack is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLine:
    """Where a rank was seen last."""

    line: str
    """`train.py:88 in step`."""
    wall_ns: int


def last_line(rank: RankFiles) -> LastLine | None:
    """Where the training thread was at its last sample; None where none was kept."""
    offset_ns = rank.clock_offset_ns
    try:
        processes, _ = read_stack_file(rank.paths.stacks)
    except RunFormatError:
        return None
    own = [p for p in processes if p.worker is None and p.pid == rank.report.get("pid")]
    if not own or offset_ns is None:
        return None
    sampled = own[-1]
    for place in range(len(sampled.stack) - 1, max(-1, len(sampled.stack) - _BACK), -1):
        frame = own_frame(_frames(sampled, int(sampled.stack[place])))
        if frame is not None:
            wall_ns = int(sampled.time_ns[place]) + offset_ns
            return LastLine(line=frame_text(frame), wall_ns=wall_ns)
    return None


def _frames(process: SampledProcess, stack: int) -> list[Frame]:
    """From the outermost to the innermost frame."""
    found: list[Frame] = []
    while stack and len(found) < _DEPTH:
        frame = process.frames[process.places[stack - 1]]
        found.append((frame.file, frame.line, frame.function))
        stack = process.parents[stack - 1]
    return found[::-1]
