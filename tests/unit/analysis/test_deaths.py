"""Who died first, and of what: told from what ranks and nodes leave behind."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from haiprof.diagnosis.restart_advice import restart_advice
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.writer import LineWriter, write_json
from tests.unit.analysis.recorded import CLOCK, spans_of, write_rank, write_run

S = 1_000_000_000
T0 = CLOCK.wall_ns + 60 * S
GLOO = "[/__w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"
BROKEN = "[/__w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:57741"
LOCK = ["/home/me/train.py", 88, "step"]
BACKWARD = [LOCK, ["/x/site-packages/torch/_tensor.py", 5, "backward"]]


class Job:
    """A run directory of some ranks, whose ends are written one by one."""

    def __init__(self, root: Path, *, ranks: int = 3, hosts: int = 1, world: int = 0) -> None:
        self.run = write_run(root)
        self.hosts = [f"node{number}" for number in range(hosts)]
        for rank in range(ranks):
            self.start(rank, world=world or ranks)
        self.ended(1)

    def start(self, rank: int, *, attempt: int = 0, world: int = 3) -> None:
        clock = {"wall_ns": CLOCK.wall_ns + attempt * 600 * S, "mono_ns": CLOCK.mono_ns}
        write_rank(
            self.run, spans_of("F B O F B O F B O"), rank=rank, attempt=attempt, restart=attempt,
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
        **more: object,
    ) -> None:  # fmt: skip
        host, pid = self.host(rank), self.pid(rank, attempt)
        self.run.uncaught.mkdir(exist_ok=True)
        error = {"type": kind, "message": message, "frames": list(frames), "source": "x = y()"}
        entry = {
            "how": how,
            "thread": None,
            "wall_ns": T0 + round(at_s * S),
            "errors": [error, *handled],
        }
        path = self.run.uncaught_file(host, pid)
        write_json(path, {
            "host": host, "pid": pid, "rank": rank, "restart": attempt, "ended": [entry], **more,
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


# -- exceptions of native code ---------------------------------------------------------------------

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


def terminated(job: Job, rank: int, at_s: float, kind: str, message: str) -> None:
    """As in_job/terminate.cpp leaves it; the process then ends by SIGABRT."""
    job.run.uncaught.mkdir(exist_ok=True)
    path = job.run.uncaught / f"{job.host(rank)}-{job.pid(rank)}.terminate"
    path.write_text(f"{T0 + round(at_s * S)}\n{kind}\n{message}")
    job.over(rank, at_s + 0.5, number=signal.SIGABRT)


def test_watchdog_that_ends_a_rank_from_native_code_makes_it_a_victim(job: Job) -> None:
    for rank in (0, 1, 2):
        job.began(rank, *["all_reduce"] * (240 + (rank != 1)))
    for rank in (0, 2):
        terminated(job, rank, 600, "c10::DistBackendError", WATCHDOG)
    job.over(1, 601, number=signal.SIGTERM)
    death = job.death()
    assert death.ranks == (1,)
    assert "rank 1 did not come where the others waited" in death.headline
    assert "NCCL's watchdog" in death.headline


def test_error_of_a_kernel_that_ends_a_rank_from_native_code_is_the_cause(job: Job) -> None:
    terminated(job, 1, 0, "c10::AcceleratorError", ILLEGAL)
    for rank in (0, 2):
        terminated(job, rank, 600, "c10::DistBackendError", WATCHDOG)
    death = job.death()
    assert found(death) == ("crash", (1,))
    assert death.headline.startswith(
        "rank 1 died first: it aborted itself (SIGABRT): c10::AcceleratorError: CUDA error: an "
        "illegal memory access was encountered"
    )
    assert "asynchronously reported" in (death.message or "")


def test_process_that_had_not_reported_in_crashed_all_the_same(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ranks=0, world=1)
    job.run.uncaught.mkdir()
    (job.run.uncaught / "node0-700.terminate").write_text(f"{T0}\nc10::Error\n{ILLEGAL}")
    job.line("node0", {"type": "process_end", "pid": 700, "rank": None, "parent": 1,
                       "wall_ns": T0 + S, "status": None, "signal": 6})  # fmt: skip
    assert found(job.death()) == ("crash", ())


def test_exception_in_python_comes_before_what_native_code_says_at_its_exit(job: Job) -> None:
    job.raised(1, 0, "RuntimeError", "bad sample 17")
    terminated(job, 1, 1, "", "terminate called without an active exception")
    for rank in (0, 2):
        job.died(rank, 25, "RuntimeError", GLOO)
    death = job.death()
    assert found(death) == ("exception", (1,))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"12", b"x\ny\nz", b"9" * 5000])
def test_damaged_text_of_native_code_is_read_as_far_as_it_goes(job: Job, content: bytes) -> None:
    terminated(job, 1, 0, "a", "b")
    next(job.run.uncaught.glob("*.terminate")).write_bytes(content)
    assert job.death().ranks == (1,)


# -- one rank fails, the others wait ---------------------------------------------------------------


def test_job_that_ended_well_has_no_death(job: Job) -> None:
    for rank in range(3):
        job.over(rank, 1, status=0)
    job.ended(0)
    assert job.deaths() == []


def test_exception_is_named_with_its_line_and_the_others_as_its_victims(job: Job) -> None:
    for rank in (0, 1, 2):
        job.began(rank, *["all_reduce"] * (240 + (rank != 1)))
    job.died(1, 0, "RuntimeError", "shape mismatch", frames=BACKWARD)
    job.died(0, 25, "RuntimeError", GLOO)
    job.died(2, 25, "RuntimeError", GLOO)
    death = job.death()
    assert found(death) == ("exception", (1,))
    assert death.headline == (
        "rank 1 died first: RuntimeError: shape mismatch (train.py:88 in step); ranks 0 and 2 "
        "waited in all_reduce 241 and were ended 25.0 s later by gloo's timeout"
    )
    assert [fate.role for fate in death.fates] == ["victim", "cause", "victim"]
    assert (death.line, death.source, death.step) == ("train.py:88 in step", "x = y()", 2)


def test_victim_whose_exception_came_first_is_not_blamed(job: Job) -> None:
    job.died(0, 0, "RuntimeError", BROKEN)
    job.over(1, 0.001, number=signal.SIGKILL)
    job.over(2, 0.8, number=signal.SIGTERM)
    death = job.death()
    assert found(death) == ("killed", (1,))
    assert {f.rank: f.role for f in death.fates} == {0: "victim", 1: "cause", 2: "stopped"}


def test_rank_that_hung_until_its_launcher_ended_it_is_named_by_its_collectives(job: Job) -> None:
    job.began(0, *["all_reduce"] * 9)
    job.began(1, *["all_reduce"] * 8)
    job.began(2, *["all_reduce"] * 9)
    job.died(0, 0, "RuntimeError", GLOO)
    job.died(2, 0.1, "RuntimeError", GLOO)
    job.over(1, 1.2, number=signal.SIGTERM)
    death = job.death()
    assert found(death) == ("hang", (1,))
    assert not death.certain
    assert "never came to all_reduce 9" in death.headline


def test_rank_that_ended_early_with_status_0_is_the_cause_of_the_others_deaths(job: Job) -> None:
    job.over(1, 0, status=0)
    job.died(0, 0.2, "RuntimeError", BROKEN)
    job.died(2, 0.2, "RuntimeError", BROKEN)
    assert found(job.death()) == ("early_exit", (1,))


def test_rank_that_takes_long_to_end_has_ended_early_all_the_same(job: Job) -> None:
    """Its connections close once Python's own exit is done, and its process ends after that."""
    exits(job, 1, time_ns=CLOCK.mono_ns + 60 * S - S, uncaught=False)
    job.over(1, 3, status=0)
    job.died(0, 0.2, "RuntimeError", BROKEN)
    job.died(2, 0.2, "RuntimeError", BROKEN)
    death = job.death()
    assert found(death) == ("early_exit", (1,))
    assert death.fates[1].what == "it ended with exit status 0"


