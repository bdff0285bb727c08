"""Answers of commands are kept in a run that has ended, and made again when anything changes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from haiprof.cli import main
from haiprof.run_format import kept_answers
from haiprof.run_format.layout import RunPaths
from haiprof.show.run_list import run_list
from haiprof.trace_analysis import pool
from tests.unit.analysis.recorded import spans_of, write_rank, write_run
from tests.unit.report.many_ranks import write_many

STEPS = 40


def ended_run(root: Path) -> RunPaths:
    run = write_run(root)
    write_rank(run, spans_of("D F B O " * STEPS, span_ns=1_000_000, gap_ns=10_000))
    manifest = json.loads(run.manifest.read_text())
    manifest["end_wall_ns"] = manifest.get("start_wall_ns", 0) + 10**10
    run.manifest.write_text(json.dumps(manifest))
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return ended_run(tmp_path / "job-1")


def answers(run: RunPaths) -> dict[str, dict[str, object]]:
    return {path.name: json.loads(path.read_text()) for path in run.answers.glob("*.json")}


@pytest.mark.parametrize("words", [["verdict"], ["overview"], ["rank", "0"], ["verdict", "--json"]])
def test_second_answer_is_the_first_one(
    run: RunPaths, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [words[0], str(run.root), *words[1:]]
    assert main(command) == 0
    first = capsys.readouterr()
    assert len(answers(run)) == 1
    kept = run.answer(next(iter(answers(run))).removesuffix(".json")).stat().st_mtime_ns
    assert main(command) == 0
    assert capsys.readouterr() == first
    assert run.answer(next(iter(answers(run))).removesuffix(".json")).stat().st_mtime_ns == kept


def test_answer_is_made_again_when_a_file_changes(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verdict", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_count"] == STEPS
    shutil.rmtree(run.rank(0).root)
    write_rank(run, spans_of("D F B O " * 20, span_ns=1_000_000, gap_ns=10_000))
    assert main(["verdict", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_count"] == 20


def test_answer_of_another_version_is_not_believed(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept_answers.fingerprint(run)
    monkeypatch.setattr(kept_answers, "__version__", "0.0.1")
    assert kept_answers.fingerprint(run) != before


def test_answer_in_a_copied_run_is_not_believed(run: RunPaths, tmp_path: Path) -> None:
    assert main(["verdict", str(run.root)]) == 0
    copy = RunPaths(tmp_path / "copy")
    shutil.copytree(run.root, copy.root)
    name = next(iter(answers(copy))).removesuffix(".json")
    stamp = kept_answers.fingerprint(copy)
    assert stamp is not None
    assert kept_answers.read_answer(copy, name, valid_for=stamp) is None


def test_nothing_is_kept_of_a_run_that_may_still_change(tmp_path: Path) -> None:
    run = write_run(tmp_path / "job-2")
    write_rank(run, spans_of("D F B O " * STEPS, span_ns=1_000_000, gap_ns=10_000))
    assert main(["verdict", str(run.root)]) == 0
    assert not run.answers.exists()


def test_kept_text_controls_no_terminal(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verdict", str(run.root)]) == 0
    ((name, content),) = answers(run).items()
    evil = {"stdout": "\x1b[1mbold\x1b[0m \x1b]0;title\x07 \x1b[2J\n", "stderr": ""}
    run.answer(name.removesuffix(".json")).write_text(json.dumps(content | {"answer": evil}))
    capsys.readouterr()
    assert main(["verdict", str(run.root)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("\x1b[1mbold\x1b[0m ")
    assert printed.count("\x1b") == 2
    assert "\x07" not in printed


def test_link_in_place_of_answers_is_not_written_through(run: RunPaths, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.report.mkdir(exist_ok=True)
    os.symlink(elsewhere, run.answers)
    assert main(["verdict", str(run.root)]) == 0
    assert list(elsewhere.iterdir()) == []


def test_list_is_kept_run_by_run(run: RunPaths) -> None:
    (first,) = run_list(run.root.parent)
    assert first.step_count == STEPS
    assert list(answers(run)) == ["list.json"]
    assert run_list(run.root.parent) == [first]
    shutil.rmtree(run.rank(0).root)
    (changed,) = run_list(run.root.parent)
    assert changed.step_count == 0


@pytest.mark.parametrize("change", [
    {"duration_ns": "long"}, {"duration_ns": {}}, {"start_wall_ns": 10**30}, {"start_wall_ns": -1},
    {"rank_count": "2"}, {"step_count": True}, {"step_count": [1]}, {"state": "\x1b[2J"},
    {"state": ["ended"]}, {"name": 7}, {"path": None}, {"problem": {}}, {"died_rank": 1.5},
    {"exit_status": 10**30}, {"is_counted": 1}, {"signal": 9}, {"more": 1},
])  # fmt: skip
def test_list_works_a_damaged_entry_out_anew(
    run: RunPaths, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    (first,) = run_list(run.root.parent)
    content = answers(run)["list.json"]
    entry = content["answer"]
    assert isinstance(entry, dict)
    run.answer("list").write_text(json.dumps(content | {"answer": entry | change}))
    assert main(["list", str(run.root.parent)]) == 0
    assert "internal error" not in capsys.readouterr().err
    assert run_list(run.root.parent) == [first]


def test_list_names_a_run_as_it_is_asked_for_now(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.root.parent)
    assert [entry.path for entry in run_list(Path())] == ["job-1"]
    assert [entry.path for entry in run_list(run.root.parent)] == [str(run.root)]


def test_list_keeps_what_it_read_of_a_killed_run_too(run: RunPaths) -> None:
    manifest = json.loads(run.manifest.read_text())
    run.manifest.write_text(json.dumps(manifest | {"end_wall_ns": None}))
    for path in run.root.rglob("*"):
        os.utime(path, (10**9, 10**9))  # nobody has written for years
    (first,) = run_list(run.root.parent)
    assert (first.state, first.step_count) == ("killed", STEPS)
    assert list(answers(run)) == ["list.json"]
    assert run_list(run.root.parent) == [first]
    write_rank(run, spans_of("D F B O " * 50, span_ns=1_000_000, gap_ns=10_000), rank=1)
    (grown,) = run_list(run.root.parent)
    assert (grown.step_count, grown.rank_count) == (50, 2)


def test_list_reads_the_verdict_that_the_launcher_saved_at_the_end(
    run: RunPaths, tmp_path: Path
) -> None:
    assert main(["verdict", str(run.root), "--save"]) == 0
    shutil.copytree(run.root, tmp_path / "copies" / "job-1")
    (entry,) = run_list(run.root.parent)
    assert (entry.step_count, entry.died_of) == (STEPS, None)
    assert [name.partition("-")[0] for name in answers(run)] == ["verdict"]  # nothing was counted
    (copy,) = run_list(tmp_path / "copies")
    assert copy.step_count == STEPS


def test_long_list_counts_the_newest_runs_and_the_others_when_asked(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dir = run.root.parent
    other = ended_run(log_dir / "job-2")
    assert [entry.is_counted for entry in run_list(log_dir, limit_s=0)] == [False, False]
    assert not run.answers.exists()
    assert not other.answers.exists()
    assert [entry.step_count for entry in run_list(log_dir)] == [STEPS, STEPS]
    (log_dir / "job-2" / "ranks" / "0" / "more").write_text("")
    first, second = run_list(log_dir, limit_s=0)
    assert (first.step_count, second.step_count) == (STEPS, None)
    assert main(["list", str(log_dir), "--all"]) == 0
    assert "not counted" not in capsys.readouterr().out


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
    run: RunPaths, change: dict[str, object]
) -> None:
    assert main(["verdict", str(run.root), "--save"]) == 0
    content = json.loads(run.verdict_json.read_text())
    run.verdict_json.write_text(json.dumps(content | {"most_steps": 7} | change))
    (entry,) = run_list(run.root.parent)
    assert (entry.step_count, entry.died_of) == (STEPS, None)


def test_process_id_is_no_question_about_the_newest_run(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verdict", "--log-dir", str(run.root.parent)]) == 0
    capsys.readouterr()
    assert main(["verdict", "4194305", "--log-dir", str(run.root.parent)]) != 0
    assert "no running job '4194305'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["verdict"], ["verdict", "."], ["verdict", "{run}"]])
@pytest.mark.parametrize("absolute", [True, False])
def test_verdict_of_the_jobs_end_is_the_first_answer_too(
    run: RunPaths,
    words: list[str],
    absolute: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher's own: made once, however the run is named, and made anew if asked."""
    monkeypatch.chdir(run.root.parent)
    assert main(["verdict", str(run.root) if absolute else run.root.name, "--save"]) == 0
    first = capsys.readouterr()
    [name] = answers(run)
    assert run.verdict_json.exists()
    asked = [word.format(run=run.root.name) for word in words]
    assert main([*asked, *(["--log-dir", "."] if len(asked) == 1 else [])]) == 0
    assert capsys.readouterr() == first
    assert list(answers(run)) == [name]
    run.verdict_json.unlink()
    assert main(["verdict", "--save", "--log-dir", "."]) == 0
    assert run.verdict_json.exists()


def test_verdict_that_left_large_traces_alone_is_no_answer(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.traces.mkdir()
    (run.traces / "rank0-0.pt.trace.json").write_text('{"traceEvents": []}')
    monkeypatch.setattr(pool, "SMALL_BYTES", 10)
    assert main(["verdict", str(run.root), "--save"]) == 0
    assert not answers(run)
    monkeypatch.undo()
    assert main(["verdict", str(run.root), "--save"]) == 0
    assert len(answers(run)) == 1


def test_damaged_manifest_is_told_as_damage_in_verdict_and_list(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with status 0: neither "killed" nor "no process reported in" is known."""
    run.manifest.write_text(run.manifest.read_text()[:40])
    shutil.rmtree(run.rank(0).root)
    run.node("node0").root.mkdir(parents=True)
    run.node("node0").events.write_text(json.dumps({"type": "job_end", "wall_ns": 1}) + "\n")
    assert main(["list", str(run.root.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == "damaged"
    assert main(["verdict", str(run.root), "--all"]) == 0
    out = capsys.readouterr().out
    assert "run.json is damaged" in " ".join(out.split())
    assert "no process of the job reported in" not in out
    assert "killed" not in out
