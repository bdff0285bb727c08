"""Nodes without a shared file system: requests over TCP, and what hostile peers can do."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from haiprof.config import Options
from haiprof.errors import UsageError
from haiprof.jobs.ask import members
from haiprof.launch.agent import Agent
from haiprof.launch.reach import controller as controllers
from haiprof.launch.reach.controller import Controller
from haiprof.launch.reach.join import join
from haiprof.launch.reach.uplink import Uplink
from haiprof.launch.reach.wire import FRAME_LIMIT_BYTES, LENGTH, frame, make_token, read_token
from haiprof.launch.relay import Relay
from haiprof.launch.rundirs import create_run
from haiprof.rundir.control import new_request, post_request, read_replies
from tests.launch.test_relay import HOST, Node, within

TOKEN = "t" * 43


@pytest.fixture
def controller() -> Iterator[Controller]:
    controller = Controller("127.0.0.1", 0, TOKEN)
    controller.start()
    yield controller
    controller.stop()


@pytest.fixture
def nodes(tmp_path: Path, controller: Controller) -> Iterator[tuple[Node, Node]]:
    """Two nodes with run directories of their own; the first one is the controller's."""
    first, second = Node(tmp_path / "first"), Node(tmp_path / "second")
    for node in (first, second):
        node.relay.start()
    first.relay.controller = controller
    second.relay.uplink = Uplink(controller.address, TOKEN, "other")
    second.relay.uplink.start()
    within(90, lambda: controller.agent_count == 1)
    yield first, second
    for node in (second, first):
        node.relay.stop()
        for process in node.ranks:
            process.kill()
            process.communicate()


def both(first: Node, second: Node, condition: Any) -> Any:
    def ticked() -> Any:
        first.relay.tick()
        second.relay.tick()
        return condition()

    return within(60, ticked)


