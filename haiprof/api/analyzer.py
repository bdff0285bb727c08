"""Analyzer: a recorded run as frames, shown where the reader is, written as a page."""

from __future__ import annotations

import atexit
import html
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.api.frames import Frame, with_frames
from haiprof.base.errors import HaiprofError, MissingDataError
from haiprof.base.log_addresses import is_address
from haiprof.diagnosis.verdict import Finding, Verdict
from haiprof.run_analysis.run_frames import RankPool, RunFrames
from haiprof.show import show

if TYPE_CHECKING:
    from haiprof.run_analysis.flame_graph import FlameGraph
    from haiprof.show.flame import RunFlames
    from haiprof.show.run_header import RunHeader


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunVerdict(Verdict):
    """What was found in a run; its fields are those of `haiprof verdict --json`."""

    def __repr__(self) -> str:
        """One line: the run and its headline."""
        return f"<verdict on {self.name}: {self.headline}>"

    def __str__(self) -> str:
        """The card, as the terminal shows it."""
        from haiprof.show.card import verdict_text

        return verdict_text(self)

    def _repr_html_(self) -> str:
        """The card, for a notebook."""
        style = "line-height: 1.2; font-family: Menlo, Consolas, monospace; white-space: pre"
        return f'<pre style="{style}">{html.escape(str(self))}</pre>'


def _fetch(address: str) -> Path:
    """The run at an address, in a folder that is removed at the end of the process."""
    from haiprof.base.safe_files import MadeFolder
    from haiprof.run_analysis.remote_runs import fetch_run

    folder = MadeFolder.temporary("haiprof-fetched-")
    atexit.register(folder.remove)
    return fetch_run(address, folder.path)


