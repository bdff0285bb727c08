"""Requests travel from the run directory to real rank processes, and their replies back."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from haiprof.agent.node_agent import Relay
from haiprof.run_format.control import (
    MESSAGE_LIMIT_BYTES,
    Request,
    control_socket,
    new_request,
    post_request,
    read_replies,
)
from haiprof.run_format.layout import RunPaths
from tests.process.live import within

HOST = socket.gethostname()
RANK = """
import os, sys, time
from pathlib import Path
from haiprof.in_job.commands import Commands
from haiprof.run_format.layout import RunPaths
notes = []
def echo(request_id, arguments):
    if arguments.get("boom"):
        raise ValueError("boom")
    if arguments.get("later"):
        return None
    return {"state": "done", "said": arguments.get("word", "") * arguments.get("times", 1)}
commands = Commands(RunPaths(Path(sys.argv[1])), {"echo": echo}, notes.append)
commands.start({"rank": int(sys.argv[2]), "attempt": int(sys.argv[3])})
if len(sys.argv) > 4:  # a child that outlives its parent must not hold the parent's line
    while commands._line is None:
        time.sleep(0.01)
    if os.fork() == 0:
        commands.forget()
        time.sleep(2)
        os._exit(0)
for line in sys.stdin:
    print(commands.reply(line.strip(), {"state": "done", "said": "later"}), flush=True)
print(notes)
"""


class Node:
    """A run directory with a relay, and rank processes."""

    def __init__(self, folder: Path) -> None:
        self.run = RunPaths(folder)
        folder.mkdir()
        self.relay = Relay(self.run, HOST)
        self.ranks: list[subprocess.Popen[str]] = []

    def start_rank(self, rank: int, attempt: int = 0, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK, str(self.run.root), str(rank), str(attempt), *more]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ranks.append(process)
        self.until(lambda: any(own.rank == rank for own in self.relay.live_ranks()))
        return process

    def until(self, condition: Callable[[], Any]) -> Any:
        def ticked() -> Any:
            self.relay.tick()
            return condition()

        return within(60, ticked)

    def ask(
        self, kind: str = "echo", ranks: tuple[int, ...] | None = None, **arguments: Any
    ) -> str:
        request = new_request(kind, arguments, valid_s=30, ranks=ranks)
        post_request(self.run, request)
        return request.id

    def replies(self, request_id: str, count: int) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.until(
            lambda: (
                len(read_replies(self.run, request_id)) >= count
                and read_replies(self.run, request_id)
            )
        )
        return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "run")
    node.relay.start()
    yield node
    node.relay.stop()
    for process in node.ranks:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One whose rank 0 answers."""
    node = Node(tmp_path_factory.mktemp("answering") / "run")
    node.relay.start()
    node.start_rank(0)
    yield node
    node.relay.stop()
    node.ranks[0].kill()
    node.ranks[0].communicate()


def test_ranks_answer_what_they_are_asked_and_no_other_does(node: Node) -> None:
    first, _ = node.start_rank(0), node.start_rank(1, 2)
    asked = node.ask(ranks=(1,), word="you")
    replies = node.replies(node.ask(word="hello"), 2)
    assert {name: reply["said"] for name, reply in replies.items()} == {
        "0": "hello",
        "1.2": "hello",
    }
    assert replies["0"] == {
        "rank": 0, "host": HOST, "pid": first.pid, "state": "done", "said": "hello",
    }  # fmt: skip
    assert list(read_replies(node.run, asked)) == ["1.2"]


def test_rank_that_dies_while_it_is_asked_keeps_the_request_from_no_other(node: Node) -> None:
    dying, _ = node.start_rank(0), node.start_rank(1)
    dying.kill()
    dying.wait()
    node.relay._read = lambda peer: None  # type: ignore[method-assign]  # it died after that
    node.ask(word="hello")
    node.relay.tick()
    del node.relay._read
    node.until(lambda: [own.name for own in node.relay.live_ranks()] == ["1"])
    [folder] = node.run.control_replies.iterdir()
    assert node.replies(folder.name, 1)["1"]["said"] == "hello"


def test_reply_may_follow_later_from_another_thread(answering: Node) -> None:
    asked = answering.ask(later=True)
    answering.relay.tick()
    stdin = answering.ranks[0].stdin
    assert stdin is not None
    stdin.write(asked + "\n")
    stdin.flush()
    assert answering.replies(asked, 1)["0"]["said"] == "later"


def test_handler_that_fails_is_a_failed_reply_and_the_next_request_works(answering: Node) -> None:
    failed = answering.replies(answering.ask(boom=True), 1)["0"]
    assert (failed["state"], failed["reason"]) == ("failed", "ValueError: boom")
    refused = answering.replies(answering.ask("unheard-of"), 1)["0"]
    assert refused["state"] == "refused"
    assert "unheard-of" in refused["reason"]
    assert answering.replies(answering.ask(word="still here"), 1)["0"]["state"] == "done"


