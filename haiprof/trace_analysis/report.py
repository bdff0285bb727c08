"""The standard report: every question that a first look asks, in one visit to each trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.collectives import collective_kernels, communication_parts
from haiprof.trace_analysis.device_time import NO_LAUNCHES, Steps, kernels, temporal_breakdown
from haiprof.trace_analysis.files import check_frame, load_notes, trace_file
from haiprof.trace_analysis.launches import full_queue, queue_length_summary
from haiprof.trace_analysis.pool import Pool, Progress, Question, default_pool
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.questions.base import NamedFiles, asked_of_each_rank
from haiprof.trace_analysis.report_cache import (
    cached_answers,
    common_steps,
    read_summary,
    write_summary,
)
from haiprof.trace_analysis.step_time import step_time_breakdown
from haiprof.trace_format.find import SUMMARY_SUFFIX, window_files
from haiprof.trace_format.kineto.rank_trace import Trace

_Result = TypeVar("_Result")
_Visit = dict[str, Any]  # the answers about one file, by the name of the question
_Section = Callable[[TraceQuestions, Steps], pl.DataFrame]

_ONE_RANK = "the trace of one rank: who waited for whom needs the traces of several"
_NO_COLLECTIVE = "no collective that several of the ranks have in common"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """The answers of the standard report."""

    path: Path
    ranks: tuple[int, ...]
    steps: Steps  # First profiler step and the one after the last; None: all that was recorded
    tables: Mapping[str, pl.DataFrame]
    """By name, in the order of `SECTIONS`; columns as the methods of `TraceAnalysis` have them."""
    missing: Mapping[str, str]
    """By table, or by table and rank (`queue, rank 3`): why it is not there."""
    notes: tuple[str, ...]
    """Notes on what could not be read of the files, and what was not recorded in them."""
    reduced: bool = False  # Whether it was made from summaries, without traces

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys; a table is a list of rows."""
        return {
            "path": str(self.path),
            "ranks": list(self.ranks),
            "steps": None if self.steps is None else list(self.steps),
            "tables": {name: table.to_dicts() for name, table in self.tables.items()},
            "missing": dict(self.missing),
            "notes": list(self.notes),
        }


def _step_times(analysis: TraceQuestions, steps: Steps) -> pl.DataFrame:
    found = analysis.step_time_breakdown()
    inside = pl.lit(True) if steps is None else pl.col("step").is_between(*steps, closed="left")
    return found.filter(inside)


def _queues(analysis: TraceQuestions, steps: Steps) -> pl.DataFrame:
    keys = ["rank", "device", "stream"]
    full = analysis.full_queue(steps).select(*keys, "full_ns")
    return analysis.queue_length_summary(steps).join(full, on=keys, how="left").sort(keys)


SECTIONS: Mapping[str, _Section] = {
    "files": lambda analysis, steps: analysis.load_report(),
    "checks": lambda analysis, steps: check_frame(analysis.files),  # clocks have their own table
    "steps": _step_times,
    "temporal": TraceQuestions.temporal_breakdown,
    "overlap": TraceQuestions.overlap,
    "kernel_types": TraceQuestions.kernel_type_breakdown,
    "kernels": lambda analysis, steps: analysis.kernels_across_ranks(steps).sort(
        -pl.col("sum_ns"), "kind", "name"
    ),
    "idle": TraceQuestions.idle_time_breakdown,
    "operators": TraceQuestions.host_operators,
    "launches": TraceQuestions.launch_summary,
    "queue": _queues,
    "efficiency": TraceQuestions.step_efficiency,
    "memory_bandwidth": TraceQuestions.memory_bandwidth_summary,
    "gpu_counters": TraceQuestions.gpu_counters,
    "graph_nodes": TraceQuestions.graph_nodes,
    "os_calls": TraceQuestions.os_calls,
    "rank_collectives": TraceQuestions.rank_collectives,
    "communication_parts": TraceQuestions.communication_parts,
    "process_groups": TraceQuestions.process_groups,
    "lateness": TraceQuestions.arrival_lateness,
    "stragglers": TraceQuestions.stragglers,
    "clock_offsets": TraceQuestions.clock_offsets,
}
"""The method of each table; `kernels` is over all ranks."""
_OF_SEVERAL = ("process_groups", "lateness", "stragglers", "clock_offsets")
_OF_FILE: tuple[Question[Any], ...] = (trace_file, step_time_breakdown)
_OF_STEPS: tuple[Question[Any], ...] = (
    temporal_breakdown, kernels, queue_length_summary, full_queue, collective_kernels,
    communication_parts, *filter(None, map(asked_of_each_rank, SECTIONS.values())),
)  # fmt: skip
_QUESTIONS = tuple(question.__name__ for question in (*_OF_FILE, *_OF_STEPS))