class Description(Frame):
    """The columns of a frame, printed whole."""

    def __str__(self) -> str:
        """All rows, and all of each meaning."""
        with pl.Config(tbl_rows=-1, fmt_str_lengths=1_000, tbl_width_chars=160):
            return super().__str__()

    __repr__ = __str__

    def _repr_html_(self, **more: Any) -> str:  # noqa: ANN401
        """The same for a notebook."""
        with pl.Config(tbl_rows=-1, fmt_str_lengths=1_000):
            return super()._repr_html_(**more)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlameGraph:
    """Lines of user code and what they call, by their time per step."""

    flames: RunFlames
    header: RunHeader

    @property
    def graph(self) -> FlameGraph:
        """The tree of frames, with the time of each rank."""
        return self.flames.graph

    def write(self, path: str | Path) -> Path:
        """Writes it as a self-contained page; returns its path.

        Raises:
            UsageError: The file cannot be written.
        """
        from haiprof.show.figures.style import write_text

        return write_text(Path(path), self._page())

    def __repr__(self) -> str:
        """What it rests on."""
        return f"<flame graph of {self.flames.run}: {self.flames.missing or self.flames.basis}>"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for a notebook."""
        from haiprof.show.show import page_frame

        return page_frame(self._page(), "Flame graph")

    def _page(self) -> str:
        from haiprof.show.page.render import lines_html

        return lines_html(self.flames, self.header)


@with_frames
class Analyzer(RunFrames):
    """A run that was recorded, or still is; everything is read at the first question.

    Frames are polars'; their `to_pandas()` needs `pip install 'haiprof[pandas]'`. `show_*` shows
    parts of the run's page in a notebook and prints tables in a terminal.

    Args:
        path: A run directory, or a log directory whose newest run is meant; or the address of
            one, such as `s3://bucket/runs`: it is fetched, and removed when Python ends.
        between: Only what was recorded between two times, in ns on the run's clock.
        pool: Where ranks are read, of thousands of them: `LocalProcesses()`, or a pool of a Dask
            or Slurm cluster as for `TraceAnalysis`. None: in this process.
    """

    def __init__(
        self, path: str | Path, *, between: tuple[int, int] | None = None,
        pool: RankPool | None = None,
    ) -> None:  # fmt: skip
        is_remote = isinstance(path, str) and is_address(path)
        super().__init__(_fetch(str(path)) if is_remote else path, between=between, pool=pool)

    def __repr__(self) -> str:
        """The run, how it ended, and how many ranks reported in."""
        try:
            manifest = self.manifest()
            ranks = len({rank for rank, _, _ in self.run.rank_folders()})
        except HaiprofError as error:
            return f"<Analyzer of {self.path}: {error}>"
        end = "running or killed" if manifest.end_wall_ns is None else "ended"
        if manifest.exit_status is not None:
            end = f"ended, exit {manifest.exit_status}"
        count = f"{ranks} rank{'' if ranks == 1 else 's'}"
        return f"<Analyzer of {manifest.name}: {count}, {end}, in {self.run.root}>"

    def verdict(self) -> RunVerdict:
        """Why the job died or what makes it slow; a card in a notebook and in `print()`."""
        from haiprof.diagnosis.engine import diagnose

        found = diagnose(self)
        return RunVerdict(**{field.name: getattr(found, field.name) for field in fields(found)})

    def findings(self) -> tuple[Finding, ...]:
        """The causes that were found, weightiest first; empty where nothing is wrong."""
        return self.verdict().findings

    def steps(
        self, *, rank: int | None = None, since: int | None = None, traced: bool | None = None
    ) -> pl.DataFrame:
        """One row per rank and training step; `describe("steps")` explains the columns.

        Args:
            rank: Only of this rank.
            since: Only from this step on.
            traced: True takes only steps inside trace windows, False only the others, which
                torch.profiler did not slow down; None takes all.

        Returns:
            Polars frame; times in ns.

        Raises:
            MissingDataError: The run has no such rank.
            RunNotFoundError: There is no run.
            RunFormatError: It is of another version, or nothing in it can be read.
        """
        found = super().steps()
        if rank is not None:
            if rank not in self.ranks()["rank"]:
                known = ", ".join(map(str, sorted(set(self.ranks()["rank"]))))
                raise MissingDataError(f"the run has no rank {rank}", hint=f"its ranks: {known}")
            found = found.filter(pl.col("rank") == rank)
        if since is not None:
            found = found.filter(pl.col("step") >= since)
        return found if traced is None else found.filter(pl.col("traced") == traced)

    def describe(self, frame: str = "steps") -> pl.DataFrame:
        """The columns of a frame: name, type, unit and meaning.

        Args:
            frame: `steps`, `phases`, `counters`, `ranks`, `windows` or `reactions`.

        Raises:
            UsageError: There is no frame of that name.
        """
        from haiprof.trace_analysis.sql import describe_run_table

        return Description(describe_run_table(frame))

    def flame_graph(self, baseline: str | Path | None = None) -> RunFlameGraph:
        """Lines of user code and what they call, by their time per step; drawn in a notebook.

        Args:
            baseline: Another run beside it: a directory, or `last-good`.

        Raises:
            RunNotFoundError: There is no such run.
            RunFormatError: It is of another version, or nothing in it can be read.
        """
        from haiprof.show.flame import other_run, run_flames
        from haiprof.show.run_header import manifest_or_none, run_header

        other = None if baseline is None else other_run(self, str(baseline))
        header = run_header(self.run, manifest_or_none(self.run))
        return RunFlameGraph(flames=run_flames(self, other), header=header)

    def show_overview(self) -> None:
        """The whole job: its page in a notebook, tables in a terminal."""
        show.overview(self)

    def show_one_rank(self, rank: int) -> None:
        """One rank over time: a part of the page in a notebook, tables in a terminal."""
        show.one_rank(self, rank)

    def show_ranks(self) -> None:
        """All ranks over time: a part of the page in a notebook, tables in a terminal."""
        show.ranks(self)

    def show_comparison(self, baseline: str | Path) -> None:
        """What changed against another run, a directory or `last-good`: as the others show."""
        show.comparison(self, baseline)

    def write_report(self, path: str | Path, *, baseline: str | Path | None = None) -> Path:
        """Writes the report page, one self-contained file; returns its path.

        Args:
            path: Where to.
            baseline: Another run to compare with: a directory, or `last-good`.

        Raises:
            UsageError: The file cannot be written.
            RunNotFoundError: There is no baseline.
        """
        from haiprof.show.page.content import page_content  # Plotly: only a page needs it
        from haiprof.show.page.render import write_report

        compared = None if baseline is None else str(baseline)
        return write_report(page_content(self, baseline=compared), Path(path))
