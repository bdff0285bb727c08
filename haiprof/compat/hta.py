"""HTA's method names, with HTA's columns and units, for users who migrate.

Times are us as floats and shares percent, as in HTA; the numbers are those of `TraceAnalysis`,
which docs/hta-differences.md compares with HTA's. `visualize` draws haiprof's own figures: None in
a notebook alone, where HTA's users expect them; True elsewhere too, by plotly's renderer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.base.errors import UsageError
from haiprof.trace_analysis.critical_path import DATA_LOADING
from haiprof.trace_analysis.device_time import UNKNOWN, Steps, are_longest, gpu_events
from haiprof.trace_analysis.kernel_names import short_kernel_name
from haiprof.trace_analysis.launches import COUNTERS, MAX_QUEUE_LENGTH
from haiprof.trace_analysis.step_time import with_annotation
from haiprof.trace_format.kineto.events import GPU_RANGES
from haiprof.trace_format.kineto.rank_trace import Trace

if TYPE_CHECKING:
    from haiprof.trace_analysis.critical_path import CriticalPath
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
    from haiprof.trace_analysis.questions.base import NamedFiles

_US = 1000
_GB = 1e9
_PERCENT = 100.0
_SPREAD = {
    "count": "count", "mean": "mean", "std": "std", "min": "min",
    "q25": "25%", "q50": "50%", "q75": "75%", "max": "max",
}  # fmt: skip

HtaFiles = Mapping[int, str | Path] | Sequence[str | Path]
"""Files by rank, or files that state their ranks."""
_HINT = 'TraceAnalysis("traces/"), trace_dir="traces/" or trace_files={0: "rank0.json.gz"}'


class HtaMethods:
    """HTA's methods of `TraceAnalysis`; also reached by `TraceAnalysis(path, compat="hta")`.

    Args:
        analysis: The traces.
        steps: First profiler step and the one after the last; None takes all that was recorded,
            where HTA leaves the last step out (D20).
    """

    def __init__(self, analysis: TraceQuestions, steps: Steps = None) -> None:
        self._analysis = analysis
        self._steps = steps

    def get_profiler_steps(self) -> list[int]:
        """The numbers of all profiler steps of all ranks; HTA leaves the last one out (D20)."""
        found = self._analysis.step_time_breakdown()["step"].drop_nulls()
        return [int(step) for step in found.unique().sort()]

    def get_temporal_breakdown(self, visualize: bool | None = None) -> pl.DataFrame:
        """Idle, computing and other time.

        Returns:
            One row per rank (and device, where a process drives several): `rank`,
            `idle_time(us)`, `compute_time(us)`, `non_compute_time(us)`, `kernel_time(us)`,
            `idle_time_pctg`, `compute_time_pctg`, `non_compute_time_pctg`, `device`.
        """
        found = self._analysis.temporal_breakdown(self._steps)
        _draw(visualize, "temporal_figure", found, share=True)
        parts = ("idle", "compute", "non_compute")
        return found.select(
            "rank",
            *(_us(f"{part}_ns").alias(f"{part}_time(us)") for part in parts),
            _us("span_ns").alias("kernel_time(us)"),
            *(_percent(f"{part}_ratio").alias(f"{part}_time_pctg") for part in parts),
            "device",
        )

    def get_comm_comp_overlap(self, visualize: bool | None = None) -> pl.DataFrame:
        """Hidden communication.

        Returns:
            One row per rank and device: `rank`, `comp_comm_overlap_pctg` (null without
            communication), `device`.
        """
        found = self._analysis.overlap(self._steps)
        _draw(visualize, "overlap_figure", found, share=True)
        return found.select(
            "rank", _percent("overlap_ratio").alias("comp_comm_overlap_pctg"), "device"
        )

    def get_idle_time_breakdown(
        self, ranks: Sequence[int] | None = None, streams: list[int] | None = None,
        visualize: bool | None = None, visualize_pctg: bool = True,
        show_idle_interval_stats: bool = False, consecutive_kernel_delay: float = 30,
    ) -> tuple[pl.DataFrame, pl.DataFrame | None]:  # fmt: skip
        """What streams waited for.

        Args:
            ranks: Only these; None takes all, where HTA takes rank 0.
            streams: Only these.
            visualize: As in all methods: see the module.
            visualize_pctg: Whether the figure shows shares, not times.
            show_idle_interval_stats: Whether the second frame is wanted.
            consecutive_kernel_delay: us (HTA says ns, and means us: D9).

        Returns:
            `rank`, `stream`, `idle_category`, `idle_time`, `idle_time_ratio`, `device`; and
            `rank`, `stream`, `idle_category`, `count`, `mean`, `std`, `min`, `25%`, `50%`, `75%`,
            `max`, `device` of the idle intervals. Beside HTA's categories there is `unknown`: no
            launch is known.
        """
        found = self._of(ranks, self._analysis.idle_time_breakdown(
            self._steps, streams=streams,
            consecutive_kernel_delay_ns=round(consecutive_kernel_delay * _US),
        ))  # fmt: skip
        _draw(visualize, "idle_figure", found, share=visualize_pctg)
        seen = found.filter((pl.col("idle_category") != UNKNOWN) | (pl.col("count") > 0))
        keys = ("rank", "stream", "idle_category")
        idle = _us("idle_ns").alias("idle_time"), pl.col("idle_ratio").alias("idle_time_ratio")
        times = seen.select(*keys, *idle, "device")
        if not show_idle_interval_stats:
            return times, None
        own = {"mean": "mean", "std": "std", "min": "min", "25%": "q25", "50%": "median",
               "75%": "q75", "max": "max"}  # fmt: skip
        spread = [_us(f"{part}_ns").alias(name) for name, part in own.items()]
        return times, seen.select(*keys, "count", *spread, "device")

    def get_gpu_kernel_breakdown(
        self, visualize: bool | None = None, duration_ratio: float | None = 0.8,
        num_kernels: int | None = 10, include_memory_kernels: bool = True,
        image_renderer: str | None = None,
    ) -> tuple[pl.DataFrame, pl.DataFrame]:  # fmt: skip
        """Kernels by type and by name.

        Args:
            visualize: As in all methods: see the module.
            duration_ratio: The longest kernels that make this share of their type's time (HTA cuts
                elsewhere: D4); the rest is `others`. None is no limit.
            num_kernels: At most so many per type and rank. None is no limit.
            include_memory_kernels: Copies and sets in the second frame too.
            image_renderer: plotly's renderer of the figures; None takes the usual one.

        Returns:
            All ranks together: `kernel_type`, `sum` (us), `percentage`; and per rank: `name`,
            `sum (us)`, `max (us)`, `min (us)`, `stddev`, `mean (us)`, `kernel_type`, `rank`.
        """
        types = self._analysis.kernel_type_breakdown(self._steps)
        added = types.group_by("kernel_type").agg(pl.col("time_ns").sum())
        whole = pl.col("time_ns").sum()
        by_type = added.filter(pl.col("time_ns") > 0).sort(-pl.col("time_ns"), "kernel_type")
        kernels = self._analysis.kernel_breakdown(
            self._steps, num_kernels=num_kernels, duration_ratio=duration_ratio,
            include_memory=include_memory_kernels,
        )  # fmt: skip
        _draw(visualize, "kernel_type_figure", types, renderer=image_renderer, share=True)
        _draw(visualize, "top_kernels_figure", kernels, renderer=image_renderer)
        share, kind = _PERCENT * pl.col("time_ns") / whole, _hta_type("kind").alias("kernel_type")
        types = by_type.select(_hta_type("kernel_type"), sum=_us("time_ns"), percentage=share)
        return types, kernels.select(*_NAMED, kind, "rank").sort("kernel_type", "name", "rank")

    def get_gpu_user_annotation_breakdown(
        self, use_gpu_annotation: bool = True, visualize: bool | None = None,
        duration_ratio: float | None = None, num_kernels: int | None = None,
        allowlist_patterns: Sequence[str] | None = None, image_renderer: str | None = None,
    ) -> pl.DataFrame:  # fmt: skip
        """Annotated ranges by name; all of them, unless a limit is given (HTA: 0.8 and 1000).

        Args:
            use_gpu_annotation: Ranges as they show on the GPU; else on the CPU.
            visualize: As in all methods: see the module.
            duration_ratio: The longest ranges of each rank that make this share of their time.
            num_kernels: At most so many per rank.
            allowlist_patterns: Regular expressions of wanted names (HTA takes them for plain
                texts: D23).
            image_renderer: As in `get_gpu_kernel_breakdown`.

        Returns:
            `name`, `sum (us)`, `max (us)`, `min (us)`, `stddev`, `mean (us)`, `rank`.
        """
        found = self._analysis.annotation_breakdown(self._steps)
        found = found.filter((pl.col("category") == GPU_RANGES) == use_gpu_annotation)
        if allowlist_patterns:
            found = found.filter(pl.col("name").str.contains("|".join(allowlist_patterns)))
        sums = pl.col("sum_ns")
        keep = are_longest(sums, "rank", count=num_kernels, ratio=duration_ratio)
        found = found.sort("rank", -sums, "name").filter(keep)
        _draw(
            visualize, "top_kernels_figure", found.with_columns(kind="category"),
            renderer=image_renderer, title="<b>Annotated ranges with the most time</b>",
        )  # fmt: skip
        return found.select(*_NAMED, "rank").sort("name", "rank")

    def get_gpu_kernels_with_user_annotations(
        self, rank: int, expand_names: bool = True, shortern_names: bool = True
    ) -> pl.DataFrame:
        """GPU events with the annotation around each on its stream.

        Args:
            rank: Whose.
            expand_names: Whether names are columns; HTA's numbers of names do not exist here.
            shortern_names: Whether kernels lose their template arguments, as HTA spells it.

        Returns:
            `index` (place among the file's events), `s_name`, `s_cat`, `ts` and `dur` (ns, as the
            trace has them), `pid`, `tid`, `stream`, `correlation`, `s_user_annotation` (the
            innermost; null outside of all).
        """
        found = self._of([rank], self._analysis.per_rank(_annotated_gpu, steps=self._steps))
        if shortern_names:
            name = pl.col("s_name").map_elements(short_kernel_name, return_dtype=pl.String)
            found = found.with_columns(s_name=name)
        names = () if expand_names else ("s_name", "s_cat", "s_user_annotation")
        return found.drop("rank", *names)

    def get_queue_length_time_series(
        self, ranks: Sequence[int] | None = None
    ) -> dict[int, pl.DataFrame]:
        """Launch queues over time.

        Returns:
            By rank: `ts` (us since its first change), `stream`, `queue_length`, `device`; HTA's
            `pid` and `tid` of the change are not there.
        """
        found = self._of(ranks, self._analysis.queue_length(self._steps))
        return _by_rank(found, _since_first(), "stream", "queue_length", "device")

    def get_queue_length_summary(self, ranks: Sequence[int] | None = None) -> pl.DataFrame:
        """Launch queues over their changes.

        Returns:
            `rank`, `stream`, `count`, `mean`, `std`, `min`, `25%`, `50%`, `75%`, `max`, `device`.
        """
        found = self._of(ranks, self._analysis.queue_length_summary(self._steps))
        return found.select("rank", "stream", *_spread(1.0), "device")

    def get_queue_length_summary_from_time_series(
        self, queue_length_dict: Mapping[int, object]
    ) -> pl.DataFrame:
        """`get_queue_length_summary` of the ranks of a `get_queue_length_time_series`."""
        return self.get_queue_length_summary(list(queue_length_dict))

    def get_time_spent_blocked_on_full_queue(
        self, queue_length_dict: Mapping[int, object] | None = None,
        max_queue_length: int = MAX_QUEUE_LENGTH,
    ) -> pl.DataFrame:  # fmt: skip
        """How long launch queues were full, every stream that was (HTA: the last one, D14).

        Args:
            queue_length_dict: From `get_queue_length_time_series`: only its ranks.
            max_queue_length: From which on a queue is full.

        Returns:
            `rank`, `stream`, `duration_at_max_queue_length` (us),
            `relative_duration_at_max_queue_length` (of the trace's duration).
        """
        ranks = None if queue_length_dict is None else list(queue_length_dict)
        every = self._analysis.full_queue(self._steps, max_queue_length=max_queue_length)
        return self._of(ranks, every).filter(pl.col("full_ns") > 0).select(
            "rank", "stream", duration_at_max_queue_length=_us("full_ns"),
            relative_duration_at_max_queue_length="full_ratio",
        )  # fmt: skip

    def get_memory_bw_time_series(
        self, ranks: Sequence[int] | None = None
    ) -> dict[int, pl.DataFrame]:
        """Copies over time.

        Returns:
            By rank: `ts` (us since its first change), `name` (of the kind of copy),
            `memory_bw_gbps`, `device`.
        """
        rate = pl.col("bandwidth_bytes_per_s") / _GB
        found = self._of(ranks, self._analysis.memory_bandwidth(self._steps))
        name = pl.col("copy_kind").alias("name")
        return _by_rank(found, _since_first(), name, rate.alias("memory_bw_gbps"), "device")

    def get_memory_bw_summary(self, ranks: Sequence[int] | None = None) -> pl.DataFrame:
        """Copies in GB/s, over their changes.

        Returns:
            `rank`, `name`, `count`, `mean`, `std`, `min`, `25%`, `50%`, `75%`, `max`, `device`.
        """
        found = self._of(ranks, self._analysis.memory_bandwidth_summary(self._steps))
        some = found.filter(pl.col("change_count") > 0)
        return some.select("rank", pl.col("copy_kind").alias("name"), *_spread(_GB), "device")

    def get_cuda_kernel_launch_stats(
        self, ranks: Sequence[int] | None = None, runtime_cutoff: float = 50,
        launch_delay_cutoff: float = 100, include_memory_events: bool = True,
        visualize: bool | None = None,
    ) -> dict[int, pl.DataFrame]:  # fmt: skip
        """Launches, by rank: `correlation`, `cpu_duration`, `gpu_duration`, `launch_delay` (us).

        The cut-offs (us) are those of the figure; `TraceAnalysis.launch_statistics` has them as
        columns. Of a CUDA graph there is one row, with the duration of all its kernels (D17).
        """
        cutoffs: dict[str, Any] = {
            "runtime_cutoff_ns": round(runtime_cutoff * _US),
            "launch_delay_cutoff_ns": round(launch_delay_cutoff * _US),
        }
        shown = self._of(ranks, self._analysis.launch_statistics(
            self._steps, include_memory_events=include_memory_events, **cutoffs
        ))  # fmt: skip
        _draw(visualize, "launch_figure", shown, **cutoffs)
        parts = ("cpu_duration", "gpu_duration", "launch_delay")
        return _by_rank(shown, "correlation", *(_us(f"{p}_ns").alias(p) for p in parts))

    def get_aten_op_kernels_and_delay(
        self, ranks: Sequence[int] | None = None, sort_by: Sequence[str] | None = None
    ) -> dict[int, pl.DataFrame]:
        """What ATen's operators launch themselves.

        Returns:
            By rank: `aten_op_name`, `kernel_sequence`, `occurrence_count`,
            `avg_aten_op_launch_delay`, `avg_runtime_delay` (us).
        """
        return self.get_op_kernels_and_delay(None, ranks, sort_by)

    def get_op_kernels_and_delay(
        self, op_name_pattern: str | None = None, ranks: Sequence[int] | None = None,
        sort_by: Sequence[str] | None = None,
    ) -> dict[int, pl.DataFrame]:  # fmt: skip
        """What operators launch themselves, as `get_aten_op_kernels_and_delay`.

        Args:
            op_name_pattern: Regular expression of operators; None takes ATen's. (HTA's own default
                is `::aten`, which no operator contains.)
            ranks: Only these; None takes all.
            sort_by: Columns, the largest first.

        Returns:
            By rank: columns of `get_aten_op_kernels_and_delay`.
        """
        found = self._of(ranks, self._analysis.operator_sequences(self._steps))
        by_rank = _by_rank(
            found.filter(pl.col("operator").str.contains(op_name_pattern or "^aten::")),
            pl.col("operator").alias("aten_op_name"), "kernel_sequence",
            pl.col("count").alias("occurrence_count"),
            _us("operator_delay_mean_ns").alias("avg_aten_op_launch_delay"),
            _us("runtime_delay_mean_ns").alias("avg_runtime_delay"),
        )  # fmt: skip
        by = sort_by or ("occurrence_count",)
        return {
            n: own.sort(*by, descending=True, maintain_order=True) for n, own in by_rank.items()
        }

    def get_frequent_cuda_kernel_sequences(
        self, operator_name: str, output_dir: str | Path | None = None, min_pattern_len: int = 3,
        rank: int = 0, top_k: int = 5, visualize: bool | None = None,
        compress_other_kernels: bool = True,
    ) -> pl.DataFrame:  # fmt: skip
        """Frequent sequences of kernels under an operator.

        Args:
            operator_name: Part of its name.
            output_dir: Does nothing: no trace is written.
            min_pattern_len: Calls with fewer kernels are left out.
            rank: Whose.
            top_k: How many.
            visualize: Does nothing: the frame is short.
            compress_other_kernels: Does nothing: no trace is written.

        Returns:
            `pattern`, `count`, `GPU kernel duration (us)`, `CPU op duration (us)`.
        """
        found = self._analysis.kernel_sequences(
            operator_name, self._steps, min_pattern_length=min_pattern_len, top_k=top_k
        )
        return self._of([rank], found).select(
            "pattern", "count", _us("gpu_duration_ns").alias("GPU kernel duration (us)"),
            _us("cpu_duration_ns").alias("CPU op duration (us)"),
        )  # fmt: skip

    def get_potential_stragglers(
        self, profiler_steps: Sequence[int] | None = None, num_candidates: int = 2,
        visualize: bool | None = None, straggler_identification_impl: object = None,
    ) -> list[int]:  # fmt: skip
        """The ranks that hold the others up most at collectives; fewer where fewer do.

        HTA looks at one kernel of each step, and at none of today's NCCL (D5).

        Args:
            profiler_steps: Only these.
            num_candidates: At most so many.
            visualize: As in all methods: see the module.
            straggler_identification_impl: Does nothing: it is a function of HTA's own frames.
        """
        found = self._analysis.stragglers(self._steps, by_step=True)
        if profiler_steps is not None:
            found = found.filter(pl.col("step").is_in(list(profiler_steps)))
        if visualize:
            _draw(True, "collective_figure", self._analysis.collective_waits(self._steps))
        held_up = found.group_by("rank").agg(pl.col("held_up_ns").sum())
        late = held_up.filter(pl.col("held_up_ns") > 0)
        return late.sort(-pl.col("held_up_ns"), "rank")["rank"].head(num_candidates).to_list()

    def generate_trace_with_counters(
        self, time_series: object = None, ranks: Sequence[int] | None = None,
        output_suffix: str | None = None, folder: str | Path | None = None,
    ) -> pl.DataFrame:  # fmt: skip
        """Writes traces anew with counter tracks: `TraceAnalysis.write_counter_traces`.

        Args:
            time_series: HTA's flag, or its value: 1 is queue length, 2 bandwidth of copies; None
                takes both.
            ranks: Only these; None takes all, where HTA takes rank 0.
            output_suffix: What the files' names end in before `.json.gz`; None or an empty one is
                `_with_counters`.
            folder: Where; None is beside each trace.
        """
        wanted = None
        if time_series is not None:
            value = getattr(time_series, "value", time_series)  # of HTA's TimeSeriesTypes
            if value not in (1, 2, 3):
                raise UsageError(f"time_series={time_series!r}: expected HTA's TimeSeriesTypes")
            wanted = tuple(name for bit, name in enumerate(COUNTERS) if value & 1 << bit)
        written = self._analysis.write_counter_traces(
            folder, ranks=ranks, counters=wanted, suffix=output_suffix or None
        )
        return self._of(ranks, written)

    def critical_path_analysis(
        self, rank: int, annotation: str, instance_id: int | tuple[int, int] | None = None,
        data_load_events: Sequence[str] | None = None,
    ) -> tuple[CriticalPath, bool]:  # fmt: skip
        """The critical path of one annotated range: `TraceAnalysis.critical_path`.

        Args:
            rank: Whose.
            annotation: Part of the range's name.
            instance_id: Which of those ranges, from 0; None is the first. First and last instance
                as a pair take all from the one to the other.
            data_load_events: Regular expressions of ranges in which the host loads data.

        Returns:
            The path, and True: what HTA says where it has failed, is an error here.
        """
        loading = "|".join(data_load_events) if data_load_events else DATA_LOADING
        path = self._analysis.critical_path(
            rank, annotation=annotation, instance=instance_id or 0, data_loading=loading
        )
        return path, True

    def overlay_critical_path_analysis(
        self, rank: int, critical_path_graph: CriticalPath, output_dir: str | Path | None = None,
        only_show_critical_events: bool = False, show_all_edges: bool = False,
    ) -> str:  # fmt: skip
        """Writes the trace anew with its path drawn in; returns the file.

        Args:
            rank: Whose.
            critical_path_graph: From `critical_path_analysis` of the same rank.
            output_dir: Where; None is beside the trace.
            only_show_critical_events: Events that are not on the path are left out (HTA's own
                default; here all stay unless it is asked for).
            show_all_edges: Does nothing: the path's own dependencies are drawn. A path here keeps
                no graph of the others.
        """
        overlay = self._analysis.overlay_critical_path
        return str(overlay(
            critical_path_graph, rank, folder=output_dir, only_path=only_show_critical_events
        ))  # fmt: skip

    def _of(self, ranks: Sequence[int] | None, found: pl.DataFrame) -> pl.DataFrame:
        """The rows of some ranks; a MissingDataError where there is no trace of one of them."""
        for rank in ranks or ():
            self._analysis.file_of(rank)
        return found if ranks is None else found.filter(pl.col("rank").is_in(list(ranks)))


def _draw(
    visualize: bool | None, figure: str, found: pl.DataFrame, *, renderer: str | None = None,
    **options: Any,  # noqa: ANN401 - those of the figure
) -> None:  # fmt: skip
    """Draws where it is wanted: None is in a notebook, as HTA does."""
    from haiprof.show.show import display_figure, in_notebook

    notebook = in_notebook()
    if visualize is False or (visualize is None and not notebook):
        return
    from haiprof.show.figures import traces

    drawn = getattr(traces, figure)(found, **options)
    if notebook and not renderer:
        display_figure(drawn)
    else:
        drawn.show(renderer=renderer or None)


HTA_NAMES = frozenset(name for name in vars(HtaMethods) if not name.startswith("_"))


def _us(column: str) -> pl.Expr:
    return pl.col(column) / _US


def _percent(column: str) -> pl.Expr:
    return pl.col(column) * _PERCENT


_NAMED: tuple[Any, ...] = (
    "name", *(_us(f"{part}_ns").alias(f"{part} (us)") for part in ("sum", "max", "min")),
    _us("std_ns").alias("stddev"), _us("mean_ns").alias("mean (us)"),
)  # fmt: skip


def _hta_type(column: str) -> pl.Expr:
    """A kind as HTA writes it: `COMPUTATION overlapping COMMUNICATION`."""
    return pl.col(column).str.to_uppercase().str.replace_all("OVERLAPPING", "overlapping")


def _spread(unit: float) -> list[pl.Expr]:
    """Statistics over changes under pandas' names."""
    changes = ((pl.col(f"change_{own}"), name) for own, name in _SPREAD.items())
    return [(own if name == "count" else own / unit).alias(name) for own, name in changes]


