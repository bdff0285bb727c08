"""Jobs that are stopped and continued, under haiprof and bare at the same time: is it the same?

    python benchmarks/suspend.py --markdown benchmarks/results/suspend.md

Each of the rounds picks by its seed what runs (a script, torchrun with two ranks, a Slurm job), who
is stopped (the first process alone, or its process group; Slurm stops all), by which signals, and
for how long. Compared are exit status and output; and no process may be left.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.one_slurm import one_machine_slurm
from tests.security.launched import Launched

STEPS = 250
JOB = """
import hashlib, os, sys, time
ranks = int(os.environ.get("WORLD_SIZE", "0"))
if ranks:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
digest = hashlib.sha256()
os.write(1, f"ready {os.getpid()}\\n".encode())  # at once: python -u prints in pieces
for step in range(int(sys.argv[1])):
    value = step
    if ranks:
        tensor = torch.tensor([float(step * dist.get_rank())])
        dist.all_reduce(tensor)
        value = tensor.item()
    digest.update(str(value).encode())
    time.sleep(0.01)
os.write(1, f"digest {digest.hexdigest()}\\n".encode())
if ranks:
    dist.destroy_process_group()
sys.exit(0 if ranks else 3)
"""
KINDS = ("script", "script", "script", "torchrun", "slurm")
SEQUENCES = (("SIGSTOP",), ("SIGTSTP",), ("SIGTSTP", "SIGSTOP"))
BETWEEN_S = 0.3  # of TSTP and STOP; Slurm itself waits for longer
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One round."""

    seed: int
    kind: str
    target: str
    sequence: tuple[str, ...]
    after_s: float
    stop_s: float

    @classmethod
    def of(cls, seed: int, kinds: Sequence[str]) -> Case:
        """What a seed says."""
        chance = random.Random(seed)
        kind = kinds[seed % len(kinds)]
        return cls(
            seed=seed,
            kind=kind,
            target="all" if kind == "slurm" else chance.choice(("first process", "group")),
            sequence=("suspend",) if kind == "slurm" else chance.choice(SEQUENCES),
            after_s=chance.uniform(0.1, 1.5),
            stop_s=chance.uniform(0.2, 5.0),
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one of the two jobs ended."""

    status: object
    output: tuple[str, ...]
    left: int


def run(case: Case, folder: Path, *, bare: bool, slurm: Mapping[str, str]) -> Result:
    """One job through its stop; in a thread beside the other one."""
    folder.mkdir(parents=True)
    (folder / "job.py").write_text(JOB)
    job = [sys.executable, "job.py", str(STEPS)]
    if case.kind == "torchrun":
        torchrun = str(Path(sys.executable).parent / "torchrun")
        job = [torchrun, "--standalone", "--nproc-per-node", "2", *job[1:]]
    if case.kind == "slurm":
        return _run_on_slurm(case, folder, bare=bare, variables=slurm)
    with Launched(folder, bare=bare, job=job) as one:
        one.job()
        time.sleep(case.after_s)
        send: Callable[[int, int], None] = os.killpg if case.target == "group" else os.kill
        for name in case.sequence:
            send(one.process.pid, getattr(signal, name))
            time.sleep(BETWEEN_S)
        time.sleep(max(0.0, case.stop_s - BETWEEN_S * len(case.sequence)))
        send(one.process.pid, signal.SIGCONT)
        try:
            status: object = one.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = "hangs"
        return Result(status=status, output=_output(one.out), left=_left(one.alive))


def _run_on_slurm(case: Case, folder: Path, *, bare: bool, variables: Mapping[str, str]) -> Result:
    """`scontrol suspend` and `resume`: SIGTSTP, then SIGSTOP to every process of the job."""
    words = [] if bare else [sys.executable, "-m", "haiprof", "--log-dir", str(folder / "logs")]
    command = " ".join([*words, sys.executable, "job.py", str(STEPS)])
    environ = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).parent.parent)}

    def ask(*asked: str) -> str:
        done = subprocess.run(asked, env=environ, cwd=folder, capture_output=True, text=True)
        return done.stdout.strip()

    number = ask("sbatch", "--parsable", "-o", "out", "-e", "err", "--wrap", f"exec {command}")
    out = folder / "out"
    _wait(lambda: out.exists() and "ready" in out.read_text())
    time.sleep(case.after_s)
    ask("scontrol", "suspend", number)
    time.sleep(case.stop_s)
    ask("scontrol", "resume", number)
    _wait(lambda: not ask("squeue", "-h", "-j", number))
    shown = ask("scontrol", "show", "job", number).split()
    status = next((word for word in shown if word.startswith("ExitCode=")), "unknown")
    mark = f"SLURM_SUBMIT_DIR={folder}".encode()
    return Result(
        status=status,
        output=_output(out.read_text()),
        left=_left(lambda: [pid for pid in _pids() if _carries(pid, mark)]),
    )


def _wait(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < limit:
        time.sleep(0.1)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _carries(pid: int, mark: bytes) -> bool:
    """Whether a living process has this in its environment."""
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _left(alive: Callable[[], Sequence[int]]) -> int:
    """How many processes there are after some time to end."""
    limit = time.monotonic() + 15
    while alive() and time.monotonic() < limit:
        time.sleep(0.2)
    return len(alive())


def _output(text: str) -> tuple[str, ...]:
    """What the job's lines say; those of gloo come in pieces, and into one another."""
    return tuple(sorted(re.findall("ready|digest [0-9a-f]{64}", text)))


def compare(case: Case, folder: Path, slurm: Mapping[str, str]) -> tuple[Result, Result]:
    """The bare job and the one under haiprof, at the same time."""
    found: dict[str, Result] = {}

    def side(name: str) -> None:
        try:
            found[name] = run(case, folder / name, bare=name == "bare", slurm=slurm)
        except Exception as error:  # noqa: BLE001  it is a row of the table
            found[name] = Result(status=f"{type(error).__name__}: {error}", output=(), left=0)

    threads = [threading.Thread(target=side, args=(name,)) for name in ("bare", "haiprof")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found["bare"], found["haiprof"]


def line(case: Case, bare: Result, under: Result) -> str:
    """A row of the table of what differed."""
    how = " ".join(case.sequence)
    return (
        f"| {case.seed} | {case.kind} | {case.target} | {how} | {case.stop_s:.1f} s | "
        f"{bare.status}, {bare.left} left | {under.status}, {under.left} left"
        f"{'' if under.output == bare.output else ', other output'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--no-slurm", action="store_true", help="leave the Slurm jobs out")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends Slurm's daemons
    kinds = [kind for kind in KINDS if kind != "slurm" or not options.no_slurm]
    same: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    differing: list[str] = []
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        slurm: dict[str, str] = {}
        if "slurm" in kinds:
            (folder := Path(temporary, "slurm")).mkdir()
            slurm["SLURM_CONF"] = str(stack.enter_context(one_machine_slurm(folder)))
        for seed in range(options.first_seed, options.first_seed + options.rounds):
            case = Case.of(seed, kinds)
            bare, under = compare(case, Path(temporary, str(seed)), slurm)
            name = f"{case.kind}, {case.target}"
            rounds[name] += 1
            same[name] += bare == under
            if bare != under:
                differing.append(line(case, bare, under))
                print(bare, under, sep="\n")
            print(line(case, bare, under), "same" if bare == under else "DIFFERS", flush=True)
    text = table(rounds, same, differing)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


def table(rounds: Mapping[str, int], same: Mapping[str, int], differing: Sequence[str]) -> str:
    """The whole result as Markdown."""
    rows = [f"| {name} | {same[name]} of {count} |" for name, count in sorted(rounds.items())]
    head = "# Stopped and continued jobs, under haiprof and bare at the same time\n"
    total = f"**{sum(same.values())} of {sum(rounds.values())} end as bare**: exit status, output,"
    more = "no process left. Stops of 0.2 to 5 s by SIGSTOP, SIGTSTP, both, or `scontrol suspend`."
    lines = [head, f"{total} {more}\n", "| job, who is stopped | as bare |", "|---|---|", *rows]
    if differing:
        lines += [
            "",
            "| seed | job | who | by | for | bare | haiprof |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += differing
    return "\n".join([*lines, "", "`python benchmarks/suspend.py` writes this.", ""])


if __name__ == "__main__":
    main()