@pytest.mark.parametrize("ran_on", [True, False])
def test_killed_launcher_leaves_its_ranks(job: Job, ran_on: bool) -> None:
    for rank in range(3) if ran_on else ():
        exits(job, rank, uncaught=False)
    manifest = read_manifest(job.run)
    write_manifest(job.run, replace(manifest, job_pid=50))
    job.line("node0", {"type": "job_end", "pid": 50, "wall_ns": T0, "status": None, "signal": 9})
    job.ended(None, "SIGKILL")
    death = job.death()
    assert found(death) == ("killed", ())
    assert death.headline.startswith(
        "the first process of the job died, and left its ranks: killed"
    )


def test_contradicting_collectives_are_named_with_what_each_rank_did(job: Job) -> None:
    job.began(0, "all_reduce", "all_reduce")
    job.began(1, "all_reduce", "broadcast")
    job.began(2, "all_reduce", "all_reduce")
    for rank in range(3):
        job.died(rank, rank, "RuntimeError", GLOO)
    death = job.death()
    assert found(death) == ("mismatch", (1,))
    assert "broadcast" in death.headline


def test_same_failure_of_all_ranks_is_one_cause(job: Job) -> None:
    for rank in range(3):
        job.died(rank, rank * 0.1, "ValueError", "bad shape")
    death = job.death()
    assert found(death) == ("exception", (0, 1, 2))
    assert death.headline.startswith("all 3 ranks died together")


