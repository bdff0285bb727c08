"""One of the two runs: its judged steps, and the ledger of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Floats
from haiprof.diagnosis.engine import read_ledger
from haiprof.diagnosis.rule_inputs import RuleInputs, gather_inputs
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """What is compared of one run; its ledger is read when it is asked for."""

    analyzer: RunFrames
    manifest: Manifest | None
    """None where run.json is damaged."""
    inputs: RuleInputs
    """Judged steps, as of the verdict, and what was recorded beside them."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.analyzer.run.root

    @property
    def step_count(self) -> int:
        """Judged steps of the rank that has fewest."""
        return min((own.height for own in self.inputs.by_rank.values()), default=0)

    @cached_property
    def ledger(self) -> RunLedger | None:
        """None without judged steps."""
        return read_ledger(self.analyzer, self.inputs)

    @property
    def step_ns(self) -> Floats:
        """From each step's begin to the next one's, mean over ranks, in order."""
        return np.zeros(0) if self.ledger is None else self.ledger.time.period_ns.mean(axis=0)


def open_compared_run(path: Path) -> ComparedRun:
    """Reads one run, as `compared_run_of`."""
    return compared_run_of(RunFrames(path))


def compared_run_of(analyzer: RunFrames) -> ComparedRun:
    """What is compared of a run."""
    inputs = gather_inputs(analyzer, trace_limit_bytes=0)
    try:
        manifest = analyzer.manifest()
    except RunFormatError:
        manifest = None
    return ComparedRun(analyzer=analyzer, manifest=manifest, inputs=inputs)
