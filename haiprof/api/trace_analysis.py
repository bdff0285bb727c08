"""TraceAnalysis: traces of a job and every question about them, as figures, tables and a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from haiprof.api.frames import returning_frames, with_frames
from haiprof.compat.hta import HTA_NAMES, HtaFiles, HtaMethods, hta_source
from haiprof.trace_analysis.device_time import CONSECUTIVE_KERNEL_DELAY_NS, TOP_KERNELS, Steps
from haiprof.trace_analysis.launches import LAUNCH_DELAY_CUTOFF_NS, RUNTIME_CUTOFF_NS
from haiprof.trace_analysis.pool import Pool
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

if TYPE_CHECKING:
    from haiprof.trace_analysis.what_if.replay import Change


def trace_picture(*args: Any, **options: Any) -> None:  # noqa: ANN401 - show's own
    """Shows a picture; what draws is loaded for the first one."""
    from haiprof.show import show

    show.trace_picture(*args, **options)


@with_frames
class TraceAnalysis(TraceQuestions):
    """The traces of one window of a job, a file per rank; each is read at the first question.

    Args:
        path: A trace, a folder with one file per rank, a run directory, or files by rank.
        pool: Where traces are read; None takes local processes where the files are large.
        compat: `"hta"` adds HTA's methods, which return HTA's columns and units
            (`haiprof.compat.hta`; what differs is in docs/hta-differences.md).
        window: Of a run directory with several trace windows: which, by start, from 0; None takes
            the last whole one.
        trace_dir: HTA's name of the folder. One of HTA's arguments brings HTA's methods.
        trace_files: HTA's files by rank, or as a list; names in `trace_dir` where that is given.
        include_last_profiler_step: HTA's; nothing is left out here, so that only True is possible.

    Raises:
        UsageError: No traces are named, or twice; or the last step is to be left out.

    `show_*` draws figures in a notebook and prints tables in a terminal; `write_page` writes all.
    Their `steps` is the first profiler step and the one after the last; with `share`, each part is
    a share of its bar instead of a time.
    Frames are polars'; `frame.to_pandas()` needs `pip install 'haiprof[pandas]'`.
    """

    def __init__(
        self, path: str | Path | Mapping[int, str | Path] | None = None, *,
        pool: Pool | None = None, compat: Literal["hta"] | None = None, window: int | None = None,
        trace_dir: str | Path | None = None, trace_files: HtaFiles | None = None,
        include_last_profiler_step: bool | None = None,
    ) -> None:  # fmt: skip
        where, named = hta_source(path, trace_dir, trace_files, include_last_profiler_step)
        super().__init__(where, pool=pool, window=window, named=named)
        self._compat = compat if trace_dir is None and trace_files is None else "hta"

    if not TYPE_CHECKING:  # a type checker knows the methods of HtaMethods(analysis)

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            """HTA's methods, where they are asked for."""
            if name not in HTA_NAMES:
                raise AttributeError(f"TraceAnalysis has no attribute {name!r}")
            if self._compat != "hta":
                raise AttributeError(
                    f"{name} is HTA's: TraceAnalysis(path, compat='hta') has it, in HTA's columns"
                )
            return returning_frames(getattr(HtaMethods(self), name))

    def show_temporal_breakdown(self, steps: Steps = None, *, share: bool = False) -> None:
        """Computing, other work and idle time of each rank's GPU."""
        trace_picture(self, "temporal", steps, share=share)

    def show_idle_time_breakdown(
        self, steps: Steps = None, *, share: bool = False, streams: list[int] | None = None,
        consecutive_kernel_delay_ns: int = CONSECUTIVE_KERNEL_DELAY_NS,
    ) -> None:  # fmt: skip
        """What each stream waited for; options as of `idle_time_breakdown`."""
        trace_picture(
            self, "idle", steps, share=share, streams=streams,
            consecutive_kernel_delay_ns=consecutive_kernel_delay_ns,
        )  # fmt: skip

    def show_kernel_types(self, steps: Steps = None, *, share: bool = False) -> None:
        """Busy GPU time by the kinds of kernel that ran at once."""
        trace_picture(self, "kernel_types", steps, share=share)

    def show_kernels(
        self, steps: Steps = None, *, num_kernels: int | None = TOP_KERNELS,
        duration_ratio: float | None = None, include_memory: bool = True,
    ) -> None:  # fmt: skip
        """The kernels with the most time on each rank; options as of `kernel_breakdown`."""
        trace_picture(
            self, "kernels", steps, num_kernels=num_kernels, duration_ratio=duration_ratio,
            include_memory=include_memory,
        )  # fmt: skip

    def show_kernel(self, name: str | None = None, steps: Steps = None) -> None:
        """One kernel on every rank: its mean duration, shortest and longest call.

        Args:
            name: Part of its name; None takes the computing kernel with the most time.
            steps: The first profiler step, and the one after the last.
        """
        trace_picture(self, "kernel", steps, kernel=name)

    def show_overlap(self, steps: Steps = None, *, share: bool = False) -> None:
        """Communication of each rank: hidden behind computing, or exposed."""
        trace_picture(self, "overlap", steps, share=share)

    def show_launches(
        self, steps: Steps = None, *, runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
        launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS, include_memory_events: bool = True,
    ) -> None:  # fmt: skip
        """Distributions of launches, with their cut-offs; options as of `launch_statistics`."""
        trace_picture(
            self, "launches", steps, runtime_cutoff_ns=runtime_cutoff_ns,
            launch_delay_cutoff_ns=launch_delay_cutoff_ns,
            include_memory_events=include_memory_events,
        )  # fmt: skip

    def show_queue_length(self, steps: Steps = None) -> None:
        """The launch queue of each stream over time."""
        trace_picture(self, "queue_length", steps)

    def show_memory_bandwidth(self, steps: Steps = None) -> None:
        """The bandwidth of each kind of copy over time."""
        trace_picture(self, "memory_bandwidth", steps)

    def show_collectives(self, steps: Steps = None, *, share: bool = False) -> None:
        """Time in collectives by rank: transferring, or waiting for the last rank."""
        trace_picture(self, "collectives", steps, share=share)

    def show_lateness(self, steps: Steps = None) -> None:
        """How late each rank begins its collectives, per step."""
        trace_picture(self, "lateness", steps)

    def show_memory(self) -> None:
        """Memory in tensors and reserved over the whole trace."""
        trace_picture(self, "memory", None)

    def show_critical_path(
        self, rank: int | None = None, *, steps: Steps = None, annotation: str | None = None,
        instance: int = 0,
    ) -> None:  # fmt: skip
        """The critical path of one rank, by cause; options as of `critical_path`."""
        trace_picture(
            self, "critical_path", steps, rank=rank, annotation=annotation, instance=instance
        )

    def show_what_if(self, *changes: Change, steps: Steps = None) -> None:
        """The step as each change would make it; without changes, those that may help."""
        trace_picture(self, "what_if", steps, changes=changes)

    def write_page(self, path: str | Path, steps: Steps = None) -> Path:
        """Writes pictures and tables as one self-contained page; returns its path.

        Raises:
            UsageError: The file cannot be written.
        """
        from haiprof.show.figures.style import write_text
        from haiprof.show.page.render import trace_page_html
        from haiprof.trace_analysis.report import standard_report

        report = standard_report(
            self.path, steps=steps, window=self._window, named=self._named, pool=self._pool
        )
        return write_text(Path(path), trace_page_html(report, self))