def test_request_reaches_ranks_whose_run_directory_is_elsewhere(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    first.start_rank(0)
    second.start_rank(1)
    known = both(first, second, lambda: [m for m in members(first.run) if m.rank == 1])
    assert known[0].pid == second.ranks[0].pid
    request = new_request("echo", {"word": "hi"}, valid_s=30)
    post_request(first.run, request)
    both(first, second, lambda: len(read_replies(first.run, request.id)) == 2)
    replies = read_replies(first.run, request.id)
    assert {name: reply["said"] for name, reply in replies.items()} == {"0": "hi", "1": "hi"}
    assert replies["1"]["run"] == str(second.run.root)
    assert read_replies(second.run, request.id) == {}


def test_agent_comes_back_when_its_connection_broke(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    second.start_rank(1)
    uplink, line = second.relay.uplink, first.relay.controller
    assert uplink is not None
    assert uplink._socket is not None
    assert line is not None
    uplink._socket.shutdown(socket.SHUT_RDWR)
    within(90, lambda: line.agent_count == 0)
    within(90, lambda: line.agent_count == 1)
    request = new_request("echo", {"word": "again"}, valid_s=30)
    post_request(first.run, request)
    both(first, second, lambda: read_replies(first.run, request.id))


def test_controller_that_does_not_read_holds_nobody_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        uplink = Uplink(server.getsockname(), TOKEN, "other")
        uplink.start()
        deaf, _ = server.accept()
        with deaf:
            reply = {"id": "x", "reply": {"text": "y" * 100_000}}
            within(90, lambda: uplink.send(reply))
            sender = threading.Thread(target=lambda: [uplink.send(reply) for _ in range(200)])
            sender.daemon = True
            sender.start()
            sender.join(20)
            assert not sender.is_alive()
            assert not uplink.send(reply)
            again, _ = server.accept()  # it begins anew: what was cut off is not gone on with
            again.close()
        uplink.stop()


def test_wrong_token_is_sent_away_and_hears_nothing(controller: Controller) -> None:
    liar = Uplink(controller.address, "x" * 43, "liar")
    liar.start()
    within(90, lambda: liar.error == "the controller has closed the connection")
    controller.broadcast({"id": "secret"})
    time.sleep(0.2)
    assert not liar.requests
    assert controller.agent_count == 0
    liar.stop()


@pytest.mark.parametrize(
    "packet",
    [
        b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4, LENGTH.pack(0), LENGTH.pack(3) + b"[1]",
        LENGTH.pack(4) + b"null", LENGTH.pack(5000) + b"[" * 5000, frame({"token": 7}),
        frame({"token": TOKEN[:-1]}), frame({}), os.urandom(4096),
    ],
)  # fmt: skip
def test_strangers_bytes_reach_nothing(controller: Controller, packet: bytes) -> None:
    with socket.create_connection(controller.address) as connection:
        connection.sendall(packet)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        connection.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert controller.agent_count == 0
    assert not controller.replies


def test_agent_that_floods_or_sends_too_much_is_cut_off(controller: Controller) -> None:
    for flood in (
        frame({"x": 1}) * (controllers.MESSAGES_PER_S * 3),
        LENGTH.pack(FRAME_LIMIT_BYTES + 1) + b"x",
    ):
        with socket.create_connection(controller.address) as connection:
            connection.sendall(frame({"token": TOKEN}))
            within(90, lambda: controller.agent_count == 1)
            with contextlib.suppress(OSError):
                connection.sendall(flood)
            within(90, lambda: controller.agent_count == 0)
    assert len(controller.replies) <= controllers.MESSAGES_PER_S + 10


@pytest.mark.parametrize(
    "message",
    [
        {"member": {"name": "../../x", "rank": 1}}, {"member": {"name": "1", "rank": "x"}},
        {"member": 7}, {"id": "../x", "reply": {"name": "1"}}, {"id": ["a"], "reply": {}},
        {"reply": {"name": "0/../../1"}}, {"member": {"name": "9" * 99}},
    ],
)  # fmt: skip
def test_hostile_messages_of_an_agent_write_nothing_outside(
    tmp_path: Path, controller: Controller, message: dict[str, Any]
) -> None:
    node = Node(tmp_path / "run")
    node.relay.start()
    node.relay.controller = controller
    before = {path for path in tmp_path.rglob("*") if "members" not in path.parts}
    controller.replies.append(message)
    node.relay.tick()
    assert {path for path in tmp_path.rglob("*") if "members" not in path.parts} == before
    assert all(member.rank >= 0 for member in members(node.run))
    node.relay.stop()


def test_token_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "reach.token"
    token = make_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_token(path) == read_token(path) == token
    path.chmod(0o640)
    with pytest.raises(UsageError, match="others may read"):
        read_token(path)
    with pytest.raises(UsageError, match=r"missing\.token"):
        read_token(tmp_path / "missing.token")


def test_one_launcher_listens_and_the_next_one_connects(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = tmp_path / "reach.token"
    first = join(f"127.0.0.1:{port}", token, "a")
    second = join(f"127.0.0.1:{port}", token, "b")
    try:
        assert isinstance(first, Controller)
        assert isinstance(second, Uplink)
        within(90, lambda: first.agent_count == 1)
        with pytest.raises(UsageError, match="cannot read the token"):
            join("192.0.2.1:9", tmp_path / "elsewhere.token", "c")
    finally:
        second.stop()
        first.stop()


def test_agent_without_a_token_samples_all_the_same_and_joins_when_it_is_there(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    log_dir = tmp_path / "logs"
    reach = f"127.0.0.1:{controller.address[1]}"
    run, _, _ = create_run(Options(log_dir=log_dir), command=["x"], name="x", environ={})
    agent = Agent(run, Options(log_dir=log_dir, reach=reach))
    try:
        agent.start()
        said = capsys.readouterr().err
        assert "cannot read the token" in said
        assert said.count("\n") == 1
        within(90, lambda: list(run.node(agent.host).root.glob("*.rec")))
        token = log_dir / "reach.token"
        token.touch(0o600)
        token.write_text(TOKEN)

        def joined() -> bool:
            agent.serve()
            return controller.agent_count == 1

        within(90, joined)
        assert capsys.readouterr().err == ""
    finally:
        agent.close()


def test_nothing_listens_without_the_option(tmp_path: Path) -> None:
    node = Node(tmp_path / "run")
    node.relay.start()
    listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True)
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
           if os.path.exists(f"/proc/self/fd/{fd}")}  # fmt: skip
    inodes = {line.split()[9] for line in listening.stdout.splitlines()[1:] if " 0A " in line}
    assert not {f"socket:[{inode}]" for inode in inodes} & own
    assert isinstance(node.relay, Relay)
    assert HOST
    node.relay.stop()
