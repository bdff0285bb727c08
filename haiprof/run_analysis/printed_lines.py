"""What the job itself printed that tells of it: losses that are no number, errors, rates."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from haiprof.base.units import shorten, visible
from haiprof.run_analysis.run_files import RunFiles, entries, integer, read_record, text

ERRORS = ("traceback", "nccl", "memory")
_SHOWN = 300
_BAR = re.compile(r"(\d+)/(\d+) \[")
"""Of a progress bar: until it is full, its rate is that of its last few steps."""
_SAME_RATIO = 0.10  # rates that differ by less agree: a job counts its first steps, too. Own choice


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedLine:
    """One line that the job printed into a file."""

    kind: str  # `loss` (NaN or infinite), `traceback`, `nccl`, `memory`, or `rate`
    rank: int | None  # None where several ranks print into that file, and the line does not say
    wall_ns: int  # Unix time at which it was read, up to 2 s later; Python writes files later still
    text: str
    step: int | None  # as the job printed it
    per_second: float | None
    unit: str | None

    @property
    def who(self) -> str:
        """`rank 1`, or that it is not known which."""
        return "a rank" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What was read of the files that the job prints into."""

    lines: tuple[PrintedLine, ...]  # of all nodes, in the order in which they were read
    file_count: int
    skipped_bytes: int  # printed faster than it is read: what stands there is not known


def printed_output(files: RunFiles) -> Output:
    """Reads what the agents of all nodes wrote down."""
    found, count, skipped = [], 0, 0
    for node in files.nodes:
        outputs = {integer(line.get("output")): line for line in node.of_type("output")}
        count += len(outputs)
        skipped += sum(max(integer(line.get("skipped")) or 0, 0) for line in outputs.values())
        for line in node.of_type("printed"):
            ranks = entries(outputs.get(integer(line.get("output")), {}).get("ranks"))
            own = [line.get("rank"), *(ranks if len(ranks) == 1 else ())]
            rank = next((number for each in own if (number := integer(each)) is not None), None)
            said = shorten(visible(text(line.get("text")) or ""), _SHOWN)
            wall_ns = integer(line.get("wall_ns")) or 0
            found.append(read_record(PrintedLine, line, wall_ns=wall_ns, rank=rank, text=said))
    found.sort(key=lambda line: line.wall_ns)
    return Output(lines=tuple(found), file_count=count, skipped_bytes=skipped)


def printed_notes(
    output: Output, step_ns: float | None, sizes: Mapping[str, Sequence[float]], *, died: bool
) -> Iterator[str]:
    """Rates that the job printed and that were not measured so, and errors that it outlived.

    `sizes`: by unit, how many a step may have: of one rank, then of all together.
    """
    rates = defaultdict(list)
    for line in output.lines:
        bar = _BAR.search(line.text)
        is_under_way = bar is not None and bar[1] != bar[2]
        if line.kind == "rate" and line.unit and line.per_second and not is_under_way:
            rates[line.who, line.unit].append(line.per_second)
    for (who, unit), values in list(rates.items())[:3]:
        per_s = [each * 1e9 / step_ns for each in sizes.get(unit, ())] if step_ns else []
        last, usual = values[-1], median_low(values)
        differs = per_s and all(
            abs(rate / each - 1) > _SAME_RATIO for each in per_s for rate in (last, usual)
        )
        if step_ns and unit in sizes and not differs:  # or nobody knows how many a step has
            continue
        many = f" (the last of {len(values)})" if len(values) > 1 else ""
        note = f"{who} printed {last:,.4g} {unit}/s{many}"
        if per_s:
            note += (
                f"; its steps make {per_s[0]:,.4g} {unit}/s: what it prints counts other time, "
                f"too, or other {unit}"
            )
        elif step_ns:
            each = f"which is {last * step_ns / 1e9:,.4g} {unit} per step"
            note += f"; measured: {1e9 / step_ns:,.4g} steps/s, {each}"
        yield note
    errors = [line for line in output.lines if line.kind in ERRORS]
    if errors and not died:
        yield f"errors were printed ({len(errors)}), by {errors[0].who} first: {errors[0].text}"
    if output.skipped_bytes:
        yield f"{output.skipped_bytes / 1e6:,.3g} MB of what the job printed were not looked at"
