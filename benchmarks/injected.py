"""What was injected into real jobs of four ranks, and what haiprof named.

    python benchmarks/injected.py --table benchmarks/results/injected.md
    python benchmarks/injected.py --only hang,submit

Jobs run under torchrun with gloo on two nodes, which are namespaces of this machine (as root, with
iproute2), unless the row says otherwise. Whoever does something wrong is rank 3, on the second
node; the commands are asked on the first. Whether a row is right is compared with what was
injected, not with what haiprof says of it. Beside other load, times are longer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from haiprof import Analyzer  # noqa: E402
from haiprof.diagnosis.engine import diagnose  # noqa: E402
from haiprof.run_analysis.reactions import Reaction, outcome_text, reactions  # noqa: E402
from haiprof.run_analysis.run_files import open_run  # noqa: E402
from haiprof.run_format.manifest import newest_run  # noqa: E402
from tests.one_slurm import one_machine_slurm  # noqa: E402
from tests.process.jobs import environment  # noqa: E402
from tests.process.nodes_job import (  # noqa: E402
    REACH,
    RUN,
    SCRIPT,
    nodes_job,
    own_steps,
)

RANK = 3
SLOW_MS = 20
SLOW_STEPS = 30
REACTION_S = 60.0
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=4"]
HANGS = {
    "spin": "loops in Python",
    "wait_for_lock": "waits for a lock",
    "receive": "waits in recv",
    "stop": "stopped by SIGSTOP",
    "other_collective": "issues another collective",
}
COLUMNS = ("injected", "asked with", "named", "right?", "after")


@dataclass(frozen=True, slots=True)
class Row:
    """One thing injected, and what was said of it."""

    injected: str
    asked: str
    named: str
    right: bool
    after: str


# -- slow ranks -----------------------------------------------------------------------------------


def slow(folder: Path) -> Iterator[Row]:
    """A rank slow in one phase: how many of its steps the verdict takes to name it."""
    for phase in ("loader", "forward", "backward"):
        words = [f"{phase}:{SLOW_MS}", f"--rank={RANK}", "--at=10", "--steps=60", "--step-s=0.01"]
        with nodes_job(_new(folder, phase), words=words) as job:
            began_ns = job.wait_for_fault(RANK)
            job.collect()
            yield _slow_row(job.logs / RUN, phase, began_ns)


def _slow_row(run: Path, phase: str, began_ns: int) -> Row:
    steps = Analyzer(run).steps().filter(rank=RANK).sort("step")
    ends = (steps["start_ns"] + steps["step_ns"]).to_list()
    ends = [end for end in ends if end > began_ns][:SLOW_STEPS]
    named_from, title = None, "nothing"
    for count in range(len(ends), 2, -1):
        verdict = diagnose(Analyzer(run, between=(began_ns, ends[count - 1])))
        first = verdict.findings[0] if verdict.findings else None
        if count == len(ends) and first is not None:
            title = first.title
        if first is None or first.rank != RANK or phase not in first.title:
            break
        named_from = count
    after = f"{named_from} steps" if named_from else f"not within {SLOW_STEPS} steps"
    injected = f"rank {RANK}: {SLOW_MS} ms more in each {phase}"
    return Row(injected, "`haiprof verdict`", title, named_from is not None, after)


# -- ranks that hang ------------------------------------------------------------------------------


def hang(folder: Path) -> Iterator[Row]:
    """A rank that the others wait for: asked at once, and named by haiprof itself."""
    for fault, what in HANGS.items():
        words = [fault, f"--rank={RANK}", "--at=60", "--steps=100000", "--step-s=0.05"]
        options = ["--react=both", "--hang-limit=10"]
        injected = f"rank {RANK} {what}"
        with nodes_job(_new(folder, fault), options=options, words=words) as job:
            began_ns = job.wait_for_fault(RANK)
            found = job.ask(job.nodes[0], "snapshot", "faulty_job.py")
            suspects = [suspect["rank"] for suspect in found["suspects"]]
            said = "; ".join(f"rank {s['rank']}: {s['reason']}" for s in found["suspects"][:2])
            doing = found["suspects"][0]["doing"] if suspects else ""
            said += f"; doing: {doing}" if doing else ""
            asked = "`haiprof snapshot JOB`"
            yield Row(injected, asked, said or "nobody", suspects == [RANK], _since(began_ns))
            reaction = _reaction(job.logs / RUN)
            yield _hang_row(injected, reaction, began_ns)


def _hang_row(injected: str, reaction: Reaction | None, began_ns: int) -> Row:
    asked = "nothing (`--hang-limit 10`)"
    if reaction is None:
        return Row(injected, asked, "nothing", False, f"not within {REACTION_S:.0f} s")
    ranks = [suspect.rank for suspect in reaction.suspects]
    right = reaction.trigger == "hang" and ranks == [RANK]
    return Row(injected, asked, outcome_text(reaction), right, _since(began_ns))


# -- jobs that become slower, save, or are well ----------------------------------------------------


def pace(folder: Path) -> Iterator[Row]:
    """Steps that become longer, by so much that haiprof should react, or by less."""
    cases = (
        ("slow:1.25", f"rank {RANK}: steps 25 % longer", "slow"),
        ("slow:1.10", f"rank {RANK}: steps 10 % longer", None),
        ("save:25", "rank 0 saves a checkpoint for 25 s", "hang"),
        ("healthy", "nothing", None),
    )
    for fault, injected, trigger in cases:
        rank = 0 if fault.startswith("save") else RANK
        words = [fault, f"--rank={rank}", "--at=150", "--steps=100000", "--step-s=0.1"]
        options = ["--react=both", "--hang-limit=10"]
        with nodes_job(_new(folder, fault), options=options, words=words) as job:
            began_ns = job.wait_for_fault(rank)
            found = _reaction(job.logs / RUN, REACTION_S if trigger else REACTION_S / 2)
            yield _pace_row(injected, trigger, found, began_ns)


def _pace_row(injected: str, trigger: str | None, found: Reaction | None, began_ns: int) -> Row:
    asked = "nothing (`--react both --hang-limit 10`)"
    if found is None:
        after = "" if trigger else f"{REACTION_S / 2:.0f} s watched"
        return Row(injected, asked, "nothing", trigger is None, after)
    said = f"{found.reason}; {outcome_text(found)}"
    right = found.trigger == trigger and not found.suspects
    return Row(injected, asked, said, right, _since(began_ns))


# -- on demand ------------------------------------------------------------------------------------


def trace(folder: Path) -> Iterator[Row]:
    """The same steps on all ranks, with and without a disk that both nodes see."""
    for apart in (False, True):
        here = _new(folder, f"trace-{apart}")
        options = [REACH, f"--reach-token={here / 'token'}"] if apart else []
        words = ["healthy", "--rank=0", "--at=60", "--steps=100000", "--step-s=0.02"]
        with nodes_job(here, options=options, words=words, apart=apart) as job:
            job.wait_for_fault(0)
            time.sleep(2)
            began_ns = time.time_ns()
            found = job.ask(job.nodes[0], "trace-now", "faulty_job.py", "--steps=5")
            after = _since(began_ns)
            where = "no shared disk, `--reach`" if apart else "a shared disk"
            asked = "`haiprof trace now JOB --steps 5`"
            yield _steps_row(f"nothing; {where}", asked, job.own_steps(found), after)


def _steps_row(injected: str, asked: str, steps: Mapping[int, list[int]], after: str) -> Row:
    same = len(steps) == 4 and len({tuple(own) for own in steps.values()}) == 1
    own = next(iter(steps.values()), [])
    named = f"steps {own[0]} to {own[-1]} of the script on ranks {sorted(steps)}" if same else (
        f"different steps: {dict(steps)}"
    )  # fmt: skip
    return Row(injected, asked, named, same and len(own) == 5, after)


def kineto(folder: Path) -> Iterator[Row]:
    """A job that knows nothing of haiprof but the variable KINETO_USE_DAEMON."""
    here = _new(folder, "kineto")
    with tempfile.TemporaryDirectory(prefix="hk-", dir="/tmp") as sockets:
        variables = {"KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": sockets}
        agent = subprocess.Popen(
            [sys.executable, "-m", "haiprof", "kineto-agent"],
            cwd=here, env=environment(variables), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert agent.stderr is not None
            agent.stderr.readline()  # it listens
            with _foreign(here, "healthy", variables=variables) as job:
                time.sleep(3)
                began_ns = time.time_ns()
                asked = ["trace-now", str(job.pid), "--steps=5", "-o", "traces"]
                found = _haiprof(here, *asked, variables=variables)
                after = _since(began_ns)
                ranks = {each["rank"]: each for each in found["processes"]}
                without = {r: each["reason"] for r, each in ranks.items() if not each["path"]}
                steps = {
                    r: own_steps(Path(each["path"])) for r, each in ranks.items() if each["path"]
                }
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.communicate(timeout=20)
    injected, asked = (
        "a job with only `KINETO_USE_DAEMON=1`, one node",
        "`haiprof trace now PID --steps 5`",
    )
    if without:
        yield Row(injected, asked, f"without a trace: {without}", False, after)
        return
    yield _steps_row(injected, asked, steps, after)


def attach(folder: Path) -> Iterator[Row]:
    """A process that was not started under haiprof, one rank of it slow."""
    injected = f"a job without haiprof, one node; rank {RANK}: 40 ms more in each loader"
    with _foreign(_new(folder, "attach"), "loader:40") as job:
        time.sleep(3)
        here = Path(f"/proc/{job.pid}/cwd").resolve()
        began_ns = time.time_ns()
        seen = _haiprof(here, "attach", str(job.pid), "--time=8")["seen"]
        most = [max(each["shares"] or {"": 0}, key=lambda p, e=each: e["shares"].get(p, 0))
                for each in seen]  # fmt: skip
        named = "most of the stacks: " + ", ".join(
            f"rank {i} {name}" for i, name in enumerate(most)
        )
        right = most[RANK] == "dataloader" and most.count("dataloader") == 1
        yield Row(injected, "`haiprof attach PID --time 8`", named, right, _since(began_ns))
        began_ns = time.time_ns()
        found = _haiprof(here, "attach", str(job.pid), "--inject", "--time=8")
        first = (found["verdict"]["findings"] or [{"title": "nothing", "rank": None}])[0]
        right = first["rank"] == RANK and "dataloader" in first["title"] and job.poll() is None
        asked = "`haiprof attach PID --inject --time 8`"
        yield Row(injected, asked, first["title"], right, _since(began_ns))


def submit(folder: Path) -> Iterator[Row]:
    """Submitted jobs with a slow rank, here and on the Slurm of one machine."""
    job = ["--", f"backward:{SLOW_MS}", f"--rank={RANK}", "--at=0", "--steps=60", "--step-s=0.01"]
    injected = f"rank {RANK}: {SLOW_MS} ms more in each backward"
    words = ["--nproc-per-node=4", "--wait", *job]
    yield _submitted(_new(folder, "local"), injected, "`haiprof submit`, one node", words, {})
    slurm = _new(folder, "slurm")
    with one_machine_slurm(slurm) as conf:
        words = ["--on=slurm", "--nodes=2", "--nproc-per-node=2", "--wait", "--time-limit=5", *job]
        asked = "`haiprof submit --on slurm --nodes 2`"
        yield _submitted(_new(folder, "job"), injected, asked, words, {"SLURM_CONF": str(conf)})


def _submitted(
    here: Path, injected: str, asked: str, words: Sequence[str], variables: Mapping[str, str]
) -> Row:
    began_ns = time.time_ns()
    done = subprocess.run(
        [sys.executable, "-m", "haiprof", "submit", SCRIPT, "--log-dir=logs", *words],
        cwd=here, env=environment(variables), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    after = _since(began_ns)
    if done.returncode:
        return Row(injected, asked, f"exit {done.returncode}: {done.stderr[-200:]}", False, after)
    verdict = diagnose(Analyzer(newest_run(here / "logs")))
    first = verdict.findings[0] if verdict.findings else None
    right = len(verdict.ranks) == 4 and first is not None and first.rank == RANK
    named = f"{len(verdict.ranks)} ranks, exit 0; " + (first.title if first else "nothing")
    return Row(injected, asked, named, right and "backward" in named, after)


# -- parts ----------------------------------------------------------------------------------------


def _new(folder: Path, name: str) -> Path:
    path = folder / name.replace(":", "-")
    path.mkdir()
    return path


def _since(began_ns: int) -> str:
    return f"{(time.time_ns() - began_ns) / 1e9:.0f} s"


def _reaction(run: Path, seconds: float = REACTION_S) -> Reaction | None:
    """The first that haiprof did by itself, once it is complete."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        for reaction in reactions(open_run(run)):
            if reaction.state != "begun":
                return reaction
        time.sleep(0.5)
    return None


