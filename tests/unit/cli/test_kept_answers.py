"""Answers of commands are kept in a run that has ended, and made again when anything changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.cli import app, main
from haiprof.cli.app import command_function
from haiprof.run_format import kept_answers
from haiprof.run_format.layout import RunPaths
from haiprof.show.run_list import run_list
from haiprof.trace_analysis import pool
from tests.commands import Run
from tests.unit.analysis.recorded import spans_of, write_rank, write_run
from tests.unit.report.many_ranks import write_many

STEPS = 40


def ended_run(root: Path) -> RunPaths:
    job = write_run(root)
    write_rank(job, spans_of("D F B O " * STEPS, span_ns=1_000_000, gap_ns=10_000))
    manifest = json.loads(job.manifest.read_text())
    manifest["end_wall_ns"] = manifest.get("start_wall_ns", 0) + 10**10
    job.manifest.write_text(json.dumps(manifest))
    return job


@pytest.fixture
def job(tmp_path: Path) -> RunPaths:
    return ended_run(tmp_path / "job-1")


def answers(job: RunPaths) -> dict[str, dict[str, object]]:
    return {path.name: json.loads(path.read_text()) for path in job.answers.glob("*.json")}


@pytest.mark.parametrize("words", [["verdict"], ["overview"], ["rank", "0"], ["verdict", "--json"]])
def test_second_answer_is_the_first_one(job: RunPaths, words: list[str], run: Run) -> None:
    command = [words[0], str(job.root), *words[1:]]
    first = run(*command)
    assert len(answers(job)) == 1
    kept = job.answer(next(iter(answers(job))).removesuffix(".json")).stat().st_mtime_ns
    assert run(*command) == first
    assert job.answer(next(iter(answers(job))).removesuffix(".json")).stat().st_mtime_ns == kept


@pytest.mark.parametrize("words", [["verdict"], ["overview"], ["lines"]])
def test_answer_of_a_run_that_became_the_newest_meanwhile_is_not_the_others(
    job: RunPaths, words: list[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir, later = job.root.parent, job.root.parent / "job-2"
    manifest = ended_run(log_dir.with_name("elsewhere") / "job-2").manifest
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"start_wall_ns": 10**19}))

    def after_another_began(name: str) -> Callable[..., None]:
        if not later.exists():
            shutil.move(manifest.parent, later)
        return command_function(name)

    monkeypatch.setattr(app, "command_function", after_another_began)
    run(*words, "--log-dir", str(log_dir))
    assert later.exists()
    assert not answers(job)


def test_answer_is_made_again_when_a_file_changes(job: RunPaths, run: Run) -> None:
    assert run("verdict", job.root, "--json").data["step_count"] == STEPS
    shutil.rmtree(job.rank(0).root)
    write_rank(job, spans_of("D F B O " * 20, span_ns=1_000_000, gap_ns=10_000))
    assert run("verdict", job.root, "--json").data["step_count"] == 20


def test_answer_of_another_version_is_not_believed(
    job: RunPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = kept_answers.fingerprint(job)
    monkeypatch.setattr(kept_answers, "__version__", "0.0.1")
    assert kept_answers.fingerprint(job) != before
    assert main(["verdict", str(job.root)]) == 0
    copy = RunPaths(tmp_path / "copy")
    shutil.copytree(job.root, copy.root)
    name = next(iter(answers(copy))).removesuffix(".json")
    stamp = kept_answers.fingerprint(copy)
    assert stamp is not None
    assert kept_answers.read_answer(copy, name, valid_for=stamp) is None


def test_nothing_is_kept_of_a_run_that_may_still_change(tmp_path: Path) -> None:
    job = write_run(tmp_path / "job-2")
    write_rank(job, spans_of("D F B O " * STEPS, span_ns=1_000_000, gap_ns=10_000))
    assert main(["verdict", str(job.root)]) == 0
    assert not job.answers.exists()


def test_kept_text_controls_no_terminal(job: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verdict", str(job.root)]) == 0
    ((name, content),) = answers(job).items()
    evil = {"stdout": "\x1b[1mbold\x1b[0m \x1b]0;title\x07 \x1b[2J\n", "stderr": ""}
    job.answer(name.removesuffix(".json")).write_text(json.dumps(content | {"answer": evil}))
    capsys.readouterr()
    assert main(["verdict", str(job.root)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("\x1b[1mbold\x1b[0m ")
    assert printed.count("\x1b") == 2
    assert "\x07" not in printed


def test_link_in_place_of_answers_is_not_written_through(job: RunPaths, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    job.report.mkdir(exist_ok=True)
    os.symlink(elsewhere, job.answers)
    assert main(["verdict", str(job.root)]) == 0
    assert list(elsewhere.iterdir()) == []


def test_list_is_kept_run_by_run(job: RunPaths) -> None:
    (first,) = run_list(job.root.parent)
    assert first.step_count == STEPS
    assert list(answers(job)) == ["list.json"]
    assert run_list(job.root.parent) == [first]
    shutil.rmtree(job.rank(0).root)
    (changed,) = run_list(job.root.parent)
    assert changed.step_count == 0


@pytest.mark.parametrize("change", [
    {"duration_ns": "long"}, {"duration_ns": {}}, {"start_wall_ns": 10**30}, {"start_wall_ns": -1},
    {"rank_count": "2"}, {"step_count": True}, {"step_count": [1]}, {"state": "\x1b[2J"},
    {"state": ["ended"]}, {"name": 7}, {"path": None}, {"problem": {}}, {"died_rank": 1.5},
    {"exit_status": 10**30}, {"is_counted": 1}, {"signal": 9}, {"more": 1},
])  # fmt: skip
def test_list_works_a_damaged_entry_out_anew(
    job: RunPaths, change: dict[str, object], run: Run
) -> None:
    (first,) = run_list(job.root.parent)
    content = answers(job)["list.json"]
    entry = content["answer"]
    assert isinstance(entry, dict)
    job.answer("list").write_text(json.dumps(content | {"answer": entry | change}))
    ran = run("list", job.root.parent)
    assert "internal error" not in ran.err
    assert run_list(job.root.parent) == [first]


def test_list_names_a_run_as_it_is_asked_for_now(
    job: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.root.parent)
    assert [entry.path for entry in run_list(Path())] == ["job-1"]
    assert [entry.path for entry in run_list(job.root.parent)] == [str(job.root)]


def test_list_keeps_what_it_read_of_a_killed_run_too(job: RunPaths) -> None:
    manifest = json.loads(job.manifest.read_text())
    job.manifest.write_text(json.dumps(manifest | {"end_wall_ns": None}))
    for path in job.root.rglob("*"):
        os.utime(path, (10**9, 10**9))  # nobody has written for years
    (first,) = run_list(job.root.parent)
    assert (first.state, first.step_count) == ("killed", STEPS)
    assert list(answers(job)) == ["list.json"]
    assert run_list(job.root.parent) == [first]
    write_rank(job, spans_of("D F B O " * 50, span_ns=1_000_000, gap_ns=10_000), rank=1)
    (grown,) = run_list(job.root.parent)
    assert (grown.step_count, grown.rank_count) == (50, 2)


def test_list_reads_verdict_that_launcher_saved_at_the_end(job: RunPaths, tmp_path: Path) -> None:
    assert main(["verdict", str(job.root), "--save"]) == 0
    shutil.copytree(job.root, tmp_path / "copies" / "job-1")
    (entry,) = run_list(job.root.parent)
    assert (entry.step_count, entry.died_of) == (STEPS, None)
    assert [name.partition("-")[0] for name in answers(job)] == ["verdict"]  # nothing was counted
    (copy,) = run_list(tmp_path / "copies")
    assert copy.step_count == STEPS


@pytest.mark.parametrize(
    ("finding", "said"),
    [({}, "evaluation heavy, 41 %"), ({"lost_ratio": None}, "evaluation heavy"),
     ({"severity": "info"}, None), ({"slug": "\x1b[2J"}, None), ({"slug": 7}, None)],
)  # fmt: skip
def test_list_says_what_slows_a_run(
    job: RunPaths, finding: dict[str, object], said: str | None
) -> None:
    assert main(["verdict", str(job.root), "--save"]) == 0
    content = json.loads(job.verdict_json.read_text())
    first = {"slug": "evaluation_heavy", "severity": "critical", "lost_ratio": 0.41} | finding
    job.verdict_json.write_text(json.dumps(content | {"findings": [first]}))
    (entry,) = run_list(job.root.parent)
    assert entry.slowed_by == said


def test_long_list_counts_newest_runs_and_the_others_when_asked(job: RunPaths, run: Run) -> None:
    log_dir = job.root.parent
    other = ended_run(log_dir / "job-2")
    assert [entry.is_counted for entry in run_list(log_dir, limit_s=0)] == [False, False]
    assert not job.answers.exists()
    assert not other.answers.exists()
    assert [entry.step_count for entry in run_list(log_dir)] == [STEPS, STEPS]
    (log_dir / "job-2" / "ranks" / "0" / "more").write_text("")
    first, second = run_list(log_dir, limit_s=0)
    assert (first.step_count, second.step_count) == (STEPS, None)
    assert "not counted" not in run("list", log_dir, "--all").out


def test_list_does_not_begin_a_count_that_takes_longer_than_it_has(tmp_path: Path) -> None:
    write_many(tmp_path / "many", ranks=200, steps=20)
    (entry,) = run_list(tmp_path, limit_s=0.5)
    assert (entry.is_counted, entry.rank_count, entry.step_count) == (False, 200, None)
    (entry,) = run_list(tmp_path)
    assert entry.step_count == 20


@pytest.mark.parametrize(
    "change",
    [{"end_wall_ns": 5}, {"end_wall_ns": None}, {"most_steps": "7"}, {"most_steps": None},
     {"death": {"cause": "\x1b[2J", "ranks": []}}, {"death": 7}],
)  # fmt: skip
def test_list_believes_no_verdict_of_another_end_or_form(
    job: RunPaths, change: dict[str, object]
) -> None:
    assert main(["verdict", str(job.root), "--save"]) == 0
    content = json.loads(job.verdict_json.read_text())
    job.verdict_json.write_text(json.dumps(content | {"most_steps": 7} | change))
    (entry,) = run_list(job.root.parent)
    assert (entry.step_count, entry.died_of) == (STEPS, None)


def test_process_id_is_no_question_about_the_newest_run(job: RunPaths, run: Run) -> None:
    run("verdict", "--log-dir", job.root.parent)
    ran = run("verdict", "4194305", "--log-dir", job.root.parent, status=3)
    assert "no running job '4194305'" in ran.err


@pytest.mark.parametrize("words", [["verdict"], ["verdict", "."], ["verdict", "{run}"]])
@pytest.mark.parametrize("absolute", [True, False])
def test_verdict_of_the_jobs_end_is_the_first_answer_too(
    job: RunPaths, words: list[str], absolute: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's own: made once, however the run is named, and made anew if asked."""
    monkeypatch.chdir(job.root.parent)
    first = run("verdict", job.root if absolute else job.root.name, "--save")
    [name] = answers(job)
    assert job.verdict_json.exists()
    asked = [word.format(run=job.root.name) for word in words]
    assert run(*asked, *(["--log-dir", "."] if len(asked) == 1 else [])) == first
    assert list(answers(job)) == [name]
    job.verdict_json.unlink()
    assert main(["verdict", "--save", "--log-dir", "."]) == 0
    assert job.verdict_json.exists()


def test_verdict_that_left_large_traces_alone_is_no_answer(
    job: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.traces.mkdir()
    (job.traces / "rank0-0.pt.trace.json").write_text('{"traceEvents": []}')
    monkeypatch.setattr(pool, "SMALL_BYTES", 10)
    assert main(["verdict", str(job.root), "--save"]) == 0
    assert not answers(job)
    monkeypatch.undo()
    assert main(["verdict", str(job.root), "--save"]) == 0
    assert len(answers(job)) == 1


def test_damaged_manifest_is_told_as_damage_in_verdict_and_list(job: RunPaths, run: Run) -> None:
    """It ended with status 0: neither "killed" nor "no process reported in" is known."""
    job.manifest.write_text(job.manifest.read_text()[:40])
    shutil.rmtree(job.rank(0).root)
    job.node("node0").root.mkdir(parents=True)
    job.node("node0").events.write_text(json.dumps({"type": "job_end", "wall_ns": 1}) + "\n")
    assert run("list", job.root.parent, "--json").data["runs"][0]["state"] == "damaged"
    out = run("verdict", job.root, "--all").out
    assert "run.json is damaged" in " ".join(out.split())
    assert "no process of the job reported in" not in out
    assert "killed" not in out