@pytest.mark.parametrize(
    ("how", "cause", "said"),
    [
        ({"number": signal.SIGSEGV}, "crash", "SIGSEGV"),
        ({"status": 7}, "exit", "os._exit"),
        ({"number": signal.SIGKILL}, "killed", "SIGKILL"),
        ({"number": signal.SIGKILL, "oom": {"kills": 1, "anonymous_bytes": 1 << 30}},
         "out_of_memory", "1.00 GiB"),
    ],
)  # fmt: skip
def test_end_without_an_exception_is_told_by_status_or_signal(
    job: Job, how: dict[str, object], cause: str, said: str
) -> None:
    job.over(1, 0, **how)  # type: ignore[arg-type]
    job.died(0, 0.1, "RuntimeError", BROKEN)
    job.over(2, 1, number=signal.SIGTERM)
    death = job.death()
    assert found(death) == (cause, (1,))
    assert said in death.headline


@pytest.mark.parametrize("closed", [None, {}, {"uncaught": True}])
def test_exit_status_without_a_witness_is_of_unknown_cause(
    job: Job, closed: dict[str, object] | None
) -> None:
    """A process whose memory ran out writes no exception: that is no proof of sys.exit."""
    if closed is not None:
        exits(job, 1, **closed)
    job.over(1, 0, status=1)
    job.over(0, 1, number=signal.SIGTERM)
    job.over(2, 1, number=signal.SIGTERM)
    death = job.death()
    assert found(death) == ("exit", (1,))
    assert not death.certain
    assert "exit status 1" in death.headline
    assert "why is not known" in death.headline
    assert "sys.exit" not in death.headline + death.remedy


TRACEBACK = [
    "step 7", "Traceback (most recent call last):", '  File "/home/me/train.py", line 88, in step',
    "    x = y()", "        ^^^", '  File "/x/site-packages/torch/_tensor.py", line 5, in backward',
]  # fmt: skip


@pytest.mark.parametrize(
    ("printed", "cause", "said"),
    [
        (
            [*TRACEBACK, "torch.Error: bad", "second line"],
            "exception",
            "Error: bad (train.py:88 in",
        ),
        ([*TRACEBACK, "MemoryError"], "out_of_memory", "MemoryError (train.py:88 in step)"),
        (
            [*TRACEBACK, "and then: nothing it raised"],
            "exit",
            "stderr: and then: nothing it raised",
        ),
        (TRACEBACK, "exit", "why is not known"),
        (["no license", ""], "exit", "why is not known; its last line on stderr: no license"),
        ([7, None], "exit", "why is not known"),
    ],
)
def test_last_lines_on_stderr_are_a_likely_witness(
    job: Job, printed: list[object], cause: str, said: str
) -> None:
    job.over(1, 0, status=1, stderr=printed)
    job.over(0, 1, number=signal.SIGTERM)
    job.over(2, 1, number=signal.SIGTERM)
    death = job.death()
    assert found(death) == (cause, (1,))
    assert not death.certain
    assert said in death.headline
    assert cause == "exit" or (death.line, death.source) == ("train.py:88 in step", "x = y()")


