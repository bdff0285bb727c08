"""What agents use: answers of so many tokens, the skill, Markdown; tests/process has the server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from haiprof.cli import main
from haiprof.cli.app import command_parameters
from haiprof.cli.command_line import Opt
from haiprof.cli.mcp import fit_answer, in_ms
from haiprof.cli.names import resolve
from haiprof.cli.skill import SKILL
from tests.commands import Run

RUNS = Path(__file__).parents[2] / "data" / "runs"


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    for name in ("two_ranks", "two_ranks_one_slow", "two_ranks_traced", "rank_dies"):
        shutil.copytree(RUNS / name, tmp_path / name)
    return tmp_path


def test_long_answer_is_cut_and_says_what_is_missing() -> None:
    found = {"rows": [{"name": f"kernel_{n}", "time": n / 7} for n in range(5000)]}
    answer = json.loads(fit_answer(found, 500))
    assert len(answer["answer"]["rows"]["rows"]) + answer["left_out"]["rows"] == 5000
    names = [f"column_{n}" for n in range(40)]
    table = {"columns": names, "rows": [list(range(40)) for _ in range(100)]}
    answer = json.loads(fit_answer(table, 2000))
    assert {len(row) for row in answer["answer"]["rows"]} == {40}
    assert len(answer["answer"]["columns"]) == 40
    assert len(answer["answer"]["rows"]) + answer["left_out"]["rows"] == 100
    answer = json.loads(fit_answer({f"key_{n}": n for n in range(5000)}, 500))
    assert answer["cannot_answer"].startswith("because the answer has more than 500 tokens")


def test_durations_are_in_ms_and_points_in_time_stay() -> None:
    found = in_ms({"step_ns": 1_500_000, "start_wall_ns": 1795624969726053750, "late_ns": None,
                   "split_ns": {"forward": 2e6, "input": None}})  # fmt: skip
    assert found == {"step_ms": 1.5, "start_wall_ns": 1795624969726053750, "late_ns": None,
                     "split_ns": {"forward": 2e6, "input": None}}  # fmt: skip


def test_server_without_the_sdk_is_one_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    assert main(["mcp"]) == 6
    assert capsys.readouterr().err.splitlines() == [
        "haiprof: error: haiprof mcp needs the MCP SDK (mcp, version 2 or newer)",
        "haiprof: hint: pip install 'haiprof[mcp]'",
    ]


def test_skill_names_only_commands_and_options_that_exist(tmp_path: Path) -> None:
    assert main(["skill", str(tmp_path)]) == 0
    text = (tmp_path / "haiprof" / "SKILL.md").read_text()
    assert text == SKILL
    assert text.startswith("---\nname: haiprof\ndescription: ")
    lines = re.findall(r"^    haiprof (.+)$", text, re.MULTILINE) + re.findall(
        r"`haiprof ([^`]+)`", text
    )
    for line in lines:
        words = shlex.split(line, comments=True)
        command = resolve(words)
        if command is None:
            assert words[0] in ("train.py", "torchrun", "--trace")
            continue
        flags = {flag for each in command_parameters(command[0])
                 if isinstance(each.declared, Opt) for flag in each.declared.flags}  # fmt: skip
        assert {word for word in command[1] if word.startswith("-")} <= flags
    assert main(["skill", str(tmp_path)]) == 2  # another's SKILL.md stays


def test_verdict_as_markdown_has_cause_gain_and_what_to_do(log_dir: Path, run: Run) -> None:
    lines = run("verdict", log_dir / "two_ranks_one_slow", "--format", "markdown").out.splitlines()
    assert lines[0].startswith("## two\\_ranks\\_one\\_slow: rank 1 alone: batches are made")
    assert "| --- | --- | --- | --- | --- |" in lines
    (cause,) = (line for line in lines if line.startswith("| critical | rank 1 alone: batches"))
    assert cause.count(" | ") == 4
    assert "38.6 ms (36.3 ms to 41.3 ms) | train.py:15 Batches." in cause
    assert (
        "ValueError: shard 17 is damaged"
        in run("verdict", log_dir / "rank_dies", "--format", "markdown").out
    )


def test_comparison_as_markdown_has_a_table_of_accounts(log_dir: Path, run: Run) -> None:
    runs = [str(log_dir / name) for name in ("two_ranks", "two_ranks_one_slow")]
    lines = run("compare", *runs, "--format", "markdown").out.splitlines()
    assert lines[0] == (
        "## 10.5 ms a step more at train.py:15 Batches.\\_\\_getitem\\_\\_, input, native code; "
        "the whole step: inconclusive: too noisy (the change lies between -21.3 % and +193.7 %)"
    )
    assert any("Batches.\\_\\_getitem\\_\\_" in line and "+10.5 ms" in line for line in lines)
    traces = [str(log_dir / "two_ranks_traced" / "traces")] * 2
    assert run("compare", *traces, "--format", "markdown").out.startswith("```text\n")


def test_lines_take_a_rank_beside_the_run(log_dir: Path, run: Run) -> None:
    path = str(log_dir / "two_ranks")
    named = run("verdict", "lines", path, "--rank", "1", "--json").out
    for words in (["lines", path, "1"], ["lines", "1", path], [path, "lines", "1"]):
        assert run("verdict", *words, "--json").out == named
    ran = run("verdict", "lines", path, "7", status=5)
    assert "the run has no rank 7" in ran.err
    ran = run("verdict", "lines", log_dir / "two_ranks", "--rank", "7", status=5)
    assert "the run has no rank 7" in ran.err
