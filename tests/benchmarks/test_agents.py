"""`benchmarks/agents`: clients over a real session with haiprof, and what an answer is worth."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "benchmarks/agents"
TASKS = json.loads((AGENTS / "tasks.json").read_text())
TRIVIAL = """
import json, sys
question = json.loads(input())
assert question["protocol"] == "haiprof-agents.1" and question["question"], question
assert {"verdict", "ledger", "source"} <= {tool["name"] for tool in question["tools"]}
def call(number, tool, **arguments):
    message = {"type": "call", "id": number, "tool": tool, "arguments": arguments}
    print(json.dumps(message), flush=True)
    said = json.loads(input())
    assert said["id"] == number
    return said
assert call(1, "source", nonsense=1)["type"] == "error"
first = call(2, "source", first=1, last=1)["text"]
verdict = json.loads(call(3, "verdict")["text"])["answer"]
print(json.dumps({"type": "answer", "causes": [{"line": first, "position": verdict["headline"]}]}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of a slow loader, at line 15 of its program."""
    run = "two_ranks_one_slow"
    shutil.copytree(ROOT / "tests/data/runs" / run, tmp_path / "logs" / run)
    (tmp_path / "train.py").write_text("import torch\n")
    return tmp_path


def ask(folder: Path, *words: str) -> dict[str, Any]:
    pytest.importorskip("mcp", reason="the MCP SDK is not installed: haiprof[mcp]")
    command = [sys.executable, str(AGENTS / "bench.py"), "--ask", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_scripted_client_finds_the_line_and_the_gain(folder: Path) -> None:
    answer = ask(folder, "--tools", "haiprof")
    (cause,) = answer["causes"]
    assert (cause["line"], cause["position"], cause["ranks"]) == ("train.py:15", "input", [1])
    assert 0.05 < cause["gain"] < 1
    assert answer["calls"] == 3
    assert answer["tokens"] > 500


@pytest.mark.slow
def test_external_client_speaks_json_lines(folder: Path) -> None:
    client = folder / "client.py"
    client.write_text(TRIVIAL)
    answer = ask(folder, "--tools", "haiprof", "--client", f"{sys.executable} {client}")
    assert answer["causes"][0]["line"] == "1 import torch"
    assert "rank 1" in answer["causes"][0]["position"]
    assert answer["calls"] == 3


def judge(seed: int, *causes: dict[str, Any]) -> dict[str, Any]:
    """By the task of a seed; the bench's modules import each other by their bare names."""
    sys.path.insert(0, str(AGENTS))
    before = set(sys.modules)
    try:
        bench = importlib.import_module("bench")
        (task,) = [each for each in TASKS if each["seed"] == seed]
        found: dict[str, Any] = bench.judge(task, list(causes))
    finally:
        folders = (str(AGENTS), str(ROOT / "benchmarks/faults"))
        sys.path[:] = [each for each in sys.path if each not in folders]
        for name in set(sys.modules) - before:  # their names are anybody's: `score`, `run`
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(folders):
                del sys.modules[name]
    return found


def test_answers_are_judged_by_cause_line_gain_and_false_claims() -> None:
    line = {"line": "train.py:235"}
    right = {"cause": True, "line": True, "gain": True, "false": 0}
    assert judge(5004, {**line, "gain": 0.24}) == right
    assert judge(5004, {**line, "gain": 0.5}) == {**right, "gain": False}
    assert judge(5004, line) == {**right, "gain": False}
    by_account = {"position": "input", "activity": "wait: sleep", "line": None, "gain": 0.2}
    assert judge(5004, by_account) == {**right, "line": False}
    wrong = judge(5004, {"line": "train.py:1", "gain": 0.22})
    assert wrong == {"cause": False, "line": False, "gain": False, "false": 1}
    assert judge(5004) == {"cause": False, "line": False, "gain": False, "false": 0}


def test_on_a_healthy_job_every_large_cause_is_a_false_claim() -> None:
    assert judge(5001)["false"] == 0
    assert judge(5001, {"line": "train.py:1", "gain": 0.02})["false"] == 0
    assert judge(5001, {"line": "train.py:1", "gain": 0.3}, {"line": "train.py:2"})["false"] == 2


def test_tasks_are_20_and_do_not_give_the_answer_away() -> None:
    assert [task["healthy"] for task in TASKS].count(True) == 6
    assert len(TASKS) == 20
    for task in TASKS:
        words = [task["kind"], *task.get("cause", {}).get("lines", ())]
        assert not [word for word in words if word in task["question"]]
        if not task["healthy"]:
            assert task["gain_low"] <= task["gain"] <= task["gain_high"]
