"""Deaths and hangs of real jobs: what was injected, what was named, and after how long.

    python benchmarks/deaths.py --table benchmarks/results/deaths.md
    python benchmarks/deaths.py --only kill,oom

Jobs have two ranks with gloo under torchrun on this machine, and rank 1 is the one that does it,
unless the row says otherwise. Whether a row is right is compared with what was injected. The time
is that of `haiprof verdict` once the launcher has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.one_slurm import one_machine_slurm  # noqa: E402
from tests.process.jobs import environment  # noqa: E402

SCRIPT = str(REPOSITORY / "tests/process/dying_job.py")
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
HAIPROF = [sys.executable, "-m", "haiprof", "--quiet"]
LIMIT_S = 90.0
CGROUP = Path("/sys/fs/cgroup/memory/haiprof-dying")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One death."""

    name: str
    injected: str
    cause: str
    ranks: tuple[int, ...] = (1,)
    said: str = ""
    """What the headline must hold: a line, a signal."""
    words: tuple[str, ...] = ()
    """The job's command; torchrun with the fault's name unless given."""
    options: tuple[str, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)
    meddle: Callable[[subprocess.Popen[str]], None] | None = None
    """What is done to the launcher once the fault is there."""


def torchrun(fault: str, *options: str) -> tuple[str, ...]:
    return (*TORCHRUN, *options, SCRIPT, fault)


def alone(fault: str) -> tuple[str, ...]:
    return (sys.executable, SCRIPT, fault)


def limited(fault: str) -> tuple[str, ...]:
    """The job with 6 GB of addresses for each of its processes."""
    return ("sh", "-c", f"ulimit -v 6000000; exec {' '.join(torchrun(fault))}")


def send(number: int) -> Callable[[subprocess.Popen[str]], None]:
    def meddle(job: subprocess.Popen[str]) -> None:
        assert job.stdout is not None
        job.stdout.readline()
        os.kill(job.pid, number)

    return meddle


