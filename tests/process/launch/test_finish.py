"""Raw traces become finished ones: whole or absent, whoever is killed and whatever is full."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from haiprof.agent.trace_finisher import Finisher, finish_parts, remove_torn
from haiprof.base.safe_files import is_unfinished
from haiprof.run_format.layout import AGREED_PREFIX, RunPaths
from haiprof.run_format.raw_traces import Part, complete_parts
from tests.process.live import within
from tests.unit.launch.parts import GONE_PID, HOST, new_run, node_lines, part_of, put_down, raw_text

PARENT = str(Path(__file__).parents[3])


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path)


@pytest.fixture
def finisher(run: RunPaths) -> Iterator[Finisher]:
    finisher = Finisher(run, HOST)
    yield finisher
    finisher._helper.end()


def finish(run: RunPaths) -> tuple[list[Path], list[dict[str, Any]]]:
    """Finishes this host's parts in this process, and gives its lines."""
    lines: list[dict[str, Any]] = []
    return finish_parts(run, lambda line: lines.append(dict(line)), host=HOST), lines


def child(run: RunPaths, *words: str, before: str = "") -> subprocess.Popen[bytes]:
    """A finisher as the launcher starts it, after some statements of the test's."""
    arguments = [str(run.root), HOST, *words]
    call = f"raise SystemExit(main({arguments}))"
    code = f"{before}\nfrom haiprof.agent.trace_finisher import main; {call}"
    return subprocess.Popen([sys.executable, "-c", code], cwd=PARENT)


def parts_left(run: RunPaths) -> list[str]:
    return sorted(os.listdir(run.trace_parts))


def test_finished_trace_holds_the_same_bytes_and_the_parts_are_gone(run: RunPaths) -> None:
    text = raw_text(50_000)  # several chunks
    part = put_down(part_of(run), text, et='{"nodes": []}')
    found, _ = finish(run)
    assert found == [part.trace]
    assert gzip.decompress(part.trace.read_bytes()).decode() == text
    assert gzip.decompress(part.et.read_bytes()) == b'{"nodes": []}'
    assert parts_left(run) == []
    assert sorted(path.name for path in run.traces.iterdir()) == [
        ".parts", f"rank0_{part.stem.host}_{GONE_PID}.1000.et.json.gz",
        f"rank0_{part.stem.host}_{GONE_PID}.1000.pt.trace.json.gz",
    ]  # fmt: skip


def test_each_written_trace_has_a_line_with_what_the_rank_said(run: RunPaths) -> None:
    part = put_down(part_of(run))
    assert child(run).wait(30) == 0
    (line,) = node_lines(run, "trace_written")
    assert line["stem"] == part.stem.text
    assert run.root / line["path"] == part.trace
    assert line["bytes"] == part.trace.stat().st_size
    assert line["raw_bytes"] == len(raw_text())
    assert line["seconds"] >= 0
    assert line["part"]["steps"] == [20, 25]


def test_part_without_sidecar_is_not_touched_while_its_process_lives(run: RunPaths) -> None:
    part = part_of(run, pid=os.getpid())
    part.raw.write_text(raw_text())
    found, lines = finish(run)
    remove_torn(run, lambda line: lines.append(dict(line)), host=HOST)
    assert (found, lines) == ([], [])
    assert part.raw.exists()


def test_what_a_killed_rank_left_half_is_removed_and_said(run: RunPaths) -> None:
    part, whole = part_of(run), put_down(part_of(run, 1))
    part.raw.write_text("x" * 10)
    hidden = part.raw.with_name(f".{part.raw.name}.tmp")
    hidden.write_text("x" * 5)
    stranger = run.trace_parts / "notes.txt"
    stranger.write_text("mine")
    assert child(run, "last").wait(30) == 0
    assert parts_left(run) == ["notes.txt"]
    assert whole.trace.exists()
    (line,) = node_lines(run, "trace_dropped")
    assert (line["stem"], line["bytes"]) == (part.stem.text, 15)


