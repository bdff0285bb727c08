"""Who died first, and of what: told from what ranks and nodes leave behind."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from haiprof.diagnosis.restart_advice import restart_advice
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.schema import HEARTBEAT, NULL_I64
from haiprof.run_format.writer import LineWriter, write_json
from haiprof.show.views.deaths import grouped_fates
from tests.unit.analysis.recorded import CLOCK, spans_of, write_rank, write_records, write_run
from tests.unit.analysis.sampled import write_stacks

S = 1_000_000_000
T0 = CLOCK.wall_ns + 60 * S
GLOO = "[/__w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"
BROKEN = "[/__w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:57741"
ENFORCED = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 524288 bytes. Error code 12 (Cannot allocate memory)"
)
LOCK = ["/home/me/train.py", 88, "step"]
BACKWARD = [LOCK, ["/x/site-packages/torch/_tensor.py", 5, "backward"]]


class Job:
    """A run directory of some ranks, whose ends are written one by one."""

    def __init__(
        self, root: Path, *, ranks: int = 3, hosts: int = 1, world: int = 0, steps: int = 3
    ) -> None:
        self.run, self.steps = write_run(root), steps
        self.hosts = [f"node{number}" for number in range(hosts)]
        for rank in range(ranks):
            self.start(rank, world=world or ranks)
        self.ended(1)

    def start(self, rank: int, *, attempt: int = 0, world: int = 3) -> None:
        clock = {"wall_ns": CLOCK.wall_ns + attempt * 600 * S, "mono_ns": CLOCK.mono_ns}
        spans = spans_of(" ".join(["F B O"] * self.steps or ["F"]))
        write_rank(
            self.run, spans, rank=rank, attempt=attempt, restart=attempt,
            host=self.host(rank), pid=self.pid(rank, attempt), world_size=world, clock=clock,
        )  # fmt: skip

    def ended(self, status: int | None, number: str | None = None) -> None:
        manifest = read_manifest(self.run)
        fields = {"end_wall_ns": T0 + 3600 * S, "exit_status": status, "signal": number}
        write_manifest(self.run, type(manifest)(**{**vars(manifest), **fields}))

    def host(self, rank: int) -> str:
        return self.hosts[rank % len(self.hosts)]

    def pid(self, rank: int, attempt: int = 0) -> int:
        return 100 + rank + 1000 * attempt

    def over(
        self, rank: int, at_s: float, *, status: int | None = None, number: int | None = None,
        attempt: int = 0, **more: object,
    ) -> None:  # fmt: skip
        self.line(self.host(rank), {
            "type": "process_end", "pid": self.pid(rank, attempt), "rank": rank, "parent": 1,
            "wall_ns": T0 + round(at_s * S), "status": status, "signal": number, **more,
        })  # fmt: skip

    def line(self, host: str, content: Mapping[str, object]) -> None:
        self.run.node(host).root.mkdir(parents=True, exist_ok=True)
        events = LineWriter(self.run.node(host).events)
        events.append(content)
        events.close()

    def raised(
        self, rank: int, at_s: float, kind: str, message: str, frames: Sequence[object] = (LOCK,),
        *, attempt: int = 0, how: str = "exception", handled: Sequence[Mapping[str, object]] = (),
        source: str = "x = y()", children: Sequence[object] = (),
        after: tuple[str, str] | None = None, **more: object,
    ) -> None:  # fmt: skip
        host, pid = self.host(rank), self.pid(rank, attempt)
        self.run.uncaught.mkdir(exist_ok=True)
        error = {"type": kind, "message": message, "frames": list(frames), "source": source}
        entry: dict[str, object] = {
            "how": how, "thread": None, "wall_ns": T0 + round(at_s * S),
            "errors": [error, *handled], "children": list(children),
        }  # fmt: skip
        ended = [entry]
        if after is not None:  # another one, of the main thread
            error = {**error, "type": after[0], "message": after[1]}
            ended.append({**entry, "how": "exception", "errors": [error]})
        path = self.run.uncaught_file(host, pid)
        write_json(path, {
            "host": host, "pid": pid, "rank": rank, "restart": attempt, "ended": ended, **more,
        }, below=self.run.root)  # fmt: skip

    def died(self, rank: int, at_s: float, kind: str, message: str, **more: object) -> None:
        """By an exception, and then its process."""
        self.raised(rank, at_s, kind, message, **more)  # type: ignore[arg-type]
        self.over(rank, at_s + 0.5, status=1)

    def began(self, rank: int, *kinds: str) -> None:
        """The collectives of its only group, as its Flight Recorder has them."""
        entries = [
            {"collective_seq_id": place, "record_id": place, "profiling_name": f"gloo:{kind}",
             "process_group": ["0", "default_pg"], "input_sizes": [[4]], "input_dtypes": ["Float"],
             "time_created_ns": CLOCK.wall_ns + place, "state": "completed"}
            for place, kind in enumerate(kinds, start=1)
        ]  # fmt: skip
        dump = {"version": 2, "wall_ns": T0, "mono_ns": 5, "groups": {}, "traces": [
            {"entries": entries}]}  # fmt: skip
        path = self.run.rank(rank).collectives(T0)
        path.write_bytes(gzip.compress(json.dumps(dump).encode()))

    def stopped(
        self, *ranks: int, at_s: float = 1, number: int = signal.SIGTERM, attempt: int = 0
    ) -> None:
        """Somebody ends these ranks, or all."""
        for rank in ranks or range(3):
            self.over(rank, at_s, number=number, attempt=attempt)

    def signalled(self, at_s: float, number: int = signal.SIGTERM, **more: object) -> None:
        """A signal comes to the launcher."""
        line = {"type": "signal", "signal": number, "wall_ns": T0 + round(at_s * S), "from_pid": 7}
        self.line("node0", {**line, **more})

    def reached(self, *counts: int) -> None:
        """How many collectives each rank began."""
        for rank, count in enumerate(counts):
            self.began(rank, *["all_reduce"] * count)

    def beats(self, rank: int, *beats: tuple[float, int]) -> None:
        """When it noted how many collectives it had begun."""
        at = T0 - CLOCK.wall_ns + CLOCK.mono_ns
        rows = [(at + round(at_s * S), 0, count, NULL_I64, count) for at_s, count in beats]
        write_records(self.run.rank(rank).heartbeat, HEARTBEAT, rows)

    def exits(self, rank: int, **more: object) -> None:
        """It goes through Python's own exit."""
        lines = LineWriter(self.run.rank(rank).events)
        lines.append({"type": "record_end", **{"time_ns": 1, "reason": "exit", **more}})
        lines.close()

    def terminated(self, rank: int, at_s: float, kind: str, message: str) -> None:
        """As in_job/terminate.cpp leaves it; the process then ends by SIGABRT."""
        self.run.uncaught.mkdir(exist_ok=True)
        path = self.run.uncaught / f"{self.host(rank)}-{self.pid(rank)}.terminate"
        path.write_text(f"{T0 + round(at_s * S)}\n{kind}\n{message}")
        self.over(rank, at_s + 0.5, number=signal.SIGABRT)

    def crashed(self, rank: int, at_s: float, thread: int, *frames: str) -> None:
        """As in_job/crash.c leaves it, the innermost frame first."""
        self.run.uncaught.mkdir(exist_ok=True)
        path = self.run.uncaught / f"{self.host(rank)}-{self.pid(rank)}.crash"
        head = f"{T0 + round(at_s * S)}\t11\t{thread}"
        path.write_text("\n".join([head, *frames]) + "\n")

    def death(self) -> Death:
        (death,) = [each for each in self.deaths() if each.final]
        return death

    def deaths(self) -> list[Death]:
        return RunFrames(self.run.root).deaths()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "run")


