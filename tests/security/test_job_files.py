"""haiprof never writes into the job's files, and its writes never raise a signal in the job."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from haiprof.agent.node_agent import Relay
from haiprof.base.descriptors import Descriptor
from haiprof.run_format.control import new_request, post_request, read_replies
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import newest_run
from haiprof.run_format.reader import read_lines, read_records
from haiprof.run_format.schema import PHASES
from tests.process.jobs import Job, run_script
from tests.process.live import within

# What the hook's drain thread does, without torch: files are opened, written, closed.
WRITERS = """
import json, os, resource, signal, socket, sys
from pathlib import Path
from haiprof.in_job.files import RankFiles
from haiprof.run_format.layout import RunPaths
from array import array
run = RunPaths(Path(sys.argv[1]))
files = RankFiles(run, {}, {})
def record(count=4):
    files.write(array("q", range(2 * count)), [])
    files.note({"type": "mark"})
    files.beat()
def own_files(count=64):
    return [open(f"own-{i}", "x+b", buffering=0) for i in range(count)]
def report(own):
    print(json.dumps([os.pread(file.fileno(), 4096, 0).decode() for file in own]))
record()
"""


def own_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def run_writers(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    code = WRITERS + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env=own_environment(),
    )  # fmt: skip


def lost(run: RunPaths) -> list[tuple[str, bool]]:
    """Files that the run says were closed by the job, and whether recording into them went on."""
    lines, notes = read_lines(run.rank(0).events)
    assert not notes
    return [(x["file"], x["reopened"]) for x in lines if x["type"] == "descriptor_lost"]


def words(run: RunPaths) -> list[int]:
    data = read_records(run.rank(0).phases).data
    return [value for pair in PHASES.struct.iter_unpack(data) for value in pair]


@pytest.mark.parametrize(
    "close",
    ["os.closerange(3, 4096)", "[os.close(fd) for fd in range(3, 4096) if not closed(fd)]"],
    ids=["closerange", "each"],
)
def test_descriptors_closed_by_the_job_are_not_used_again(tmp_path: Path, close: str) -> None:
    done = run_writers(
        tmp_path,
        f"""
        def closed(fd):
            try: os.fstat(fd)
            except OSError: return True
        {close}
        own = own_files()
        record()
        files.close()
        report(own)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [""] * 64
    run = RunPaths(tmp_path / "run")
    assert lost(run) == [("phases.rec", True), ("events.jsonl", True)]
    assert words(run) == [*range(8), *range(8)]


def test_number_that_is_the_jobs_own_by_now_is_neither_written_cut_nor_closed(
    tmp_path: Path,
) -> None:
    done = run_writers(
        tmp_path,
        """
        def ours():
            fds = {int(n): os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                   if os.path.lexists(f"/proc/self/fd/{n}")}
            return [fd for fd, path in fds.items() if "/run/ranks/" in path]
        own = own_files(8)
        for file in own:
            file.write(b"the job's")
        for fd, file in zip(ours(), own):
            os.dup2(file.fileno(), fd)  # the very number
        taken = ours()
        record()
        files.close()
        report(own)
        print([fd for fd in taken if "/run/" in os.readlink(f"/proc/self/fd/{fd}")])
        print(sum(os.path.lexists(f"/proc/self/fd/{fd}") for fd in range(64, 1024)))
        """,
    )
    assert done.returncode == 0, done.stderr
    contents, still_ours, open_numbers = done.stdout.splitlines()
    assert json.loads(contents) == ["the job's"] * 8
    assert (still_ours, open_numbers) == ("[]", "2"), "both stay open: they are the job's"


def test_file_that_cannot_be_found_again_is_given_up_and_counted(tmp_path: Path) -> None:
    done = run_writers(
        tmp_path,
        """
        os.closerange(3, 4096)
        phases = run.rank(0).phases
        phases.rename(phases.with_name("elsewhere"))
        phases.write_bytes(b"not ours")
        own = own_files()
        record()
        files.note_cost(None)
        files.close()
        report(own)
        """,
    )
    assert json.loads(done.stdout) == [""] * 64
    run = RunPaths(tmp_path / "run")
    assert run.rank(0).phases.read_bytes() == b"not ours"
    assert ("phases.rec", False) in lost(run)
    (cost,) = [line for line in read_lines(run.rank(0).events)[0] if line["type"] == "cost"]
    assert cost["dropped_bytes"] == 4 * PHASES.record_bytes


@pytest.mark.parametrize("disposition", ["SIG_DFL", "raising"])
def test_file_size_limit_raises_no_signal_on_the_main_thread(
    tmp_path: Path, disposition: str
) -> None:
    handler = "signal.SIG_DFL" if disposition == "SIG_DFL" else "lambda *_: print('signal')"
    done = run_writers(
        tmp_path,
        f"""
        from haiprof.in_job.recorder import Recorder, note_failure
        recorder = Recorder(run, time_s=0, warmup_s=0)
        recorder._files = files
        recorder.armed = True
        for number in range(1000):
            recorder.spans.put(number, number + 1, 4)
        signal.signal(signal.SIGXFSZ, {handler})
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.rank(0).phases.stat().st_size,) * 2)
        recorder.finish()
        (run.root / "boot").mkdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        note_failure(run, "x")
        print(signal.sigpending(), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        """,
    )
    assert (done.returncode, done.stdout) == (0, "set() set()\n"), done.stderr