def test_parts_of_another_host_are_left_to_its_own_launcher(run: RunPaths) -> None:
    other = put_down(part_of(run, host="node-b"))
    half = part_of(run, 1, host="node-b")
    half.raw.write_text("x")
    assert child(run, "last").wait(30) == 0
    assert other.raw.exists()
    assert half.raw.exists()
    assert not other.trace.exists()


def test_finished_file_with_left_over_parts_is_completed(run: RunPaths) -> None:
    part = put_down(part_of(run))
    finish(run)
    finished = part.trace.read_bytes()
    part.trace.with_name(f".{part.trace.name}.haiprof").mkdir()  # a reader's cache
    put_down(part)
    part.raw.unlink()  # killed between its removal and that of the sidecar
    found, (line,) = finish(run)
    assert found == [part.trace]
    assert part.trace.read_bytes() == finished
    assert line["raw_bytes"] == len(raw_text())
    assert parts_left(run) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_finisher_leaves_nothing_half_and_the_next_one_goes_on(
    run: RunPaths, number: signal.Signals
) -> None:
    text = raw_text(20_000)
    parts = [put_down(part_of(run, rank), text) for rank in range(3)]
    slow = "import time, haiprof.agent.trace_finisher as f\n"
    slow += "real = f.os.fsync\n"
    slow += "f.os.fsync = lambda number: time.sleep(5) or real(number)"
    process = child(run, before=slow)
    within(60, lambda: any(is_unfinished(path.name) for path in run.traces.iterdir()))
    process.send_signal(number)
    process.wait(30)
    assert all(part.raw.exists() for part in parts)
    assert not any(part.trace.exists() for part in parts)
    found, _ = finish(run)
    assert len(found) == 3
    assert [gzip.decompress(path.read_bytes()).decode() for path in found] == [text] * 3
    assert len(list(run.traces.iterdir())) == 4  # the three, and the empty folder of parts