def found(death: Death) -> tuple[str, tuple[int, ...]]:
    return death.cause, death.ranks


def advice_of(job: Job) -> Any:
    advice = restart_advice(RunFrames(job.run.root))
    assert advice is not None
    return advice


WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with "
    "exception: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=241, "
    "OpType=ALLREDUCE, "
    "NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600034 milliseconds before "
    "timing out."
)
ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
    "asynchronously reported at some other API call"
)
TRACEBACK = [
    "step 7", "Traceback (most recent call last):", '  File "/home/me/train.py", line 88, in step',
    "    x = y()", "        ^^^", '  File "/x/site-packages/torch/_tensor.py", line 5, in backward',
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happens to a job, and what is said of its death."""

    events: Sequence[Callable[[Job], None]]
    cause: str
    ranks: tuple[int, ...] = (1,)
    said: Sequence[str] = ()
    """In the headline."""
    unsaid: Sequence[str] = ()
    """Neither there nor in the remedy."""
    remedy: str = ""
    certain: bool | None = None
    roles: str = ""
    """By rank, the first letters: cause, victim, stopped."""
    line: tuple[str | None, str | None] | None = None
    """And the source that stands there."""
    message: str = ""
    step: int | None = None
    status: tuple[int | None, str | None] = (1, None)
    """Of the job."""
    job: Mapping[str, int] = field(default_factory=dict)


class _Events:
    """`do.over(1, 0)`: that method of the story's job is called so."""

    def __getattr__(self, name: str) -> Callable[..., Callable[[Job], None]]:
        return lambda *args, **more: lambda job: getattr(job, name)(*args, **more)


do: Any = _Events()
ENDED = (None, "SIGTERM")
AT_88 = ("train.py:88 in step", "x = y()")
TIMED_OUT = [do.died(0, 0, "RuntimeError", GLOO), do.died(2, 0, "RuntimeError", GLOO)]
UNLIKE = "op.preamble.length <= op.nbytes. 4160 vs 4"
CUT_OFF = [do.died(0, 0.2, "RuntimeError", BROKEN), do.died(2, 0.2, "RuntimeError", BROKEN)]
WATCHED = [do.terminated(rank, 600, "c10::DistBackendError", WATCHDOG) for rank in (0, 2)]
ABORTS = {
    "number": signal.SIGABRT,
    "stderr": ["ran", "Watchdog caught collective operation timeout"],
}
JOINED = "Timed out after 9 seconds waiting for clients. 2/3 joined."
KILLED_WORKER = "DataLoader worker (pid 9) is killed by signal: Killed. "
WORKER_SAID = "its DataLoader worker (pid 9) was ended by a signal: Killed"
WORKER_ENDED = {"type": "process_end", "pid": 9, "rank": 1, "helper": True, "parent": 101,
                "wall_ns": T0, "status": None, "signal": 9}  # fmt: skip
RAISED_IN_WORKER = (
    "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
    'last):\n  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 3, in loop\n'
    "  File \"/home/me/data.py\", line 17, in __getitem__\n{source}KeyError: 'label'\n"
)
LOADER = ("/x/site-packages/torch/utils/data/dataloader.py", 1291, "_try_get_data")
SLURMSTEPD = {"from_pid": 77, "from_command": "slurmstepd: [12.batch]", "slurm_job": "12"}


def _exit_call(code: str, status: int, text: str = "") -> Story:
    said = f"rank 1 died first: it exited with status {status} (sys.exit) at train.py:88 in step"
    events = [do.exits(1, uncaught=False), do.raised(1, 0, "SystemExit", code, how="exit_call"),
              do.over(1, 0, status=status)]  # fmt: skip
    return Story(events=events, cause="exit", certain=True, line=AT_88, said=[said + text])


def _last_lines(cause: str, said: str, *printed: object) -> Story:
    return Story(
        events=[do.over(1, 0, status=1, stderr=list(printed)), do.stopped(0, 2)],
        cause=cause, certain=False, said=[said], line=None if cause == "exit" else AT_88,
    )  # fmt: skip


def _by_slurm(cause: str, left_s: int, state: str | None = None) -> Story:
    more = {**SLURMSTEPD, "slurm_end_s": T0 // S + left_s, "slurm_state": state}
    events = [do.signalled(0, **more), do.stopped(at_s=0.1)]
    return Story(events=events, cause=cause, ranks=(), status=ENDED)


def _ended_without_a_word(cause: str, said: str, **how: object) -> Story:
    events = [do.over(1, 0, **how), do.died(0, 0.1, "RuntimeError", BROKEN), do.stopped(2)]
    return Story(events=events, cause=cause, said=[said])


STORIES = {
    # exceptions of native code
    "a watchdog that ends a rank from native code makes it a victim": Story(
        events=[do.reached(241, 240, 241), *WATCHED, do.stopped(1, at_s=601)], cause="hang",
        said=["rank 1 did not come where the others waited", "NCCL's watchdog"],
    ),
    "an error of a kernel that ends a rank from native code is the cause": Story(
        events=[do.terminated(1, 0, "c10::AcceleratorError", ILLEGAL), *WATCHED], cause="crash",
        said=["rank 1 died first: it aborted itself (SIGABRT): c10::AcceleratorError: CUDA error: "
              "an illegal memory access was encountered"],
        message="asynchronously reported",
    ),
    "an exception in Python comes before what native code says at its exit": Story(
        events=[do.raised(1, 0, "RuntimeError", "bad sample 17"),
                do.terminated(1, 1, "", "terminate called without an active exception"),
                do.died(0, 25, "RuntimeError", GLOO), do.died(2, 25, "RuntimeError", GLOO)],
        cause="exception",
    ),
    # one rank fails, the others wait
    "an exception is named with its line and the others as its victims": Story(
        events=[do.reached(241, 240, 241),
                do.died(1, 0, "RuntimeError", "shape mismatch", frames=BACKWARD),
                do.died(0, 25, "RuntimeError", GLOO), do.died(2, 25, "RuntimeError", GLOO)],
        cause="exception", roles="vcv", line=AT_88, step=2,
        said=["rank 1 died first: RuntimeError: shape mismatch (train.py:88 in step); ranks 0 and "
              "2 waited in all_reduce 241 and were ended 25.0 s later by gloo's timeout"],
    ),
    "a victim whose exception came first is not blamed": Story(
        events=[do.died(0, 0, "RuntimeError", BROKEN), do.over(1, 0.001, number=signal.SIGKILL),
                do.stopped(2, at_s=0.8)],
        cause="killed", roles="vcs",
    ),
    "a rank that hung until its launcher ended it is named by its collectives": Story(
        events=[do.reached(9, 8, 9), *TIMED_OUT, do.stopped(1, at_s=1.2)],
        cause="hang", certain=False, said=["never came to all_reduce 9"],
    ),
    "samples that make no batch are told of as such": Story(
        events=[do.died(1, 0, "RuntimeError",
                        "Trying to resize storage that is not resizable"), *CUT_OFF],
        cause="exception", remedy="tensors of unlike shapes",
    ),
    "a rank that ended early with status 0 is the cause of the others' deaths": Story(
        events=[do.over(1, 0, status=0), *CUT_OFF], cause="early_exit",
    ),
    # its connections close once Python's own exit is done, and its process ends after that
    "a rank that takes long to end has ended early all the same": Story(
        events=[do.exits(1, time_ns=CLOCK.mono_ns + 60 * S - S, uncaught=False,
                         left_at=[["/me/train.py", 27, "stop"],
                                  ["/v/site-packages/click/core.py", 3, "exit"]]),
                do.over(1, 3, status=0), *CUT_OFF],
        cause="early_exit", roles="vcv", said=["sys.exit at train.py:27 in stop"],
    ),
    "contradicting collectives are named with what each rank did": Story(
        events=[do.began(rank, "all_reduce", "broadcast" if rank == 1 else "all_reduce")
                for rank in range(3)]
        + [do.died(rank, rank, "RuntimeError", GLOO) for rank in range(3)],
        cause="mismatch", said=["broadcast"],
    ),
    "a collective that gloo ends a rank in is at the line that called it": Story(
        events=[do.terminated(1, 0, "gloo::EnforceNotMet", UNLIKE),
                do.crashed(1, 0, 0, "8\tvalidate\ttrain.py", "12\t<module>\ttrain.py"), *CUT_OFF],
        cause="mismatch", ranks=(), said=["rank 1 at train.py:8 in validate"],
    ),
    "the same failure of all ranks is one cause": Story(
        events=[do.died(rank, rank * 0.1, "ValueError", "bad shape") for rank in range(3)],
        cause="exception", ranks=(0, 1, 2), said=["all 3 ranks died together"],
    ),
    "a crash": _ended_without_a_word("crash", "SIGSEGV", number=signal.SIGSEGV),
    "an exit past Python": _ended_without_a_word("exit", "os._exit", status=7),
    "a kill": _ended_without_a_word("killed", "SIGKILL", number=signal.SIGKILL),
    "a kill by the kernel": _ended_without_a_word(
        "out_of_memory", "1.00 GiB", number=signal.SIGKILL,
        oom={"kills": 1, "anonymous_bytes": 1 << 30}),
    # a process whose memory ran out writes no exception: that is no proof of sys.exit
    **{
        f"an exit status without a witness is of unknown cause, {closed}": Story(
            events=[*([] if closed is None else [do.exits(1, **closed)]),
                    do.over(1, 0, status=1), do.stopped(0, 2)],
            cause="exit", certain=False, said=["exit status 1", "why is not known"],
            unsaid=["sys.exit"],
        )
        for closed in (None, {}, {"uncaught": True})
    },
    # last lines on stderr
    "a printed error": _last_lines("exception", "Error: bad (train.py:88 in",
                                   *TRACEBACK, "torch.Error: bad", "second line"),
    "a printed MemoryError": _last_lines("out_of_memory", "died first: out of memory (train.py:88",
                                         *TRACEBACK, "MemoryError"),
    "a traceback, and no error below it": _last_lines(
        "exit", "stderr: and then: nothing it raised", *TRACEBACK, "and then: nothing it raised"),
    "a traceback without its error": _last_lines("exit", "why is not known", *TRACEBACK),
    "a last line": _last_lines("exit", "why is not known; its last line on stderr: no license",
                               "no license", ""),
    "damaged lines": _last_lines("exit", "why is not known", 7, None),
    "an abort that only stderr tells of is a crash with its text": Story(
        events=[do.over(1, 0, number=signal.SIGABRT, stderr=[
                    "terminate called after throwing an instance of 'std::runtime_error'",
                    "  what():  bad"]), do.stopped(0, 2)],
        cause="crash", certain=False,
        said=["std::runtime_error: bad; known by its last lines on stderr"],
    ),
    "a crash is told with the line that faulthandler printed": Story(
        events=[do.over(1, 0, number=signal.SIGSEGV, stderr=[
                    "Fatal Python error: Segmentation fault", "",
                    "Thread 0x00007f5b531c86c0 (most recent call first):",
                    '  File "/pkg/haiprof/in_job/stack_sampler.py", line 270 in _run', "",
                    "Current thread 0x00007f5b7be5cb80 (most recent call first):",
                    '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at',
                    '  File "train.py", line 88 in step',
                    '  File "train.py", line 9 in <module>', "",
                    "Extension modules: torch._C (total: 1)"]), do.stopped(0, 2)],
        cause="crash", line=("train.py:88 in step", None), remedy="see what that line calls",
        said=["a segmentation fault in native code (SIGSEGV), called at train.py:88 in step"],
    ),
    "a crash is told with the line of the job that called native code": Story(
        events=[do.crashed(1, 0, 1, "519\tstring_at\t/usr/lib/python3.11/ctypes/__init__.py",
                           "88\tstep\ttrain.py", "9\t<module>\ttrain.py", "1\t<i>\t<shim>"),
                do.over(1, 0, number=signal.SIGSEGV, stderr=["torch._C"]), do.stopped(0, 2)],
        cause="crash", line=("train.py:88 in step", None), remedy="see what that line calls",
        said=["a segmentation fault in native code (SIGSEGV), called at train.py:88 in step"],
    ),
    "a crash of another thread is told with where Python was": Story(
        events=[do.crashed(1, 0, 0, "88\tstep\ttrain.py", "damaged", "x\ty\tz"),
                do.crashed(1, 0, 0, "88\tstep\ttrain.py"),
                do.over(1, 0, number=signal.SIGBUS), do.stopped(0, 2)],
        cause="crash", line=("train.py:88 in step", None),
        said=[", on another thread, while Python was at train.py:88 in step"],
    ),
    "a C++ exception is told with where Python was": Story(
        events=[do.terminated(1, 0, "c10::Error", "bad"), do.crashed(1, 0, 0, "88\tstep\ttrain.py"),
                do.stopped(0, 2)],
        cause="crash", line=("train.py:88 in step", None), remedy="see what that other thread runs",
        said=["c10::Error: bad (on another thread, while Python was at train.py:88 in step)"],
    ),
    "a damaged note of a crash leaves what else is known": Story(
        events=[do.crashed(1, 0, 1, "88\tstep"), do.over(1, 0, number=signal.SIGSEGV),
                do.stopped(0, 2)],
        cause="crash", line=(None, None), said=["a segmentation fault in native code (SIGSEGV)"],
    ),
    "an abort is told with its last line": Story(
        events=[do.over(1, 0, number=signal.SIGABRT, stderr=["ERROR: save failed"])],
        cause="crash", said=["aborted (SIGABRT)", "its last line on stderr: ERROR: save failed"],
    ),
    "a rank that NCCL's watchdog ended by its last lines is a victim": Story(
        events=[do.over(0, 9, **ABORTS), do.over(1, 0, status=3, stdout=["license lost"]),
                do.over(2, 9, **ABORTS)],
        cause="exit", roles="vcv", said=["its last line on stdout: license lost"],
    ),
    "what a rank raised itself is surer than what it printed": Story(
        events=[do.raised(1, 0, "ValueError", "bad sample"),
                do.over(1, 1, status=1, stderr=[*TRACEBACK, "MemoryError"])],
        cause="exception", certain=True,
    ),
    # memory
    "memory at a limit is told as the cause, and not in torch's words": Story(
        events=[do.raised(1, 0, "RuntimeError", ENFORCED),
                do.over(1, 0, status=1, address_limit_bytes=3 << 30)],
        cause="out_of_memory", line=AT_88, unsaid=["enforce", "alloc_cpu", "RuntimeError"],
        said=["rank 1 died first: out of memory, at its limit of 3.00 GiB by ulimit -v "
              "(train.py:88 in step)"], message=ENFORCED,
    ),
    "memory of a loader worker": Story(
        events=[do.died(1, 0, "MemoryError", RAISED_IN_WORKER.replace("KeyError: 'label'",
                "MemoryError").format(source=""))], cause="out_of_memory",
        said=["its DataLoader worker 0 ran out of memory (data.py:17 in __getitem__)"],
    ),
    "memory of a GPU without numbers": Story(
        events=[do.raised(1, 0, "torch.AcceleratorError", "CUDA error: out of memory\nhint"),
                do.over(1, 0, status=1, address_limit_bytes=3 << 30)],
        cause="out_of_memory", unsaid=["ulimit -v ("], said=["out of GPU memory (train.py:88"],
    ),
    "places in the sources of libraries are left out": Story(
        events=[do.died(1, 0, "RuntimeError", "[enforce fail at tensor.cpp:9] . bad stride")],
        cause="exception", said=["RuntimeError: bad stride (train.py"], unsaid=["cpp"],
    ),
    # ways out
    "an exit that no exception led to is proved": Story(
        events=[do.exits(1, uncaught=False), do.over(1, 0, status=3)],
        cause="exit", certain=True, said=["it exited with status 3 (SystemExit)"],
    ),
    "a line that called sys.exit is named": _exit_call("3", 3),
    "a negative status": _exit_call("-1", 255),
    "a text for a status": _exit_call("no such dataset", 1, ": no such dataset"),
    **{
        f"a rank that ends itself on a NaN is told so, {way}": Story(
            events=[do.exits(1, uncaught=False),
                    do.raised(1, 0, "SystemExit", "1", source=source, how="exit_call"),
                    do.over(1, 0, status=1, stderr=printed)],
            cause="exit",
            said=["(sys.exit) at train.py:88 in step", *(printed or ["on a NaN or infinite"])],
            unsaid=["why it calls sys.exit"], remedy="find where it becomes NaN or infinite",
        )
        for way, source, printed in (
            ("by its line", "if loss.isnan(): sys.exit(1)", []),
            ("by what it printed", "sys.exit(1)", ["step 7: loss is not finite"]),
        )
    },
    "a NaN that the exception names is said once": Story(
        events=[do.died(1, 0, "ValueError", "the loss is nan"), do.stopped(0, 2)],
        cause="exception", unsaid=["on a NaN"], remedy="find where it becomes NaN or infinite",
    ),
    "a rank that leaves since another one is gone is its victim": Story(
        events=[do.reached(9, 8, 9), *(event for rank in (0, 2) for event in (
                    do.exits(rank, uncaught=False),
                    do.raised(rank, 0, "SystemExit", "1", how="exit_call", handled=[
                        {"type": "RuntimeError", "message": GLOO, "frames": [LOCK]}]),
                    do.over(rank, 0.2, status=1))), do.stopped(1, at_s=1.2)],
        cause="hang",
    ),
    "a thread that died before the exit of its rank is told": Story(
        events=[do.exits(1, uncaught=False), do.raised(1, -1, "KeyError", "'label'", how="thread"),
                do.over(1, 0, status=5)],
        cause="exit", said=["had died of KeyError: 'label' (train.py:88 in step)"],
    ),
    "a thread that died is told of the rank that hung": Story(
        events=[do.reached(2, 1, 2), *TIMED_OUT, do.stopped(1),
                do.raised(1, -20, "ValueError", "truncated record", how="thread")],
        cause="hang", said=["had died of ValueError: truncated record"],
    ),
    "an exception that was raised from another one names the first": Story(
        events=[do.died(1, 0, "RuntimeError", "cannot load config", handled=[
            {"type": "FileNotFoundError", "message": "[Errno 2] a.yaml", "frames": [LOCK]}])],
        cause="exception",
        said=["cannot load config (train.py:88 in step); raised from FileNotFoundError: [Errno 2] "
              "a.yaml (train.py:88 in step)"],
    ),
    "an interrupt of a rank that no launcher was sent names its line": Story(
        events=[do.raised(1, 0, "KeyboardInterrupt", ""), do.over(1, 0.1, number=signal.SIGINT),
                do.died(0, 0.3, "RuntimeError", BROKEN), do.reached(2, 1)],
        cause="interrupted", line=AT_88,
    ),
    "torch that could not write does not say why for sure": Story(
        events=[do.died(1, 0, "RuntimeError", "basic_ios::clear: iostream error")],
        cause="disk_full", certain=False, said=["a full disk, a quota, or a limit (ulimit -f)"],
    ),
    # DataLoader workers
    "an error of a loader worker is named with its own line": Story(
        events=[do.died(1, 0, "KeyError", RAISED_IN_WORKER.format(
                    source="    return row['label']\n           ~~~^^^\n")),
                do.died(2, 1, "KeyError", RAISED_IN_WORKER.format(source=""))],
        cause="exception", ranks=(1, 2),
        line=("data.py:17 in __getitem__", "return row['label']"),
        said=["of the same: its DataLoader worker 0 raised KeyError"],
    ),
    "the end of a loader worker is not blamed on the line where its signal met the rank": Story(
        events=[do.line("node0", WORKER_ENDED), do.died(1, 0, "RuntimeError", KILLED_WORKER)],
        cause="killed", line=(None, None), said=[WORKER_SAID],
    ),
    "a loader worker that the kernel killed": Story(
        events=[do.line("node0", {**WORKER_ENDED, "oom": {"kills": 1}}),
                do.died(1, 0, "RuntimeError", KILLED_WORKER)],
        cause="out_of_memory", line=(None, None), said=[WORKER_SAID],
    ),
    "the end of a loader worker is told by the exception that knows its signal": Story(
        events=[do.died(1, 0, "RuntimeError", "DataLoader worker (pid(s) 9) exited unexpectedly",
                        handled=[{"type": "RuntimeError", "message": KILLED_WORKER,
                                  "frames": [LOCK]}])],
        cause="killed", said=[WORKER_SAID],
    ),
    "a connection to a loader worker that breaks is no waiting for other ranks": Story(
        events=[do.died(1, 0, "ConnectionResetError", "[Errno 104] Connection reset by peer",
                        frames=(LOCK, LOADER))],
        cause="exit", said=["one of its DataLoader workers ended; why is not known"],
    ),
    **{
        f"a loader worker whose connection breaks ended by {said}": Story(
            events=[do.died(1, 0, "ConnectionResetError", "[Errno 104] Connection reset by peer",
                            frames=(LOCK, LOADER), children=[[70, os.CLD_EXITED, 0], child])],
            cause=cause, said=[f"its DataLoader worker (pid 71) {said}"],
        )
        for child, cause, said in (
            ([71, os.CLD_KILLED, signal.SIGKILL], "killed", "was ended by SIGKILL"),
            ([71, os.CLD_DUMPED, signal.SIGSEGV], "crash", "was ended by SIGSEGV"),
            ([71, os.CLD_EXITED, 7], "exit", "ended with exit status 7; why is not known"),
        )
    },
    "what a rank began in its last moments is not known by what it noted before": Story(
        events=[do.began(1, *["all_reduce"] * 90), do.beats(0, (-30, 7), (-0.5, 60)),
                do.died(1, 0, "RuntimeError", "bad value"),
                do.died(0, 0.2, "RuntimeError", GLOO), do.stopped(2)],
        cause="exception", unsaid=["rank 0 waited in"],
    ),
    "what a rank began long before it ended is known": Story(
        events=[do.began(1, *["all_reduce"] * 90), do.beats(0, (-30, 7), (-9, 60)),
                do.died(1, 0, "RuntimeError", "bad value"),
                do.died(0, 0.2, "RuntimeError", GLOO), do.stopped(2)],
        cause="exception", said=["rank 0 waited in all_reduce 60"],
    ),
    "a thread that died before the exception of its rank is told": Story(
        events=[do.raised(1, -5, "KeyError", "'label'", how="thread", after=("_queue.Empty", "")),
                do.over(1, 0, status=1)],
        cause="exception", said=["Empty (", "had died of KeyError: 'label' (train.py:88 in step)"],
        remedy="fix what ended its thread",
    ),
    **{
        f"{kind} is not mended at the line that raises it": Story(
            events=[do.died(1, 0, kind, message)], cause="exception", remedy=remedy)
        for kind, message, remedy in (
            ("ModuleNotFoundError", "No module named 'flash_attn'", "install what it names"),
            ("RuntimeError", "loss is nan at step 200", "find where it becomes NaN"),
        )
    },
    # signals
    "a kill whose sender nobody saw is not blamed on somebody outside": Story(
        events=[do.over(1, 0, number=signal.SIGKILL)], cause="killed",
        said=["the sender is not known"], unsaid=["outside"], remedy="os.kill",
    ),
    **{
        f"a limit that the kernel keeps by a signal is nobody's doing, {limit}": Story(
            events=[do.over(1, 0, number=number)], cause="killed", certain=True, said=[limit],
            remedy=limit)
        for number, limit in ((signal.SIGXCPU, "ulimit -t"), (signal.SIGXFSZ, "ulimit -f"))
    },
    "a rank that signals its own launcher is named": Story(
        events=[do.signalled(0, from_pid=101, from_command="python train.py"),
                do.stopped(at_s=0.1)],
        cause="signal", said=["the job ended itself: rank 1 sent SIGTERM"], status=ENDED,
    ),
    "a sender in a folder named after Slurm is not Slurm": Story(
        events=[do.signalled(5, from_command="python /home/me/slurm-jobs/stop.py"),
                do.stopped(at_s=5.1)],
        cause="signal", ranks=(), status=ENDED,
    ),
    "a signal that was ignored ended nobody": Story(
        events=[do.signalled(5, signal.SIGINT), do.signalled(80),
                *(do.stopped(rank, at_s=80.1) for rank in range(3))],
        cause="signal", ranks=(), said=["SIGTERM"], unsaid=["SIGINT"], status=ENDED,
    ),
    "ranks that a signal reaches one by one end alike": Story(
        events=[do.signalled(5), *(do.stopped(rank, at_s=5 + rank) for rank in range(3))],
        cause="signal", ranks=(), roles="sss", unsaid=["launcher"], status=ENDED,
    ),
    "a signal after a failure is not its cause": Story(
        events=[do.raised(1, 0, "ValueError", "bad"), do.signalled(9, signal.SIGINT),
                do.stopped(at_s=10, number=signal.SIGINT)],
        cause="exception",
    ),
    "Slurm's time limit": _by_slurm("time_limit", 5),
    "an end long before Slurm's time limit": _by_slurm("cancelled", 5000),
    "a job that Slurm ends": _by_slurm("cancelled", 5000, "COMPLETING"),
    "a job that Slurm preempts": _by_slurm("preempted", 5000, "PREEMPTED"),
    "a job that Slurm requeues": _by_slurm("requeued", 5000, "REQUEUED"),
    "a signal to a job that moved": Story(
        events=[do.signalled(-59), do.stopped(at_s=-58.9)], cause="signal", ranks=(), status=ENDED,
        unsaid=["no step had ended", "--hang-limit"],
    ),
    "a signal to a job that stood still says so": Story(
        events=[do.signalled(0), do.stopped(at_s=0.1)], cause="signal", ranks=(), status=ENDED,
        said=["no step had ended in the 60.0 s before"], remedy="--hang-limit",
    ),
    "an interruption of a job that stood still is not all": Story(
        events=[do.signalled(0, signal.SIGINT), do.stopped(at_s=0.1, number=signal.SIGINT)],
        cause="interrupted", ranks=(), status=ENDED, said=["no step had ended in the 60.0 s"],
        remedy="see where each rank stood",
    ),
    # nodes and ranks that are missing
    "a node that fell silent is lost": Story(
        events=[*TIMED_OUT, do.line("node0", {"type": "job_end", "pid": 9, "wall_ns": T0 + S,
                                              "status": 1}), do.line("node1", {"type": "agent"})],
        cause="node_lost", ranks=(1, 3), said=["node1"], job={"ranks": 4, "hosts": 2},
    ),
    "a rank that was never seen is named": Story(
        events=[do.died(rank, 0, "RuntimeError", JOINED) for rank in (0, 1)],
        cause="never_started", ranks=(2,), job={"ranks": 2, "world": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_a_death_is_told_with_its_cause_and_who_it_began_with(tmp_path: Path, name: str) -> None:
    story = STORIES[name]
    job = Job(tmp_path / "run", **story.job)
    for event in story.events:
        event(job)
    job.ended(*story.status)
    death = job.death()
    assert found(death) == (story.cause, story.ranks)
    assert [text for text in story.said if text not in death.headline] == [], death.headline
    assert not [text for text in story.unsaid if text in f"{death.headline} {death.remedy}"]
    assert story.remedy in death.remedy
    assert story.certain in (None, death.certain)
    assert story.message in (death.message or "")
    assert story.step in (None, death.step)
    if story.roles:
        assert "".join(fate.role[0] for fate in death.fates) == story.roles
    assert story.line in (None, (death.line, death.source))


@pytest.mark.parametrize("ran_on", [True, False])
def test_killed_launcher_leaves_its_ranks(job: Job, ran_on: bool) -> None:
    for rank in range(3) if ran_on else ():
        job.exits(rank, uncaught=False)
    manifest = read_manifest(job.run)
    write_manifest(job.run, replace(manifest, job_pid=50))
    job.line("node0", {"type": "job_end", "pid": 50, "wall_ns": T0, "status": None, "signal": 9})
    job.ended(None, "SIGKILL")
    death = job.death()
    assert found(death) == ("killed", ())
    assert death.headline.startswith(
        "the first process of the job died, and left its ranks: killed"
    )


def test_what_was_printed_before_a_death_is_a_witness_whose_rank_may_not_be_known(job: Job) -> None:
    job.line("node0", {"type": "output", "output": 0, "file": "a", "ranks": [0, 1], "skipped": 0})
    job.line("node0", {"type": "output", "output": 1, "file": "b", "ranks": [2], "skipped": 5})
    for output, at_s, kind, text in (
        (0, -30, "loss", "step 7 loss nan"), (0, -20, "loss", "step 8 loss nan"),
        (1, -2, "nccl", "NCCL WARN x"), (1, 1, "traceback", "ValueError: bad sample (a.py:1)"),
        (1, 60, "nccl", "NCCL WARN much later"), (0, -10, "rate", "1 it/s"), (2, "x", None, 7),
    ):  # fmt: skip
        wall_ns = T0 + at_s * S if isinstance(at_s, int) else at_s
        job.line("node0", {"type": "printed", "output": output, "rank": None, "wall_ns": wall_ns,
                           "kind": kind, "text": text, "step": 7})  # fmt: skip
    job.died(1, 0, "ValueError", "bad sample")
    found = [(each.kind, each.rank, each.text) for each in job.death().witnesses]
    assert found == [("loss", None, "step 7 loss nan"), ("nccl", 2, "NCCL WARN x")]


@pytest.mark.parametrize(("kind", "message", "printed", "advice", "said"), [
    ("SystemExit", "loss is nan at 110", [], "STOP", "it ended on a NaN"),
    ("SystemExit", "1", ["step 110 loss nan", "stopping"], "STOP", "it ended on a NaN"),
    ("FloatingPointError", "Non-finite loss", [], "STOP", "it ended on a NaN"),
    ("SystemExit", "1", ["best loss: inf"], "STOP", "the program ended itself at train.py:88"),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (32x60 and 64x64)", [],
     "STOP", "a restart helps only if the order of the data or a damaged read was to blame"),
    ("json.decoder.JSONDecodeError", "Expecting ',' delimiter", [],
     "STOP", "an error of the program or its data at train.py:88 in step: "),
    ("RuntimeError", "cuDNN error", [], "RESTART", "a second death at train.py:88 in step is"),
    ("ConnectionError", "no answer", [], "RESTART", "if the machine, the network or"),
    ("AssertionError", "Caught AssertionError in DataLoader worker process 0.\nOriginal "
     "Traceback (most recent call last):\n  File \"/home/me/data.py\", line 17, in get\n"
     "AssertionError: bad sample", [],
     "STOP", "an error of the program or its data at data.py:17 in get"),
])  # fmt: skip
def test_first_death_that_comes_again_is_told_so(
    job: Job, kind: str, message: str, printed: list[str], advice: str, said: str
) -> None:
    how = "exit_call" if kind == "SystemExit" else "exception"
    job.raised(1, 0, kind, message, how=how)
    job.over(1, 0, status=1, stdout=printed)
    found = advice_of(job)
    assert (found.action, said in found.text) == (advice, True), found.text


@pytest.mark.parametrize(("kind", "message", "ranks", "step", "action"), [
    ("RuntimeError", "Given groups=1, weight of size [8, 3]", 2, 0, "STOP"),
    ("RuntimeError", "Given groups=1, weight of size [8, 3]", 2, 5, "RESTART"),
    ("RuntimeError", "Given groups=1, weight of size [8, 3]", 1, 0, "RESTART"),
    ("RuntimeError", "Failed to compile the incompatible model", 2, 0, "STOP"),
    ("pkg.VisionError", "no such layer", 2, 0, "STOP"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", 2, 0, "RESTART"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/a'", 2, 0, "RESTART"),
    ("requests.exceptions.ConnectTimeout", "pool", 2, 0, "RESTART"),
    ("torch.distributed.DistNetworkError", "the client socket failed", 2, 0, "RESTART"),
])  # fmt: skip
def test_an_error_of_all_ranks_before_their_first_step_is_the_programs_or_the_machines(
    tmp_path: Path, kind: str, message: str, ranks: int, step: int, action: str
) -> None:
    job = Job(tmp_path / "run", ranks=2, steps=step)
    for rank in range(2 - ranks, 2):
        job.died(rank, 0, kind, message)
    found = advice_of(job)
    assert found.action == action, found.text


@pytest.mark.parametrize(("kind", "how", "root", "advice"), [
    ("SystemExit", "exit_call", "ConnectionError", "RESTART"),
    ("SystemExit", "exit_call", "KeyError", "STOP"),
    ("SystemExit", "exit_call", "NameError", "STOP"),
    ("ValueError", "exception", "OSError", "RESTART"),
    ("RuntimeError", "exception", "KeyError", "STOP"),
])  # fmt: skip
def test_advice_goes_by_what_an_exit_or_an_exception_was_raised_from(
    job: Job, kind: str, how: str, root: str, advice: str
) -> None:
    cause = {"type": root, "message": "shard 9", "frames": [["/home/me/data.py", 17, "read"]]}
    job.raised(1, 0, kind, "1", how=how, handled=[cause])
    job.over(1, 0, status=1)
    found = advice_of(job)
    assert found.action == advice, found.text


def test_launcher_that_leaves_by_sys_exit_is_not_the_cause(job: Job) -> None:
    job.run.uncaught.mkdir()
    error = {"type": "SystemExit", "message": "1", "frames": [LOCK]}
    ended = [{"how": "exit_call", "thread": None, "wall_ns": T0, "errors": [error]}]
    path = job.run.uncaught_file("node0", 50)
    write_json(path, {"host": "node0", "pid": 50, "ended": ended}, below=job.run.root)
    job.line("node0", {"type": "job_end", "pid": 50, "wall_ns": T0, "status": 1, "signal": None})
    job.died(0, -1, "RuntimeError", BROKEN)
    assert job.death().cause == "unknown"


@pytest.mark.parametrize("status", [0, 4, None])
def test_call_of_sys_exit_that_was_caught_ended_nothing(job: Job, status: int | None) -> None:
    job.exits(1, uncaught=False)
    job.raised(1, 0, "SystemExit", "3", how="exit_call")
    job.over(1, 0, status=status)
    deaths = job.deaths()
    assert all("train.py:88" not in death.headline for death in deaths)
    assert "1" in {str(rank) for death in deaths for rank in death.ranks} or status != 4


def test_death_before_a_restart_that_never_trained_is_told(job: Job) -> None:
    job.died(1, 0, "RuntimeError", "shard 17 is damaged")
    job.stopped(0, 2)
    job.signalled(105)
    job.stopped(at_s=105.1, attempt=1)
    hang = {"name": "reaction-hang-0", "trigger": "hang", "wall_ns": T0 + 100 * S,
            "since_wall_ns": T0 + 2 * S, "reason": "no first step for 98 s"}  # fmt: skip
    job.line("node0", {"type": "reaction", "action": "snapshot", **hang})
    job.line("node0", {"type": "reaction_result", "name": "reaction-hang-0", "state": "done",
                       "suspects": [], "all_at": "a.py:7 in join"})  # fmt: skip
    job.ended(None, "SIGTERM")
    first, last = job.deaths()
    assert (first.final, found(first)) == (False, ("exception", (1,)))
    assert (last.final, found(last)) == (True, ("exception", (1,)))
    assert "shard 17 is damaged" in last.headline
    assert "; start 2 never trained: the job was ended from outside (SIGTERM" in last.headline
    assert "all ranks hung at a.py:7 in join" in last.headline
    assert [fate.role for fate in last.fates] == ["stopped", "cause", "stopped"]
    starts = RunFrames(job.run.root).goodput().starts
    assert "shard 17" in str(starts[0].why)
    assert "shard 17" not in str(starts[1].why)
    assert "no step was seen" in str(starts[1].why)


def test_restart_that_dies_of_something_else_is_told_of_that_and_is_no_second_death_of_a_line(
    job: Job,
) -> None:
    job.died(1, 0, "FileNotFoundError", "shard-50 is missing")
    job.stopped(0, 2)
    text = "Gloo connectFullMesh failed with pair.cc:152 timed out connecting: Connection refused"
    meeting = [["/home/me/base.py", 5, "ddp"]]
    job.raised(1, 30, "RuntimeError", text, meeting, attempt=1)
    job.over(1, 31, status=1, attempt=1)
    job.stopped(0, 2, at_s=31.2, attempt=1)
    *_, last = job.deaths()
    assert found(last) == ("exception", (1,))
    assert last.headline.endswith(
        "; start 2 never trained: rank 1 was ended by gloo, which could not connect the ranks"
    )
    why = str(RunFrames(job.run.root).goodput().starts[-1].why)
    assert "RuntimeError: Gloo connectFullMesh failed" in why
    assert "base.py:5 in ddp" in why
    assert "never came" not in why, "an address of each rank was there"
    assert "waited for each other" not in last.remedy
    advice = advice_of(job)
    assert (advice.action, len(advice.attempts)) == ("RESTART", 1)
    for attempt in (2, 3):
        job.raised(1, 30 * attempt, "RuntimeError", text, meeting, attempt=attempt)
        job.over(1, 30 * attempt + 1, status=1, attempt=attempt)
        job.stopped(0, 2, at_s=30 * attempt + 1.2, attempt=attempt)
    advice = advice_of(job)
    assert (advice.action, advice.reason) == ("STOP", "never_trained")
    *_, last = job.deaths()
    assert found(last) == ("exception", (1,))
    assert "; starts 2 to 4 never trained: rank 1 was ended by gloo, which" in last.headline


@pytest.mark.parametrize(("kind", "message", "cause"), [
    ("MemoryError", "", "out_of_memory"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", "out_of_memory"),
    ("RuntimeError", "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible "
     "that dataloader's workers are out of shared memory.", "shared_memory_full"),
    ("OSError", "[Errno 28] No space left on device: 'model.pt'", "disk_full"),
    ("KeyboardInterrupt", "", "interrupted"),
    ("RuntimeError", "std::bad_alloc", "out_of_memory"),
    ("RuntimeError", "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
     "disk_full"),
    ("RuntimeError", "DataLoader worker (pid 9) is killed by signal: Killed. ", "killed"),
    ("RuntimeError", "DataLoader worker (pid 9) is killed by signal: Segmentation fault. ",
     "crash"),
    ("RuntimeError", "DataLoader worker (pid(s) 9, 11) exited unexpectedly", "exit"),
])  # fmt: skip
def test_texts_of_exceptions_tell_the_kind(job: Job, kind: str, message: str, cause: str) -> None:
    job.died(1, 0, kind, message)
    assert job.death().cause == cause


def test_snapshot_of_a_job_that_stood_still_says_who_held_it_up(job: Job) -> None:
    """Somebody looked, and then interrupted it: the hang is what it died of."""
    began_ns = CLOCK.wall_ns + 60 * S
    suspect = {"rank": 1, "reason": "the others wait for it", "doing": "train.py:19 in main",
               "certain": True}  # fmt: skip
    taken = {"wall_ns": began_ns - 20 * S, "suspects": [suspect], "moves": False, "saving": []}
    job.line("node0", {"type": "signal", "signal": 2, "wall_ns": began_ns, "from_pid": 7})
    folder = job.run.snapshots / "20260101-000000"
    folder.mkdir(parents=True)
    write_json(folder / "snapshot.json", taken, below=job.run.root)
    job.stopped(at_s=(began_ns - T0) / S + 0.1, number=signal.SIGINT)
    job.ended(None, "SIGINT")
    death = job.death()
    assert found(death) == ("hang", (1,))
    assert "rank 1 hung, at train.py:19 in main" in death.headline
    assert "then ended by SIGINT" in death.headline
    assert [fate.role for fate in death.fates] == ["stopped", "cause", "stopped"]
    assert death.died_ns is not None
    assert abs(death.died_ns - CLOCK.wall_ns) < S, "the hang's begin, not the time of the look"


def hung(
    job: Job, suspects: Sequence[Mapping[str, object]], stacks: Sequence[object] = ()
) -> Death:
    """A hang that a snapshot looked at, and that somebody ended later."""
    folder = job.run.snapshots / "20260101-000000"
    folder.mkdir(parents=True)
    ranks = [{"rank": rank, "stack": stack} for rank, stack in enumerate(stacks)]
    path = folder / "snapshot.json"
    write_json(path, {"wall_ns": T0 + 20 * S, "ranks": ranks}, below=job.run.root)
    line = {"name": "reaction-hang-0", "action": "snapshot", "wall_ns": T0 + 20 * S}
    noticed = {"trigger": "hang", "since_wall_ns": T0, "reason": "no step for 20 s"}
    result = {"state": "done", "moves": False, "suspects": suspects}
    job.line("node0", {"type": "reaction", **line, **noticed})
    job.line("node0", {"type": "reaction_result", **line, **result,
                       "path": f"/moved/{folder.name}/{path.name}"})  # fmt: skip
    job.signalled(60)
    job.stopped(at_s=60.1)
    job.ended(*ENDED)
    return job.death()


@pytest.mark.parametrize(("odd", "ranks", "where"), [
    ((1,), (1,), "; ranks 0 and 2 at train.py:88 in step; rank 1 at train.py:90 in step"),
    ((0, 1, 2), (), "; rank 0 at train.py:88 in step; rank 1 at train.py:89"),
])  # fmt: skip
def test_hang_of_collectives_that_contradict_each_other_names_every_line(
    job: Job, odd: Sequence[int], ranks: Sequence[int], where: str
) -> None:
    reason = "collective 7 of group 0: rank 0 all_reduce, rank 1 barrier (kind differs)"
    suspects = [{"rank": r, "reason": reason, "doing": "", "certain": True} for r in odd]
    lines = (88, 90, 88) if ranks else (88, 89, 90)
    stacks = [[[LOCK[0], line, "step"], BACKWARD[1]] for line in lines]
    death = hung(job, suspects, stacks)
    assert found(death) == ("mismatch", ranks)
    assert f"{reason}{where}" in death.headline
    assert "then ended by SIGTERM" in death.headline
    assert death.remedy.startswith("let all ranks issue the same collectives")
    advice = advice_of(job)
    assert (advice.headline, advice.reason) == ("STOP", "program")


def test_ranks_that_a_snapshot_names_for_one_reason_do_not_contradict_each_other(job: Job) -> None:
    late = {"reason": "it has begun 5 collectives of group 0, rank 2 6", "certain": True}
    death = hung(job, [{"rank": r, "doing": "train.py:88 in step", **late} for r in (0, 1)])
    assert found(death) == ("hang", (0,))
    assert "contradict" not in death.headline
    assert death.remedy.startswith("see why train.py:88 in step does not end: ")


def test_ranks_that_a_hung_one_held_up_are_told_with_what_they_waited_in(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.reached(6, 5, 6)
    job.raised(0, 60.2, "KeyboardInterrupt", "")
    reason = "it has begun 5 collectives of group 0, ranks 0 and 2 6"
    death = hung(job, [{"rank": 1, "reason": reason, "doing": "train.py:88 in step"}])
    told = [(who, text) for who, _, text in grouped_fates(death)]
    assert told[1:] == [
        ("ranks 0 and 2", "waited in all_reduce 6, ended with the job, 60.1 s later")
    ]


@pytest.mark.parametrize(("age_s", "shown"), [(10, "wait(step)  # for a file"), (-10, None)])
@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_code_of_the_line_is_told_where_the_file_is_what_ran(
    job: Job, tmp_path: Path, kind: str, age_s: int, shown: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def step():\n    wait(step)  # for a file\n")
    os.utime(script, ns=(0, CLOCK.wall_ns - age_s * S))
    suspect = {"rank": 1, "reason": "the others wait", "doing": "train.py:2 in step"}
    if kind == "hang":
        death = hung(job, [suspect], [[[str(script), 2, "step"]]] * 3)
    else:
        job.crashed(1, 0, 1, f"2\tstep\t{script}")
        job.over(1, 0, number=signal.SIGSEGV)
        death = job.death()
    assert (death.cause, death.line, death.source) == (kind, "train.py:2 in step", shown)


def test_a_rank_that_hung_is_told_with_its_thread_that_died_before(job: Job) -> None:
    job.raised(0, -5, "ValueError", "bad record", how="thread")
    why = {"reason": "it is the only rank, and no step of it ends", "certain": True}
    death = hung(job, [{"rank": 0, "doing": "train.py:88 in step", **why}])
    assert found(death) == ("hang", (0,))
    assert death.remedy.endswith("/snapshot.json has its stacks")
    assert "had died of ValueError: bad record (train.py:88 in step); then" in death.headline


@pytest.mark.parametrize(("beside", "wait", "frames", "cause"), [
    ("; its thread writer is at train.py:12 in write", "l", 1, "deadlock"),
    ("", "l", 1, "hang"),
    ("; its thread writer is at train.py:12 in write", "s", 1, "hang"),
    ("; its thread writer is at train.py:12 in write", "l", 2, "hang"),  # of a queue's
])  # fmt: skip
def test_rank_whose_threads_wait_for_each_others_locks_is_told_so(
    job: Job, beside: str, wait: str, frames: int, cause: str
) -> None:
    stack = ((LOCK[0], 88, "step"), ("/usr/lib/python3.11/queue.py", 171, "get"))[:frames]
    samples = [(T0 - CLOCK.wall_ns + CLOCK.mono_ns + 30 * S, stack)]
    write_stacks(job.run.rank(1).stacks, samples, pid=101, kernel_waits=wait)
    doing = f"train.py:88 in step{beside}"
    suspect = {"rank": 1, "reason": "the others wait for it", "doing": doing, "certain": True}
    death = hung(job, [suspect])
    assert found(death) == (cause, (1,))
    assert death.line == "train.py:88 in step"
    is_locked = cause == "deadlock"
    assert ("in the same order in all threads" in death.remedy) == is_locked
    assert death.certain != is_locked
    advice = advice_of(job)
    assert advice.action == "RESTART"
    assert ("a second death at that line is a STOP" in advice.text) == is_locked


@pytest.mark.parametrize(("lines", "said"), [
    ([7, *[9] * 33], "data.py:9 in read, 2.00 s before its end, as in every sample of the 16."),
    ([9] * 30 + [7, 9, 9], "data.py:9 in read, 2.00 s before its end; "),
])  # fmt: skip
def test_rank_that_stood_at_a_line_until_its_end_is_told_for_how_long(
    job: Job, lines: Sequence[int], said: str
) -> None:
    at = T0 - CLOCK.wall_ns + CLOCK.mono_ns - 2 * S
    samples = [(at - place * S // 2, (("/home/me/data.py", line, "read"),))
               for place, line in enumerate(reversed(lines))]  # fmt: skip
    write_stacks(job.run.rank(1).stacks, samples[::-1], pid=101)
    job.reached(9, 8, 9)
    for rank in (0, 2):
        job.died(rank, -1, "RuntimeError", GLOO)
    job.stopped(1, at_s=0)
    death = job.death()
    assert found(death) == ("hang", (1,))
    assert f"last sample: {said}" in death.headline
    assert "snapshot" not in death.remedy, "none was taken"


@pytest.mark.parametrize("said", ["is killed by signal: Killed. ", "exited unexpectedly"])
def test_last_sample_of_a_worker_that_ended_is_told(job: Job, said: str) -> None:
    at = T0 - CLOCK.wall_ns + CLOCK.mono_ns - 2 * S
    for number, line in enumerate((7, 9)):
        write_stacks(
            job.run.rank(1).worker_stacks(number), [(at, (("/home/me/data.py", line, "read"),))],
            pid=900 + number, worker=number,
        )  # fmt: skip
    job.died(1, 0, "RuntimeError", f"DataLoader worker (pid 901) {said}")
    assert "last sample of the worker: data.py:9 in read, 2.00 s before" in job.death().headline


def test_later_start_of_the_same_slurm_job_tells_a_requeue(job: Job) -> None:
    job.line("node0", {
        "type": "signal", "signal": 15, "wall_ns": T0, "from_pid": 77, "slurm_job": "12",
        "from_command": "slurmstepd: [12.batch]", "slurm_end_s": T0 // S + 5000,
    })  # fmt: skip
    job.stopped(at_s=0.1)
    for run, restart in ((job.run, "0"), (write_run(job.run.root.parent / "next"), "1")):
        start = {"slurm_job": "12", "slurm_restart": restart}
        write_manifest(run, replace(read_manifest(run), environment=start, signal="SIGTERM"))
        if restart == "0":
            death = job.death()
            assert (death.cause, death.certain) == ("cancelled", False)
            assert "scancel, scontrol requeue" in death.headline
    assert (job.death().cause, job.death().certain) == ("requeued", True)


def test_each_start_has_its_own_death_and_goodput_leaves_out_what_was_lost(job: Job) -> None:
    job.died(1, 0, "ValueError", "bad")
    job.stopped(0, 2)
    for rank in range(3):
        job.start(rank, attempt=1)
        job.over(rank, 700, status=0, attempt=1)
    job.ended(0)
    (death,) = job.deaths()
    assert (death.generation, death.final, found(death)) == (0, False, ("exception", (1,)))
    frames = RunFrames(job.run.root)
    first, second = frames.goodput().starts
    assert (first.kept_steps, first.uncertain_steps) == (0, 3), "no checkpoint tells"
    assert (second.kept_steps, second.lost_steps, second.why) == (3, 0, None)
    assert frames.goodput().lost_steps == (0, 3)


@pytest.mark.parametrize("line", [
    {"type": "process_end", "pid": "x", "wall_ns": T0},
    {"type": "process_end", "pid": 101, "wall_ns": T0, "signal": 1 << 40, "status": -5},
    {"type": "process_end", "pid": 101, "wall_ns": T0, "rank": [1], "oom": "yes", "status": 1},
    {"type": "signal", "signal": {}, "wall_ns": None},
])  # fmt: skip
def test_damaged_lines_are_passed_over(job: Job, line: dict[str, object]) -> None:
    job.line("node0", line)
    job.run.uncaught.mkdir()
    (job.run.uncaught / "a.json").write_text(
        '{"host": "node0", "pid": 1, "ended": [{"errors": 5}]}'
    )
    (job.run.uncaught / "b.json").write_text("{")
    assert isinstance(job.deaths(), list)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"12", b"x\ny\nz", b"9" * 5000])
def test_damaged_text_of_native_code_is_read_as_far_as_it_goes(job: Job, content: bytes) -> None:
    job.terminated(1, 0, "a", "b")
    next(job.run.uncaught.glob("*.terminate")).write_bytes(content)
    assert job.death().ranks == (1,)


def test_job_that_ended_well_has_no_death(job: Job) -> None:
    for rank in range(3):
        job.over(rank, 1, status=0)
    job.ended(0)
    assert job.deaths() == []


def test_rank_that_others_wait_for_or_that_somebody_ends_is_not_said_to_have_waited(
    job: Job,
) -> None:
    job.signalled(0)
    job.reached(2, 1)
    job.stopped(0, 1, at_s=0.1)
    job.over(2, 0, status=1)
    job.ended(None, "SIGTERM")
    assert [fate.waited_in for fate in job.death().fates] == [None, None, None]


def test_fate_of_a_rank_has_its_last_lines_and_its_end(job: Job) -> None:
    job.over(0, 0, status=0)
    job.over(1, 0, status=3, stdout=["license lost"])
    fates = job.death().fates
    assert fates[1].printed == ("license lost",)
    assert fates[0].what == "ended with exit status 0"


def test_process_that_had_not_reported_in_crashed_all_the_same(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ranks=0, world=1)
    job.run.uncaught.mkdir()
    (job.run.uncaught / "node0-700.terminate").write_text(f"{T0}\nc10::Error\n{ILLEGAL}")
    job.line("node0", {"type": "process_end", "pid": 700, "rank": None, "parent": 1,
                       "wall_ns": T0 + S, "status": None, "signal": 6})  # fmt: skip
    assert found(job.death()) == ("crash", ())