def test_abort_that_only_stderr_tells_of_is_a_crash_with_its_text(job: Job) -> None:
    said = ["terminate called after throwing an instance of 'std::runtime_error'", "  what():  bad"]
    job.over(1, 0, number=signal.SIGABRT, stderr=said)
    job.over(0, 1, number=signal.SIGTERM)
    job.over(2, 1, number=signal.SIGTERM)
    death = job.death()
    assert found(death) == ("crash", (1,))
    assert not death.certain
    assert "std::runtime_error: bad; known by its last lines on stderr" in death.headline


def test_rank_that_nccls_watchdog_ended_by_its_last_lines_is_a_victim(job: Job) -> None:
    job.over(
        0, 9, number=signal.SIGABRT, stderr=["ran", "Watchdog caught collective operation timeout"]
    )
    job.over(1, 0, status=3, stdout=["license lost"])
    job.over(
        2, 9, number=signal.SIGABRT, stderr=["Watchdog caught collective operation timeout: x"]
    )
    death = job.death()
    assert found(death) == ("exit", (1,))
    assert "its last line on stdout: license lost" in death.headline
    assert [fate.role for fate in death.fates] == ["victim", "cause", "victim"]
    assert death.fates[1].printed == ("license lost",)


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


def test_what_a_rank_raised_itself_is_surer_than_what_it_printed(job: Job) -> None:
    job.raised(1, 0, "ValueError", "bad sample")
    job.over(1, 1, status=1, stderr=[*TRACEBACK, "MemoryError"])
    assert job.death().cause == "exception"
    assert job.death().certain


def test_exit_that_no_exception_led_to_is_proved(job: Job) -> None:
    exits(job, 1, uncaught=False)
    job.over(1, 0, status=3)
    death = job.death()
    assert death.certain
    assert "it exited with status 3 (SystemExit)" in death.headline


@pytest.mark.parametrize(("code", "status"), [("3", 3), ("-1", 255), ("no such dataset", 1)])
def test_line_that_called_sys_exit_is_named(job: Job, code: str, status: int) -> None:
    exits(job, 1, uncaught=False)
    job.raised(1, 0, "SystemExit", code, how="exit_call")
    job.over(1, 0, status=status)
    death = job.death()
    assert (*found(death), death.certain) == ("exit", (1,), True)
    text = ": no such dataset" if status == 1 else ""
    assert death.headline.startswith(
        f"rank 1 died first: it exited with status {status} (sys.exit) at train.py:88 in step{text}"
    )
    assert (death.line, death.source) == ("train.py:88 in step", "x = y()")


@pytest.mark.parametrize(
    ("kind", "message", "printed", "advice", "said"),
    [
        ("SystemExit", "loss is nan at 110", [], "STOP", "it ended on a NaN"),
        ("SystemExit", "1", ["step 110 loss nan", "stopping"], "STOP", "it ended on a NaN"),
        ("FloatingPointError", "Non-finite loss", [], "STOP", "it ended on a NaN"),
        ("SystemExit", "1", ["best loss: inf"], "RESTART", "its first death"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (32x60 and 64x64)", [],
         "RESTART", "RuntimeError of the job's own code comes again"),
        ("RuntimeError", "cuDNN error", [], "RESTART", "whether it fails again is not known"),
        ("AssertionError", "Caught AssertionError in DataLoader worker process 0.\nOriginal "
         "Traceback (most recent call last):\nAssertionError: bad sample", [],
         "RESTART", "AssertionError of the job's own code comes again"),
    ],
)  # fmt: skip
def test_first_death_that_comes_again_is_told_so(
    job: Job, kind: str, message: str, printed: list[str], advice: str, said: str
) -> None:
    how = "exit_call" if kind == "SystemExit" else "exception"
    job.raised(1, 0, kind, message, how=how)
    job.over(1, 0, status=1, stdout=printed)
    found = restart_advice(RunFrames(job.run.root))
    assert found is not None
    assert (found.action, said in found.text) == (advice, True), found.text


