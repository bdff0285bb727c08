"""Which nodes a log directory's verdicts and preflights named, and as what."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer
from haiprof.base.safe_files import make_folder
from haiprof.base.units import NS_PER_S
from haiprof.cli.app import run_command
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.named_nodes import keep_preflight, read_named_nodes
from haiprof.diagnosis.preflight import judge_preflight
from haiprof.diagnosis.restart_advice import advise
from haiprof.diagnosis.verdict import as_document
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.writer import write_json
from tests.unit.analysis.recorded import CLOCK
from tests.unit.diagnosis.test_preflight import measured
from tests.unit.diagnosis.test_reactions import death
from tests.unit.report.many_ranks import write_flight, write_many


def write_uneven(log_dir: Path, name: str, *, second: int = 0, host: str = "n") -> RunPaths:
    """Eight ranks on each of two nodes; two of the first one hold the others up."""
    run = RunPaths(log_dir / name)
    write_many(run.root, ranks=16, steps=120, samples=20, host=host)
    write_flight(run.root, ranks=16, late_rank=5, late_ns=20_000_000)
    start_ns = CLOCK.wall_ns + second * NS_PER_S
    ended = replace(read_manifest(run), end_wall_ns=start_ns + NS_PER_S, exit_status=0)
    write_manifest(run, replace(ended, start_wall_ns=start_ns))
    return run


def keep_verdict(run: RunPaths, **changes: object) -> dict[str, Any]:
    document = as_document(diagnose(Analyzer(run.root))) | changes
    make_folder(run.report, below=run.root)
    write_json(run.verdict_json, document, below=run.root)
    return document


def slow_preflight(log_dir: Path, second: int, *, node: int = 0) -> None:
    ranks = healthy()
    ranks[8 * node]["rates"]["cpu_loops_per_s"] /= 3
    keep_preflight(judge_preflight(ranks), log_dir, CLOCK.wall_ns + second * NS_PER_S)


def test_nodes_are_counted_by_role_over_runs_and_preflights(tmp_path: Path) -> None:
    for number in range(3):
        keep_verdict(write_uneven(tmp_path, f"run-{number}", second=10 * number))
    died = write_uneven(tmp_path, "run-3", second=30, host="m")
    deaths = [death("killed", "m0001", run=run) for run in ("run-2", "run-3")]
    advice = asdict(advise(deaths, frozenset({"m0000", "m0001"})))
    keep_verdict(died, findings=[], advice=advice)
    write_uneven(tmp_path, "run-4", second=40)  # without a verdict
    slow_preflight(tmp_path, 5)
    found = read_named_nodes(tmp_path)
    assert [node.host for node in found.nodes] == ["n0000", "m0001"]
    slow, dead = found.nodes
    assert (slow.named_run_count, slow.run_count) == (3, 3)
    assert [(n.role, n.what, n.source) for n in slow.namings] == [
        ("finding", "ranks_uneven", "run-0"),
        ("preflight", "cpu_loops_per_s", "preflight"),
        ("finding", "ranks_uneven", "run-1"),
        ("finding", "ranks_uneven", "run-2"),
    ]
    assert [(n.role, n.what) for n in dead.namings] == [
        ("death", "killed"), ("left out", "same_node"),
    ]  # fmt: skip
    assert (dead.named_run_count, dead.run_count) == (1, 1)
    assert (found.run_count, found.node_count, found.preflight_count) == (4, 4, 1)
    assert found.unjudged == ("run-4",)


def test_deaths_by_the_users_own_code_name_no_node(tmp_path: Path) -> None:
    run = write_uneven(tmp_path, "run-0")
    advice = asdict(
        advise([death("exception", "n0001", run="run-0")], frozenset({"n0000", "n0001"}))
    )
    keep_verdict(run, findings=[], advice=advice)
    assert read_named_nodes(tmp_path).nodes == ()


def test_finding_about_a_node_that_failed_the_last_preflight_says_so(tmp_path: Path) -> None:
    slow_preflight(tmp_path, -20)
    run = write_uneven(tmp_path, "run-0")
    (found,) = (f for f in diagnose(Analyzer(run.root)).findings if f.rule == "ranks_uneven")
    assert found.nodes == ("n0000",)
    assert "the last preflight before this run had named n0000 (cpu_loops_per_s)" in found.remedy
    keep_preflight(judge_preflight(healthy()), tmp_path, CLOCK.wall_ns - 10 * NS_PER_S)
    slow_preflight(tmp_path, 10)  # after it began
    (found,) = (f for f in diagnose(Analyzer(run.root)).findings if f.rule == "ranks_uneven")
    assert "preflight before" not in found.remedy


def healthy() -> list[dict[str, Any]]:
    return [{**own, "host": f"n000{own['host'][1:]}"} for own in measured(16, per_node=8)]


def test_one_node_is_never_named_as_there_is_no_other(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    write_many(run.root, ranks=8, steps=120, samples=20)
    write_flight(run.root, ranks=8, late_rank=5, late_ns=20_000_000)
    assert all(finding["nodes"] == () for finding in keep_verdict(run)["findings"])
    assert read_named_nodes(tmp_path).nodes == ()


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1, "suspects": 3}', '{"version": 9}'])
def test_damaged_preflights_and_verdicts_name_nobody(tmp_path: Path, text: str) -> None:
    run = write_uneven(tmp_path, "run-0")
    make_folder(run.report, below=run.root)
    run.verdict_json.write_text(text)
    make_folder(tmp_path / "preflight", below=tmp_path)
    (tmp_path / "preflight" / "17.json").write_text(text)
    assert read_named_nodes(tmp_path).nodes == ()


def test_list_shows_nodes_and_runs_of_one_job_with_their_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [keep_verdict(write_uneven(tmp_path, f"run-{n}", second=n)) for n in range(2)]
    other = write_uneven(tmp_path, "other", second=5)
    write_manifest(other, replace(read_manifest(other), command=["python", "train.py", "--big"]))
    slow_preflight(tmp_path, 5)
    assert run_command(["ls", str(tmp_path), "--nodes"]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 nodes named by 2 verdicts and 1 preflight" in out
    assert "2 x finding ranks_uneven, 1 x preflight cpu_loops_per_s" in " ".join(out.split())
    assert "1 run without a verdict kept at the end" in out
    run_command(["ls", str(tmp_path), "--nodes", "--json"])
    assert json.loads(capsys.readouterr().out)["nodes"][0]["host"] == "n0000"
    run_command(["ls", str(tmp_path), "--json", "--job", str(tmp_path / "run-0")])
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [Path(each["path"]).name for each in runs] == ["run-0", "run-1"]
    assert [each["step_ns"] for each in runs] == [each["step_ns"] for each in known]
