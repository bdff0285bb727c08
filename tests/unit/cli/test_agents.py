"""What agents use: the MCP server by the SDK's own client over stdio, the skill, Markdown."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from haiprof.cli import main
from haiprof.cli.app import command_parameters
from haiprof.cli.command_line import Opt
from haiprof.cli.mcp import fit_answer, in_ms, token_count
from haiprof.cli.names import resolve
from haiprof.cli.skill import SKILL

RUNS = Path(__file__).parents[2] / "data" / "runs"
Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    for name in ("two_ranks", "two_ranks_one_slow", "two_ranks_traced", "rank_dies"):
        shutil.copytree(RUNS / name, tmp_path / name)
    return tmp_path


def ask(log_dir: Path, calls: Calls) -> list[dict[str, Any]]:
    """The answers of `haiprof mcp` to the client of the real SDK."""
    sdk = pytest.importorskip("mcp", reason="the MCP SDK is not installed: haiprof[mcp]")

    async def converse() -> list[dict[str, Any]]:
        words = ["-m", "haiprof", "mcp", "--log-dir", str(log_dir)]
        package = str(Path(__file__).parents[3])
        path = ":".join([package, *(each for each in sys.path if each)])
        server = sdk.StdioServerParameters(
            command=sys.executable, args=words, env={"PYTHONPATH": path}, cwd=log_dir
        )
        found = []
        async with sdk.Client(sdk.stdio_client(server)) as client:
            listed = (await client.list_tools()).tools
            assert all(tool.annotations.read_only_hint for tool in listed)
            for name, arguments in calls:
                text = (await client.call_tool(name, arguments)).content[0].text
                assert token_count(text) <= arguments.get("tokens", 2000), (name, arguments)
                found.append(json.loads(text))
        return found

    return asyncio.run(converse())


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


@pytest.mark.slow
def test_client_finds_the_slow_line_of_a_rank_and_what_its_removal_gains(log_dir: Path) -> None:
    run = {"run": "two_ranks_one_slow"}
    listed, verdict, ledger = ask(log_dir, [("runs", {}), ("verdict", run), ("ledger", run)])
    assert "two_ranks_one_slow" in [each["name"] for each in rows(listed["answer"]["runs"])]
    cause = rows(verdict["answer"]["causes"])[0]
    assert cause["at"] == ["train.py:15 Batches.__getitem__"]
    assert cause["ranks"] == [1]
    first = rows(ledger["answer"]["accounts"])[0]
    assert first["account"] == cause["account"]
    step_ms = ledger["answer"]["step"]["mean_ms"]
    assert step_ms - first["gain_ms"] == pytest.approx(cause["step_without_it_ms"], rel=1e-2)
    (one,) = ask(log_dir, [("ledger", {**run, "account": first["account"]})])
    assert one["answer"]["callers"] == ["train.py:25 train", "train.py:34 <module>"]
    assert "num_workers" in one["answer"]["causes"][0]["remedy"]


@pytest.mark.slow
def test_every_tool_answers_within_its_tokens_and_changes_no_recording(log_dir: Path) -> None:
    before = recording(log_dir)
    run, traces = {"run": "two_ranks_one_slow"}, {"run": "two_ranks_traced"}
    statement = "select * from steps"
    calls: Calls = [
        ("lines", run), ("ranks", run), ("ranks", {**run, "rank": 1}),
        ("compare", {"before": "two_ranks", "after": "two_ranks_one_slow"}),
        ("verdict", {"run": "two_ranks_traced/traces"}), ("verdict", {"run": "rank_dies"}),
        *(("trace", {**traces, "question": question}) for question in
          ("report", "tables", "functions", "modules", "efficiency", "critical-path", "what-if",
           "memory", "check")),
        ("sql", run), ("sql", {**run, "statement": statement}),
        ("sql", {**run, "statement": statement, "limit": 250, "tokens": 30_000}),
    ]  # fmt: skip
    found = ask(log_dir, calls)
    assert [call for call, answer in zip(calls, found, strict=True) if "answer" not in answer] == []
    short, long = found[-2:]
    assert short["answer"]["row_count"] == long["answer"]["row_count"] == 300
    assert len(short["answer"]["rows"]) + short["left_out"]["rows"] == 50
    assert len(long["answer"]["rows"]) == 250
    assert "died first" in found[5]["answer"]["headline"]
    assert recording(log_dir) == before


@pytest.mark.slow
def test_what_cannot_be_answered_has_one_shape(log_dir: Path) -> None:
    found = ask(log_dir, [
        ("verdict", {"run": "absent"}), ("ledger", {"run": "two_ranks", "account": "ffffff"}),
        ("sql", {"run": "two_ranks", "statement": "select * from nowhere"}),
        ("sql", {"run": "two_ranks", "statement": "select * from read_csv('/etc/passwd')"}),
        ("trace", {"run": "two_ranks", "question": "report"}),
        ("trace", {"run": "traced", "question": "tables", "detail": "counter-traces"}),
        ("lines", {"run": "s3://bucket/run"}), ("lines", {"run": "two_ranks", "phase": "nap"}),
    ])  # fmt: skip
    assert all(set(each) == {"cannot_answer", "do"} for each in found)
    assert all(each["cannot_answer"].startswith("because ") and each["do"] for each in found)


def recording(log_dir: Path) -> dict[str, bytes]:
    """Every file of the runs but what haiprof derives."""
    return {str(path): path.read_bytes() for path in sorted(log_dir.rglob("*"))
            if path.is_file() and "report" not in path.relative_to(log_dir).parts}  # fmt: skip


def test_long_answer_is_cut_and_says_what_is_missing() -> None:
    found = {"rows": [{"name": f"kernel_{n}", "time": n / 7} for n in range(5000)]}
    answer = json.loads(fit_answer(found, 500))
    assert len(answer["answer"]["rows"]["rows"]) + answer["left_out"]["rows"] == 5000


def test_answer_that_cannot_be_cut_is_refused_with_what_it_needs() -> None:
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


def test_verdict_as_markdown_has_cause_gain_and_what_to_do(
    log_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verdict", str(log_dir / "two_ranks_one_slow"), "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("## two\\_ranks\\_one\\_slow: rank 1 alone: dataloader-bound")
    assert "| --- | --- | --- | --- | --- |" in lines
    (cause,) = (line for line in lines if line.startswith("| critical |"))
    assert cause.count(" | ") == 4
    assert "38.6 ms (36.3 ms to 41.3 ms) | train.py:15 Batches." in cause
    assert main(["verdict", str(log_dir / "rank_dies"), "--format", "markdown"]) == 0
    assert "ValueError: shard 17 is damaged" in capsys.readouterr().out


def test_comparison_as_markdown_has_a_table_of_accounts(
    log_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(log_dir / name) for name in ("two_ranks", "two_ranks_one_slow")]
    assert main(["compare", *runs, "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("## inconclusive: too noisy (the interval is -21.3 % to +193.7 %)")
    assert any("Batches.\\_\\_getitem\\_\\_" in line and "+10.5 ms" in line for line in lines)
    traces = [str(log_dir / "two_ranks_traced" / "traces")] * 2
    assert main(["compare", *traces, "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("```text\n")