def test_rank_that_leaves_since_another_one_is_gone_is_its_victim(job: Job) -> None:
    for rank in range(3):
        job.began(rank, *["all_reduce"] * (8 if rank == 1 else 9))
    gone = {"type": "RuntimeError", "message": GLOO, "frames": [LOCK]}
    for rank in (0, 2):
        exits(job, rank, uncaught=False)
        job.raised(rank, 0, "SystemExit", "1", how="exit_call", handled=[gone])
        job.over(rank, 0.2, status=1)
    job.over(1, 1.2, number=signal.SIGTERM)
    assert found(job.death()) == ("hang", (1,))


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
    exits(job, 1, uncaught=False)
    job.raised(1, 0, "SystemExit", "3", how="exit_call")
    job.over(1, 0, status=status)
    deaths = job.deaths()
    assert all("train.py:88" not in death.headline for death in deaths)
    assert "1" in {str(rank) for death in deaths for rank in death.ranks} or status != 4


def test_thread_that_died_before_the_exit_of_its_rank_is_told(job: Job) -> None:
    exits(job, 1, uncaught=False)
    job.raised(1, -1, "KeyError", "'label'", how="thread")
    job.over(1, 0, status=5)
    assert "had died of KeyError: 'label' (train.py:88 in step)" in job.death().headline


def exits(job: Job, rank: int, **more: object) -> None:
    lines = LineWriter(job.run.rank(rank).events)
    lines.append({"type": "record_end", **{"time_ns": 1, "reason": "exit", **more}})
    lines.close()


def test_kill_whose_sender_nobody_saw_is_not_blamed_on_somebody_outside(job: Job) -> None:
    job.over(1, 0, number=signal.SIGKILL)
    death = job.death()
    assert "the sender is not known" in death.headline
    assert "outside" not in death.headline
    assert "os.kill" in death.remedy


def test_rank_that_signals_its_own_launcher_is_named(job: Job) -> None:
    job.line("node0", {
        "type": "signal", "signal": 15, "wall_ns": T0, "from_pid": job.pid(1), "from_uid": 0,
        "from_command": "python train.py",
    })  # fmt: skip
    for rank in range(3):
        job.over(rank, 0.1, number=signal.SIGTERM)
    job.ended(None, "SIGTERM")
    death = job.death()
    assert found(death) == ("signal", (1,))
    assert "the job ended itself: rank 1 sent SIGTERM" in death.headline


def test_death_before_a_restart_that_never_trained_is_told(job: Job) -> None:
    job.died(1, 0, "RuntimeError", "shard 17 is damaged")
    job.over(0, 1, number=signal.SIGTERM)
    job.over(2, 1, number=signal.SIGTERM)
    job.line("node0", {"type": "signal", "signal": 15, "wall_ns": T0 + 105 * S, "from_pid": 7})
    for rank in range(3):
        job.over(rank, 105.1, number=signal.SIGTERM, attempt=1)
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
    assert "started again" in last.headline
    assert "SIGTERM" in last.headline
    assert "all ranks hung at a.py:7 in join" in last.headline
    assert [fate.role for fate in last.fates] == ["stopped", "cause", "stopped"]
    starts = RunFrames(job.run.root).goodput().starts
    assert "shard 17" in str(starts[0].why)
    assert "shard 17" not in str(starts[1].why)
    assert "no step was seen" in str(starts[1].why)


def test_restarts_that_never_connect_tell_the_death_before_the_first_of_them(job: Job) -> None:
    job.died(1, 0, "RuntimeError", "shard 17 is damaged")
    job.over(0, 1, number=signal.SIGTERM)
    job.over(2, 1, number=signal.SIGTERM)
    text = "Gloo connectFullMesh failed with pair.cc:152 timed out connecting: Connection refused"
    for attempt in (1, 2):
        for rank in range(3):
            job.raised(rank, 30 * attempt, "RuntimeError", text, attempt=attempt)
            job.over(rank, 30 * attempt + 1, status=1, attempt=attempt)
    job.ended(1)
    *_, last = job.deaths()
    assert found(last) == ("exception", (1,))
    assert "shard 17" in last.headline
    assert "started again 2 times and no step of them was seen" in last.headline
    assert "gloo, which could not connect the ranks" in last.headline


