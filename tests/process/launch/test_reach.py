"""Nodes without a shared file system: requests over TCP, and what hostile peers can do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from haiprof.agent.node_agent import Agent
from haiprof.agent.reach import Controller, Uplink, join, listen
from haiprof.base.errors import UsageError
from haiprof.base.options import Options
from haiprof.launch.run_directories import create_run
from haiprof.live.find import members
from haiprof.run_format.control import new_request, post_request, read_replies
from tests.process.launch.reach_peers import take_agent
from tests.process.launch.test_relay import Node
from tests.process.live import within

KEY = b"k" * 32


@pytest.fixture
def controller() -> Iterator[Controller]:
    controller = Controller(listen("127.0.0.1", 0), KEY)
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
    second.relay.uplink = Uplink(controller.address, KEY)
    second.relay.uplink.start()
    within(90, lambda: len(controller.agents) == 1)
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
    assert uplink._line is not None
    assert line is not None
    uplink.call(uplink._line.writer.transport.abort)
    within(90, lambda: len(line.agents) == 0)
    within(90, lambda: len(line.agents) == 1)
    request = new_request("echo", {"word": "again"}, valid_s=30)
    post_request(first.run, request)
    both(first, second, lambda: read_replies(first.run, request.id))


def test_controller_that_does_not_read_holds_nobody_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        uplink = Uplink(server.getsockname(), KEY)
        uplink.start()
        with take_agent(server, KEY).connection:
            reply = {"id": "x", "reply": {"text": "y" * 100_000}}
            within(90, lambda: uplink.send(reply))
            sender = threading.Thread(target=lambda: [uplink.send(reply) for _ in range(200)])
            sender.daemon = True
            sender.start()
            sender.join(20)
            assert not sender.is_alive()
            within(90, lambda: not uplink.send(reply))
            again, _ = server.accept()  # it begins anew: what was cut off is not gone on with
            again.close()
        uplink.stop()


def test_one_launcher_listens_and_the_next_one_connects(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = tmp_path / "reach.token"
    first = join(f"127.0.0.1:{port}", token)
    second = join(f"127.0.0.1:{port}", token)
    try:
        assert isinstance(first, Controller)
        assert isinstance(second, Uplink)
        within(90, lambda: len(first.agents) == 1)
        with pytest.raises(UsageError, match="cannot read the token"):
            join("192.0.2.1:9", tmp_path / "elsewhere.token")
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
        token.write_text(f"haiprof-reach-1:{KEY.hex()}\n")

        def joined() -> bool:
            agent.serve()
            return len(controller.agents) == 1

        within(90, joined)
        assert capsys.readouterr().err == ""
    finally:
        agent.close()
