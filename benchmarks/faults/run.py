"""Runs real jobs that a seed draws, faulty and healthy ones, and scores what haiprof says of them.

    python benchmarks/faults/run.py --seeds 0-39             tune on these
    python benchmarks/faults/run.py --seeds 1200-1239        report these: once, and never again
    python benchmarks/faults/run.py --seeds 12 --keep /tmp/runs
    python benchmarks/faults/run.py --rejudge /tmp/runs      judge what was kept, run nothing

Seeds below 1000 are for tuning; what is found on the others stands in results/faults.md and
results/faults.json, each seed once, whatever came of it; both are written after each job, and a
run that was stopped goes on where it was when it is started again. Those reported before the rules
were last tuned (`USED_UP`) stay in the table and are not counted.

Every job runs alone under `haiprof` as a user would start it; with --loaded two busy processes run
beside it. Right is a fault whose first finding is one of the accepted ones, about the right rank.
Beside --loaded, or where others used a quarter of a core, what is said of neighbours and of steal
is true, and left out. A fault that took less than a tenth of the time may be silent. A finding on a
healthy job is a false one; a note (severity info) is not. work.py makes the models of this machine
so large that a healthy job's loader takes 3 % of a step. Where the job's own clock says that
it waited a tenth of its time all the same, with the machine for itself, it is not healthy: `not
healthy`, whether that was found or not, and counted nowhere. Where its own page faults took so long
(memory that glibc gives back and takes again) a finding about them is true, and `not healthy` too.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from draw import STEP_S, Case, draw, faulty_lines, write_job

from haiprof import Analyzer
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.thresholds import FAULT_NS

RESULTS = Path(__file__).parents[1] / "results" / "faults.json"
CGROUPS = (Path("/sys/fs/cgroup/cpu/haiprof_faults"), Path("/sys/fs/cgroup/haiprof_faults"))
FIRST_REPORTED = 1000
AFTER_LOADED = 3000
USED_UP = (*range(1000, 2432), *range(3000, 3068))
"""Reported before the rules were last changed: they are no longer counted. Seeds of jobs with
nothing beside them are 1000 to 1999 and from 3000 on."""
LIMIT_S = 90
STRANGERS_CORES = 0.25
SMALL_SHARE = 0.10
FAULT_S = FAULT_NS / 1e9
SURROUNDINGS = ("busy_neighbours", "cpu_stolen")
QUOTA_US, PERIOD_US = 50_000, 100_000


def command(case: Case, folder: Path) -> list[str]:
    """How the job is started."""
    python = [sys.executable]
    if case.ranks > 1:
        python += ["-m", "torch.distributed.run", "--nproc-per-node", str(case.ranks)]
        python += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    run = [sys.executable, "-m", "haiprof", "run", "--quiet", "--log-dir", str(folder / "logs")]
    line = [*run, *case.kind.options, "--", *python, str(folder / "train.py")]
    if case.kind.under == "one_core":
        return ["taskset", "-c", "1", *line]
    if case.kind.under == "quota":
        return ["sh", "-c", f'echo $$ > {make_quota()}/cgroup.procs; exec "$@"', "sh", *line]
    return line


@contextlib.contextmanager
def neighbours(case: Case) -> Iterator[None]:
    """Busy processes beside the job, in sessions of their own as other people's are.

    Of one session they would share its part of the CPUs (sched_autogroup), and leave the job's.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(count: int) -> None:
        line = [sys.executable, "-c", "while True: pass"]
        started.extend(subprocess.Popen(line, start_new_session=True) for _ in range(count))

    timer = threading.Timer(5.0 + case.kind.seconds / 2, start, args=(4,))
    if case.kind.beside == "late":
        timer.start()
    elif case.kind.beside or case.loaded:
        start(4 if case.kind.beside else 2)
    try:
        yield
    finally:
        timer.cancel()
        for process in started:
            process.kill()
            process.wait()