@contextlib.contextmanager
def _foreign(
    here: Path, fault: str, *, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A job that does not run under haiprof, from step 20 on."""
    words = [fault, f"--rank={RANK}", "--at=20", "--steps=100000", "--step-s=0.02"]
    job = subprocess.Popen(
        [*TORCHRUN, SCRIPT, *words], cwd=here, env=environment(variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        assert job.stdout is not None
        assert job.stdout.readline().startswith("FAULT")
        yield job
    finally:
        job.terminate()  # torchrun ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.communicate(timeout=40)
        job.kill()
        job.communicate()


def _haiprof(here: Path, *words: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "haiprof", *words, "--json"],
        cwd=here, env=environment(variables), capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


CASES: dict[str, Callable[[Path], Iterator[Row]]] = {
    function.__name__: function for function in (slow, hang, pace, trace, kineto, attach, submit)
}


def _table(rows: Sequence[Row], loads: Sequence[float]) -> str:
    lines = [
        "# What was injected, and what was named",
        "",
        f"`python benchmarks/injected.py`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, "
        f"load average {min(loads):.1f} to {max(loads):.1f} while it ran. "
        f"{sum(row.right for row in rows)} of {len(rows)} right.",
        "",
        " ".join((__doc__ or "").split("\n\n")[2].split()),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        cells = (("yes" if cell is True else "**no**" if cell is False else str(cell))
                 for cell in astuple(row))  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs all cases, or some, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    rows, loads = [], []
    with tempfile.TemporaryDirectory(prefix="injected-") as name:
        for case in options.only.split(","):
            for row in CASES[case](_new(Path(name), case)):
                rows.append(row)
                loads.append(os.getloadavg()[0])
                print(*astuple(row), sep=" | ", flush=True)
    if options.table is not None:
        options.table.write_text(_table(rows, loads))


if __name__ == "__main__":
    main()
