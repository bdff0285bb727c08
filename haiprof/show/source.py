"""The interface of a run's data for views: of the Analyzer, and of fakes in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import polars as pl

from haiprof.run_analysis.settings import RankSettings
from haiprof.run_format.layout import RunPaths


class RunData(Protocol):
    """A run's frames, as `haiprof.Analyzer` gives them."""

    @property
    def run(self) -> RunPaths:
        """The run directory."""
        ...

    def steps(self) -> pl.DataFrame:
        """One row per rank, attempt and step."""
        ...

    def phases(self) -> pl.DataFrame:
        """One row per span."""
        ...

    def counters(self) -> pl.DataFrame:
        """One row per sample and metric."""
        ...

    def ranks(self) -> pl.DataFrame:
        """One row per rank and attempt."""
        ...

    def settings(self) -> Mapping[int, RankSettings]:
        """What each rank was run with."""
        ...

    def windows(self) -> pl.DataFrame:
        """One row per rank and trace window."""
        ...

    def reactions(self) -> pl.DataFrame:
        """One row per automatic reaction."""
        ...

    def notes(self) -> list[str]:
        """What was cut, damaged or missing."""
        ...