@cache
def work() -> dict[str, tuple[int, float]]:
    """`WORK` of each family on this machine and its step: measured once, before the first job."""
    script = Path(__file__).with_name("work.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, check=True)
    found: dict[str, tuple[int, float]] = json.loads(done.stdout)
    return found


def make_quota() -> Path | None:
    """A cgroup with half a core; None where this machine does not let us."""
    for cgroup in CGROUPS:
        with contextlib.suppress(OSError):
            cgroup.mkdir(exist_ok=True)
            (cgroup / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (cgroup / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
            return cgroup
    return None


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Runs and judges one job."""
    if case.kind.under == "quota" and make_quota() is None:
        return {"outcome": "skipped", "why": "no cgroup of the cpu controller can be made"}
    folder.mkdir(parents=True)
    write_job(case, folder / "train.py")
    environment = {
        **os.environ, "FAULTS_TRUTH": str(folder),
        "FAULTS_WORK": str(work()[case.family][0] * case.kind.work),
        "FAULTS_STEP": str(work()[case.family][1] / STEP_S),
        "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    if case.kind.threads:
        environment["OMP_NUM_THREADS"] = str(case.kind.threads)
    before, began = cpu_seconds(), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as scratch,  # short: sockets are made in it
        neighbours(case),
        (folder / "output.txt").open("wb") as output,
    ):
        process = subprocess.Popen(
            command(case, folder), env={**environment, "TMPDIR": scratch}, stdout=output,
            stderr=output, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            end(process)
    took = time.monotonic() - began
    busy, children, stolen = (
        after - was for after, was in zip(cpu_seconds(), before, strict=True)
    )  # neighbours of ours are children too
    numbers = {
        "status": process.returncode,
        "took_s": round(took, 1),
        "strangers_cores": round(max(busy - children, 0.0) / took, 2),
        "stolen_cores": round(stolen / took, 2),
    }
    (folder / "machine.json").write_text(json.dumps(numbers), encoding="utf-8")
    return judged(case, folder)


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks the launcher to end the job; then by force."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_seconds() -> tuple[float, float, float]:
    """CPU time of the machine, of the processes that this one has awaited, and what was stolen."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields]
    used, tick = os.times(), os.sysconf("SC_CLK_TCK")
    busy = sum(ticks[:3]) + sum(ticks[5:7])
    return busy / tick, used.children_user + used.children_system, ticks[7] / tick


def judged(case: Case, folder: Path) -> dict[str, Any]:
    """Scores the verdict on a job that has run."""
    numbers = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    truths = [json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("truth-*.json")]
    if numbers["status"] or not truths:
        return {**numbers, "outcome": "broken", "findings": []}
    verdict = diagnose(Analyzer(folder / "logs"))
    share = max(t["lost_s"] / max(t["train_s"], 1e-3) for t in truths)
    beside = case.loaded or numbers["strangers_cores"] >= STRANGERS_CORES or case.kind.beside
    hidden = set(SURROUNDINGS) - set(case.kind.accepted)
    own = [
        f for f in verdict.findings
        if not (beside and f.rule in hidden)
    ]  # fmt: skip
    right = [f for f in own if _is_right(case, f)]
    waited = max((t.get("waited_s") or 0.0) / max(t["train_s"], 1e-3) for t in truths)
    faulted = max(t.get("page_faults", 0) * FAULT_S / max(t["train_s"], 1e-3) for t in truths)
    facts = {
        **numbers,
        "share": round(share, 3) if share else None,
        "waited": round(waited, 3),
        "faulted": round(faulted, 3),
        "steps": truths[0]["steps"],
        "findings": [
            (f"{f.rule}/{f.cause}" if f.cause else f.rule)
            + ("" if f.lost_ratio is None else f" {f.lost_ratio:.0%}")
            for f in verdict.findings
        ],
        "severities": [f.severity for f in verdict.findings],
        "titles": [f.title for f in verdict.findings],
    }
    if case.is_healthy:
        if not beside and waited >= SMALL_SHARE and {f.rule for f in own} <= {"dataloader_bound"}:
            return {**facts, "outcome": "not healthy"}
        if own and faulted >= SMALL_SHARE and all(_is_of_page_faults(f) for f in own):
            return {**facts, "outcome": "not healthy"}
        false = any(f.severity != "info" for f in own)
        return {**facts, "outcome": "false finding" if false else "note" if own else "silent"}
    if right and own[0] is right[0]:
        return {**facts, "outcome": "right", "line": _line(folder, right[0])}
    if not own and share and share < SMALL_SHARE:
        return {**facts, "outcome": "small"}
    return {**facts, "outcome": "named" if right else "wrong" if own else "missed"}


def _is_right(case: Case, finding: Any) -> bool:
    accepted = {finding.rule, f"{finding.rule}/{finding.cause}"} & set(case.kind.accepted)
    return bool(accepted) and (case.rank is None or finding.rank in (case.rank, None))


def _is_of_page_faults(finding: Any) -> bool:
    return any("page faults" in evidence.name for evidence in finding.evidence)


def _line(folder: Path, finding: Any) -> bool | None:
    """Whether the finding names a faulty line, as where the time passes or as what calls that.

    None where no line is at fault, or lines are not recorded.
    """
    faulty = faulty_lines(folder / "train.py")
    lines = getattr(finding, "code_lines", None)
    if not faulty or lines is None:
        return None
    callers = [place.partition(" ")[0] for line in lines for place in line.callers]
    return any(line.line in faulty and line.file.endswith("train.py") for line in lines) or any(
        place in callers for place in (f"train.py:{number}" for number in faulty)
    )


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The scores in a line each, with 95 % intervals."""
    lines = []
    for loaded in (False, True):
        some = [row for row in rows if _is_loaded(row) is loaded]
        faults = [
            r for r in some if r["fault"] and r["outcome"] in ("right", "named", "wrong", "missed")
        ]
        healthy = [
            r
            for r in some
            if not r["fault"] and r["outcome"] in ("silent", "note", "false finding")
        ]
        lined = [r["line"] for r in faults if r.get("line") is not None]
        where = "beside busy neighbours" if loaded else "idle"
        lines += [
            f"- {where}: right cause first "
            f"{_of(sum(r['outcome'] == 'right' for r in faults), len(faults))}",
            f"- {where}: healthy jobs with a false finding "
            f"{_of(sum(r['outcome'] == 'false finding' for r in healthy), len(healthy))}",
            f"- {where}: line of code named {_of(sum(lined), len(lined))}",
        ]
    return lines


def tally(rows: Sequence[dict[str, Any]]) -> str:
    """`right 12, silent 14, missed 1` so far."""
    counts = Counter(row["outcome"] for row in rows)
    lined = [row["line"] for row in rows if row.get("line") is not None]
    outcomes = ", ".join(f"{outcome} {count}" for outcome, count in counts.most_common())
    return f"{outcomes}; line {sum(lined)} of {len(lined)}"


def _is_loaded(row: dict[str, Any]) -> bool:
    """Whether others used the cores, ours or not: by what was measured beside the job."""
    return row["loaded"] or row.get("strangers_cores", 0.0) >= STRANGERS_CORES


def _of(count: int, whole: int) -> str:
    """`9 of 10 (60 % to 98 %)`: Wilson's interval."""
    if not whole:
        return "- of 0"
    z, share = 1.96, count / whole
    middle = share + z * z / (2 * whole)
    spread = z * math.sqrt(share * (1 - share) / whole + z * z / (4 * whole * whole))
    low, high = ((middle + sign * spread) / (1 + z * z / whole) for sign in (-1, 1))
    return f"{count} of {whole} (95 %: {max(low, 0):.0%} to {min(high, 1):.0%})"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each job."""
    lines = [
        "| seed | kind | job | share | others, stolen | outcome | line | findings, in order |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        share = "" if r.get("share") is None else f"{r['share']:.0%}"
        line = {True: "yes", False: "no", None: ""}[r.get("line")]
        others = f"{r.get('strangers_cores', 0):.1f}, {r.get('stolen_cores', 0):.1f}"
        found = ", ".join(r.get("findings", [])) or r.get("why", "-")
        lines.append(
            f"| {r['seed']}{' loaded' if r['loaded'] else ''} | {r['kind']} | {r['job']} | {share} "
            f"| {others} | {r['outcome']} | {line} | {found} |"
        )
    return lines


def described(case: Case) -> dict[str, Any]:
    """What a row says of the job itself."""
    workers = f", {case.workers} workers" if case.workers else ""
    return {
        "seed": case.seed, "loaded": case.loaded, "kind": case.kind.name,
        "fault": not case.is_healthy, "expected": list(case.kind.accepted), "rank": case.rank,
        "job": f"{case.family}, {case.style}, {case.ranks} ranks{workers}, {case.magnitude:.2g}x",
    }  # fmt: skip


def reported() -> list[dict[str, Any]]:
    """Every seed that was ever reported."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []


def report(row: dict[str, Any]) -> None:
    """Keeps one row for good."""
    lock = Path(tempfile.gettempdir()) / "haiprof-faults-results.lock"
    with lock.open("w") as held:  # several may run at a time
        fcntl.flock(held, fcntl.LOCK_EX)
        _write_results([*reported(), row])


def _write_results(rows: Sequence[dict[str, Any]]) -> None:
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    head = (
        "# What was wrong, and what haiprof said\n\n"
        "Seeds that no rule was tuned on, each reported once. Those up to "
        f"{max(USED_UP)}, and loaded up to {max(s for s in USED_UP if s < AFTER_LOADED)}, were "
        "reported before the rules were last changed: they stay in the table, not counted.\n"
    )
    counted = [row for row in rows if row["seed"] not in USED_UP]
    text = [head, *summary(counted), "", *table(rows)]
    RESULTS.with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")


def seeds_of(text: str) -> list[int]:
    """`3,7-9` as numbers."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main() -> None:
    """Runs the chosen seeds one after another; those to be reported are kept after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=[], help="3,7-9")
    parser.add_argument("--loaded", action="store_true", help="two busy processes beside each")
    parser.add_argument("--only", choices=("faults", "healthy"))
    parser.add_argument("--keep", type=Path, help="keep jobs and run directories here")
    parser.add_argument("--rejudge", type=Path, help="judge what --keep kept here, and run nothing")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds; no more jobs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # neighbours must not stay
    if options.rejudge:
        rows = []
        for folder in sorted(options.rejudge.iterdir(), key=lambda p: p.name.zfill(8)):
            case = draw(int(folder.name.split("-")[0]), loaded=folder.name.endswith("-loaded"))
            if (options.seeds and case.seed not in options.seeds) or not (
                folder / "machine.json"
            ).exists():
                continue
            rows.append(described(case) | judged(case, folder))
        print("\n".join([*table(rows), "", *summary(rows)]))
        return
    known = {row["seed"] for row in reported()} - set(USED_UP)
    root, began, rows = (
        options.keep or Path(tempfile.mkdtemp(prefix="faults-")),
        time.monotonic(),
        [],
    )
    for seed in options.seeds:
        case = draw(seed, loaded=options.loaded)
        if options.only and case.is_healthy is (options.only == "faults"):
            continue
        if time.monotonic() - began > options.stop_after:
            break
        if seed in known:
            print(f"seed {seed}: reported already")
            continue
        folder = root / (f"{seed}-loaded" if options.loaded else f"{seed}")
        shutil.rmtree(folder, ignore_errors=True)
        row = described(case) | run_case(case, folder)
        rows.append(row)
        print(table([row])[-1], flush=True)
        print(f"  {tally(rows)}; {(time.monotonic() - began) / len(rows):.1f} s a job", flush=True)
        if seed >= FIRST_REPORTED and seed not in USED_UP:
            report(row)
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