def _since_first() -> pl.Expr:
    return ((pl.col("ts_ns") - pl.col("ts_ns").min()) / _US).alias("ts")


def _by_rank(found: pl.DataFrame, *columns: str | pl.Expr) -> dict[int, pl.DataFrame]:
    parts = found.partition_by("rank", maintain_order=True)
    return {int(own["rank"][0]): own.select(columns) for own in parts}


def _annotated_gpu(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """GPU events with the annotation around each."""
    found = with_annotation(gpu_events(trace, steps), trace.annotations).sort("ts_ns", "event")
    return found.select(
        index="event", s_name=pl.col("name").cast(pl.String),
        s_cat=pl.col("category").cast(pl.String), ts="ts_ns", dur="dur_ns", pid="pid", tid="tid",
        stream="stream", correlation="correlation",
        s_user_annotation=pl.col("annotation").cast(pl.String),
    )  # fmt: skip


def hta_source(
    path: str | Path | Mapping[int, str | Path] | None, trace_dir: str | Path | None,
    trace_files: HtaFiles | None, include_last_profiler_step: bool | None,
) -> tuple[Path, NamedFiles | None]:  # fmt: skip
    """Where the traces are, and the files of it that are named; None takes what the path means.

    One of three arguments names them; `trace_files` may lie in `trace_dir`.
    """
    if include_last_profiler_step is False:
        raise UsageError(
            "TraceAnalysis: include_last_profiler_step=False is not possible: no step is left out",
            hint="haiprof.compat.hta.HtaMethods(analysis, steps=(first, last))",
        )
    if path is not None and (trace_dir is not None or trace_files is not None):
        raise UsageError("TraceAnalysis: both path and HTA's arguments given", hint=_HINT)
    files = path if isinstance(path, Mapping) else trace_files
    given = trace_dir if path is None or isinstance(path, Mapping) else path
    folder = None if given is None else Path(given)
    if files is None and folder is not None:
        return folder, None
    if files is None:
        raise UsageError("TraceAnalysis: no traces given", hint=_HINT)
    if isinstance(files, str | Path) or not files:
        raise UsageError(f"TraceAnalysis: trace_files={files!r}: expected files", hint=_HINT)

    def find(name: str | Path) -> Path:  # as HTA: what is no file by itself is one in the folder
        return Path(name) if folder is None or Path(name).is_file() else folder / name

    named: NamedFiles = tuple(map(find, () if isinstance(files, Mapping) else files))
    if isinstance(files, Mapping):
        named = {rank: find(name) for rank, name in sorted(files.items())}
    paths = list(named.values() if isinstance(named, Mapping) else named)
    common = os.path.commonpath([os.path.abspath(each.parent) for each in paths])
    return folder or Path(common), named
