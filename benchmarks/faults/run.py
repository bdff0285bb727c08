"""Runs real jobs with one fault each, and healthy ones, and scores what haiprof says of them.

    python benchmarks/faults/run.py
    python benchmarks/faults/run.py --only "slow rank" --repeat 3 --keep /tmp/runs

Every job runs alone under `haiprof` as a user would start it. A case counts as named first where
the first finding is the expected rule, with the expected cause and rank where the case says them;
as named where any finding is. A finding on a healthy run is a false alarm. The load of the machine
before each job stands beside its result: beside other load a run proves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cases import CASES, Case

from haiprof import Analyzer
from haiprof.diagnosis.engine import diagnose
from haiprof.rundir.manifest import find_runs

HERE = Path(__file__).parent
JOB = HERE / "job.py"
RESULTS = HERE.parent / "results" / "faults.json"
CGROUP = Path("/sys/fs/cgroup/cpu/haiprof_faults")
NEIGHBOURS = 4
LIMIT_S = 90
STRANGERS_CORES = 0.25
QUOTA_US, PERIOD_US = 50_000, 100_000
COLUMNS = ("named first", "named", "missed", "silent", "false alarm", "skipped")


def command(case: Case, logs: Path) -> list[str]:
    """How the job is started."""
    job = [str(JOB), *shlex.split(case.options), "--seconds", str(case.seconds)]
    python = [sys.executable]
    if case.ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(case.ranks)]
        python += [*torchrun, "--master-port", "0", "--rdzv-backend", "c10d"]
        python += ["--rdzv-endpoint", "localhost:0"]
    run = [sys.executable, "-m", "haiprof", "run", "--quiet", "--log-dir", str(logs)]
    run += ["--steps", case.trace] if case.trace else []
    line = [*run, "--", *python, *job]
    if case.under == "one_core":
        return ["taskset", "-c", "1", *line]
    if case.under == "quota":
        return ["sh", "-c", f'echo $$ > {CGROUP}/cgroup.procs; exec "$@"', "sh", *line]
    return line


@contextlib.contextmanager
def neighbours(case: Case) -> Iterator[None]:
    """Busy processes beside the job, in sessions of their own as other people's are.

    Of one session they would share its part of the CPUs (sched_autogroup), and leave the job's.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        line = [sys.executable, "-c", "while True: pass"]
        started.extend(subprocess.Popen(line, start_new_session=True) for _ in range(NEIGHBOURS))

    timer = threading.Timer(3.0 + case.seconds / 2, start)
    if case.beside == "neighbours":
        start()
    elif case.beside == "late":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for process in started:
            process.kill()
            process.wait()