def test_pending_signal_of_the_job_stays_pending() -> None:
    code = (
        "import os, signal; from haiprof.in_job.threads import hold_size_signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})\n"
        "os.kill(os.getpid(), signal.SIGXFSZ)\n"
        "with hold_size_signal(): pass\n"
        "print(signal.SIGXFSZ in signal.sigpending())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=own_environment(),
    )  # fmt: skip
    assert done.stdout == "True\n"


def test_own_descriptors_are_high_closed_on_exec_and_below_the_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (256, min(soft, 4096)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            own = Descriptor(os.open(tmp_path, os.O_RDONLY))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert min(limit, 1024) - 64 <= own.number < min(limit, 1024)
        assert not os.get_inheritable(own.number)
        own.close()


# -- the socket to the agent -----------------------------------------------------------------------

RANK = """
import os, socket, sys, time
from pathlib import Path
from haiprof.in_job.commands import Commands
from haiprof.run_format.layout import RunPaths
echo = {"echo": lambda request_id, arguments: {"state": "done", **arguments}}
commands = Commands(RunPaths(Path(sys.argv[1])), echo, print)
commands.start({"rank": 0, "attempt": 0})
while commands._line is None:
    time.sleep(0.01)
number = commands._line._descriptor.number
print("ready", flush=True)
sys.stdin.readline()
os.closerange(3, 4096)
mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.dup2(mine.fileno(), number)
other.send(b"for the job")
print("closed", flush=True)
sys.stdin.readline()
other.setblocking(False)
try:
    print("from haiprof:", other.recv(1000))
except BlockingIOError:
    print("nothing from haiprof")
print(mine.recv(1000), commands.reply("later", {"state": "done"}), flush=True)
"""


def test_socket_closed_by_the_job_is_left_to_it_and_requests_are_answered_on(
    tmp_path: Path,
) -> None:
    run = RunPaths(tmp_path)
    relay = Relay(run, socket.gethostname())
    relay.start()
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(run.root)], env=own_environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert answer(relay, run, word="before")["word"] == "before"
        process.stdin.write("close\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        for word in ("after", "again"):
            assert answer(relay, run, word=word)["word"] == word
        assert len(relay.peers) == 1
        output = process.communicate("end\n", timeout=30)[0]
        relay.stop()
    assert "nothing from haiprof" in output
    assert "b'for the job' True" in output
    assert "the job has closed our socket" in output


def answer(relay: Relay, run: RunPaths, **arguments: str) -> Any:
    request = new_request("echo", arguments, valid_s=30)

    def after_a_tick(look: Callable[[], Any]) -> Any:
        relay.tick()
        return look()

    within(60, lambda: after_a_tick(relay.live_ranks))
    post_request(run, request)
    found: dict[str, Any] = within(
        60, lambda: after_a_tick(lambda: read_replies(run, request.id)), "an answer"
    )
    return found["0"]


# -- real jobs ------------------------------------------------------------------------------------

TRAIN = """
import os, resource, signal, sys, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(seconds):
    end = time.monotonic() + seconds
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8) * (step % 7)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    while "haiprof.in_job" in sys.modules and time.monotonic() < end:
        time.sleep(0.05)  # its thread writes once a second
    print(*(loss.hex() for loss in losses))
train(1.5)
"""
CLOSE = (
    TRAIN
    + """
os.closerange(3, 4096)
own = [open(f"own-{i}", "x") for i in range(1100)] if sys.argv[1:] else [open("own-0", "x")]
for file in own:
    file.write("the job's")
    file.flush()
train(2.5)
for file in own:
    file.close()
"""
)


def both_ways(folder: Path, source: str, *options: str) -> tuple[Job, Job]:
    bare = run_script(folder, source, haiprof=False)
    recorded = run_script(folder, source, options=("--quiet", *options))
    assert bare.returncode == 0, bare.stderr
    assert (recorded.returncode, recorded.stdout) == (0, bare.stdout), recorded.stderr
    return bare, recorded


def run_of(job: Job) -> RunPaths:
    assert job.log_dir is not None
    return RunPaths(newest_run(job.log_dir))


@pytest.mark.slow
def test_job_that_closes_all_descriptors_keeps_its_files_and_is_recorded_on(tmp_path: Path) -> None:
    _, recorded = both_ways(tmp_path, CLOSE)
    assert (recorded.folder / "own-0").read_text() == "the job's"
    run = run_of(recorded)
    assert ("phases.rec", True) in lost(run)
    steps = recorded.analyzer().steps().filter(rank=0)
    assert len(steps) >= 78  # of 80, both halves
    notes = recorded.analyzer().notes()
    assert any("closed" in note and "phases.rec" in note for note in notes), notes
