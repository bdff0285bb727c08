from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import haiprof
from haiprof.base.errors import UsageError
from haiprof.cli import main
from haiprof.cli.arguments import the_job
from haiprof.cli.names import COMMANDS
from haiprof.live.find import RunningJob
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest
from tests.unit.analysis.recorded import spans_of, write_rank, write_run

STEPS = 40


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A recorded run of one rank in the log directory `tmp_path`."""
    run = write_run(tmp_path / "job-1")
    write_rank(run, spans_of("D F B O " * STEPS, span_ns=1_000_000, gap_ns=10_000))
    return run


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No HAIPROF_ variable of the tester, and a folder without pyproject.toml."""
    for name in [name for name in os.environ if name.startswith("HAIPROF_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(haiprof.__file__).parent.parent))


@pytest.mark.parametrize(
    "words",
    [["overview", "{}"], ["rank", "{}", "0"], ["list", "{}"], ["verdict", "{}"]],
    ids=lambda words: words[0],
)
def test_json_is_all_that_stdout_gets(
    run: RunPaths, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = run.root.parent if words[0] == "list" else run.root
    assert main([*(word.format(target) for word in words), "--json"]) == 0
    output = capsys.readouterr()
    assert isinstance(json.loads(output.out), dict)
    assert output.err == ""


def test_run_goes_by_as_much_of_its_name_as_tells_it(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(run.root.parent / "other-2")
    assert main(["verdict", str(run.root.parent / "job"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"].endswith("job-1")
    write_run(run.root.parent / "job-2")
    assert main(["verdict", str(run.root.parent / "job"), "--json"]) == 3
    assert "job" in capsys.readouterr().err


def test_script_of_a_running_job_is_its_name(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "train.py").write_text("")
    assert main(["verdict", "train.py"]) == 3
    assert "train.py: a file, where a run directory is expected" in capsys.readouterr().err
    for folder, status in (("elsewhere", 3), (str(tmp_path), 0)):
        manifest = replace(read_manifest(run), command=["python", "train.py"], cwd=folder)
        job = RunningJob(run=run, manifest=manifest)
        monkeypatch.setattr("haiprof.cli.verdict.the_job", lambda *_, job=job, **__: job)
        assert main(["verdict", "train.py", "--json"]) == status
    assert json.loads(capsys.readouterr().out)["run"].endswith("job-1")


def test_overview_takes_the_newest_run_of_the_default_log_dir(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HAIPROF_LOG_DIR", str(run.root.parent))
    assert main(["overview", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["path"] == str(run.root)
    assert found["ranks"][0]["step_count"] == STEPS


def test_views_show_the_run_and_name_the_next_command(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["overview", str(run.root)], ["rank", str(run.root), "0"]):
        assert main(words) == 0
        output = capsys.readouterr()
        assert "forward" in output.out
        assert "\x1b" not in output.out
        assert "next: haiprof" in output.err


def test_list_shows_newest_last_with_state(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in run.rank(0).root.iterdir():
        os.utime(path, (0, 0))
    broken = run.root.parent / "job-2"
    broken.mkdir()
    (broken / "run.json").write_text('{"version": 99}')
    assert main(["list", str(run.root.parent), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [Path(entry["path"]).name for entry in runs] == ["job-1", "job-2"]
    assert (runs[0]["state"], runs[0]["step_count"]) == ("killed", STEPS)
    assert "version 99" in runs[1]["problem"]


def test_list_of_an_empty_folder_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out


def reasons(card: str) -> list[str]:
    """Lines of a card but its end and the next command, which stands below where it is long."""
    lines = [
        line
        for line in card.splitlines()
        if line.strip("│ ") and "haiprof verdict rank" not in line
    ]
    return [line for line in lines if not line.startswith("╰")]


def test_verdict_save_writes_the_report(
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a file has a width of its own
    assert main(["verdict", str(run.root), "--save", "--all"]) == 0
    printed, saved = capsys.readouterr().out, run.verdict_text.read_text()
    assert reasons(printed) == reasons(saved) != []
    assert f"haiprof verdict rank {run.root.name} 0" in printed  # as it is named from here
    assert f"haiprof verdict rank {run.root} 0" in saved  # it is read from anywhere
    assert json.loads(run.verdict_json.read_text())["step_count"] == STEPS


def test_html_and_svg_are_written(run: RunPaths, tmp_path: Path) -> None:
    page, card = tmp_path / "o.html", tmp_path / "card.svg"
    assert main(["overview", str(run.root), "--html", str(page)]) == 0
    assert main(["verdict", str(run.root), "--svg", str(card)]) == 0
    assert "plotly" in page.read_text()
    assert "<svg" in card.read_text()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["overview", "/nowhere"], 3, "/nowhere"),
        (["overview"], 3, "haiprof-logs"),
        (["overview", "--bad"], 2, "--bad"),
        (["rank", "one"], 3, "one: no such run"),
        (["rank", "1", "2"], 2, "expected a directory and a rank"),
        (["rank", "{run}", "7"], 5, "no rank 7"),
        (["copy", "{run}", "nowhere"], 2, "error: copy: 'nowhere' is no address"),
        (["overview", "{run}", "--html", "/nowhere/o.html"], 2, "/nowhere/o.html"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_error_is_one_line_and_a_status(
    run: RunPaths,
    words: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([word.format(run=run.root) for word in words]) == status
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert lines[0].startswith("haiprof: error: ")
    assert message in lines[0]
    assert all(line.startswith("haiprof: hint: ") for line in lines[1:])
    assert "Traceback" not in output.err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from haiprof.base.errors import RunNotFoundError

    monkeypatch.setenv("HAIPROF_DEBUG", "1")
    with pytest.raises(RunNotFoundError):
        main(["overview", "/nowhere"])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "For example" in text
    assert f"haiprof {COMMANDS[name].words}".removesuffix(" --live") in text


def test_scalars_are_tensorboards_own_files(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    for _ in range(2):  # a second time replaces the first
        assert main(["scalars", str(run.root), "--json"]) == 0
        written = json.loads(capsys.readouterr().out)
    files = list((run.tensorboard / "rank0").iterdir())
    assert len(files) == 1
    events = [e for e in loader.EventFileLoader(str(files[0])).Load() if e.HasField("summary")]
    assert len(events) == written["point_count"] > 0
    tags = {value.tag for event in events for value in event.summary.value}
    assert {"step_ms", "forward_ms", "backward_ms", "optimizer_ms"} <= tags


def test_scalars_without_tensorboard_name_the_extra(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    assert main(["scalars", str(run.root)]) == 6
    assert "pip install 'haiprof[tensorboard]'" in capsys.readouterr().err


def test_job_that_is_not_named_is_told_and_of_several_one_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        RunningJob(run=(run := write_run(tmp_path / name)), manifest=read_manifest(run))
        for name in ("train-1", "train-2")
    ]
    monkeypatch.setattr("haiprof.live.find.running_jobs", lambda _: jobs[:1])
    assert the_job(None, None) is jobs[0]
    said = capsys.readouterr().err
    assert "train-1 (pid " in said
    assert "haiprof ls --live" in said
    monkeypatch.setattr("haiprof.live.find.running_jobs", lambda _: jobs)
    with pytest.raises(UsageError, match=r"train-1 \(pid .*train-2 \(pid "):
        the_job(None, None)


def test_run_is_named_by_as_much_of_its_name_as_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Path(__file__).parents[2] / "data/runs/garbage"
    for name in ("first-2026", "second-2026"):
        shutil.copytree(recorded, tmp_path / "haiprof-logs" / name)
    monkeypatch.chdir(tmp_path)
    assert main(["verdict", "overview", "sec", "--json"]) == 0
    assert "second-2026" in capsys.readouterr().out
    assert main(["verdict", "overview", "3"]) != 0
    assert "haiprof verdict rank 3" in capsys.readouterr().err
    assert main(["ls"]) == 0
    assert "second-2026\n" in capsys.readouterr().out, "no name is cut where no terminal is"


def test_whole_name_is_that_run_and_a_file_that_begins_so_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Path(__file__).parents[2] / "data/runs/garbage"
    for name in ("job-7", "job-7-2", "train-2026"):
        shutil.copytree(recorded, tmp_path / "haiprof-logs" / name)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for given, meant in (("job-7", "job-7"), ("trai", "train-2026")):
        assert main(["verdict", "overview", given, "--json"]) == 0
        assert f'haiprof-logs/{meant}"' in capsys.readouterr().out
    assert main(["verdict", "overview", "job"]) != 0
    assert "2 runs begin so" in capsys.readouterr().err


def test_option_that_begins_a_command_of_the_group_is_suggested(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ls", "--liv"]) == 2
    assert "did you mean --live?" in capsys.readouterr().err


def test_a_folder_of_log_directories_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rank(write_run(tmp_path / "jobs" / "logs-a" / "job-1"), spans_of("F B O " * 3))
    write_rank(write_run(tmp_path / "jobs" / "old" / "logs-b" / "job-2"), spans_of("F B O " * 3))
    assert main(["ls", str(tmp_path / "jobs")]) == 0
    shown = "".join(capsys.readouterr().out.split())
    for folder in ("logs-a", "old/logs-b"):
        assert f"{tmp_path}/jobs/{folder}" in shown
    assert main(["verdict", str(tmp_path / "jobs")]) != 0
    assert "logs-a" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["ls", str(tmp_path / "empty")]) == 0
    assert "record one" in capsys.readouterr().out