def make_quota() -> bool:
    """A cgroup with half a core; whether this machine lets us."""
    try:
        CGROUP.mkdir(exist_ok=True)
        (CGROUP / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (CGROUP / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    except OSError:
        return False
    return True


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Runs and judges one job."""
    if case.under == "quota" and not make_quota():
        return {"outcome": "skipped", "why": "no cgroup of the cpu controller can be made"}
    folder.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONWARNINGS": "ignore"}
    (folder / "tmp").mkdir()
    if case.threads:
        environment["OMP_NUM_THREADS"] = str(case.threads)
    load, before = os.getloadavg()[0], cpu_seconds()
    began = time.monotonic()
    with neighbours(case), (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command(case, folder / "logs"), env=environment, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            found = hanging(case, folder) if case.under == "hang" else None
            process.wait(timeout=None if found is None and case.under != "hang" else 0.1)
        except subprocess.TimeoutExpired:
            end(process)
    if found is None:
        found = judged(case, folder, process.returncode)
    took = time.monotonic() - began
    others = [after - was for after, was in zip(cpu_seconds(), before, strict=True)]
    strangers = (others[0] - others[1]) / took
    alone = without_neighbours(case, found, strangers)
    numbers = {
        "load": round(load, 2),
        "took_s": round(took, 1),
        "strangers_cores": round(strangers, 2),
        "stolen_cores": round(others[2] / took, 2),
    }
    return {**found, **numbers, "but for neighbours": alone}


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks the launcher to end its workers, which are in sessions of their own; then by force."""
    ranks = [
        int(line.split()[0])
        for line in subprocess.run(
            ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[1:]
        if f"{JOB} --fault hang" in line
    ]
    os.killpg(process.pid, signal.SIGTERM)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_seconds() -> tuple[float, float, float]:
    """CPU time of the machine, of the processes that this one has awaited, and what was stolen."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields]
    busy = sum(ticks[:3]) + sum(ticks[5:7])
    used = os.times()
    tick = os.sysconf("SC_CLK_TCK")
    return busy / tick, used.children_user + used.children_system, ticks[7] / tick


def without_neighbours(case: Case, found: dict[str, Any], strangers: float) -> str:
    """The outcome where a true finding about processes that were not ours is not counted.

    This machine is shared: where strangers used a quarter of a core and more, `busy_neighbours` is
    no mistake on a case that has none of its own.
    """
    first = "busy_neighbours"
    named = [name for name in found.get("findings", []) if name != first]
    if (
        strangers < STRANGERS_CORES
        or case.expected == first
        or len(named) == len(found.get("findings", []))
    ):
        return str(found["outcome"])
    if not case.expected:
        return "false alarm" if named else "silent"
    rule, _, _ = named[0].partition("/") if named else ("", "", "")
    if found["outcome"] == "named" and case.expected in (rule, named[0]):
        return "named first"
    return str(found["outcome"])


def hanging(case: Case, folder: Path) -> dict[str, Any]:
    """Asks a job that hangs, some seconds after it stopped."""
    limit = time.monotonic() + LIMIT_S
    while not find_runs_or_none(folder / "logs") and time.monotonic() < limit:
        time.sleep(0.5)
    run = find_runs_or_none(folder / "logs")[0]
    while len(list((run / "ranks").glob("*/rank.json"))) < case.ranks and time.monotonic() < limit:
        time.sleep(0.5)
    time.sleep(8)
    line = [sys.executable, "-m", "haiprof", "snapshot", str(run), "--hang", "--json"]
    asked = subprocess.run(line, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    content = json.loads(asked.stdout) if asked.stdout else {}
    suspects = [each.get("rank") for each in content.get("suspects", [])]
    first = suspects[:1] == [case.rank]
    outcome = "named first" if first else "named" if case.rank in suspects else "missed"
    return {"outcome": outcome, "findings": [f"suspect {rank}" for rank in suspects]}


def find_runs_or_none(logs: Path) -> list[Path]:
    """Runs below a log directory that may not exist yet."""
    return find_runs(logs) if logs.is_dir() else []


def judged(case: Case, folder: Path, status: int) -> dict[str, Any]:
    """Scores the verdict on a finished job."""
    if status:
        return {"outcome": "missed", "why": f"the job ended with status {status}"}
    verdict = diagnose(Analyzer(folder / "logs"))
    named = [f"{f.rule}/{f.cause}" if f.cause else f.rule for f in verdict.findings]
    hits = [
        place
        for place, f in enumerate(verdict.findings)
        if case.expected in (f.rule, named[place]) and case.rank in (None, f.rank)
    ]
    if not case.expected:
        outcome = "false alarm" if named else "silent"
    else:
        outcome = "named first" if hits[:1] == [0] else "named" if hits else "missed"
    beside = [
        name
        for name, f in zip(named, verdict.findings, strict=True)
        if case.expected and case.expected not in (f.rule, name) and f.explained_by is None
    ]
    return {
        "outcome": outcome,
        "findings": named,
        "beside": beside,
        "titles": [f.title for f in verdict.findings],
        "step_ns": verdict.step_ns,
        "step_count": verdict.step_count,
        "abstained": len(verdict.abstained),
        "checked": len(verdict.checked),
    }


def show(rows: Sequence[tuple[Case, dict[str, Any]]], out: Path | None) -> None:
    """Prints the confusion table, and writes it beside the results."""
    lines = [
        "| case | ranks | expected | outcome | others used | stolen | findings, in order |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, row in rows:
        expected = case.expected or "nothing"
        found = ", ".join(row.get("findings", [])) or row.get("why", "-")
        others = f"{max(row.get('strangers_cores', 0.0), 0.0):.2f} cores"
        stolen = f"{row['stolen_cores']:.2f} cores" if "stolen_cores" in row else "-"
        lines.append(
            f"| {case.name} | {case.ranks} | {expected} | {row['outcome']} | {others} | {stolen} "
            f"| {found} |"
        )
    lines += ["", *count("All counted", "outcome", rows)]
    lines += count("But for neighbours that were really there", "but for neighbours", rows)
    if any("stolen_cores" not in row for _, row in rows):
        lines += [
            "",
            'A dash under "stolen": not measured beside that run.',
        ]
    print("\n" + "\n".join(lines))
    if out is not None:
        head = f"# What was wrong, and what haiprof said\n\n{__doc__.splitlines()[0]}\n\n"
        out.with_suffix(".md").write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


def count(title: str, key: str, rows: Sequence[tuple[Case, dict[str, Any]]]) -> list[str]:
    """One summary of the outcomes."""
    outcomes = [row.get(key, row["outcome"]) for _, row in rows]
    counts = {name: outcomes.count(name) for name in COLUMNS}
    faults = [row for case, row in rows if case.expected and row["outcome"] != "skipped"]
    healthy = [row for case, row in rows if not case.expected]
    lines = [f"{title}: " + ", ".join(f"{name} {count}" for name, count in counts.items() if count)]
    if faults:
        lines.append(f"- right cause first: {counts['named first']} of {len(faults)}")
    if healthy:
        lines.append(f"- healthy runs with a finding: {counts['false alarm']} of {len(healthy)}")
    return [*lines, ""]


def main() -> None:
    """Runs the chosen cases one after another; results are saved after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="part of a case's name; may repeat")
    parser.add_argument("--kind", choices=("faults", "healthy"))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    parser.add_argument("--rejudge", type=Path, help="judge what --keep kept here, and run nothing")
    parser.add_argument("--out", type=Path, default=None, help="JSON; all cases: the results")
    options = parser.parse_args()
    chosen = [
        case
        for case in CASES
        if (not options.only or any(part in case.name for part in options.only))
        and (options.kind is None or bool(case.expected) is (options.kind == "faults"))
    ]
    out = options.out or (None if options.only else RESULTS)
    if options.rejudge is not None:
        rows = rejudged(options.rejudge, out or RESULTS)
        save(out or RESULTS, rows)
        show(rows, out or RESULTS)
        return
    root = options.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    rows = []
    for number in range(options.repeat):
        for place, case in enumerate(chosen):
            folder = root / f"{number * len(chosen) + place:03d}"
            shutil.rmtree(folder, ignore_errors=True)
            row = run_case(case, folder)
            rows.append((case, row))
            print(
                f"{place + 1}/{len(chosen)} {case.name}: {row['outcome']} {row.get('findings')} "
                f"load {row.get('load')}", flush=True,
            )  # fmt: skip
            if options.keep is None:
                shutil.rmtree(folder, ignore_errors=True)
            if out is not None:
                save(out, rows)
    show(rows, out)


def rejudged(kept: Path, results: Path) -> list[tuple[Case, dict[str, Any]]]:
    """What the rules of now say of runs that were kept, with what was measured beside them then."""
    by_name = {case.name: case for case in CASES}
    rows = []
    for place, row in enumerate(json.loads(results.read_text(encoding="utf-8"))):
        case = by_name[row["case"]]
        folder = kept / f"{place:03d}"
        if row["outcome"] != "skipped" and case.under != "hang":
            row |= judged(case, folder, 0)
            row["but for neighbours"] = without_neighbours(case, row, row["strangers_cores"])
        rows.append((case, row))
    return rows


def save(path: Path, rows: Sequence[tuple[Case, dict[str, Any]]]) -> None:
    """All results so far."""
    content = [
        {"case": case.name, "options": case.options, "ranks": case.ranks, "expected": case.expected}
        | row
        for case, row in rows
    ]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