def test_sender_in_a_folder_named_after_slurm_is_not_slurm(job: Job) -> None:
    command = "python /home/me/slurm-jobs/stop.py"
    job.line("node0", {"type": "signal", "signal": 15, "wall_ns": T0 + 5 * S, "from_pid": 7,
                       "from_command": command})  # fmt: skip
    for rank in range(3):
        job.over(rank, 5.1, number=signal.SIGTERM)
    job.ended(None, "SIGTERM")
    assert found(job.death()) == ("signal", ())


def test_ranks_that_end_with_a_job_that_somebody_ends_are_stopped(job: Job) -> None:
    job.line("node0", {"type": "signal", "signal": 15, "wall_ns": T0 + 5 * S, "from_pid": 7})
    for rank in range(3):
        job.over(rank, 5.1, number=signal.SIGTERM)
    job.ended(None, "SIGTERM")
    death = job.death()
    assert found(death) == ("signal", ())
    assert [fate.role for fate in death.fates] == ["stopped"] * 3


def test_ranks_that_a_signal_reaches_one_by_one_end_alike(job: Job) -> None:
    job.line("node0", {"type": "signal", "signal": 15, "wall_ns": T0 + 5 * S, "from_pid": 7})
    for rank in range(3):
        job.over(rank, 5 + rank, number=signal.SIGTERM)
    job.ended(None, "SIGTERM")
    death = job.death()
    assert {fate.what for fate in death.fates} == {"ended by SIGTERM"}
    assert "launcher" not in death.headline


@pytest.mark.parametrize(
    ("kind", "message", "cause"),
    [
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
    ],
)  # fmt: skip
def test_texts_of_exceptions_tell_the_kind(job: Job, kind: str, message: str, cause: str) -> None:
    job.died(1, 0, kind, message)
    assert job.death().cause == cause


def test_error_of_a_loader_worker_is_named_with_its_own_line(job: Job) -> None:
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        'last):\n  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 3, in loop\n'
        "  File \"/home/me/data.py\", line 17, in __getitem__\n{source}KeyError: 'label'\n"
    )
    job.died(1, 0, "KeyError", text.format(source="    return row['label']\n           ~~~^^^\n"))
    job.died(2, 1, "KeyError", text.format(source=""))
    death = job.death()
    assert (death.line, death.source) == ("data.py:17 in __getitem__", "return row['label']")
    assert "of the same: its DataLoader worker 0 raised KeyError" in death.headline


@pytest.mark.parametrize("oom", [None, {"kills": 1}])
def test_end_of_a_loader_worker_is_not_blamed_on_the_line_where_its_signal_met_the_rank(
    job: Job, oom: dict[str, object] | None
) -> None:
    text = "DataLoader worker (pid 9) is killed by signal: Killed. "
    job.line("node0", {"type": "process_end", "pid": 9, "rank": 1, "helper": True, "oom": oom,
                       "parent": 101, "wall_ns": T0, "status": None, "signal": 9})  # fmt: skip
    job.died(1, 0, "RuntimeError", text)
    death = job.death()
    assert death.cause == ("out_of_memory" if oom else "killed")
    assert (death.line, death.source) == (None, None)
    assert "its DataLoader worker (pid 9) was ended by a signal: Killed" in death.headline


def test_end_of_a_loader_worker_is_told_by_the_exception_that_knows_its_signal(job: Job) -> None:
    told = "DataLoader worker (pid 9) is killed by signal: Killed. "
    job.died(1, 0, "RuntimeError", "DataLoader worker (pid(s) 9) exited unexpectedly",
             handled=[{"type": "RuntimeError", "message": told, "frames": [LOCK]}])  # fmt: skip
    death = job.death()
    assert death.cause == "killed"
    assert "its DataLoader worker (pid 9) was ended by a signal: Killed" in death.headline