def standard_report(
    path: str | Path, *, steps: Steps = None, rank: int | None = None, window: int | None = None,
    named: NamedFiles | None = None, pool: Pool | None = None, progress: Progress | None = None,
) -> TraceReport:  # fmt: skip
    """All tables of the report; each trace is opened once, by one task."""
    asked = TraceQuestions(path, pool=pool, window=window, named=named)
    files = asked.paths()
    reduced = files[0].name.endswith(SUMMARY_SUFFIX)
    if reduced:
        read = [read_summary(file, _QUESTIONS) for file in files]
        visits: dict[Path, _Visit] = {each.path: dict(each.answers) for each in read}
        steps = common_steps(read, steps)
        asked = TraceQuestions(path, pool=_Visited(visits, steps), window=window)
    pool = pool or default_pool(files)
    if rank is not None:
        files = [asked.file_of(rank).path]
        named = {rank: files[0]}  # the file itself may not say it
    if not reduced:
        visits = _visit_files(files, steps, pool, progress)
    visited = _Visited(visits, steps)
    analysis = TraceQuestions(path, pool=visited, window=window, named=named)
    damage = [f"{file.path}: nothing to report: {each.text}" for file in analysis.files.values()
              for each in file.findings if each.check == "damaged_file"]  # fmt: skip
    if damage and all(file.start_ns is None for file in analysis.files.values()):
        raise MissingDataError(damage[0], hint="copy the file again, or record again")
    tables, missing = _tables(analysis, visited)
    without_gpu = (
        f"{row['file']}: no GPU event in it, the GPU times of rank {row['rank']} are unknown: "
        "the job used no GPU, or ProfilerActivity.CUDA was not profiled"
        for row in tables["files"].filter(gpu_count=0).iter_rows(named=True)
    )
    return TraceReport(
        path=Path(path), ranks=tuple(analysis.files), steps=steps, tables=tables, missing=missing,
        notes=(*load_notes(analysis.files), *without_gpu), reduced=reduced,
    )  # fmt: skip


def reduce_traces(
    path: str | Path, folder: Path, *, steps: Steps = None, window: int | None = None,
    pool: Pool | None = None, progress: Progress | None = None,
) -> list[Path]:  # fmt: skip
    """Writes a summary of each trace, from which `standard_report` makes the same report."""
    files = window_files(path, window)
    visits = _visit_files(files, steps, pool or default_pool(files), progress)
    return [write_summary(file, folder, steps, visit) for file, visit in visits.items()]


def _visit_files(
    files: Sequence[Path], steps: Steps, pool: Pool, progress: Progress | None
) -> dict[Path, _Visit]:
    """One visit to each file, or the cached answers of an earlier one."""
    options = {"steps": steps}
    found = cached_answers(
        files, "report", options, _QUESTIONS,
        lambda left: pool.map(_visit, left, options, progress),
    )  # fmt: skip
    return {path: dict(each) for path, each in zip(files, found, strict=True)}


def _visit(trace: Trace, *, steps: Steps) -> _Visit:
    """All answers of one file; or, for what was not recorded, the error that says so."""
    answers = {each.__name__: _answer(each, trace) for each in _OF_FILE}
    return answers | {each.__name__: _answer(each, trace, steps=steps) for each in _OF_STEPS}


def _answer(question: Question[Any], trace: Trace, **options: Any) -> object:  # noqa: ANN401
    try:
        return question(trace, **options)
    except MissingDataError as error:
        return error


class _Visited:
    """A pool whose questions were all answered in one visit to each file: none is opened again."""

    def __init__(self, visits: Mapping[Path, _Visit], steps: Steps) -> None:
        self._visits, self.steps = visits, steps
        self.lacking: dict[Path, MissingDataError] = {}
        """Files without an answer to the last questions, where other files have one."""

    def map(
        self, question: Question[_Result], paths: Sequence[Path], options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:  # fmt: skip
        """The answer of each file; a frame without rows for one that has none."""
        parameters = inspect.signature(question).parameters
        others = {n: v for n, v in options.items() if v != parameters[n].default and n != "steps"}
        if others or options.get("steps") != (self.steps if question in _OF_STEPS else None):
            raise LookupError(f"{question.__name__} was not asked with {dict(options)}")
        found = {path: self._visits[path][question.__name__] for path in paths}
        lacking = {p: a for p, a in found.items() if isinstance(a, MissingDataError)}
        if len(lacking) == len(found):
            raise next(iter(lacking.values()))
        self.lacking |= lacking
        empty = next(a for p, a in found.items() if p not in lacking)
        return [empty.clear() if path in lacking else a for path, a in found.items()]


def _tables(
    analysis: TraceQuestions, visited: _Visited
) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    """Tables by name; why one is not there, or not of a rank."""
    tables: dict[str, pl.DataFrame] = {}
    missing: dict[str, str] = {}
    ranks = {file.path: rank for rank, file in analysis.files.items()}
    for name, section in SECTIONS.items():
        if name in _OF_SEVERAL and len(ranks) == 1:
            missing[name] = _ONE_RANK
            continue
        visited.lacking.clear()
        try:
            found = section(analysis, visited.steps)
        except MissingDataError as error:
            if name == "temporal":  # there are no such steps
                raise
            missing[name] = str(error)
            continue
        missing |= {f"{name}, rank {ranks[path]}": str(why)
                    for path, why in visited.lacking.items()}  # fmt: skip
        if name in _OF_SEVERAL and found.is_empty():
            missing[name] = _NO_COLLECTIVE
        else:
            tables[name] = found
            if name == "kernels" and len(found) and not found["blocks_per_sm"].count():
                missing["kernels, launches"] = NO_LAUNCHES
    return tables, missing
