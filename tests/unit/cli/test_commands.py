from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import haiprof
from haiprof.base.errors import RunNotFoundError, UsageError
from haiprof.cli import main
from haiprof.cli.shared import the_job
from haiprof.live.find import RunningJob
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest
from tests.commands import Run
from tests.unit.analysis.recorded import spans_of, write_rank, write_run

STEPS = 40


@pytest.fixture
def job(tmp_path: Path) -> RunPaths:
    """A recorded run of one rank in the log directory `tmp_path`."""
    job = write_run(tmp_path / "job-1")
    write_rank(job, spans_of("D F B O " * STEPS, span_ns=1_000_000, gap_ns=10_000))
    return job


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No HAIPROF_ variable of the tester, and a folder without pyproject.toml."""
    for name in [name for name in os.environ if name.startswith("HAIPROF_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(haiprof.__file__).parent.parent))


@pytest.mark.parametrize("command", ["overview", "rank", "goodput", "ls", "verdict", "report"])
def test_the_next_command_can_be_copied_though_a_folder_has_a_space(
    job: RunPaths, tmp_path: Path, command: str, run: Run
) -> None:
    moved = job.root.rename(tmp_path / "my job")
    ran = run(command, tmp_path if command == "ls" else moved)
    assert f"'{moved}'" in ran.out + ran.err or f"'{moved.name}'" in ran.out + ran.err


@pytest.mark.parametrize(
    "words",
    [["overview", "{}"], ["rank", "{}", "0"], ["list", "{}"], ["verdict", "{}"]],
    ids=lambda words: words[0],
)
def test_json_is_all_that_stdout_gets(job: RunPaths, words: list[str], run: Run) -> None:
    target = job.root.parent if words[0] == "list" else job.root
    output = run(*(word.format(target) for word in words), "--json")
    assert isinstance(json.loads(output.out), dict)
    assert output.err == ""


@pytest.mark.parametrize(("named", "meant"), [
    ("job-1", "job-1"), ("job", "2 runs begin so"), ("logs/job-1-", "job-1-2"),
    ("trai", "train-2026"), ("3", "haiprof verdict rank 3"), ("none", "no such run"),
])  # fmt: skip
def test_run_goes_by_as_much_of_its_name_as_tells_it(
    job: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run,
    named: str, meant: str,
) -> None:  # fmt: skip
    for name in ("job-1-2", "train-2026"):
        shutil.copytree(job.root, tmp_path / "logs" / name)
    job.root.rename(tmp_path / "logs" / "job-1")
    (tmp_path / "train.py").write_text("")  # a file is no run
    monkeypatch.setenv("HAIPROF_LOG_DIR", "logs")
    if (tmp_path / "logs" / meant).exists():
        found = run("verdict", "overview", named, "--json").data
        assert found["run"]["path"].endswith(f"logs/{meant}")
    else:
        assert meant in run("verdict", "overview", named, "--json", status=3).err
    assert "train-2026\n" in run("ls").out, "no name is cut where no terminal is"


def test_script_of_a_running_job_is_its_name(
    job: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    (tmp_path / "train.py").write_text("")
    refused = run("verdict", "train.py", status=3)
    assert "train.py: a file, where a run directory is expected" in refused.err
    for folder, status in (("elsewhere", 3), (str(tmp_path), 0)):
        manifest = replace(read_manifest(job), command=["python", "train.py"], cwd=folder)
        found = RunningJob(run=job, manifest=manifest)
        monkeypatch.setattr("haiprof.cli.shared.the_job", lambda *_, found=found, **__: found)
        ran = run("verdict", "train.py", "--json", status=status)
    assert ran.data["run"].endswith("job-1")


def test_overview_takes_the_newest_run_of_the_default_log_dir(
    job: RunPaths, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("HAIPROF_LOG_DIR", str(job.root.parent))
    found = run("overview", "--json").data
    assert found["run"]["path"] == str(job.root)
    assert found["ranks"][0]["step_count"] == STEPS


def test_views_show_the_run_and_name_the_next_command(job: RunPaths, run: Run) -> None:
    for words in (["overview", str(job.root)], ["rank", str(job.root), "0"]):
        output = run(*words)
        assert "forward" in output.out
        assert "\x1b" not in output.out
        assert "next: haiprof" in output.err


def test_list_shows_newest_last_with_state(job: RunPaths, run: Run) -> None:
    for path in job.rank(0).root.iterdir():
        os.utime(path, (0, 0))
    broken = job.root.parent / "job-2"
    broken.mkdir()
    (broken / "run.json").write_text('{"version": 99}')
    runs = run("list", job.root.parent, "--json").data["runs"]
    assert [Path(entry["path"]).name for entry in runs] == ["job-1", "job-2"]
    assert (runs[0]["state"], runs[0]["step_count"]) == ("killed", STEPS)
    assert "version 99" in runs[1]["problem"]


SEEN = {"rank": 0, "pid": 7, "sample_count": 99, "shares": {"forward": 0.31, "backward": 0.66},
        "hottest": [["<module> (/home/me/train.py:13)", 0.68]], "problem": None}  # fmt: skip


@pytest.mark.parametrize("words", [["verdict"], ["lines"]], ids=" ".join)
@pytest.mark.parametrize(("seen", "said"), [
    (SEEN, "backward in 66 % of 99 samples"),
    (SEEN, "68 % at <module> (/home/me/train.py:13)"),
    (SEEN, "haiprof attach --inject"),
    ({"problem": "no py-spy"}, "rank 0: no stacks: no py-spy"),
    ({"shares": [1], "hottest": [[1], 2, "ab"]}, "rank 0: no stacks: not known"),
])  # fmt: skip
def test_run_that_was_sampled_from_outside_shows_its_samples(
    tmp_path: Path, run: Run, words: list[str], seen: dict[str, object], said: str
) -> None:
    sampled = write_run(tmp_path / "attach-1")
    sampled.report.mkdir()
    sampled.external_samples_json.write_text(json.dumps({"version": 1, "seen": [seen]}))
    found = run(*words, sampled.root).said
    assert said in found
    assert "sampled from outside, without steps" in found


def reasons(card: str) -> list[str]:
    """Lines of a card but its end and the next command, which stands below where it is long."""
    lines = [
        line
        for line in card.splitlines()
        if line.strip("│ ") and "haiprof verdict rank" not in line
    ]
    return [line for line in lines if not line.startswith("╰")]


def test_verdict_save_writes_the_report(
    job: RunPaths, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a file has a width of its own
    printed, saved = run("verdict", job.root, "--save", "--all").out, job.verdict_text.read_text()
    assert reasons(printed) == reasons(saved) != []
    assert f"haiprof verdict rank {job.root.name} 0" in printed  # as it is named from here
    assert f"haiprof verdict rank {job.root} 0" in saved  # it is read from anywhere
    assert json.loads(job.verdict_json.read_text())["step_count"] == STEPS


@pytest.mark.parametrize(("words", "status", "message"), [
    (["overview", "/nowhere"], 3, "/nowhere"),
    (["overview"], 3, "haiprof-logs"),
    (["overview", "--bad"], 2, "--bad"),
    (["rank", "one"], 3, "one: no such run"),
    (["rank", "1", "2"], 2, "expected a directory and a rank"),
    (["rank", "{run}", "7"], 5, "no rank 7"),
    (["copy", "{run}", "nowhere"], 2, "error: copy: 'nowhere' is no address"),
    (["overview", "{run}", "--html", "/nowhere/o.html"], 2, "/nowhere/o.html"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)  # fmt: skip
def test_error_is_one_line_and_a_status(
    job: RunPaths, words: list[str], status: int, message: str, run: Run
) -> None:
    error = run(*(word.format(run=job.root) for word in words), status=status).err
    lines = error.splitlines()
    assert lines[0].startswith("haiprof: error: ")
    assert message in lines[0]
    assert all(line.startswith("haiprof: hint: ") for line in lines[1:])
    assert "Traceback" not in error


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from haiprof.base.errors import RunNotFoundError

    monkeypatch.setenv("HAIPROF_DEBUG", "1")
    with pytest.raises(RunNotFoundError):
        main(["overview", "/nowhere"])


def test_scalars_are_tensorboards_own_files(job: RunPaths, run: Run) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    for _ in range(2):  # a second time replaces the first
        written = run("scalars", job.root, "--json").data
    files = list((job.tensorboard / "rank0").iterdir())
    assert len(files) == 1
    events = [e for e in loader.EventFileLoader(str(files[0])).Load() if e.HasField("summary")]
    assert len(events) == written["point_count"] > 0
    tags = {value.tag for event in events for value in event.summary.value}
    assert {"step_ms", "forward_ms", "backward_ms", "optimizer_ms"} <= tags


def test_missing_packages_are_named_with_their_extra(
    job: RunPaths, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    ran = run("scalars", job.root, status=6)
    assert "pip install 'haiprof[tensorboard]'" in ran.err
    monkeypatch.delitem(sys.modules, "haiprof.show.page.server", raising=False)
    monkeypatch.setitem(sys.modules, "werkzeug.wrappers", None)
    ran = run("report", "--serve", job.root, "--no-browser", status=6)
    assert "pip install 'haiprof[view]'" in ran.err


def test_job_that_is_not_named_is_told_and_of_several_one_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        RunningJob(run=(job := write_run(tmp_path / name)), manifest=read_manifest(job))
        for name in ("logs/train-1", "logs/train-2", "other/train-3")
    ]
    running = jobs[::2]
    monkeypatch.setattr("haiprof.live.find.running_jobs", lambda _: running)
    assert the_job(None, [tmp_path / "logs"]) is jobs[0]
    assert "train-1 (pid " in capsys.readouterr().err
    monkeypatch.setenv("HAIPROF_LOG_DIR", str(tmp_path / "other"))
    assert the_job(None, None) is jobs[2]
    with pytest.raises(RunNotFoundError, match=r"in /.*/none; elsewhere: train-1 \(pid .*train-3"):
        the_job(None, [tmp_path / "none"])  # a job of another log directory is only taken by name
    running = jobs
    with pytest.raises(UsageError, match=r"train-1 \(pid [^;]*; train-2 \(pid [^;]*$"):
        the_job(None, [tmp_path / "logs"])


def test_live_list_takes_a_log_directory(job: RunPaths, run: Run) -> None:
    assert run("ls", job.root.parent, "--live", "--once").err == ""
    assert "did you mean --live?" in run("ls", "--liv", status=2).err


def test_a_folder_of_log_directories_names_them(tmp_path: Path, run: Run) -> None:
    write_rank(write_run(tmp_path / "jobs" / "logs-a" / "job-1"), spans_of("F B O " * 3))
    write_rank(write_run(tmp_path / "jobs" / "old" / "logs-b" / "job-2"), spans_of("F B O " * 3))
    shown = "".join(run("ls", tmp_path / "jobs").out.split())
    for folder in ("logs-a", "old/logs-b"):
        assert f"{tmp_path}/jobs/{folder}" in shown
    assert "logs-a" in run("verdict", tmp_path / "jobs", status=3).err
    (tmp_path / "empty").mkdir()
    assert "record one" in run("ls", tmp_path / "empty").out


@pytest.mark.parametrize("command", ["snapshot", "verdict"])
def test_a_process_without_haiprof_is_told_from_one_that_does_not_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("HAIPROF_LOG_DIR", str(tmp_path))
    monkeypatch.setattr("haiprof.live.find._run_of_process", lambda *_, **__: None)
    ran = run(command, os.getpid(), status=3)
    assert f"process {os.getpid()} runs, but haiprof does not record it" in ran.err
    assert f"hint: haiprof attach {os.getpid()}" in ran.err
    assert "no running job '4194305'" in run(command, "4194305", status=3).err