def test_connection_to_a_loader_worker_that_breaks_is_no_waiting_for_other_ranks(job: Job) -> None:
    loader = ("/x/site-packages/torch/utils/data/dataloader.py", 1291, "_try_get_data")
    job.died(1, 0, "ConnectionResetError", "[Errno 104] Connection reset by peer",
             frames=(LOCK, loader))  # fmt: skip
    death = job.death()
    assert (death.cause, death.ranks) == ("exit", (1,))
    assert "a DataLoader worker of its ended while it handed a batch over" in death.headline


@pytest.mark.parametrize(
    ("number", "limit"), [(signal.SIGXCPU, "ulimit -t"), (signal.SIGXFSZ, "ulimit -f")]
)
def test_limit_that_the_kernel_keeps_by_a_signal_is_nobodys_doing(
    job: Job, number: int, limit: str
) -> None:
    job.over(1, 0, number=number)
    death = job.death()
    assert death.certain
    assert limit in death.headline
    assert limit in death.remedy


def test_interrupt_of_a_rank_that_no_launcher_was_sent_names_its_line(job: Job) -> None:
    job.raised(1, 0, "KeyboardInterrupt", "")
    job.over(1, 0.1, number=signal.SIGINT)
    job.died(0, 0.3, "RuntimeError", BROKEN)
    job.began(0, "all_reduce", "all_reduce")
    job.began(1, "all_reduce")
    death = job.death()
    assert (*found(death), death.line) == ("interrupted", (1,), "train.py:88 in step")


def test_torch_that_could_not_write_does_not_say_why_for_sure(job: Job) -> None:
    job.died(1, 0, "RuntimeError", "basic_ios::clear: iostream error")
    death = job.death()
    assert not death.certain
    assert "a full disk, a quota, or a limit (ulimit -f)" in death.headline


def test_thread_that_died_is_told_of_the_rank_that_hung(job: Job) -> None:
    job.began(0, "all_reduce", "all_reduce")
    job.began(1, "all_reduce")
    job.began(2, "all_reduce", "all_reduce")
    job.raised(1, -20, "ValueError", "truncated record", how="thread")
    job.died(0, 0, "RuntimeError", GLOO)
    job.died(2, 0, "RuntimeError", GLOO)
    job.over(1, 1, number=signal.SIGTERM)
    assert "had died of ValueError: truncated record" in job.death().headline


# -- from outside ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "state", "cause"),
    [
        (5, None, "time_limit"), (5000, None, "cancelled"), (5000, "COMPLETING", "cancelled"),
        (5000, "PREEMPTED", "preempted"), (5000, "REQUEUED", "requeued"),
    ],
)  # fmt: skip
def test_signal_of_slurm_is_told_by_its_state_or_time_limit(
    job: Job, left_s: int, state: str | None, cause: str
) -> None:
    job.line("node0", {
        "type": "signal", "signal": 15, "wall_ns": T0, "from_pid": 77, "from_uid": 0,
        "from_command": "slurmstepd: [12.batch]", "slurm_job": "12",
        "slurm_end_s": T0 // S + left_s, "slurm_state": state,
    })  # fmt: skip
    for rank in range(3):
        job.over(rank, 0.1, number=signal.SIGTERM)
    job.ended(None, "SIGTERM")
    assert found(job.death()) == (cause, ())


@pytest.mark.parametrize("silent_s", [1, 60])
def test_signal_to_a_job_that_stood_still_says_so(job: Job, silent_s: int) -> None:
    began_ns = CLOCK.wall_ns + silent_s * S
    job.line("node0", {"type": "signal", "signal": 15, "wall_ns": began_ns, "from_pid": 7})
    for rank in range(3):
        job.over(rank, (began_ns - T0) / S + 0.1, number=signal.SIGTERM)
    job.ended(None, "SIGTERM")
    death = job.death()
    assert ("no step had ended in the 60.0 s before" in death.headline) == (silent_s == 60)
    assert ("--hang-limit" in death.remedy) == (silent_s == 60)


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
    for rank in range(3):
        job.over(rank, (began_ns - T0) / S + 0.1, number=signal.SIGINT)
    job.ended(None, "SIGINT")
    death = job.death()
    assert found(death) == ("hang", (1,))
    assert "rank 1 hung, at train.py:19 in main" in death.headline
    assert "then ended by SIGINT" in death.headline
    assert [fate.role for fate in death.fates] == ["stopped", "cause", "stopped"]
    assert death.died_ns is not None
    assert abs(death.died_ns - CLOCK.wall_ns) < S, "the hang's begin, not the time of the look"


