"""`haiprof ls --live`: frames as text, keys in a real terminal, and what one look costs."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from haiprof import Analyzer
from haiprof.live.find import RunningJob
from haiprof.live.follow import JobNow, LiveJob, LiveRank, Watch
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest
from haiprof.run_format.writer import RecordWriter
from haiprof.show.views.jobs import (
    BACK,
    DOWN,
    ENTER,
    JOBS,
    QUIT,
    RANK,
    RANKS,
    UP,
    Selection,
    move,
    top_view,
)
from tests.process.jobs import environment, training
from tests.process.live import LiveJob as Training
from tests.unit.analysis.recorded import (
    CLOCK,
    GAP_NS,
    SPAN_NS,
    WALL_OFFSET_NS,
    spans_of,
    write_rank,
    write_run,
)

STEP_NS = 4 * (SPAN_NS + GAP_NS)

pytestmark = pytest.mark.xdist_group("top")  # jobs of one name: one at a time


def job_of(run: RunPaths) -> RunningJob:
    return RunningJob(run=run, manifest=read_manifest(run))


def look(run: RunPaths, *, later_ns: int = 0) -> JobNow:
    now = WALL_OFFSET_NS + 1_000_000 + later_ns
    return LiveJob(job_of(run), clock=lambda: now).look()


def text(jobs: list[JobNow], place: Selection, **options: object) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=80, color_system=None)
    console.print(top_view(jobs, place, colored=False, **options))  # type: ignore[arg-type]
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of("D F B O " * 6), rank=0)
    write_rank(run, spans_of("D F B O " * 3 + "D F F F F B O " + "D F B O " * 2), rank=1)
    return run


def test_look_agrees_with_the_analysis(run: RunPaths) -> None:
    steps = Analyzer(run.root).steps()
    for rank in look(run).ranks:
        own = steps.filter(rank=rank.rank)
        assert rank.step == own["step"].max()
        assert list(rank.times_ns) == own["step_ns"].to_list()
        share = int(own["forward_host_ns"].sum()) / int(own["step_ns"].sum())
        assert rank.split["forward"] == pytest.approx(share)
    slow = look(run).ranks[1].slowest[0]
    assert (slow[0], slow[2]) == (3, "forward")


def test_frames_show_jobs_ranks_and_one_rank_in_80_columns(run: RunPaths) -> None:
    job = look(run)
    jobs = text([job], Selection())
    assert jobs[0].split()[:4] == ["job", "ranks", "step", "each"]
    assert jobs[1].split()[:5] == ["run", "2", "of", "1", "5"]
    ranks = text([job], Selection(level=RANKS, alone=True))
    assert [line.split()[:2] for line in ranks[-3:-1]] == [["0", "5"], ["1", "5"]]
    assert "enter a rank" in ranks[-1]
    one = text([job], Selection(level=RANK, rank=1))
    assert any(line.startswith("rank 1, ") for line in one)
    assert any("step 3: " in line and "forward" in line for line in one)
    assert max(map(len, [*jobs, *ranks, *one])) <= 80
    assert not any("⏎" in line for line in text([job], Selection(level=RANKS), height=None))


def test_keys_lead_in_and_out(run: RunPaths) -> None:
    jobs = [look(run)]
    place = Selection()
    for key, expected in (
        (DOWN, JOBS), (ENTER, RANKS), (DOWN, RANKS), (ENTER, RANK), (UP, RANK), (BACK, RANKS),
    ):  # fmt: skip
        moved_to = move(place, key, jobs)
        assert moved_to is not None
        place = moved_to
        assert place.level == expected
    assert place.rank == 0
    assert move(Selection(level=RANKS, alone=True), BACK, jobs) is None
    assert move(place, QUIT, jobs) is None
    assert move(Selection(), ENTER, []) == Selection()


def test_stall_is_told(run: RunPaths) -> None:
    assert not any("no step for" in line for line in text([look(run)], Selection(level=RANKS)))
    late = look(run, later_ns=60_000_000_000)
    lines = text([late], Selection(level=RANKS))
    running = [line for line in lines if "stalled" in line]
    assert len(running) == 2


def test_rank_that_has_written_nothing_yet_is_a_dash(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.rank(0).root.mkdir(parents=True)
    (rank,) = look(run).ranks
    assert (rank.step, rank.step_ns, rank.idle_ns) == (None, None, None)
    assert "no rank has reported in" not in "".join(text([look(run)], Selection(level=RANKS)))
    empty = write_run(tmp_path / "other")
    assert "no rank has reported in" in "".join(text([look(empty)], Selection(level=RANKS)))


def packed(count: int, start: int) -> bytes:
    """So many steps of a loop, as the hook writes them."""
    spans = spans_of("D F B O " * count)
    words = np.empty((len(spans.kind), 2), dtype="<i8")
    words[:, 0] = (spans.start_ns + start) << schema.TAG_BITS | spans.kind
    words[:, 1] = (spans.end_ns + start) << schema.TAG_BITS | spans.tag
    return words.tobytes()


def test_growing_file_is_read_on_and_counted_right(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    paths = run.rank(0)
    paths.root.mkdir(parents=True)
    writer = RecordWriter(paths.phases, schema.PHASES, clock=CLOCK, extra={"rank": 0})
    live = LiveRank(0, 0, paths)
    for turn in range(8):
        writer.append(packed(100, turn * 100 * STEP_NS))
        now = live.look(WALL_OFFSET_NS + 1_000_000)
        assert (now.step, now.step_is_exact) == ((turn + 1) * 100 - 1, True)
        assert now.step_ns == STEP_NS
    assert live._first > 4 * 400  # what was read before is not read again


def test_long_file_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("haiprof.live.follow._WHOLE_RECORDS", 1000)
    monkeypatch.setattr("haiprof.live.follow._TAIL_RECORDS", 800)
    run = write_run(tmp_path / "run")
    paths = run.rank(0)
    paths.root.mkdir(parents=True)
    writer = RecordWriter(paths.phases, schema.PHASES, clock=CLOCK, extra={"rank": 0})
    writer.append(packed(1000, 0))
    now = LiveRank(0, 0, paths).look(WALL_OFFSET_NS + 1_000_000)
    assert (now.step, now.step_is_exact) == (999, False)
    assert "~999" in text([LiveJob(job_of(run)).look()], Selection(level=RANKS))[-2]


def test_very_many_ranks_are_looked_at_in_turn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for rank in range(40):
        write_rank(run, spans_of("D F B O " * 4), rank=rank)
    live = LiveJob(job_of(run))
    assert len(live.look().ranks) == 40
    assert len(live._due()) == 16
    lines = text([live.look()], Selection(level=RANKS, rank=39), height=20)
    assert len(lines) <= 20
    assert lines[-2].split()[0] == "39"


def test_watch_of_one_job_ends_with_it(run: RunPaths) -> None:
    watch = Watch([], job_of(run))
    (job,) = watch.look()
    assert job.running is False
    assert json.dumps(job.as_json())
    watch.stop()


SCRIPT = training("for step in range(100_000):",
                  each="time.sleep(0.01); step == 40 and print('TRAINS', flush=True)")  # fmt: skip


def started(folder: Path, name: str) -> Training:
    (folder / name).write_text(SCRIPT)
    job = Training(folder, ["python", name], "--quiet")
    job.reported(1)
    return job


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """One job for the tests that use it; the last of them kills it."""
    with started(tmp_path_factory.mktemp("live"), "watched_job.py") as job:
        yield job


class Terminal:
    """A pseudo-terminal with `haiprof ls --live` in it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            env = {**environment(), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
            os.execve(sys.executable, [sys.executable, "-m", "haiprof", "top", *words], env)
        self.seen = ""

    def until(self, wanted: str, seconds: float = 40.0) -> str:
        """Reads on until a text has appeared since the last call."""
        begin, limit = len(self.seen), time.monotonic() + seconds
        while wanted not in self.seen[begin:]:
            assert time.monotonic() < limit, self.seen[-2000:]
            if select.select([self.fd], [], [], 0.2)[0]:
                self.seen += re.sub(r"\x1b\[[0-9;]*m", "", os.read(self.fd, 65536).decode())
        return self.seen[begin:]

    def press(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def status(self) -> int:
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode()
                except OSError:
                    break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow
def test_keys_work_in_a_terminal_and_it_is_left_as_it_was(live: Training) -> None:
    terminal = Terminal(live.folder, "watched_job.py", "--log-dir", "logs")
    terminal.until("enter a rank")
    assert "\x1b[?1049h" in terminal.seen  # the alternate screen
    terminal.press(b"\r")
    assert "of a step" in terminal.until("other ranks")
    terminal.press(b"q")
    terminal.until("enter a rank")
    terminal.press(b"q")
    assert terminal.status() == 0
    assert terminal.seen.rindex("\x1b[?1049l") > terminal.seen.rindex("\x1b[?1049h")
    assert live.process.poll() is None


@pytest.mark.proof
@pytest.mark.slow
def test_interrupt_and_the_end_of_the_job_leave_cleanly(tmp_path: Path) -> None:
    with started(tmp_path, "left_job.py") as job:
        first = Terminal(tmp_path, "left_job.py", "--log-dir", "logs")
        first.until("enter a rank")
        first.press(b"\x03")
        assert first.status() == 130
        assert "Traceback" not in first.seen
        second = Terminal(tmp_path, "left_job.py", "--log-dir", "logs")
        second.until("enter a rank")
        os.killpg(job.process.pid, signal.SIGKILL)
        assert second.status() == 0
        assert "ended" in second.seen


@pytest.mark.slow
def test_piped_it_prints_one_frame_and_follows_in_json(live: Training) -> None:
    command = [sys.executable, "-m", "haiprof", "top", "watched_job.py", "--log-dir", "logs"]
    frame = subprocess.run(
        command, cwd=live.folder, env=environment(), capture_output=True, text=True, check=True,
        stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    assert frame.stdout.startswith("watched_job")
    assert "\x1b" not in frame.stdout
    follow = subprocess.Popen(
        [*command, "--json", "--follow"], cwd=live.folder, env=environment(), text=True,
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert follow.stdout is not None
    steps = [json.loads(follow.stdout.readline())["jobs"][0]["step"] for _ in range(3)]
    assert steps[0] < steps[1] < steps[2]
    os.killpg(live.process.pid, signal.SIGKILL)
    out, _ = follow.communicate(timeout=30)
    last = json.loads(out.splitlines()[-1])
    assert last["jobs"][0]["running"] is False
    assert follow.returncode == 0
