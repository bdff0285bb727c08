"""What the launcher does when it notices something: claims, notes, says, and starts a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from haiprof.agent.node_agent import Agent
from haiprof.agent.reactions import PAUSE_S, Reactor
from haiprof.agent.step_watch import Alarm, Watch
from haiprof.base.errors import UsageError
from haiprof.base.options import Options, merge_options, parse_value
from haiprof.run_analysis.reactions import Reaction, reactions
from haiprof.run_analysis.run_files import open_run
from haiprof.run_format.layout import RunPaths

SUSPECT = {"rank": 3, "reason": "it has begun 4 collectives", "doing": "a.py:1", "certain": True}
HANG = Alarm(
    trigger="hang", rank=0, step=7, since_mono_ns=time.monotonic_ns(), reason="no step for 320 s",
    numbers={"silent_ns": 320e9, "limit_ns": 300e9},
)  # fmt: skip
SLOW = Alarm(
    trigger="slow", rank=2, step=412, since_mono_ns=time.monotonic_ns(),
    reason="step 412 on became 27 % slower", numbers={"before_ns": 41e6, "after_ns": 52.3e6},
)  # fmt: skip


class Told(Watch):
    """A watch that finds what it is told to find."""

    def __init__(self) -> None:
        self.next: list[Alarm] = []
        self.suspensions = []

    def look(self, node: object) -> list[Alarm]:
        found, self.next = self.next, []
        return found


class Node:
    """One node's reactor, with a command that prints what it is told to print."""

    def __init__(self, run: RunPaths, host: str, answer: Any, **options: Any) -> None:
        run.node(host).root.mkdir(parents=True, exist_ok=True)
        self.watch, self.commands = Told(), [""]
        self.commands.clear()
        self._answer = answer
        self.reactor = Reactor(run, host, Options(**options), self._start, self.watch)

    def _start(self, command: str, words: Sequence[str], output: int) -> subprocess.Popen[bytes]:
        self.commands.append(" ".join((command, *words)))
        answer = self._answer
        code = answer if isinstance(answer, str) else f"print({json.dumps(answer)!r})"
        return subprocess.Popen([sys.executable, "-c", code], stdout=output)

    def notice(self, *alarms: Alarm) -> None:
        self.watch.next = list(alarms)
        self.reactor._look_at = 0.0
        self.reactor.tick(Agent(self.reactor.run, Options()))

    def settle(self) -> None:
        for _ in range(1200):
            if self.reactor._action is None:
                return
            time.sleep(0.05)
            self.notice()
        raise AssertionError("the command does not end")


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    (tmp_path / "run.json").write_text("{}")
    return RunPaths(tmp_path)


def found(run: RunPaths) -> list[Reaction]:
    return reactions(open_run(run.root))


@pytest.mark.parametrize("saving", [(), (3,)])
def test_hang_is_looked_at_and_the_result_is_kept(
    run: RunPaths, saving: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    answer = {
        "ranks": [{"rank": 3}], "path": "s.json", "moves": False, "saving": saving,
        "suspects": [SUSPECT],
    }  # fmt: skip
    node = Node(run, "a", answer)
    node.notice(HANG)
    node.settle()
    assert node.commands == ["snapshot --json"]
    (hang,) = found(run)
    assert (hang.trigger, hang.step, hang.state, hang.path) == ("hang", 7, "done", "s.json")
    assert hang.saving == saving
    accused = [] if saving else [3]
    assert [suspect.rank for suspect in hang.suspects] == accused
    said = "no step for 320 s: rank 3 holds the job up" in capfd.readouterr().err
    assert said == bool(accused)
    assert run.control.stat().st_mode & 0o077 == 0


def test_trace_of_a_reaction_records_what_the_options_say(run: RunPaths) -> None:
    options = {"trace_stacks": True, "trace_memory": True, "trace_steps": 3, "quiet": True}
    node = Node(run, "a", {}, react="trace", **options)
    node.notice(SLOW)
    assert node.commands == ["trace-now --json --steps 3 --stacks --memory"]
    node.reactor.close()


@pytest.mark.parametrize(
    ("react", "commands"),
    [
        ("snapshot", ["snapshot --json"]),
        ("trace", ["trace-now --json --steps 5"]),
        ("both", ["snapshot --json", "trace-now --json --steps 5"]),
    ],
)
def test_react_says_what_is_done_and_the_rest_is_noted(
    run: RunPaths, react: str, commands: list[str]
) -> None:
    node = Node(run, "a", {"window": 0, "ranks": [], "suspects": []}, react=react)
    node.notice(HANG)
    node.settle()
    node.notice(SLOW)
    node.settle()
    assert node.commands == commands
    assert sorted(reaction.trigger for reaction in found(run)) == ["hang", "slow"]


def test_two_nodes_react_once_and_again_after_a_pause_but_not_a_third_time(run: RunPaths) -> None:
    nodes = [Node(run, host, {"suspects": []}) for host in "ab"]
    for _ in range(3):
        for node in nodes:
            node.notice(HANG)
            node.settle()
        for claim in run.control.glob("reaction-*"):
            os.utime(claim, (time.time() - 2 * PAUSE_S, time.time() - 2 * PAUSE_S))
    assert [len(node.commands) for node in nodes] == [2, 0]


@pytest.mark.parametrize("answer", ["raise SystemExit(2)", "print('no JSON')", "print('[1]')"])
def test_command_that_fails_is_noted(run: RunPaths, answer: str) -> None:
    node = Node(run, "a", answer)
    node.notice(HANG)
    node.settle()
    (hang,) = found(run)
    assert hang.state == "failed"
    assert hang.failure is not None


def test_end_of_the_job_ends_the_command(run: RunPaths) -> None:
    node = Node(run, "a", "import time; time.sleep(60)")
    node.notice(HANG)
    node.reactor.close()
    (hang,) = found(run)
    assert (hang.state, hang.failure) == ("failed", "the job ended before")


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        (("slow-limit", "20%"), "slow_limit", 0.2),
        (("slow-limit", "0.5"), "slow_limit", 0.5),
        (("hang-limit", "28m"), "hang_limit", (1680.0, 5.0)),
        (("hang-limit", "10"), "hang_limit", (10.0, 5.0)),
        (("hang-limit", "8x"), "hang_limit", (0.0, 8.0)),
    ],
)
def test_limits_are_read(text: tuple[str, str], field: str, value: object) -> None:
    layer = dict([parse_value(*text, origin="here")])
    assert getattr(merge_options(layer), field) == value


@pytest.mark.parametrize(
    "text",
    [
        ("react", "yes"), ("slow-limit", "0"), ("slow-limit", "nan"), ("hang-limit", "1x"),
        ("hang-limit", "0.1"), ("hang-limit", "-5"), ("hang-limit", "inf"), ("react-times", "-1"),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_are_refused(text: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match=text[0]):
        merge_options(dict([parse_value(*text, origin=f"--{text[0]}")]))