def test_later_start_of_the_same_slurm_job_tells_a_requeue(job: Job) -> None:
    job.line("node0", {
        "type": "signal", "signal": 15, "wall_ns": T0, "from_pid": 77, "slurm_job": "12",
        "from_command": "slurmstepd: [12.batch]", "slurm_end_s": T0 // S + 5000,
    })  # fmt: skip
    for rank in range(3):
        job.over(rank, 0.1, number=signal.SIGTERM)
    for run, restart in ((job.run, "0"), (write_run(job.run.root.parent / "next"), "1")):
        start = {"slurm_job": "12", "slurm_restart": restart}
        write_manifest(run, replace(read_manifest(run), environment=start, signal="SIGTERM"))
        if restart == "0":
            death = job.death()
            assert (death.cause, death.certain) == ("cancelled", False)
            assert "scancel, scontrol requeue" in death.headline
    assert (job.death().cause, job.death().certain) == ("requeued", True)


def test_rank_that_others_wait_for_or_that_somebody_ends_is_not_said_to_have_waited(
    job: Job,
) -> None:
    job.line("node0", {"type": "signal", "signal": 15, "wall_ns": T0, "from_pid": 7})
    job.began(0, "all_reduce", "all_reduce")
    job.began(1, "all_reduce")
    for rank in range(2):
        job.over(rank, 0.1, number=signal.SIGTERM)
    job.over(2, 0, status=1)
    job.ended(None, "SIGTERM")
    assert [fate.waited_in for fate in job.death().fates] == [None, None, None]


def test_signal_after_a_failure_is_not_its_cause(job: Job) -> None:
    job.raised(1, 0, "ValueError", "bad")
    job.line("node0", {"type": "signal", "signal": 2, "wall_ns": T0 + 9 * S})
    for rank in range(3):
        job.over(rank, 10, number=signal.SIGINT)
    assert found(job.death()) == ("exception", (1,))


def test_node_that_fell_silent_is_lost(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ranks=4, hosts=2)
    job.died(0, 0, "RuntimeError", GLOO)
    job.died(2, 0, "RuntimeError", GLOO)
    job.line("node0", {"type": "job_end", "pid": 9, "wall_ns": T0 + S, "status": 1})
    job.run.node("node1").root.mkdir(parents=True)
    death = job.death()
    assert found(death) == ("node_lost", (1, 3))
    assert "node1" in death.headline


def test_rank_that_was_never_seen_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ranks=2, world=3)
    job.died(0, 0, "RuntimeError", "Timed out after 9 seconds waiting for clients. 2/3 joined.")
    job.died(1, 0, "RuntimeError", "Timed out after 9 seconds waiting for clients. 2/3 joined.")
    assert found(job.death()) == ("never_started", (2,))


# -- restarts --------------------------------------------------------------------------------------


def test_each_start_has_its_own_death_and_goodput_leaves_out_what_was_lost(job: Job) -> None:
    job.died(1, 0, "ValueError", "bad")
    job.over(0, 1, number=signal.SIGTERM)
    job.over(2, 1, number=signal.SIGTERM)
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


# -- hostile input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        {"type": "process_end", "pid": "x", "wall_ns": T0},
        {"type": "process_end", "pid": 101, "wall_ns": T0, "signal": 1 << 40, "status": -5},
        {"type": "process_end", "pid": 101, "wall_ns": T0, "rank": [1], "oom": "yes", "status": 1},
        {"type": "signal", "signal": {}, "wall_ns": None},
    ],
)
def test_damaged_lines_are_passed_over(job: Job, line: dict[str, object]) -> None:
    job.line("node0", line)
    job.run.uncaught.mkdir()
    (job.run.uncaught / "a.json").write_text(
        '{"host": "node0", "pid": 1, "ended": [{"errors": 5}]}'
    )
    (job.run.uncaught / "b.json").write_text("{")
    assert isinstance(job.deaths(), list)
