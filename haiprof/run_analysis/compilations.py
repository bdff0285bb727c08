"""When torch.compile worked on a rank, and how much of that lay in evaluations."""

from __future__ import annotations

import numpy as np

from haiprof.base.intervals import Intervals, Ints, intersection, total, union
from haiprof.run_analysis.run_files import RankFiles, integer

_LIMIT_US = 1 << 52


def compile_intervals(files: RankFiles) -> Intervals | None:
    """Unix time in ns of all compilations, those of backward graphs included.

    Source: `torch._dynamo.utils.get_compilation_metrics`. One that compiles another counts once.

    None where the run does not tell when they began: it was recorded by an older haiprof.
    """
    lines = files.of_type("compile")
    if any(not isinstance(line.get("spans"), list) for line in lines):
        return None
    pairs = [
        (begin, length)
        for line in lines
        for span in line["spans"]
        if isinstance(span, list) and len(span) == 2
        for begin, length in [(integer(span[0]), integer(span[1]))]
        if begin is not None and length is not None
        if 0 < begin < _LIMIT_US and 0 <= length < _LIMIT_US
    ]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2) * 1_000
    return union(table[:, 0], table.sum(axis=1))


def compile_columns(
    files: RankFiles, starts: Ints, ends: Ints, *, wall_offset_ns: int
) -> dict[str, int | None]:
    """`compile_ns` of a rank, and `eval_compile_ns` in its evaluations; None where not known."""
    compiled = compile_intervals(files)
    if compiled is None:
        return {"compile_ns": None, "eval_compile_ns": None}
    evaluated = union(starts + wall_offset_ns, ends + wall_offset_ns)
    return {
        "compile_ns": total(compiled),
        "eval_compile_ns": total(intersection(evaluated, compiled)),
    }
