"""Runs real jobs that a seed draws, faulty and healthy ones, and scores what haiprof says of them.

    python benchmarks/faults/run.py --seeds 0-39             tune on these
    python benchmarks/faults/run.py --seeds 5000-5119        report these: once, and never again
    python benchmarks/faults/run.py --seeds 12 --keep /tmp/runs
    python benchmarks/faults/run.py --seeds 0-8 --only faults --repeat 5
    python benchmarks/faults/run.py --seeds 12 --truth-only  how large the fault is, without haiprof

Seeds below 1000 are for tuning; those from 5000 on are reported in results/faults.md and .json,
once, whatever came of it (1000 to 4999 were drawn by an earlier bench); both files are written
after each job, and a run that was stopped goes on where it was when it is started again. Jobs run
alone, under `haiprof run` as a user would start it; with --loaded two busy processes run beside it,
and beside the runs that find its true gain. measure.py says how that is found, score.py what is
right, work.py how large models are. About 55 s a faulty job, 12 s a healthy one.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import measure
import score
from draw import Case, Work, draw, faulty_lines, write_job
from measure import AS_DRAWN, FIXED, KEPT_BATCHES, KEPT_MEMORY, Change
from score import Truth

RESULTS = Path(__file__).parents[1] / "results" / "faults.json"
FIRST_REPORTED = 5000


@cache
def work() -> dict[str, Work]:
    """What work.py finds of each family on this machine: once, before the first job."""
    script = Path(__file__).with_name("work.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, check=True)
    return {family: Work(*found) for family, found in json.loads(done.stdout).items()}


@dataclass(kw_only=True)
class Drawn:
    """A drawn job as measure.py runs it."""

    case: Case
    pieces: dict[str, range] = field(default_factory=dict)
    """The lines of its pieces, as they were last written whole."""
    lines: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kind = self.case.kind
        self.id = f"{self.case.seed}{' loaded' if self.case.loaded else ''}"
        self.kind, self.text, self.healthy = kind.name, self.case.text, kind.healthy
        self.ranks, self.loaded, self.seconds = self.case.ranks, self.case.loaded, kind.seconds
        self.beside, self.under, self.steps = kind.beside, kind.under, 0
        self.doing, self.options = kind.activities, kind.options
        self.link_bytes_per_s = 0.0
        if kind.under == "link":  # two ranks send 4 bytes of each parameter, over one loopback
            found = work()[self.case.family]
            self.link_bytes_per_s = 8 * found.parameters / (self.case.magnitude * found.step_s)

    def write(self, folder: Path, change: Change) -> list[str]:
        """The script, and how it is started."""
        script = folder / "train.py"
        pieces = write_job(
            self.case, script, work()[self.case.family], faulty=change.faulty,
            without=change.without, constants=change.constants,
        )  # fmt: skip
        if change == AS_DRAWN:
            self.pieces, self.lines = pieces, faulty_lines(script)
        python = [sys.executable]
        if self.ranks > 1:
            python += ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
            python += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        return [*python, "train.py"]

    def truth(self) -> Truth:
        """Its true account, as it was last written whole."""
        kind = self.case.kind
        return Truth(
            lines=tuple(("train.py", line) for line in self.lines), positions=kind.positions,
            activities=kind.activities, said=kind.said, rank=self.case.rank,
        )  # fmt: skip

    def without(self, account: dict[str, Any]) -> Change | None:
        """How to try it without an account; None where nothing is known."""
        named = score.places(account)
        for place, lines in self.pieces.items():
            if self.healthy and place != "own" and any(("train.py", n) in named for n in lines):
                return Change(without=(place,))
        if self.case.style == "trainer" and account["position"] == "gradients":
            return Change(constants={"CLIP": 0.0})
        return usual_change(account)


def usual_change(account: dict[str, Any]) -> Change | None:
    """How to try any job without an account, where that is known."""
    if account["position"] == "input" or account["activity"] == "wait: loader":
        return KEPT_BATCHES
    return KEPT_MEMORY if account["activity"].startswith("page") else None


def measured(job: Any, folder: Path, repeat: int, truth_only: bool) -> dict[str, Any]:
    """Runs and judges one job."""
    row = {
        "id": job.id, "loaded": job.loaded, "kind": job.kind, "job": job.text,
        "fault": not job.healthy,
    }  # fmt: skip
    if why := measure.why_not(job):
        return {**row, "outcome": "skipped", "why": why}
    ran = measure.run(job, folder / "recorded", AS_DRAWN, steps=job.steps, recorded=not truth_only)
    row |= {**ran.numbers, "steps": ran.steps}
    if ran.status or not ran.steps:
        return {**row, "outcome": "broken"}
    count = max(ran.steps - measure.WARM_STEPS, 1)
    document = {} if truth_only else measure.verdict(folder / "recorded")
    missing = score.lacks(document)
    if not missing:
        count = min(document["step"]["count"], count)
        surrounded = job.beside or score.is_loaded(row)
        alone = not surrounded or any(a.startswith("no core") for a in job.doing)
        offered = score.opportunities(document, alone=alone)
        own_clock_ns = ran.mean_s(count) * 1e9
        row |= {
            "count": count, "problems": document["problem_count"],
            "mean_error": round(document["step"]["mean_ns"] / own_clock_ns - 1, 4),
            "opportunity": score.described(offered[0]) if offered else None,
            "headline": document["headline"],
            "offered": [round(score.promised(document, a), 4) for a in offered[:5]],
        }  # fmt: skip
    if repeat > 1:
        return row | _repeated(job, folder, document, repeat, alone=not missing and alone)

    def gain(change: Change, base: Change = AS_DRAWN) -> dict[str, Any]:
        return measure.true_gain(job, folder, change, base=base, steps=ran.steps, count=count)

    if not job.healthy:
        row["truth"] = gain(FIXED)
    if missing:
        why = "the truth alone" if truth_only else document.get("failed", score.NO_LEDGER)
        return {**row, "outcome": "no ledger", "why": why}
    if job.healthy:
        named = score.opportunities(document, alone=alone, problems=True)
        return row | _of_healthy(job, document, named, gain)
    row |= score.judged(job.truth(), document, offered)
    if not row.get("first", True) and offered and (change := job.without(offered[0])):
        row["other_truth"] = gain(change)
    return row | {"outcome": score.outcome(row)}


def _of_healthy(
    job: Any, document: dict[str, Any], named: list[dict[str, Any]], gain: Any
) -> dict[str, Any]:  # fmt: skip
    """Whether the removal of each problem of a healthy job brings what was promised."""
    found: dict[str, Any] = {"outcome": "silent"}
    for account in named[:3]:
        change = job.without(account)
        truth = gain(change) if change else {}
        promise = score.promised(document, account)
        if "gain" not in truth or not score.is_kept(promise, truth["gain"]):
            return {"outcome": "false", "promised": promise, "truth": truth}
        found = {"outcome": "true", "promised": promise, "truth": truth}
    return found


def _repeated(
    job: Any, folder: Path, document: dict[str, Any], repeat: int, *, alone: bool
) -> dict[str, Any]:  # fmt: skip
    """Whether recordings of the same job say the same first."""
    firsts = []
    for turn in range(repeat):
        if turn:
            measure.run(job, folder / "recorded", AS_DRAWN, steps=job.steps, recorded=True)
            document = measure.verdict(folder / "recorded")
        if score.lacks(document):
            return {"outcome": "no ledger", "why": score.NO_LEDGER}
        offered = score.opportunities(document, alone=alone)
        firsts.append(score.key(offered[0]) if offered else "nothing")
    return {"outcome": "repeated", "firsts": firsts, "same": len(set(firsts)) == 1}


def reported() -> list[dict[str, Any]]:
    """Every job that was ever reported."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []


def report(row: dict[str, Any]) -> None:
    """Keeps one row for good."""
    lock = Path(tempfile.gettempdir()) / "haiprof-faults-results.lock"
    with lock.open("w") as held:  # several may run at a time
        fcntl.flock(held, fcntl.LOCK_EX)
        rows = [*reported(), row]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        head = "# What was wrong, what haiprof said and promised, and what came true\n"
        text = [head, *score.summary(rows), "", *score.table(rows)]
        RESULTS.with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of drawn and of foreign jobs."""
    parser.add_argument("--loaded", action="store_true", help="two busy processes beside each")
    parser.add_argument("--only", choices=("faults", "healthy"))
    parser.add_argument("--repeat", type=int, default=1, help="record each so often: same first?")
    parser.add_argument("--truth-only", action="store_true", help="no haiprof: the true gain alone")
    parser.add_argument("--keep", type=Path, help="keep jobs and run directories here")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds; no more jobs")


def run_all(jobs: Iterable[Any], options: argparse.Namespace, reports: Any) -> None:
    """Runs jobs one after another, and prints each and the scores."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # neighbours must not stay
    known = {row["id"] for row in reported()}
    root = options.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    began, rows = time.monotonic(), []
    for job in jobs:
        if options.only and job.healthy is (options.only == "faults"):
            continue
        if time.monotonic() - began > options.stop_after:
            break
        kept = reports(job) and options.repeat == 1 and not options.truth_only
        if kept and job.id in known:
            print(f"{job.id}: reported already")
            continue
        folder = root / job.id.replace(" ", "-")
        row = measured(job, folder, options.repeat, options.truth_only)
        rows.append(row)
        print(score.table([row])[-1], flush=True)
        if "same" in row:
            print(f"  {row['firsts']}")
        each_s = (time.monotonic() - began) / len(rows)
        print(f"  {score.tally(rows)}; {each_s:.0f} s a job", flush=True)
        if kept and row["outcome"] != "no ledger":
            report(row)
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(score.summary(rows)))
    if any(row.get("why") == score.NO_LEDGER for row in rows):
        print(f"\nNothing above is a score: {score.NO_LEDGER}.")


def seeds_of(text: str) -> list[int]:
    """`3,7-9` as numbers."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen seeds; those to be reported are kept after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=[], help="3,7-9")
    parser.add_argument("--kind", help="those seeds whose kind has this in its name")
    add_options(parser)
    options = parser.parse_args(arguments)
    jobs = (Drawn(case=draw(seed, loaded=options.loaded)) for seed in options.seeds)
    chosen = (job for job in jobs if options.kind is None or options.kind in job.kind)
    run_all(chosen, options, lambda job: job.case.seed >= FIRST_REPORTED)


if __name__ == "__main__":
    main()
