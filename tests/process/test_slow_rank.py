"""One of two real ranks is slow, somewhere in the step: it is named, and not its victim."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.diagnosis.engine import diagnose
from tests.process.jobs import EXAMPLES, TORCHRUN, run_job

pytestmark = pytest.mark.slow
WHERE = {"dataloader": "batches", "forward": "in forward", "backward": "in backward"}
DEFAULT = {("forward", 1)}
CASES = [
    pytest.param(phase, rank, marks=() if (phase, rank) in DEFAULT else pytest.mark.proof)
    for phase in ("dataloader", "forward", "backward")
    for rank in (0, 1)
]


@pytest.mark.parametrize(("phase", "slow_rank"), CASES)
def test_slow_rank_is_named_within_thirty_steps(tmp_path: Path, phase: str, slow_rank: int) -> None:
    script = [str(EXAMPLES / "two_ranks_slow_one.py"), "--steps", "30", "--slow-phase", phase]
    job = run_job(
        [*TORCHRUN, *script, "--slow-rank", str(slow_rank)], folder=tmp_path / "job", haiprof=True
    )
    assert job.returncode == 0, job.stderr
    verdict = diagnose(job.analyzer())
    others = ("busy_neighbours", "shared_cores", "no_core")  # of the machine, beside the cause
    first = next(found for found in verdict.findings if found.rule not in others)
    assert first.rank == slow_rank
    assert WHERE[phase] in first.title
    late = job.analyzer().lateness().row(0, named=True)
    assert late["rank"] == slow_rank
    assert late["late_ns_per_step"] > 8e6, "20 ms per step were injected; others may delay both"
