"""What-if against the truth: predicts a change, makes it in the real job, and runs that again.

    python benchmarks/whatif_reruns.py [--rounds 5] [CASE ...]

The job (`rerun_job.py`) is traced once; then it runs as it was and changed, alternately, so that
both see the same machine. Compared are shares of the step: predicted over reproduced, with the
prediction's own interval (95 %), and changed over unchanged, whose median over the rounds has one
too (95 %, Student's t over the rounds). A prediction covers the truth where they meet.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rerun_job import Job, timed, traced

from haiprof import TraceAnalysis
from haiprof.base.statistics import student_quantile
from haiprof.cli.trace_causes import parse_change

RESULT = Path(__file__).parent / "results" / "whatif_reruns.md"
RANKS = 2
LAYERS = "operator=rerun::(forward|backward)"

IN_PROCESS = Job()
BOUND_BY_WORKERS = Job(workers=2, sample_ms=80.0)
AHEAD = Job(workers=2, sample_ms=8.0)
REAL = Job(sample_ms=2.0, real=512)
STRAGGLER = Job(sample_ms=2.0, late_ms=12.0, reduce_count=1)
MANY_REDUCES = Job(sample_ms=2.0, reduce_count=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One change, as it is asked for and as it is made."""

    name: str
    job: Job
    faster: str
    changed: dict[str, Any]

    @property
    def ranks(self) -> int:
        """Several where the job communicates."""
        return RANKS if self.job.reduce_count else 1


CASES = (
    Case(name="in-process loader 2x", job=IN_PROCESS, faster="loader:2x",
         changed={"sample_ms": 4.0}),
    Case(name="in-process loader takes no time", job=IN_PROCESS, faster="loader",
         changed={"sample_ms": 0.0}),
    Case(name="forward operator 2x", job=IN_PROCESS, faster="operator=rerun::forward:2x",
         changed={"forward_ms": 3.0, "backward_ratio": 4.0}),
    Case(name="half the layers", job=IN_PROCESS, faster=f"{LAYERS}:2x", changed={"layers": 2}),
    Case(name="half the batch", job=IN_PROCESS, faster=f"loader:2x and {LAYERS}:2x",
         changed={"batch": 2}),
    Case(name="bound by workers: half the layers", job=BOUND_BY_WORKERS, faster=f"{LAYERS}:2x",
         changed={"layers": 2}),
    Case(name="bound by workers: their work 2x", job=BOUND_BY_WORKERS, faster="loader:2x",
         changed={"sample_ms": 40.0}),
    Case(name="bound by workers: their work 4x", job=BOUND_BY_WORKERS, faster="loader:4x",
         changed={"sample_ms": 20.0}),
    Case(name="bound by workers: half the batch", job=BOUND_BY_WORKERS,
         faster=f"loader:2x and {LAYERS}:2x", changed={"batch": 2}),
    Case(name="workers ahead: their work 2x", job=AHEAD, faster="loader:2x",
         changed={"sample_ms": 4.0}),
    Case(name="workers ahead: half the layers", job=AHEAD, faster=f"{LAYERS}:2x",
         changed={"layers": 2}),
    Case(name="matrix products: half the layers", job=REAL, faster=f"{LAYERS}:2x",
         changed={"layers": 2}),
    Case(name="straggler as the other rank", job=STRAGGLER, faster="rank=1",
         changed={"late_ms": 0.0}),
    Case(name="ranks: half the layers", job=MANY_REDUCES, faster=f"{LAYERS}:2x",
         changed={"layers": 2}),
    # A call less is a transfer less, and what the call itself takes.
    Case(name="half as many collectives", job=MANY_REDUCES,
         faster="collective=all_reduce:2x and operator=c10d::allreduce:2x",
         changed={"reduce_count": 4}),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Shares of the unchanged step."""

    predicted: float
    low: float
    high: float
    real: float
    half_width: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to the truth."""
        return self.predicted / self.real - 1

    @property
    def covered(self) -> bool:
        """Whether the prediction's interval and the truth's meet."""
        return self.low - self.half_width <= self.real <= self.high + self.half_width


def run_rank(rank: int, case: Case, folder: str, rounds: int) -> None:
    """Traces the job, then runs it as it was and changed; rank 0 writes down the times."""
    torch.set_num_threads(1)
    if case.ranks > 1:
        init = f"file://{folder}/init"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=case.ranks)
    changed = case.job.with_changes(**case.changed)
    (Path(folder) / "traces").mkdir(exist_ok=True)
    traced(case.job, rank, Path(folder) / "traces")
    times = [(timed(case.job, rank), timed(changed, rank)) for _ in range(rounds)]
    if rank == 0:
        text = "\n".join(f"{before} {after}" for before, after in times)
        (Path(folder) / "times").write_text(text)
    if case.ranks > 1:
        dist.barrier()  # gloo aborts a rank whose peer is gone before its own threads have ended
        dist.destroy_process_group()


def outcome(case: Case, rounds: int) -> Outcome:
    """Predicts one change and makes it."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        if case.ranks == 1:
            run_rank(0, case, folder, rounds)
        else:
            start: Callable[..., Any] = mp.spawn
            start(run_rank, (case, folder, rounds), case.ranks)
        lines = (Path(folder) / "times").read_text().splitlines()
        ratios = [float(after) / float(before) for before, after in map(str.split, lines)]
        analysis = TraceAnalysis(Path(folder) / "traces")
        row = analysis.what_if(parse_change(case.faster)).row(0, named=True)
    spread = statistics.stdev(ratios) / math.sqrt(rounds)
    step_ns = row["reproduced_step_ns"]
    return Outcome(
        predicted=row["predicted_step_ns"] / step_ns,
        low=row["low_step_ns"] / step_ns,
        high=row["high_step_ns"] / step_ns,
        real=statistics.median(ratios),
        half_width=student_quantile(0.975, rounds - 1) * spread,
    )


def report(found: dict[str, Outcome], rounds: int) -> str:
    """The table."""
    rows = [
        f"| {name} | {each.predicted:.3f} | {each.low:.3f} to {each.high:.3f} | {each.real:.3f} "
        f"| ±{each.half_width:.3f} | {each.error:+.1%} | {'yes' if each.covered else 'no'} |"
        for name, each in found.items()
    ]
    errors = [abs(each.error) for each in found.values()]
    covered = sum(each.covered for each in found.values())
    head = (
        "# What-if against the changed job",
        "",
        "Made by `benchmarks/whatif_reruns.py`: shares of the unchanged step, predicted from one "
        f"trace and measured in {rounds} alternating runs",
        f"({os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}); both with their intervals "
        "(95 %).",
        "",
        f"{len(found)} changes: median error {statistics.median(errors):.1%}, worst "
        f"{max(errors):.1%}, {covered} with intervals that meet.",
        "",
        "| change | predicted | interval | real | interval | error | covered |",
        "|---|---|---|---|---|---|---|",
    )
    return "\n".join((*head, *rows, ""))


def main() -> None:
    """Runs the named cases, or all, and writes the table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("case", nargs="*")
    asked = parser.parse_args()
    found = {}
    for case in CASES:
        if not asked.case or case.name in asked.case:
            found[case.name] = outcome(case, asked.rounds)
            print(case.name, found[case.name], file=sys.stderr, flush=True)
    print(report(found, asked.rounds))
    if not asked.case:
        RESULT.write_text(report(found, asked.rounds))


if __name__ == "__main__":
    main()
