"""`haiprof mcp`, asked by the client of the real SDK over stdio."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from haiprof.cli.mcp import token_count

RUNS = Path(__file__).parents[1] / "data" / "runs"
Calls = list[tuple[str, dict[str, Any]]]
pytestmark = pytest.mark.slow


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    for name in ("two_ranks", "two_ranks_one_slow", "two_ranks_traced", "traced", "rank_dies"):
        shutil.copytree(RUNS / name, tmp_path / name)
    return tmp_path


def ask(log_dir: Path, calls: Calls) -> list[dict[str, Any]]:
    """The answers of `haiprof mcp` to the client of the real SDK."""
    sdk = pytest.importorskip("mcp", reason="the MCP SDK is not installed: haiprof[mcp]")

    async def converse() -> list[dict[str, Any]]:
        words = ["-m", "haiprof", "mcp", "--log-dir", str(log_dir)]
        package = str(Path(__file__).parents[2])
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


def test_client_finds_the_slow_line_of_a_rank_and_what_its_removal_gains(log_dir: Path) -> None:
    run = {"run": "two_ranks_one_slow"}
    listed, verdict, ledger = ask(log_dir, [("runs", {}), ("verdict", run), ("ledger", run)])
    assert "two_ranks_one_slow" in [each["name"] for each in rows(listed["answer"]["runs"])]
    cause = next(c for c in rows(verdict["answer"]["causes"]) if c["ranks"] == [1])
    assert cause["at"] == ["train.py:15 Batches.__getitem__"]
    assert cause["ranks"] == [1]
    accounts = rows(ledger["answer"]["accounts"])
    first = next(each for each in accounts if each["account"] == cause["account"])
    step_ms = ledger["answer"]["step"]["mean_ms"]
    assert step_ms - first["gain_ms"] == pytest.approx(cause["step_without_it_ms"], rel=1e-2)
    (one,) = ask(log_dir, [("ledger", {**run, "account": first["account"]})])
    assert one["answer"]["callers"] == ["train.py:25 train", "train.py:34 <module>"]
    assert "num_workers" in one["answer"]["causes"][0]["remedy"]


def test_every_tool_answers_within_its_tokens_and_changes_no_recording(log_dir: Path) -> None:
    before = recording(log_dir)
    run, traces = {"run": "two_ranks_one_slow"}, {"run": "traced"}
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
    unanswerable: Calls = [
        ("verdict", {"run": "absent"}), ("ledger", {"run": "two_ranks", "account": "ffffff"}),
        ("sql", {"run": "two_ranks", "statement": "select * from nowhere"}),
        ("sql", {"run": "two_ranks", "statement": "select * from read_csv('/etc/passwd')"}),
        ("trace", {"run": "two_ranks", "question": "report"}),
        ("trace", {"run": "traced", "question": "tables", "detail": "counter-traces"}),
        ("lines", {"run": "s3://bucket/run"}), ("lines", {"run": "two_ranks", "phase": "nap"}),
    ]  # fmt: skip
    answers = ask(log_dir, calls + unanswerable)
    found, refused = answers[: len(calls)], answers[len(calls) :]
    assert [call for call, answer in zip(calls, found, strict=True) if "answer" not in answer] == []
    short, long = found[-2:]
    assert short["answer"]["row_count"] == long["answer"]["row_count"] == 300
    assert len(short["answer"]["rows"]) + short["left_out"]["rows"] == 50
    assert len(long["answer"]["rows"]) == 250
    assert "died first" in found[5]["answer"]["headline"]
    assert all(set(each) == {"cannot_answer", "do"} for each in refused)
    assert all(each["cannot_answer"].startswith("because ") and each["do"] for each in refused)
    assert recording(log_dir) == before


def recording(log_dir: Path) -> dict[str, bytes]:
    """Every file of the runs but what haiprof derives."""
    return {str(path): path.read_bytes() for path in sorted(log_dir.rglob("*"))
            if path.is_file() and "report" not in path.relative_to(log_dir).parts}  # fmt: skip
