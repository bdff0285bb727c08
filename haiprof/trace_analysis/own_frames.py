"""Frames of haiprof itself in recorded call stacks: taken out, so that the job's own remain."""

from __future__ import annotations

import polars as pl

from haiprof.base.intervals import covered_lengths, union

_OWN = r"(?:^|[/\\])haiprof[/\\](?:in_job|base|run_format|linux)[/\\]"
_THREAD_START = "threading.py("


def without_own_frames(calls: pl.DataFrame) -> pl.DataFrame:
    """Python calls without those of haiprof's modules inside the job.

    What a wrapper of haiprof called belongs to the wrapper's caller, and the wrapper's own time
    with it. Threads that haiprof started are left out whole.
    """
    names = calls["name"].unique()
    own_names = names.filter(names.cast(pl.String).str.contains(_OWN))
    if own_names.is_empty():
        return calls
    marked = calls.with_columns(is_own=pl.col("name").is_in(own_names.implode()))
    threads = _own_threads(marked)
    kept = marked.join(threads, on=["pid", "tid"], how="anti", maintain_order="left")
    above = kept.filter("is_own").select("python_id", "parent_id").drop_nulls("python_id")
    if above["python_id"].is_duplicated().any():  # ids that mean nothing: times nest the calls
        return kept.filter(~pl.col("is_own")).drop("is_own")
    callers = _callers_outside(dict(above.iter_rows()))
    moved = pl.col("parent_id").replace_strict(callers, default=pl.col("parent_id"))
    return kept.filter(~pl.col("is_own")).drop("is_own").with_columns(parent_id=moved)


def _own_threads(marked: pl.DataFrame) -> pl.DataFrame:
    """Threads in which nothing but threading.py calls haiprof."""
    found = []
    for (pid, tid), rows in marked.filter(pl.col("is_own").any().over("pid", "tid")).group_by(
        "pid", "tid"
    ):
        starts = rows["ts_ns"].to_numpy()
        ends = starts + rows["dur_ns"].to_numpy()
        own = rows["is_own"].to_numpy()
        covered = covered_lengths(union(starts[own], ends[own]), starts, ends)
        outside = rows.filter(pl.Series(~own & (covered < ends - starts)))["name"].cast(pl.String)
        if outside.str.starts_with(_THREAD_START).all():
            found.append((pid, tid))
    return pl.DataFrame(found, schema={"pid": pl.Int64, "tid": pl.Int64}, orient="row")


def _callers_outside(callers: dict[int, int | None]) -> dict[int, int | None]:
    """Of each own call, by id, the id of the nearest call around it that is not own."""
    found: dict[int, int | None] = {}
    for call in callers:
        above, seen = callers[call], {call}
        while above in callers and above not in seen:
            seen.add(above)
            above = callers[above]
        found[call] = above
    return found
