"""The facade of a recorded run: frames of steps, spans, counters and ranks."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.analysis.burst import burst_frame
from haiprof.analysis.counters import counter_frame
from haiprof.analysis.phases import phase_frame
from haiprof.analysis.ranks import rank_frame, rank_notes
from haiprof.analysis.run import RankFiles, RunFiles, node_notes, open_run
from haiprof.analysis.segments import RankSegments, load_segments
from haiprof.analysis.step_frame import step_frame
from haiprof.errors import RunFormatError
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    import polars as pl


class Analyzer:
    """A recorded run as polars frames; files are read once, at the first question that needs them.

    Args:
        path: A run directory, or a log directory, of which the newest run is taken.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def steps(self) -> pl.DataFrame:
        """One row per rank and training step; columns in `haiprof.analysis.step_frame`.

        Raises:
            RunNotFoundError: There is no run.
            RunFormatError: It is of another version, or nothing in it can be read.
        """
        return self._steps

    def phases(self) -> pl.DataFrame:
        """One row per span; columns in `haiprof.analysis.phases`."""
        return self._phases

    def counters(self) -> pl.DataFrame:
        """One row per sample and metric; columns in `haiprof.analysis.counters`."""
        return self._counters[0]

    def bursts(self) -> pl.DataFrame:
        """GPU metrics of `--burst`, in the columns of `counters()`; see `haiprof.analysis.burst`.

        Raises:
            RunFormatError: An export of Nsight Systems cannot be read; the message names it.
        """
        return burst_frame(self.files)

    def ranks(self) -> pl.DataFrame:
        """One row per rank and attempt; columns in `haiprof.analysis.ranks`."""
        return self._ranks

    def notes(self) -> list[str]:
        """Everything that was cut, damaged or missing while reading."""
        return [*self.files.notes, *self._rank_notes, *self._node_notes, *self._counters[1]]

    def manifest(self) -> Manifest:
        """What was run, with which options, and how it ended.

        Raises:
            RunNotFoundError: There is no run.
            RunFormatError: run.json is damaged.
        """
        return self.files.manifest or read_manifest(self.files.paths)

    def show_overview(self) -> None:
        """The whole job: a figure in a notebook, tables in a terminal."""
        from haiprof.report import show

        show.overview(self)

    def show_one_rank(self, rank: int) -> None:
        """One rank over time: a figure in a notebook, tables in a terminal."""
        from haiprof.report import show

        show.one_rank(self, rank)

    @property
    def run(self) -> RunPaths:
        """The run directory's paths."""
        return self.files.paths

    @cached_property
    def files(self) -> RunFiles:
        """The run directory as it was found."""
        return open_run(self.path)

    @cached_property
    def _loaded(self) -> tuple[dict[tuple[int, int], RankSegments], list[str]]:
        loaded = {(rank.rank, rank.attempt): _load(rank) for rank in self.files.ranks}
        segments = {key: value for key, value in loaded.items() if not isinstance(value, str)}
        return segments, [value for value in loaded.values() if isinstance(value, str)]

    @cached_property
    def _steps(self) -> pl.DataFrame:
        return step_frame(list(self._loaded[0].values()))

    @cached_property
    def _phases(self) -> pl.DataFrame:
        return phase_frame(list(self._loaded[0].values()))

    @cached_property
    def _counters(self) -> tuple[pl.DataFrame, tuple[str, ...]]:
        return counter_frame(self.files)

    @cached_property
    def _ranks(self) -> pl.DataFrame:
        return rank_frame(self.files.ranks, self._loaded[0])

    @cached_property
    def _rank_notes(self) -> list[str]:
        segments, damaged = self._loaded
        own = [
            f"rank {rank.rank}: {note}"
            for rank in self.files.ranks
            for note in rank_notes(rank, segments.get((rank.rank, rank.attempt)))
        ]
        return damaged + own

    @cached_property
    def _node_notes(self) -> list[str]:
        return [f"{node.host}: {note}" for node in self.files.nodes for note in node_notes(node)]


def _load(rank: RankFiles) -> RankSegments | str:
    """The rank's steps, or why there are none."""
    try:
        return load_segments(rank)
    except RunFormatError as error:
        return f"rank {rank.rank}: {error}"