def kill_rank(job: subprocess.Popen[str]) -> None:
    """SIGKILL to rank 1, whoever that is."""
    assert job.stdout is not None
    job.stdout.readline()
    time.sleep(0.5)
    for pid in processes_of(job.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"RANK=1" in words and b"dying_job" in line:
                os.kill(pid, signal.SIGKILL)
                return


def small_shm(fault: str) -> tuple[str, ...]:
    """The job where /dev/shm has 16 MB."""
    line = "mount -t tmpfs -o size=16m none /dev/shm && exec " + " ".join(alone(fault))
    return ("unshare", "-m", "sh", "-c", line)


def small_disk(fault: str) -> tuple[str, ...]:
    """The job where /mnt has 1 MB."""
    line = "mount -t tmpfs -o size=1m none /mnt && exec " + " ".join(torchrun(fault))
    return ("unshare", "-m", "sh", "-c", line)


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[None]:
    """A control group of version 1 with a limit, into which the job moves itself."""
    CGROUP.mkdir()
    (CGROUP / "memory.limit_in_bytes").write_text(str(limit_bytes))
    try:
        yield
    finally:
        time.sleep(0.3)
        with contextlib.suppress(OSError):
            CGROUP.rmdir()


CASES = (
    Case(name="raise", injected="exception in a rank", cause="exception",
         said="in raise_error"),
    Case(name="kill-hand", injected="SIGKILL of a rank by hand, from another process",
         cause="killed", said="SIGKILL", meddle=kill_rank),
    Case(name="limit-torch", injected="out of memory in torch: `ulimit -v` before the job",
         cause="out_of_memory", said="allocate memory", words=limited("limit-torch")),
    Case(name="limit-python", injected="out of memory in Python: `ulimit -v` before the job",
         cause="out_of_memory", said="fill_with_objects", words=limited("limit-python"),
         extra={"DYING_TIMEOUT_S": "60"}),
    Case(name="kill", injected="SIGKILL of a rank by itself", cause="killed", said="SIGKILL"),
    Case(name="hang", injected="a rank waits for a lock: gloo's timeout", cause="hang",
         said="rank 1"),
    Case(name="hang-seen", injected="the same with `--hang-limit 3`: a snapshot sees it first",
         cause="hang", said="wait_for_file", words=torchrun("hang"),
         options=("--hang-limit=3",), extra={"DYING_TIMEOUT_S": "25"}),
    Case(name="osexit", injected="os._exit(7)", cause="exit", said="status 7"),
    Case(name="exit3", injected="sys.exit(3)", cause="exit", said="status 3"),
    Case(name="osexit-thread", injected="os._exit(3) in a thread", cause="exit", said="status 3"),
    Case(name="exit3-thread", injected="sys.exit(3) in a thread, which ends only that thread: the "
         "rank waits for it", cause="hang", said="rank 1"),
    Case(name="cuda", injected="out of memory on the GPU (torch.OutOfMemoryError with its text, no "
         "GPU)", cause="out_of_memory", said="out of GPU memory"),
    Case(name="exit0", injected="os._exit(0) in the middle", cause="early_exit", said="rank 1"),
    Case(name="uneven", injected="uneven batches: a rank has done after 30 steps",
         cause="early_exit", said="rank 1"),
    Case(name="segv", injected="segmentation fault", cause="crash", said="SIGSEGV"),
    Case(name="abort", injected="abort()", cause="crash", said="SIGABRT"),
    Case(name="memory", injected="out of memory in Python", cause="out_of_memory",
         said="out of memory (dying_job.py"),
    Case(name="oom", injected="a rank's control group is full: the kernel kills it",
         cause="out_of_memory", said="by the kernel"),
    Case(name="shm", injected="/dev/shm of 16 MB is full (one process, 2 workers)",
         cause="shared_memory_full", ranks=(0,), words=small_shm("shm"), said="DataLoader"),
    Case(name="gil", injected="a rank holds the interpreter lock", cause="hang", said="rank 1",
         options=("--hang-limit=3",), extra={"DYING_TIMEOUT_S": "25"}),
    Case(name="worker", injected="a DataLoader worker waits for a lock (one process, then Ctrl-C)",
         cause="hang", ranks=(0,), words=alone("worker"), options=("--hang-limit=3",),
         said="wait_for_file", meddle=lambda job: signal_after(job, 70, signal.SIGINT)),
    Case(name="worker-raise", injected="an exception in a DataLoader worker (one process)",
         cause="exception", ranks=(0,), words=alone("worker-raise"),
         said="raised RuntimeError: bad sample 17 (dying_job.py"),
    Case(name="worker-kill", injected="SIGKILL of a DataLoader worker (one process)",
         cause="killed", ranks=(0,), words=alone("worker-kill"), said="its DataLoader worker"),
    Case(name="cpu", injected="the limit of CPU time (RLIMIT_CPU)", cause="killed",
         said="ulimit -t"),
    Case(name="bad-alloc", injected="operator new of C++ finds no memory", cause="out_of_memory",
         said="std::bad_alloc"),
    Case(name="disk", injected="torch.save onto a full disk", cause="disk_full",
         words=small_disk("disk"), said="a full disk"),
    Case(name="interrupt", injected="KeyboardInterrupt in a rank", cause="interrupted",
         said="in interrupt"),
    Case(name="exit-text", injected="sys.exit('no such dataset')", cause="exit",
         said="(sys.exit) at dying_job.py"),
    Case(name="kill-launcher", injected="a rank kills torchrun (SIGKILL)", cause="killed",
         ranks=(), said="left its ranks"),
    Case(name="other", injected="another collective than the others", cause="mismatch",
         ranks=(), said="broadcast"),
    Case(name="size", injected="another size than the others: gloo's check ends the process",
         cause="mismatch", ranks=(), said="bytes where it waited for"),
    Case(name="swallow", injected="an exception swallowed: a step less than the others",
         cause="mismatch", ranks=(),
        said="barrier"),
    Case(name="thread", injected="an exception in a thread, the rank waits for it for ever",
         cause="hang", said="truncated record 9"),
    Case(name="late", injected="a rank that never comes to init_process_group",
         cause="never_started", said="rank 1"),
    Case(name="absent", injected="a rank that is never launched (WORLD_SIZE=2, one process)",
         cause="never_started", words=alone("raise"), said="rank 1",
         extra={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29713"}),
    Case(name="import", injected="ImportError in a rank before the first step",
         cause="exception", said="flash_attn"),
    Case(name="all", injected="the same exception in all ranks", cause="exception", ranks=(0, 1),
         said="all 2 ranks"),
    Case(name="spawn", injected="an exception in a rank under torch.multiprocessing.spawn",
         cause="exception", words=alone("spawn"), said="raise_error"),
    Case(name="restarts", injected="two restarts by torchrun, then it ends well", cause="",
         ranks=(), words=torchrun("raise", "--max-restarts=3"),
        extra={"DYING_TIMEOUT_S": "60"}),
    Case(name="never-meet", injected="rank 1 of 3 raises, and after torchrun's restart its ranks "
         "never meet: SIGTERM once the hang is noticed", cause="exception",
         said="start 2 never trained", options=("--hang-limit=4",),
         words=(*TORCHRUN[:-1], "--nproc-per-node=3", "--max-restarts=1", SCRIPT, "never-meet"),
         meddle=lambda job: signal_after(job, 70, signal.SIGTERM)),
    Case(name="never-meet-first", injected="ranks that never meet in their first start: SIGTERM "
         "once the hang is noticed", cause="signal", ranks=(), said="ranks hung at dying_job.py",
         options=("--hang-limit=10",), meddle=lambda job: signal_after(job, 70, signal.SIGTERM)),
    Case(name="term", injected="SIGTERM to a rank from outside", cause="killed", said="SIGTERM"),
    Case(name="term-launcher", injected="SIGTERM to the launcher (`kill PID`)", cause="signal",
         ranks=(), said="SIGTERM", words=torchrun("wait"), meddle=send(signal.SIGTERM)),
)  # fmt: skip


def signal_after(job: subprocess.Popen[str], seconds: float, number: int) -> None:
    """Sends a signal once haiprof has noticed the hang, at the latest after so long."""
    logs = next(Path(w.partition("=")[2]) for w in job.args if w.startswith("--log-dir="))  # type: ignore[union-attr]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if any("reaction_result" in path.read_text() for path in logs.glob("*/nodes/*/*.jsonl")):
            break
        time.sleep(0.5)
    os.kill(job.pid, number)


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one case."""

    injected: str
    named: str
    right: bool
    certain: str
    proof: str
    after: str


def run_case(case: Case, folder: Path) -> Row:
    """Runs one job under haiprof to its end, and asks for the verdict."""
    folder.mkdir()
    logs = folder / "logs"
    words = [*HAIPROF, f"--log-dir={logs}", *case.options, "--",
             *(case.words or torchrun(case.name))]  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    extra = {"DYING_PORT": port, "DYING_SAVE": str(folder / "checkpoint.pt"), **case.extra}
    limited = memory_cgroup(600_000_000) if case.name == "oom" else contextlib.nullcontext()
    with limited, (folder / "stderr").open("w") as stderr:
        job = subprocess.Popen(words, env=environment(extra), cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=stderr,
                               start_new_session=True)  # fmt: skip
        try:
            if case.meddle is not None:
                case.meddle(job)
            job.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    return judge(case, logs)


def judge(case: Case, logs: Path) -> Row:
    """What the verdict says of the newest run."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "haiprof", "verdict", "--json", str(logs)],
                          env=environment(), capture_output=True, text=True,
                          check=False)  # fmt: skip
    took = f"{time.monotonic() - began:.1f} s"
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    death = found.get("death") or {}
    if not case.cause:
        starts = [s["why"] or "ended well" for s in found.get("starts", ())]
        goodput = (found.get("goodput") or {}).get("ratio") or 0
        named = f"{len(starts)} starts: " + "; ".join(starts) + f"; goodput {goodput:.0%}"
        right = not death and len(starts) == 3 and "raise_error" in starts[0]
        return Row(case.injected, named, right, "yes", "the ends of three starts", took)
    headline = str(found.get("headline") or done.stderr[-200:])
    said = " ".join(str(death.get(name)) for name in ("headline", "line", "message"))
    right = (death.get("cause"), tuple(death.get("ranks", ()))) == (case.cause, case.ranks)
    certain = "yes" if death.get("certain") else "likely"
    proof = "; ".join(witnesses(death, Path(found.get("run", ".")))) or "nothing but its absence"
    return Row(case.injected, headline, right and case.said in said, certain, proof, took)


_FROM_OUTSIDE = ("signal", "time_limit", "cancelled")
_OTHER_PROOFS = {
    "mismatch": "the ranks' Flight Recorders, or the text of gloo's own check",
    "never_started": "no rank of that number reported in",
}


def witnesses(death: Mapping[str, Any], run: Path) -> Iterator[str]:
    """What the run directory holds of the end of the ranks that the death began with."""
    events = [json.loads(line) for path in sorted(run.glob("nodes/*/events.jsonl"))
              for line in path.read_text().splitlines()]  # fmt: skip
    if death.get("traceback"):
        yield f"its exception with {len(death['traceback'])} frames, kept by its hook"
    for event in events:
        if event["type"] == "signal" and death.get("cause") in _FROM_OUTSIDE:
            state = f", and Slurm says {event['slurm_state']}" if event.get("slurm_state") else ""
            yield f"signal {event['signal']} that its launcher received, with its sender{state}"
        if event["type"] == "reaction_result" and death.get("cause") == "hang":
            yield "a snapshot taken while it lasted"
        if event["type"] == "process_end" and event["rank"] in death.get("ranks", ()):
            if event.get("signal") is not None:
                yield f"wait status of rank {event['rank']}: signal {event['signal']}"
            elif not death.get("traceback") and event.get("status") is not None:
                yield f"wait status of rank {event['rank']}: exit status {event['status']}"
            oom = event.get("oom") or {}
            if oom.get("kills"):
                yield f"the kernel's count of OOM kills of its control group: {oom['kills']}"
            elif oom.get("in_cgroup"):
                yield "the kernel's log: killed at the limit of a control group"
    if death.get("cause") in _OTHER_PROOFS:
        yield _OTHER_PROOFS[death["cause"]]
    if death.get("seen_at"):
        yield f"sampled stack: {death['seen_at']}"


# -- Slurm, and nodes -----------------------------------------------------------------------------


def slurm_rows(folder: Path, only: set[str]) -> Iterator[tuple[str, Row]]:
    """The time limit, and scancel, of a real Slurm on this machine."""
    cases = (
        Case(name="slurm-limit", injected="Slurm's time limit of a minute (srun)",
             cause="time_limit", ranks=(), said="time limit"),
        Case(name="slurm-cancel", injected="scancel (srun)", cause="cancelled", ranks=(),
             said="Slurm"),
    )  # fmt: skip
    wanted = [case for case in cases if not only or case.name in only]
    if not wanted:
        return
    folder.mkdir()
    with one_machine_slurm(folder) as conf:
        for case in wanted:
            logs = folder / case.name
            words = [*HAIPROF, f"--log-dir={logs}", "--", *torchrun("wait")]
            script = folder / f"{case.name}.sh"
            script.write_text(f"#!/bin/sh\nexec srun -n1 {' '.join(words)}\n")
            extra = {"SLURM_CONF": str(conf), "PATH": f"{environment()['PATH']}:/usr/sbin"}
            _in_slurm(script, environment(extra), cancel=case.name == "slurm-cancel", logs=logs)
            yield case.name, judge(case, logs)


def _in_slurm(script: Path, environ: Mapping[str, str], *, cancel: bool, logs: Path) -> None:
    """Runs a batch script to its end; cancels it once its ranks have reported in."""
    words = ["sbatch", "--parsable", "--time=1", "-w", "n1", f"--output={script}.out", str(script)]
    number = subprocess.run(words, env=environ, capture_output=True, text=True, check=True,
                            cwd=script.parent).stdout.strip()  # fmt: skip
    until = time.monotonic() + 200
    while time.monotonic() < until:
        if cancel and len(list(logs.glob("*/ranks/*/rank.json"))) == 2:
            time.sleep(2)
            subprocess.run(["scancel", number], env=environ, check=False)
            cancel = False
        if not subprocess.run(["squeue", "-h"], env=environ, capture_output=True).stdout.strip():
            return
        time.sleep(0.5)


def node_row(folder: Path) -> Row:
    """A node of two, which are namespaces of this machine, that is gone from one moment on."""
    from tests.process.nodes_job import nodes_job

    case = Case(name="node", injected="a node of two is lost (all its processes, at once)",
                cause="node_lost", ranks=(2, 3), said="node-2")  # fmt: skip
    folder.mkdir()
    words = ["healthy", "--rank=0", "--at=40", "--steps=100000", "--step-s=0.02"]
    with nodes_job(folder, words=words) as job:
        job.wait_for_fault(0)
        for pid in processes_of(job.launchers[1].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.launchers[0].communicate(timeout=LIMIT_S)
        return judge(case, job.logs)


def processes_of(pid: int) -> list[int]:
    """A process and all below it, the lowest last."""
    from tests.process.live import _family

    return _family(pid)


def main() -> None:
    """Runs the cases asked for; a table keeps the rows of earlier calls."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kept = {} if options.table is None else read_table(options.table)
        for name, row in all_rows(folder, set(filter(None, options.only.split(",")))):
            print(name, "RIGHT" if row.right else "WRONG", row.after, "|", row.named, flush=True)
            kept[row.injected] = row
            if options.table is not None:
                options.table.write_text(as_table(list(kept.values())))


def all_rows(folder: Path, only: set[str]) -> Iterator[tuple[str, Row]]:
    for case in CASES:
        if not only or case.name in only:
            yield case.name, run_case(case, folder / case.name)
    yield from slurm_rows(folder / "slurm", only)
    if not only or "node" in only:
        yield "node", node_row(folder / "node")


def read_table(path: Path) -> dict[str, Row]:
    """The rows of a table that this script wrote."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip().replace("\0", "|") for cell in line.replace("\\|", "\0").split("|")]
        if len(cells) == 8 and cells[3] in ("yes", "no"):
            found[cells[1]] = Row(cells[1], cells[2], cells[3] == "yes", *cells[4:7])
    return found


def as_table(rows: list[Row]) -> str:
    right = sum(row.right for row in rows)
    head = f"{__doc__.splitlines()[0]}\n\n{right} of {len(rows)} are right.\n\n"  # type: ignore[union-attr]
    lines = [
        "| injected | named | right? | certain? | what proves it | after |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {row.injected} | {clean(row.named)} | {'yes' if row.right else 'no'} | "
              f"{row.certain} | {clean(row.proof)} | {row.after} |" for row in rows]  # fmt: skip
    return head + "\n".join(lines) + "\n"


def clean(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


if __name__ == "__main__":
    main()