def test_answer_that_is_too_long_says_so(answering: Node) -> None:
    reply = answering.replies(answering.ask(word="x", times=MESSAGE_LIMIT_BYTES), 1)["0"]
    assert reply["reason"] == "the answer was too long"


def test_rank_that_died_is_forgotten_though_its_child_lives(node: Node) -> None:
    process = node.start_rank(0, 0, "fork")
    process.kill()
    node.until(lambda: not node.relay.peers)


def test_folders_are_their_owners_alone(node: Node) -> None:
    post_request(node.run, new_request("echo", valid_s=1))
    for folder in (node.run.control, node.run.control_requests, node.run.control_replies):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    node.run.control.chmod(0o777)
    other = Relay(node.run, "other-host")
    other.start()
    other.stop()
    assert stat.S_IMODE(node.run.control.stat().st_mode) == 0o700


def test_hostile_files_are_passed_over(answering: Node) -> None:
    answering.ask(word="first")
    for number, content in enumerate((
        b"", b"\0\1\2", b"[1]", b"{}", b"[" * 5000, b'{"id": "../../x", "kind": "echo"}',
        b'{"id": "a", "kind": 1, "arguments": {}, "expires_wall_ns": 1}',
        b'{"id": "a", "kind": "echo", "arguments": [], "expires_wall_ns": 9e99}',
        b"x" * (MESSAGE_LIMIT_BYTES + 1),
    )):  # fmt: skip
        (answering.run.control_requests / f"0-bad-{number}.json").write_bytes(content)
    (answering.run.control_requests / "sub.json").mkdir()
    assert answering.replies(answering.ask(word="fine"), 1)["0"]["said"] == "fine"


def test_request_that_is_too_old_is_not_carried_out(answering: Node) -> None:
    old = Request(id="old", kind="echo", expires_wall_ns=time.time_ns() - 1)
    post_request(answering.run, old)
    answering.replies(answering.ask(word="new"), 1)
    assert read_replies(answering.run, "old") == {}


def test_requests_from_before_the_agent_are_not_carried_out(tmp_path: Path) -> None:
    node = Node(tmp_path / "run")
    before = node.ask(word="before")
    node.relay.start()
    try:
        node.start_rank(0)
        node.replies(node.ask(word="after"), 1)
        assert read_replies(node.run, before) == {}
    finally:
        node.relay.stop()
        node.ranks[0].kill()
        node.ranks[0].communicate()


def test_hostile_packets_reach_nothing(answering: Node) -> None:
    asked = answering.ask(word="x")
    folder, path = control_socket(answering.run, HOST)
    liar = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    liar.connect(path)
    os.close(folder)
    for packet in (
        b"\xff\xfe", b"[]", b"[" * 5000, b'{"hello": {"rank": "../../etc", "attempt": 0}}',
        json.dumps({"id": asked, "state": "done"}).encode(),  # before it said who it is
        json.dumps({"id": "../../x", "state": "done"}).encode(),
    ):  # fmt: skip
        liar.send(packet)
    assert list(answering.replies(asked, 1)) == ["0"]
    liar.close()
    answering.until(lambda: len(answering.relay.peers) == 1)


def test_stopped_relay_leaves_no_socket_and_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    node = Node(tmp_path / ("long" * 60))
    node.relay.start()
    try:
        process = node.start_rank(0)
        assert node.replies(node.ask(word="hi"), 1)["0"]["said"] == "hi"
    finally:
        node.relay.stop()
    assert list(node.run.control.glob("*.sock")) == []
    out, _ = process.communicate("", timeout=60)
    assert out.strip() == "[]", "the end of the agent is nothing to note"


def test_rank_without_an_agent_notes_it_and_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    from haiprof.in_job import commands

    monkeypatch.setattr(commands, "RETRY_AFTER_S", (0.0, 0.01))
    notes: list[dict[str, Any]] = []
    commands.Commands(RunPaths(tmp_path), {}, notes.append).start({"rank": 0, "attempt": 0})
    within(90, lambda: notes)
    assert notes[0]["state"] == "unreachable"
    assert str(tmp_path) in notes[0]["reason"]


ENDS_AT_ONCE = """
import os, sys, time
from pathlib import Path
from haiprof.in_job.commands import Commands
from haiprof.in_job.spans import RingMemory, make_spans
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import OPTIMIZER
ring, spans = RingMemory(warm=True), make_spans()
spans.attach(ring.address)
spans.end(spans.begin(OPTIMIZER), OPTIMIZER)
commands = Commands(RunPaths(Path(sys.argv[1])), {}, print)
commands.start({"rank": 0, "attempt": 0}, ring=ring)
while commands._line is None:
    time.sleep(0.001)
os._exit(3)
"""


def test_what_a_rank_left_that_ended_between_two_ticks_is_kept(node: Node) -> None:
    folder = node.run.rank(0).events.parent
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, str(node.run.root)], check=False)
    node.relay.stop()
    (line,) = map(json.loads, node.run.rank(0).events.read_text().splitlines())
    assert (line["type"], line["optimizer_steps"]) == ("unclean_end", 1)