def test_two_finishers_at_once_write_each_trace_once(run: RunPaths) -> None:
    text = raw_text(20_000)
    parts = [put_down(part_of(run, rank), text) for rank in range(8)]
    both = [child(run), child(run)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert all(gzip.decompress(p.trace.read_bytes()).decode() == text for p in parts)
    written = [line["stem"] for line in node_lines(run, "trace_written")]
    assert sorted(written) == sorted({part.stem.text for part in parts})
    assert parts_left(run) == []


def test_full_disk_keeps_the_raw_trace_and_says_so(run: RunPaths) -> None:
    part = put_down(part_of(run), raw_text(50_000))
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    assert child(run, before=limit).wait(30) == 0
    assert part.raw.exists()
    assert [path.name for path in run.traces.iterdir()] == [".parts"]
    (line,) = node_lines(run, "trace_kept_raw")
    assert "File too large" in line["reason"]
    assert run.root / line["path"] == part.raw
    assert len(finish(run)[0]) == 1  # there is room again


def put_aside(part: Part) -> Path:
    return part.raw.rename(part.raw.with_name("aside"))


SPOILT: dict[str, Callable[[Part], object]] = {
    "a link": lambda part: part.raw.symlink_to(put_aside(part)),
    "a pipe": lambda part: os.mkfifo(put_aside(part).with_name(part.raw.name)),
    **{
        f"sidecar {text[:9]}": lambda part, text=text: part.sidecar.write_text(text)  # type: ignore[misc]
        for text in ("", "[]", "nonsense", '"x"', "[" * 100_000, "{}" + " " * (2 << 20))
    },
    **{
        f"sidecar with {facts}": lambda part, facts=facts: put_down(part, **facts)  # type: ignore[misc]
        for facts in (
            {"stem": "../../evil"}, {"stem": 7}, {"rank": "0"}, {"raw_bytes": 3}, {"et_bytes": 10},
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_part_that_does_not_fit_is_a_line_and_no_trace(
    run: RunPaths, spoil: Callable[[Part], object]
) -> None:
    part = put_down(part_of(run))
    spoil(part)
    found, (line,) = finish(run)
    assert (found, line["type"]) == ([], "trace_kept_raw")
    assert line["reason"]
    assert os.path.lexists(part.raw)
    assert part.sidecar.exists()


@pytest.mark.parametrize("name", ["rank0_x.part.json", "..part.json", "rank-1_h_2.3.part.json"])
def test_names_that_are_no_stems_are_left_alone(run: RunPaths, name: str) -> None:
    (run.trace_parts / name).write_text("{}")
    assert finish(run) == ([], [])
    assert parts_left(run) == [name]


def test_memory_stays_bounded_for_a_large_trace(run: RunPaths) -> None:
    part = put_down(part_of(run))
    with part.raw.open("wb") as file:
        file.truncate(160 << 20)  # a hole: zeros
    facts = json.loads(part.sidecar.read_text())
    part.sidecar.write_text(json.dumps({**facts, "raw_bytes": 160 << 20}))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (120 << 20, 120 << 20))"
    assert child(run, before=limit).wait(60) == 0
    assert part.trace.exists()


def test_tick_finishes_what_is_whole_at_low_priority(run: RunPaths, finisher: Finisher) -> None:
    part = put_down(part_of(run))
    finisher.tick()
    pid = finisher._helper.child.pid if finisher._helper.child else 0
    within(60, lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19 or part.trace.exists())
    within(60, lambda: parts_left(run) == [])
    assert part.trace.exists()


def test_part_that_cannot_be_finished_is_not_tried_at_each_tick(
    run: RunPaths, finisher: Finisher
) -> None:
    put_down(part_of(run), raw_bytes=1)
    for _ in range(3):
        finisher.tick()
        within(60, lambda: not finisher._helper.is_working())
    assert len(node_lines(run, "trace_kept_raw")) == 1
    assert finisher.is_settled()


def test_unfinished_export_of_a_living_rank_is_waited_for(
    run: RunPaths, finisher: Finisher
) -> None:
    finisher.tick()
    assert finisher.is_settled(), "nothing is there"
    part_of(run, pid=os.getpid()).raw.write_text("{")
    assert not finisher.is_settled()


def test_end_of_the_job_finishes_everything(
    run: RunPaths, finisher: Finisher, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [put_down(part_of(run, rank)) for rank in range(3)]
    part_of(run, 5).raw.write_text("{")
    finisher.finish(not_yet, quiet=False)
    assert all(part.trace.exists() for part in parts)
    assert not run.trace_parts.exists()
    assert len(node_lines(run, "trace_dropped")) == 1
    assert capfd.readouterr().err == ""  # it took no two seconds


@pytest.mark.parametrize(
    ("pid", "left"), [(GONE_PID, False), (os.getpid(), True)], ids=["gone", "alive"]
)
def test_what_ranks_settled_goes_with_the_last_of_them(
    pid: int, left: bool, run: RunPaths, finisher: Finisher
) -> None:
    settled = run.trace_parts / f"{AGREED_PREFIX}0123-first.json"
    settled.write_text('{"steps": [7]}')
    run.rank(0).root.mkdir(parents=True)
    run.rank(0).report.write_text(json.dumps({"version": 2, "host": HOST, "pid": pid}))
    finisher.finish(not_yet, quiet=True)
    assert settled.exists() == left
    assert run.trace_parts.exists() == left


def test_ctrl_c_at_the_end_leaves_whole_raw_traces(
    run: RunPaths, finisher: Finisher, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [put_down(part_of(run, rank)) for rank in range(3)]
    finisher.finish(lambda: True, quiet=False)
    left = complete_parts(run, HOST)
    assert all(part.raw.exists() or part.trace.exists() for part in parts)
    assert all(part.raw.exists() for part in left)
    if left:
        assert f"{len(left)} of 3 traces stay uncompressed" in capfd.readouterr().err


def test_progress_is_said_when_it_takes_long(
    run: RunPaths, finisher: Finisher, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("haiprof.agent.trace_finisher.QUIET_S", 0.0)
    for rank in range(3):
        put_down(part_of(run, rank), raw_text(20_000))
    finisher.finish(not_yet, quiet=False)
    assert "writing traces: 0 of 3" in capfd.readouterr().err


def not_yet() -> bool:
    time.sleep(0.05)
    return False
